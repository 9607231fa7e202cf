"""The nouns: frozen values that every layer speaks in.

A fact is what was seen, asked for or decided. Facts know no clock and no machine: times are monotonic
seconds carried inside them, counters are cumulative (differences are taken in ``judge``), and what could not
be seen is an :class:`Unseen` with its reason, never zero.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias

Phase: TypeAlias = Literal[
    "import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving"
]
PHASES: tuple[Phase, ...] = (
    "import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving",
)  # fmt: skip

Alters: TypeAlias = Literal["nothing", "speed", "results"]
"""What a change does to the server: nothing (instrumentation), its speed, or its answers."""

Permission: TypeAlias = Literal["auto", "any"]


@dataclass(frozen=True, slots=True)
class Unseen:
    """A source that could not be read, and why. Not the same as "looked, nothing there"."""

    reason: str


# --------------------------------------------------------------------------------------- what to start


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start, and where it will answer. Made by ``launching.read_command``; changed by ``changes``.

    ``env`` is the whole environment of the server as sorted pairs, before hangguard's own additions.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = field(repr=False)
    cwd: str
    engine: str = "generic"
    version: str | None = None
    """Version of the engine, read from the files of the interpreter that will run it; ``None``: not found."""
    options: frozenset[str] | None = field(default=None, repr=False)
    """Option strings found in the installed engine's own source; ``None``: not found, the tables decide."""
    url: str
    """Base URL without a trailing slash, for example ``http://127.0.0.1:8000``."""
    host: str
    port: int
    model: str | None = None
    """The name under which the server will know its model; ``None``: it must be asked."""
    embeds: bool = False
    """Whether the server computes embeddings instead of completions."""
    api_key: str | None = field(default=None, repr=False)
    ranks: int = 1
    """Worker ranks on this machine, as far as the flags tell (tensor x pipeline x data parallel)."""
    nodes: int = 1
    """Machines that take part; above 1 a silent start may be waiting for peers."""
    delegates_to: str | None = None
    """The program that starts the server elsewhere (``docker``, ``srun`` …): its workers cannot be seen."""
    notes: tuple[str, ...] = ()
    """What could not be understood of the command, in sentences for people."""

    def environment(self) -> dict[str, str]:
        """Return the environment as a new mapping."""
        return dict(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each thing may take. Float seconds; ``float("inf")`` is allowed for the budgets.

    Raises :class:`ValueError` for a negative number or NaN.
    """

    ready_within: float = 3600.0
    """From the first spawn until an answer, over all attempts."""
    patience: float | None = None
    """A cap on the patience of every phase; ``None``: what each phase has."""
    waiting: float = 1800.0
    """Budget of one uninterrupted wait for something outside (a lock, a peer, a disk)."""
    unclear: float = 600.0
    """Budget of one uninterrupted stretch in which nothing is produced and nothing can be proved."""
    stop_grace: float = 15.0
    """Between SIGTERM and SIGKILL when the supervisor asks for a stop."""
    death_grace: float = 1.5
    """The same when the supervising program has died."""
    release_within: float = 60.0
    """How long to look whether everything of an attempt is gone."""
    probe_within: float = 5.0
    """How long one look at one source may take before it counts as unseen."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None and name == "patience":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0.0:
                msg = f"Limits.{name} must be a number of seconds, zero or more, not {value!r}"
                raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """One change to a launch, tried when an attempt went wrong in a way that it may answer.

    ``change`` is pure: it returns the changed launch, or ``None`` where it does not apply (already there, not
    accepted by this version, without effect on one GPU). Applying it twice changes nothing more.
    """

    name: str
    change: Callable[[Launch], Launch | None]
    answers: tuple[str, ...]
    """Phases in which a hang may be cured by it (``"graph-capture"``), or reasons of an exit (``"gpu-oom"``)."""
    alters: Alters
    cost: str
    """One sentence for the person who will run the changed server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChange:
    """A difference between what was asked for and what runs."""

    name: str
    change: str
    alters: Alters


# ------------------------------------------------------------------------- what is known of an engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Marker:
    """A log line that tells where start-up is. ``since`` and ``until`` are versions, both inclusive."""

    pattern: str
    """A regular expression, searched in the line."""
    phase: Phase
    """The phase that the launch is in from this line on."""
    gap: bool = False
    """The line ends a phase: ``phase`` is the next one to come, not one that was seen to begin."""
    since: str | None = None
    until: str | None = None
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackMarker:
    """A function name in a Python stack that places a member in a phase, more exactly than the log does."""

    function: str
    """A regular expression that must match the whole function name."""
    phase: Phase
    file: str = ""
    """Part of the file's path that must occur too; empty: any file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """A log line that names the reason of an exit."""

    pattern: str
    reason: str
    permanent: bool = False
    """Whether the same launch would end the same way again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One HTTP request, as data. ``body`` is JSON text; ``None``: no body."""

    method: Literal["GET", "POST"]
    path: str
    body: str | None = None


# ------------------------------------------------------------------------------------ what was seen


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """What the server has written since the last sample; control characters are gone."""

    total_bytes: int
    lines: tuple[str, ...] = ()
    """New lines, oldest first; a carriage return ends a line too, so a progress bar gives one a step."""
    left_out: int = 0
    """Lines of a flood that were not passed on."""
    skipped_bytes: int = 0
    """Bytes never read so far, because the server wrote more than the budget of one look."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """The state of one request to the server."""

    state: Literal["not-asked", "waiting", "good", "bad", "failed"]
    """good: a 2xx (and, for readiness, real content); bad: another status; failed: the connection broke."""
    since: float
    """When the request was sent, or the answer came."""
    status: int | None = None
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuHolder:
    """A process that NVML names on a GPU. Inside a container the pid may be the host's."""

    pid: int
    used_bytes: int | None


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """The machine."""

    memory_total_bytes: int
    memory_available_bytes: int
    shm_total_bytes: int | Unseen
    shm_free_bytes: int | Unseen
    oom_kills: int | Unseen
    """Kills by the kernel's OOM killer since boot, over the whole machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One frame."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One Python thread, innermost frame first."""

    name: str
    thread_id: int
    active: bool
    frames: tuple[StackFrame, ...]
    wait_channel: str | None = None
    """As :attr:`Stack.wait_channel`, for this thread; ``None``: not known (before Python 3.11 as a rule)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stacks of one member."""

    pid: int
    started: int
    title: str
    threads: tuple[ThreadStack, ...] | Unseen
    is_python: bool = True
    """False: no Python interpreter in it, so only the wait channel can be seen."""
    wait_channel: str | Unseen = Unseen("not looked at")
    """The kernel function that the main thread sleeps in (``/proc/PID/wchan``); empty: running. ``timed`` before
    it: the wait for a lock ends by itself after a time."""
    other_channels: tuple[str, ...] = ()
    """The same for its other threads, native ones too: every channel once, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """The end of the process that was launched."""

    code: int | Unseen
    """As :attr:`subprocess.Popen.returncode`: negative for a signal."""
    at: float


NOT_ASKED = Unseen("not asked for in this sample")


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
    exit: Exit | None = None
    """The end of the launched process; ``None``: it lives, as far as its parent knows."""


@dataclass(frozen=True, slots=True)
class Ask:
    """What the next sample should look at beyond the cheap sources."""

    thread_states: bool = False
    stacks: bool = False


# ------------------------------------------------------------------------------------- what it means


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What every verdict carries."""

    verdict: ClassVar[str] = ""
    phase: Phase
    kind: str = ""
    still_for: float = 0.0
    """Seconds without progress."""
    since: float = 0.0
    """When this verdict began, monotonic."""
    moved: str = ""
    """What moved last, for people: ``log``, ``minor faults`` …"""
    unseen: tuple[str, ...] = ()
    """Sources that could not be seen, each with its reason."""
    why: str = ""
    """One sentence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving(Judged):
    """Something is produced: go on."""

    verdict: ClassVar[str] = "moving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Judged):
    """It waits for something outside that may come: go on until the budget of waiting ends."""

    verdict: ClassVar[str] = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Judged):
    """It has answered."""

    verdict: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Judged):
    """Nothing moves and nothing outside can end it."""

    verdict: ClassVar[str] = "stuck"
    suspects: tuple[str, ...] = ()
    """Members that should do the work, each with the innermost frames where they are known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Judged):
    """A member died and others hang on, or the hardware or driver is at fault."""

    verdict: ClassVar[str] = "broken"
    suspects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Judged):
    """The server ended. ``kind`` is the reason."""

    verdict: ClassVar[str] = "exited"
    exit_code: int | None = None
    permanent: bool = False
    """Whether the same launch would end the same way again."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired(Judged):
    """A budget is over: ``kind`` is ``ready_within``, ``waiting`` or ``unclear``."""

    verdict: ClassVar[str] = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclear(Judged):
    """Nothing is produced, and nothing can be proved: ``why`` says what it would take."""

    verdict: ClassVar[str] = "unclear"


Verdict: TypeAlias = Moving | Waiting | Ready | Stuck | Broken | Exited | Expired | Unclear

Standing: TypeAlias = Literal["ruled out", "open", "supported", "confirmed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One possible cause, and where the evidence leaves it."""

    hypothesis: str
    standing: Standing
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Every hypothesis, each with its evidence, and what to try."""

    findings: tuple[Finding, ...] = ()
    advice: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------ what was done


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A member that is still there after SIGKILL."""

    pid: int
    started: int
    title: str
    state: str
    wait_channel: str


