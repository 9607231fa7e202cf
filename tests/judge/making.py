"""Builders of samples and timelines: a ``Story`` is told in stretches, each with its rates, one sample a second.

``watch`` plays a timeline as supervision does: the dear sources are in a sample only when they were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from hangguard.facts import (
    NOT_ASKED,
    Departed,
    Exit,
    Gpu,
    GpuHolder,
    Growth,
    Host,
    Limits,
    LockFile,
    Log,
    Marker,
    Port,
    Process,
    Reply,
    Sample,
    Stack,
    StackFrame,
    StackMarker,
    Symptom,
    ThreadStack,
    Tree,
    Unseen,
)
from hangguard.judge import Memory, Rules, next_ask, start, step

MIB = 1024**2
HIDDEN = Unseen("hidden by the test")
NEVER = Unseen("no permission")


def thread(channel: str | None, *at: str) -> ThreadStack:
    """A thread beside the main one."""
    return ThreadStack(name="", thread_id=7, active=False, frames=frames(*at), wait_channel=channel)


def frames(*places: str) -> tuple[StackFrame, ...]:
    """Frames from ``"function file.py"``, innermost first."""
    parts = [place.split(" ") for place in places]
    return tuple(StackFrame(function=p[0], file=p[1] if len(p) > 1 else "engine.py", line=7) for p in parts)


@dataclass(frozen=True)
class Member:
    """Who is in the story, and where its main thread stands."""

    pid: int
    title: str
    parent: int = 1
    threads: int = 8
    at: tuple[StackFrame, ...] = ()
    channel: str | Unseen = "futex_wait_queue"
    python: bool = True
    works: bool = True
    """Whether the rates of the story are its own."""
    beside: tuple[ThreadStack, ...] = ()
    """Its other Python threads."""
    native: tuple[str, ...] = ()
    """What its threads without Python wait in."""
    state: str | None = None
    """Its state whatever the story's states are: T, t, Z."""
    cpu: float | None = None
    """Its own CPU rate; ``None``: that of the story, if it works."""
    name: str | None = None
    """The kernel's name, where the title does not begin with it."""


API = Member(100, "python -m engine.server", at=frames("poll poll.py", "wait_for_engine_startup"), works=False)
TRACKER = Member(
    101, "python -c from multiprocessing.resource_tracker import main;main(5)", 100, 1, frames("main"), works=False
)
CORE = Member(
    102, "ENGINE::Worker_0", 100, 40, frames("acquire lock.py", "capture_model runner.py", "load_model runner.py")
)
SERVER = (API, TRACKER, CORE)

MARKERS = (
    Marker(pattern="world_size=", phase="dist-init"),
    Marker(pattern="Starting to load model", phase="weights-load"),
    Marker(pattern="Loading weights took", phase="kv-cache", gap=True),
    Marker(pattern="Capturing graphs", phase="graph-capture"),
)


def rules(**changes) -> Rules:
    base = Rules(
        markers=MARKERS,
        noise=(r'"GET /\S* HTTP', "still waiting, 60 seconds", r"throughput: 0\.0 tokens/s"),
        stack_markers=(
            StackMarker(function="init_dist", phase="dist-init"),
            StackMarker(function="capture_model", phase="graph-capture"),
            StackMarker(function="load_model", phase="weights-load"),
        ),
        symptoms=(
            Symptom(pattern="CUDA out of memory", reason="gpu-oom"),
            Symptom(pattern="unrecognized arguments", reason="bad-flag", permanent=True),
            Symptom(pattern="hit an exception", reason="crash"),
        ),
        front_end=("engine.server",),
        workers=("ENGINE::Worker",),
    )
    return replace(base, **changes)


def limits(**values) -> Limits:
    return Limits(**values)


BUSY = {"cpu": 0.9, "faults": 2000, "reads": 500 * MIB, "states": "RS"}
"""The rates of a healthy start."""


