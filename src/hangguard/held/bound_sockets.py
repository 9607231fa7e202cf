"""Which named sockets are bound, asked of the kernel over netlink: ``/proc/net/unix`` tells no inode of the name."""

from __future__ import annotations

import os
import socket
import struct

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_MESSAGE = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_VFS = struct.Struct("=II")
_REQUEST_DUMP, _SOCK_DIAG_BY_FAMILY, _ERROR, _DONE = 0x301, 20, 2, 3
_SHOW_NAME, _SHOW_VFS, _NAME_OF, _VFS_OF = 1, 2, 0, 1
_ALL_STATES, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
_ESTABLISHED = 1
"""Of a connection that was accepted the kernel tells its listener's name."""


class Bound:
    """A socket with a name in a folder: the name as it was bound, and the file behind it as the kernel knows it."""

    __slots__ = ("device", "inode", "path")

    def __init__(self, path: str, inode: int, device: int) -> None:
        self.path = path
        self.inode = inode
        self.device = (device >> 20, device & 0xFFFFF)  # the kernel's own form: include/linux/kdev_t.h


def bound_sockets() -> dict[int, Bound]:
    """Return the named Unix sockets of our network namespace by the number that ``/proc/PID/fd`` shows.

    ``/proc/net/unix`` has the names, and not which file is behind each: another socket may have the name by now.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(2.0)
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_NAME | _SHOW_VFS, _NO_COOKIE, _NO_COOKIE)
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, socket.AF_UNIX, 0)
        diag.send(header + request)
        return dict(_answers(diag))


def _answers(diag: socket.socket) -> Iterator[tuple[int, Bound]]:
    while True:
        data = diag.recv(1 << 18)
        start = 0
        while start + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, start)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -int(struct.unpack_from("=i", data, start + _HEADER.size)[0])
                raise OSError(number, os.strerror(number))
            yield from _socket_in(data[start + _HEADER.size : start + length])
            start += max(_HEADER.size, length + 3 & ~3)


def _socket_in(message: bytes) -> Iterator[tuple[int, Bound]]:
    _, kind, state, _, number, *_ = _MESSAGE.unpack_from(message)
    parts: dict[int, bytes] = {}
    start = _MESSAGE.size
    while start + _ATTRIBUTE.size <= len(message):
        length, what = _ATTRIBUTE.unpack_from(message, start)
        parts[what] = message[start + _ATTRIBUTE.size : start + length]
        start += max(_ATTRIBUTE.size, length + 3 & ~3)
    name = parts.get(_NAME_OF, b"").rstrip(b"\0")
    is_accepted = state == _ESTABLISHED and kind != socket.SOCK_DGRAM
    if name and not name.startswith(b"\0") and _VFS_OF in parts and not is_accepted:
        yield number, Bound(os.fsdecode(name), *_VFS.unpack_from(parts[_VFS_OF]))
