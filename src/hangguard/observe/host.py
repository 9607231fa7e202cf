"""The machine: memory, shared memory, kills by the kernel's out-of-memory killer."""

from __future__ import annotations

import os
from typing import ClassVar

import psutil

from hangguard.facts import Ask, Host, Unseen
from hangguard.observe.lane import Lane
from hangguard.observe.target import why_unseen


class HostProbe:
    """Looks at the whole machine, not at a container's share of it."""

    field: ClassVar[str] = "host"
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, *, within: float, shm: str = "/dev/shm", vmstat: str = "/proc/vmstat") -> None:  # noqa: S108
        self._within = within
        self._shm = shm
        self._vmstat = vmstat
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
        return Host(
            memory_total_bytes=memory.total,
            memory_available_bytes=memory.available,
            shm_total_bytes=shm_total,
            shm_free_bytes=shm_free,
            oom_kills=_read_oom_kills(self._vmstat),
        )


def _read_shm(path: str) -> tuple[int | Unseen, int | Unseen]:
    try:
        stat = os.statvfs(path)
    except OSError as problem:
        unseen = why_unseen(problem)
        return unseen, unseen
    return stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize


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
