"""What a run notes of itself for whoever comes after it: a hint, proved again by the kernel before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hangguard.facts.known import Unseen
from hangguard.facts.seen_files import HeldFile

Identity: TypeAlias = tuple[int, int]
"""(pid, start time in clock ticks since boot): a process."""
Stage: TypeAlias = Literal["starting", "ready", "stopping", "over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run's numbers mean something: pids and inodes are those of one boot, one machine, one pid namespace."""

    host: str
    boot_id: str
    pid_namespace: str
    """As ``/proc/self/ns/pid`` names it; the kernel gives the name of one that is gone to another."""
    user: int
    """The effective uid."""
    first_started: int | None = None
    """When the first process of that namespace started, in clock ticks since boot: no later namespace has the same.
    ``None``: ``/proc`` hides it, or it was not noted."""
    shared_memory: str | None = None
    """Which file system /dev/shm is: an inode there means something in this one only. ``None``: the kernel does not
    tell, or it was not noted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunState:
    """The state of one run, as its supervisor noted it last."""

    run_id: str
    place: Place
    began: float
    """Seconds since the epoch, for people."""
    stage: Stage = "starting"
    supervisor: Identity
    on_death: Literal["stop", "keep"] = "stop"
    engine: str = ""
    command: tuple[str, ...] = ()
    """Without secrets."""
    cwd: str = ""
    attempt: int = 1
    url: str = ""
    """Where the server answers, or would; empty: its command does not tell."""
    host: str = ""
    port: int = 0
    socket_path: str | None = None
    guardian: Identity | None = None
    root: Identity | None = None
    """The launched process; ``None``: nothing was launched yet, or it was not noted any more."""
    members: tuple[Identity, ...] = ()
    """Everybody who was ever seen to belong to this attempt."""
    log_id: tuple[int, int] | None = None
    """(device, inode) of the attempt's log: who writes to it belongs to it."""
    shm_before: tuple[tuple[int, int], ...] | None = None
    """(device, inode) of all that lay in /dev/shm before the launch, or is somebody else's too; ``None``: it was not
    seen, so that nothing there is known to be new."""
    files: tuple[HeldFile, ...] = ()
    """What members were seen to have there and as named sockets."""
    gpus_before: tuple[tuple[str, int], ...] = ()
    """(UUID, bytes in use) of every GPU before the launch."""
    verdict: str = ""
    kind: str = ""
    phase: str = ""
    why: str = ""
    changes: tuple[str, ...] = ()
    """How what runs differs from what was asked for."""
    exit_code: int | None = None
    outcome: str = ""
    """How it ended, in a sentence; empty: it is not over, or nobody lived to note it."""
    left_behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundRun:
    """The folder of a run, and what its state file says; unseen: it is missing, damaged, or not to be believed."""

    run_id: str
    path: str
    state: RunState | Unseen


RunStanding: TypeAlias = Literal[
    "starting", "ready", "stopping", "kept", "ending", "left behind", "over", "elsewhere", "never started", "unreadable"
]
"""starting, ready, stopping: it goes on, as its supervisor noted. kept: its supervisor is gone, and it was to outlive
that. ending: its supervisor is gone, and its guardian ends it. left behind: nobody cares for it, and something of it is
there. over: nothing is. elsewhere: it is of another machine, user or pid namespace. never started: its folder was made,
and nothing else, and nobody has it. unreadable: nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNow:
    """A run as the kernel shows it now, whatever its state file says."""

    found: FoundRun
    standing: RunStanding
    why: str = ""
    """Of what is elsewhere or unreadable, the reason."""
    guardian: int | None = None
    """The pid of its guardian, which lives."""
    supervisor: int | None = None
    """The pid of its supervisor, which lives."""
    members: tuple[Identity, ...] = ()
    """Who belongs to it and lives."""
    files: tuple[HeldFile, ...] = ()
    """What is still there of what its members were seen to have."""

    @property
    def is_alive(self) -> bool:
        """Whether somebody cares for it, who alone may signal it."""
        return self.standing in {"starting", "ready", "stopping", "kept", "ending"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PastAttempt:
    """An attempt of a run that is over, in short."""

    number: int
    verdict: str
    kind: str
    phase: str
    why: str
    fallbacks: tuple[str, ...] = ()
    was_ready: bool = False
    exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """How a run stands: as its supervisor says now, or, where nobody answers for it, as its state file said last."""

    state: RunState
    """Told by a supervisor it is without ``files`` and ``shm_before``, which are for the cleaner."""
    told_by: Literal["supervisor", "guardian", "state file"] = "supervisor"
    """guardian: the supervisor is dead, its guardian keeps the server, and it was looked at from here."""
    still_for: float = 0.0
    """Seconds for which nothing has moved, at the verdict."""
    unseen: tuple[str, ...] = ()
    """What the verdict would need and could not be seen."""
    history: tuple[PastAttempt, ...] = ()
    """The attempts before the present one, oldest first."""
    note: str = ""
    """Why it is the state file that is told; empty: it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStopped:
    """What the stop of a run came to that was asked for from outside."""

    run_id: str
    by: Literal["supervisor", "guardian"]
    released: Literal["released", "held", "unknown"] = "unknown"
    """What the proof came to; unknown: there is none, because only the guardian was left to stop it."""
    left_behind: tuple[str, ...] = ()
    exit_code: int | None = None
    outcome: str = ""
    """In a sentence."""


ReachedState: TypeAlias = Literal["ready", "stuck", "exit"]
"""What can be waited for: it has answered; it hangs or is broken; the run is over."""
