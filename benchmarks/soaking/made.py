"""What the members of one cycle made and who they said they are; and of whose files nobody can have known."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import soaked
from soaking import eyes
from soaking.plan import BLIND_FOR
from soaking.strangers import SHARED_MEMORY, left_in

MAKING_TAKES = 0.1
"""Seconds from the file to its name and its mapping, on a machine that has other things to do."""
NEVER = float("inf")


@dataclass
class Kills:
    """Whom we killed, and when, as ``time.time()`` has it."""

    whom: list[str] = field(default_factory=list)
    supervisor_at: float = NEVER


class Made:
    """What is told of in the folder of a cycle, and what follows from it."""

    def __init__(self, folder: Path, kills: Kills) -> None:
        self._said = folder / "said"
        self._events = str(folder / "events")
        self._runs = folder / "runs"
        self._kills = kills

    def members(self) -> list[tuple[eyes.Identity, str]]:
        """Return the members that told of themselves, and of what kind they are."""
        return [((int(a), int(b)), kind) for a, b, kind in self._words() if a != "file"]

    def _words(self) -> list[list[str]]:
        try:
            lines = self._said.read_text().splitlines()
        except FileNotFoundError:
            return []
        return [words for line in lines if len(words := line.split(" ", 2)) == 3]

    def files(self, tree: eyes.Tree) -> list[tuple[Path, int | None]]:
        """Return all that members ever made, as they told, with the maker's pid where it is known."""
        said = [(Path(path), int(pid)) for word, pid, path in self._words() if word == "file"]
        roots = [who[0] for who, kind in self.members() if kind == "root"]
        logged = [path for log in self._runs.glob("*/attempt-*.log") for path in left_in(log)]
        torch = [(SHARED_MEMORY / f"torch_{pid}_{pid}_0", pid) for pid, _ in tree.seen]
        of_workers = {path for path, _ in torch}
        return said + [(path, roots[-1] if roots else None) for path in logged if path not in of_workers] + torch

    def is_nobodys(self, path: Path, maker: int | None, tree: eyes.Tree) -> bool:
        """Whether nobody who could still tell can have seen who had it."""
        return self._was_made_late(path) or self._was_killed_young(path, maker, tree)

    def _stops(self) -> Iterator[tuple[float, float]]:
        """Return from when to when a stop was under way; one by the guardian alone has no end."""
        events = soaked.told(self._events)
        zero = min((event["wall"] - event["t"] for event in events), default=0.0)
        began = [zero + event["t"] for event in events if event["event"] == "stopping"]
        over = [zero + event["t"] for event in events if event["event"] == "released"]
        for start in began:
            yield start, min((end for end in over if end > start), default=NEVER)
        yield self._kills.supervisor_at, NEVER

    def _was_made_late(self, path: Path) -> bool:
        """Whether it was made while a stop was under way: between the last look and the last signal."""
        status = path.lstat()
        made = status.st_ctime if path.name.startswith("sem.") else status.st_mtime  # a semaphore gets its name last
        return any(start - MAKING_TAKES < made < end for start, end in self._stops())

    def _was_killed_young(self, path: Path, maker: int | None, tree: eyes.Tree) -> bool:
        """Whether whoever made it was killed by us, or with whom we killed, before the watch can have looked."""
        if not {"worker", "root"} & set(self._kills.whom):
            return False
        last = max((at for who, at in tree.seen.items() if who[0] == maker), default=0.0)
        return last - path.lstat().st_mtime < BLIND_FOR
