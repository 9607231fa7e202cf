"""What the kernel still has of a port on which nobody listens: TIME_WAIT, orphans, connections that somebody holds.

Nothing is connected to, and nothing ever listens here: a server's own clients could come to it.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
from typing import NamedTuple

from hangguard.facts import Launch, Unseen
from hangguard.observe.lane import in_time
from hangguard.observe.ports import _address, _all_pids, _find, _Holder, _in_the_way, _name
from hangguard.observe.target import why_unseen

_LISTEN, _TIME_WAIT = "0A", "06"
"""include/net/tcp_states.h."""

WITHIN = 5.0

TIME_WAIT_SECONDS = 60.0
"""TCP_TIMEWAIT_LEN, include/net/tcp.h: a constant of the kernel's."""


class PortLeft(NamedTuple):
    """The state of a port without listener."""

    port: int
    can_be_bound: bool | None
    """Whether a server that sets SO_REUSEADDR, as all known ones do, could have it; ``None``: it was not tried."""
    time_wait: int = 0
    """Connections that ended here first: the kernel keeps them for 60 s."""
    orphans: int = 0
    """Connections that nobody holds any more, and that are still being closed."""
    held_by: tuple[tuple[int, str], ...] = ()
    """(pid, name) of processes that hold connections of it: children of an earlier server, or clients from here."""

    def __str__(self) -> str:
        """Return what is there, in words; empty: nothing."""
        parts = []
        if self.held_by:
            parts.append("connections held by " + ", ".join(f"pid {pid} ({name})" for pid, name in self.held_by[:4]))
        if self.time_wait:
            parts.append(f"{self.time_wait} in TIME_WAIT, which the kernel keeps for {TIME_WAIT_SECONDS:.0f} s")
        if self.orphans:
            parts.append(f"{self.orphans} that no process holds and the kernel is closing")
        if self.can_be_bound is False and not parts:
            parts.append("somebody has bound it and does not listen")
        return "; ".join(parts)


async def look_at_port(launch: Launch) -> PortLeft | Unseen | None:
    """Return what is left of the port of a launch; ``None``: it answers on a unix socket, or nobody knows where."""
    if launch.socket_path is not None or not launch.port:
        return None
    try:
        return await in_time("port", lambda: read_port_left(launch.port, launch.host), within=WITHIN)
    except OSError as problem:
        return why_unseen(problem)


def read_port_left(port: int, host: str, *, net: str = "/proc/net") -> PortLeft:
    """Look. Blocks for some milliseconds; raises OSError where no table can be read."""
    rows = list(_rows(port, host, net))
    inodes = {inode for state, inode in rows if inode != "0" and state != _LISTEN}
    holders: dict[str, _Holder] = {}
    if inodes:
        _find(inodes, _all_pids(), holders)
    return PortLeft(
        port=port,
        can_be_bound=_can_be_bound(port, host),
        time_wait=sum(state == _TIME_WAIT for state, _ in rows),
        orphans=sum(inode == "0" and state != _TIME_WAIT for state, inode in rows),
        held_by=tuple(sorted({(holder.pid, _name(holder.pid)) for holder in holders.values()})),
    )


def _rows(port: int, host: str, net: str) -> list[tuple[str, str]]:
    """Return (state, inode) of every socket whose local end is that port, where it would be in the way."""
    found: list[tuple[str, str]] = []
    problem: OSError | None = None
    read = 0
    for table in ("tcp", "tcp6"):
        try:
            with open(f"{net}/{table}", encoding="ascii") as file:  # noqa: PTH123 - a kernel file
                lines = [line.split() for line in file][1:]
        except OSError as missing:
            problem = problem or missing
            continue
        read += 1
        for columns in lines:
            address, _, number = columns[1].partition(":")
            if int(number, 16) == port and _in_the_way(_address(address), host):
                found.append((columns[3], columns[9]))
    if not read and problem is not None:
        raise problem
    return found


def _can_be_bound(port: int, host: str) -> bool | None:
    """Bind as a server would, and let go at once; never listen."""
    name = {"": "0.0.0.0", "localhost": "127.0.0.1"}.get(host, host.strip("[]"))  # noqa: S104 - tried, not used
    try:
        family = socket.AF_INET6 if ipaddress.ip_address(name).version == 6 else socket.AF_INET
    except ValueError:
        return None  # a name: looking it up could take long, and the server may mean another address by it
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((name, port))
        except OSError as problem:
            return False if problem.errno == errno.EADDRINUSE else None
    return True
