"""What was seen of files: folders that grow, locks, and what members have that they could leave behind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """Bytes in the folders that grow while nothing else shows: downloads, caches of compiled kernels."""

    download_bytes: int | None
    """Unfinished and finished files of the model caches that the launch uses; ``None``: there is none, or none
    that could be walked (then ``left_out`` says why)."""
    cache_bytes: int | None
    folders: tuple[str, ...] = ()
    """Which folders were looked at."""
    left_out: tuple[str, ...] = ()
    """Folders that are not in the sums, each with the reason: too large to be walked, no answer, not permitted."""
    at: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LockFile:
    """A lock file that a member has open, or whose presence it may be waiting for."""

    path: str
    kind: Literal["flock", "presence"]
    """flock: the kernel knows the owner; presence: the file's being there is the lock (torch's extension builds)."""
    waiters: tuple[int, ...] = ()
    """Members that have it open, or wait for it to go, without owning it."""
    owner: int | None = None
    """The pid that holds it; ``None``: nobody, or (presence) nobody who could be found."""
    owner_title: str = ""
    owner_is_member: bool = False
    age_seconds: float | None = None
    """Since its last change, by the file system's clock."""


FileKind: TypeAlias = Literal["file", "socket", "lock", "rendezvous", "pool"]
"""What may be left behind. file: in /dev/shm; socket: the name of a Unix socket; lock: torch's build lock, whose
presence is the lock; rendezvous: the file in which the ranks of a launch have met; pool: an engine's host memory, in
the temp folder. The names of the last three are in ``hangguard/elsewhere.py``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFile:
    """Something with a name that a member was seen to have, and that is there: see ``FileKind``.

    (``device``, ``inode``) is its identity; of a socket and a lock ``made_ns`` belongs to it.
    """

    path: str
    """Its name when it was seen. The C library gives a semaphore its name after it has mapped it."""
    device: int
    inode: int
    kind: FileKind
    held: Literal["named", "open", "mapped", "shared", "bound"]
    """shared: mapped so that what is written is seen by others, as shared memory is; bound: a socket's; named: a member
    carries its name, which nobody can guess, in its first environment or in that of its shared memory."""
    pid: int
    """Who has it, or had it; of several one."""
    started: int
    made_ns: int = 0
    """When a socket or a lock was made, nanoseconds since the epoch: a disk gives the inode of a file that is gone to
    the next one. 0 for all others: a tmpfs does not, and no second file has the name of a rendezvous."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldFiles:
    """All that members were ever seen to have in /dev/shm and as named sockets, as far as it is still there."""

    files: tuple[HeldFile, ...]
    left_out: tuple[str, ...] = ()
    """What could not be looked at this time, each with the reason."""
    others: tuple[tuple[int, int], ...] = ()
    """(device, inode) of what lies in /dev/shm and is not theirs alone: it was there when none of them had it, or
    somebody else writes to it too."""
    unproved: tuple[tuple[int, int], ...] = ()
    """The same of what is new, and nobody could look yet who else writes to it."""
