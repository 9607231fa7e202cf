"""What one call of ``supervise`` was asked for, and the seams through which it touches the world."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeAlias

from hangguard.act.spawn import LastWords, Stopped, guarded
from hangguard.act.stop import prove_release
from hangguard.elsewhere import Elsewhere
from hangguard.engines.base import Engine
from hangguard.facts import Ask, Exit, Fallback, Gpu, HeldFile, Launch, Limits, Listener, Sample, Unseen
from hangguard.learned import Stretches
from hangguard.observe import Observer, Target
from hangguard.observe.lane import in_time
from hangguard.observe.left_elsewhere import look_elsewhere
from hangguard.observe.memory_stacks import PythonThreads
from hangguard.observe.port_left import PortLeft, look_at_port
from hangguard.observe.ports import who_listens
from hangguard.observe.sysv import Segment, list_segments
from hangguard.observe.unix_sockets import who_listens_at
from hangguard.store import RunFolder
from hangguard.supervision.announcer import Announcer
from hangguard.supervision.lessons import note_good_start, patience_learned
from hangguard.supervision.notes import Notes
from hangguard.supervision.retry import Retry

LOOK_WITHIN = 5.0

RUN_ID = "HANGGUARD_RUN_ID"
"""The variable by which a server is known as a run's when supervisor and guardian have died."""

OnHang: TypeAlias = Literal["act", "report"]
OnDeath: TypeAlias = Literal["stop", "keep"]
ReadyCheck: TypeAlias = "str | Callable[[str], object] | None"


class Guard(Protocol):
    """What an attempt asks of the server's guardian: :class:`~hangguard.act.spawn.Guarded`, or a scripted one."""

    @property
    def pid(self) -> int:
        """The launched process."""

    @property
    def started(self) -> int:
        """Its start time in clock ticks since boot."""

    @property
    def log_id(self) -> tuple[int, int] | None:
        """(device, inode) of the log that the guardian opened."""

    @property
    def guardian_pid(self) -> int:
        """The process that started it."""

    @property
    def guardian_started(self) -> int:
        """Its start time in clock ticks since boot."""

    @property
    def guardian_alive(self) -> bool:
        """Whether that one still lives."""

    @property
    def exit(self) -> Exit | None:
        """The end of the launched process."""

    @property
    def members(self) -> frozenset[tuple[int, int]]:
        """Everybody who was ever seen to belong to it: (pid, start time)."""

    @property
    def files(self) -> tuple[HeldFile, ...]:
        """What members were seen to have in /dev/shm and as named sockets, and could leave."""

    @property
    def shm_before(self) -> frozenset[tuple[int, int]] | None:
        """(device, inode) of what lay in /dev/shm before the launch, or is somebody else's too; ``None``: unseen."""

    def remember(self, identities: Iterable[tuple[int, int]]) -> None:
        """Note members that a sample has seen."""

    def remember_files(self, files: Iterable[HeldFile], others: Iterable[tuple[int, int]] = ()) -> None:
        """Note what members were seen to have in /dev/shm and as named sockets, and what there is not theirs alone."""

    async def wait_exit(self) -> Exit:
        """Wait until the launched process has ended."""
        ...

    async def read_stacks(self, member: tuple[int, int], *, within: float) -> PythonThreads:
        """Return the Python stacks of one member, read by whoever may."""
        ...

    async def last_words(self, members: Iterable[tuple[int, int]], *, within: float) -> tuple[LastWords, ...]:
        """Have members dump their stacks into the log and end: the last act before a kill."""
        ...

    async def stop(self, *, grace: float) -> Stopped:
        """Stop everything of it; asked again, a stop that was left goes on."""
        ...

    def hurry(self) -> None:
        """End the grace of a stop. Safe from any thread."""


class Watcher(Protocol):
    """What an attempt asks of its observer."""

    async def take_sample(self, ask: Ask = ...) -> Sample:
        """Look at every source once."""
        ...


