"""Let requests that are in flight finish before a stop: without a signal, and never without an end.

Both engines can hang in their own drain (SGLang has no limit there at all), so that they are not asked for it. Nor can
they be told to refuse new requests: whoever sends those must be told elsewhere.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import anyio

from hangguard.facts import Broken, Drained, Exited, Expired, Ready, Stuck
from hangguard.judge.in_flight import InFlight, look_again
from hangguard.supervision.events import Draining, Notice
from hangguard.supervision.running import PERIOD, PERIOD_AT_END, RunningAttempt
from hangguard.supervision.wishes import NO_DRAIN

End: TypeAlias = Literal["done", "time", "cut", "hung", "exited"]


async def drain(attempt: RunningAttempt) -> None:
    """Wait until nobody is in flight, as long as the wishes allow; note how that ended, also when cancelled.

    Does nothing unless a stop with a drain was asked for and the server is ready.
    """
    if not attempt.wishes.stop_because or not isinstance(attempt.settled, Ready):
        return
    if attempt.wishes.drain_until == NO_DRAIN:
        return
    waiting = _Wait(attempt)
    try:
        await waiting.until_over()
    finally:
        attempt.wishes.draining = None
        attempt.drained = waiting.result()


class _Wait:
    """One drain of one attempt."""

    def __init__(self, attempt: RunningAttempt) -> None:
        self._attempt = attempt
        self._began = attempt.run.world.clock()
        self._seen = InFlight()
        self._told: InFlight | None = None
        self._ending: End = "cut"

    def result(self) -> Drained:
        seconds = self._attempt.run.world.clock() - self._began
        return Drained(seconds=seconds, left=self._seen.left, by=self._seen.by, ending=self._ending)

    async def until_over(self) -> None:
        wishes = self._attempt.wishes
        self._tell_if_shortened()
        while (left := self._left()) > 0.0:
            with anyio.move_on_after(left) as wishes.draining:
                await self._look()
                if self._is_over():
                    return
                await self._pause()
        self._ending = "cut" if wishes.drain_until == NO_DRAIN else "time"

    def _left(self) -> float:
        """Return the seconds that are left: of the drain, and of what the whole stop may take."""
        wishes = self._attempt.wishes
        until = wishes.drain_until if wishes.within is None else wishes.within.drain_until(wishes.drain_until)
        return until - self._attempt.run.world.clock()

    def _tell_if_shortened(self) -> None:
        attempt, within = self._attempt, self._attempt.wishes.within
        wanted = attempt.wishes.drain_until - self._began
        if within is not None and self._left() < wanted - 0.1:
            text = within.says("drain", max(0.0, self._left()), round(wanted, 1))
            attempt.run.announcer.tell(Notice(t=self._began, attempt=attempt.number, text=text))

    async def _look(self) -> None:
        attempt = self._attempt
        await attempt.look(draining=True)
        self._seen = look_again(self._seen, attempt.samples[-1], worked_at=attempt.memory.serving.worked_at)
        told = self._told
        if told is None or (told.left, told.by) != (self._seen.left, self._seen.by):
            self._told = seen = self._seen
            event = Draining(
                t=attempt.run.world.clock(),
                attempt=attempt.number,
                left=seen.left,
                by=seen.by,
                at_most=max(0.0, self._left()),
            )
            attempt.run.announcer.tell(event)

    def _is_over(self) -> bool:
        verdict = self._attempt.memory.verdict
        if isinstance(verdict, (Exited, Stuck, Broken, Expired)):  # whoever waits there waits for nothing
            self._attempt.settle(verdict)
            self._ending = "exited" if isinstance(verdict, Exited) else "hung"
            return True
        if self._seen.is_over:
            self._ending = "done"
        return self._seen.is_over

    async def _pause(self) -> None:
        """Sleep until the next look; the end of the launched process ends it.

        In short turns: a hurry may come from a signal handler or another thread, and wakes nobody.
        """
        guarded, wishes = self._attempt.guarded, self._attempt.wishes
        soon = bool(self._seen.empty_looks) or guarded.exit is not None
        for _ in range(1 if soon else round(PERIOD / PERIOD_AT_END)):
            if wishes.drain_until == NO_DRAIN:
                return
            if guarded.exit is not None:
                await anyio.sleep(PERIOD_AT_END)
                return
            with anyio.move_on_after(PERIOD_AT_END):
                await guarded.wait_exit()
