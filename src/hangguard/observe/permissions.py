"""What the kernel lets this process look at in others: ptrace, hidden processes, pidfds. Plain functions."""

from __future__ import annotations

import os

from hangguard.facts import Permissions
from hangguard.observe.procfs import read_bytes

_CAP_SYS_PTRACE = 19
"""include/uapi/linux/capability.h"""
_HIDING = {"hidepid=1", "hidepid=2", "hidepid=4", "hidepid=noaccess", "hidepid=invisible", "hidepid=ptraceable"}
"""Documentation/filesystems/proc.rst; the words are of Linux 5.8."""


def read_permissions(proc: str = "/proc") -> Permissions:
    """Return them. Raises OSError where ``/proc`` itself cannot be read."""
    status = read_bytes(f"{proc}/self/status", 16384).decode(errors="replace").splitlines()
    capabilities = next((int(line.split()[1], 16) for line in status if line.startswith("CapEff:")), 0)
    return Permissions(
        ptrace_scope=_ptrace_scope(proc),
        may_trace_all=bool(capabilities >> _CAP_SYS_PTRACE & 1),
        hides_processes=hiding_option(proc),
        has_pidfds=_has_pidfds(),
        is_root=os.geteuid() == 0,
    )


def _ptrace_scope(proc: str) -> int | None:
    try:
        return int(read_bytes(f"{proc}/sys/kernel/yama/ptrace_scope", 16))
    except FileNotFoundError:
        return None


def hiding_option(proc: str) -> str:
    """Return the option with which the newest mount at ``/proc`` hides processes; proc_pid_mountinfo(5)."""
    found = ""
    with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123 - a kernel file
        for line in mounts:
            before, _, after = line.partition(" - ")
            more = after.split()
            if before.split()[4] == "/proc" and more[:1] == ["proc"]:
                options = set(more[-1].split(","))
                found = next(iter(sorted(options & _HIDING)), "") or ("subset=pid" if "subset=pid" in options else "")
    return found


def _has_pidfds() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # a Python built without it; Linux before 5.3, a sandbox
        return False
    return True
