"""One request to the supervisor of a run over its control socket, and its answers. Every wait has an end."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio

from hangguard.act import _membership
from hangguard.act._link import Descriptor, pidfd_of, poll_until
from hangguard.errors import NoAnswer
from hangguard.facts import FoundRun, Identity, Unseen
from hangguard.observe.lane import in_time
from hangguard.supervision.control_line import LONGEST_ANSWER, BadLineError, ControlLine
from hangguard.supervision.control_socket import connect_in
from hangguard.supervision.first_of import first_of

ANSWER_WITHIN = 5.0
"""Seconds for a connection, and for each answer that needs nothing but the asking. Its looks take less than that."""
AFTER_DEATH = 0.3
"""Seconds for what a supervisor had said when it died."""


@asynccontextmanager
async def asking(
    run: FoundRun, supervisor: Identity, do: str, fields: Mapping[str, object] | None = None
) -> AsyncIterator[Answers]:
    """Connect and ask; give the answers. Raises :class:`NoAnswer` when it cannot be asked."""
    answers = await begin_asking(run, supervisor, do, fields)
    try:
        yield answers
    finally:
        answers.close()


async def begin_asking(
    run: FoundRun, supervisor: Identity, do: str, fields: Mapping[str, object] | None = None
) -> Answers:
    """Connect and ask; return the answers, which must be closed."""
    ends = anyio.current_time() + ANSWER_WITHIN
    line = await _connected(run, supervisor, ends)
    answers = Answers(run.run_id, supervisor, line, pidfd_of(supervisor))
    try:
        with anyio.move_on_after(max(0.1, ends - anyio.current_time())):
            if await line.put(do=do, **(fields or {})):
                return answers
    except BaseException:
        answers.close()
        raise
    answers.close()
    raise NoAnswer(run.run_id, supervisor[0], "it did not take the request")


class Answers:
    """What a supervisor answers to one request."""

    def __init__(self, run_id: str, supervisor: Identity, line: ControlLine, pidfd: Descriptor | None) -> None:
        self._run_id = run_id
        self._supervisor = supervisor
        self._line = line
        self._pidfd = pidfd

    async def next(self, within: float | None = ANSWER_WITHIN) -> dict[str, Any] | None:
        """Return the next answer; ``None``: it has hung up, or died.

        Raises :class:`TimeoutError` after ``within`` seconds, and :class:`NoAnswer` for a refusal.
        """
        answers: list[dict[str, Any] | BadLineError | None] = []

        async def take() -> None:
            try:
                answers.append(await self._line.take())
            except BadLineError as bad:  # a task group would wrap it
                answers.append(bad)

        with anyio.fail_after(within):
            await first_of(take, self._until_dead)
        if not answers:  # it was the end of the supervisor
            with anyio.move_on_after(AFTER_DEATH):
                await take()
        answer = answers[0] if answers else None
        if isinstance(answer, BadLineError):
            raise NoAnswer(self._run_id, self._supervisor[0], f"what it says is not understood: {answer}")
        if answer is not None and answer.get("say") == "error":
            raise NoAnswer(self._run_id, self._supervisor[0], str(answer.get("problem"))[:500])
        return answer

    def close(self) -> None:
        """Hang up."""
        self._line.close()
        if self._pidfd is not None:
            self._pidfd.close()

    async def _until_dead(self) -> None:
        # A child that the supervising program has forked keeps the connection open when that dies.
        await until_dead(self._supervisor, self._pidfd)


async def until_dead(process: Identity, pidfd: Descriptor | None) -> None:
    """Wait for the end of a process; ``pidfd``: of it, where there are any. It may be a zombie then."""
    if pidfd is not None:
        await anyio.wait_readable(pidfd.number)
    else:
        await poll_until(lambda: not _membership.is_alive(process), every=0.5)


async def _connected(run: FoundRun, supervisor: Identity, ends: float) -> ControlLine:
    while True:
        left = max(0.1, ends - anyio.current_time())
        try:
            made = await in_time("control socket", lambda: connect_in(run.path, supervisor[0]), within=left)
        except (BlockingIOError, FileNotFoundError, ConnectionRefusedError) as not_now:
            problem = _NOT_NOW[type(not_now)]
        except OSError as refused:
            raise NoAnswer(run.run_id, supervisor[0], str(refused.strerror or refused)) from refused
        else:
            if not isinstance(made, Unseen):
                return ControlLine(made, longest=LONGEST_ANSWER)
            problem = made.reason
        if not _membership.is_alive(supervisor):
            raise NoAnswer(run.run_id, supervisor[0], "it has died")
        if anyio.current_time() >= ends:
            raise NoAnswer(run.run_id, supervisor[0], problem)
        await anyio.sleep(0.05)


_NOT_NOW: dict[type[OSError], str] = {
    BlockingIOError: "it accepts no connection",
    FileNotFoundError: "it has no control socket",
    ConnectionRefusedError: "nobody listens at its control socket",
}
