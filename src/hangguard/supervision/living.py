"""Which run is meant, and who of it lives: its supervisor, or only its guardian. Plain functions that block."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from hangguard.act import _membership
from hangguard.act.choosing import the_living_run
from hangguard.act.guardians import why_not_its_guardian
from hangguard.errors import NoSuchRun, RunOver
from hangguard.facts import FoundRun, Identity, RunState, Unseen
from hangguard.observe._kernel_locks import read_locks
from hangguard.observe.earlier_runs import holder_of_lock
from hangguard.observe.lane import in_time
from hangguard.run_state import name_for, this_place, why_elsewhere
from hangguard.supervision.control_socket import listener_in

FIND_WITHIN = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LivingRun:
    """A run that can be asked, or at least told to end."""

    found: FoundRun
    state: RunState
    by: Literal["supervisor", "guardian"]
    """Who lives of it and is told."""

    @property
    def guardian(self) -> Identity:
        """Return its guardian, where it is that who is told."""
        assert self.state.guardian is not None
        return self.state.guardian


def find_living(name: str | None, run_dir: str | os.PathLike[str] | None = None) -> LivingRun:
    """Return the run of this id, beginning of an id, or folder; ``None``: the only one that lives.

    One whose state file is damaged is reached all the same, as long as its supervisor listens at its control socket.
    Raises :class:`NoSuchRun` where there is none, several, or one that is not to be believed, and :class:`RunOver`
    where nobody lives who could be told anything.
    """
    found = the_living_run(name, run_dir)
    if isinstance(found.state, Unseen) and (supervisor := _who_answers(found.path)) is not None:
        state = RunState(run_id=found.run_id, place=this_place(), began=0.0, supervisor=supervisor)
        return LivingRun(found=found, state=state, by="supervisor")
    state = _believed(found)
    if state.stage != "over" and _membership.is_alive(state.supervisor):
        return LivingRun(found=found, state=state, by="supervisor")
    if state.guardian is not None and not why_not_its_guardian(state.guardian, found.path):
        return LivingRun(found=found, state=state, by="guardian")
    outcome = state.outcome if state.stage == "over" else ""
    raise RunOver(state.run_id, outcome, living_members(state), name=name_for(found.path))


def read_known(name: str | None, run_dir: str | os.PathLike[str] | None = None) -> tuple[FoundRun, RunState]:
    """Return a run with its state, whoever of it lives. Raises :class:`NoSuchRun`."""
    found = the_living_run(name, run_dir)
    return found, _believed(found)


async def folder_of(name: str | None, run_dir: str | os.PathLike[str] | None = None) -> str:
    """Return the folder of the run that is meant, so that it is the same one later. Raises :class:`NoSuchRun`."""
    found = await in_time("run", lambda: the_living_run(name, run_dir), within=FIND_WITHIN)
    if isinstance(found, Unseen):
        raise NoSuchRun(f"The run {name or ''} cannot be looked at: {found.reason}")
    return found.path


def _who_answers(folder: str) -> Identity | None:
    """Return who listens at the control socket of a run: what its state file would say of its supervisor."""
    with suppress(OSError):
        pid = listener_in(folder)
        if not _membership.why_proc_misleads() and (entry := _membership.read_entry(pid)) is not None:
            return entry.identity
    return None


def _believed(found: FoundRun) -> RunState:
    if isinstance(found.state, Unseen):
        advice = _who_guards(found.path) or f"To see what is left: hangguard clean {name_for(found.path)}"
        raise NoSuchRun(f"Of run {found.run_id} nothing can be believed: {found.state.reason}", advice=advice)
    try:
        problem = why_elsewhere(found.state, this_place()) or _membership.why_proc_misleads()
    except OSError as unseen:
        problem = f"where this is cannot be told ({unseen.strerror})"
    if problem:
        raise NoSuchRun(f"Run {found.run_id} cannot be reached from here: {problem}")
    return found.state


def _who_guards(folder: str) -> str:
    """Return who ends the server of a run of which nothing else is known; empty: no guardian is proved to live."""
    with suppress(OSError):
        pid = holder_of_lock(folder, read_locks("/proc"))
        entry = _membership.read_entry(pid) if pid is not None else None
        if entry is not None and not why_not_its_guardian(entry.identity, folder):
            return (
                "Nobody answers at its control socket, so its supervisor is dead or stopped. "
                f"Its guardian is pid {pid}; it ends its server when it gets SIGTERM: kill {pid}"
            )
    return ""


def living_members(state: RunState, more: frozenset[Identity] = frozenset()) -> tuple[int, ...]:
    """Return the pids of those members that still live, as exactly those processes."""
    return tuple(sorted(member[0] for member in {*state.members, *more} if _membership.is_alive(member)))
