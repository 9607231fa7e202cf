"""Which run is meant by a name: its id, the beginning of that, its folder, or nothing at all. Functions that block."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable

from hangguard.act.leftovers import look_at_runs
from hangguard.errors import NoSuchRun
from hangguard.facts import FoundRun, RunNow, Unseen
from hangguard.run_state import find_run, list_runs

LONGEST_COMMAND = 80
ALL = "See them all: hangguard ps --all"


def the_living_run(name: str | None, run_dir: str | os.PathLike[str] | None = None) -> FoundRun:
    """Return the run of this name; of several with this beginning, the only one that lives. ``None``: of all runs.

    One whose name is unique is returned whether it lives or not. Raises :class:`NoSuchRun` where there is none of the
    name, or not exactly one that lives.
    """
    try:
        found = find_run(name, run_dir) if name is not None else list_runs(run_dir)
        if isinstance(found, FoundRun):
            return found
        if isinstance(found, Unseen):
            raise NoSuchRun(found.reason[:1].upper() + found.reason[1:], advice=ALL)
        runs = look_at_runs(found)
    except OSError as problem:
        where = problem.filename or "the runs"
        raise NoSuchRun(f"{where} cannot be looked at: {problem.strerror or problem}") from problem
    living = tuple(filter(_lives, runs))
    if len(living) == 1:
        return living[0].found
    if not living and name is None:
        raise NoSuchRun("No run lives", advice=ALL)
    of_name = "" if name is None else f" begin with {name!r}"
    problem_said = f"{len(living)} runs that live{of_name}" if living else f"{len(runs)} runs{of_name}, and none lives"
    raise _ambiguous(problem_said if of_name else f"{len(living)} runs live", living or runs)


def the_run(name: str, run_dir: str | os.PathLike[str] | None = None) -> FoundRun:
    """Return the one run of this name, living or not. Raises :class:`NoSuchRun` for none, or more than one."""
    found = find_run(name, run_dir)
    if isinstance(found, FoundRun):
        return found
    if isinstance(found, Unseen):
        raise NoSuchRun(found.reason[:1].upper() + found.reason[1:], advice=ALL)
    problem = f"{len(found)} runs begin with {name!r}"
    try:
        raise _ambiguous(problem, look_at_runs(found))
    except OSError:
        raise NoSuchRun(problem, tuple(one.run_id for one in found), advice="Which one?") from None


def _lives(now: RunNow) -> bool:
    return now.is_alive or now.guardian is not None


def _ambiguous(problem: str, runs: Iterable[RunNow]) -> NoSuchRun:
    runs = tuple(runs)
    return NoSuchRun(
        problem, tuple(now.found.run_id for now in runs), advice="Which one?", described=tuple(map(_described, runs))
    )


def _described(now: RunNow) -> str:
    state = now.found.state
    command = "" if isinstance(state, Unseen) else " ".join(shlex.join(state.command).split())
    shown = command if len(command) <= LONGEST_COMMAND else f"{command[: LONGEST_COMMAND - 4]} ..."
    return f"{now.found.run_id}  {now.standing:<11}  {shown}".rstrip()
