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
