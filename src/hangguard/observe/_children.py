"""Short-lived helpers of our own that may hang in the kernel: killed, and never waited for without bound."""

from __future__ import annotations

import subprocess
import threading
import time
from typing import IO

import anyio

_LOCK = threading.Lock()
"""Held for moments only: helpers are started in a lane and ended in the event loop."""
_GIVEN_UP: list[subprocess.Popen[bytes]] = []
"""Killed, but not ended yet: a process in state D ignores SIGKILL until its driver call returns.

They are kept because a ``Popen`` that is collected before its process has ended warns, and are looked at
whenever another helper is reaped.
"""


class Children:
    """The helpers of one owner. Each is our own child: its pid is nobody else's until ``Popen`` reaps it."""

    def __init__(self) -> None:
        self._living: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def start(
        self, argv: tuple[str, ...], *, stdin: IO[bytes] | int, stdout: IO[bytes] | int, stderr: IO[bytes] | int
    ) -> subprocess.Popen[bytes]:
        """Start a helper in a session of its own (Ctrl-C is not meant for it). Blocks: call it in a lane.

        One that is started after its owner has closed is killed at once.
        """
        child = subprocess.Popen(argv, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True)
        with _LOCK:
            if self._closed:
                child.kill()
                _GIVEN_UP.append(child)
            else:
                self._living.append(child)
        return child

    def reap(self) -> None:
        """Take note of those that have ended. Never blocks."""
        with _LOCK:
            self._living = [child for child in self._living if child.poll() is None]
            _GIVEN_UP[:] = [child for child in _GIVEN_UP if child.poll() is None]

    async def aclose(self, *, within: float = 1.0) -> None:
        """Kill all and wait a moment; what has not ended by then is given up, and reaped some other time."""
        with _LOCK:
            self._closed = True
            for child in self._living:
                child.kill()
        give_up_at = time.monotonic() + within
        self.reap()
        with anyio.CancelScope(shield=True):
            while self._living and time.monotonic() < give_up_at:
                await anyio.sleep(0.005)
                self.reap()
        with _LOCK:
            _GIVEN_UP.extend(self._living)
            self._living = []
