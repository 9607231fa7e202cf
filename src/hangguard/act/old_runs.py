"""Deletes the folders of old runs, so that they do not pile up in the user's state folder.

Only there, and only a folder that is provably a run's, and over: the user's own, mode 0700, with a marker that names
this very folder, nothing in it but files that runs write, and nobody has a lock on any of them. Its supervisor holds
one on the marker, its guardian one on ``lock``, and every member that writes to a log one on that. Everything in it is
reached through descriptors, so that no link is followed and no path can come to mean something else meanwhile.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

from hangguard.act.leftovers import still_there
from hangguard.facts import Unseen
from hangguard.observe.lane import in_time
from hangguard.run_state import STATE, read_run, this_place, why_elsewhere
from hangguard.store import CONTROL, MARKER, RUN_ID, SUPERVISOR_LOG, RunFolder, mark_of

log = logging.getLogger("hangguard")

NEWEST, NEWEST_BAD = 20, 30
"""What is kept: this many runs, and of those before them this many in which an attempt went wrong."""
MOST_BYTES = 2 << 30
"""What all of them may take of the disk; the newest one stays, whatever it takes."""
WITHIN = 2.0
"""Seconds that a start waits for the disk; what takes longer goes on in its thread."""

_EVIDENCE = re.compile(r"attempt-\d+\.evidence\.json", re.ASCII)
_LOCKED = re.compile(rf"{re.escape(MARKER)}|lock|attempt-\d+\.log", re.ASCII)
WRITTEN = (
    _EVIDENCE,
    _LOCKED,
    re.compile(re.escape(STATE)),
    re.compile(re.escape(SUPERVISOR_LOG)),
    re.compile(r"\..+\.part-\d+-[0-9a-f]{8}", re.ASCII),  # of write_private, whose writer was killed
)
"""What runs write, and one socket beside it, which a supervisor that was killed leaves. A folder with anything else in
it is left alone: somebody keeps something there."""


def is_never_started(path: str) -> bool:
    """Whether in the folder of a run there is nothing but the mark that it is one, and nobody has a lock on that.

    It was made, and its program ended before anything was noted or launched. Blocks; never raises.
    """
    with suppress(OSError), _opened(os.path.dirname(path)) as base, _unused(base, os.path.basename(path)) as (_, files):  # noqa: PTH119, PTH120
        return set(files) == {MARKER}
    return False


def delete_never_started(path: str) -> bool:
    """Delete such a folder; return whether that was done. Blocks; never raises."""
    with suppress(OSError), _opened(os.path.dirname(path)) as base:  # noqa: PTH120
        status = os.fstat(base)
        if status.st_uid == os.geteuid() and not status.st_mode & 0o022:  # else others could put something there
            return _delete(base, os.path.basename(path), only_mark=True)  # noqa: PTH119
    return False


async def delete_old_runs(folder: RunFolder) -> None:
    """Keep the runs within their bounds, before a new one begins. Never raises, and waits for no wedged disk."""
    home = folder.home
    if home is None:
        return
    try:
        deleted = await in_time("old runs", lambda: delete_in(home), within=WITHIN)
    except OSError as problem:
        log.info("old runs in %s are left: %s", home, problem)
        return
    if not isinstance(deleted, Unseen) and deleted:
        log.info("deleted the folders of %d old runs in %s: %s", len(deleted), home, ", ".join(deleted))


def delete_in(
    home: str, *, newest: int = NEWEST, newest_bad: int = NEWEST_BAD, most_bytes: int = MOST_BYTES
) -> tuple[str, ...]:
    """Delete runs that are over and too many; return their names. Blocks. Raises :class:`OSError` for ``home``."""
    with _opened(home) as base:
        status = os.fstat(base)
        if status.st_uid != os.geteuid() or status.st_mode & 0o022:
            return ()  # others could put something here that looks like ours
        names = sorted(filter(RUN_ID.fullmatch, _listed(base)), reverse=True)
        runs = [run for name in names if (run := _look(base, name)) is not None and not _has_left(home, name)]
        return tuple(run.name for run in _too_many(runs, newest, newest_bad, most_bytes) if _delete(base, run.name))


@dataclass(frozen=True, slots=True)
class _OldRun:
    name: str
    disk_bytes: int
    went_wrong: bool


def _too_many(runs: list[_OldRun], newest: int, newest_bad: int, most_bytes: int) -> list[_OldRun]:
    """Return which of these, newest first, go."""
    bad = [run for run in runs[newest:] if run.went_wrong][:newest_bad]
    kept: list[_OldRun] = []
    used = 0
    for run in [*runs[:newest], *bad]:
        used += run.disk_bytes
        if kept and used > most_bytes:
            break
        kept.append(run)
    return [run for run in runs if run not in kept]


def _look(base: int, name: str) -> _OldRun | None:
    """Return what is there under this name; ``None``: no run that is provably ours and over."""
    with suppress(OSError), _unused(base, name) as (_, files):
        return _OldRun(
            name, sum(status.st_blocks * 512 for status in files.values()), any(map(_EVIDENCE.fullmatch, files))
        )
    return None


def _has_left(home: str, name: str) -> bool:
    """Whether something of it lies in /dev/shm still: without its state file nobody could prove whose that is."""
    state = read_run(os.path.join(home, name)).state  # noqa: PTH118
    with suppress(OSError):
        here = this_place()
        return not isinstance(state, Unseen) and not why_elsewhere(state, here) and bool(still_there(state, here))
    return True


def _delete(base: int, name: str, *, only_mark: bool = False) -> bool:
    """Delete one run; the marker goes last, so that what was interrupted is found again."""
    with suppress(OSError), _unused(base, name) as (folder, files):
        if only_mark and set(files) != {MARKER}:
            return False
        for file in sorted(files, key=lambda file: file == MARKER):
            os.unlink(file, dir_fd=folder)
        os.rmdir(name, dir_fd=base)
        return True
    return False


class _NotOursError(OSError):
    """It is no run of ours, or not over."""


@contextmanager
def _unused(base: int, name: str) -> Iterator[tuple[int, dict[str, os.stat_result]]]:
    """Hold every lock of a run; give its folder and files. Raises :class:`OSError` for whatever is not provably one."""
    with ExitStack() as held, _opened(name, base) as folder:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            raise _NotOursError(name)
        marker = _lock(MARKER, folder, held)
        if not _names(os.pread(marker, 4096, 0), name):
            raise _NotOursError(name)
        files = {file: os.stat(file, dir_fd=folder, follow_symlinks=False) for file in _listed(folder)}
        for file, found in files.items():
            if found.st_uid != os.geteuid() or not _is_written(file, found.st_mode):
                raise _NotOursError(name)
        for file in filter(_LOCKED.fullmatch, files):
            if file != MARKER:
                _lock(file, folder, held)
        yield folder, files


def _is_written(file: str, mode: int) -> bool:
    """Tell whether runs make something of this name and kind. Whose supervisor lives holds the lock on the marker."""
    if file == CONTROL:
        return stat.S_ISSOCK(mode)
    return stat.S_ISREG(mode) and any(written.fullmatch(file) for written in WRITTEN)


def _lock(file: str, folder: int, held: ExitStack) -> int:
    """Lock a file for nobody but us. Opened for writing, because NFS does not lock another one (flock(2))."""
    opened = os.open(file, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, dir_fd=folder)
    held.callback(os.close, opened)
    fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return opened


def _names(mark: bytes, name: str) -> bool:
    """Tell whether a marker names this folder, and a machine on which its locks would be seen.

    A folder that was renamed, or copied, is kept. Locks of another machine on the same disk are not always seen here.
    """
    now = mark_of(name)
    try:
        said = json.loads(mark)
        return bool(said["run"] == name and (said["boot"] == now["boot"] or said["host"] == now["host"]))
    except (ValueError, TypeError, KeyError):
        return False


@contextmanager
def _opened(path: str, base: int | None = None) -> Iterator[int]:
    """Open a folder; of links only the user's own to his state folder are followed, whose target is looked at."""
    follow = 0 if base is None else os.O_NOFOLLOW
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | follow, dir_fd=base)
    try:
        yield folder
    finally:
        os.close(folder)


def _listed(folder: int) -> list[str]:
    return os.listdir(folder)