@dataclass
class Story:
    """A timeline in the making. ``goes`` adds a stretch; what it is not told does not move."""

    members: tuple[Member, ...] = SERVER
    t: float = 1000.0
    every: float = 1.0
    gpus: bool = True
    sees_writes: bool = False
    """Whether the kernel tells how much each process writes."""
    samples: list[Sample] = field(default_factory=list)
    cpu: dict[int, float] = field(default_factory=dict)
    faults: float = 0.0
    reads: float = 0.0
    writes: float = 0.0
    disk: float = 0.0
    rss: int = 100 * MIB
    births: int = 3
    deaths: int = 0
    log_bytes: int = 0
    gpu_memory: int = 0
    holders: tuple[GpuHolder, ...] = ()
    """Whom NVML names on the GPU."""
    sockets: float = 0.0
    downloaded: float = 0.0
    cached: float = 0.0
    stalls: dict[str, float] = field(default_factory=dict)
    """Cumulative seconds of the host by source: cpu, io, throttled."""
    locks: tuple[LockFile, ...] = ()
    departed: tuple[Departed, ...] = ()
    exit: Exit | None = None

    def goes(
        self,
        seconds: float,
        *,
        cpu: float = 0.0,
        faults: float = 0.0,
        reads: float = 0.0,
        writes: float = 0.0,
        disk: float = 0.0,
        rss: int = 0,
        states: str = "S",
        lines: tuple[str, ...] = (),
        every_second: tuple[str, ...] = (),
        gpu_percent: float = 0.0,
        gpu_memory: int = 0,
        watts: float | Unseen = 120.0,
        sockets: float | None = None,
        download: float | None = None,
        cache: float = 0.0,
        stalls: dict[str, float] | None = None,
        frozen: bool = False,
        quiet_until: float | None = None,
        answer: Reply | None = None,
        hide: tuple[str, ...] = (),
        **unseen: Unseen,
    ) -> Story:
        """Add samples for these seconds. Rates are a second; ``lines`` come in the first sample only.

        ``hide`` names sources of the sample; ``thread_states`` and ``bytes`` are hidden in the processes.
        """
        for n in range(round(seconds / self.every)):
            self.t += self.every
            for member in self.members:
                rate = member.cpu if member.cpu is not None else cpu if member.works else 0.0
                self.cpu[member.pid] = self.cpu.get(member.pid, 0.0) + rate * self.every
            self.sockets += (sockets or 0.0) * self.every
            self.downloaded += (download or 0.0) * self.every
            self.cached += cache * self.every
            for source, share in (stalls or {}).items():
                self.stalls[source] = self.stalls.get(source, 0.0) + share * self.every
            self.faults += faults * self.every
            self.reads += reads * self.every
            self.writes += writes * self.every
            self.disk += disk * self.every
            self.rss += round(rss * self.every)
            self.gpu_memory += round(gpu_memory * self.every)
            new = (lines if n == 0 else ()) + tuple(line.format(n=n) for line in every_second)
            self.log_bytes += sum(len(line) + 1 for line in new)
            sample = Sample(
                t=self.t,
                tree=self._tree(states, hide, sockets is not None),
                log=Log(total_bytes=self.log_bytes, lines=new),
                port=Port(port=8000, listener=None),
                health=Reply(state="not-asked", since=self.t),
                answer=answer or Reply(state="failed", since=self.t),
                gpus=self._gpus(gpu_percent, watts),
                locks=self.locks,
                growth=Growth(
                    download_bytes=None if download is None else round(self.downloaded),
                    cache_bytes=round(self.cached),
                    at=self.t,
                ),
                quiet_until=quiet_until,
                host=Host(
                    memory_total_bytes=64 << 30,
                    memory_available_bytes=32 << 30,
                    shm_total_bytes=1 << 30,
                    shm_free_bytes=1 << 30,
                    oom_kills=0,
                    cpu_stall_seconds=self.stalls.get("cpu", 0.0),
                    io_stall_seconds=self.stalls.get("io", 0.0),
                    throttled_seconds=self.stalls.get("throttled", 0.0),
                    is_frozen=frozen,
                ),
                stacks=tuple(self._stack(member) for member in self.members),
                exit=self.exit,
            )
            hidden = {name: HIDDEN for name in hide if name not in {"thread_states", "bytes"}}
            self.samples.append(replace(sample, **{**hidden, **unseen}))
        return self

    def moves_to(self, pid: int, *at: str, channel: str | Unseen | None = None) -> Story:
        """Put the main thread of a member somewhere else."""
        self.members = tuple(
            replace(m, at=frames(*at) if at else m.at, channel=m.channel if channel is None else channel)
            if m.pid == pid
            else m
            for m in self.members
        )
        return self

    def gains(self, member: Member) -> Story:
        self.members = (*self.members, member)
        self.births += 1
        return self

    def loses(self, pid: int, exit_code: int | Unseen) -> Story:
        """End a member; the first one of the story is the launched process."""
        gone = next(m for m in self.members if m.pid == pid)
        self.members = tuple(m for m in self.members if m.pid != pid)
        self.deaths += 1
        departed = Departed(pid=pid, started=pid, title=gone.title, exit_code=exit_code, noticed_at=self.t)
        self.departed = (*self.departed, departed)
        if gone.parent == 1:
            self.exit = Exit(code=exit_code, at=self.t)
        return self

    def stops(self, pid: int, state: str | None = "T") -> Story:
        """Stop a member by a signal, or (``None``) let it go on."""
        self.members = tuple(replace(m, state=state) if m.pid == pid else m for m in self.members)
        return self

    def _tree(self, states: str, hide: tuple[str, ...], with_sockets: bool) -> Tree:
        processes = tuple(
            Process(
                pid=m.pid,
                started=m.pid,
                parent=m.parent,
                title=m.title,
                name=m.name or m.title[:15],
                state=m.state or (states[0] if m.works else "S"),
                threads=m.threads,
                cpu_seconds=self.cpu.get(m.pid, 0.0),
                reaped_cpu_seconds=0.0,
                minor_faults=0,
                major_faults=0,
                rss_bytes=self.rss,
                read_chars=None if "bytes" in hide else 0,
                written_chars=0 if self.sees_writes else None,
                socket_bytes=round(self.sockets) if with_sockets and m.works else None,
                thread_states=None if "thread_states" in hide else states if m.works else "S",
            )
            for m in self.members
        )
        return Tree(
            members=processes,
            departed=self.departed,
            births=self.births,
            deaths=self.deaths,
            cpu_seconds=sum(self.cpu.values()),
            minor_faults=round(self.faults),
            read_chars=round(self.reads),
            written_chars=round(self.writes),
            disk_read_bytes=round(self.disk),
        )

    def _gpus(self, percent: float, watts: float | Unseen) -> tuple[Gpu, ...]:
        made = gpu(percent=percent, used=self.gpu_memory, watts=watts, holders=self.holders)
        return (made,) if self.gpus else ()

    @staticmethod
    def _stack(member: Member) -> Stack:
        channel = member.channel if isinstance(member.channel, str) else None
        main = ThreadStack(
            name="MainThread", thread_id=member.pid, active=False, frames=member.at, wait_channel=channel
        )
        known = {t.wait_channel for t in member.beside if t.wait_channel is not None}
        return Stack(
            pid=member.pid,
            started=member.pid,
            title=member.title,
            threads=(main, *member.beside) if member.python else Unseen("no Python in it"),
            is_python=member.python,
            wait_channel=member.channel,
            other_channels=tuple(sorted({*member.native, *known})),
        )


