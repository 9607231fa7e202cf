"""What the guardian tells that it found, and what of it this process has seen with its own eyes.

A guardian that is killed in the middle of a stop takes its finds with it, so it tells them before it signals anybody.
Its word alone removes nothing: who is told to have something is looked at here, while he lives, if he is a member by
what this process knows. What he has then is proved as all else is. The rest is listed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, TypeAlias

import anyio

from hangguard import held
from hangguard.act import _lease
from hangguard.elsewhere import Elsewhere
from hangguard.facts import Unseen
from hangguard.observe.lane import in_time

Identity: TypeAlias = tuple[int, int]

LOOK_WITHIN = 1.0
"""Seconds for the look at who is told to have something: milliseconds, where no memory map is locked."""
MOST = 10_000
"""Files that are kept in mind; a server that makes more of them in a stop has the rest listed."""
_FIELDS: dict[str, type] = {
    "path": str, "device": int, "inode": int, "kind": str, "held": str, "pid": int, "started": int, "made_ns": int,
}  # fmt: skip


class Told:
    """The finds of one guardian, as they are told. Belongs to one event loop."""

    def __init__(self, elsewhere: Elsewhere | None) -> None:
        self._elsewhere = elsewhere
        self._claimed: dict[tuple[Any, ...], held.Plain] = {}
        self._seen: dict[tuple[Any, ...], held.Plain] = {}
        self._new: list[held.Plain] = []
        self._number = 0
        self._looked = 0
        self._answered = 0
        self._arrived = anyio.Event()
        self._looking = anyio.Lock()

    def hear(self, message: Mapping[str, Any]) -> set[held.FileId]:
        """Take one message; return what it tells to be somebody else's too, (device, inode). Never raises."""
        files = [file for file in _list_in(message, "files") if _is_well_formed(file)]
        room = max(0, MOST - len(self._claimed))
        for file in _lease.received(files)[:room]:
            self._claimed[held.key_of(file)] = file
            self._new.append(file)
        self._number = max(self._number, _number_in(message))
        self.wake()
        return {(pair[0], pair[1]) for pair in _list_in(message, "others") if _is_pair(pair)}

    def wake(self) -> None:
        """End the wait for news."""
        self._arrived.set()

    async def news(self) -> None:
        """Wait until something was told, or :meth:`wake` was called."""
        await self._arrived.wait()
        self._arrived = anyio.Event()

    async def look(self, known: Callable[[], Collection[Identity]], find: Callable[[], set[Identity]]) -> set[Identity]:
        """Look at who is told to have something new; return the members that were found for it.

        ``known`` are the members so far. ``find`` looks for all that live now, and blocks; it is asked where somebody
        is told of who is not known. A look that is under way is waited for. Never raises :class:`Exception`: then
        nothing was seen.
        """
        async with self._looking:
            number, new, self._new = self._number, self._new, []
            holders = {(file["pid"], file["started"]) for file in new}
            look, members = held.Look((), elsewhere=self._elsewhere), frozenset(known())
            found: set[Identity] = set()

            def run() -> None:
                found.update(() if holders <= members else find())
                look.add(holders & (members | found))
                look.run()

            if holders:
                try:
                    done = await in_time("what the guardian found", run, within=LOOK_WITHIN)
                except Exception as problem:  # noqa: BLE001 - the edge: evidence may be lost, the stop that waits may not
                    done = Unseen(f"{type(problem).__name__}: {problem}")
                if isinstance(done, Unseen):
                    look.skip(done.reason)
                self._seen.update((held.key_of(file), file) for file in look.found)
            self._looked = number
            return set(found)

    def unanswered(self) -> int:
        """Return the number of the last message after which it was looked, to be answered once; 0: it is."""
        if self._looked == self._answered:
            return 0
        self._answered = self._looked
        return self._looked

    @property
    def seen(self) -> list[held.Plain]:
        """Return what this process has seen of members of whom the guardian told, whether or not it was told."""
        return list(self._seen.values())

    def claimed(self, known: Iterable[tuple[Any, ...]], before: Collection[held.FileId] | None) -> list[held.Plain]:
        """Return what is told, could be left, and is not among the ``known``."""
        own = set(known)
        return [
            file for key, file in self._claimed.items() if key not in own and held.may_be_left(file, before)
        ]  # fmt: skip

    def forget(self, files: Iterable[Mapping[str, Any]]) -> None:
        """Drop what was dealt with: mappings with the fields of ``facts.RemovedFile``."""
        for file in files:
            if file["answer"] in {"removed", "gone"}:
                for book in (self._claimed, self._seen):
                    book.pop(held.key_of(dict(file)), None)


async def still_there(files: Iterable[held.Plain]) -> tuple[str, ...]:
    """Return the names of those that are there, as this very file, or may be: where that cannot be seen in time."""
    asked = list(files)
    if not asked:
        return ()
    there: list[str] | Unseen
    try:
        there = await in_time(
            "what is left", lambda: [file["path"] for file in asked if _is_there(file)], within=LOOK_WITHIN
        )
    except OSError as problem:  # this program has no descriptors left, for example
        there = Unseen(problem.strerror or str(problem))
    return tuple(file["path"] for file in asked) if isinstance(there, Unseen) else tuple(there)


def _is_there(file: held.Plain) -> bool:
    try:
        return held.file_id(os.lstat(file["path"])) == (file["device"], file["inode"])
    except FileNotFoundError:
        return False
    except (OSError, ValueError):
        return True  # it cannot be seen to be gone


def _list_in(message: Mapping[str, Any], name: str) -> list[Any]:
    found = message.get(name)
    return found if isinstance(found, list) else []


def _number_in(message: Mapping[str, Any]) -> int:
    found = message.get("id")
    return found if isinstance(found, int) else 0


def _is_pair(pair: object) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(isinstance(number, int) for number in pair)


def _is_well_formed(file: object) -> bool:
    """Whether it has all that a file has: its latin-1 path too, for another one could not be a path."""
    if not isinstance(file, dict) or file.keys() != _FIELDS.keys():
        return False
    if not all(isinstance(file[name], of) for name, of in _FIELDS.items()):
        return False
    return file["held"] in held.ORDER and file["kind"] in {"file", *held.MEMORY, *held.DATED, "rendezvous"} and (
        file["path"].isascii() or max(file["path"]) <= "\xff"
    )  # fmt: skip
