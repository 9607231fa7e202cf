"""The control group of a process: kills for memory, time lost to a quota, whether it is frozen. Everything blocks.

Both versions of the kernel's interface are read, also where both are mounted (hybrid): cgroups(7),
Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/.
"""

from __future__ import annotations

import posixpath
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hangguard.facts import MemoryLimit, Unseen
from hangguard.observe.procfs import read_bytes, read_started

_V2 = "cgroup2"
_V1 = "cgroup"


class Group(NamedTuple):
    """One control group of a process, in one mounted hierarchy."""

    path: str
    top: str
    """Where the hierarchy is mounted; nothing above it can be seen."""
    version: str
    controllers: frozenset[str]
    """Of version 1 only: those of this hierarchy."""

    def and_above(self) -> Iterator[Group]:
        """Yield it and the groups above it, as far as they are mounted here."""
        path = self.path
        yield self
        while path != self.top:
            path = posixpath.dirname(path)
            yield self._replace(path=path)


class Cgroups:
    """The control groups of one process, also after its end: the groups it was last seen in are remembered."""

    def __init__(self, process: tuple[int, int] | None, proc: str = "/proc") -> None:
        """``process``: pid, and start time in clock ticks since boot; ``None``: of nobody."""
        self._process = process
        self._proc = proc
        self._groups: tuple[Group, ...] | Unseen = Unseen("the launched process is not known")
        self._membership: str | None = None
        self._oom_kills = _Counter()
        self._throttled = _Counter()

    def look(self) -> None:
        """Find the groups anew: a process can be moved."""
        if self._process is None:
            return
        pid, started = self._process
        path = f"{self._proc}/{pid}/cgroup"
        try:
            membership = _read(path)
            if read_started(pid, self._proc) != started:
                raise ProcessLookupError(3, "it has ended", path)  # what was read is a successor's
            if membership != self._membership:
                # Ours: the kernel gives the paths as our control group namespace has them, and we open the files.
                self._groups = tuple(_groups(membership, _read(f"{self._proc}/self/mountinfo"))) or Unseen(
                    "no control groups are mounted here"
                )
                self._membership = membership
        except OSError as problem:
            if isinstance(self._groups, Unseen):
                self._groups = Unseen(f"{problem.filename or path}: {problem.strerror}")

    def oom_kills(self) -> int | Unseen:
        """Return how many processes of the group the kernel has killed for memory."""
        found = self._first("memory", _oom_kills)
        return found if isinstance(found, Unseen) else int(self._oom_kills.continue_at(*found))

    def throttled_seconds(self) -> float | Unseen:
        """Return for how long a CPU quota, its own or one above it, kept the group from running."""
        found = self._first("cpu", _throttled_seconds)
        return found if isinstance(found, Unseen) else self._throttled.continue_at(*found)

    def is_frozen(self) -> bool | Unseen:
        """Tell whether the group is frozen, in one of the hierarchies."""
        if isinstance(self._groups, Unseen):
            return self._groups
        answers = [
            _is_frozen(group) for group in self._groups if group.version == _V2 or "freezer" in group.controllers
        ]
        seen = [answer for answer in answers if isinstance(answer, bool)]
        if seen:
            return any(seen)
        return next(iter(answers), Unseen("no hierarchy here can freeze a group"))

    def memory_limit(self) -> MemoryLimit | Unseen:
        """Return what the group may use, and uses: of its own limit and those above it the one that leaves least."""
        if isinstance(self._groups, Unseen):
            return self._groups
        limits = [(_memory_limit(level), level) for level in self._levels("memory")]
        found = [(limit, _memory_used(level)) for limit, level in limits if limit is not None]
        if not found:
            return MemoryLimit(limit_bytes=None)
        limit, used = min(found, key=lambda pair: pair[0] - pair[1])
        return MemoryLimit(limit_bytes=limit, used_bytes=used)

    def tasks_left(self) -> int | Unseen | None:
        """Return how many more processes and threads the group may have; ``None``: any number."""
        if isinstance(self._groups, Unseen):
            return self._groups
        found = [(_number(level, "pids.max"), _number(level, "pids.current")) for level in self._levels("pids")]
        left = [most - (now or 0) for most, now in found if most is not None]
        return max(0, min(left)) if left else None

    def _levels(self, controller: str) -> Iterator[Group]:
        """Yield the groups that a controller may limit, and those above them."""
        for group in () if isinstance(self._groups, Unseen) else self._groups:
            if group.version == _V2 or controller in group.controllers:
                yield from group.and_above()

    def _first(self, controller: str, read: Callable[[Group], float | Unseen]) -> tuple[str, float] | Unseen:
        """Return (which group, figure) of the hierarchy that has it. A controller is in one hierarchy only."""
        if isinstance(self._groups, Unseen):
            return self._groups
        problem = Unseen(f"no hierarchy here has the {controller} controller")
        for group in self._groups:
            if group.version == _V2 or controller in group.controllers:
                figure = read(group)
                if not isinstance(figure, Unseen):
                    return group.path, figure
                problem = figure
        return problem


