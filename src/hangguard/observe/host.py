"""The machine: memory, kills by the out-of-memory killer, pressure; and the share that the launch has of it."""

from __future__ import annotations

import os
from typing import ClassVar

import psutil

from hangguard.facts import Ask, Host, Unseen
from hangguard.observe.cgroups import Cgroups
from hangguard.observe.lane import Lane
from hangguard.observe.procfs import read_bytes
from hangguard.observe.target import why_unseen


class HostProbe:
    """Looks at the whole machine, and at the control group of the launched process."""

    field: ClassVar[str] = "host"
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        *,
        within: float,
        root: tuple[int, int] | None = None,
        shm: str = "/dev/shm",  # noqa: S108
        vmstat: str = "/proc/vmstat",
        pressure: str = "/proc/pressure",
    ) -> None:
        """``root``: the launched process, by (pid, start time in clock ticks since boot)."""
        self._within = within
        self._shm = shm
        self._vmstat = vmstat
        self._pressure = pressure
        self._groups = Cgroups(root)
        self._lane = Lane("host")

    async def look(self, _ask: Ask) -> Host | Unseen:
        """Return the machine's figures; a part that cannot be read carries its own reason."""
        try:
            return await self._lane.ask(self._read, within=self._within)
        except OSError as problem:
            return why_unseen(problem)
        except psutil.Error as problem:
            return Unseen(f"host memory: {problem}")

    async def aclose(self) -> None:
        """Let the thread go."""
        self._lane.close()

    def _read(self) -> Host:
        memory = psutil.virtual_memory()
        shm_total, shm_free = _read_shm(self._shm)
        self._groups.look()
        return Host(
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
            oom_kills=_read_oom_kills(self._vmstat),
            cgroup_oom_kills=self._groups.oom_kills(),
            cpu_stall_seconds=_read_pressure(f"{self._pressure}/cpu", "some"),
            io_stall_seconds=_read_pressure(f"{self._pressure}/io", "full"),
            throttled_seconds=self._groups.throttled_seconds(),
            is_frozen=self._groups.is_frozen(),
        )


def _read_shm(path: str) -> tuple[int | Unseen, int | Unseen]:
    try:
        stat = os.statvfs(path)
    except OSError as problem:
        unseen = why_unseen(problem)
        return unseen, unseen
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


def _read_pressure(path: str, which: str) -> float | Unseen:
    """Return the total of one line in seconds; Linux has it since 4.20 (Documentation/accounting/psi.rst)."""
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return Unseen(f"{path}: no such file; the kernel is older than 4.20 or made without CONFIG_PSI")
    except OSError as problem:  # switched off when the machine was started (psi=0): not supported
        return why_unseen(OSError(problem.errno, problem.strerror, path))
    for line in lines:
        if line.startswith(f"{which} "):
            return int(line.rpartition("total=")[2]) * 1e-6
    return Unseen(f"{path} has no line {which}")


def _read_oom_kills(path: str) -> int | Unseen:
    """Return the counter that Linux has since 4.13 (``oom_kill``)."""
    try:
        with open(path, encoding="ascii") as lines:  # noqa: PTH123 - a kernel file, read every second
            for line in lines:
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
    except OSError as problem:
        return why_unseen(problem)
    return Unseen(f"{path} has no line oom_kill: the kernel is older than 4.13")
