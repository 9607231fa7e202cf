"""Ends and removes what is left of runs whose supervisor and guardian are dead, and says of each thing why.

``cleaners`` does it. Where somebody still cares for a run nothing of it is touched.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import anyio

from hangguard.act.choosing import the_run
from hangguard.act.cleaners import CLEANERS, Cleaner, Cleaning
from hangguard.act.leftovers import Belonging, look_at_runs
from hangguard.act.old_runs import delete_never_started, is_never_started
from hangguard.errors import NoSuchRun
from hangguard.facts import (
    CleanupItem,
    CleanupReport,
    FoundRun,
    RunNow,
    RunState,
    Unseen,
)
from hangguard.facts.cleaned import FOLDER_REMOVED, FOLDER_WOULD_GO
from hangguard.observe.lane import in_time
from hangguard.redact import redact
from hangguard.run_state import list_runs, name_for, write_state
from hangguard.store import RunFolder

log = logging.getLogger("hangguard")

WITHIN = 60.0
"""Seconds for all of it."""
TO_CLEAN = frozenset({"left behind", "never started"})
LOOKS_WITHIN = 10.0
"""Seconds for one look at all runs of a folder."""


async def aclean_up(
    run: str | os.PathLike[str] | None = None,
    *,
    really: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    within: float = WITHIN,
    cleaners: tuple[Cleaner, ...] | None = None,
) -> CleanupReport:
    """Do what :func:`hangguard.clean_up` does, awaited."""
    began = time.monotonic()
    runs = await _chosen(run, run_dir)
    items: list[CleanupItem] = []
    for now in runs:
        found = await _clean(now, really, began + within, CLEANERS if cleaners is None else cleaners)
        items += (replace(item, run_id=now.found.run_id) for item in found)
    return redact(CleanupReport(items=tuple(items), dry_run=not really, seconds=time.monotonic() - began))


async def look_at(question: Callable[[], Iterable[FoundRun]], *, within: float = LOOKS_WITHIN) -> tuple[RunNow, ...]:
    """Return how these runs stand now. Raises :class:`NoSuchRun` where that cannot be seen."""
    try:
        found = await in_time("runs", lambda: tuple(map(_told_apart, look_at_runs(question()))), within=within)
    except OSError as problem:
        found = Unseen(f"{problem.filename or 'the runs'}: {problem.strerror or problem}")
    if isinstance(found, Unseen):
        raise NoSuchRun(f"the runs cannot be looked at ({found.reason})")
    return found


def _told_apart(now: RunNow) -> RunNow:
    if now.standing == "unreadable" and now.guardian is None and not now.members and is_never_started(now.found.path):
        return replace(now, standing="never started", why="its folder was made, and nothing was ever launched")
    return now


async def _chosen(run: str | os.PathLike[str] | None, run_dir: str | os.PathLike[str] | None) -> tuple[RunNow, ...]:
    if run is None:
        runs = await look_at(lambda: list_runs(run_dir))
        return tuple(now for now in runs if now.is_alive or now.standing in TO_CLEAN or now.members)
    name = os.fspath(run)
    found = await in_time("run", lambda: the_run(name, run_dir), within=LOOKS_WITHIN)
    if isinstance(found, Unseen):
        raise NoSuchRun(f"The run {name!r} cannot be looked for ({found.reason})")
    return await look_at(lambda: (found,))


async def _clean(now: RunNow, really: bool, ends_at: float, cleaners: tuple[Cleaner, ...]) -> tuple[CleanupItem, ...]:
    state = now.found.state
    if now.standing == "never started":
        return (await _remove_the_folder(now, really=really),)
    if now.is_alive or now.standing in {"elsewhere", "unreadable"} or isinstance(state, Unseen):
        return (_untouched(now),)
    if now.why:  # the machine was started again: no process and no shared memory outlives that
        items: tuple[CleanupItem, ...] = (_run_item(now, whose="ours", proof=now.why, answer="gone", done="nothing"),)
    else:
        belonging = Belonging(state, now.found.path)
        cleaning = Cleaning(now=now, state=state, really=really, ends_at=ends_at, belonging=belonging)
        items = tuple([item for cleaner in cleaners for item in await _in_order(cleaner, cleaning)])
    is_clean = not any(item.whose == "ours" and item.answer != "gone" for item in items)
    if really and is_clean:
        await _note_the_end(now, state)
    return items


async def _in_order(cleaner: Cleaner, cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """Have one cleaner do its part; whatever it comes to, the others have their turn."""
    try:
        with anyio.move_on_after(cleaning.seconds(WITHIN)):
            return await cleaner(cleaning)
        problem = "no answer in the time that there was"
    except Exception as fault:  # a named edge: no cleaner ends the cleaning
        log.exception("a cleaner failed")
        problem = f"{type(fault).__name__}: {fault}"
    return (_run_item(cleaning.now, whose="ours", proof=problem, answer="unknown", done="could not be looked at"),)


async def _remove_the_folder(now: RunNow, *, really: bool) -> CleanupItem:
    """Remove the folder of a run of which nothing was ever launched, if that is still so."""
    proof = "its folder has nothing but its mark, and nobody has a lock on that"
    done: bool | Unseen = not really
    if really:
        with suppress(OSError):
            done = await in_time("run folder", lambda: delete_never_started(now.found.path), within=LOOKS_WITHIN)
    if done is not True:
        return _run_item(now, whose="ours", proof=proof, answer="unknown", done="left: its folder could not be removed")
    word = FOLDER_REMOVED if really else FOLDER_WOULD_GO
    return _run_item(now, whose="ours", proof=f"{now.why}: {proof}", answer="gone", done=word)


def _untouched(now: RunNow) -> CleanupItem:
    if now.is_alive:
        who = f"its guardian, pid {now.guardian}" if now.guardian else f"its supervisor, pid {now.supervisor}"
        if now.standing == "ending":
            proof = f"{who}, is ending it; look again in some seconds"
        else:
            proof = f"{who}, lives; to end it: hangguard stop {name_for(now.found.path)}"
        return _run_item(now, whose="ours", proof=proof, answer="alive", done="left as it is")
    pids = " ".join(str(pid) for pid, _ in now.members)
    done = f"left: nothing of it is touched; pid {pids} writes to its log" if pids else "left: nothing of it is touched"
    lives = ""
    if now.standing == "unreadable" and now.guardian is not None:
        lives = f"; its guardian, pid {now.guardian}, lives; to end it: hangguard stop {name_for(now.found.path)}"
    return _run_item(now, whose="unknown", proof=f"{now.why}{lives}", answer="unknown", done=done)


def _run_item(now: RunNow, **fields: Any) -> CleanupItem:
    return CleanupItem(what="run", name=now.found.run_id, **fields)


async def _note_the_end(now: RunNow, state: RunState) -> None:
    folder = RunFolder(run_id=now.found.run_id, path=now.found.path)
    over = replace(state, stage="over", outcome=state.outcome or "cleaned up", left_behind=())
    over = replace(over, outcome="cleaned up") if state.stage != "over" or state.left_behind else over
    with suppress(OSError):  # a hint is missing then, and the kernel tells all the same
        await in_time("state file", lambda: write_state(folder, over), within=LOOKS_WITHIN)
