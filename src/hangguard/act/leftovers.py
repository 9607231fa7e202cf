"""What is left of runs whose supervisor and guardian are dead: found by their state files, proved by the kernel.

A state file is a hint. Somebody belongs to a run if (pid, start time) was noted and still agrees, in the same boot and
pid namespace; if it writes to the run's log through the descriptor that the guardian opened; if its environment has
exactly this run's ``HANGGUARD_RUN_ID`` and it is the same user's; or if it descends from one of those. Never whoever
asks, nor its ancestors; never a daemon of somebody else, nor what was started from there later (a terminal in a tmux of
the server's keeps the mark); never who is of another run (``other_runs``). While a guardian or a supervisor lives only
they signal.
"""

from __future__ import annotations

import os
import stat
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from hangguard import held
from hangguard.act import _daemons, _membership
from hangguard.act.other_runs import OtherRuns, StateFiles
from hangguard.facts import FoundRun, HeldFile, Identity, Place, RunNow, RunStanding, RunState, Unseen
from hangguard.observe._kernel_locks import FileId, Held, read_locks
from hangguard.observe.earlier_runs import holder_of_lock, logs_in, writers_to
from hangguard.run_state import is_same_memory, this_place, why_elsewhere

MARK = b"HANGGUARD_RUN_ID="
MARKED = "its environment has exactly this run's HANGGUARD_RUN_ID, and it is the same user's"
LAUNCHED = "the run launched it, and its start time agrees"
READ_WITHIN = 0.2
"""Seconds for one environment: reading it takes the memory-map lock, which a wedged process may hold for ever."""
MOST_STUCK = 8
STUCK = f"{MOST_STUCK} others do not answer"


class Marks:
    """Which run's mark the processes of this user carry. Read once a process, in threads that may never come back."""

    def __init__(self) -> None:
        self.unseen = ""
        """Why some could not be read in the last look; empty: all were, or are not to be read by us."""
        self._known: dict[Identity, str] = {}
        self._stuck = 0

    def among(self, entries: _membership.Entries) -> dict[int, str]:
        """Return the run ids by pid; whoever carries none, or cannot be read, is not in it."""
        living = [entry.identity for entry in entries.values() if not entry.dead]
        todo = deque(identity for identity in living if identity not in self._known)
        self.unseen = ""
        while todo and self._stuck < MOST_STUCK:
            reader = threading.Thread(target=_read_marks, args=(todo, self._known), daemon=True)
            try:
                reader.start()
            except RuntimeError as problem:  # no thread more is allowed here; the next look tries again
                self.unseen = str(problem)
                break
            reader.join(READ_WITHIN if self._stuck else 2.0)
            if not reader.is_alive():
                break
            self._stuck += 1
        if todo:
            self.unseen = f"the environments of {len(todo)} processes could not be read ({self.unseen or STUCK})"
        return {identity[0]: run_id for identity in living if (run_id := self._known.get(identity))}


def _read_marks(todo: deque[Identity], known: dict[Identity, str]) -> None:
    with suppress(IndexError):
        while True:
            identity = todo.popleft()
            known[identity] = ""
            with suppress(OSError):
                folder = Path(f"/proc/{identity[0]}")
                if folder.stat().st_uid == os.geteuid():
                    words = (folder / "environ").read_bytes().split(b"\0")
                    marks = [word[len(MARK) :] for word in words if word.startswith(MARK)]
                    entry = _membership.read_entry(identity[0])
                    if marks and entry is not None and entry.identity == identity:
                        known[identity] = os.fsdecode(marks[0])


