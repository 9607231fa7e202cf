# ruff: noqa: PTH123
"""Signals to members, each through a descriptor that means exactly this process, and how one has ended.

Standard library only, as everything that the guardian imports.
"""

from __future__ import annotations

import fcntl
import os
import signal
import struct

from hangguard.act._membership import ancestors, read_entry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangguard.act._membership import Identity

PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
"""Linux 6.15, include/uapi/linux/pidfd.h: the exit code of a process that was not our child."""


def open_pidfd(identity: Identity) -> int | None:
    """Return a descriptor that means exactly this process; ``None``: it is gone, or there are no pidfds.

    Raises :class:`OSError` where it cannot be proved to be that process: no descriptor is left to look at it.
    """
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = os.pidfd_open(identity[0])
    except OSError:
        return None
    try:
        entry = read_entry(identity[0])
    except OSError:
        os.close(pidfd)
        raise
    if entry is None or entry.identity != identity:
        os.close(pidfd)
        return None
    return pidfd


def send(identity: Identity, number: int, members: Iterable[Identity]) -> bool:
    """Signal a member; return whether the kernel took it.

    Refused (``False``) for whatever is not in ``members``, for pid 1 and below, for this process and for its
    ancestors; and where nobody can look whether it is one of these.
    """
    pid, pidfd = identity[0], None
    if identity not in members or pid <= 1 or pid == os.getpid():
        return False
    try:
        if pid in ancestors(os.getpid()):
            return False
        pidfd = open_pidfd(identity)
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, number)
            return True
        entry = read_entry(pid)
        if entry is None or entry.identity != identity:
            return False
        os.kill(pid, number)  # no pidfds here: between the look above and this line lies as little as can be
    except OSError:
        return False
    else:
        return True
    finally:
        if pidfd is not None:
            os.close(pidfd)


def takes_sigterm(pid: int) -> str:
    """Return what SIGTERM would do to a process: ends, calls (a handler of its own), nothing; empty: not known.

    ``status`` does not wait for the process either.
    """
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            lines = dict(line.split(b":", 1) for line in file.read(8192).splitlines() if b":" in line)
        ignored, caught = int(lines[b"SigIgn"], 16), int(lines[b"SigCgt"], 16)
    except (OSError, ValueError, KeyError):
        return ""
    bit = 1 << (signal.SIGTERM - 1)
    return "nothing" if ignored & bit else "calls" if caught & bit else "ends"


def exit_code_of(pidfd: int) -> int | None:
    """Return how a process that was not our child ended, as ``Popen.returncode``; ``None``: not known.

    The kernel (6.15 and later) knows it once its parent has waited for it.
    """
    buffer = bytearray(64)
    struct.pack_into("Q", buffer, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    if not struct.unpack_from("Q", buffer, 0)[0] & PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(struct.unpack_from("i", buffer, 60)[0])
