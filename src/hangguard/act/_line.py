"""The guardian's end of the link: one JSON object a line, each with ``"v": 1``.

Standard library only, imported by the guardian.
"""

from __future__ import annotations

import contextlib
import json
import socket

PROTOCOL = 1
LONGEST_LINE = 64 << 20
LONGEST_QUEUE = 1 << 20


class Line:
    """Messages over the socket, which may be slow, full or gone: nothing here ever waits."""

    def __init__(self, control: socket.socket) -> None:
        control.settimeout(0.0)
        self._socket = control
        self._received = bytearray()
        self._queue: list[bytes] = []
        self._queued = 0
        self._is_heard = True
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._queue) and not self.ended

    @property
    def has_room(self) -> bool:
        """Whether whoever reads has kept up so far."""
        return self._queued <= LONGEST_QUEUE

    def take(self) -> list[bytes]:
        """Return the lines that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    received = self._socket.recv(1 << 18)
                except ConnectionError:
                    received = b""
                self._received += received
                self.ended = not received or len(self._received) > LONGEST_LINE
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return lines

    def put(self, say: str, **fields: object) -> None:
        """Queue a message; news of orphans and progress are dropped when nobody reads."""
        if self.ended or not self._is_heard or (not self.has_room and say in {"reaped", "progress"}):
            return
        text = json.dumps({"v": PROTOCOL, "say": say, **fields}).encode() + b"\n"
        self._queue.append(text)
        self._queued += len(text)

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self.waits:
                sent = self._socket.send(self._queue[0], socket.MSG_NOSIGNAL)
                self._queued -= sent
                self._queue[0] = self._queue[0][sent:]
                if not self._queue[0]:
                    del self._queue[0]
        except BlockingIOError:
            return
        except OSError:  # nobody reads; what was written before is still to be taken, a request to stop for one
            self._is_heard = False
            self._queue.clear()
            self._queued = 0