class Belonging:
    """Who belongs to one run, each with its proof. :meth:`find` may be asked again and again, from one thread."""

    def __init__(
        self, state: RunState, path: str, marks: Marks | None = None, states: StateFiles | None = None
    ) -> None:
        self.proofs: dict[Identity, str] = {}
        self.daemons = _daemons.Daemons(
            root_pid=state.root[0] if state.root else 0, log_id=state.log_id, port=state.port or None
        )
        # Only while a name in the folder leads to it: the inode of a log that was removed is given to another file, the
        # log of another run for example.
        self._logs = frozenset(own_logs(path))
        self._run_id = state.run_id
        self._noted = frozenset(state.members)
        self.marks = marks or Marks()
        self.others = OtherRuns(state, path, states)
        if state.root is not None:
            self.proofs[state.root] = LAUNCHED

    def find(self, entries: _membership.Entries) -> set[Identity]:
        """Return its living members."""
        noted = {pid for pid, started in self._noted if pid in entries and entries[pid].started == started}
        writers = {pid for log_id in self._logs for pid in _membership.log_writers(log_id, entries, inherited=True)}
        marks = self.marks.among(entries)
        proved = dict.fromkeys((pid for pid, run_id in marks.items() if run_id == self._run_id), MARKED)
        proved |= dict.fromkeys(writers, _membership.WRITES)

        def spare(pids: Iterable[int], entries: _membership.Entries) -> set[int]:
            daemons = self.daemons.spare(pids, entries)
            below = _membership.descendants(daemons, entries) - noted - writers
            marked = _otherwise_marked(entries, marks, self._run_id) - writers
            return daemons | ((below | marked) & set(pids)) | self.others.spare(set(pids), entries)

        return _membership.find_members(
            entries, remembered=self._noted, log_id=None, spare=spare, proved=proved, proofs=self.proofs
        )


def _otherwise_marked(entries: _membership.Entries, marks: Mapping[int, str], run_id: str) -> set[int]:
    """Return who is of another run, which may have been started from a shell of this one: that one's own to end.

    It is known by its own mark, and its guardian, which has none, by whom it launched: the leader of a session.
    """
    others = {pid for pid, mark in marks.items() if mark != run_id and pid in entries}
    return others | {entries[pid].parent for pid in others if entries[pid].session == pid}


def own_logs(path: str) -> Iterable[tuple[int, int]]:
    """Yield (device, inode) of the logs in the folder of a run that can be no other file: regular, ours, one name."""
    for log in Path(path).glob("attempt-*.log"):
        with suppress(OSError):
            found = log.lstat()
            if stat.S_ISREG(found.st_mode) and found.st_uid == os.geteuid() and found.st_nlink == 1:
                yield (found.st_dev, found.st_ino)


# --------------------------------------------------------------------------------------------- looking


def look_at_runs(runs: Iterable[FoundRun]) -> tuple[RunNow, ...]:
    """Return how each of these runs stands now. Blocks; raises :class:`OSError` where ``/proc`` cannot be listed."""
    runs = tuple(runs)
    if problem := _membership.why_proc_misleads():
        return tuple(RunNow(found=run, standing="unreadable", why=problem) for run in runs)
    sight = _Sight(runs)
    return tuple(map(sight.judge, runs))


