"""What was seen at one moment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hangguard.facts.known import NOT_ASKED, Unseen
from hangguard.facts.seen_files import Growth, HeldFiles, LockFile
from hangguard.facts.seen_stacks import Communicator, Stack


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One member, as ``/proc`` shows it. (``pid``, ``started``) is its identity."""

    pid: int
    started: int
    """Start time in clock ticks since boot (field 22 of ``/proc/PID/stat``)."""
    parent: int
    title: str
    """The command line, or the kernel's short name where that cannot be read."""
    name: str
    """The kernel's name, at most 15 characters."""
    state: str
    """One letter: R, S, D, T, t, Z, I …"""
    threads: int
    cpu_seconds: float
    """User and system time of the process itself."""
    reaped_cpu_seconds: float
    """User and system time of its children that ended and were waited for."""
    minor_faults: int
    major_faults: int
    rss_bytes: int
    read_chars: int | None = None
    """Bytes through read-like calls (``rchar``); ``None``: the kernel did not let us look."""
    written_chars: int | None = None
    disk_read_bytes: int | None = None
    thread_states: str | None = None
    """One letter a thread, sorted; ``None``: not looked at in this sample."""
    socket_bytes: int | None = None
    """Bytes received over the TCP connections that it has now (``recv`` does not count in ``read_chars``), without
    those to other members, to this program, and of the clients of its own port; ``None``: not looked at, or not
    seen (:attr:`Tree.sockets_unseen`). Falls when a connection closes."""

    @property
    def identity(self) -> tuple[int, int]:
        """Return (pid, start time)."""
        return (self.pid, self.started)


