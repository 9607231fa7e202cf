"""All processes of this machine at one moment, and which of them are servers."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress

from hangguard.engines import ENGINES
from hangguard.engines.base import Engine
from hangguard.errors import NoSuchServer
from hangguard.facts import Unseen
from hangguard.judge.rules import matches
from hangguard.observe import procfs
from hangguard.observe.lane import in_time
from hangguard.observe.procfs import Stat
from hangguard.redact import clean_text, redact_argv

Identity = tuple[int, int]

SCAN_WITHIN = 2.0
READ_WITHIN = 3.0
"""Seconds for everything that one server names: versions, configuration."""
ONE_BATCH = 0.5
MOST_WEDGED = 6
"""Processes that keep their command line to themselves (a held memory-map lock) before we go on without the rest."""
MOST_SERVERS = 32
_WORDS = 64 * 1024


class Scan:
    """All processes of the machine at one moment, with their words."""

    def __init__(self, stats: dict[int, Stat], argvs: Mapping[Identity, tuple[str, ...]]) -> None:
        self.stats = stats
        self._argvs = argvs
        self._children: dict[int, list[int]] = {}
        for stat in stats.values():
            self._children.setdefault(stat.parent, []).append(stat.pid)
        self._engines = {pid: engine for pid in stats if (engine := self._engine_of(pid)) is not None}

    def argv(self, pid: int) -> tuple[str, ...]:
        """Return its words; the kernel's short name where they cannot be read."""
        stat = self.stats[pid]
        return self._argvs.get(stat.identity) or (stat.name,)

    def title(self, pid: int) -> str:
        """Return its words as one line, secrets and control characters out."""
        return clean_text(" ".join(redact_argv(self.argv(pid)))).strip()

    def chain(self, pid: int) -> Iterator[int]:
        """Yield a process, its parent, and so on."""
        seen: set[int] = set()
        while pid in self.stats and pid not in seen:
            seen.add(pid)
            yield pid
            pid = self.stats[pid].parent

    def below(self, pid: int) -> set[int]:
        """Return a process and all its descendants."""
        found, waiting = {pid}, [pid]
        while waiting:
            for child in self._children.get(waiting.pop(), ()):
                if child not in found:
                    found.add(child)
                    waiting.append(child)
        return found

    def root_of(self, pid: int) -> int | None:
        """Return the server to which a process belongs; ``None``: to none that is known."""
        recognised = [above for above in self.chain(pid) if above in self._engines]
        return recognised[-1] if recognised else None

    def roots(self) -> list[int]:
        """Return every server, oldest first."""
        tops = {root for pid in self._engines if (root := self.root_of(pid)) is not None}
        return sorted(tops, key=lambda pid: (self.stats[pid].started, pid))[:MOST_SERVERS]

    def engine(self, pid: int) -> Engine | None:
        """Return the engine that recognises this very process."""
        return self._engines.get(pid)

    def containing(self, text: str) -> list[int]:
        """Return the topmost processes in whose command line the text occurs, but for us and whoever started us."""
        ours = set(self.chain(os.getpid()))
        found = {pid for pid in self.stats if pid not in ours and text in " ".join(self.argv(pid))}
        return sorted(pid for pid in found if not any(above in found for above in self.chain(self.stats[pid].parent)))

    def _engine_of(self, pid: int) -> Engine | None:
        if pid == os.getpid() or self.stats[pid].state in "ZXx":
            return None
        argv = self.argv(pid)
        known = [engine for engine in ENGINES if engine.recognise(argv) is not None]
        titled = [engine for engine in ENGINES if matches(engine.workers, " ".join(argv))]
        return next(iter((*known, *titled)), None)


async def scan_machine() -> Scan:
    """Look at every process once, in bounded time. Raises :class:`NoSuchServer` where nothing can be seen."""
    try:
        stats = await in_time("processes", lambda: procfs.scan("/proc"), within=SCAN_WITHIN)
    except OSError as problem:
        raise NoSuchServer(f"The processes of this machine cannot be seen ({problem.strerror})") from problem
    if isinstance(stats, Unseen):
        raise NoSuchServer(f"The processes of this machine cannot be seen ({stats.reason})")
    return Scan(stats, await _read_words(list(stats.values())))


async def _read_words(stats: list[Stat]) -> dict[Identity, tuple[str, ...]]:
    """Read command lines; one that never comes costs its thread and its own words, not those of the others."""
    todo = deque(stats)
    found: dict[Identity, tuple[str, ...]] = {}

    def read() -> None:
        with suppress(IndexError):
            while True:
                stat = todo.popleft()
                with suppress(OSError):
                    text = procfs.read_bytes(f"/proc/{stat.pid}/cmdline", _WORDS).decode(errors="replace")
                    # A title that was set later ends in a row of NULs, and is one word with blanks in it.
                    found[stat.identity] = tuple(text.rstrip("\0").split("\0")) if text.rstrip("\0") else ()

    for _ in range(MOST_WEDGED):
        if not isinstance(await in_time("command lines", read, within=ONE_BATCH), Unseen):
            break
    return dict(found)
