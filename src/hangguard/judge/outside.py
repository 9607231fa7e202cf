"""What the members may be kept waiting by: signals that stop them, locks, downloads, the machine; remembered."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangguard.facts import Growth, Host, LockFile, Sample, Tree, Unseen

WINDOW = 5.0

DOWNLOAD, CACHE = "download", "cache of compiled kernels"
"""What moved, where it was the growth of a folder."""

THROTTLED_SHARE = 0.25
"""Of the time for which the CPU quota kept the control group from running, from which on the machine is to blame."""

STALLED_SHARE = 0.25
"""The same for pressure: tasks that could run waited for a CPU, or all of them for a disk."""


@dataclass(frozen=True, slots=True)
class HostLook:
    """The cumulative seconds of one look; ``None``: not seen."""

    t: float
    cpu: float | None
    io: float | None
    throttled: float | None


@dataclass(frozen=True, slots=True)
class Outside:
    """What is known of everything that could end a wait, or keep a member from running."""

    stopped: tuple[tuple[tuple[int, int], str, float], ...] = ()
    """(identity, state, since when) of every member that has been in T or t in every sample since."""
    locks: tuple[LockFile, ...] = ()
    locks_since: tuple[tuple[str, float], ...] = ()
    """(path, first seen in this stretch without product)."""
    growth: Growth | None = None
    bytes_per_second: float = 0.0
    """Of the download, between the last two looks at its folders."""
    host: tuple[HostLook, ...] = ()
    is_frozen: bool = False
    quiet_until: float | None = None

    def is_quiet(self, t: float) -> bool:
        """Say whether stillness is wanted now."""
        return self.quiet_until is not None and t < self.quiet_until

    def share(self, source: str) -> float | None:
        """Return the share of the last window that ``cpu``, ``io`` or ``throttled`` took; ``None``: not seen."""
        values = [(look.t, getattr(look, source)) for look in self.host]
        if len(values) < 2 or any(v is None for _, v in values) or values[-1][0] <= values[0][0]:
            return None
        (t0, before), (t1, now) = values[0], values[-1]
        return float((now - before) / (t1 - t0))


def note_outside(outside: Outside, sample: Sample, *, gap: bool, produced_at: float) -> tuple[Outside, str]:
    """Return what is known after one more sample, and which folder grew; "" if none did."""
    outside = replace(
        outside,
        stopped=_stopped(() if gap else outside.stopped, sample.tree, sample.t),
        quiet_until=sample.quiet_until,
    )
    outside = _note_locks(outside, sample, produced_at)
    if not isinstance(sample.host, Unseen):
        outside = _note_host(outside, sample.host, sample.t)
    return _note_growth(outside, sample)


def _stopped(
    before: tuple[tuple[tuple[int, int], str, float], ...], tree: Tree | Unseen, t: float
) -> tuple[tuple[tuple[int, int], str, float], ...]:
    if isinstance(tree, Unseen):
        return ()
    since = {identity: at for identity, _, at in before}
    return tuple((p.identity, p.state, since.get(p.identity, t)) for p in tree.members if p.state in {"T", "t"})


def _note_locks(outside: Outside, sample: Sample, produced_at: float) -> Outside:
    since = {path: at for path, at in outside.locks_since if at >= produced_at}
    if isinstance(sample.locks, Unseen):
        return replace(outside, locks_since=tuple(since.items()))
    now = {lock.path: since.get(lock.path, sample.t) for lock in sample.locks}
    return replace(outside, locks=sample.locks, locks_since=tuple(now.items()))


def _note_host(outside: Outside, host: Host, t: float) -> Outside:
    cpu, io, throttled = (
        None if isinstance(value, Unseen) else value
        for value in (host.cpu_stall_seconds, host.io_stall_seconds, host.throttled_seconds)
    )
    looks = (*(look for look in outside.host if look.t > t - WINDOW - 0.5), HostLook(t, cpu, io, throttled))
    return replace(outside, host=looks, is_frozen=host.is_frozen is True)


def _note_growth(outside: Outside, sample: Sample) -> tuple[Outside, str]:
    now, before = sample.growth, outside.growth
    if isinstance(now, Unseen):
        return outside, ""
    outside = replace(outside, growth=now)
    if before is None or now.at <= before.at:
        return outside, ""
    downloaded, cached = (
        0 if a is None or b is None else b - a
        for a, b in ((before.download_bytes, now.download_bytes), (before.cache_bytes, now.cache_bytes))
    )
    outside = replace(outside, bytes_per_second=max(0.0, downloaded / (now.at - before.at)))
    return outside, DOWNLOAD if downloaded > 0 else CACHE if cached > 0 else ""