@dataclass(frozen=True, slots=True, kw_only=True)
class Departed:
    """A member that ended."""

    pid: int
    started: int
    title: str
    exit_code: int | Unseen
    """As :attr:`subprocess.Popen.returncode`: negative for a signal."""
    noticed_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Every member of one launch. Totals are over the living and the dead, and never fall."""

    members: tuple[Process, ...]
    departed: tuple[Departed, ...] = ()
    """All that ended so far in this attempt, oldest first (the last 256)."""
    births: int = 0
    deaths: int = 0
    orphan_cpu_seconds: float = 0.0
    """CPU time of orphans that the guardian reaped (its own cutime and cstime)."""
    cpu_seconds: float = 0.0
    minor_faults: int = 0
    read_chars: int = 0
    written_chars: int = 0
    disk_read_bytes: int = 0
    sockets_unseen: str = ""
    """Why the bytes of sockets were asked for and could not be seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What the server has written since the last sample; control characters are gone."""

    total_bytes: int
    lines: tuple[str, ...] = ()
    """New lines, oldest first; a carriage return ends a line too, so a progress bar gives one a step."""
    left_out: int = 0
    """Lines of a flood that were not passed on."""
    skipped_bytes: int = 0
    """Bytes never read so far, because the server wrote more than the budget of one look, or because they had been
    given back to the disk."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """One line of the log, for those who follow it; ``str()`` gives its text."""

    attempt: int
    text: str
    """Secrets and control characters are out."""
    left_out_bytes: int = 0
    """Bytes before this line that were not passed on: the reader was too slow for them, or they had been given back to
    the disk."""

    def __str__(self) -> str:
        """Return the text."""
        return self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """Who listens on the configured port."""

    pid: int | None
    """``None``: somebody whose descriptors cannot be read."""
    title: str
    ours: bool | None
    """``None``: cannot be told."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Port:
    """The configured port."""

    port: int
    listener: Listener | None
    """``None``: looked, nobody listens."""
    clients: int | Unseen = NOT_ASKED
    """Open connections from elsewhere than this supervision: somebody may be waiting for an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The state of one request to the server."""

    state: Literal["not-asked", "waiting", "good", "bad", "failed"]
    """good: a 2xx (and, for readiness, real content); bad: another status; failed: the connection broke."""
    since: float
    """When the request was sent, or the answer came."""
    status: int | None = None
    detail: str = ""
    refuses: Literal["key", "task", "model"] | None = None
    """What a 4xx says is wrong with the question: its key, what it asks for, or the model's name. The front end lives,
    and no waiting will change the answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolder:
    """A process that NVML names on a GPU. Inside a container the pid may be the host's."""

    pid: int
    used_bytes: int | None
    known: bool | None = None
    """Whether that pid is a process here that has an NVIDIA device open. False: nobody of that pid does, so the
    number is of another PID namespace, or of a process that has ended and whose memory somebody else still holds;
    ``None``: not looked at, or its descriptors may not be read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuFault:
    """A fault that the driver told of."""

    kind: Literal["xid", "ecc", "remapped-rows", "lost", "fabric"]
    code: int | None = None
    """The number of an Xid."""
    detail: str = ""
    at: float | None = None
    """When it was first seen, monotonic; ``None``: it was there already when the reader was opened."""
    by_program: bool = False
    """Whether it as a rule comes from a program that uses the board (an illegal access, a killed process: Xid 13, 31,
    43, 45), not from the board itself. The driver does not tell which program."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU that the launch can see."""

    index: int
    uuid: str
    name: str
    memory_used_bytes: int | Unseen
    memory_total_bytes: int | Unseen
    utilization_percent: float | Unseen
    power_watts: float | Unseen
    holders: tuple[GpuHolder, ...] | Unseen
    faults: tuple[GpuFault, ...] | Unseen = NOT_ASKED
    """Faults of the board and its driver, oldest first: what happened since the reader was opened, and what was there
    before and still is. With a fault seen, a source that could not be read is not mentioned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine."""

    memory_total_bytes: int
    memory_available_bytes: int
    shm_total_bytes: int | Unseen
    shm_free_bytes: int | Unseen
    oom_kills: int | Unseen
    """Kills by the kernel's OOM killer since boot, over the whole machine."""
    cgroup_oom_kills: int | Unseen = NOT_ASKED
    """The same within the launched process's own control group (``memory.events`` or ``memory.oom_control``)."""
    cpu_stall_seconds: float | Unseen = NOT_ASKED
    """Pressure: time in which some task waited for a CPU, cumulative (``/proc/pressure/cpu``, some)."""
    io_stall_seconds: float | Unseen = NOT_ASKED
    """Pressure: time in which all tasks that could run waited for a disk, cumulative (``io``, full)."""
    throttled_seconds: float | Unseen = NOT_ASKED
    """Time for which the control group was kept from running by its CPU quota, cumulative."""
    is_frozen: bool | Unseen = NOT_ASKED
    """Whether the control group is frozen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the server itself counts. A counter that it does not have is ``None``."""

    running: int | None = None
    """Requests that are worked on."""
    waiting: int | None = None
    generated_tokens: int | None = None
    """Cumulative."""
    prompt_tokens: int | None = None
    is_asleep: bool | None = None
    """Whether it was put to sleep or paused on purpose; ``None``: it cannot be asked."""
    at: float = 0.0
    """When the server gave these numbers, monotonic: the same numbers may come in several samples."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of the process that was launched."""

    code: int | Unseen
    """As :attr:`subprocess.Popen.returncode`: negative for a signal."""
    at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """All that was seen at one moment. A source that is missing carries its reason."""

    t: float
    """Monotonic seconds."""
    tree: Tree | Unseen = NOT_ASKED
    log: Log | Unseen = NOT_ASKED
    port: Port | Unseen = NOT_ASKED
    health: Reply | Unseen = NOT_ASKED
    answer: Reply | Unseen = NOT_ASKED
    """The readiness request."""
    gpus: tuple[Gpu, ...] | Unseen = NOT_ASKED
    """``()`` is seen: this machine has no NVIDIA GPU."""
    host: Host | Unseen = NOT_ASKED
    stacks: tuple[Stack, ...] | Unseen = NOT_ASKED
    serving: Serving | Unseen = NOT_ASKED
    canary: Reply | Unseen = NOT_ASKED
    """A request that really generates, sent only when nothing else can tell whether the server still works."""
    growth: Growth | Unseen = NOT_ASKED
    locks: tuple[LockFile, ...] | Unseen = NOT_ASKED
    communicators: tuple[Communicator, ...] | Unseen = NOT_ASKED
    files: HeldFiles | Unseen = NOT_ASKED
    quiet_until: float | None = None
    """Until when stillness is wanted, as the handle was told; ``None``: it is not."""
    exit: Exit | None = None
    """The end of the launched process; ``None``: it lives, as far as its parent knows."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the next sample should look at beyond the cheap sources."""

    thread_states: bool = False
    stacks: bool = False
    sockets: bool = False
    """Bytes received over TCP, and who is connected."""
    growth: bool = False
    locks: bool = False
    communicators: bool = False
    files: bool = False
    """What members have in /dev/shm, and their named sockets. Once asked, it is looked at also when something new lies
    there."""
    canary: bool = False
    counters: bool = False
    """The server's own counters now, however new the last ones are, and no request of our own that would be in them."""
    last: bool = False
    """The server will be stopped after this look: what might harm it may be asked now. Only NCCL is such a source."""
