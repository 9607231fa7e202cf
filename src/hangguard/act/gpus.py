"""The proof that no GPU memory of an attempt is left: what remains is ours, somebody else's, or cannot be told.

Two sources, because neither is enough. The driver names a dead owner for memory that his forked child keeps alive
(measured on an H200, driver 580): only the descriptors of the device files show who that is. And in a container the
driver may give the host's pids, which mean somebody else here. Nothing is ended and nothing is reset from here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

from hangguard.act import _membership
from hangguard.facts import Gpu, GpuHolder, ReleaseItem, Unseen
from hangguard.observe.devices import DeviceHolder, DeviceHolders

Identity: TypeAlias = tuple[int, int]
Gpus: TypeAlias = tuple[Gpu, ...] | Unseen
Answer: TypeAlias = Literal["released", "held", "unknown"]

NOISE_BYTES = 64 << 20
"""Growth of a GPU's used memory that needs no explanation: the driver's own bookkeeping moves by less."""

LATCHED_PERCENT = 95.0
"""Utilisation that, with nobody on the board, is a counter that stands still."""

MOST_NAMED = 4


@dataclass(slots=True)
class GpuHistory:
    """What the samples of an attempt tell that is needed once it has ended."""

    before: Gpus = Unseen("no sample was taken")
    """What the GPUs held before the server could: the first sight of them."""
    driver_names_us: bool | None = None
    """Whether the driver has ever named a member; ``None``: it was never seen to name anybody."""
    _is_first: bool = True

    def note(self, gpus: Gpus, pids: Iterable[int]) -> None:
        """Enter one sample: the GPUs, and the pids of the members."""
        is_first, self._is_first = self._is_first, False
        if isinstance(gpus, Unseen):
            if isinstance(self.before, Unseen):
                self.before = gpus
            return
        holders = [holder for gpu in gpus for holder in _holders(gpu)]
        ours = set(pids) & {holder.pid for holder in holders if holder.known is not False}
        if holders:
            self.driver_names_us = bool(self.driver_names_us or ours)
        # The driver takes seconds to open without persistence mode, and the server begins meanwhile. A later sight
        # shows what was before if all on it are known: a pid of nobody here may stand for one of us.
        is_clear = is_first or all(holder.known is not False for holder in holders)
        if isinstance(self.before, Unseen) and is_clear:
            self.before = tuple(_without(gpu, ours) for gpu in gpus)


def _without(gpu: Gpu, pids: set[int]) -> Gpu:
    """Return a board as it would be without these processes."""
    ours = [holder for holder in _holders(gpu) if holder.pid in pids]
    if not ours or isinstance(gpu.memory_used_bytes, Unseen):
        return gpu
    used = [holder.used_bytes for holder in ours]
    rest = gpu.memory_used_bytes - sum(size or 0 for size in used)
    return replace(
        gpu,
        memory_used_bytes=Unseen("the server was on it at the first look") if None in used else rest,
        holders=tuple(holder for holder in _holders(gpu) if holder not in ours),
    )


class GpuRelease(NamedTuple):
    """The answer, and whether a counter is at its top though nobody is on the board: it may be too early to tell."""

    item: ReleaseItem
    is_at_top: bool = False


async def gpu_memory(
    members: frozenset[Identity],
    before: Gpus,
    look_at_gpus: Callable[[], Awaitable[Gpus]],
    look_at_devices: Callable[[], Awaitable[DeviceHolders | Unseen]],
    *,
    driver_names_us: bool | None = None,
) -> GpuRelease:
    """Look once whether the GPUs are free of ``members``.

    ``before`` is what they held before the launch. With ``driver_names_us`` false the pids of the driver are not
    believed where nobody here has them: the memory and the descriptors decide.
    """
    now = await look_at_gpus()
    if now == () and (before == () or isinstance(before, Unseen)):
        return GpuRelease(_item("released", "no NVIDIA GPU"))
    devices = await look_at_devices()
    sight = _Sight(members, devices, driver_names_us=driver_names_us)
    if open_ := [holder for holder in sight.holders if (holder.pid, holder.started) in members]:
        detail = ", ".join(f"pid {holder.pid} ({holder.name}) has {_devices(holder)} open" for holder in open_)
        return GpuRelease(_item("held", detail, ours=True))
    if isinstance(now, Unseen):
        return GpuRelease(_item("unknown", f"{now.reason}{sight.without_driver()}"))
    earlier = {} if isinstance(before, Unseen) else {gpu.uuid: gpu for gpu in before}
    answers = [sight.judge(gpu, earlier.get(gpu.uuid)) for gpu in now]
    answers += [
        _Judged("unknown", f"GPU {gpu.index} is no longer reported")
        for uuid, gpu in earlier.items()
        if uuid not in {seen.uuid for seen in now}
    ]
    return _worst_of(answers, [gpu for gpu in now if sight.is_latched(gpu)])


class _Judged(NamedTuple):
    answer: Answer
    detail: str = ""
    ours: bool = False


class _Sight:
    """What one look saw of who has the boards."""

    def __init__(
        self, members: frozenset[Identity], devices: DeviceHolders | Unseen, *, driver_names_us: bool | None
    ) -> None:
        self._members = members
        self._devices = devices
        self._driver_names_us = driver_names_us
        self.holders: tuple[DeviceHolder, ...] = () if isinstance(devices, Unseen) else devices.found
        self._names = {holder.pid: holder.name for holder in self.holders}

    def without_driver(self) -> str:
        """Return what the descriptors alone tell."""
        if isinstance(self._devices, Unseen):
            return ""
        hidden = f", as far as can be seen ({self._devices.hidden} processes hide theirs)" * (self._devices.hidden > 0)
        return f"; no member has a GPU open{hidden}"

    def judge(self, gpu: Gpu, before: Gpu | None) -> _Judged:
        """Return the answer for one board."""
        holders = _holders(gpu)
        # Whoever was named before the launch is a neighbour, also where his number is nobody's here.
        neighbours = {holder.pid for holder in _holders(before)} if before is not None else set()
        unusable = [
            holder
            for holder in holders
            if self._driver_names_us is False and holder.known is False and holder.pid not in neighbours
        ]
        mine = [holder for holder in holders if holder not in unusable and is_member(holder.pid, self._members)]
        name = f"GPU {gpu.index}"
        if mine:
            by = ", ".join(self._named(holder) for holder in mine)
            return _Judged("held", f"{name} by {by}{self._perhaps_kept_by(gpu)}", ours=True)
        if isinstance(gpu.memory_used_bytes, Unseen):
            return _Judged("unknown", f"{name}: {gpu.memory_used_bytes.reason}")
        if before is None or isinstance(before.memory_used_bytes, Unseen):
            return _Judged("unknown", f"{name}: its memory was not seen before the launch")
        growth = gpu.memory_used_bytes - before.memory_used_bytes
        grown = {holder: more for holder in holders if (more := _growth(holder, before)) > 0}
        rest = growth - sum(grown.values())
        if growth < NOISE_BYTES or (rest < NOISE_BYTES and not unusable):
            large = ", ".join(self._neighbour(h, more) for h, more in grown.items() if more >= NOISE_BYTES)
            return _Judged("released", f"{name}: {large}" if large else "")
        if unusable:
            by = ", ".join(self._named(holder) for holder in unusable[:MOST_NAMED])
            return _Judged(
                "unknown",
                f"{name}: {growth >> 20} MiB more than before the launch, and the driver names {by}: pids of nobody "
                "here, so it cannot be told whose that is; no member has a GPU open",
            )
        if any(holder.used_bytes is None for holder in holders):
            return _Judged("unknown", f"{name}: others are on it, and the driver does not tell how much they hold")
        what = f"{name}: {rest >> 20} MiB more than before the launch, by nobody it names"
        return _Judged("held", f"{what}{self._perhaps_kept_by(gpu)}")

    def is_latched(self, gpu: Gpu) -> bool:
        """Whether its utilisation is at the top though the driver names nobody on it."""
        percent = gpu.utilization_percent
        return not isinstance(percent, Unseen) and percent >= LATCHED_PERCENT and gpu.holders == ()

    def _perhaps_kept_by(self, gpu: Gpu) -> str:
        """Name whoever has a board open without being named by the driver, and began no earlier than the launch.

        So does a forked child that keeps the memory of its dead parent; so does a monitor. No proof, only a hint.
        """
        named = {holder.pid for holder in _holders(gpu)}
        began = min((started for _, started in self._members), default=0)
        kept = [holder for holder in self.holders if holder.pid not in named and holder.started >= began]
        if not kept:
            return ""
        return "; perhaps kept by " + ", ".join(
            f"pid {holder.pid} ({holder.name}), no member, which has {_devices(holder)} open"
            for holder in kept[:MOST_NAMED]
        )

    def _named(self, holder: GpuHolder) -> str:
        size = "" if holder.used_bytes is None else f"{holder.used_bytes >> 20} MiB"
        inside = ", ".join(filter(None, (self._names.get(holder.pid, ""), size)))
        return f"pid {holder.pid} ({inside})" if inside else f"pid {holder.pid}"

    def _neighbour(self, holder: GpuHolder, more: int) -> str:
        """A process that imported memory through CUDA IPC is named for it in place of its dead owner (measured)."""
        name = self._names.get(holder.pid, "")
        who = f"pid {holder.pid}" + (f" ({name})" if name else "")
        return f"{who}, no member, holds {more >> 20} MiB more than before the launch: its own, or imported from here"


def is_member(pid: int, members: frozenset[Identity]) -> bool:
    """Whether a pid that somebody names is a member's: also a dead one's, whose memory a forked child keeps alive.

    If the pid lives with another start time it is a stranger's now.
    """
    with contextlib.suppress(OSError):  # where we cannot look, the pid decides: held is the careful answer
        entry = _membership.read_entry(pid)
        if entry is not None:
            return entry.identity in members
    return any(pid == member for member, _ in members)


def _worst_of(answers: list[_Judged], latched: list[Gpu]) -> GpuRelease:
    for wanted in ("held", "unknown"):
        worst = [judged for judged in answers if judged.answer == wanted]
        if worst:
            ours = any(judged.ours for judged in worst)
            return GpuRelease(_item(worst[0].answer, "; ".join(judged.detail for judged in worst), ours=ours))
    notes = [judged.detail for judged in answers if judged.detail]
    notes += [
        f"GPU {gpu.index} shows {gpu.utilization_percent:.0f} % though nobody is on it: a counter that stands still, "
        f"and says nothing of later servers; an administrator can reset it (nvidia-smi --gpu-reset -i {gpu.index})"
        for gpu in latched
    ]
    return GpuRelease(_item("released", "; ".join(notes), ours=True), is_at_top=bool(latched))


def _item(answer: Answer, detail: str, *, ours: bool = False) -> ReleaseItem:
    return ReleaseItem(resource="gpu-memory", answer=answer, detail=detail, ours=ours or answer == "released")


def _holders(gpu: Gpu) -> tuple[GpuHolder, ...]:
    return () if isinstance(gpu.holders, Unseen) else gpu.holders


def _growth(holder: GpuHolder, before: Gpu) -> int:
    had = {earlier.pid: earlier.used_bytes for earlier in _holders(before)}
    return max(0, (holder.used_bytes or 0) - (had.get(holder.pid) or 0))


def _devices(holder: DeviceHolder) -> str:
    return ", ".join(holder.devices)
