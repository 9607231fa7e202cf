# ruff: noqa: PTH123
"""Command lines of processes, which may block: ``cmdline`` takes the memory-map lock.

A process stuck in a driver may hold that for ever. Standard library only, as everything that the guardian imports.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangguard.act._membership import Identity

TRACKER = "resource_tracker import main"
"""In the command line of ``multiprocessing``'s and loky's tracker: ``python -c 'from … import main;main(4)'``."""


class Titles:
    """Command lines, read in daemon threads of our own that may never come back."""

    def __init__(self) -> None:
        self._known: dict[Identity, str] = {}
        self._stuck = 0

    def __getitem__(self, identity: Identity) -> str:
        return self._known.get(identity, "")

    def forget(self) -> None:
        """Read again what comes next: a process may have executed another program since."""
        self._known = {}

    def learn(self, identities: Iterable[Identity], *, within: float = 0.2) -> None:
        """Read those that are not known, at most ``within`` seconds a process that blocks, and eight of those."""
        todo = deque(identity for identity in identities if identity not in self._known)
        while todo and self._stuck < 8:
            reader = threading.Thread(target=self._read, args=(todo, self._known), daemon=True)
            try:
                reader.start()
            except RuntimeError:  # no thread more is allowed here: they stay unknown
                return
            reader.join(within)
            if not reader.is_alive():
                return
            self._stuck += 1

    @staticmethod
    def _read(todo: deque[Identity], known: dict[Identity, str]) -> None:
        with contextlib.suppress(IndexError):
            while True:
                identity = todo.popleft()
                with contextlib.suppress(OSError), open(f"/proc/{identity[0]}/cmdline", "rb") as file:
                    known[identity] = file.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()
