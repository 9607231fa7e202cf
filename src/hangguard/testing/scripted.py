"""Supervision without processes: scripted attempts under a clock of your own, an hour in milliseconds.

::

    def loads_slowly(age: float) -> Sample:
        return plain_sample(read_bytes=int(age) * MIB, answer="good" if age > 3600 else "failed")

    async def main() -> None:
        async with scripted_supervision([Script(look=loads_slowly)], clock=trio.current_time) as server:
            ...

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))

Everything between the seams is the real thing: the story, the judge, the retries, the events, the faces.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import anyio

from hangguard.act.spawn import LastWords, Stopped
from hangguard.elsewhere import Elsewhere
from hangguard.engines.base import Engine
from hangguard.engines.generic import GENERIC
from hangguard.facts import (
    NOT_ASKED,
    Ask,
    Exit,
    Fallback,
    Gpu,
    HeldFile,
    Host,
    Launch,
    Limits,
    Listener,
    Log,
    Port,
    Process,
    Release,
    ReleaseItem,
    Reply,
    Sample,
    Stack,
    StackFrame,
    ThreadStack,
    Tree,
    Unseen,
)
from hangguard.learned import Stretches
from hangguard.observe import Target
from hangguard.observe.memory_stacks import PythonThreads
from hangguard.observe.port_left import PortLeft
from hangguard.observe.sysv import Segment
from hangguard.store import RunFolder
from hangguard.supervision.announcer import Announcer, Hook
from hangguard.supervision.block import AsyncSupervision
from hangguard.supervision.retry import Retry
from hangguard.supervision.run import OnHang, Run, World

__all__ = [
    "RELEASED",
    "Script",
    "ScriptedGuarded",
    "ScriptedWatcher",
    "ScriptedWorld",
    "held_by_ours",
    "plain_sample",
    "scripted_launch",
    "scripted_supervision",
]

Clock = Callable[[], float]

WORKER = (5001, 77)
"""(pid, start time) of the one process of every script."""

RELEASED = Release(
    items=tuple(ReleaseItem(resource=r, answer="released") for r in ("processes", "gpu-memory", "port", "files"))
)


def held_by_ours(detail: str) -> Release:
    """Return a release in which a process of ours is left."""
    return Release(items=(ReleaseItem(resource="processes", answer="held", detail=detail),))


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """One attempt. Ages are seconds since its launch."""

    look: Callable[[float], Sample]
    """What a look sees at an age; times and the exit are filled in."""
    exits: tuple[float, int] | None = None
    """The age at which the launched process ends by itself, and its code."""
    guardian_dies: float | None = None
    """The age at which the guardian dies."""
    stop_takes: float = 0.0
    """Seconds that a stop takes; it ignores SIGTERM if that is longer than the grace."""
    release: Release = RELEASED
    """What the proof at its end comes to."""


class ScriptedGuarded:
    """The guardian and its server, as far as an attempt asks them."""

    def __init__(self, script: Script, *, clock: Clock) -> None:
        self.pid, self.started = WORKER
        self.guardian_pid, self.guardian_started = 5000, 1
        self.shm_before: frozenset[tuple[int, int]] | None = frozenset()
        self.log_id: tuple[int, int] | None = None
        self.members: frozenset[tuple[int, int]] = frozenset({WORKER})
        self.stops: list[float] = []
        """The grace of every stop that was asked for."""
        self.last_asked: tuple[tuple[int, int], ...] = ()
        """Who was asked for last words."""
        self.files: tuple[HeldFile, ...] = ()
        self._script = script
        self._clock = clock
        self._began = clock()
        self._hurried = anyio.Event()
        self._stopped_at: float | None = None

    @property
    def guardian_alive(self) -> bool:
        """Whether the script lets it live at this age."""
        dies = self._script.guardian_dies
        return dies is None or self._age() < dies

    @property
    def exit(self) -> Exit | None:
        """The end: by the script, or by the stop."""
        exits = self._script.exits
        if exits is not None and self._age() >= exits[0]:
            return Exit(code=exits[1], at=self._began + exits[0])
        return None if self._stopped_at is None else Exit(code=-15, at=self._stopped_at)

    async def wait_exit(self) -> Exit:
        """Wait until the script ends it."""
        exits = self._script.exits
        if exits is None:
            await anyio.sleep_forever()
        else:
            await anyio.sleep(max(0.0, self._began + exits[0] - self._clock()))
        assert self.exit is not None
        return self.exit

    def remember(self, identities: Iterable[tuple[int, int]]) -> None:
        """Note members."""
        self.members |= frozenset(identities)

    def remember_files(self, files: Iterable[HeldFile], others: Iterable[tuple[int, int]] = ()) -> None:
        """Note what members have."""
        self.shm_before = (self.shm_before or frozenset()) | frozenset(others)
        self.files = tuple(files)

    async def read_stacks(self, member: tuple[int, int], *, within: float) -> PythonThreads:
        """Say that there is nothing to read: the stacks are in the script's samples."""
        del member, within
        return PythonThreads(threads=NOT_ASKED)

    async def last_words(self, members: Iterable[tuple[int, int]], *, within: float) -> tuple[LastWords, ...]:
        """Note who was asked; none of them says anything."""
        del within
        self.last_asked += tuple(members)
        return ()

    async def stop(self, *, grace: float) -> Stopped:
        """End it after the time of the script, at the end of the grace, or when told to hurry."""
        self.stops.append(grace)
        began = self._clock()
        with anyio.move_on_after(min(grace, self._script.stop_takes)):
            await self._hurried.wait()
        self._stopped_at = self._clock()
        return Stopped(survivors=(), ended=1, seconds=self._clock() - began, by="guardian")

    def hurry(self) -> None:
        """End the grace."""
        self._hurried.set()

    def _age(self) -> float:
        return self._clock() - self._began


