"""The log of one attempt is kept within its bound: a slow or full disk costs the bound, never the watch."""

from __future__ import annotations

import threading
from collections import deque

import anyio

from hangguard.act._hole import HollowFile

DEFAULT = 256 << 20
"""Bytes of the disk that one log may take: hours of a server that notes every request."""
LEAST = 1 << 20
"""Less than this would not hold the arguments at the start and a traceback of every rank at the end."""

PERIOD = 1.0
"""Seconds between two looks at the size: what the server writes meanwhile is what the log may take more."""
FAREWELL = 2.0
"""Seconds that the disk gets for the last time, when nobody writes any more."""


class LogCap:
    """Gives the middle of one log back to the disk, once it has more than ``keep_bytes``, in a thread of its own.

    It goes on during a look that waits for something wedged, while evidence is kept and in the grace of a stop. A disk
    that never answers costs the thread. Close it.
    """

    def __init__(self, path: str, identity: tuple[int, int], keep_bytes: int) -> None:
        self._file = HollowFile(path, identity, keep_bytes)
        self._keep_bytes = keep_bytes
        self._told: set[int | None] = set()
        self._news: deque[str] = deque()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._keep_on, name="hangguard log cap", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as problem:  # RLIMIT_NPROC, or the limit of the control group (pids.max)
            self._tell_once(0, f"the log cannot be bounded ({problem}): it grows as it is written")
            self._file.close()

    @property
    def cut_bytes(self) -> int:
        """Return what has been given back so far."""
        return self._file.cut_bytes

    def news(self) -> list[str]:
        """Return what a person should know and was not told yet."""
        return [self._news.popleft() for _ in range(len(self._news))]

    async def aclose(self) -> None:
        """Keep the bound once more, and let the file go. Waits for no wedged disk."""
        self._closing.set()
        with anyio.move_on_after(FAREWELL):
            while self._thread.is_alive():  # noqa: ASYNC110 - it knows no loop that it could ring in
                await anyio.sleep(0.01)

    def _keep_on(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(PERIOD)
            self._keep()
        self._file.close()

    def _keep(self) -> None:
        try:
            cut = self._file.keep()
        except OSError as problem:
            self._tell_once(problem.errno, f"the log cannot be bounded ({problem.strerror}): it grows as it is written")
            return
        if cut:
            size = f"{self._keep_bytes >> 20} MiB"
            self._tell_once(None, f"the log has more than {size}: its middle is cut out, start and newest part stay")

    def _tell_once(self, about: int | None, text: str) -> None:
        if about not in self._told:
            self._told.add(about)
            self._news.append(text)