class _Counter:
    """A counter that goes on where it was when the process is moved: the next group has a past of its own."""

    def __init__(self) -> None:
        self._path: str | None = None
        self._offset = 0.0
        self._last = 0.0

    def continue_at(self, path: str, figure: float) -> float:
        if self._path is not None and path != self._path:
            self._offset = self._last - figure
        self._path = path
        self._last = self._offset + figure
        return self._last


def _groups(membership: str, mounts: str) -> Iterator[Group]:
    """Join ``/proc/PID/cgroup`` with the mounts. One whose path is outside of what is mounted is left out."""
    mounted = list(_mounted(mounts))
    for line in membership.splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        wanted = frozenset(filter(None, controllers.split(",")))
        version = _V2 if number == "0" else _V1
        for mount in mounted:
            if mount.version != version or (version == _V1 and not wanted <= mount.options):
                continue
            inside = posixpath.relpath(path, mount.root)
            if not inside.startswith(".."):
                yield Group(posixpath.normpath(f"{mount.point}/{inside}"), mount.point, version, wanted)
                break


class _Mount(NamedTuple):
    root: str
    point: str
    version: str
    options: frozenset[str]


def _mounted(mounts: str) -> Iterator[_Mount]:
    """Yield the hierarchies of ``/proc/PID/mountinfo``, whose columns proc_pid_mountinfo(5) names."""
    for line in mounts.splitlines():
        before, _, after = line.partition(" - ")
        columns, more = before.split(), after.split()
        if len(columns) >= 5 and len(more) >= 3 and more[0] in {_V1, _V2}:
            root, point = (column.replace("\\040", " ") for column in columns[3:5])
            yield _Mount(root, point, more[0], frozenset(more[2].split(",")))


def _oom_kills(group: Group) -> float | Unseen:
    return _figure(group, "memory.events" if group.version == _V2 else "memory.oom_control", "oom_kill")


def _throttled_seconds(group: Group) -> float | Unseen:
    """Return the longest of its own time and those above it: they hold at the same time, and none is lost."""
    name, unit = ("throttled_usec", 1e-6) if group.version == _V2 else ("throttled_time", 1e-9)
    figures = [_figure(each, "cpu.stat", name) for each in group.and_above()]
    seen = [figure for figure in figures if not isinstance(figure, Unseen)]
    return max(seen) * unit if seen else figures[0]


def _is_frozen(group: Group) -> bool | Unseen:
    """Tell whether the group does not run, be it for its own state or for one above it.

    The root of a hierarchy has no such file, and cannot be frozen.
    """
    path = f"{group.path}/{'cgroup.events' if group.version == _V2 else 'freezer.state'}"
    try:
        text = read_bytes(path)
    except FileNotFoundError:
        return False
    except OSError as problem:
        return Unseen(f"{path}: {problem.strerror}")
    return b"frozen 1" in text.splitlines() if group.version == _V2 else text.strip() == b"FROZEN"


_NO_LIMIT = 1 << 60
"""Version 1 writes a number near the largest that there is for "none" (mm/page_counter.c)."""


def _memory_limit(group: Group) -> int | None:
    name = "memory.max" if group.version == _V2 else "memory.limit_in_bytes"
    limit = _number(group, name)
    return limit if limit is not None and limit < _NO_LIMIT else None


def _memory_used(group: Group) -> int:
    """Return what is used without the part of the page cache that the kernel gives back first."""
    is_new = group.version == _V2
    used = _number(group, "memory.current" if is_new else "memory.usage_in_bytes") or 0
    cached = _figure(group, "memory.stat", "inactive_file" if is_new else "total_inactive_file")
    return max(0, used - (0 if isinstance(cached, Unseen) else int(cached)))


def _number(group: Group, name: str) -> int | None:
    """Return a file's one number; ``None``: "max", or no such file: then nothing is limited here."""
    try:
        text = read_bytes(f"{group.path}/{name}").strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _read(path: str) -> str:
    """Read a whole file; one read of the kernel's gives a page at most."""
    with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a kernel file
        return file.read()


def _figure(group: Group, name: str, key: str) -> float | Unseen:
    """Return one figure of a file that has a key and a figure in each line."""
    path = f"{group.path}/{name}"
    try:
        lines = read_bytes(path).decode(errors="replace").splitlines()
    except FileNotFoundError:
        return Unseen(f"{path}: no such file (the root of the groups, or its controller is not switched on)")
    except OSError as problem:
        return Unseen(f"{path}: {problem.strerror}")
    for line in lines:
        if line.startswith(f"{key} "):
            return float(line.split()[1])
    return Unseen(f"{path} has no line {key}")
