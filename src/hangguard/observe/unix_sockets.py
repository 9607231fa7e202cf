"""Who listens on a unix socket: looked up in ``/proc``, nobody is connected to."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import ClassVar

from hangguard.facts import Ask, Listener, Port, Tree, Unseen
from hangguard.observe.lane import Lane
from hangguard.observe.ports import PortProbe, _all_pids, _find, _has, _Holder, _name, _with_title
from hangguard.observe.procfs import read_title
from hangguard.observe.target import Probe, Shared, Target, why_unseen

_ACCEPTS = 0x10000
"""__SO_ACCEPTCON in the column Flags of /proc/net/unix: listen() was called, net/unix/af_unix.c."""
_COLUMNS = 8
_NOT_TOLD_APART = Unseen("who is connected to a unix socket is not told apart")


def who_listens_at(path: str, members: Iterable[int] = (), *, cwd: str = "/") -> Listener | None:
    """Return who listens on the socket of this path, or ``None`` where nobody does. Blocks for some milliseconds.

    A file that is left of a socket has no listener. ``cwd``: where a path is relative to that was bound as such.
    """
    listener = _Search(path, cwd).who_listens(frozenset(members))
    if listener is None or listener.pid is None:
        return listener
    return Listener(pid=listener.pid, title=read_title(listener.pid) or listener.title, ours=listener.ours)


def port_probe(target: Target, shared: Shared) -> Probe:
    """Return the probe of the place where this launch answers: its unix socket, else its port."""
    return PortProbe(target, shared) if target.launch.socket_path is None else UnixSocketProbe(target, shared)


class UnixSocketProbe:
    """Looks whether the configured socket has a listener, and whether that is a member. Its port number is 0."""

    field: ClassVar[str] = "port"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared, *, net: str = "/proc/net") -> None:
        self._within = target.probe_within
        self._shared = shared
        self._search = _Search(target.launch.socket_path or "", target.launch.cwd, net)
        self._lane = Lane("sockets")

    async def look(self, _ask: Ask) -> Port | Unseen:
        """Return the socket with its listener; whether it is ours is ``None`` while the tree is unseen."""
        tree = self._shared.tree
        members = frozenset(member.pid for member in tree.members) if isinstance(tree, Tree) else None
        try:
            listener = await self._lane.ask(lambda: self._search.who_listens(members), within=self._within)
        except OSError as problem:
            return why_unseen(problem)
        if isinstance(listener, Unseen):
            return listener
        return Port(port=0, listener=_with_title(listener, tree), clients=_NOT_TOLD_APART)

    async def aclose(self) -> None:
        """Let the thread go."""
        self._lane.close()


class _Search:
    """Remembers who had the socket: walking all descriptors of a big tree at every look would be dear."""

    def __init__(self, path: str, cwd: str, net: str = "/proc/net") -> None:
        self._path = os.path.normpath(os.path.join(cwd, path))  # noqa: PTH118 - text, nothing is looked up
        self._cwd = cwd
        self._net = net
        self._holders: dict[str, _Holder] = {}

    def who_listens(self, members: frozenset[int] | None) -> Listener | None:
        inodes = set(self._listening())
        held = {inode: h for inode, h in self._holders.items() if inode in inodes and _has(h.pid, h.descriptor, inode)}
        if not inodes:
            self._holders = {}
            return None
        theirs = {inode for inode, holder in held.items() if holder.pid not in (members or ())}
        missing = inodes - set(held)
        _find(missing | theirs, members or (), held)
        missing -= set(held)
        if missing:
            _find(missing, (pid for pid in _all_pids() if pid not in (members or ())), held)
        self._holders = held
        pids = [holder.pid for holder in held.values()]
        if not pids:
            return Listener(pid=None, title="", ours=None)
        ours = [pid for pid in pids if pid in (members or ())]
        pid = (ours or pids)[0]
        return Listener(pid=pid, title=_name(pid), ours=None if members is None else bool(ours))

    def _listening(self) -> Iterable[str]:
        """Yield the inodes of listening sockets that were bound to this path."""
        with open(f"{self._net}/unix", encoding="utf-8", errors="surrogateescape") as table:  # noqa: PTH123
            lines = table.readlines()[1:]
        for line in lines:  # Num RefCount Protocol Flags Type St Inode Path
            columns = line.rstrip("\n").split(None, _COLUMNS - 1)
            if len(columns) == _COLUMNS and int(columns[3], 16) & _ACCEPTS:
                bound = os.path.normpath(os.path.join(self._cwd, columns[7]))  # noqa: PTH118
                if bound == self._path:
                    yield columns[6]
