"""What a launch left in /dev/shm, as named sockets and elsewhere: its removal without a guardian, what came of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from hangguard import held
from hangguard.act import _lease, _membership
from hangguard.elsewhere import Elsewhere
from hangguard.facts import ReleaseItem, RemovedFile, Survivor, Unseen
from hangguard.observe.lane import in_time
from hangguard.observe.procfs import read_title

T = TypeVar("T")

SHARED_MEMORY = Path(held.SHARED_MEMORY)
CLEAR_WITHIN = 20.0
"""Seconds for the removal: the pages of a large file take a second per few GB."""
HOLDERS_WITHIN = 5.0
MOST_NAMED = 4


async def clear_files(
    files: Iterable[held.Plain], *, really: bool = True, busy_for: float = _lease.BUSY_FOR
) -> tuple[RemovedFile, ...]:
    """Remove what nobody has, in a process of its own, and say what became of each. Never raises.

    Not in this process: the user's program may fork while a lease is held, and the child would have it too. Without
    ``really`` everything is done but the last step. ``busy_for``: seconds in which one that somebody has is asked for
    again; 0: each is asked for once.
    """
    asked = list(files)
    if not asked:
        return ()
    try:
        answers = await in_time(
            "removal", lambda: _clear(asked, really=really, busy_for=busy_for), within=CLEAR_WITHIN + 1.0
        )
    except (OSError, ValueError, subprocess.SubprocessError) as problem:
        answers = Unseen(f"it could not be asked: {type(problem).__name__}: {problem}")
    if isinstance(answers, Unseen):
        answers = [_lease.answer_of(file, None, answers.reason) for file in asked]
    return as_removed(answers)


def _clear(files: list[held.Plain], *, really: bool, busy_for: float) -> list[held.Plain]:
    done = subprocess.run(
        [sys.executable, "-I", "-S", _lease.__file__],
        input=json.dumps({"files": _lease.carried(files), "really": really, "busy_for": busy_for}).encode(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
        timeout=CLEAR_WITHIN,
        cwd="/",
        env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
        start_new_session=True,  # Ctrl-C would leave a file under its private name
    )
    return _lease.received(json.loads(done.stdout))


def as_removed(answers: Iterable[held.Plain]) -> tuple[RemovedFile, ...]:
    """Return the answers of a removal as facts."""
    return tuple(RemovedFile(**answer) for answer in answers)


# ----------------------------------------------------------------------------------------- what is left


async def with_holders(files: tuple[RemovedFile, ...], elsewhere: Elsewhere | None = None) -> tuple[RemovedFile, ...]:
    """Name who has what could not be removed, as far as a scan of all processes can tell."""
    named = await names_of_holders(((file.device, file.inode) for file in files if file.answer == "busy"), elsewhere)
    return tuple(replace(file, holders=named.get((file.device, file.inode), ())) for file in files)


async def holders_of(files: Iterable[tuple[int, int]]) -> dict[tuple[int, int], set[int]] | None:
    """Return the pids that have each of these (device, inode) now; ``None``: it cannot be seen, or not in time."""
    wanted = set(files)
    return await _asked(lambda: who_has(wanted))


async def names_of_holders(
    files: Iterable[tuple[int, int]], elsewhere: Elsewhere | None = None
) -> dict[tuple[int, int], tuple[str, ...]]:
    """Name who has each of these (device, inode) now, as far as a scan of all processes can tell."""
    wanted = set(files)
    return (await _asked(lambda: _names(who_has(wanted, elsewhere))) if wanted else None) or {}


async def _asked(question: Callable[[], T]) -> T | None:
    try:
        answer = await in_time("holders", question, within=HOLDERS_WITHIN)
    except OSError:
        return None
    return None if isinstance(answer, Unseen) else answer


def who_has(wanted: set[tuple[int, int]], elsewhere: Elsewhere | None = None) -> dict[tuple[int, int], set[int]]:
    """Scan all processes. Blocks."""
    everybody = (entry.identity for entry in _membership.read_entries().values() if not entry.dead)
    look = held.Look(everybody, elsewhere=elsewhere)
    pids: dict[tuple[int, int], set[int]] = {}
    for file in look.run():
        if (identity := (file["device"], file["inode"])) in wanted:
            pids.setdefault(identity, set()).add(file["pid"])
    return pids


def _names(pids: dict[tuple[int, int], set[int]]) -> dict[tuple[int, int], tuple[str, ...]]:
    titles = {pid: read_title(pid)[:60] or "?" for some in pids.values() for pid in some}
    return {identity: tuple(f"pid {pid} ({titles[pid]})" for pid in sorted(some)) for identity, some in pids.items()}


def files_item(
    files: tuple[RemovedFile, ...],
    *,
    survivors: tuple[Survivor, ...],
    unattributed: tuple[str, ...] | Unseen,
    unseen: tuple[str, ...],
) -> ReleaseItem:
    """Return whether what members had is gone. What a stranger has by now is held, and not left behind by us."""
    if survivors and files:
        names = _some([file.path for file in files])
        return ReleaseItem(resource="files", answer="held", detail=f"kept while a member lives: {names}")
    held_by_others = [_who_has(file) for file in files if file.answer in {"busy", "refused"}]
    if held_by_others:
        return ReleaseItem(resource="files", answer="held", ours=False, detail=_some(held_by_others))
    unknown = [f"{file.path}: {file.why}" for file in files if file.answer in {"unknown", "free"}]
    if unknown:
        return ReleaseItem(resource="files", answer="unknown", detail=_some(unknown))
    if isinstance(unattributed, Unseen):
        return ReleaseItem(resource="files", answer="unknown", detail=_some([unattributed.reason, *unseen]))
    if unseen and unattributed:
        detail = f"there are new names; could not check whether they are ours: {_some(list(unseen))}"
        return ReleaseItem(resource="files", answer="unknown", detail=detail)
    removed = [file for file in files if file.answer == "removed"]
    size = sum(file.used_bytes for file in removed) >> 20
    return ReleaseItem(
        resource="files", answer="released", detail=f"{len(removed)} removed, {size} MiB" if removed else ""
    )


def unattributed_names(before: frozenset[str] | None, files: Iterable[RemovedFile]) -> tuple[str, ...] | Unseen:
    """Return what else appeared in /dev/shm since; unseen where it could not be listed, now or before."""
    if before is None:
        return Unseen(f"what lay in {SHARED_MEMORY} before could not be listed, so nothing is known to be new")
    try:
        names = {path.name for path in SHARED_MEMORY.iterdir()}
    except FileNotFoundError:
        return ()
    except OSError as problem:
        return Unseen(f"what lies in {SHARED_MEMORY} cannot be listed: {problem.strerror or problem}")
    known = {file.path for file in files}
    return tuple(path for name in sorted(names - before) if (path := str(SHARED_MEMORY / name)) not in known)


def _who_has(file: RemovedFile) -> str:
    if file.answer == "refused":
        return f"{file.path}: {file.why}"
    return f"{file.path} by {', '.join(file.holders) or 'somebody'}"


def _some(lines: list[str]) -> str:
    more = len(lines) - MOST_NAMED
    return "; ".join(lines[:MOST_NAMED]) + (f"; and {more} more" if more > 0 else "")
