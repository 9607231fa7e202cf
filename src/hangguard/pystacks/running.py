"""Whether a thread of another process ran meanwhile.

A thread that waits for a processor may have been interrupted in the middle of a call: its frames then stand still, and
are no stack. A thread that sleeps went to sleep by itself, in the kernel; one that ran on is elsewhere by now.
"""

from __future__ import annotations

import contextlib

ASLEEP = "SDTtIZX"
"""States in which a thread does not run before something else happens (proc_pid_stat(5))."""


def clock(pid: int, thread: int) -> tuple[bool, str]:
    """Return whether the thread is asleep, and how long it has run: only to be compared.

    A thread that has ended is asleep. The kernel counts in steps of its timer, 1 to 10 ms, and of every switch.
    """
    place = f"/proc/{pid}/task/{thread}"
    try:
        stat = _read(f"{place}/stat")
        fields = stat[stat.rfind(")") + 2 :].split()
        state, ran = fields[0], "".join(fields[11:13])
    except (OSError, LookupError):
        return True, "ended"
    with contextlib.suppress(OSError, LookupError):
        ran = _read(f"{place}/schedstat").split()[0]  # finer, where the kernel has CONFIG_SCHED_INFO
    return state in ASLEEP, ran


def _read(path: str) -> str:
    with open(path, "rb", buffering=0) as file:  # noqa: PTH123 - pathlib would double the start
        return file.read(1024).decode("ascii", "replace")
