"""Who is of another run: whoever cleans one run ends nobody of another, also not one that was started within this.

Such a run's supervisor carries this one's mark, from the terminal or the script that started it, and this one's
guardian may have noted all of it as its own members. What tells: the state file of that run, where pid and start time
agree; and the log in its folder, for whoever writes to it through what its guardian opened.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from hangguard.act import _membership
from hangguard.facts import Identity, Place, RunState, Unseen
from hangguard.run_state import STATE, read_run, run_folders, this_place, why_elsewhere
from hangguard.store import MARKER

_LOCKED = frozenset({MARKER, "lock"})
"""What a supervisor and a guardian have open in the folder of their run, as long as they live."""
_LOG = re.compile(r"attempt-\d+\.log", re.ASCII)


class StateFiles:
    """The state files of runs, each read again only when it was replaced. From one thread."""

    def __init__(self) -> None:
        self._read: dict[str, tuple[tuple[int, int], RunState | Unseen]] = {}
        self._here: Place | None = None

    def states(self, folders: Iterable[str]) -> Iterator[tuple[str, RunState | Unseen]]:
        """Yield folder and state of the runs whose numbers mean something here; unseen: it cannot be believed."""
        if self._here is None:
            self._here = this_place()
        for folder in folders:
            try:
                found = os.lstat(os.path.join(folder, STATE))  # noqa: PTH118 - hundreds, at every look
            except OSError:
                continue
            stamp = (found.st_ino, found.st_mtime_ns)
            known = self._read.get(folder)
            if known is None or known[0] != stamp:
                known = self._read[folder] = (stamp, read_run(folder).state)
            if isinstance(known[1], Unseen) or not why_elsewhere(known[1], self._here):
                yield folder, known[1]


@dataclass(slots=True)
class _Opened:
    """What processes have open in the folders of other runs."""

    locks: dict[str, set[int]]
    writers: dict[int, str]
    """The folder by pid."""


class OtherRuns:
    """Finds them among the processes that seem to be of one run."""

    def __init__(self, state: RunState, path: str, files: StateFiles | None = None) -> None:
        self.left: dict[Identity, str] = {}
        """Who was spared so far, and why; of those below one another only the uppermost. Some may have ended since."""
        self._state = state
        self._path = path
        self._files = files or StateFiles()

    def spare(self, pids: Collection[int], entries: _membership.Entries) -> set[int]:
        """Return which of these are of another run. Raises :class:`OSError` where nobody can tell where we are."""
        if not pids:
            return set()
        opened = self._opened_by(pids)
        reasons = {pid: f"it writes to the log of run {Path(folder).name}" for pid, folder in opened.writers.items()}
        for folder, state in self._files.states(dict.fromkeys([*self._near(), *opened.locks])):
            if isinstance(state, Unseen):
                why = f"it is of run {Path(folder).name}, whose state cannot be believed"
                holders = opened.locks.get(folder, set())
                reasons |= dict.fromkeys(holders | _membership.descendants(holders, entries), why)
            elif state.run_id != self._state.run_id:
                reasons |= self._of(state, entries)
        spared = {pid for pid in reasons if pid in pids and pid in entries}
        uppermost = (pid for pid in spared if entries[pid].parent not in spared)
        self.left |= {entries[pid].identity: reasons[pid] for pid in uppermost}
        return spared

    def _of(self, other: RunState, entries: _membership.Entries) -> dict[int, str]:
        """Return who is of this other run, each with the reason."""
        heads = {"guardian": other.guardian, "server": other.root}
        if other.stage != "over":  # its program may go on then, and is no supervisor any more
            heads["supervisor"] = other.supervisor
        is_within, since = _began(other) >= _began(self._state), _began(self._state)
        # Where the other one is the older, this one may have been started within it. Then that one's guardian has
        # adopted what this one has left, and noted it: only who is older than all of this run is surely that one's.
        noted = {who for who in other.members if is_within or who[1] < since}
        named = [*dict.fromkeys(noted, "a member").items(), *((who, f"the {name}") for name, who in heads.items())]
        found = {who[0]: f"it is {what} of run {other.run_id}" for who, what in named if who and _lives(who, entries)}
        if not found or not is_within:
            return found
        # Below a program that supervised both, and is pid 1 of a container, is also what this one has left.
        above = found.keys() - ({other.supervisor[0]} if other.supervisor == self._state.supervisor else set())
        below = dict.fromkeys(_membership.descendants(above, entries), f"it descends from run {other.run_id}")
        return {**below, **found}

    def _near(self) -> list[str]:
        """Return the folders of runs beside this one, and those of this user's."""
        found: list[str] = []
        for place in (Path(self._path).absolute().parent, None):
            with suppress(OSError):  # those that live are found by what they have open, too
                found += run_folders(place)
        return found

    def _opened_by(self, pids: Iterable[int]) -> _Opened:
        found, own = _Opened({}, {}), _identity_of(self._path)
        for pid in pids:
            for descriptor, path in _links_of(pid):
                folder, _, name = path.rpartition("/")
                is_log = descriptor in {"1", "2"} and _LOG.fullmatch(name) is not None
                if (name not in _LOCKED and not is_log) or _identity_of(folder) == own:
                    continue
                if not is_log:
                    found.locks.setdefault(folder, set()).add(pid)
                elif _is_a_run(folder) and _writes(pid, int(descriptor), path):
                    found.writers[pid] = folder
        return found


def _lives(who: Identity, entries: _membership.Entries) -> bool:
    return who[0] in entries and entries[who[0]].started == who[1] and not entries[who[0]].dead


def _began(state: RunState) -> int:
    """Return the start time of the first that is noted of a run; each attempt, and who attaches again, comes later."""
    return min(who[1] for who in (state.supervisor, state.guardian, state.root) if who is not None)


def _links_of(pid: int) -> Iterator[tuple[str, str]]:
    """Yield descriptor and path of what a process has open; of one that we may not look into, nothing."""
    with suppress(OSError):
        for descriptor in os.listdir(f"/proc/{pid}/fd"):  # noqa: PTH208
            with suppress(OSError):
                yield descriptor, os.readlink(f"/proc/{pid}/fd/{descriptor}")  # noqa: PTH115


def _writes(pid: int, descriptor: int, path: str) -> bool:
    with suppress(OSError):
        found = os.lstat(path)
        return _membership.writes_to(pid, descriptor, (found.st_dev, found.st_ino), inherited=True)
    return False


def _identity_of(folder: str) -> tuple[int, int] | None:
    with suppress(OSError):
        found = os.stat(folder)  # noqa: PTH116
        return (found.st_dev, found.st_ino)
    return None


def _is_a_run(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in (STATE, MARKER))  # noqa: PTH118
