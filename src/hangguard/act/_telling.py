"""What the guardian alone has found, told to the supervisor before anybody is signalled.

If the guardian is killed in the middle of a stop, what it knew goes with it, and those who had the files are dead by
then: nobody could tell any more whose they are. So it says whose turn it is to be looked at, and goes on once the
supervisor has looked for itself, or has had its time. A supervisor that does not read costs that time once a stop.

Standard library only, imported by the guardian. Nothing here waits.
"""

from __future__ import annotations

import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from typing import Any

    Plain = dict[str, Any]

TELL_WITHIN = 1.0
"""Seconds that a signal waits for the supervisor's own look, which takes milliseconds where it is not overloaded."""
MOST_AT_ONCE = 64
"""Files in one message: some 20 KiB with usual paths, and 2 MiB where all are as long as can be."""


class Telling:
    """Finds on their way to the supervisor. ``put`` queues a message; ``has_room`` says whether one more may be."""

    def __init__(self, put: Callable[..., None], has_room: Callable[[], bool]) -> None:
        self._put = put
        self._has_room = has_room
        self._untold: deque[Plain] = deque()
        self._told = 0
        self._heard = 0
        self._until = 0.0
        self._is_deaf = False
        """Whether the supervisor let its time go by: then it is still told, and not waited for in this stop."""

    def begin(self) -> None:
        """Begin a stop: the supervisor gets its time again."""
        self._is_deaf = False

    def add(self, files: Iterable[Plain], others: Iterable[tuple[int, int]]) -> None:
        """Tell of what members have; of ``others``, (device, inode), that they are somebody else's too."""
        not_ours, was_pending = sorted(others), self._is_pending
        if not_ours:
            self._put("found", id=self._told, files=[], others=not_ours)
        self._untold.extend(files)
        if self._untold and not was_pending:
            self._until = time.monotonic() + TELL_WITHIN
        self.go_on()

    def go_on(self) -> None:
        """Queue what there is room for."""
        while self._untold and self._has_room():
            some = [self._untold.popleft() for _ in range(min(MOST_AT_ONCE, len(self._untold)))]
            self._told += 1
            self._put("found", id=self._told, files=some, others=[])

    def hear(self, number: int) -> None:
        """Take the word of the supervisor that it has looked, up to the message of this number."""
        self._heard = max(self._heard, min(number, self._told))

    @property
    def _is_pending(self) -> bool:
        return bool(self._untold) or self._heard < self._told

    def holds_until(self, *, alone: bool) -> float:
        """Return until when a signal waits for the supervisor; 0: for nothing, or there is none."""
        if alone or self._is_deaf or not self._is_pending:
            return 0.0
        self._is_deaf = time.monotonic() >= self._until
        return 0.0 if self._is_deaf else self._until
