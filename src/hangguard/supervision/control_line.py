"""JSON objects over the control socket of a run, one a line: bounded in length, and nothing in here blocks."""

from __future__ import annotations

import json
import socket
from typing import Any

import anyio

PROTOCOL = 1
LONGEST_REQUEST = 64 << 10
LONGEST_ANSWER = 16 << 20
"""A status of ten thousand members is a thirtieth of that."""
_AT_ONCE = 1 << 16


class BadLineError(ValueError):
    """What came is no line of this protocol."""


class ControlLine:
    """One connection, from either side. Belongs to one task, but for :meth:`until_hung_up` beside another."""

    def __init__(self, connection: socket.socket, *, longest: int) -> None:
        connection.settimeout(0.0)
        self._socket = connection
        self._longest = longest
        self._arrived = bytearray()

    async def take(self) -> dict[str, Any] | None:
        """Return the next object; ``None``: the other side has hung up. Raises :class:`BadLineError`."""
        while b"\n" not in self._arrived:
            if len(self._arrived) > self._longest:
                raise BadLineError(f"a line ends within {self._longest} bytes")
            if not await self._receive():
                return None
        line, _, rest = bytes(self._arrived).partition(b"\n")
        self._arrived = bytearray(rest)
        return _understood(line)

    async def put(self, **fields: object) -> bool:
        """Send one object; return whether the other side could still take it."""
        data = memoryview(json.dumps({"v": PROTOCOL, **fields}, ensure_ascii=True).encode() + b"\n")
        try:
            while data:
                try:
                    data = data[self._socket.send(data, socket.MSG_NOSIGNAL) :]
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
        except OSError:
            return False
        return True

    async def until_hung_up(self) -> None:
        """Return when the other side is gone, or says more than it was asked for."""
        await self._receive()

    def close(self) -> None:
        """Hang up, for forked children that have the descriptor too."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        finally:
            self._socket.close()

    async def _receive(self) -> bool:
        while True:
            try:
                more = self._socket.recv(_AT_ONCE)
            except BlockingIOError:
                await anyio.wait_readable(self._socket)
                continue
            except OSError:
                return False
            self._arrived += more
            return bool(more)


def _understood(line: bytes) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        raise BadLineError("that is no JSON") from None
    if not isinstance(message, dict):
        raise BadLineError("that is no JSON object")
    if message.get("v") != PROTOCOL:
        raise BadLineError(f"protocol {str(message.get('v'))[:20]!r} is not spoken here, only {PROTOCOL}")
    return message
