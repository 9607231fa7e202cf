"""The asynchronous face: ``async with`` gives an :class:`AsyncServer`, on asyncio and trio."""

from __future__ import annotations

import math
import os
from types import TracebackType

import anyio

from hangguard.errors import LeftBehind, ServerLost, StoppedEarly, WrongProcess
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
from hangguard.supervision.control import FROM_OUTSIDE, answering
from hangguard.supervision.followed_log import LogLines
from hangguard.supervision.interrupts import bare, holding_interrupts
from hangguard.supervision.quiet import Quiet
from hangguard.supervision.run import Run
from hangguard.supervision.running import RunningAttempt
from hangguard.supervision.serve import Story, serve
from hangguard.supervision.stop_within import StopWithin
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


class AsyncSupervision:
    """A server to be, entered once with ``async with``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._server: AsyncServer | None = None
        self._told: anyio.Event | None = None

    async def __aenter__(self) -> AsyncServer:
        """Start the server; return when it has answered.

        Raises :class:`~hangguard.errors.GaveUp` when no attempt became ready
        (:class:`~hangguard.errors.StoppedEarly`: somebody asked for the stop before), and
        :class:`~hangguard.errors.Refused` when nothing could be started.
        """
        if self._server is not None:
            raise entered_before()
        story = Story(self._run)
        self._server = AsyncServer(story)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._body = anyio.CancelScope()
        self._group.start_soon(self._tell_the_story, story)
        try:
            await story.ready.wait()
        except BaseException:
            await self._leave()
            raise
        if self._server._failure is not None:  # noqa: SLF001 - the two are one
            await self._leave()
            raise self._server._failure  # noqa: SLF001
        if story.over.is_set():
            await self._leave()
            raise StoppedEarly("it was asked to stop, from outside, before it was ready", story.history)
        self._body.__enter__()
        self._entered_by = anyio.get_current_task().id
        return self._server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Stop the server, with proof. The body's exception goes on as it is.

        If the server was lost while the body ran, the body was cancelled, and its loss is raised instead.
        Nothing in a forked child.
        """
        assert self._server is not None
        if self._server._owner != os.getpid():  # noqa: SLF001 - the two are one
            return False
        if anyio.get_current_task().id != self._entered_by:
            await self._leave_elsewhere()
            raise left_elsewhere() from error
        # Our own scope absorbs the cancellation that the loss of the server sent into the body.
        absorbed = bool(self._body.__exit__(kind, error, trace))
        lost = self._server._failure  # noqa: SLF001
        await self._leave()
        failure = lost or self._server._failure or self._left_behind()  # noqa: SLF001
        if failure is not None and (error is None or absorbed):
            raise failure
        return absorbed

    @property
    def launch(self) -> Launch:
        """What was asked for."""
        return self._run.launch

    @property
    def history(self) -> tuple[Attempt, ...]:
        """Every attempt that is over, oldest first; also after the block."""
        return self._server.history if self._server is not None else ()

    @property
    def run_id(self) -> str:
        """The id of this run: the name of its folder, and what ``hangguard status`` takes."""
        return self._run.folder.run_id

    @property
    def folder(self) -> str | None:
        """Where this run keeps its files; ``None``: nowhere, no place could be written."""
        return self._run.folder.path

    @property
    def now(self) -> RunningAttempt | None:
        """The attempt that runs, for those who show it; ``None`` before, between and after."""
        return self._server._story.now if self._server is not None else None  # noqa: SLF001 - the two are one

    def log_path(self, attempt: int) -> str | None:
        """Return where the server's output of an attempt goes; ``None``: this run has no folder."""
        return self._run.folder.file(f"attempt-{attempt}.log")

    def ask_to_drain(self, seconds: float) -> bool:
        """Ask for a stop that lets requests finish first; say whether there is a server that serves any."""
        server = self._server
        if server is None or server._failure is not None or not server._story.ready.is_set():  # noqa: SLF001
            return False
        server._ask_to_stop(None, drain=seconds)  # noqa: SLF001 - the two are one
        return True

    def end_within(self, seconds: float) -> None:
        """Let every stop from now on be over within so many seconds: drain, grace, kill and proof."""
        if self._server is not None:
            story = self._server._story  # noqa: SLF001 - the two are one
            story.wishes.within = StopWithin(seconds=seconds, ends=self._run.world.clock() + seconds)

    def hurry(self) -> None:
        """End the drain and the grace of a stop that is under way, not its proof. Safe from any thread."""
        if self._server is not None:
            self._server._hurry()  # noqa: SLF001 - the two are one

    def _left_behind(self) -> LeftBehind | None:
        history = self._server.history if self._server is not None else ()
        release = history[-1].release if history else None
        return LeftBehind(release) if release is not None and release.left_behind else None

    async def _leave(self) -> None:
        """Let the story stop the server, and wait for the proof, whatever happens.

        Ctrl-C meanwhile ends the grace. It is held, or comes as asyncio's own cancellation, which passes every
        shield. Waited for in an event, not in the task group: that would wrap it.
        """
        interrupted: BaseException | None = None
        with holding_interrupts(self.hurry):
            self._group.cancel_scope.cancel()
            while self._told is not None and not self._told.is_set():
                try:
                    with anyio.CancelScope(shield=True):
                        await self._told.wait()
                except (KeyboardInterrupt, anyio.get_cancelled_exc_class()) as again:
                    interrupted = again
                    self.hurry()
            await self._group.__aexit__(None, None, None)
        if interrupted is not None:
            raise interrupted

    async def _leave_elsewhere(self) -> None:
        """Stop the server, with proof, from another task: the scopes can be left only where they were entered."""
        assert self._server is not None
        assert self._told is not None
        self._server.terminate()
        with anyio.CancelScope(shield=True):
            await self._told.wait()

    async def _tell_the_story(self, story: Story) -> None:
        server = self._server
        assert server is not None
        self._told = anyio.Event()
        try:
            async with answering(story, server) as control:
                try:
                    await serve(story)
                except BaseException as failure:  # raised bare by the two ends
                    if (known := bare(failure)) is None:
                        raise
                    server._failure = known  # noqa: SLF001
                    self._body.cancel()
                finally:
                    with anyio.CancelScope(shield=True):
                        outcome = _outcome(server._failure, story)  # noqa: SLF001
                        await self._run.notes.end(outcome)
                        await control.say_goodbye(outcome)
                        await self._run.announcer.aclose()
        finally:
            self._told.set()


def _outcome(failure: BaseException | None, story: Story) -> str:
    if failure is None:
        return "stopped as asked from outside" if story.wishes.stop_because == FROM_OUTSIDE else "stopped as asked"
    return f"{type(failure).__name__}: {failure}".partition("\n")[0]


def _seconds(drain: float | None) -> float:
    if drain is None:
        return 0.0
    is_number = isinstance(drain, (int, float)) and not isinstance(drain, bool)
    if not is_number or not 0.0 <= drain < math.inf:
        msg = f"stop(drain=) must be a number of seconds, zero or more and finite, not {drain!r}"
        raise ValueError(msg)
    return drain


def left_elsewhere() -> RuntimeError:
    """Return what leaving the block in another task raises."""
    return RuntimeError(
        "this block was entered in one task and left in another (an asynchronous fixture or generator, two cells of a "
        "notebook), which neither asyncio nor trio can do; the server is stopped. Use the blocking face instead: "
        "`with`, or start() and close()"
    )


def entered_before() -> RuntimeError:
    """Return what a second entering raises."""
    return RuntimeError("this supervision was entered before: call supervise() again for another server")