def gpu(
    *,
    percent: float | Unseen = 0.0,
    used: int | Unseen = 0,
    watts: float | Unseen = 120.0,
    holders: tuple[GpuHolder, ...] | Unseen = (),
    index: int = 0,
) -> Gpu:
    return Gpu(
        index=index,
        uuid=f"GPU-{index}",
        name="H200",
        memory_used_bytes=used,
        memory_total_bytes=140 << 30,
        utilization_percent=percent,
        power_watts=watts,
        holders=holders,
    )


def watch(samples: Iterable[Sample], by: Rules | None = None) -> list[Memory]:
    """Step through the samples as supervision does (dear sources only when asked for), and return every memory."""
    memory, memories = start(by or rules()), []
    for sample in samples:
        ask = next_ask(memory)
        asked = {"stacks": ask.stacks, "growth": ask.growth, "locks": ask.locks}
        left_out = {name: NOT_ASKED for name, wanted in asked.items() if not wanted}
        memory = step(memory, replace(sample, **left_out))
        memories.append(memory)
    return memories


def first(memories: Sequence[Memory], verdict: str) -> Memory | None:
    """The first memory with this verdict."""
    return next((m for m in memories if m.verdict.verdict == verdict), None)


def seen(memories: Sequence[Memory]) -> set[str]:
    """The verdicts that fell."""
    return {m.verdict.verdict for m in memories}
