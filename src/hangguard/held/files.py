# ruff: noqa: PTH116
"""What is told of a file that a process has, and whether it may be left when all of a launch have ended."""

from __future__ import annotations

import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any, TypeAlias

    Identity: TypeAlias = tuple[int, int]
    FileId: TypeAlias = tuple[int, int]
    Plain: TypeAlias = dict[str, Any]


SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, never written to
ORDER = ("named", "open", "mapped", "shared", "bound")
"""How closely a process has something. ``shared``: mapped so that what it writes is seen by others."""
MEMORY = ("file", "pool")
"""Kinds that several processes may write to."""
DATED = ("socket", "lock")
"""Kinds to whose identity the time belongs at which they were made: a disk gives an inode again."""


def file_id(found: os.stat_result) -> FileId:
    """Return (device, inode)."""
    return (found.st_dev, found.st_ino)


def names_in(folder: str = SHARED_MEMORY) -> dict[FileId, str]:
    """Return what lies directly in the folder of shared memory, where shm_open(3) and sem_open(3) put everything.

    Costs no look at the files themselves. Empty where there is no such folder; raises :class:`OSError` where it cannot
    be listed: a folder that may be entered and not read is not an empty one.
    """
    try:
        device = os.stat(folder).st_dev
        with os.scandir(folder) as entries:
            return {(device, entry.inode()): entry.path for entry in entries}
    except FileNotFoundError:
        return {}


def may_be_left(file: Plain, before: Iterable[FileId] | None = (), *, folder: str = SHARED_MEMORY) -> bool:
    """Whether something that a member was seen to have may be removed once nobody has it.

    The name of a socket was made by whoever bound it. A file in /dev/shm is taken for shared memory if it was not there
    ``before`` the launch, lies in no folder of its own, and was mapped to be shared and written. Weights that somebody
    copied there, a cache or a log that the server keeps there are none of that: they are somebody's files. ``before``
    is ``None`` where it could not be seen: then nothing is known to be new.

    What lies elsewhere is looked at only under the names and in the places that engines use, see ``elsewhere``, and
    only if it is new: a build lock that was open, a rendezvous file that was open or whose name a member carries, a
    pool that was mapped to be shared and written.
    """
    if file["kind"] == "socket":
        return bool(file["held"] == "bound")
    if file["kind"] in {"lock", "rendezvous"}:
        return True
    if file["kind"] == "pool":
        return bool(file["held"] == "shared") and (file["device"], file["inode"]) not in (before or ())
    is_alone = os.path.dirname(file["path"]) == folder  # noqa: PTH120
    is_new = before is not None and (file["device"], file["inode"]) not in before
    return is_alone and file["held"] == "shared" and is_new


def key_of(file: Plain) -> tuple[Any, ...]:
    """Return what tells one from another: a file of shared memory by its inode, whatever it is called by now."""
    return (file["device"], file["inode"], *((file["path"],) if file["kind"] == "socket" else ()))
