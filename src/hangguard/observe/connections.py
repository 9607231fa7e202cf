"""TCP connections: who holds both ends, and how many bytes came in. Everything here blocks: call it in a lane.

``recv`` does not count in ``/proc/PID/io``, so a download shows nowhere else. The kernel tells the bytes of each
connection over a netlink socket (sock_diag(7)); ``/proc/net/tcp`` has the same connections without the bytes.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from hangguard.observe.procfs import tcp_tables

_ESTABLISHED = 1
"""TCP_ESTABLISHED, include/net/tcp_states.h."""

# include/uapi/linux/{netlink,sock_diag,inet_diag,tcp}.h
_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301
_ERROR, _DONE = 2, 3
_INET_DIAG_INFO = 2
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBBxI48s")
_MESSAGE = struct.Struct("=BBBB2s2s16s16sIQIIIII")
_ATTRIBUTE = struct.Struct("=HH")
_BYTES_RECEIVED = 128
"""Offset of ``tcpi_bytes_received`` in struct tcp_info; Linux has it since 4.1."""
_CLONE_NEWNET = 0x40000000

_WITHIN = 2.0
_BUFFER = 1 << 18


class End(NamedTuple):
    """One end of a connection."""

    address: str
    port: int


class Connection(NamedTuple):
    """One established connection, seen from the socket that holds this end of it."""

    local: End
    remote: End
    inode: int
    received: int | None
    """Bytes so far; ``None``: not told."""


_OWN: set[End] = set()
"""Local ends of the requests that this program's probes have under way."""


@contextmanager
def own_request() -> Iterator[Callable[[str, dict[str, Any]], Awaitable[None]]]:
    """Let it be known, for as long as a request is under way, that its connection is a probe's.

    Yields what httpx takes as the extension ``trace``: https://www.encode.io/httpcore/extensions/#trace
    """
    mine: set[End] = set()

    async def trace(event: str, info: dict[str, Any]) -> None:
        if event == "connection.connect_tcp.complete":
            address = info["return_value"].get_extra_info("client_addr")
            if isinstance(address, tuple):
                mine.add(End(_plain(str(address[0])), int(address[1])))
                _OWN.update(mine)

    try:
        yield trace
    finally:
        _OWN.difference_update(mine)


def own_requests() -> set[End]:
    """Return the local ends of the requests that this program's probes have under way."""
    return set(_OWN)


def read_connections(net: str = "/proc/net") -> list[Connection]:
    """Return every established TCP connection of our network namespace, without bytes where netlink is refused.

    Raises :class:`OSError` where neither source can be read.
    """
    try:
        with open_diag() as diag:
            return dump(diag)
    except OSError:
        return list(_from_tables(net))


def open_diag(namespace: str | None = None) -> socket.socket:
    """Return a netlink socket for connections, in the network namespace of that file (``/proc/PID/ns/net``).

    The calling thread goes there for a moment, which needs CAP_SYS_ADMIN. Raises :class:`OSError`.
    """
    if namespace is None:
        diag = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG)
        diag.settimeout(_WITHIN)
        return diag
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)
    try:
        there = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(there)
        finally:
            os.close(there)
        try:
            return open_diag()
        finally:
            _enter(home)
    finally:
        os.close(home)


def dump(diag: socket.socket) -> list[Connection]:
    """Return every established TCP connection of the namespace in which the socket was opened."""
    found: list[Connection] = []
    for family in (socket.AF_INET, socket.AF_INET6):
        request = _REQUEST.pack(family, socket.IPPROTO_TCP, 1 << (_INET_DIAG_INFO - 1), 1 << _ESTABLISHED, b"")
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, family, 0)
        diag.send(header + request)
        found += _answers(diag)
    return found


