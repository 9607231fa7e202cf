"""What a run notes of itself for whoever comes after it: a hint, proved again by the kernel before anything is done."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from hangguard.facts.known import Unseen
from hangguard.facts.seen import HeldFile

Identity: TypeAlias = tuple[int, int]
"""(pid, start time in clock ticks since boot): a process."""
Stage: TypeAlias = Literal["starting", "ready", "stopping", "over"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run's numbers mean something: pids and inodes are those of one boot, one machine, one pid namespace."""

    host: str
    boot_id: str
    pid_namespace: str
    """As ``/proc/self/ns/pid`` names it."""
    user: int
    """The effective uid."""


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
