"""What cleans a dead run: each says of one kind of thing what there is of it, whose, and why, and ends or removes it.

In the order of :data:`CLEANERS`: nothing that a process has is removed while the process lives. A dry run is the same
code without the last step of each.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import anyio

from hangguard import held
from hangguard.act import _ending, _membership, _titles
from hangguard.act._left import LOOK_WITHIN
from hangguard.act.files import clear_files, holders_of, with_holders
from hangguard.act.gpus import gpu_memory
from hangguard.act.leftovers import Belonging, WhyNot, is_there, why_not_the_file
from hangguard.act.new_names import look_at_new_names
from hangguard.facts import (
    Ask,
    CleanupItem,
    Daemon,
    EndedProcess,
    Gpu,
    HeldFile,
    Identity,
    Launch,
    RunNow,
    RunState,
    Survivor,
    Unseen,
    unproved_item,
)
from hangguard.observe.devices import look_who_has_gpus_open
from hangguard.observe.gpus import GpuProbe
from hangguard.observe.lane import in_time
from hangguard.observe.port_left import read_port_left
from hangguard.observe.ports import who_listens
from hangguard.observe.sysv import left_by, list_segments
from hangguard.run_state import this_place

log = logging.getLogger("hangguard")

MEMBERS_WITHIN = 10.0
"""Seconds for the search of all processes for members."""
GRACE = 5.0
"""Seconds between SIGTERM and SIGKILL: nobody waits for their answers, but GPU memory goes better that way."""
SETTLE = 15.0
"""What follows the grace takes at most this: settling, trackers, and scans of a large machine."""
GPUS_WITHIN = 5.0
"""Seconds after the end of the processes in which the memory of a GPU comes back; it takes 0.2 s (measured)."""
MOST_UNATTRIBUTED = 20


@dataclass(slots=True, kw_only=True)
class Cleaning:
    """One run that is being cleaned: what is known of it, and what the cleaners before have found."""

    now: RunNow
    state: RunState
    really: bool
    ends_at: float
    belonging: Belonging
    living: frozenset[Identity] = frozenset()
    """Members that lived when the cleaning began; in a dry run they live on."""
    members: frozenset[Identity] = frozenset()
    """Everybody who ever was one."""
    survivors: bool = True
    """Whether a member may live still, so that nothing of theirs is removed: until it is known that none does."""
    files: dict[tuple[Any, ...], held.Plain] = field(default_factory=dict)
    """What members were seen to have, and could leave."""
    unproved: list[CleanupItem] = field(default_factory=list)
    """What lies in shared memory under the number of something that a member had, where that proves nothing."""

    def seconds(self, at_most: float) -> float:
        """Return how much time there is for a step."""
        return max(0.2, min(at_most, self.ends_at - time.monotonic()))


Cleaner: TypeAlias = Callable[[Cleaning], Awaitable[tuple[CleanupItem, ...]]]


# ---------------------------------------------------------------------------------------- processes


async def end_processes(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """End every member, SIGTERM first, and say what it has before it is gone."""
    belonging = cleaning.belonging
    try:
        living = await in_time(
            "members",
            lambda: frozenset(belonging.find(_membership.read_entries())),
            within=cleaning.seconds(MEMBERS_WITHIN),
        )
    except OSError as problem:
        living = Unseen(problem.strerror or str(problem))
    if isinstance(living, Unseen):
        cleaning.survivors = True
        return (_blind("process", "its processes", living.reason),)
    cleaning.living = living
    cleaning.members = living | frozenset(cleaning.state.members)
    await _note_files(cleaning)
    if cleaning.really and living:
        ended = await _end(cleaning)
        if isinstance(ended, Unseen):
            cleaning.survivors = True
            return (_blind("process", "its processes", ended.reason),)
    else:
        ended = await in_time("titles", lambda: _as_ended(belonging, living), within=cleaning.seconds(LOOK_WITHIN))
        if isinstance(ended, Unseen):
            return (_blind("process", "its processes", ended.reason),)
    cleaning.members |= ended.members
    cleaning.survivors = bool(ended.survivors)
    others = await in_time("titles", lambda: _others(belonging), within=cleaning.seconds(LOOK_WITHIN))
    survivors = [Survivor(**one) for one in ended.survivors]  # type: ignore[arg-type]
    processes = [EndedProcess(**one) for one in ended.processes]  # type: ignore[arg-type]
    return (
        *(one.as_item(really=cleaning.really) for one in processes),
        *(one.as_item(belonging.proofs.get((one.pid, one.started), _membership.SEEN)) for one in survivors),
        *(Daemon(**one).as_item() for one in ended.daemons),  # type: ignore[arg-type]
        *((_blind("process", "those of other runs", others.reason),) if isinstance(others, Unseen) else others),
        *((_blind("process", "who carries its mark", why),) if (why := belonging.marks.unseen) else ()),
    )


def _others(belonging: Belonging) -> tuple[CleanupItem, ...]:
    """Return who seemed to belong to the run, and is of another one: that one's to end."""
    left = {who: why for who, why in belonging.others.left.items() if _membership.is_alive(who)}
    titles = _titles.Titles()
    titles.learn(left)
    return tuple(
        CleanupItem(
            what="process", name=f"pid {who[0]} ({titles[who][:60] or '?'})", whose="somebody else's", proof=why,
            answer="left", done="left running", pid=who[0], started=who[1],
        )
        for who, why in sorted(left.items())
    )  # fmt: skip


