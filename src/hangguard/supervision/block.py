"""The asynchronous block: ``async with`` gives an :class:`AsyncServer`, on asyncio and trio."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

import anyio

from hangguard.errors import LeftBehind, StoppedEarly
from hangguard.facts import (
    Attempt,
    Launch,
    Unseen,
)
from hangguard.observe.lane import in_time
from hangguard.store import RunFolder
from hangguard.supervision.control import FROM_OUTSIDE, answering
from hangguard.supervision.handle import AsyncServer
from hangguard.supervision.interrupts import bare, holding_interrupts
from hangguard.supervision.notes import Notes
from hangguard.supervision.run import Run
from hangguard.supervision.running import RunningAttempt
from hangguard.supervision.serve import Story, serve
from hangguard.supervision.stop_within import StopWithin

FOLDER_WITHIN = 10.0
"""Seconds that a start waits for the disk to make its folder; without one it has no log."""


class AsyncSupervision:
    """A server to be, entered once with ``async with``."""

    def __init__(self, run: Run, open_folder: Callable[[], RunFolder] | None = None) -> None:
        """``open_folder`` makes the folder of the run, once it begins; ``None``: it has what it has."""
        self._run = run
        self._open_folder = open_folder
        self._is_entered = False
        self._server: AsyncServer | None = None
        self._told: anyio.Event | None = None

    async def __aenter__(self) -> AsyncServer:
        """Start the server; return when it has answered.

        Raises :class:`~hangguard.errors.GaveUp` when no attempt became ready
        (:class:`~hangguard.errors.StoppedEarly`: somebody asked for the stop before), and
        :class:`~hangguard.errors.Refused` when nothing could be started.
        """
        if self._is_entered:
            raise entered_before()
        self._is_entered = True
        await self.make_folder()
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
        """Where this run keeps its files; ``None``: nowhere, no place could be written, or it has not begun."""
        return self._run.folder.path

    @property
    def now(self) -> RunningAttempt | None:
        """The attempt that runs, for those who show it; ``None`` before, between and after."""
        return self._server._story.now if self._server is not None else None  # noqa: SLF001 - the two are one

    async def make_folder(self) -> None:
        """Make the folder of this run, once: as soon as it begins, and not before. Never raises."""
        open_folder, self._open_folder = self._open_folder, None
        if open_folder is None:
            return
        try:
            folder = await in_time("run folder", open_folder, within=FOLDER_WITHIN)
        except (OSError, ValueError) as problem:
            folder = Unseen(str(problem))
        if isinstance(folder, Unseen):
            lost = (f"no folder could be made for this run ({folder.reason}): it has no log",)
            folder = replace(self._run.folder, lost=lost)
        self._run = replace(self._run, folder=folder, notes=Notes(folder))

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
