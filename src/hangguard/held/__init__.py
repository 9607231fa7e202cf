"""Which files of shared memory, and which named sockets, processes have: the provenance of what may be left.

Synchronous and standard library only: the guardian imports this file, and looks a last time before its
first signal. Everything of a process is read through one descriptor of its folder in ``/proc``, which means that
process and no later one of its pid.

``maps`` takes the memory-map lock, which a process stuck in a driver may hold for ever: run a :class:`Look` in a thread
that may be left behind. What it has found by then is in ``found``.
"""

from __future__ import annotations

from hangguard.held.files import DATED, MEMORY, ORDER, SHARED_MEMORY, file_id, key_of, may_be_left, names_in
from hangguard.held.look import Look, file_system_of
from hangguard.held.others import Others

TYPE_CHECKING = False
if TYPE_CHECKING:
    from hangguard.held.files import FileId as FileId
    from hangguard.held.files import Identity as Identity
    from hangguard.held.files import Plain as Plain

__all__ = [
    "DATED",
    "MEMORY",
    "ORDER",
    "SHARED_MEMORY",
    "Look",
    "Others",
    "file_id",
    "file_system_of",
    "key_of",
    "may_be_left",
    "names_in",
]