class ScriptedWatcher:
    """Sees what the script shows; the dear sources only when they are asked for, as the real one."""

    def __init__(self, look: Callable[[float], Sample], target: Target) -> None:
        self._look = look
        self._target = target
        self._began = target.clock()
        self.looks = 0

    async def take_sample(self, ask: Ask = Ask()) -> Sample:  # noqa: B008 - frozen
        """Look once."""
        await anyio.lowlevel.checkpoint()
        self.looks += 1
        now = self._target.clock()
        seen = self._look(now - self._began)
        return replace(seen, t=now, exit=self._target.exit_of(), stacks=seen.stacks if ask.stacks else NOT_ASKED)


@dataclass(slots=True)
class ScriptedWorld:
    """Plays one script an attempt; asked for more attempts than there are scripts, it repeats the last."""

    scripts: Sequence[Script]
    clock: Clock
    launches: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    """When each attempt was launched, and its argv."""
    guards: list[ScriptedGuarded] = field(default_factory=list)
    listener: Listener | Unseen | None = None
    """Who listens on the port before each launch."""
    ports_left: list[PortLeft] = field(default_factory=list)
    """What is left of the port, look after look; then it is free."""
    learned: Stretches = ()
    """What good starts have taught: (phase, seconds that it stood still)."""
    good_starts: list[Stretches] = field(default_factory=list)
    """What each good start has taught."""

    def world(self) -> World:
        """Return the seams."""
        return World(
            clock=self.clock,
            guarded=self._guarded,
            observe=self._observe,
            who_listens=self._who_listens,
            look_at_port=self._look_at_port,
            prove_release=self._prove_release,
            list_segments=self._list_segments,
            look_elsewhere=self._look_elsewhere,
            patience_learned=self._patience_learned,
            note_good_start=self._note_good_start,
        )

    @property
    def _script(self) -> Script:
        return self.scripts[min(len(self.guards), len(self.scripts)) - 1]

    @asynccontextmanager
    async def _guarded(self, *, argv: tuple[str, ...], **_others: object) -> AsyncIterator[ScriptedGuarded]:
        self.launches.append((self.clock(), argv))
        script = self.scripts[min(len(self.guards), len(self.scripts) - 1)]
        self.guards.append(ScriptedGuarded(script, clock=self.clock))
        yield self.guards[-1]

    @asynccontextmanager
    async def _observe(self, target: Target) -> AsyncIterator[ScriptedWatcher]:
        yield ScriptedWatcher(self._script.look, target)

    async def _patience_learned(self, _launch: Launch, _gpus: tuple[Gpu, ...] | Unseen) -> Stretches:
        return self.learned

    async def _note_good_start(self, _launch: Launch, _gpus: tuple[Gpu, ...] | Unseen, still: Stretches) -> None:
        self.good_starts.append(still)

    async def _who_listens(self, _launch: Launch) -> Listener | Unseen | None:
        return self.listener

    async def _look_at_port(self, _launch: Launch) -> PortLeft | Unseen | None:
        return self.ports_left.pop(0) if self.ports_left else None

    async def _list_segments(self) -> tuple[Segment, ...]:
        return ()

    async def _look_elsewhere(self, _launch: Launch) -> Elsewhere:
        return Elsewhere()

    async def _prove_release(self, **_facts: Any) -> Release:
        return self._script.release


