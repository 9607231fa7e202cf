"""What the threads of a process sleep in: the kernel's function, and whether the sleep ends by itself.

``/proc/PID/task/TID/wchan`` names the function. A lock that is waited for with a timeout looks there just like
one that is waited for without, so for those the system call's arguments tell (``syscall`` beside it; it needs the
right to trace, as ``wchan`` and py-spy do).
"""

from __future__ import annotations

import os
import platform
from pathlib import Path

TIMED = "timed "
"""Before a channel: the wait ends by itself after a time."""
PERHAPS_TIMED = "perhaps timed "
"""The same where the arguments cannot be seen."""

MOST_THREADS = 1024
"""Two reads of some 5 µs each a thread."""

_CALLS = {
    "x86_64": {
        "read": 0, "write": 1, "open": 2, "poll": 7, "ioctl": 16, "select": 23, "nanosleep": 35, "connect": 42,
        "accept": 43, "sendto": 44, "recvfrom": 45, "sendmsg": 46, "recvmsg": 47, "wait4": 61, "flock": 73, "fsync": 74,
        "futex": 202, "clock_nanosleep": 230, "epoll_wait": 232, "waitid": 247, "openat": 257, "pselect6": 270,
        "ppoll": 271, "epoll_pwait": 281, "accept4": 288,
    },
    "aarch64": {
        "epoll_pwait": 22, "ioctl": 29, "flock": 32, "openat": 56, "read": 63, "write": 64, "pselect6": 72, "ppoll": 73,
        "fsync": 82, "waitid": 95, "futex": 98, "nanosleep": 101, "clock_nanosleep": 115, "accept": 202, "connect": 203,
        "sendto": 206, "recvfrom": 207, "sendmsg": 211, "recvmsg": 212, "accept4": 242, "wait4": 260,
    },
}  # fmt: skip
"""arch/x86/entry/syscalls/syscall_64.tbl, include/uapi/asm-generic/unistd.h."""
_NAMES = {str(number): name for name, number in _CALLS.get(platform.machine(), {}).items()}

_FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine())
_TIMEOUT = 4  # futex(uaddr, op, val, timeout, ...): the fifth word of the line, after the call's number


def wait_channels(pid: int) -> dict[int, str]:
    """Return what every thread of a process waits in, by its number; "": it runs. The first is the main thread.

    Raises :class:`OSError` when the process has ended. A thread that ends meanwhile is left out.
    """
    threads = sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda tid: (tid != pid, tid))  # noqa: PTH208
    found = {}
    for tid in threads[:MOST_THREADS]:
        try:
            found[tid] = wait_channel(f"/proc/{pid}/task/{tid}")
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def system_calls(pid: int) -> dict[int, str]:
    """Return the system call that each thread is in, by name or number; left out: in none, or it may not be seen."""
    found = {}
    for tid in sorted(map(int, os.listdir(f"/proc/{pid}/task")))[:MOST_THREADS]:  # noqa: PTH208
        try:
            number = Path(f"/proc/{pid}/task/{tid}/syscall").read_text(encoding="ascii", errors="replace").split()[0]
        except PermissionError:
            return {}  # of one thread as of all
        except (OSError, IndexError):
            continue
        if number.isdigit():  # "running"; -1: asleep in no call, in a page fault for example
            found[tid] = _NAMES.get(number, number)
    return found


def wait_channel(folder: str) -> str:
    """Return what one thread waits in. Raises :class:`OSError` where it cannot be seen, or has ended."""
    channel = Path(folder, "wchan").read_text(encoding="ascii", errors="replace")
    if channel == "0":
        return ""
    if not channel.startswith("futex"):
        return channel
    try:
        words = Path(folder, "syscall").read_text(encoding="ascii", errors="replace").split()
    except ProcessLookupError:
        raise
    except OSError:  # not permitted, or a kernel without it
        return PERHAPS_TIMED + channel
    if words[0] == "running":
        return ""
    if words[0] != str(_FUTEX):  # futex_waitv, another machine, a 32-bit program
        return PERHAPS_TIMED + channel
    return channel if int(words[_TIMEOUT], 16) == 0 else TIMED + channel
