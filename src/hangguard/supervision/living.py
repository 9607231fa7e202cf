"""Which run is meant, and who of it lives: its supervisor, or only its guardian. Plain functions that block."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Literal

from hangguard.act import _membership
from hangguard.act.guardians import why_not_its_guardian
from hangguard.errors import NoSuchRun, RunOver
from hangguard.facts import FoundRun, Identity, RunState, Unseen
from hangguard.run_state import name_for, the_run, this_place, why_elsewhere


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


def find_living(name: str, run_dir: str | os.PathLike[str] | None = None) -> LivingRun:
    """Return the run of this id, beginning of an id, or folder.

    Raises :class:`NoSuchRun` where there is none, several, or one that is not to be believed, and :class:`RunOver`
    where nobody lives who could be told anything.
    """
    found, state = read_known(name, run_dir)
    if state.stage != "over" and _membership.is_alive(state.supervisor):
        return LivingRun(found=found, state=state, by="supervisor")
    if state.guardian is not None and not why_not_its_guardian(state.guardian, found.path):
        return LivingRun(found=found, state=state, by="guardian")
    raise RunOver(state.run_id, state.outcome if state.stage == "over" else "", living=living_members(state))


def read_known(name: str, run_dir: str | os.PathLike[str] | None = None) -> tuple[FoundRun, RunState]:
    """Return a run with its state, whoever of it lives. Raises :class:`NoSuchRun`."""
    found = the_run(name, run_dir)
    if isinstance(found.state, Unseen):
        advice = f"To see what is left: hangguard clean {name_for(found.path)}"
        raise NoSuchRun(f"Of run {found.run_id} nothing can be believed: {found.state.reason}", advice=advice)
    try:
        problem = why_elsewhere(found.state, this_place()) or _membership.why_proc_misleads()
    except OSError as unseen:
        problem = f"where this is cannot be told ({unseen.strerror})"
    if problem:
        raise NoSuchRun(f"Run {found.run_id} cannot be reached from here: {problem}")
    return found, found.state


def living_members(state: RunState, more: frozenset[Identity] = frozenset()) -> tuple[int, ...]:
    """Return the pids of those members that still live, as exactly those processes."""
    return tuple(sorted(member[0] for member in {*state.members, *more} if _membership.is_alive(member)))