async def _end(cleaning: Cleaning) -> _ending.Ended | Unseen:
    """Signal them, in a thread that goes on to the end even if nobody waits for it any more."""
    belonging = cleaning.belonging
    grace = min(GRACE, cleaning.seconds(2 * GRACE) / 2)
    ending = _ending.Ending(
        belonging.find, root=cleaning.state.root, grace=grace, daemons=belonging.daemons, proofs=belonging.proofs
    )
    try:
        return await in_time("ending", ending.run, within=cleaning.seconds(grace + SETTLE))
    except OSError as problem:
        return Unseen(problem.strerror or str(problem))
    finally:
        ending.hurry()


def _as_ended(belonging: Belonging, living: frozenset[Identity]) -> _ending.Ended:
    """Return what the ending would come to if nobody survives."""
    daemons = {who: why for who, why in belonging.daemons.left.items() if _membership.is_alive(who)}
    titles = _titles.Titles()
    titles.learn([*living, *daemons])
    return _ending.Ended(
        living,
        [],
        [{"pid": who[0], "started": who[1], "title": titles[who], "why": why} for who, why in sorted(daemons.items())],
        [
            {
                "pid": who[0],
                "started": who[1],
                "title": titles[who][: _ending.LONGEST_TITLE],
                "signal": "",
                "proof": belonging.proofs.get(who, _membership.DESCENDS),
                "seconds": 0.0,
            }
            for who in sorted(living)
        ],
    )


# -------------------------------------------------------------------------------- files and sockets


async def _note_files(cleaning: Cleaning) -> None:
    """Gather what members were seen to have, and what they have now: before anybody is signalled."""
    state, look, others = cleaning.state, held.Look(sorted(cleaning.living)), held.Others()

    def run() -> None:
        others.run(look.run(), cleaning.living, state.shm_before)

    with suppress(OSError):
        done = await in_time("held files", run, within=cleaning.seconds(LOOK_WITHIN))
        if isinstance(done, Unseen):
            look.skip(done.reason)
    if state.root is None:  # what lay there before the launch was not noted either, so nothing of it is provably ours
        return
    why_not = _why_not_the_file(state)
    before = None if state.shm_before is None else {*state.shm_before, *others.files()}
    for noted in state.files:
        if not held.may_be_left(asdict(noted), before):
            continue
        if why_not and noted.kind in held.MEMORY:
            cleaning.unproved += _unproved(noted, why_not)
        else:
            cleaning.files[held.key_of(asdict(noted))] = asdict(noted)
    for file in others.settled(look.found):
        if held.may_be_left(file, None if why_not else before):  # what was there before was another /dev/shm's
            cleaning.files[held.key_of(file)] = file


