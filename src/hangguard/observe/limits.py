"""The limits that a server started from here inherits. Plain functions that block."""

from __future__ import annotations

import os
import resource

from hangguard.facts import ProcessLimits, ResourceLimit, Unseen
from hangguard.observe import procfs
from hangguard.observe.cgroups import Cgroups

_CAP_SYS_RESOURCE, _CAP_SYS_ADMIN = 24, 21
_EXEMPT = 1 << _CAP_SYS_RESOURCE | 1 << _CAP_SYS_ADMIN


def read_limits(proc: str = "/proc") -> ProcessLimits:
    """Return them. Raises OSError where ``/proc`` cannot be read."""
    tasks = _limit(resource.RLIMIT_NPROC)
    left = [(room, name) for room, name in (_left_of_user(tasks, proc), _left_of_group(proc)) if room is not None]
    room, name = min(left, default=(None, ""))
    return ProcessLimits(
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        tasks=tasks,
        core_bytes=_limit(resource.RLIMIT_CORE),
        tasks_left=room,
        tasks_limited_by=name,
    )


def _limit(number: int) -> ResourceLimit:
    soft, hard = (None if value == resource.RLIM_INFINITY else value for value in resource.getrlimit(number))
    return ResourceLimit(soft=soft, hard=hard)


def _left_of_user(tasks: ResourceLimit, proc: str) -> tuple[int | None, str]:
    """The limit counts all tasks of the real user; root and two capabilities pass over it (kernel/fork.c)."""
    name = "ulimit -u"
    if tasks.soft is None or os.getuid() == 0:
        return None, name
    status = procfs.read_bytes(f"{proc}/self/status", 16384).decode(errors="replace").splitlines()
    if any(line.startswith("CapEff:") and int(line.split()[1], 16) & _EXEMPT for line in status):
        return None, name
    mine = 0
    for pid, stat in procfs.scan(proc).items():
        try:
            mine += stat.number(20) if os.stat(f"{proc}/{pid}").st_uid == os.getuid() else 0  # noqa: PTH116
        except OSError:
            continue
    return max(0, tasks.soft - mine), name


def _left_of_group(proc: str) -> tuple[int | None, str]:
    groups = Cgroups((os.getpid(), procfs.read_started(os.getpid(), proc)), proc)
    groups.look()
    left = groups.tasks_left()
    return (None if isinstance(left, Unseen) else left), "pids.max of the control group"