def scripted_launch(*argv: str, port: int = 8000) -> Launch:
    """Return a launch for scripts: nothing of it is ever started."""
    return Launch(
        argv=argv or ("server",), env=(), cwd="/", host="127.0.0.1", port=port, url=f"http://127.0.0.1:{port}"
    )


def scripted_supervision(
    scripts: Sequence[Script] | ScriptedWorld,
    *,
    clock: Clock,
    launch: Launch | None = None,
    engine: Engine = GENERIC,
    limits: Limits | None = None,
    retry: Retry | None = None,
    fallbacks: Sequence[Fallback] = (),
    retry_hangs: bool = False,
    on_hang: OnHang = "act",
    hooks: Sequence[Hook] = (),
) -> AsyncSupervision:
    """Return what ``supervise`` would, over scripts, with no file written and no process started."""
    world = scripts if isinstance(scripts, ScriptedWorld) else ScriptedWorld(scripts, clock)
    return AsyncSupervision(
        Run(
            launch=launch or scripted_launch(),
            engine=engine,
            limits=limits or Limits(),
            retry=retry or Retry(),
            fallbacks=tuple(fallbacks),
            retry_hangs=retry_hangs,
            on_hang=on_hang,
            folder=RunFolder(run_id="scripted", path=None),
            announcer=Announcer(hooks),
            world=world.world(),
        )
    )


def plain_sample(
    *,
    cpu_seconds: float = 0.0,
    read_bytes: int = 0,
    minor_faults: int = 0,
    states: str = "S",
    lines: tuple[str, ...] = (),
    answer: Literal["failed", "waiting", "bad", "good"] = "failed",
    frames: tuple[str, ...] = ("acquire", "wait_for_the_other"),
    tree: Unseen | None = None,
) -> Sample:
    """Return a sample of a machine without GPUs in which everything is seen, of one Python process.

    Counters are totals since the launch. ``frames`` is where it stands, innermost first; ``tree`` hides it.
    """
    pid, started = WORKER
    worker = Process(
        pid=pid,
        started=started,
        parent=5000,
        title="python server.py",
        name="python",
        state=states[0],
        threads=len(states),
        cpu_seconds=cpu_seconds,
        reaped_cpu_seconds=0.0,
        minor_faults=minor_faults,
        major_faults=0,
        rss_bytes=1 << 30,
        read_chars=read_bytes,
        written_chars=0,
        disk_read_bytes=0,
        thread_states=states,
    )
    seen = Tree(members=(worker,), births=1, cpu_seconds=cpu_seconds, minor_faults=minor_faults, read_chars=read_bytes)
    stack = tuple(StackFrame(function=name, file="server.py", line=7) for name in frames)
    return Sample(
        t=0.0,
        tree=tree or seen,
        log=Log(total_bytes=sum(len(line) + 1 for line in lines), lines=lines),
        port=Port(port=8000, listener=None),
        health=Reply(state="not-asked", since=0.0),
        answer=Reply(state=answer, since=0.0, status=503 if answer == "bad" else None),
        gpus=(),
        host=Host(
            memory_total_bytes=64 << 30,
            memory_available_bytes=32 << 30,
            shm_total_bytes=1 << 30,
            shm_free_bytes=1 << 30,
            oom_kills=0,
        ),
        stacks=(
            Stack(
                pid=pid,
                started=started,
                title="python server.py",
                threads=(ThreadStack(name="MainThread", thread_id=pid, active=False, frames=stack),),
                wait_channel="futex_wait_queue",
            ),
        ),
    )
