"""Which process answers a connection, and which NCCL the members have loaded. Plain functions that block."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from hangguard.facts import Process

_LIBRARY = re.compile(r"(/\S*/libnccl\.so\S*)")
_FULL_NAME = re.compile(r"libnccl\.so\.(\d+)\.(\d+)\.(\d+)")
_WHEEL = re.compile(r"nvidia_nccl_cu\d+-(\d+\.\d+\.\d+)[\w.]*\.dist-info")


def answers_here(proc: str, members: list[Process], ours: int, theirs: int) -> bool | None:
    """Tell whether the other end of our connection is a member's; ``None``: its descriptors may not be read."""
    inode = _inode_of_their_end(proc, ours, theirs)
    if inode is None:
        return None
    is_hidden = False
    for member in members:
        folder = f"{proc}/{member.pid}/fd"
        try:
            descriptors = os.listdir(folder)  # noqa: PTH208
        except PermissionError:
            is_hidden = True
            continue
        except OSError:
            continue
        if any(_link(f"{folder}/{descriptor}") == f"socket:[{inode}]" for descriptor in descriptors):
            return True
    return None if is_hidden else False


def _inode_of_their_end(proc: str, ours: int, theirs: int) -> str | None:
    """Find it in the table of TCP sockets, whose columns Documentation/networking/proc_net_tcp.rst names."""
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{proc}/net/{name}", encoding="ascii") as table:  # noqa: PTH123 - a kernel file
                rows = [line.split() for line in table]
        except OSError:
            continue
        for columns in rows[1:]:
            if columns[1].endswith(f":{theirs:04X}") and columns[2].endswith(f":{ours:04X}") and columns[9] != "0":
                return columns[9]
    return None


def version_of_nccl(proc: str, members: list[Process]) -> tuple[int, ...] | None:
    """Return the oldest version of NCCL that a member has loaded; ``None``: none was found, or it cannot be told.

    Can block: the list of mapped files takes the memory-map lock.
    """
    versions = {path: _version_of_file(proc, pid, path) for pid, path in _loaded(proc, members)}
    known = [version for version in versions.values() if version is not None]
    return min(known) if known and len(known) == len(versions) else None


def _loaded(proc: str, members: list[Process]) -> Iterator[tuple[int, str]]:
    for member in members:
        try:
            with open(f"{proc}/{member.pid}/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
                yield from ((member.pid, path) for path in {match[1] for match in map(_LIBRARY.search, maps) if match})
        except OSError:
            continue


def _version_of_file(proc: str, pid: int, path: str) -> tuple[int, ...] | None:
    if named := _FULL_NAME.search(path):
        return tuple(map(int, named.groups()))
    # The wheel: site-packages/nvidia/nccl/lib/libnccl.so.2 beside site-packages/nvidia_nccl_cu13-2.28.9.dist-info.
    parents = Path(path).parents
    if len(parents) < 4:
        return None
    found = set()
    for site in (f"{proc}/{pid}/root{parents[3]}", parents[3]):  # as the member sees it, in its mounts, before as we do
        try:
            found = {wheel[1] for wheel in map(_WHEEL.fullmatch, os.listdir(site)) if wheel}  # noqa: PTH208
            break
        except OSError:
            continue
    return tuple(int(part) for part in found.pop().split(".")[:3]) if len(found) == 1 else None


def names_of(proc: str, members: list[Process]) -> dict[int, int]:
    """Return what members in a PID namespace of their own call themselves, with our number of each."""
    names = {}
    for member in members:
        try:
            status = Path(f"{proc}/{member.pid}/status").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        inner = re.search(r"^NSpid:.*\t(\d+)$", status, re.MULTILINE)
        if inner is not None and int(inner[1]) != member.pid:
            names[int(inner[1])] = member.pid
    return names


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115 - many are read
    except OSError:
        return ""
