"""The asynchronous face: ``async with`` gives an :class:`AsyncServer`, on asyncio and trio."""

from __future__ import annotations

from types import TracebackType

import anyio

from hangguard.errors import LeftBehind, ServerLost
from hangguard.facts import AppliedChange, Attempt, Diagnosis, Launch, Release, Sample
from hangguard.supervision.announcer import Subscription
from hangguard.supervision.attempt import RunningAttempt, first_of
from hangguard.supervision.run import Run
from hangguard.supervision.serve import Story, serve


class AsyncServer:
    """A server that has answered. Handle it like a :class:`subprocess.Popen` that knows more.

    Made by ``async with supervise(…)``. The blocking twin is :class:`hangguard.Server`.
    """

    def __init__(self, story: Story) -> None:
        self._story = story
        self._failure: BaseException | None = None

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
        failed = [a for a in self._story.history if a.diagnosis.findings]
        return failed[-1].diagnosis if failed else Diagnosis()

    @property
    def pid(self) -> int | None:
        """The pid of the launched process; ``None`` between two attempts."""
        return self._story.now.guarded.pid if self._story.now is not None else None

    @property
    def returncode(self) -> int | None:
        """The exit code as :class:`subprocess.Popen` gives it; ``None`` while it runs, or if it cannot be known."""
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
        with anyio.fail_after(timeout):
            await self._story.over.wait()
        return self.returncode

    async def stop(self) -> Release | None:
        """Stop the server and everything of it; return the proof.

        Raises :class:`~hangguard.errors.LeftBehind` when something of it cannot be ended.
        """
        self._ask_to_stop(None)
        await self._story.over.wait()
        if self._failure is not None and not isinstance(self._failure, ServerLost):
            raise self._failure
        return self._story.history[-1].release

    async def restart(self) -> None:
        """Stop the server and start the same launch again; return when it has answered.

        Raises what a first start raises.
        """
        self._check()
        self._story.wishes.restart = True
        self._story.wishes.wake()
        asked = self._story.ready
        while self._story.ready is asked and not self._story.over.is_set():
            await anyio.sleep(0.02)
        await first_of(self._story.ready.wait, self._story.over.wait)
        self._check()

    async def sample(self) -> Sample:
        """Return the newest sample, at most about a second old. Raises what ended the server, if it is lost."""
        self._check()
        now = self._story.now
        if now is None or not now.samples:
            msg = "no sample was taken yet"
            raise RuntimeError(msg)
        return now.samples[-1]

    def events(self) -> Subscription:
        """Return the events from now on, as an asynchronous iterator that ends with the supervision."""
        self._check()
        return self._story.run.announcer.subscribe()

    # ------------------------------------------------------------------------------------ below

    def _ask_to_stop(self, grace: float | None) -> None:
        wishes = self._story.wishes
        wishes.stop_because = wishes.stop_because or "asked"
        if grace is not None:
            wishes.grace = grace
            self._hurry()
        wishes.wake()

    def _hurry(self) -> None:
        """End the grace of a stop that is under way, not its proof."""
        self._story.wishes.grace = 0.0
        if self._story.now is not None:
            self._story.now.guarded.hurry()

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


class AsyncSupervision:
    """A server to be, entered once with ``async with``."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._server: AsyncServer | None = None

    async def __aenter__(self) -> AsyncServer:
        """Start the server; return when it has answered.

        Raises :class:`~hangguard.errors.GaveUp` when no attempt became ready, :class:`~hangguard.errors.Refused`
        when nothing could be started.
        """
        if self._server is not None:
            msg = "this supervision was entered before: call supervise() again for another server"
            raise RuntimeError(msg)
        story = Story(self._run)
        self._server = AsyncServer(story)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._body = anyio.CancelScope()
        self._group.start_soon(self._tell_the_story, story)
        try:
            await first_of(story.ready.wait, story.over.wait)
        except BaseException:
            await self._leave()
            raise
        if self._server._failure is not None:  # noqa: SLF001 - the two are one
            await self._leave()
            raise self._server._failure  # noqa: SLF001
        self._body.__enter__()
        return self._server

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        """Stop the server, with proof. The body's exception goes on as it is.

        If the server was lost while the body ran, the body was cancelled, and its loss is raised instead.
        """
        assert self._server is not None
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
    def now(self) -> RunningAttempt | None:
        """The attempt that runs, for those who show it; ``None`` before, between and after."""
        return self._server._story.now if self._server is not None else None  # noqa: SLF001 - the two are one

    def log_path(self, attempt: int) -> str | None:
        """Return where the server's output of an attempt goes; ``None``: this run has no folder."""
        return self._run.folder.file(f"attempt-{attempt}.log")

    def hurry(self) -> None:
        """End the grace of a stop that is under way, not its proof. Safe from any thread."""
        if self._server is not None:
            self._server._hurry()  # noqa: SLF001 - the two are one

    def _left_behind(self) -> LeftBehind | None:
        history = self._server.history if self._server is not None else ()
        release = history[-1].release if history else None
        return LeftBehind(release) if release is not None and release.left_behind else None

    async def _leave(self) -> None:
        """End the story's task and wait for it; a task group of ours never wraps anybody's exception."""
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)

    async def _tell_the_story(self, story: Story) -> None:
        server = self._server
        assert server is not None
        try:
            await serve(story)
        except Exception as failure:  # noqa: BLE001 - handed to the caller, bare, by the two ends of the block
            server._failure = failure  # noqa: SLF001
            self._body.cancel()
        finally:
            story.over.set()
            with anyio.CancelScope(shield=True):
                await self._run.announcer.aclose()
