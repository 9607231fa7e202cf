"""The end of a guardian that hangs in the start of the server, together with what it is starting.

The exec of a program waits for its disk, or for whoever has a lease on the file, and the guardian waits for the exec. A
guardian that is killed then leaves a process that becomes the server when the disk answers, and that nobody knows.
"""

from __future__ import annotations

import signal
from typing import TypeAlias

import anyio

from hangguard.act import _membership, _signals
from hangguard.act._link import NEWS_WITHIN, Link
from hangguard.facts import Unseen
from hangguard.observe.lane import Lane

Identity: TypeAlias = tuple[int, int]

_AGAIN = 0.1


async def end_hung_start(link: Link) -> str:
    """End the children of the guardian, then it, then what is left of them; return what may be left; empty: nothing.

    Its children, as the kernel says while it lives: they are all of the launch. Whoever is in exec takes SIGKILL when
    that returns, at the latest. Takes five times :data:`NEWS_WITHIN` at most. Never raises :class:`OSError`.
    """
    guardian = (link.process.pid, link.started)
    lane, children = Lane("hung start"), set[Identity]()
    proved: bool | Unseen = False
    living: set[Identity] | Unseen = set()
    try:
        proved = await lane.ask(lambda: _kill_children(guardian, children), within=NEWS_WITHIN)
        with anyio.move_on_after(NEWS_WITHIN):
            while not await link.has_ended(within=_AGAIN):  # without them it goes on, hears the stop, and ends itself
                proved = await lane.ask(lambda: _kill_children(guardian, children), within=NEWS_WITHIN) or proved
        await link.end_guardian(within=0.0)
        living = await lane.ask(lambda: _kill(children), within=NEWS_WITHIN)
        with anyio.move_on_after(NEWS_WITHIN):
            while living:
                await anyio.sleep(_AGAIN)
                living = await lane.ask(lambda: _kill(children), within=NEWS_WITHIN)
    except OSError as problem:  # this program has no descriptors left, for example
        proved = Unseen(problem.strerror or str(problem))
        await link.end_guardian(within=0.0)
    finally:
        lane.close()
    has_exited = (link.process.returncode or 0) >= 0 and link.process.returncode is not None
    return "" if has_exited else _what_is_left(proved, living)


def _what_is_left(proved: bool | Unseen, living: set[Identity] | Unseen) -> str:
    for unseen in (proved, living):
        if isinstance(unseen, Unseen):
            return f"the server may start yet: what its guardian was starting could not be seen ({unseen.reason})"
    if not proved:
        return "the server may start yet: its guardian ended before it was seen what it was starting"
    assert not isinstance(living, Unseen)
    pids = ", ".join(str(pid) for pid, _ in sorted(living))
    return f"process {pids}, which was to become the server, ends only when its exec returns" if pids else ""


def _kill_children(guardian: Identity, children: set[Identity]) -> bool:
    """Kill the children of the guardian, and add them; say whether it was seen to be their parent. Blocks."""
    try:
        pids = _membership.children_of(guardian[0]) or list(_membership.read_entries())
    except (FileNotFoundError, ProcessLookupError):
        return False
    entries = [entry for pid in pids if (entry := _membership.read_entry(pid)) is not None]
    found = {entry.identity for entry in entries if entry.parent == guardian[0]}
    if not _membership.is_alive(guardian):  # whose children these are is not known
        return False
    children |= found
    _kill(children)
    return True


def _kill(processes: set[Identity]) -> set[Identity]:
    """Kill these, each by a descriptor that means exactly this process; return who lives. Blocks."""
    living = {process for process in processes if _membership.is_alive(process)}
    for process in living:
        _signals.send(process, signal.SIGKILL, living)
    return living
