"""A run from outside whose supervisor is dead, and whose guardian keeps the server (``on_death="keep"``).

Nobody counts its requests and nobody starts it again. It is watched from here like a server that somebody else started,
and the guardian ends it when it is told.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import anyio

from hangguard.act import _membership
from hangguard.act._link import pidfd_of
from hangguard.act.guardians import tell_to_end
from hangguard.engines import ENGINES
from hangguard.errors import NoSuchServer, RunOver
from hangguard.facts import Identity, ReachedState, RunState, RunStatus, RunStopped, Unseen
from hangguard.observe.lane import in_time
from hangguard.run_state import name_for, write_state
from hangguard.store import RunFolder
from hangguard.supervision.announcer import Subscription
from hangguard.supervision.asking import until_dead
from hangguard.supervision.attach import AsyncAttachment, AsyncWatch, Attaching
from hangguard.supervision.living import LivingRun, living_members
from hangguard.supervision.standing import until_standing
from hangguard.supervision.stream import Stream

STOP_WITHIN = 60.0
"""Seconds for the guardian's stop: its grace of ``death_grace``, the kill, what resource trackers take."""
TELL_WITHIN = 5.0
NOBODY_COUNTS = "its supervisor is dead, and nobody else counts its requests: stop it without drain"


class ByGuardian:
    """Watches what the guardian keeps, and has it ended."""

    def __init__(self, living: LivingRun) -> None:
        self._living = living
        self._attachment: AsyncAttachment | None = None
        self._watch: AsyncWatch | None = None

    async def begin(self) -> None:
        """Watch its processes; where none is left that could be watched, the guardian alone is waited for."""
        state = self._living.state
        seen = await in_time("members", lambda: _who_to_watch(state), within=TELL_WITHIN)
        if isinstance(seen, Unseen) or seen is None:
            return
        known = {engine.name for engine in ENGINES}
        attachment = AsyncAttachment(
            Attaching(
                pid=seen[0],
                started=seen[1],
                url=state.url or None,
                engine=state.engine if state.engine in known else None,
            )
        )
        try:
            self._watch = await attachment.__aenter__()
        except NoSuchServer:  # it has ended since
            return
        self._attachment = attachment

    async def aclose(self) -> None:
        """Stop watching."""
        if self._attachment is not None:
            await self._attachment.__aexit__(None, None, None)

    async def status(self) -> RunStatus:
        """Return how it stands, as it is seen from here."""
        state, watch = self._living.state, self._watch
        note = "its supervisor is dead; its guardian keeps the server"
        if watch is None:
            return RunStatus(state=state, told_by="guardian", note=note)
        verdict = watch.verdict
        state = replace(
            state, verdict=verdict.verdict, kind=verdict.kind, phase=verdict.phase, why=verdict.why, files=(),
            shm_before=(),
        )  # fmt: skip
        return RunStatus(
            state=state, told_by="guardian", still_for=round(verdict.still_for, 2), unseen=verdict.unseen, note=note
        )

    def events(self) -> WatchedEvents:
        """Return what is seen of it from now on."""
        return WatchedEvents(self._watch.events() if self._watch is not None else None)

    async def wait(self, wanted: ReachedState, timeout: float | None) -> ReachedState:  # noqa: ASYNC109 - as Popen.wait
        """Wait until that is reached, or something that makes it impossible. Raises :class:`TimeoutError`."""
        with anyio.fail_after(timeout):
            return await self._until(wanted)

    async def _until(self, wanted: ReachedState) -> ReachedState:
        if self._watch is not None:
            reached = await until_standing(self._watch, wanted)
            if reached != "exit":
                return reached
        await self._until_guardian_ends()
        return "exit"

    async def stop(self, drain: float | None, grace: float | None, within: float | None) -> RunStopped:
        """Have the guardian end it, with its own grace; see who is left."""
        del grace
        if drain:
            raise RuntimeError(NOBODY_COUNTS)
        living, guardian = self._living, self._living.guardian
        why = await in_time("guardian", lambda: tell_to_end(guardian, living.found.path), within=TELL_WITHIN)
        if isinstance(why, Unseen):
            why = why.reason
        if why and _membership.is_alive(guardian):
            raise RunOver(living.state.run_id, f"nothing was signalled: {why}", name=name_for(living.found.path))
        with anyio.fail_after(within or STOP_WITHIN):
            await self._until_guardian_ends()
        members = frozenset(self._watch._members) if self._watch is not None else frozenset()  # noqa: SLF001
        left = living_members(living.state, members)
        outcome = "ended by its guardian, as asked from outside, after its supervisor had died"
        over = replace(living.state, stage="over", outcome=outcome, left_behind=tuple(f"pid {pid}" for pid in left))
        folder = RunFolder(run_id=over.run_id, path=living.found.path)
        await in_time("state file", lambda: _note(folder, over), within=TELL_WITHIN)
        return RunStopped(run_id=over.run_id, by="guardian", left_behind=over.left_behind, outcome=outcome)

    async def restart(self) -> None:
        """Refuse: nobody is there to do it."""
        raise RuntimeError("its supervisor is dead, so nobody starts it again: stop it, and run it anew")

    async def _until_guardian_ends(self) -> None:
        guardian = self._living.guardian
        pidfd = pidfd_of(guardian)
        if pidfd is None and not _membership.is_alive(guardian):
            return
        try:
            await until_dead(guardian, pidfd)
        finally:
            if pidfd is not None:
                pidfd.close()


class WatchedEvents(Stream[dict[str, Any]]):
    """What is seen of a run whose supervisor is dead, as plain values; an asynchronous iterator."""

    def __init__(self, subscription: Subscription | None) -> None:
        self._subscription = subscription

    async def begin(self) -> None:
        """Nothing is to be done: it has begun."""

    async def next_or_none(self) -> dict[str, Any] | None:
        """Return the next event, or ``None`` when nothing is watched any more."""
        event = await self._subscription.next_or_none() if self._subscription is not None else None
        return event.as_json() if event is not None else None


def _who_to_watch(state: RunState) -> Identity | None:
    """Return the launched process, or another living member where a launcher has forked and gone."""
    first = (state.root,) if state.root is not None else ()
    return next((member for member in (*first, *state.members) if _membership.is_alive(member)), None)


def _note(folder: RunFolder, state: RunState) -> None:
    try:
        write_state(folder, state)
    except OSError:  # a full disk: the kernel says who lives, whatever the file says
        return
