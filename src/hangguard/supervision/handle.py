"""The asynchronous handle on a server, which ``async with`` gives: its state, and what is asked of it."""

from __future__ import annotations

import math
import os

import anyio

from hangguard.errors import ServerLost, WrongProcess
from hangguard.facts import (
    AppliedChange,
    Attempt,
    Broken,
    Diagnosis,
    Exited,
    Expired,
    Launch,
    Release,
    Sample,
    Stuck,
)
from hangguard.supervision.announcer import Subscription
from hangguard.supervision.followed_log import LogLines
from hangguard.supervision.quiet import Quiet
from hangguard.supervision.serve import Story
from hangguard.supervision.wishes import NO_DRAIN


class AsyncServer:
    """A server that has answered. Handle it like a :class:`subprocess.Popen` that knows more.

    Made by ``async with supervise(…)``. The blocking twin is :class:`hangguard.Server`.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._failure: BaseException | None = None
        self._owner = os.getpid()

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self.launch.url

    @property
    def launch(self) -> Launch:
        """What really runs, or ran last."""
        return self.attempt.launch

    @property
    def changes(self) -> tuple[AppliedChange, ...]:
        """How what runs differs from what was asked for; empty: it does not."""
        return self.attempt.changes

    @property
    def attempt(self) -> Attempt:
        """A record of the attempt that runs, or ran last."""
        story = self._story
        return story.now.record() if story.now is not None else story.history[-1]

    @property
    def history(self) -> tuple[Attempt, ...]:
        """The attempts before this one, oldest first; after the end, all of them."""
        return self._story.history

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of the last attempt that did not go well."""
        failed = [a for a in self._story.history if isinstance(a.verdict, (Stuck, Broken, Exited, Expired))]
        return failed[-1].diagnosis if failed else Diagnosis()

    @property
    def pid(self) -> int | None:
        """The pid of the launched process; ``None`` between two attempts."""
        return self._story.now.guarded.pid if self._story.now is not None else None

    @property
    def returncode(self) -> int | None:
        """The exit code as :class:`subprocess.Popen` gives it; ``None`` while it runs, or if it cannot be known."""
        self._check_process()
        return self.attempt.exit_code

    def poll(self) -> int | None:
        """Return :attr:`returncode`."""
        return self.returncode

    def terminate(self) -> None:
        """Ask for the stop, with the usual grace, and do not wait for it."""
        self._ask_to_stop(None)

    def kill(self) -> None:
        """Ask for the stop without grace, and do not wait for it."""
        self._ask_to_stop(0.0)

    async def wait(self, timeout: float | None = None) -> int | None:  # noqa: ASYNC109 - as Popen.wait
        """Wait until the server has ended and was released; return its exit code.

        Raises :class:`TimeoutError` after ``timeout`` seconds.
        """
        self._check_process()
        with anyio.fail_after(timeout):
            await self._story.over.wait()
        return self.returncode

    async def stop(self, *, drain: float | None = None) -> Release | None:
        """Stop the server and everything of it; return the proof.

        ``drain``: seconds for which requests that are in flight may finish before. Nobody is signalled meanwhile, and
        new requests are still taken: send them elsewhere first. It ends at once when nobody is in flight, when the
        server hangs or ends, and with another stop without it, a cancellation of this call, or the end of the block.
        How it ended stands in ``attempt.drained``.

        Raises :class:`ValueError` for seconds that are negative or not finite, and
        :class:`~hangguard.errors.LeftBehind` when something of it cannot be ended.
        """
        self._ask_to_stop(None, drain=_seconds(drain))
        try:
            await self._story.over.wait()
        except BaseException:
            self._end_drain()  # whoever gives up waiting for the stop does not wait for requests either
            raise
        if self._failure is not None and not isinstance(self._failure, ServerLost):
            raise self._failure
        return self._story.history[-1].release

    async def restart(self) -> None:
        """Stop the server and start the same launch again; return when it has answered.

        Raises what a first start raises, and :class:`RuntimeError` when the server was stopped on request.
        """
        self._check()
        if self._story.ready.is_set():  # else a restart is under way: wait for the same
            self._story.ready = anyio.Event()
        ready = self._story.ready
        self._story.wishes.restart = True
        self._story.wishes.wake()
        if not self._story.over.is_set():
            await ready.wait()
        self._check()
        if self._story.over.is_set():
            msg = "the server was stopped: call supervise() again for another one"
            raise RuntimeError(msg)

    def quiet(self, *, at_most: float) -> Quiet:
        """Return a block in which stillness is wanted: sleep, pause, new weights. For ``with`` and ``async with``.

        Nothing is called a hang in it, for ``at_most`` seconds at the longest. Raises :class:`ValueError` for a time
        that is not above zero and finite.
        """
        self._check_process()
        return Quiet(self._story.wishes.quiet, at_most, self._story.run.world.clock)

    async def sample(self) -> Sample:
        """Return the newest sample, at most about a second old. Raises what ended the server, if it is lost."""
        self._check()
        now = self._story.now
        if now is None or not now.samples:
            over = self._story.over.is_set()
            raise RuntimeError("the server was stopped: nothing is looked at" if over else "no sample was taken yet")
        return now.samples[-1]

    def events(self) -> Subscription:
        """Return the events from now on, as an asynchronous iterator that ends with the supervision."""
        self._check()
        return self._story.run.announcer.subscribe()

    def log(self, *, follow: bool = True) -> LogLines:
        """Return what the server of the present attempt has written, line by line, as an asynchronous iterator.

        ``follow``: it goes on as the log grows and into the next attempt, and ends with the supervision; without, it
        ends where the log ends now. Raises :class:`RuntimeError` where this run has no log.
        """
        self._check_process()
        if self._story.run.folder.path is None:
            raise RuntimeError(f"there is no log: {'; '.join(self._story.run.folder.lost)}")
        return LogLines(self._story, follow=follow)

    # ------------------------------------------------------------------------------------ below

    def _ask_to_stop(self, grace: float | None, *, drain: float = 0.0) -> None:
        self._check_process()
        wishes = self._story.wishes
        until = self._story.run.world.clock() + drain if drain else NO_DRAIN
        wishes.drain_until = min(until, wishes.drain_until) if wishes.stop_because else until
        wishes.stop_because = wishes.stop_because or "asked"
        if grace is not None:
            wishes.grace = grace
            self._hurry()
        wishes.wake()

    def _end_drain(self) -> None:
        self._story.wishes.drain_until = NO_DRAIN
        self._story.wishes.wake()

    def _hurry(self) -> None:
        """End the drain and the grace of a stop that is under way, not its proof. Wakes nobody: for any thread."""
        self._story.wishes.drain_until = NO_DRAIN
        self._story.wishes.grace = 0.0
        if self._story.now is not None:
            self._story.now.guarded.hurry()

    def _check(self) -> None:
        self._check_process()
        if self._failure is not None:
            raise self._failure

    def _check_process(self) -> None:
        if self._owner != os.getpid():
            raise WrongProcess(self._owner, os.getpid())


def _seconds(drain: float | None) -> float:
    if drain is None:
        return 0.0
    is_number = isinstance(drain, (int, float)) and not isinstance(drain, bool)
    if not is_number or not 0.0 <= drain < math.inf:
        msg = f"stop(drain=) must be a number of seconds, zero or more and finite, not {drain!r}"
        raise ValueError(msg)
    return drain