Resource: TypeAlias = Literal["processes", "gpu-memory", "port"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseItem:
    """Whether one resource of an attempt is free again: released, held (by whom), or unknown (why)."""

    resource: Resource
    answer: Literal["released", "held", "unknown"]
    detail: str = ""
    ours: bool = True
    """Whether what is held is held by a member; a stranger on the port is held too, but not left behind."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is left of an attempt, looked at after its end."""

    items: tuple[ReleaseItem, ...]
    survivors: tuple[Survivor, ...] = ()
    unattributed_files: tuple[str, ...] = ()
    """Names that appeared in /dev/shm meanwhile: listed, never deleted."""
    seconds: float = 0.0

    @property
    def answer(self) -> Literal["released", "held", "unknown"]:
        """Return the worst of the three answers over all resources."""
        answers = [item.answer for item in self.items]
        return "held" if "held" in answers else "unknown" if "unknown" in answers else "released"

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Return one line for every thing of ours that is still there."""
        return tuple(f"{item.resource}: {item.detail}" for item in self.items if item.answer == "held" and item.ours)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch, from spawn to proof of release. Frozen: a record, also of one that still runs."""

    number: int
    launch: Launch
    changes: tuple[AppliedChange, ...] = ()
    verdict: Verdict
    started_at: float
    last_movement_at: float
    """When anything moved last before the verdict, monotonic; ``verdict.since`` minus this is the delay."""
    settled_at: float
    """When the verdict fell, monotonic."""
    was_ready: bool = False
    fallbacks: tuple[str, ...] = ()
    """Names of the fallbacks in force."""
    diagnosis: Diagnosis = Diagnosis()
    release: Release | None = None
    """``None``: it still runs."""
    exit_code: int | None = None
    log_path: str | None = None
    evidence_path: str | None = None
    log_tail: tuple[str, ...] = ()
    stopped_because: str = ""
    """Why we ended it; empty: it ended by itself, or it still runs."""

    def with_release(self, release: Release) -> Attempt:
        """Return the record with the proof of its end."""
        return replace(self, release=release)
