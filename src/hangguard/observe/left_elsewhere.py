"""Where a launch may leave files beside /dev/shm: noted before it, and looked at again after its end."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from hangguard import held
from hangguard.elsewhere import Elsewhere, is_pool, is_rendezvous
from hangguard.facts import Launch, Unseen
from hangguard.observe._presence_locks import build_folders, find_builders, find_presence_locks
from hangguard.observe.folders import TEMP
from hangguard.observe.lane import in_time

T = TypeVar("T")

LOOK_WITHIN = 3.0
"""Seconds for one look: a folder may lie on a network disk that is gone."""
MOST_NAMES = 20_000
"""Names of the temp folder that are looked through."""
MOST_TOLD = 200
CLOCKS_APART_NS = 50_000_000
"""A file is dated by the clock of the last tick, which is late by up to 10 ms (include/linux/timekeeping.h)."""
_WITH_LEASES = frozenset({"ext2", "ext3", "ext4", "xfs", "btrfs", "tmpfs", "overlay", "f2fs", "zfs", "bcachefs"})

_SOCKETS = re.compile(
    r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}"  # vllm/utils/network_utils.py, get_open_zmq_ipc_path
    r"|tmp[a-z0-9_]{8}"  # sglang/srt/server_args.py, PortArgs: tempfile's names, which ZMQ then binds sockets to
    r"|sglang_\w+\.sock"  # sglang/srt/observability/trace_async.py, managers/load_snapshot.py
)


@dataclass(frozen=True, slots=True)
class Appeared:
    """What is new since the launch under names that engines use, whoever made it."""

    paths: tuple[str, ...] = ()
    unseen: tuple[str, ...] = ()

    def without(self, known: Iterable[str]) -> tuple[str, ...]:
        """Return the paths that are not among those."""
        others = frozenset(known)
        return tuple(path for path in self.paths if path not in others)


async def look_elsewhere(launch: Launch) -> Elsewhere:
    """Note, before the launch, where it may leave files, and what lies there. Never raises."""
    found = await _in_a_lane(lambda: note(launch))
    return (
        Elsewhere(unseen=(f"what lay there before the launch: {found.reason}",)) if isinstance(found, Unseen) else found
    )


async def look_what_appeared(elsewhere: Elsewhere) -> Appeared:
    """Return what is there after the end and was not before. Never raises."""
    found = await _in_a_lane(lambda: appeared(elsewhere))
    return Appeared(unseen=(found.reason,)) if isinstance(found, Unseen) else found


def note(launch: Launch) -> Elsewhere:
    """Note it; blocks."""
    since_ns = time.time_ns() - CLOCKS_APART_NS  # before the look: what it then finds was there before the launch
    home = os.path.expanduser("~")  # noqa: PTH111
    folders = (os.path.realpath(folder) for folder in build_folders(launch, home=home))
    builds = tuple(folder for folder in folders if _has_leases(folder))
    temp = os.path.realpath(temp_folder(launch))
    names, problem = _names_of_engines(temp)
    return Elsewhere(
        builds=builds,
        temp=temp,
        since_ns=since_ns,
        locks=[(found.st_dev, found.st_ino, found.st_mtime_ns) for _, found in _locks_in(builds)],
        names=names,
        taken=_rendezvous_given_to(launch),
        unseen=(problem,) if problem else (),
    )


def temp_folder(launch: Launch) -> str:
    """Return where the launch has its temporary files: the order of Python's tempfile."""
    env = launch.environment()
    named = next((env[name] for name in ("TMPDIR", "TEMP", "TMP") if env.get(name)), TEMP)
    return os.path.join(launch.cwd, named)  # noqa: PTH118


def appeared(elsewhere: Elsewhere) -> Appeared:
    """Look what appeared; blocks. Locks that somebody builds behind are left out: they are in use."""
    if not elsewhere.temp or elsewhere.unseen:
        return Appeared(unseen=elsewhere.unseen)
    names, problem = _names_of_engines(elsewhere.temp)
    paths = [os.path.join(elsewhere.temp, name) for name in names if name not in elsewhere.names]  # noqa: PTH118
    locks = [path for path, found in _locks_in(elsewhere.builds) if elsewhere.is_new(found)]
    builders = find_builders("/proc", locks) if locks else {}
    new = sorted([*paths, *(path for path in locks if path not in builders)])
    more = len(new) - MOST_TOLD
    problem = problem or (f"{more} more new names are not listed" if more > 0 else "")
    return Appeared(tuple(new[:MOST_TOLD]), (problem,) if problem else ())


async def _in_a_lane(look: Callable[[], T]) -> T | Unseen:
    try:
        return await in_time("elsewhere", look, within=LOOK_WITHIN)
    except OSError as problem:
        return Unseen(problem.strerror or str(problem))


def _has_leases(folder: str) -> bool:
    """Whether it lies on a disk of this machine, or would: where it is not there yet, its parent tells."""
    while True:
        try:
            return held.file_system_of(os.stat(folder).st_dev) in _WITH_LEASES  # noqa: PTH116
        except FileNotFoundError:
            folder = os.path.dirname(folder)  # noqa: PTH120
        except OSError:
            return False


def _locks_in(builds: tuple[str, ...]) -> Iterator[tuple[str, os.stat_result]]:
    for path in find_presence_locks(builds):
        try:
            found = os.stat(path, follow_symlinks=False)  # noqa: PTH116
        except OSError:
            continue
        if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid():
            yield path, found


def _names_of_engines(folder: str) -> tuple[list[str], str]:
    """Return the names of ours in it that engines use, and why that may not be all."""
    names: list[str] = []
    seen = 0
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                seen += 1
                if seen > MOST_NAMES:
                    return names, f"{folder} holds more than {MOST_NAMES:,} names: not all were looked at"
                if _is_of_an_engine(entry):
                    names.append(entry.name)
    except OSError as problem:
        return names, f"{folder}: {problem.strerror}"
    return names, ""


def _is_of_an_engine(entry: os.DirEntry[str]) -> bool:
    is_file = is_rendezvous(entry.name) or is_pool(entry.name)
    if not is_file and not _SOCKETS.fullmatch(entry.name):
        return False
    try:
        found = entry.stat(follow_symlinks=False)
    except OSError:
        return False
    is_of_kind = stat.S_ISREG(found.st_mode) if is_file else stat.S_ISSOCK(found.st_mode)
    return is_of_kind and found.st_uid == os.geteuid()


def _rendezvous_given_to(launch: Launch) -> set[str]:
    """Return the names of rendezvous files in the command and the environment: others know them too."""
    words = (*launch.argv, *launch.environment().values())
    return {name for word in words for name in re.findall(r"vllm_dist_[0-9a-f]{32}", word)}
