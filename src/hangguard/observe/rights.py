"""Reading with the rights of another user: what a server names is read as that server itself could read it.

A diagnosis by root looks at files that a stranger's process names (its log, its configuration, its packages). Read
with root's own rights, a link or a descriptor of his would show him, in our output, what he may not read. The
kernel keeps the user for file access a thread (setfsuid(2)); threads of a :class:`~hangguard.observe.lane.Lane`
take it on, and every other thread of the program keeps its own.
"""

from __future__ import annotations

import ctypes
import os
import platform
from dataclasses import dataclass

_SETGROUPS = {"x86_64": 116, "aarch64": 159}.get(platform.machine())
"""The system call itself: glibc's function of that name would change every thread of the program."""
_CURRENT = -1
"""No valid user: setfsuid then changes nothing and returns the one that counts now."""


@dataclass(frozen=True, slots=True)
class Rights:
    """A user as the kernel sees one when a file is opened."""

    uid: int
    gid: int
    groups: tuple[int, ...] = ()


def rights_of(pid: int, proc: str = "/proc") -> Rights | None:
    """Return with whose rights the files are read that this process names; ``None``: with our own.

    Only root can take on another's. Of a set-uid program its caller counts, who chose its arguments. Raises
    :class:`OSError` when the process is gone.
    """
    if os.geteuid() != 0:
        return None
    with open(f"{proc}/{pid}/status", encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a kernel file
        lines = dict(line.split(":", 1) for line in file.read(8192).splitlines() if ":" in line)
    uid, gid = int(lines["Uid"].split()[0]), int(lines["Gid"].split()[0])
    if uid == 0:
        return None
    return Rights(uid, gid, tuple(map(int, lines.get("Groups", "").split())))


def take_on(rights: Rights) -> None:
    """Let the calling thread, and no other, open files with these rights from now on. There is no way back.

    With the user the kernel takes away the capabilities that pass over file permissions (capabilities(7)); that
    to look at other processes stays. Raises :class:`OSError` where it cannot be done: then nothing may be read.
    """
    if _SETGROUPS is None:
        raise PermissionError(1, f"the rights of user {rights.uid} cannot be taken on on {platform.machine()}")
    libc = ctypes.CDLL(None, use_errno=True)
    groups = (ctypes.c_uint32 * max(1, len(rights.groups)))(*rights.groups)
    if libc.syscall(_SETGROUPS, len(rights.groups), groups) != 0:
        raise PermissionError(ctypes.get_errno(), f"the groups of user {rights.uid} cannot be taken on")
    for change, wanted in ((libc.setfsgid, rights.gid), (libc.setfsuid, rights.uid)):
        change(wanted)
        if change(_CURRENT) != wanted:  # neither reports a failure
            raise PermissionError(1, f"the rights of user {rights.uid} cannot be taken on")
