"""What members have that may be left behind: shared memory, named sockets, build locks, rendezvous files."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from hangguard import held
from hangguard.facts import NOT_ASKED, Ask, HeldFile, HeldFiles, Unseen
from hangguard.observe._presence_locks import COMPILERS
from hangguard.observe.lane import Lane
from hangguard.observe.target import Shared, Target, why_unseen

Identity = tuple[int, int]

_AGAIN_AFTER = 2.0
"""Seconds between two looks that only a new name in /dev/shm has called for: it may be anybody's."""
_BUILDS_AGAIN_AFTER = 10.0
"""The same while compilers run among the members: one build after the other, each with a lock of its own."""
_A_MEMBER_WITHIN = 1.0
"""Seconds that one member may hold up the look; its memory map may be locked for ever, or for one busy moment."""
_OTHERS_WITHIN = 2.0
"""Seconds for the look at everybody else, who may write to something new of the members too."""
_MOST_LEFT_BEHIND = 4
_MOST_FILES = 10_000
_WITH_A_NAME = 8
_UNCONNECTED = "01"
"""SS_UNCONNECTED, include/uapi/linux/net.h: also of whoever listens."""


class HeldFilesProbe:
    """Looks when asked; once it was, whenever something new lies in /dev/shm, a named socket is new, or compilers run.

    Remembers what members were ever seen to have, as far as it is still there: a worker that was killed has left it.
    And what is not theirs alone: it lay there when none of them had it, or somebody else writes to it too.
    """

    field: ClassVar[str] = "files"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared, *, folder: str = held.SHARED_MEMORY) -> None:
        self._within = target.probe_within
        self._guardian = target.guardian_pid
        self._shared = shared
        self._folder = folder
        self._elsewhere = target.elsewhere
        self._built = False
        """Whether compilers ran at the last look at them: a build's lock is there for as long as it builds."""
        self._names = Lane("shared memory")
        self._reader = Lane("held files")
        self._strangers = Lane("who else")
        self._left_behind: dict[Identity, Lane] = {}
        """Who holds up a reader, and which: once that one has come back, its member is looked at again."""
        self._stuck_others: frozenset[Identity] = frozenset()
        self._known: dict[tuple[Any, ...], HeldFile] = {}
        self._others: frozenset[held.FileId] = frozenset()
        self._asked_of_others: frozenset[held.FileId] = frozenset()
        self._settled: frozenset[held.FileId] | None = None
        """Names in /dev/shm, and sockets, for which it was looked who has them."""
        self._tried: frozenset[held.FileId] = frozenset()
        """Those for which it was looked once, and nobody was seen: between creating and mapping lies a moment."""
        self._saw_all = False
        self._looked_at = 0.0

    async def look(self, ask: Ask) -> HeldFiles | Unseen:
        """Return all of it, and what could not be looked at."""
        settled, builds = self._settled, self._builds()
        if not ask.files and (settled is None or time.monotonic() - self._looked_at < _AGAIN_AFTER):
            return NOT_ASKED
        try:
            there = await self._names.ask(lambda: _named(self._folder), within=self._within / 4)
            if isinstance(there, Unseen):
                return there
            is_settled = settled is not None and there <= settled and not self._come_back()
            if not ask.files and not builds and is_settled:
                return NOT_ASKED
            self._looked_at, self._built = time.monotonic(), builds
            seen = await self._look()
        except OSError as problem:
            return why_unseen(problem)
        nobodys = there - (settled or frozenset()) - {(file.device, file.inode) for file in self._known.values()}
        if isinstance(seen, HeldFiles):
            # Whoever makes a file has it from that moment on. What lay there twice when no member had it, and all could
            # be looked at, is somebody else's, though a member may open it later.
            at_rest = nobodys & self._tried if self._saw_all else frozenset()
            self._others = (self._others | at_rest) & there
            self._asked_of_others &= there
            seen = replace(seen, others=tuple(sorted(file for file in self._others if file[0])))  # sockets have none
        self._settled, self._tried = there - (nobodys - self._tried), nobodys - self._tried
        return seen

    def _builds(self) -> bool:
        """Whether it is to be looked for build locks: compilers have just begun to run, or run for a while."""
        tree = self._shared.tree
        has_compilers = not isinstance(tree, Unseen) and any(member.name in COMPILERS for member in tree.members)
        if not has_compilers:
            self._built = False
        return has_compilers and (not self._built or time.monotonic() - self._looked_at >= _BUILDS_AGAIN_AFTER)

    def _come_back(self) -> set[Identity]:
        """Return whose maps were locked and are no more: what they have made since then was seen by nobody."""
        return {who for who, reader in self._left_behind.items() if not reader.is_busy}

    async def aclose(self) -> None:
        """Let the threads go."""
        self._names.close()
        self._reader.close()
        self._strangers.close()

    async def _look(self) -> HeldFiles | Unseen:
        tree = self._shared.tree
        if isinstance(tree, Unseen):
            return Unseen(f"the members are unseen: {tree.reason}")
        members = {member.identity: None for member in tree.members}
        back = self._come_back()
        self._left_behind = {
            who: reader for who, reader in self._left_behind.items() if who in members and who not in back
        }
        look = held.Look(
            (who for who in members if who not in self._left_behind), folder=self._folder, elsewhere=self._elsewhere
        )
        left_out = [
            f"pid {pid}: its memory map was locked when it was looked at before" for pid, _ in self._left_behind
        ]
        await self._read(look)
        self._add(look.found)
        self._saw_all = not self._left_behind and not look.unread
        await self._look_at_others(look.found, members)
        known = tuple(self._known.values())
        there = await self._names.ask(lambda: _still_there(known, self._folder), within=self._within / 4)
        if not isinstance(there, Unseen):
            self._known = {held.key_of(_plain(file)): file for file in there}
        files = tuple(self._known.values())
        shared = {(file.device, file.inode) for file in files if file.kind == "file" and file.held == "shared"}
        return HeldFiles(
            files=files,
            left_out=(*left_out, *look.left_out),
            unproved=tuple(sorted(shared - self._asked_of_others)),
        )

    async def _look_at_others(self, found: list[held.Plain], members: Iterable[Identity]) -> None:
        """See who else writes to what is new of the members. A stranger who holds up the reader is not asked again."""
        new = [file for file in found if (file["device"], file["inode"]) not in self._asked_of_others]
        others = held.Others(guardian=self._guardian, but=self._stuck_others, folder=self._folder)
        done = await self._strangers.ask(lambda: others.run(new, members, ()), within=_OTHERS_WITHIN)
        self._stuck_others |= others.stuck
        self._others |= others.files()
        if not isinstance(done, Unseen) and others.is_done:
            self._asked_of_others |= {(file["device"], file["inode"]) for file in new if file["held"] == "shared"}

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
                self._left_behind[who] = self._reader
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
    is_of_kind = stat.S_ISSOCK if file.kind == "socket" else stat.S_ISREG
    return same and is_of_kind(found.st_mode) and (file.kind not in held.DATED or found.st_mtime_ns == file.made_ns)


def _plain(file: HeldFile) -> held.Plain:
    return {"device": file.device, "inode": file.inode, "path": file.path, "kind": file.kind}


def names_in_shm() -> frozenset[str] | None:
    """Return what lies in /dev/shm now; ``None``: it may not be listed."""
    with suppress(OSError):
        return frozenset(Path(name).name for name in held.names_in().values())
    return None
