"""What is ended from this process: a launch whose guardian is dead, and a server that somebody else has started."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, TypeAlias

import anyio

from hangguard import held
from hangguard.act import _daemons, _ending, _membership, _signals
from hangguard.act._left import LOOK_WITHIN
from hangguard.act._link import NEWS_WITHIN, poll_until
from hangguard.act.belongings import Belongings
from hangguard.act.files import clear_files
from hangguard.act.stopped import Stopped, as_stopped
from hangguard.act.told import Told, still_there
from hangguard.facts import RemovedFile, Unseen
from hangguard.observe import procfs
from hangguard.observe.lane import Lane

Identity: TypeAlias = tuple[int, int]

TAKE_OVER_WITHIN = 15.0
"""An ending without grace takes at most this: settling, trackers, and scans of a large machine."""


class OwnEnding:
    """The stop of a launch by this process. Belongs to one event loop; :meth:`hurry` may be called from anywhere."""

    def __init__(self, belongings: Belongings, clock: Callable[[], float], *, told: Told | None = None) -> None:
        self._all = belongings
        self._told = told or Told(belongings.elsewhere)
        self._clock = clock
        self._hurried = False
        self._ending: _ending.Ending | None = None

    def hurry(self) -> None:
        """End the grace, of the stop in progress or of the one to come."""
        self._hurried = True
        ending = self._ending
        if ending is not None:
            ending.hurry()

    async def run(self, *, grace: float, within: float, began: float) -> Stopped:
        """End every member, then remove what they have left; say what came of it since ``began``."""
        if self._ending is not None:
            self._ending.shorten(time.monotonic() + grace)
        unseen = await self._look_at_files()
        ended = await self._end_members(grace, within)
        if isinstance(ended, Unseen):
            return as_stopped(
                members=self._all.members,
                survivors=_unknown(self._all.members, ended.reason),
                seconds=self._clock() - began,
                by="supervisor",
                files=self._all.kept_files(ended.reason),
                files_unseen=unseen,
            )
        self._all.members |= ended.members
        survivors = [*ended.survivors, *self._all.hidden_members()]
        files = await self._clear_files(survivors)
        return as_stopped(
            members=ended.members | {(one["pid"], one["started"]) for one in survivors},
            survivors=survivors,
            seconds=self._clock() - began,
            by="supervisor",
            daemons=ended.daemons,
            processes=ended.processes,
            files=files,
            files_unseen=unseen,
            unproved_files=await still_there(self._told.claimed(self._all.file_keys, self._all.shm_before)),
        )

    async def _end_members(self, grace: float, within: float) -> _ending.Ended | Unseen:
        ending = self._ending = _ending.Ending(
            self._all.find_members,
            root=self._all.root,
            grace=grace,
            daemons=self._all.daemons,
            proofs=self._all.proofs,
        )
        if self._hurried:  # before there was an ending to hurry
            ending.hurry()
        lane = Lane("ending")
        try:
            return await lane.ask(ending.run, within=grace + max(within, TAKE_OVER_WITHIN))
        except OSError as problem:
            return _nobody_looked(problem)
        finally:
            ending.hurry()
            self._ending = None
            lane.close()

    async def _clear_files(self, survivors: list[dict[str, Any]]) -> tuple[RemovedFile, ...]:
        if survivors:
            return self._all.kept_files("a member lives")
        return await clear_files(self._all.plain_files)

    async def _look_at_files(self) -> tuple[str, ...]:
        """Look at what members have before anybody is signalled, as the guardian does; return what was unseen."""
        everything, seen = self._all, self._told.seen
        lane, look = Lane("held files"), held.Look((), elsewhere=everything.elsewhere)
        others = held.Others(elsewhere=everything.elsewhere)

        def run() -> None:
            members = everything.find_members(_membership.read_entries())
            look.add(members)
            others.run(everything.unknown_of([*look.run(), *seen]), members, everything.shm_before)

        try:
            done = await lane.ask(run, within=LOOK_WITHIN)
        except OSError as problem:
            done = Unseen(problem.strerror or str(problem))
        except Exception as problem:  # noqa: BLE001 - the edge: evidence may be lost, the ending may not
            done = Unseen(f"{type(problem).__name__}: {problem}")
        finally:
            lane.close()
        if isinstance(done, Unseen) and not look.skip(done.reason):
            look.left_out.append(done.reason)
        if everything.shm_before is None:
            look.left_out.append("what lay in /dev/shm before the launch")
        else:
            everything.add_others(others.files())
        if not others.is_done:
            why = f": {others.problem}" if others.problem else ""
            look.left_out.append(f"who else writes to shared memory that was new{why}")
        everything.add_files(others.settled([*look.found, *seen]))
        return tuple(look.left_out[:16])


async def wait_for_end(process: Identity, pidfd: int | None) -> int | Unseen:
    """Wait for the end of the launched process, now that its parent can no longer tell it; return its exit code."""
    if pidfd is None:
        # What /proc hides is not seen to have ended.
        await poll_until(lambda: _has_ended(process), every=0.5)
        return Unseen("the guardian died first, and this system has no pidfds")
    await anyio.wait_readable(pidfd)
    # The kernel tells once the new parent, pid 1 as a rule, has waited for it.
    with anyio.move_on_after(NEWS_WITHIN):
        await poll_until(lambda: _signals.exit_code_of(pidfd) is not None)
    code = _signals.exit_code_of(pidfd)
    if code is not None:
        return code
    return Unseen("the guardian died first, and the kernel does not tell the code (Linux 6.15 does)")


def _has_ended(process: Identity) -> bool:
    """Whether it was seen to have ended; where nobody can look now, it was not."""
    with suppress(OSError):
        return not (_membership.is_alive(process) or procfs.is_hidden(process[0]))
    return False


def _nobody_looked(problem: OSError) -> Unseen:
    return Unseen(f"nobody could look: {problem.strerror}")  # this program has no descriptors left, for example


def _unknown(members: Iterable[Identity], reason: str) -> list[dict[str, Any]]:
    """Return all of them as survivors: the ending did not come back, so nobody is known to be gone."""
    unknown = {"title": reason, "state": "", "wait_channel": ""}
    return [{"pid": pid, "started": started, **unknown} for pid, started in sorted(members)]


async def stop_members(root: Identity, members: set[Identity], *, grace: float, port: int | None = None) -> Stopped:
    """Stop exactly these processes and their descendants, each by a descriptor that can mean nobody else.

    ``members`` gets those that are born meanwhile. Daemons of somebody else are left; whoever listens on ``port`` is
    none. Where the ending does not come back in time, all of them are survivors: who is gone is not known.
    """
    daemons = _daemons.Daemons(root_pid=root[0], log_id=None, port=port)
    proofs: dict[Identity, str] = {root: "whoever asked named it, with its start time"}

    def find(entries: _membership.Entries) -> set[Identity]:
        found = _membership.find_members(entries, remembered=members, log_id=None, spare=daemons.spare, proofs=proofs)
        members.update(found)
        return found

    began = anyio.current_time()
    ending = _ending.Ending(find, root=root, grace=grace, daemons=daemons, proofs=proofs)
    lane = Lane("stop")
    try:
        ended = await lane.ask(ending.run, within=grace + TAKE_OVER_WITHIN)
    except OSError as problem:
        ended = _nobody_looked(problem)
    finally:
        ending.hurry()
        lane.close()
    seconds = anyio.current_time() - began
    if isinstance(ended, Unseen):
        everybody = frozenset(members)  # the ending may still go on, and add some
        return as_stopped(
            members=everybody, survivors=_unknown(everybody, ended.reason), seconds=seconds, by="supervisor"
        )
    return as_stopped(
        members=ended.members,
        survivors=ended.survivors,
        seconds=seconds,
        by="supervisor",
        daemons=ended.daemons,
        processes=ended.processes,
    )
