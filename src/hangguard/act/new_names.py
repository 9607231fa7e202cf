"""What is new since a launch and no member was seen to have: whether somebody has it at this moment. Never removed.

Who has it is looked for in ``/proc`` first, which touches nothing of his. Only what nobody who can be seen has is asked
for at the kernel, in the process that asks for removals (``act/_lease.py``, with its care for the leases of others).
"""

from __future__ import annotations

import stat
from collections.abc import Iterable
from pathlib import Path

import anyio

from hangguard import held
from hangguard.act.files import HOLDERS_WITHIN, clear_files, names_of_holders
from hangguard.elsewhere import Elsewhere
from hangguard.facts import NewName, RemovedFile, Unseen
from hangguard.observe.lane import in_time

WITHIN = 30.0


async def look_at_new_names(
    paths: Iterable[str], elsewhere: Elsewhere | None = None, *, within: float = WITHIN
) -> tuple[NewName, ...]:
    """Return each of them that is still there, with whether somebody has it, within so many seconds. Never raises."""
    wanted = list(paths)
    with anyio.move_on_after(within):
        return await _look_at(wanted, elsewhere) if wanted else ()
    return tuple(NewName(path=path, use="unknown", why="there was no time to look") for path in wanted)


async def _look_at(wanted: list[str], elsewhere: Elsewhere | None) -> tuple[NewName, ...]:
    try:
        there = await in_time("new names", lambda: _look(wanted), within=HOLDERS_WITHIN)
    except OSError as problem:
        there = Unseen(problem.strerror or str(problem))
    if isinstance(there, Unseen):
        return tuple(NewName(path=path, use="unknown", why=there.reason) for path in wanted)
    named = await names_of_holders(((file["device"], file["inode"]) for file in there), elsewhere)
    to_ask = [file for file in there if not named.get((file["device"], file["inode"]))]
    asked = {file.path: file for file in await clear_files(to_ask, really=False, busy_for=0.0)}
    told = (
        _as_asked(asked[path])
        if (path := file["path"]) in asked
        else NewName(path=path, use="in use", why=", ".join(named[(file["device"], file["inode"])]))
        for file in there
    )
    return tuple(name for name in told if name is not None)


def _look(paths: list[str]) -> list[held.Plain]:
    """Return what is there, as a removal is asked for. Blocks."""
    found = []
    for path in paths:
        try:
            now = Path(path).lstat()
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            now = None
        device, inode = (now.st_dev, now.st_ino) if now is not None else (0, 0)
        # A "pool" is asked for under this name alone, and not wherever its inode has gone.
        kind = "socket" if now is not None and stat.S_ISSOCK(now.st_mode) else "pool"
        found.append({"path": path, "device": device, "inode": inode, "kind": kind, "held": "open", "made_ns": 0})
        found[-1] |= {"pid": 0, "started": 0}
    return found


def _as_asked(file: RemovedFile) -> NewName | None:
    """Return what the kernel said; ``None``: it is gone."""
    if file.answer == "gone":
        return None
    if file.answer == "free":
        return NewName(path=file.path, use="at rest")
    return NewName(path=file.path, use="in use" if file.answer == "busy" else "unknown", why=file.why)