def received_by(pids: Collection[int], *, port: int, own: int | None = None) -> dict[int, int | OSError]:
    """Return, for each process, the bytes that its connections have received; or why they cannot be seen.

    Left out are connections on ``port`` (its clients'), and those whose other end is held by one of the processes
    or by ``own``, this program: bytes that these send one another come from nowhere. A connection that several
    processes hold counts for the first.
    """
    own_pids = {os.getpid() if own is None else own}
    seen: dict[int, int | OSError] = {}
    for namespace, members in _by_namespace(pids).items():
        ours_before = _inodes_of(own_pids)
        try:
            with open_diag(namespace) as diag:
                connections = dump(diag)
        except OSError as problem:
            seen.update(dict.fromkeys(members, problem))
            continue
        held = {pid: set(socket_inodes(pid)) for pid in members}
        inside = ours_before.union(_inodes_of(own_pids), *held.values())
        inode_at = {connection.local: connection.inode for connection in connections}
        taken: set[int] = set()
        for pid in members:
            mine = [c for c in connections if c.inode in held[pid] and c.inode not in taken and c.local.port != port]
            taken.update(c.inode for c in mine)
            seen[pid] = sum(c.received or 0 for c in mine if inode_at.get(c.remote, 0) not in inside)
    return seen


def socket_inodes(pid: int) -> Iterator[int]:
    """Yield the sockets of a process, as far as its descriptors may be read."""
    with suppress(OSError):
        for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208 - thousands of descriptors are walked here
            with suppress(OSError, ValueError):
                link = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115
                if link.startswith("socket:["):
                    yield int(link[8:-1])


def _inodes_of(pids: Collection[int]) -> set[int]:
    return {inode for pid in pids for inode in socket_inodes(pid)}


def _by_namespace(pids: Collection[int]) -> dict[str | None, list[int]]:
    """Return the processes by network namespace; ``None`` stands for our own."""
    home = _namespace("self")
    found: dict[str, list[int]] = {}
    for pid in pids:
        found.setdefault(_namespace(str(pid)) or home, []).append(pid)
    return {None if name == home else f"/proc/{members[0]}/ns/net": members for name, members in found.items()}


def _namespace(who: str) -> str:
    try:
        return os.readlink(f"/proc/{who}/ns/net")  # noqa: PTH115
    except OSError:  # it has ended, or may not be looked at: then its descriptors show nothing either
        return ""


def _enter(namespace: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, _CLONE_NEWNET) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"another network namespace: {os.strerror(number)}")


def _answers(diag: socket.socket) -> Iterator[Connection]:
    while True:
        data = diag.recv(_BUFFER)
        start = 0
        while start + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, start)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -int(struct.unpack_from("=i", data, start + _HEADER.size)[0])
                raise OSError(number, f"sock_diag: {os.strerror(number)}")
            yield _connection(data[start + _HEADER.size : start + length])
            start += max(_HEADER.size, length + 3 & ~3)


def _connection(message: bytes) -> Connection:
    family, _, _, _, sport, dport, source, destination, *_, inode = _MESSAGE.unpack_from(message)
    local = End(_text(family, source), int.from_bytes(sport, "big"))
    remote = End(_text(family, destination), int.from_bytes(dport, "big"))
    received = None
    start = _MESSAGE.size
    while start + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, start)
        if kind == _INET_DIAG_INFO and length >= _ATTRIBUTE.size + _BYTES_RECEIVED + 8:
            received = int(struct.unpack_from("=Q", message, start + _ATTRIBUTE.size + _BYTES_RECEIVED)[0])
        start += max(_ATTRIBUTE.size, length + 3 & ~3)
    return Connection(local, remote, inode, received)


def _text(family: int, address: bytes) -> str:
    size = 4 if family == socket.AF_INET else 16
    return _plain(socket.inet_ntop(socket.AF_INET if size == 4 else socket.AF_INET6, address[:size]))


def _plain(address: str) -> str:
    """Return IPv4 as such, also where it came in through an IPv6 socket."""
    return address.removeprefix("::ffff:") if "." in address else address


def _from_tables(net: str) -> Iterator[Connection]:
    for lines in tcp_tables(net):
        for line in lines:
            columns = line.split()
            if int(columns[3], 16) == _ESTABLISHED:
                yield Connection(_end(columns[1]), _end(columns[2]), int(columns[9]), None)


def _end(text: str) -> End:
    """Return an end whose address the kernel prints as 32-bit words in the machine's byte order."""
    digits, _, port = text.partition(":")
    address = b"".join(struct.pack("=I", int(digits[at : at + 8], 16)) for at in range(0, len(digits), 8))
    return End(_text(socket.AF_INET if len(address) == 4 else socket.AF_INET6, address), int(port, 16))
