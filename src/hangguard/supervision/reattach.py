"""A run that somebody else has started with hangguard: asked and told from outside, and left alone on leaving."""

from __future__ import annotations

import os
from types import TracebackType

from hangguard.errors import NoSuchRun, WrongProcess
from hangguard.facts import ReachedState, RunStatus, RunStopped, Unseen
from hangguard.observe.lane import in_time
from hangguard.supervision.by_guardian import ByGuardian, WatchedEvents
from hangguard.supervision.by_supervisor import BySupervisor, EventStream
from hangguard.supervision.living import FIND_WITHIN, LivingRun, find_living


class AsyncReattachedRun:
    """A run of another program. Leaving the block leaves it alone.

    Made by ``async with reattach(…)``. The blocking twin is :class:`hangguard.ReattachedRun`. Every question goes to
    the run's supervisor; where that is dead and its guardian keeps the server (``on_death="keep"``), the server is
    watched from here, and the guardian ends it when it is told.
    """

    def __init__(self, living: LivingRun, voice: BySupervisor | ByGuardian, status: RunStatus) -> None:
        self._living = living
        self._voice = voice
        self._status = status
        self._owner = os.getpid()

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._living.found.run_id

    @property
    def url(self) -> str:
        """Where the server answers, or would, when it was asked last; empty: its command does not tell."""
        return self._status.state.url

    @property
    def pid(self) -> int | None:
        """The pid of the launched process when it was asked last; ``None``: nothing was launched yet."""
        root = self._status.state.root
        return root[0] if root is not None else None

    async def status(self) -> RunStatus:
        """Return how it stands. Raises :class:`~hangguard.errors.NoAnswer` after 5 seconds without an answer."""
        self._check()
        self._status = await self._voice.status()
        return self._status

    def events(self) -> EventStream | WatchedEvents:
        """Return its events as plain values, as ``as_json()`` gives them: an asynchronous iterator.

        It begins when the first one is asked for, and ends with the run.
        """
        self._check()
        return self._voice.events()

    async def wait(self, for_: ReachedState = "exit", timeout: float | None = None) -> ReachedState:
        """Wait until it is ready, stuck, or over, whichever is asked for; return what was reached.

        That is another one where what was asked for cannot come any more: ``"exit"`` when the run is over, ``"stuck"``
        when somebody waits for ``"ready"`` and nobody acts on a hang. Raises :class:`TimeoutError` after ``timeout``
        seconds, and :class:`~hangguard.errors.NoAnswer` when its supervisor dies meanwhile.
        """
        self._check()
        if for_ not in ("ready", "stuck", "exit"):
            raise ValueError(f"wait(for_=) must be 'ready', 'stuck' or 'exit', not {for_!r}")
        return await self._voice.wait(for_, timeout)

    async def stop(
        self, *, drain: float | None = None, grace: float | None = None, within: float | None = None
    ) -> RunStopped:
        """Stop the server and everything of it, and end the run; return what that came to.

        ``drain``: seconds for which requests in flight may finish before; ``grace``: seconds between SIGTERM and
        SIGKILL; ``within``: seconds for all of it. ``None``: as the run itself has it. It goes on where nobody waits
        for it any more. A guardian alone has its own short grace, and refuses a drain with :class:`RuntimeError`.
        Raises :class:`TimeoutError` when it is not over in time.
        """
        self._check()
        return await self._voice.stop(drain, grace, within)

    async def restart(self) -> None:
        """Have the server stopped and the same launch started again; return when it has answered.

        Raises :class:`~hangguard.errors.GaveUp` when it does not become ready, and :class:`RuntimeError` when only a
        guardian is left.
        """
        self._check()
        await self._voice.restart()
        await self.status()

    def _check(self) -> None:
        if self._owner != os.getpid():
            raise WrongProcess(self._owner, os.getpid())


class AsyncReattachment:
    """A handle to be, entered once with ``async with``."""

    def __init__(self, run: str | None = None, run_dir: str | os.PathLike[str] | None = None) -> None:
        self._name = run
        self._run_dir = run_dir
        self._voice: BySupervisor | ByGuardian | None = None
        self._owner: int | None = None

    async def __aenter__(self) -> AsyncReattachedRun:
        """Find the run and ask how it stands.

        Raises :class:`~hangguard.errors.NoSuchRun` where there is none of that name,
        :class:`~hangguard.errors.RunOver` where nobody lives who could be asked or told, and
        :class:`~hangguard.errors.NoAnswer` where its supervisor lives and does not answer.
        """
        if self._owner is not None:
            raise RuntimeError("this was entered before: call reattach() again")
        self._owner = os.getpid()
        living = await in_time("run", lambda: find_living(self._name, self._run_dir), within=FIND_WITHIN)
        if isinstance(living, Unseen):
            raise NoSuchRun(f"The run {self._name or ''} cannot be looked at: {living.reason}")
        if living.by == "supervisor":
            self._voice = voice = BySupervisor(living.found, living.state)
            return AsyncReattachedRun(living, voice, await voice.status())
        kept = ByGuardian(living)
        await kept.begin()
        self._voice = kept
        return AsyncReattachedRun(living, kept, await kept.status())

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of it; nothing of the run is touched."""
        if self._owner != os.getpid():
            return
        if isinstance(self._voice, ByGuardian):
            await self._voice.aclose()
        elif self._voice is not None:
            self._voice.close()