def _why_not_the_file(state: RunState) -> WhyNot | None:
    try:
        return why_not_the_file(state, this_place())
    except OSError as problem:
        return WhyNot(f"where this is cannot be told: {problem.strerror or problem}")


def _unproved(file: HeldFile, why: WhyNot) -> Iterator[CleanupItem]:
    names: dict[held.FileId, str] = {}
    with suppress(OSError):
        names = held.names_in()
    if is_there(file, names):
        path = names.get((file.device, file.inode), file.path) if file.kind == "file" else file.path
        yield unproved_item(path, why.reason, is_other=why.is_other)


async def remove_files(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """Remove what members had in /dev/shm, and the names of their sockets, where nobody has them any more."""
    return (*await _remove(cleaning), *cleaning.unproved)


async def _remove(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    files = list(cleaning.files.values())
    if cleaning.survivors:
        return tuple(
            replace(item, whose="ours", answer="left", done="left: kept while a member lives")
            for item in (removed.as_item() for removed in await clear_files(files, really=False))
            if item.answer != "gone" or item.done == "would be removed"
        )
    removed = await clear_files(files, really=cleaning.really)
    if cleaning.really:
        return tuple(file.as_item() for file in await with_holders(removed))
    holders = await holders_of((file.device, file.inode) for file in removed if file.answer == "busy") or {}
    ours = {pid for pid, _ in cleaning.living}
    items = []
    for file in await with_holders(removed):
        who = holders.get((file.device, file.inode), set())
        item = file.as_item()
        if file.answer == "busy" and who and who <= ours:
            done, proof = "would be removed when they have ended", f"only members have it: pid {_listed(who)}"
            item = replace(item, whose="ours", proof=proof, answer="gone", done=done)
        items.append(item)
    return tuple(items)


async def list_unattributed(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """List what else of this user's is new in /dev/shm: never removed, for nobody knows whose it is."""
    state = cleaning.state
    if state.root is None:
        return ()
    try:
        there = held.names_in()
    except OSError as problem:
        return (_unlisted(problem.strerror or str(problem)),)
    if state.shm_before is None:
        return (_unlisted("it could not be listed before the launch, so nothing is known to be new"),)
    if why_not := _why_not_the_file(state):
        return (_unlisted(why_not.reason),)
    names = {file: path for file, path in there.items() if file not in {*state.shm_before}}
    mine = {file: path for file, path in names.items() if _is_mine(path, since=state.began)}
    known = {(file["device"], file["inode"]) for file in cleaning.files.values()}
    new = await look_at_new_names(sorted(path for file, path in mine.items() if file not in known))
    shown = sorted(new, key=lambda name: name.use == "in use")[:MOST_UNATTRIBUTED]
    return tuple(name.as_item() for name in shown)


def _unlisted(why: str) -> CleanupItem:
    return CleanupItem(
        what="file", name=held.SHARED_MEMORY, whose="unknown", proof=why, answer="unknown", done="nothing: unseen"
    )


def _is_mine(path: str, *, since: float) -> bool:
    with suppress(OSError):
        found = Path(path).lstat()
        return found.st_uid == os.geteuid() and found.st_ctime >= since
    return False


# --------------------------------------------------------------------------------------- port, GPUs


async def look_at_port(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """Say who listens where the server answered; the kernel frees a port by itself."""
    port, host = cleaning.state.port, cleaning.state.host
    if not port or cleaning.state.root is None:
        return ()
    try:
        listener = await in_time("port", lambda: who_listens(port, host=host), within=cleaning.seconds(LOOK_WITHIN))
        left = None
        if listener is None:
            left = await in_time("port", lambda: read_port_left(port, host), within=cleaning.seconds(LOOK_WITHIN))
    except OSError as problem:
        listener = left = Unseen(problem.strerror or str(problem))
    if isinstance(listener, Unseen):
        return (_blind("port", f"port {port}", listener.reason),)
    item = CleanupItem(
        what="port", name=f"port {port}", whose="ours", proof="nobody listens there", answer="gone", done="free"
    )
    if listener is None:
        rest = "" if isinstance(left, Unseen) or left is None else str(left)
        return (replace(item, proof=f"nobody listens there; {rest}" if rest else item.proof),)
    who = f"pid {listener.pid} ({listener.title[:60]})" if listener.pid is not None else "somebody who cannot be seen"
    if listener.pid in {pid for pid, _ in cleaning.living}:
        if cleaning.really:
            return (replace(item, proof=f"{who}, a member, listens there", answer="left", done="left"),)
        return (replace(item, proof=f"{who}, a member, listens there", done="would be free when it has ended"),)
    whose, proof = "somebody else's", f"{who}, no member, listens there"
    return (replace(item, whose=whose, proof=proof, answer="left", done="left"),)  # type: ignore[arg-type]


async def look_at_gpus(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """Say whether members have a GPU open, or memory on one; a driver gives it back when they have ended."""
    before = tuple(_as_it_was(uuid, used) for uuid, used in cleaning.state.gpus_before)
    launch = Launch(argv=cleaning.state.command, env=(), cwd="/", url="", host="", port=0)
    probe = GpuProbe(launch, within=cleaning.seconds(GPUS_WITHIN))
    wanted = {gpu.uuid for gpu in before}

    async def look() -> tuple[Gpu, ...] | Unseen:
        found = await probe.look(Ask())
        return found if isinstance(found, Unseen) or not wanted else tuple(gpu for gpu in found if gpu.uuid in wanted)

    ends_at = time.monotonic() + cleaning.seconds(GPUS_WITHIN)
    noted = before or Unseen("what they held before the launch was not noted")
    try:
        while True:
            now = await look()
            if now == () and not before:
                return ()  # no GPU here
            released = await gpu_memory(cleaning.members, noted, look, look_who_has_gpus_open)
            is_settled = released.item.answer == "released" or not cleaning.really
            if (is_settled and not isinstance(now, Unseen)) or time.monotonic() >= ends_at:
                break
            await anyio.sleep(0.2)
    finally:
        await probe.aclose()
    item = released.item.as_item("gpu-memory")
    if not cleaning.really and cleaning.living and item.answer == "left" and item.whose == "ours":
        item = replace(item, answer="gone", done="would be free when its processes have ended")
    return (replace(item, name="memory of GPUs"),)


async def look_at_segments(cleaning: Cleaning) -> tuple[CleanupItem, ...]:
    """List shared memory of the System V kind that members made and nobody has attached: reported, never removed."""
    now = await list_segments()
    if isinstance(now, Unseen):
        return (_blind("segment", "shared memory of System V", now.reason),)
    return tuple(segment.as_item() for segment in left_by(now, frozenset(cleaning.state.members), ()))


def _as_it_was(uuid: str, used: int) -> Gpu:
    unseen = Unseen("not noted")
    return Gpu(
        index=-1, uuid=uuid, name="", memory_used_bytes=used, memory_total_bytes=unseen, utilization_percent=unseen,
        power_watts=unseen, holders=unseen,
    )  # fmt: skip


def _blind(what: Any, name: str, reason: str) -> CleanupItem:
    return CleanupItem(
        what=what, name=name, whose="unknown", proof=reason, answer="unknown", done="left: it could not be seen"
    )


def _listed(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))


CLEANERS: tuple[Cleaner, ...] = (
    end_processes,
    remove_files,
    look_at_port,
    look_at_gpus,
    look_at_segments,
    list_unattributed,
)
"""What cleans a run, in order. A cleaner is told what those before it have found, never raises, and says of everything
whose it is and why; only with ``really`` it takes its last step."""
