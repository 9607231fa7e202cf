"""The proof that nothing of an attempt is left: processes, GPU memory, the port, files."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

import anyio

from hangguard.act import _tree
from hangguard.act.files import files_item, unattributed_names, with_holders
from hangguard.act.spawn import Stopped
from hangguard.facts import Gpu, GpuHolder, Listener, Release, ReleaseItem, Survivor, Unseen

T = TypeVar("T")
Identity: TypeAlias = tuple[int, int]
Gpus: TypeAlias = tuple[Gpu, ...] | Unseen
Answer: TypeAlias = Literal["released", "held", "unknown"]

NOISE_BYTES = 64 << 20
"""Growth of a GPU's used memory that needs no explanation: the driver's own bookkeeping moves by less."""
LOOKS_WITHIN = 5.0
"""Seconds for one look at one resource."""
NOT_OURS_FOR = 10.0
"""Seconds after which waiting ends if all that is missing is what waiting does not bring: a sight, a stranger."""


async def prove_release(
    *,
    port: int,
    members: frozenset[Identity],
    stopped: Stopped,
    gpu_baseline: Gpus,
    look_at_gpus: Callable[[], Awaitable[Gpus]],
    who_listens: Callable[[int], Awaitable[Listener | Unseen | None]],
    shm_before: frozenset[str],
    files_unseen: tuple[str, ...] | None = None,
    within: float,
    clock: Callable[[], float] = time.monotonic,
) -> Release:
    """Look until everything of an attempt is released, at most ``within`` seconds, and say what is left.

    ``members`` are all that ever were; ``gpu_baseline`` is what the GPUs held before the launch, and
    ``shm_before`` what /dev/shm listed. ``files_unseen``: what could not be seen of what members had there; ``None``:
    it was not looked for, and nothing is said of files. "Could not look" is unknown, not released. Names that are new
    in /dev/shm, and that no member was seen to have, are listed and never deleted: being new proves nothing.
    """
    began = clock()
    pause = 0.1
    while True:
        items: tuple[ReleaseItem, ...] = (
            _processes(members, stopped),
            await _gpu_memory(members, gpu_baseline, look_at_gpus),
            await _port(port, members, who_listens),
        )
        spent = clock() - began
        if all(item.answer == "released" for item in items) or spent >= _worth_waiting(items, within):
            break
        await anyio.sleep(min(pause, within - spent))
        pause = min(1.0, pause * 1.5)
    survivors, files = _survivors(stopped), await with_holders(stopped.files)
    unattributed = unattributed_names(shm_before, files)
    if files_unseen is not None:
        unseen = tuple(dict.fromkeys((*files_unseen, *stopped.files_unseen)))
        items += (files_item(files, survivors=stopped.survivors, unattributed=unattributed, unseen=unseen),)
    return Release(
        items=items, survivors=survivors, files=files, unattributed_files=unattributed, seconds=clock() - began
    )


def _worth_waiting(items: tuple[ReleaseItem, ...], within: float) -> float:
    ours = any(item.answer == "held" and (item.ours or item.resource == "gpu-memory") for item in items)
    return within if ours else min(within, NOT_OURS_FOR)


async def _look(question: Awaitable[T]) -> T | Unseen:
    with anyio.move_on_after(LOOKS_WITHIN):
        return await question
    return Unseen(f"no answer within {LOOKS_WITHIN:g} s")


def _released(resource: Literal["processes", "gpu-memory", "port"], detail: str = "") -> ReleaseItem:
    return ReleaseItem(resource=resource, answer="released", detail=detail)


# ---------------------------------------------------------------------------------------- processes


def _processes(members: frozenset[Identity], stopped: Stopped) -> ReleaseItem:
    survivors = _survivors(stopped)
    known = {(survivor.pid, survivor.started) for survivor in survivors}
    try:
        others = sorted(member for member in members - known if _tree.is_alive(member))
    except OSError as problem:  # the user's program has no descriptors left, for example
        detail = f"{stopped.ended} ended, and could not be looked for again: {problem.strerror}"
        return ReleaseItem(resource="processes", answer="held" if survivors else "unknown", detail=detail)
    if not survivors and not others:
        return _released("processes", f"{stopped.ended} ended")
    lines = [_describe(survivor) for survivor in survivors] + [f"pid {pid}" for pid, _ in others]
    return ReleaseItem(resource="processes", answer="held", detail=", ".join(lines))


def _survivors(stopped: Stopped) -> tuple[Survivor, ...]:
    """Return those that are still there now, with the state they are in now."""
    return tuple(now for survivor in stopped.survivors if (now := _as_it_is(survivor)) is not None)


def _as_it_is(survivor: Survivor) -> Survivor | None:
    """Return it with its state now; ``None``: it is gone. One that cannot be seen is not gone."""
    try:
        if survivor.started == 0:  # hidden from us (hidepid): signal 0 asks only whether there is one
            os.kill(survivor.pid, 0)
            return survivor
        entry = _tree.read_entry(survivor.pid)
    except ProcessLookupError:
        return None
    except OSError:
        return survivor
    gone = entry is None or entry.started != survivor.started or entry.dead
    return None if entry is None or gone else replace(survivor, state=entry.state)


def _describe(survivor: Survivor) -> str:
    where = f" in {survivor.wait_channel}" if survivor.wait_channel else ""
    return f"pid {survivor.pid} ({survivor.title or '?'}), state {survivor.state}{where}"


# --------------------------------------------------------------------------------------- GPU memory


async def _gpu_memory(
    members: frozenset[Identity], baseline: Gpus, look_at_gpus: Callable[[], Awaitable[Gpus]]
) -> ReleaseItem:
    now = await _look(look_at_gpus())
    if isinstance(now, Unseen):
        return ReleaseItem(resource="gpu-memory", answer="unknown", detail=now.reason)
    before = {} if isinstance(baseline, Unseen) else {gpu.uuid: gpu for gpu in baseline}
    answers = [_one_gpu(gpu, before.get(gpu.uuid), members) for gpu in now]
    answers += [
        ("unknown", False, f"GPU {gpu.index} is no longer reported")
        for uuid, gpu in before.items()
        if uuid not in {seen.uuid for seen in now}
    ]
    for wanted in ("held", "unknown"):
        worst = [answer for answer in answers if answer[0] == wanted]
        if worst:
            return ReleaseItem(
                resource="gpu-memory",
                answer=worst[0][0],
                ours=any(ours for _, ours, _ in worst),
                detail="; ".join(detail for _, _, detail in worst),
            )
    return _released("gpu-memory", "no NVIDIA GPU" if not now else "")


def _one_gpu(gpu: Gpu, before: Gpu | None, members: frozenset[Identity]) -> tuple[Answer, bool, str]:
    """Return the answer, whether it is ours, and why."""
    holders = () if isinstance(gpu.holders, Unseen) else gpu.holders
    mine = [holder for holder in holders if _is_member(holder.pid, members)]
    if mine:
        return ("held", True, f"GPU {gpu.index} by " + ", ".join(_name(holder) for holder in mine))
    if isinstance(gpu.memory_used_bytes, Unseen):
        return ("unknown", False, f"GPU {gpu.index}: {gpu.memory_used_bytes.reason}")
    if before is None or isinstance(before.memory_used_bytes, Unseen):
        return ("unknown", False, f"GPU {gpu.index}: its memory was not seen before the launch")
    growth = gpu.memory_used_bytes - before.memory_used_bytes
    unexplained = growth - _growth_of_strangers(holders, before)
    if unexplained < NOISE_BYTES:
        return ("released", True, "")
    if any(holder.used_bytes is None for holder in holders):
        return ("unknown", False, f"GPU {gpu.index}: others are on it, and the driver does not tell how much they hold")
    return ("held", False, f"GPU {gpu.index}: {unexplained >> 20} MiB more than before the launch, by nobody it names")


def _growth_of_strangers(holders: tuple[GpuHolder, ...], before: Gpu) -> int:
    had = {} if isinstance(before.holders, Unseen) else {holder.pid: holder.used_bytes for holder in before.holders}
    return sum(max(0, (holder.used_bytes or 0) - (had.get(holder.pid) or 0)) for holder in holders)


def _is_member(pid: int, members: frozenset[Identity]) -> bool:
    """Whether a pid that the driver names is a member's: also a dead one's, which its forked child leaves there.

    If the pid lives with another start time it is a stranger's now.
    """
    with contextlib.suppress(OSError):  # where we cannot look, the pid decides: held is the careful answer
        entry = _tree.read_entry(pid)
        if entry is not None:
            return entry.identity in members
    return any(pid == member for member, _ in members)


def _name(holder: GpuHolder) -> str:
    size = "" if holder.used_bytes is None else f" ({holder.used_bytes >> 20} MiB)"
    return f"pid {holder.pid}{size}"


# ---------------------------------------------------------------------------------------------- port


async def _port(
    port: int, members: frozenset[Identity], who_listens: Callable[[int], Awaitable[Listener | Unseen | None]]
) -> ReleaseItem:
    listener = await _look(who_listens(port))
    if isinstance(listener, Unseen):
        return ReleaseItem(resource="port", answer="unknown", detail=f"port {port}: {listener.reason}")
    if listener is None:
        return _released("port")
    ours = listener.ours
    if listener.pid is not None:
        ours = _is_member(listener.pid, members)
    if ours is None:
        detail = f"port {port} by somebody whose process cannot be seen"
        return ReleaseItem(resource="port", answer="unknown", detail=detail)
    detail = f"port {port} by pid {listener.pid} ({listener.title})"
    return ReleaseItem(resource="port", answer="held", ours=ours, detail=detail)
