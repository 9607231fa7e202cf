"""Which process holds a lock on which file, as the kernel tells. Plain functions that block.

``/proc/locks`` names a file by device and inode, ``/proc/PID/fdinfo`` what one descriptor holds; both as the file
system itself counts, which ``stat`` on overlayfs and btrfs does not (proc_locks(5), proc_pid_fdinfo(5)).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

WAITING_CHANNELS = frozenset(
    {"locks_lock_inode_wait", "flock_lock_inode_wait", "posix_lock_inode_wait", "fcntl_setlk", "do_lock_file_wait"}
)
"""Kernel functions in which a process waits for a lock, by their names of Linux 3.x to 6.18 (fs/locks.c)."""

# "1: -> FLOCK  ADVISORY  WRITE 6371 fe:00:2146321 0 EOF"; an open file description lock (OFDLCK) has the pid -1.
_LINE = re.compile(
    r"\d+: (?P<blocked>-> )?\s*(?:FLOCK|POSIX|OFDLCK)\s+\S+\s+(?P<kind>READ|WRITE)\s+(?P<pid>-?\d+) (?P<file>\S+) "
)
_LOCK_NAME = re.compile(r"(?:^|[._-])(?:file)?(?:lock|lck)(?:$|[._-])", re.IGNORECASE)
_DELETED = " (deleted)"


class FileId(NamedTuple):
    """A file as ``/proc/locks`` prints it."""

    device: str
    inode: int


@dataclass(slots=True)
class Held:
    """What the kernel says of one file."""

    owners: list[int]
    """Pids that took it, writers first; not positive: of an open file description."""
    blocked: list[int]


@dataclass(frozen=True, slots=True)
class OpenFile:
    """A lock file that a process has open."""

    pid: int
    path: str
    file: FileId
    holds: bool
    """Whether this very descriptor holds a lock."""
    changed: float | None
    """Wall-clock time of the last change."""


def is_lock_name(path: str) -> bool:
    """Tell whether a path looks like that of a lock file."""
    return _LOCK_NAME.search(path.removesuffix(_DELETED).rpartition("/")[2]) is not None


def read_locks(proc: str) -> dict[FileId, Held]:
    """Return every lock of this PID namespace; those of others are not shown. Raises OSError."""
    table: dict[FileId, Held] = {}
    with open(f"{proc}/locks", encoding="ascii") as lines:  # noqa: PTH123 - a kernel file
        for line in lines:
            if (lock := _LINE.match(line)) and (file := _file_of(lock["file"])):
                held = table.setdefault(file, Held([], []))
                pid = int(lock["pid"])
                if lock["blocked"]:
                    held.blocked.append(pid)
                else:
                    held.owners.insert(0 if lock["kind"] == "WRITE" else len(held.owners), pid)
    return table


def lock_files_of(proc: str, pid: int, wanted: Callable[[str], bool] = is_lock_name) -> Iterator[OpenFile]:
    """Yield the lock files that a process has open. Raises PermissionError where that may not be seen."""
    folder = f"{proc}/{pid}/fd"
    try:
        descriptors = os.listdir(folder)  # noqa: PTH208 - many are read
    except (FileNotFoundError, ProcessLookupError):
        return
    for descriptor in descriptors:
        try:
            path = os.readlink(f"{folder}/{descriptor}")  # noqa: PTH115
            if path.startswith("/") and wanted(path):
                yield _open_file(proc, pid, descriptor, path)
        except (FileNotFoundError, ProcessLookupError):
            continue


def waits_for_a_lock(proc: str, pid: int) -> bool:
    """Tell whether a thread of the process sleeps in the kernel's wait for a lock."""
    try:
        tasks = os.listdir(f"{proc}/{pid}/task")  # noqa: PTH208
    except OSError:
        return False
    return any(_read(f"{proc}/{pid}/task/{task}/wchan") in WAITING_CHANNELS for task in tasks)


def _open_file(proc: str, pid: int, descriptor: str, path: str) -> OpenFile:
    stat = os.stat(f"{proc}/{pid}/fd/{descriptor}")  # noqa: PTH116
    facts = _read(f"{proc}/{pid}/fdinfo/{descriptor}").splitlines()
    fields = dict(line.split(":", 1) for line in facts if not line.startswith("lock:") and ":" in line)
    held = [lock for line in facts if line.startswith("lock:") and (lock := _LINE.match(line[5:].strip()))]
    file = next((file for lock in held if (file := _file_of(lock["file"]))), None)
    if file is None:
        device = _device_of_mount(proc, pid, fields.get("mnt_id", "").strip())
        inode = int(fields.get("ino", stat.st_ino))  # in fdinfo since Linux 5.14
        file = FileId(device or f"{os.major(stat.st_dev):02x}:{os.minor(stat.st_dev):02x}", inode)
    return OpenFile(pid, path, file, bool(held), stat.st_mtime)


def _device_of_mount(proc: str, pid: int, mount: str) -> str | None:
    """Return the device of a mount as ``/proc/locks`` prints it: hexadecimal, at least two digits."""
    for line in _read(f"{proc}/{pid}/mountinfo").splitlines():
        columns = line.split(" ", 3)
        if columns[0] == mount:
            major, minor = columns[2].split(":")
            return f"{int(major):02x}:{int(minor):02x}"
    return None


def _file_of(text: str) -> FileId | None:
    device, _, inode = text.rpartition(":")
    return FileId(device, int(inode)) if inode.isdigit() else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a kernel file
            return file.read()
    except OSError:
        return ""