class _Sight:
    """One look at the machine, shared by all runs."""

    def __init__(self, runs: tuple[FoundRun, ...]) -> None:
        self.here: Place = this_place()
        self.entries = _membership.read_entries()
        self.marks = Marks()
        self.states = StateFiles()
        self.marked = set(self.marks.among(self.entries).values())
        self.writers = writers_to(logs_in(run.path for run in runs), "/proc")
        self.locks: dict[FileId, Held] | None = None
        with suppress(OSError):
            self.locks = read_locks("/proc")

    def judge(self, run: FoundRun) -> RunNow:
        """Return how one run stands."""
        state = run.state
        guardian = holder_of_lock(run.path, self.locks) if self.locks is not None else None
        if isinstance(state, Unseen):
            writers = (self.entries[pid].identity for pid in self.writers.get(run.path, ()) if pid in self.entries)
            return RunNow(
                found=run, standing="unreadable", why=state.reason, guardian=guardian, members=tuple(sorted(writers))
            )
        if why := why_elsewhere(state, self.here):
            is_same_machine = state.place.host == self.here.host and state.place.user == self.here.user
            has_rebooted = is_same_machine and state.place.boot_id != self.here.boot_id
            return RunNow(found=run, standing="over" if has_rebooted else "elsewhere", why=why)
        if guardian is None and state.guardian is not None and _membership.is_alive(state.guardian):
            guardian = state.guardian[0]
        if guardian is None and state.guardian is None and self.locks is None:
            why = "the kernel's locks cannot be read, so that nobody knows whether a guardian lives"
            return RunNow(found=run, standing="unreadable", why=why)
        supervisor = state.supervisor[0] if _membership.is_alive(state.supervisor) else None
        members, files = self._members(run, state), still_there(state, self.here)
        return RunNow(
            found=run,
            standing=_standing(state, guardian, supervisor, is_left=bool(members or files)),
            guardian=guardian,
            supervisor=supervisor,
            members=members,
            files=files,
        )

    def _members(self, run: FoundRun, state: RunState) -> tuple[Identity, ...]:
        noted = any(pid in self.entries and self.entries[pid].started == started for pid, started in state.members)
        if not noted and run.path not in self.writers and state.run_id not in self.marked:
            return ()
        return tuple(sorted(Belonging(state, run.path, self.marks, self.states).find(self.entries)))


def _standing(state: RunState, guardian: int | None, supervisor: int | None, *, is_left: bool) -> RunStanding:
    if supervisor is not None and state.stage != "over":
        return state.stage
    if guardian is not None:
        return "kept" if state.on_death == "keep" and supervisor is None else "ending"
    return "left behind" if is_left else "over"


def still_there(state: RunState, here: Place) -> tuple[HeldFile, ...]:
    """Return what members were seen to have, could leave, and is still there: the very same file.

    Where nobody can tell whether it is (:func:`why_not_the_file`) it counts as there, and is not removed.
    """
    if state.root is None:  # what lay there before the launch was not noted either
        return ()
    names: dict[tuple[int, int], str] = {}
    with suppress(OSError):  # it may be entered and not listed: then the noted name is looked at
        names = held.names_in()
    candidates = (file for file in state.files if held.may_be_left(asdict(file), state.shm_before))
    is_other = is_same_memory(state, here) is False
    return tuple(file for file in candidates if not (is_other and file.kind in held.MEMORY) and is_there(file, names))


class WhyNot(NamedTuple):
    """Why a noted (device, inode) of shared memory proves nothing here."""

    reason: str
    is_other: bool = False
    """Whether what has this number here is surely another file; else nobody can tell."""


def why_not_the_file(state: RunState, here: Place) -> WhyNot | None:
    """Return why a noted (device, inode) of shared memory is no proof here; ``None``: it is.

    A build lock and a socket are known by the time too at which they were made.
    """
    same = is_same_memory(state, here)
    if same is None and state.place.shared_memory is None:
        return WhyNot(f"the run did not note which {held.SHARED_MEMORY} it had, and another has the same numbers")
    if same is None:
        return WhyNot(f"the kernel does not tell which {held.SHARED_MEMORY} this is, and another has the same numbers")
    return None if same else WhyNot(f"it lies in another {held.SHARED_MEMORY} than the run had", is_other=True)


def is_there(file: HeldFile, names: Mapping[tuple[int, int], str]) -> bool:
    """Return whether a file of this number, and where that counts of this name and time, is there now."""
    if file.kind == "file" and (file.device, file.inode) in names:
        return True
    with suppress(OSError, ValueError):
        found = Path(file.path).lstat()
        is_kind = stat.S_ISSOCK if file.kind == "socket" else stat.S_ISREG
        is_same = (found.st_dev, found.st_ino) == (file.device, file.inode) and is_kind(found.st_mode)
        return is_same and file.made_ns in {0, found.st_mtime_ns}
    return False
