"""The guardian of a run whose supervisor is dead: proved to be it, then told to end the server.

A pid from a state file proves nothing: the file may be old, or planted. The guardian of a run is the process that holds
the lock of the run's folder, as the kernel says of that process's own descriptors. Plain functions that block.
"""

from __future__ import annotations

import os
import signal
from contextlib import suppress

from hangguard.act import _membership, _signals
from hangguard.run_state import opened_privately

LOCK = "lock"


def why_not_its_guardian(identity: tuple[int, int], folder: str) -> str:
    """Return why this process is not the living guardian of the run in this folder; empty: it is, proved."""
    if misled := _membership.why_proc_misleads():
        return misled
    if not _membership.is_alive(identity):
        return f"process {identity[0]} is not its guardian any more"
    try:
        with opened_privately(folder) as opened:
            lock = os.stat(LOCK, dir_fd=opened, follow_symlinks=False)
        holds = _holds(identity[0], (lock.st_dev, lock.st_ino))
    except OSError as problem:
        return f"whether process {identity[0]} is its guardian cannot be seen ({problem.strerror or problem})"
    if not holds or not _membership.is_alive(identity):
        return f"process {identity[0]} does not hold the lock of the run, so it is not its guardian"
    return ""


def tell_to_end(identity: tuple[int, int], folder: str) -> str:
    """Ask the guardian of this run for the end of the server; return why that was not done, empty: it was.

    SIGTERM is what it takes for that. SIGCONT, because a stopped process hears nothing.
    """
    if why := why_not_its_guardian(identity, folder):
        return why
    if not _signals.send(identity, signal.SIGTERM, (identity,)):
        return f"process {identity[0]}, its guardian, could not be signalled"
    _signals.send(identity, signal.SIGCONT, (identity,))
    return ""


def _holds(pid: int, file: tuple[int, int]) -> bool:
    """Tell whether a descriptor of this process holds a lock on this file. Raises :class:`OSError`."""
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        with suppress(FileNotFoundError):
            status = os.stat(f"/proc/{pid}/fd/{name}")  # noqa: PTH116
            if (status.st_dev, status.st_ino) == file and _has_lock(pid, name):
                return True
    return False


def _has_lock(pid: int, descriptor: str) -> bool:
    """``lock:  1: FLOCK  ADVISORY  WRITE 4711 fe:00:2146321 0 EOF``, proc_pid_fdinfo(5): of this open file only."""
    with open(f"/proc/{pid}/fdinfo/{descriptor}", encoding="ascii", errors="replace") as lines:  # noqa: PTH123
        return any(line.startswith("lock:") and " FLOCK " in line and " WRITE " in line for line in lines)
