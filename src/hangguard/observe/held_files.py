"""What members have in /dev/shm, and their named sockets: by this alone is known, later, what they have left."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from typing import Any, ClassVar

from hangguard import held
from hangguard.facts import NOT_ASKED, Ask, HeldFile, HeldFiles, Unseen
from hangguard.observe.lane import Lane
from hangguard.observe.target import Shared, Target, why_unseen

Identity = tuple[int, int]

_AGAIN_AFTER = 2.0
"""Seconds between two looks that only a new name in /dev/shm has called for: it may be anybody's."""
_A_MEMBER_WITHIN = 1.0
"""Seconds that one member may hold up the look; its memory map may be locked for ever."""
_MOST_LEFT_BEHIND = 4
_MOST_FILES = 10_000
_WITH_A_NAME = 8
_UNCONNECTED = "01"
"""SS_UNCONNECTED, include/uapi/linux/net.h: also of whoever listens."""


class HeldFilesProbe:
    """Looks when asked, and, once it was asked, whenever something new lies in /dev/shm, or a named socket is new.

    Remembers what members were ever seen to have, as far as it is still there: a worker that was killed has left it.
    """

    field: ClassVar[str] = "files"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared, *, folder: str = held.SHARED_MEMORY) -> None:
        self._within = target.probe_within
        self._shared = shared
        self._folder = folder
        self._names = Lane("shared memory")
        self._reader = Lane("held files")
        self._left_behind: dict[Identity, str] = {}
        self._known: dict[tuple[Any, ...], HeldFile] = {}
        self._settled: frozenset[held.FileId] | None = None
        """Names in /dev/shm, and sockets, for which it was looked who has them."""
        self._tried: frozenset[held.FileId] = frozenset()
        """Those for which it was looked once, and nobody was seen: between creating and mapping lies a moment."""
        self._looked_at = 0.0

    async def look(self, ask: Ask) -> HeldFiles | Unseen:
        """Return all of it, and what could not be looked at."""
        settled = self._settled
        if not ask.files and (settled is None or time.monotonic() - self._looked_at < _AGAIN_AFTER):
            return NOT_ASKED
        try:
            there = await self._names.ask(lambda: _named(self._folder), within=self._within / 4)
            if isinstance(there, Unseen):
                return there
            if not ask.files and settled is not None and there <= settled:
                return NOT_ASKED
            self._looked_at = time.monotonic()
            seen = await self._look()
        except OSError as problem:
            return why_unseen(problem)
        nobodys = there - (settled or frozenset()) - {(file.device, file.inode) for file in self._known.values()}
        self._settled, self._tried = there - (nobodys - self._tried), nobodys - self._tried
        return seen

    async def aclose(self) -> None:
        """Let the threads go."""
        self._names.close()
        self._reader.close()

    async def _look(self) -> HeldFiles | Unseen:
        tree = self._shared.tree
        if isinstance(tree, Unseen):
            return Unseen(f"the members are unseen: {tree.reason}")
        members = {member.identity: None for member in tree.members}
        self._left_behind = {who: why for who, why in self._left_behind.items() if who in members}
        look = held.Look((who for who in members if who not in self._left_behind), folder=self._folder)
        left_out = [f"pid {pid}: {why}" for (pid, _), why in self._left_behind.items()]
        await self._read(look)
        self._add(look.found)
        known = tuple(self._known.values())
        there = await self._names.ask(lambda: _still_there(known, self._folder), within=self._within / 4)
        if not isinstance(there, Unseen):
            self._known = {held.key_of(_plain(file)): file for file in there}
        return HeldFiles(files=tuple(self._known.values()), left_out=(*left_out, *look.left_out))

    async def _read(self, look: held.Look) -> None:
        """Read member by member; one that holds up the reader is left to it, and another reader goes on."""
        ends_at = time.monotonic() + self._within / 2
        while True:
            within = min(_A_MEMBER_WITHIN, ends_at - time.monotonic())
            done = await self._reader.ask(look.run, within=max(0.0, within))
            if not isinstance(done, Unseen):
                return
            who = look.at
            look.skip(done.reason)
            if who is not None:
                self._left_behind[who] = "its memory map was locked when it was looked at before"
            if who is None or len(self._left_behind) > _MOST_LEFT_BEHIND or time.monotonic() >= ends_at:
                look.left_out += [] if who is not None else [done.reason]
                return
            self._reader.close()
            self._reader = Lane("held files")

    def _add(self, found: Iterable[held.Plain]) -> None:
        for plain in found:
            file, key = HeldFile(**plain), held.key_of(plain)
            before = self._known.get(key)
            closer = before is None or held.ORDER.index(file.held) > held.ORDER.index(before.held)
            if closer and (before is not None or len(self._known) < _MOST_FILES):
                self._known[key] = file


def _named(folder: str) -> frozenset[held.FileId]:
    """Return what has a name: files of shared memory, and Unix sockets by their number, which is no file's."""
    return frozenset((*held.names_in(folder), *((0, number) for number in _named_sockets())))


def _named_sockets() -> list[int]:
    """Return the named sockets that nobody is connected through; none where the kernel does not list them.

    Every connection that was accepted has the name of its listener, and would be news all day on most machines. Which
    file is behind a name is not told here, and dear to ask: that is for the look.
    """
    try:
        with open("/proc/net/unix", encoding="utf-8", errors="surrogateescape") as table:  # noqa: PTH123
            lines = table.readlines()[1:]
    except OSError:
        return []
    found = [line.split(None, 7) for line in lines]  # Num RefCount Protocol Flags Type St Inode Path
    return [int(row[6]) for row in found if len(row) == _WITH_A_NAME and row[5] == _UNCONNECTED and row[7][0] != "@"]


def _still_there(known: tuple[HeldFile, ...], folder: str) -> list[HeldFile]:
    """Return those that still have a name. Of shared memory any name in the folder counts, of sockets their own."""
    names = held.names_in(folder)
    return [file for file in known if (file.device, file.inode) in names or _has_its_name(file)]


def _has_its_name(file: HeldFile) -> bool:
    try:
        found = os.stat(file.path, follow_symlinks=False)  # noqa: PTH116
    except FileNotFoundError:
        return False
    except OSError:
        return True  # it cannot be seen to be gone
    same = held.file_id(found) == (file.device, file.inode)
    return same and (file.kind == "file" or (stat.S_ISSOCK(found.st_mode) and found.st_mtime_ns == file.made_ns))


def _plain(file: HeldFile) -> held.Plain:
    return {"device": file.device, "inode": file.inode, "path": file.path, "kind": file.kind}
