"""A run from outside, told by its supervisor over the control socket."""

from __future__ import annotations

from typing import Any, cast

import anyio

from hangguard.errors import GaveUp, NoAnswer
from hangguard.facts import FoundRun, ReachedState, RunState, RunStatus, RunStopped, Unseen
from hangguard.observe.lane import in_time
from hangguard.run_state import read_run, read_status
from hangguard.supervision.asking import ANSWER_WITHIN, Answers, asking, begin_asking
from hangguard.supervision.stream import Stream

STOP_WITHIN = 180.0
"""Seconds after which nobody waits for a stop any more: evidence, grace, kill and proof take 125 at most by default."""
MARGIN = 5.0


class BySupervisor:
    """Asks the supervisor: one connection for each question."""

    def __init__(self, found: FoundRun, state: RunState) -> None:
        self._found = found
        self._state = state
        self._streams: list[EventStream] = []

    async def status(self) -> RunStatus:
        """Return how it stands."""
        doubt = {"unreadable": True} if isinstance(self._found.state, Unseen) else None  # then it is written again
        async with asking(self._found, self._state.supervisor, "status", doubt) as answers:
            answer = await self._soon(answers)
        try:
            return read_status(answer.get("status"))
        except ValueError as problem:
            raise self._no_answer(f"what it says is not understood: {problem}") from problem

    def events(self) -> EventStream:
        """Return its events."""
        stream = EventStream(self._found, self._state)
        self._streams.append(stream)
        return stream

    async def wait(self, wanted: ReachedState, timeout: float | None) -> ReachedState:  # noqa: ASYNC109 - as Popen.wait
        """Wait until that is reached, or something that makes it impossible. Raises :class:`TimeoutError`."""
        with anyio.fail_after(timeout):
            async with asking(self._found, self._state.supervisor, "wait", {"for": wanted}) as answers:
                answer = await answers.next(None)
        if answer is None:
            await self._check_over()
            return "exit"
        if answer.get("what") not in {"ready", "stuck", "exit"}:
            raise self._no_answer("what it says is not understood")
        return cast("ReachedState", answer["what"])

    async def stop(self, drain: float | None, grace: float | None, within: float | None) -> RunStopped:
        """Stop it, and wait for the proof."""
        limit = within + MARGIN if within is not None else (drain or 0.0) + (grace or 0.0) + STOP_WITHIN
        fields = {"drain": drain, "grace": grace, "within": within}
        async with asking(self._found, self._state.supervisor, "stop", fields) as answers:
            await self._soon(answers)
            answer = await answers.next(limit)
        if answer is None:
            state = await self._check_over()
            return self._stopped({**_known_of(state), "released": "held" if state.left_behind else "unknown"})
        return self._stopped(answer)

    async def restart(self) -> None:
        """Start the same once more, and wait until it has answered."""
        async with asking(self._found, self._state.supervisor, "restart") as answers:
            await self._soon(answers)
            answer = await answers.next(None)  # bounded by its ready_within
        if answer is None:
            raise self._no_answer("it has hung up before the restart was over")
        if answer.get("say") != "ready":
            raise GaveUp(str(answer.get("problem")))

    def close(self) -> None:
        """Let go of all streams."""
        for stream in self._streams:
            stream.close()

    # ------------------------------------------------------------------------------------ below

    async def _soon(self, answers: Answers) -> dict[str, Any]:
        try:
            answer = await answers.next(ANSWER_WITHIN)
        except TimeoutError:
            raise self._no_answer(f"nothing within {ANSWER_WITHIN:g} s; it may be stopped") from None
        if answer is None:
            raise self._no_answer("it has hung up")
        return answer

    async def _check_over(self) -> RunState:
        """Return how it ended, after it has hung up; raise where it has not."""
        with anyio.move_on_after(ANSWER_WITHIN):
            while True:
                read = await in_time("state file", lambda: read_run(self._found.path), within=ANSWER_WITHIN)
                if not isinstance(read, Unseen) and isinstance(read.state, RunState) and read.state.stage == "over":
                    return read.state
                await anyio.sleep(0.1)
        raise self._no_answer("it has died, or hung up, and its run is not over; reattach to see who is left")

    def _stopped(self, answer: dict[str, Any]) -> RunStopped:
        code, released = answer.get("exit_code"), answer.get("released")
        return RunStopped(
            run_id=self._found.run_id,
            by="supervisor",
            released=cast("Any", released) if released in {"released", "held"} else "unknown",
            left_behind=tuple(map(str, answer.get("left_behind") or ())),
            exit_code=code if isinstance(code, int) else None,
            outcome=str(answer.get("outcome") or ""),
        )

    def _no_answer(self, problem: str) -> NoAnswer:
        return NoAnswer(self._found.run_id, self._state.supervisor[0], problem)


class EventStream(Stream[dict[str, Any]]):
    """The events of a run, as the plain values that ``as_json()`` gives; an asynchronous iterator.

    It begins when the first one is asked for, and ends with the run.
    """

    def __init__(self, found: FoundRun, state: RunState) -> None:
        self._found = found
        self._state = state
        self._answers: Answers | None = None
        self._over = False

    async def begin(self) -> None:
        """Let it begin now."""
        if self._answers is None and not self._over:
            self._answers = await begin_asking(self._found, self._state.supervisor, "events")
            await self._answers.next(ANSWER_WITHIN)  # says that it listens from here on

    async def next_or_none(self) -> dict[str, Any] | None:
        """Return the next event, or ``None`` when the run is over."""
        await self.begin()
        answers = self._answers
        answer = await answers.next(None) if answers is not None else None
        if answer is None or answer.get("say") != "event":
            self.close()
            return None
        return dict(answer["event"])

    def close(self) -> None:
        """Hang up."""
        self._over = True
        answers, self._answers = self._answers, None
        if answers is not None:
            answers.close()


def _known_of(state: RunState) -> dict[str, Any]:
    return {"left_behind": state.left_behind, "exit_code": state.exit_code, "outcome": state.outcome}
