"""Bytes in the folders that grow while nothing else shows: downloads, and caches of compiled kernels."""

from __future__ import annotations

import getpass
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import ClassVar

from hangguard.facts import NOT_ASKED, Ask, Growth, Unseen
from hangguard.observe.folders import TEMP, Folder, cache_folders, download_folders
from hangguard.observe.lane import Lane
from hangguard.observe.target import Target, why_unseen

_EVERY = 5.0
_ENTRIES = 20_000
"""A folder is walked up to so many entries: some 60 ms on a local disk."""
_SECONDS = 0.5
"""So long are all folders of a kind walked."""
_BLOCK = 512
"""Unit of ``st_blocks``, whatever the file system's own is: stat(2)."""


class GrowthProbe:
    """Walks the folders when asked, at most every five seconds, with a bound on entries and time.

    Downloads and caches are walked side by side, so that a network disk that hangs hides one of them only.
    """

    field: ClassVar[str] = "growth"
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, target: Target, *, entries: int = _ENTRIES, seconds: float = _SECONDS) -> None:
        self._clock = target.clock
        self._within = target.probe_within / 2
        self._downloads = _Walk("downloads", lambda: _downloads(target), target, entries, seconds)
        self._caches = _Walk("caches", lambda: _caches(target), target, entries, seconds)
        self._last: Growth | None = None

    async def look(self, ask: Ask) -> Growth | Unseen:
        """Return the newest sums. A folder that could not be walked to its end is not in them, and is named."""
        if not ask.growth:
            return NOT_ASKED
        now = self._clock()
        if self._last is not None and now - self._last.at < _EVERY:
            return self._last
        # One after the other: a sample waits for both, and each has its own thread and deadline.
        downloads = await self._downloads.look(self._within)
        caches = await self._caches.look(self._within)
        if downloads.is_unseen and caches.is_unseen:
            return Unseen("; ".join((*downloads.left_out, *caches.left_out)))
        self._last = Growth(
            download_bytes=downloads.size,
            cache_bytes=caches.size,
            folders=(*downloads.folders, *caches.folders),
            left_out=(*downloads.left_out, *caches.left_out),
            at=now,
        )
        return self._last

    async def aclose(self) -> None:
        """Let the threads go."""
        self._downloads.close()
        self._caches.close()


@dataclass(slots=True)
class _Found:
    """What one walk over all folders of a kind has seen. ``size``: ``None`` where no folder was walked."""

    size: int | None = None
    folders: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    is_unseen: bool = False


class _Walk:
    """One kind of folders, walked in a thread of its own."""

    def __init__(
        self, kind: str, folders: Callable[[], tuple[Folder, ...]], target: Target, entries: int, seconds: float
    ) -> None:
        self._kind = kind
        self._folders = folders
        self._entries = entries
        self._seconds = seconds
        self._lane = Lane(kind, target.rights)

    async def look(self, within: float) -> _Found:
        try:
            found = await self._lane.ask(self._walk_all, within=within)
        except OSError as problem:  # the rights of the server's user could not be taken on
            found = why_unseen(problem)
        if isinstance(found, Unseen):
            return _Found(left_out=(f"{self._kind}: {found.reason}",), is_unseen=True)
        return found

    def close(self) -> None:
        self._lane.close()

    def _walk_all(self) -> _Found:
        found = _Found()
        until = time.monotonic() + self._seconds
        for folder in self._folders():
            budget = _Budget(self._entries, until)
            try:
                size = _size_of(folder, budget)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as problem:
                found.left_out += (f"{folder.path}: {problem.strerror or problem}",)
                continue
            if budget.over:  # a part is not given: which part it is may change, and that would look like growth
                found.left_out += (f"{folder.path}: {budget.over}",)
                continue
            found.size = (found.size or 0) + size
            found.folders += (folder.path,)
        return found


@dataclass(slots=True)
class _Budget:
    """What is left for one folder."""

    entries: int
    until: float
    over: str = ""

    def take(self) -> bool:
        """Return whether one entry more may be looked at."""
        self.entries -= 1
        if self.entries < 0:
            self.over = "more entries than are walked"
        elif time.monotonic() >= self.until:
            self.over = "it could not be walked in time"
        return not self.over


def _size_of(folder: Folder, budget: _Budget) -> int:
    """Return the bytes of all files below, as far as the budget reaches.

    Symbolic links are not followed: a hub's snapshots are links to the blobs, and others lead out. Where the
    folder has none of the entries that were named, all count. Raises :class:`OSError` where it cannot be opened.
    """
    tops = _entries(folder.path, budget)
    waiting = [entry for entry in tops if entry.name in folder.only] or tops
    size = 0
    while waiting and not budget.over:
        entry = waiting.pop()
        try:
            if entry.is_dir(follow_symlinks=False):
                waiting += _entries(entry.path, budget)
            elif entry.is_file(follow_symlinks=False):
                size += _bytes_of(entry.stat(follow_symlinks=False))
        except OSError:
            continue  # it was renamed or removed meanwhile, or is not ours to look at
    return size


def _entries(path: str, budget: _Budget) -> list[os.DirEntry[str]]:
    with os.scandir(path) as entries:
        return list(takewhile(lambda _: budget.take(), entries))


def _bytes_of(stat: os.stat_result) -> int:
    """Return what is really there: a download that writes in parallel makes the file as long as it will be first."""
    return min(stat.st_size, stat.st_blocks * _BLOCK)


def _downloads(target: Target) -> tuple[Folder, ...]:
    return download_folders(target.launch, home=os.path.expanduser("~"))  # noqa: PTH111 - blocks as little as it can


def _caches(target: Target) -> tuple[Folder, ...]:
    home = os.path.expanduser("~")  # noqa: PTH111
    return cache_folders(target.launch, home=home, user=_user(), temp=TEMP)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a uid that nobody has named; OSError since Python 3.13
        return f"uid_{os.getuid()}"
