"""Before a launch: what was looked at, and what each row of the table says of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hangguard.facts.asked import Launch
from hangguard.facts.known import NOT_ASKED, Unseen
from hangguard.facts.seen import Gpu, Host, Listener
from hangguard.facts.seen_files import LockFile

Answer: TypeAlias = Literal["good", "poor", "missing", "unseen"]
"""good: nothing to do; poor: it is there and may cost something; missing: it is not there; unseen: it could not be
looked at, which is neither."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One row: what was looked at, what was found, what that costs, and the line that would give it."""

    what: str
    answer: Answer
    found: str
    """What was seen, or why nothing could be."""
    means: str = ""
    """What that does to this launch; empty where the answer is good."""
    patience: float | None = None
    """Seconds until a start that stands idle is called a hang, as things are; ``None``: this row does not change it."""
    loses: str = ""
    """The proof that is lost by it."""
    helps: str = ""
    """The line that would give it: a command, a flag, a variable."""
    error: Exception | None = None
    """What ``supervise`` would raise for it: then it is certain that nothing could be started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preflight:
    """What one look before a launch came to. Secrets are out of it."""

    launch: Launch
    checks: tuple[Check, ...]
    patience: float
    """Seconds until a start that stands idle is called a hang, or given up, with everything that can be seen here."""
    best_patience: float
    """The same where everything is seen."""
    seconds: float
    """How long the look took."""

    @property
    def refusals(self) -> tuple[Exception, ...]:
        """Return what ``supervise`` would raise, where it is certain that it would; empty: nothing is in the way."""
        return tuple(check.error for check in self.checks if check.error is not None)

    @property
    def poor(self) -> tuple[Check, ...]:
        """Return every row that is not good, in the order of the table."""
        return tuple(check for check in self.checks if check.answer != "good")


# ------------------------------------------------------------------------------------------ what was looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """A folder that the run or the server writes to; of one that does not exist yet, the nearest that does."""

    path: str
    exists: bool
    free_bytes: int
    is_writable: bool
    filesystem: str = ""
    """Its type as the kernel names it: ``ext4``, ``nfs4``, ``overlay``; empty: not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """Where the model was looked for."""

    name: str
    """As the command gives it: a folder, a file, or a name in a hub."""
    is_path: bool
    exists: bool
    """As a path, or in the hub's cache."""
    has_config: bool = True
    """Whether a folder holds what an engine reads first."""
    filesystem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceLimit:
    """One limit of this process, which the server inherits; ``None``: unlimited."""

    soft: int | None
    hard: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessLimits:
    """Limits that the server will run under."""

    open_files: ResourceLimit
    locked_bytes: ResourceLimit
    tasks: ResourceLimit
    """Processes and threads of this user."""
    core_bytes: ResourceLimit
    tasks_left: int | None
    """How many more tasks there may be; ``None``: no limit applies to this user here."""
    tasks_limited_by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLimit:
    """What the control groups leave of the memory."""

    limit_bytes: int | None
    """``None``: no limit below that of the machine."""
    used_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Permissions:
    """What the kernel lets this process look at."""

    ptrace_scope: int | None
    """Yama's (Documentation/admin-guide/LSM/Yama.rst); ``None``: this kernel has no Yama."""
    may_trace_all: bool
    """CAP_SYS_PTRACE."""
    hides_processes: str
    """The option by which ``/proc`` was mounted that hides processes of others; empty: it shows all."""
    has_pidfds: bool
    is_root: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class GuardianTrial:
    """A guardian that was started for a moment, without a server."""

    problem: str = ""
    """Why it does not work; empty: it does."""
    stacks: Unseen | None = NOT_ASKED
    """Why its Python stacks cannot be read; ``None``: they can. It is our child as the server will be its: where the
    server keeps its user, the one is as easy to read as the other."""
    wait_channel: str | Unseen = NOT_ASKED
    """The kernel function in which it slept; empty: the kernel does not tell."""
    py_spy: str = ""
    """Where py-spy lies; empty: it was not found."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """The NVIDIA driver."""

    version: str | None = None
    cuda: tuple[int, int] | None = None
    """The newest CUDA that it was made for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EarlierRun:
    """A run of ours that is not over, or left something. Proved now, whatever its files say."""

    run_id: str
    path: str
    guardian: int | None
    """The pid that holds its lock: it is guarded still; ``None``: nobody does."""
    members: tuple[tuple[int, str], ...] = ()
    """(pid, title) of everybody whose output still goes to its log."""
    files: tuple[str, ...] = ()
    """What is still there of the files that the run recorded as its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Everything that was looked at before a launch. What could not be seen carries its reason."""

    obstacle: Exception | Unseen | None = NOT_ASKED
    """Why the program cannot be started; ``None``: it is there and may be executed."""
    listener: Listener | Unseen | None = NOT_ASKED
    """Who listens where the server would; ``None``: nobody."""
    run_folders: tuple[Room, ...] | Unseen = NOT_ASKED
    """Where logs and evidence may go, the best place first."""
    caches: tuple[Room, ...] | Unseen = NOT_ASKED
    """Where compiled kernels are kept."""
    model: ModelFiles | Unseen | None = NOT_ASKED
    """``None``: the command names none."""
    earlier: tuple[EarlierRun, ...] | Unseen = NOT_ASKED
    locks: tuple[LockFile, ...] | Unseen = NOT_ASKED
    host: Host | Unseen = NOT_ASKED
    memory_limit: MemoryLimit | Unseen = NOT_ASKED
    shm: Room | Unseen = NOT_ASKED
    limits: ProcessLimits | Unseen = NOT_ASKED
    permissions: Permissions | Unseen = NOT_ASKED
    guardian: GuardianTrial | Unseen = NOT_ASKED
    gpus: tuple[Gpu, ...] | Unseen = NOT_ASKED
    driver: Driver | Unseen = NOT_ASKED
    titles: tuple[tuple[int, str], ...] = ()
    """(pid, title) of those that hold GPU memory, as far as they can be seen."""
    packages: tuple[tuple[str, str], ...] | Unseen = NOT_ASKED
    """Distributions beside the engine, with their versions."""
    iommu: tuple[str, ...] | Unseen = NOT_ASKED
    """How the GPUs' own memory accesses are translated, a word for each kind (``identity``, ``DMA``, ``DMA-FQ``);
    empty: they are not."""
