"""Runs of ours that are not over, or that left something. Nothing is opened, taken or tried: the kernel is asked.

A run's folder proves nothing by being there. Its guardian lives as long as somebody holds the lock in it, and a process
belongs to it if its output goes to the run's log through a descriptor that writes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from hangguard.facts import EarlierRun
from hangguard.observe._kernel_locks import FileId, Held, lock_files_of, read_locks
from hangguard.observe.procfs import read_bytes, read_title

MOST_RUNS = 500
"""The newest folders; their names begin with the time of their start."""

FileNumber = tuple[int, int]


def read_earlier_runs(
    base: str, *, recorded: Callable[[str], tuple[str, ...]] = lambda _folder: (), proc: str = "/proc"
) -> tuple[EarlierRun, ...]:
    """Return the runs below ``base`` that are not over, newest first; a folder that is another user's is left out.

    ``recorded`` returns what is still there of the files that the run in a folder recorded as its own. Blocks. Raises
    OSError where ``base`` or the kernel's locks cannot be read; a ``base`` that does not exist holds no run.
    """
    folders = sorted(_folders(base), reverse=True)[:MOST_RUNS]
    if not folders:
        return ()
    table = read_locks(proc)
    writers = writers_to(logs_in(folders), proc)
    runs = (
        EarlierRun(
            run_id=os.path.basename(folder),  # noqa: PTH119
            path=folder,
            guardian=holder_of_lock(folder, table, proc),
            members=tuple((pid, read_title(pid, proc)) for pid in sorted(writers.get(folder, ()))),
            files=recorded(folder),
        )
        for folder in folders
    )
    return tuple(run for run in runs if run.guardian is not None or run.members or run.files)


def _folders(base: str) -> Iterator[str]:
    try:
        entries = os.scandir(base)
    except (FileNotFoundError, NotADirectoryError):
        return
    with entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False) and entry.stat(follow_symlinks=False).st_uid == os.geteuid():
                yield entry.path


def logs_in(folders: Iterable[str]) -> dict[FileNumber, str]:
    """Return (device, inode) of every log in these folders, with the folder."""
    found = {}
    for folder in folders:
        for log in Path(folder).glob("attempt-*.log"):
            try:
                status = log.lstat()
            except OSError:
                continue
            found[status.st_dev, status.st_ino] = folder
    return found


def writers_to(logs: dict[FileNumber, str], proc: str) -> dict[str, set[int]]:
    """Return by folder whose standard output or error goes to one of its logs; a reader (``tail -f``) is none."""
    found: dict[str, set[int]] = {}
    for name in os.listdir(proc):  # noqa: PTH208
        for descriptor in ("1", "2") if name.isdigit() else ():
            try:
                status = os.stat(f"{proc}/{name}/fd/{descriptor}")  # noqa: PTH116
                folder = logs.get((status.st_dev, status.st_ino))
                if folder is not None and _writes(f"{proc}/{name}/fdinfo/{descriptor}"):
                    found.setdefault(folder, set()).add(int(name))
            except OSError:
                continue
    return found


def _writes(path: str) -> bool:
    """``flags:`` of proc_pid_fdinfo(5), in octal."""
    lines = read_bytes(path).decode(errors="replace").splitlines()
    flags = next((int(line.split()[1], 8) for line in lines if line.startswith("flags:")), os.O_RDONLY)
    return flags & os.O_ACCMODE != os.O_RDONLY


def holder_of_lock(folder: str, table: dict[FileId, Held], proc: str = "/proc") -> int | None:
    """Return who holds the lock of a run: by inode among the kernel's locks, then by the very path of the descriptor.

    That is the path without links, as the kernel knows it. ``table`` is what :func:`read_locks` returned.
    """
    lock = os.path.join(os.path.realpath(folder), "lock")  # noqa: PTH118
    try:
        inode = os.lstat(lock).st_ino
    except OSError:
        return None
    for file, held in table.items():
        for pid in held.owners if file.inode == inode else ():
            try:
                if pid > 0 and any(opened.holds for opened in lock_files_of(proc, pid, lambda path: path == lock)):
                    return pid
            except OSError:
                continue
    return None
