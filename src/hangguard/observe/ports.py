"""Who listens on a port, and who is connected to it: looked up in the kernel, nobody is connected to."""

from __future__ import annotations

import ipaddress
import os
import socket
import struct
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import ClassVar, NamedTuple

from hangguard.facts import NOT_ASKED, Ask, Listener, Port, Tree, Unseen
from hangguard.observe import connections
from hangguard.observe.lane import Lane
from hangguard.observe.procfs import read_title, tcp_tables
from hangguard.observe.target import Shared, Target, why_unseen

_LISTEN = "0A"
"""TCP_LISTEN, include/net/tcp_states.h."""


def who_listens(port: int, members: Iterable[int] = (), *, host: str = "") -> Listener | None:
    """Return who listens on ``port``, or ``None`` where nobody does. Blocks for some milliseconds.

    ``members`` are pids that are ours; with ``host`` only addresses count that would be in the way of a
    server there (the same address, or either of them a wildcard). A listener of ours comes before others.
    """
    listener = _Search().who_listens(port, frozenset(members), host)
    if listener is None or listener.pid is None:
        return listener
    return replace(listener, title=read_title(listener.pid) or listener.title)


def free_port(host: str = "127.0.0.1") -> int:
    """Return a port on which nobody listens now. Somebody else may take it before it is used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])


class PortProbe:
    """Looks whether the configured port has a listener, and whether that is a member."""

    field: ClassVar[str] = "port"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared, *, net: str = "/proc/net") -> None:
        self._port = target.launch.port
        self._host = target.launch.host
        self._within = target.probe_within
        self._shared = shared
        self._search = _Search(net)
        self._clients = _Clients(self._port, self._host, net)
        self._lane = Lane("ports")

    async def look(self, ask: Ask) -> Port | Unseen:
        """Return the port with its listener; whether it is ours is ``None`` while the tree is unseen."""
        tree = self._shared.tree
        members = frozenset(member.pid for member in tree.members) if isinstance(tree, Tree) else None

        def read() -> tuple[Listener | None, int | Unseen]:
            listener = self._search.who_listens(self._port, members, self._host)
            return listener, self._clients.count(members) if ask.sockets else NOT_ASKED

        try:
            seen = await self._lane.ask(read, within=self._within)
        except OSError as problem:
            return why_unseen(problem)
        if isinstance(seen, Unseen):
            return seen
        listener, clients = seen
        return Port(port=self._port, listener=_with_title(listener, tree), clients=clients)

    async def aclose(self) -> None:
        """Let the thread go."""
        self._lane.close()


def _with_title(listener: Listener | None, tree: Tree | Unseen) -> Listener | None:
    """Take the command line from the tree: reading it here could block (it needs the memory-map lock)."""
    members = tree.members if isinstance(tree, Tree) else ()
    titles = [member.title for member in members if listener is not None and member.pid == listener.pid]
    return replace(listener, title=titles[0]) if listener is not None and titles else listener


class _Clients:
    """Counts who is connected to the port: not members, and not the probes of this program.

    Connections of the program around us count too, for it may have sent a request of its own; a probe's is known
    by its local end a moment after it was made, so one of this process counts only when it is seen twice.
    """

    def __init__(self, port: int, host: str, net: str) -> None:
        self._port = port
        self._host = host
        self._net = net
        self._seen_before: set[int] = set()

    def count(self, members: frozenset[int] | None) -> int | Unseen:
        if members is None:
            return Unseen("the members are unseen")
        # Before and after: a request that ends between two readings must not look like a stranger's.
        probes, mine = connections.own_requests(), set(connections.socket_inodes(os.getpid()))
        try:
            everything = connections.read_connections(self._net)
        except OSError as problem:
            return why_unseen(problem)
        arrived = [
            end for end in everything if end.local.port == self._port and _in_the_way(end.local.address, self._host)
        ]
        if not arrived:
            self._seen_before = set()
            return 0
        probes |= connections.own_requests()
        mine.update(connections.socket_inodes(os.getpid()))
        inode_at = {end.local: end.inode for end in everything}
        peers = [inode_at.get(end.remote, 0) for end in arrived if end.remote not in probes]
        theirs = {inode for pid in members for inode in connections.socket_inodes(pid)} if any(peers) else set()
        just_made = (mine & set(peers)) - self._seen_before
        self._seen_before = mine & set(peers)
        return sum(inode not in theirs and inode not in just_made for inode in peers)


class _Holder(NamedTuple):
    pid: int
    descriptor: str


class _Search:
    """Remembers who had which socket: walking all descriptors of a big tree at every look would be dear."""

    def __init__(self, net: str = "/proc/net") -> None:
        self._net = net
        self._holders: dict[str, _Holder] = {}

    def who_listens(self, port: int, members: frozenset[int] | None, host: str) -> Listener | None:
        inodes = [inode for address, inode in self._listening(port) if _in_the_way(address, host)]
        if not inodes:
            self._holders = {}
            return None
        self._holders = self._holders_of(inodes, members or frozenset())
        pids = [holder.pid for holder in self._holders.values()]
        ours = [pid for pid in pids if pid in (members or ())]
        if not pids:
            return Listener(pid=None, title="", ours=None)
        pid = (ours or pids)[0]
        return Listener(pid=pid, title=_name(pid), ours=None if members is None else bool(ours))

    def _listening(self, port: int) -> Iterator[tuple[str, str]]:
        """Yield (address, inode)."""
        for lines in tcp_tables(self._net):
            yield from _listening_in(lines, port)

    def _holders_of(self, inodes: list[str], members: frozenset[int]) -> dict[str, _Holder]:
        holders = {
            inode: holder
            for inode, holder in self._holders.items()
            if inode in inodes and _has(holder.pid, holder.descriptor, inode)
        }
        # A socket of a stranger may have been handed on to a member since, and both have it then.
        foreign = {inode for inode, holder in holders.items() if holder.pid not in members}
        missing = set(inodes) - set(holders)
        _find(missing | foreign, members, holders)
        missing -= set(holders)
        if missing:
            _find(missing, (pid for pid in _all_pids() if pid not in members), holders)
        return holders


def _find(inodes: set[str], pids: Iterable[int], holders: dict[str, _Holder]) -> None:
    """Enter the first holder of each inode into ``holders``."""
    wanted = set(inodes)
    for pid in pids:
        if not wanted:
            return
        for inode, descriptor in _sockets(pid):
            if inode in wanted:
                holders[inode] = _Holder(pid, descriptor)
                wanted.discard(inode)


def _listening_in(lines: list[str], port: int) -> Iterator[tuple[str, str]]:
    """Yield (address, inode) of a table, whose columns Documentation/networking/proc_net_tcp.rst names."""
    suffix = f":{port:04X}"
    for line in lines:
        columns = line.split()
        if columns[3] == _LISTEN and columns[1].endswith(suffix):
            yield _address(columns[1][: -len(suffix)]), columns[9]


def _address(digits: str) -> str:
    """Return the text of an address, which the kernel prints as 32-bit words in the machine's byte order."""
    words = [int(digits[start : start + 8], 16) for start in range(0, len(digits), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, packed)


def _in_the_way(address: str, host: str) -> bool:
    """Tell whether a listener there meets a server on ``host``; a name that is no address meets all."""
    try:
        theirs, mine = _plain(address), _plain(host.strip("[]"))
    except ValueError:
        return True
    return theirs.is_unspecified or mine.is_unspecified or theirs == mine


def _plain(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    address = ipaddress.ip_address(text)
    return getattr(address, "ipv4_mapped", None) or address


def _all_pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]  # noqa: PTH208


def _sockets(pid: int) -> Iterator[tuple[str, str]]:
    """Yield (inode, descriptor) of a process whose descriptors may be read."""
    try:
        names = os.listdir(f"/proc/{pid}/fd")  # noqa: PTH208 - 100 processes are walked here
    except OSError:
        return
    for name in names:
        link = _link(pid, name)
        if link.startswith("socket:["):
            yield link[8:-1], name


def _has(pid: int, descriptor: str, inode: str) -> bool:
    return _link(pid, descriptor) == f"socket:[{inode}]"


def _link(pid: int, descriptor: str) -> str:
    try:
        return os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115
    except OSError:
        return ""


def _name(pid: int) -> str:
    """Return the kernel's short name, which can always be read at once."""
    try:
        with open(f"/proc/{pid}/comm", encoding="utf-8", errors="replace") as name:  # noqa: PTH123
            return name.read().strip()
    except OSError:
        return ""
