"""Who has a GPU open, by descriptor: also the forked child of a dead process, of which the driver knows nothing."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from hangguard.facts import Unseen
from hangguard.observe.lane import in_time
from hangguard.observe.procfs import read_bytes, read_stat, read_title
from hangguard.observe.target import why_unseen

DEVICES = r"/dev/(?:nvidia\d+|dxg)"
"""The files of the boards; WSL has dxg in the place of all. Not nvidiactl and nvidia-uvm: whoever holds memory has the
file of a board too (measured: a child forked by a CUDA process had 29 such descriptors)."""

WITHIN = 5.0
"""Seconds for one look: 1,000 processes with 100 descriptors take 0.2 s."""

OUR_READER = "_nvml_reader.py"


class DeviceHolder(NamedTuple):
    """A process that has one of the files open."""

    pid: int
    started: int
    name: str
    """The kernel's short name, which can be read at once."""
    devices: tuple[str, ...]


class DeviceHolders(NamedTuple):
    """All that could be seen."""

    found: tuple[DeviceHolder, ...]
    hidden: int
    """Processes whose descriptors may not be read."""


async def look_who_has_gpus_open(devices: str = DEVICES, *, within: float = WITHIN) -> DeviceHolders | Unseen:
    """Return every process that has a file open whose path matches ``devices``; our own reader of the driver not."""
    try:
        return await in_time("devices", lambda: who_has_open(devices), within=within)
    except OSError as problem:
        return why_unseen(problem)


def who_has_open(devices: str = DEVICES) -> DeviceHolders:
    """Scan the descriptors of all processes. Blocks; raises OSError where /proc cannot be listed."""
    pattern = re.compile(devices)
    found: list[DeviceHolder] = []
    hidden = 0
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):  # noqa: PTH208
        try:
            open_ = _open_devices(pid, pattern)
            if open_ and not _is_our_reader(pid):
                stat = read_stat(f"/proc/{pid}/stat")
                found.append(DeviceHolder(pid, stat.started, _name(pid), open_))
        except PermissionError:
            hidden += 1
        except (FileNotFoundError, ProcessLookupError):
            continue
    return DeviceHolders(tuple(found), hidden)


def _open_devices(pid: int, pattern: re.Pattern[str]) -> tuple[str, ...]:
    paths = set()
    for name in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
        try:
            path = os.readlink(f"/proc/{pid}/fd/{name}")  # noqa: PTH115 - never waits for the process, nor for a disk
        except FileNotFoundError:
            continue  # closed meanwhile
        if pattern.fullmatch(path):
            paths.add(path)
    return tuple(sorted(paths))


def _is_our_reader(pid: int) -> bool:
    """Whether it is the process in which this program asks NVML, which opens every board."""
    return read_stat(f"/proc/{pid}/stat").parent == os.getpid() and OUR_READER in read_title(pid)


def _name(pid: int) -> str:
    return read_bytes(f"/proc/{pid}/comm", 64).decode(errors="replace").strip()
