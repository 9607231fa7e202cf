"""The Python stacks of another process, read from its memory: nothing is stopped, run or opened that it names.

For where ptrace allows only ancestors (Yama's ``ptrace_scope`` 1, Documentation/admin-guide/LSM/Yama.rst): py-spy
is our child and no ancestor of the members, the guardian is. Standard library only, because the guardian imports
this package (``python -I -S`` knows no others), when it is asked the first time.

All reads go through ``/proc/PID/mem``. It means one address space from its opening on, so that a pid that is
used again is never read, and unlike process_vm_readv(2) it gives up the wait for the memory-map lock when the
reader is killed (mm/memory.c, ``mmap_read_lock_killable``). It may block all the same, as may ``maps``: call
this in a thread that can be left behind.
"""

from __future__ import annotations

import os
import struct
import time

from .image import find_symbols
from .layouts import layout_of
from .memory import Memory, Torn, Unreadable
from .walk import Walk

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

TRIES = 12
"""Of a process that changes while it is read. A walk takes some 20 µs a thread: a few retries nearly always do."""
PAUSE = 0.001

ENDED = "the process has ended"
NOT_PYTHON = "not a Python program"


def read_threads(pid: int, started: int, *, within: float) -> dict[str, Any]:
    """Return what every Python thread of (pid, start time) does, or why that cannot be told.

    ``{"threads": [{"id", "is_main", "frames": [[function, file, line], …]}, …], "python": "3.12"}``, innermost
    frame first, in the order of their numbers: the kernel's, or before 3.11 that of pthread_self(3). Otherwise
    ``{"unseen": reason, "is_python": bool}``. A process that changes while it is read is read again; what cannot be
    read whole is not told at all, since half a stack looks like another one.
    """
    try:
        with Memory(pid, ends_at=time.monotonic() + within) as memory:
            if start_time(pid) != started:
                return _unseen(ENDED)
            found = _read(memory)
    except Unreadable as problem:
        return _unseen(str(problem), is_python=problem.is_python)
    except FileNotFoundError:
        return _unseen(ENDED)
    except PermissionError:
        return _unseen("its memory may not be read: another user's, or ptrace is restricted here")
    except OSError as problem:
        return _unseen(f"its memory cannot be read: {problem.strerror}")
    except (struct.error, LookupError, ValueError):  # offsets and sizes are the process's own word
        return _unseen("what its memory holds is no interpreter that is known")
    # What was read is of the process that was opened, but it may have ended, or become another program, meanwhile.
    return found if start_time(pid) == started else _unseen(ENDED)


def start_time(pid: int) -> int | None:
    """Return field 22 of proc_pid_stat(5); ``None``: there is no such process, or it is hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:  # noqa: PTH123 - pathlib would double the start
            text = file.read(1024)
    except OSError:
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return int(fields[19]) if len(fields) > 19 else None


def _read(memory: Memory) -> dict[str, Any]:
    symbols = find_symbols(memory)
    if symbols is None:
        raise Unreadable(NOT_PYTHON, is_python=False)
    layout = layout_of(memory, symbols)
    walk = Walk(memory, symbols, layout)
    problem = ""
    for _ in range(TRIES):
        try:
            return {"threads": walk.take(_tasks(memory.pid)), "python": layout.version}
        except Torn as torn:
            problem = str(torn)
        time.sleep(PAUSE)
        memory.look_again()
    raise Unreadable(f"it ran on while it was read ({problem})")


def _tasks(pid: int) -> frozenset[int]:
    return frozenset(int(name) for name in os.listdir(f"/proc/{pid}/task"))  # noqa: PTH208


def _unseen(reason: str, *, is_python: bool = True) -> dict[str, Any]:
    return {"unseen": reason, "is_python": is_python}