async def look_who_listens(launch: Launch) -> Listener | Unseen | None:
    """Return who listens where this launch would, on its port or its socket, in a thread of our own."""
    path = launch.socket_path

    def look() -> Listener | None:
        if path is not None:
            return who_listens_at(path, cwd=launch.cwd)
        return who_listens(launch.port, host=launch.host)

    try:
        return await in_time("port", look, within=LOOK_WITHIN)
    except OSError as problem:
        return Unseen(str(problem))


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The seams: tests put scripted ones in their place."""

    clock: Callable[[], float] = time.monotonic
    guarded: Callable[..., AbstractAsyncContextManager[Guard]] = guarded
    observe: Callable[[Target], AbstractAsyncContextManager[Watcher]] = Observer
    who_listens: Callable[[Launch], Awaitable[Listener | Unseen | None]] = look_who_listens
    look_at_port: Callable[[Launch], Awaitable[PortLeft | Unseen | None]] = look_at_port
    prove_release: Callable[..., Awaitable[Any]] = prove_release
    list_segments: Callable[[], Awaitable[tuple[Segment, ...] | Unseen]] = list_segments
    look_elsewhere: Callable[[Launch], Awaitable[Elsewhere]] = look_elsewhere
    patience_learned: Callable[[Launch, tuple[Gpu, ...] | Unseen], Awaitable[Stretches]] = patience_learned
    note_good_start: Callable[[Launch, tuple[Gpu, ...] | Unseen, Stretches], Awaitable[None]] = note_good_start


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One supervision: everything that stays the same over its attempts."""

    launch: Launch
    engine: Engine
    limits: Limits
    retry: Retry
    fallbacks: tuple[Fallback, ...] = ()
    no_fallbacks: str = ""
    """Why there are none, in words."""
    retry_hangs: bool = False
    """Whether one unchanged retry of a hang is allowed that no fallback answers."""
    ready: ReadyCheck = None
    on_hang: OnHang = "act"
    on_death: OnDeath = "stop"
    pristine: bool = False
    log_bytes: int | None = None
    """What the log of one attempt may take of the disk; ``None``: no bound."""
    folder: RunFolder
    announcer: Announcer
    notes: Notes = field(default_factory=Notes)
    """The state file; by default there is none."""
    ras_port: int = 28028
    """Where NCCL's RAS thread shall answer. With ``pristine`` NCCL is not told."""
    world: World = field(default_factory=World)

    def environment(self, launch: Launch) -> dict[str, str]:
        """Return the environment that the server gets.

        Another run's id in it was inherited, from a terminal or a script within that run: whoever cleans that one would
        take this server for a part of it. So it never stays, also where nothing is added.
        """
        given = {name: value for name, value in launch.environment().items() if name != RUN_ID}
        if self.pristine:
            return given
        return {**additions(self.folder.run_id, self.engine, self.ras_port), **given}

    def ras_address(self, launch: Launch) -> tuple[str, int]:
        """Return where NCCL's own watch (RAS) answers, once there is a communicator: as the server was told."""
        host, _, port = self.environment(launch).get("NCCL_RAS_ADDR", "").rpartition(":")
        return (host.strip("[]") or "localhost", int(port)) if port.isdecimal() else RAS_DEFAULT


RAS_DEFAULT = ("localhost", 28028)
"""NCCL's own choice. All jobs of a machine share it, so answers are believed only of members."""


def additions(run_id: str, engine: Engine, ras_port: int) -> Mapping[str, str]:
    """Return what hangguard adds to the environment; what the caller set himself goes before, but for the run's id.

    They change no function of the server: the run's id, titles that leave the environment area alone
    (setproctitle), Python stacks on a fatal signal, unbuffered output, so that the log is current, and a port of its
    own for NCCL's RAS thread, which every NCCL since 2.24 has.
    """
    return {
        RUN_ID: run_id,
        "SPT_NOENV": "1",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
        "NCCL_RAS_ADDR": f"127.0.0.1:{ras_port}",
        **dict(engine.environment),
    }
