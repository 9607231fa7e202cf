"""The proof that nothing of an attempt is left: processes, GPU memory, the port, files."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

import anyio

from hangguard.act import _membership
from hangguard.act.files import files_item, unattributed_names, with_holders
from hangguard.act.gpus import Gpus, gpu_memory, is_member
from hangguard.act.new_names import look_at_new_names
from hangguard.act.stopped import Stopped
from hangguard.elsewhere import Elsewhere
from hangguard.facts import Daemon, Listener, Release, ReleaseItem, Survivor, Unseen
from hangguard.observe import procfs
from hangguard.observe.devices import DeviceHolders, look_who_has_gpus_open
from hangguard.observe.left_elsewhere import Appeared, look_what_appeared
from hangguard.observe.port_left import PortLeft

T = TypeVar("T")
Identity: TypeAlias = tuple[int, int]

LOOKS_WITHIN = 5.0
"""Seconds for one look at one resource."""
NOT_OURS_FOR = 10.0
"""Seconds after which waiting ends if all that is missing is what waiting does not bring: a sight, a stranger."""
AT_LEAST_FOR_NAMES = 2.0
"""Seconds for the look whether somebody has what is new, however late it is; it takes 0.2 s."""
COUNTERS_LAG = 2.0
"""Seconds after which utilisation is that of now: it is an average over up to a second, and comes later still."""


async def prove_release(
    *,
    port: int,
    members: frozenset[Identity],
    stopped: Stopped,
    gpu_baseline: Gpus,
    look_at_gpus: Callable[[], Awaitable[Gpus]],
    who_listens: Callable[[int], Awaitable[Listener | Unseen | None]],
    shm_before: frozenset[str] | None,
    files_unseen: tuple[str, ...] | None = None,
    elsewhere: Elsewhere | None = None,
    within: float,
    look_at_devices: Callable[[], Awaitable[DeviceHolders | Unseen]] = look_who_has_gpus_open,
    look_at_port: Callable[[], Awaitable[PortLeft | Unseen | None]] | None = None,
    driver_names_us: bool | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Release:
    """Look until everything of an attempt is released, at most ``within`` seconds, and say what is left.

    ``members`` are all that ever were; ``gpu_baseline`` is what the GPUs held before the launch, and
    ``shm_before`` what /dev/shm listed (``None``: it could not be listed). ``files_unseen``: what could not be seen of
    what members had there; ``None``: it was not looked for, and nothing is said of files. ``driver_names_us``: whether
    the driver has ever named a member. "Could not look" is unknown, not released. Names that are new in /dev/shm, or
    that engines use and that are new ``elsewhere``, and that no member was seen to have, are listed and never deleted:
    being new proves nothing.
    """
    began = clock()
    pause = 0.1
    members -= {(daemon.pid, daemon.started) for daemon in stopped.daemons}
    while True:
        gpus = await gpu_memory(
            members,
            gpu_baseline,
            lambda: _look(look_at_gpus()),
            lambda: _look(look_at_devices()),
            driver_names_us=driver_names_us,
        )
        items: tuple[ReleaseItem, ...] = (
            _processes(members, stopped),
            gpus.item,
            await _port(port, members, who_listens, look_at_port),
        )
        spent = clock() - began
        is_over = all(item.answer == "released" for item in items) and not (gpus.is_at_top and spent < COUNTERS_LAG)
        if is_over or spent >= _worth_waiting(items, within):
            break
        await anyio.sleep(min(pause, within - spent))
        pause = min(1.0, pause * 1.5)
    survivors, files = _survivors(stopped), await with_holders(stopped.files, elsewhere)
    there = Appeared() if elsewhere is None else await look_what_appeared(elsewhere)
    in_shm = unattributed_names(shm_before, files)
    new = (*(() if isinstance(in_shm, Unseen) else in_shm), *there.without(file.path for file in files))
    unattributed = tuple(dict.fromkeys((*new, *stopped.unproved_files)))
    if files_unseen is not None:
        unproved = ["what the guardian saw, which is dead"] if stopped.unproved_files else []
        unseen = tuple(dict.fromkeys((*files_unseen, *stopped.files_unseen, *unproved)))
        appeared = in_shm if isinstance(in_shm, Unseen) else unattributed
        items += (files_item(files, survivors=stopped.survivors, unattributed=appeared, unseen=unseen),)
    return Release(
        items=items,
        survivors=survivors,
        daemons=_daemons(stopped),
        files=files,
        new_names=await look_at_new_names(
            unattributed, elsewhere, within=max(AT_LEAST_FOR_NAMES, within - (clock() - began))
        ),
        unattributed_unseen=(*([in_shm.reason] if isinstance(in_shm, Unseen) else ()), *there.unseen),
        seconds=clock() - began,
        processes=stopped.processes,
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
        others = sorted(member for member in members - known if _membership.is_alive(member))
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
        if procfs.is_hidden(survivor.pid):
            return survivor
        entry = _membership.read_entry(survivor.pid)
    except ProcessLookupError:
        return None
    except OSError:
        return survivor
    if entry is None or entry.dead or survivor.started not in {entry.started, 0}:  # 0: it was hidden until now
        return None
    return replace(survivor, state=entry.state)


def _daemons(stopped: Stopped) -> tuple[Daemon, ...]:
    """Return those that were left alone and still live."""
    with contextlib.suppress(OSError):
        return tuple(daemon for daemon in stopped.daemons if _membership.is_alive((daemon.pid, daemon.started)))
    return stopped.daemons


def _describe(survivor: Survivor) -> str:
    where = f" in {survivor.wait_channel}" if survivor.wait_channel else ""
    return f"pid {survivor.pid} ({survivor.title or '?'}), state {survivor.state}{where}"


# --------------------------------------------------------------------------------------------- port


async def _port(
    port: int,
    members: frozenset[Identity],
    who_listens: Callable[[int], Awaitable[Listener | Unseen | None]],
    look_at_port: Callable[[], Awaitable[PortLeft | Unseen | None]] | None,
) -> ReleaseItem:
    listener = await _look(who_listens(port))
    if isinstance(listener, Unseen):
        return ReleaseItem(resource="port", answer="unknown", detail=f"port {port}: {listener.reason}")
    if listener is None:
        return await _without_listener(port, look_at_port)
    ours = listener.ours
    if listener.pid is not None:
        ours = is_member(listener.pid, members)
    if ours is None:
        detail = f"port {port} by somebody whose process cannot be seen"
        return ReleaseItem(resource="port", answer="unknown", detail=detail)
    detail = f"port {port} by pid {listener.pid} ({listener.title})"
    return ReleaseItem(resource="port", answer="held", ours=ours, detail=detail)


async def _without_listener(
    port: int, look_at_port: Callable[[], Awaitable[PortLeft | Unseen | None]] | None
) -> ReleaseItem:
    """Nobody listens: then it is free, unless the kernel would give it to no server now."""
    left = await _look(look_at_port()) if look_at_port is not None else None
    if left is None or isinstance(left, Unseen):
        return _released("port")
    if left.can_be_bound is False:
        return ReleaseItem(resource="port", answer="held", ours=False, detail=f"port {port}, without listener: {left}")
    return _released("port", f"port {port}: {left}" if str(left) else "")
