"""One line for the healthy: what is going on, as a person would say it."""

from __future__ import annotations

from hangguard.judge.boards import Boards
from hangguard.judge.memory import GPU_WORK, Memory
from hangguard.judge.outside import CACHE, DOWNLOAD
from hangguard.judge.progress import Reading

RECENT = 3.0
"""Seconds for which what moved last is still what goes on."""

FAST = 1024**2
"""Bytes a second from which on a start is said to read."""


def headline(memory: Memory) -> str:
    """Return what a start is doing, as in ``loading: 1.2 GB/s read``, ``compiling: 4 compiler processes``."""
    return (
        _compiles(memory)
        or _downloads(memory)
        or _captures(memory)
        or _reads(memory)
        or _works(memory)
        or _anything(memory)
    )


def gpu_work(boards: Boards) -> str:
    """Return ``GPU works at 300 W``, or "" where none does that can be told."""
    at_work = [b for b in boards.working if b.watts is not None]
    if not at_work:
        return ""
    watts = max(b.watts or 0.0 for b in at_work)
    if len(boards.boards) == 1:
        return f"GPU works at {watts:.0f} W"
    return f"{len(at_work)} of {len(boards.boards)} GPUs work, at up to {watts:.0f} W"


def rate(bytes_per_second: float) -> str:
    """Return a rate as people write it: ``1.2 GB/s``."""
    for unit, size in (("GB/s", 1e9), ("MB/s", 1e6)):
        if bytes_per_second >= size:
            return f"{bytes_per_second / size:.{0 if bytes_per_second >= 10 * size else 1}f} {unit}"
    return f"{bytes_per_second / 1e3:.0f} kB/s"


def _compiles(memory: Memory) -> str:
    if not memory.recent or not memory.recent[-1].compilers or memory.unproductive_for > RECENT:
        return ""
    n = len(memory.recent[-1].compilers)
    return f"compiling: {n} compiler process{'es' if n > 1 else ''}"


def _downloads(memory: Memory) -> str:
    if memory.unproductive_for > RECENT or memory.progress_by not in {DOWNLOAD, "bytes received"}:
        return ""
    speed = memory.outside.bytes_per_second
    return f"downloading {rate(speed)}" if memory.progress_by == DOWNLOAD and speed else "downloading"


def _captures(memory: Memory) -> str:
    """A bar that is neither empty nor full."""
    bars = [at for _, at in memory.log.bars if 0.0 < at < 1.0]
    if not bars or memory.unproductive_for > 10 * RECENT:
        return ""
    doing = {"graph-capture": "capturing graphs", "weights-load": "loading", "jit-compile": "compiling"}
    still = f", nothing produced for {memory.unproductive_for:.0f} s" if memory.unproductive_for > RECENT else ""
    return f"{doing.get(memory.place.phase, memory.place.phase)}: {100 * bars[-1]:.0f} %{still}"


def _reads(memory: Memory) -> str:
    if memory.unproductive_for > RECENT or len(memory.recent) < 2:
        return ""
    earlier, now = memory.recent[0], memory.recent[-1]
    speed = max(_rate(earlier, now, "read_chars"), _rate(earlier, now, "disk_read_bytes"))
    doing = "loading" if memory.place.phase == "weights-load" else memory.place.phase
    return f"{doing}: {rate(speed)} read" if speed >= FAST else ""


def _rate(earlier: Reading, now: Reading, counter: str) -> float:
    return float(getattr(now, counter) - getattr(earlier, counter)) / max(now.t - earlier.t, 1e-3)


def _works(memory: Memory) -> str:
    return gpu_work(memory.boards) if memory.progress_by == GPU_WORK and memory.unproductive_for <= RECENT else ""


def _anything(memory: Memory) -> str:
    phase, moved = memory.place.phase, memory.progress_by
    if memory.unproductive_for <= RECENT:
        said = f": {memory.last_words.strip()[:100]}" if moved == "log" and memory.last_words else ""
        return f"{phase}: growth in the {CACHE}" if moved == CACHE else f"{phase}: {moved} moved{said}"
    if memory.idle_for <= RECENT:
        return f"{phase}: busy ({memory.activity_by}), nothing produced for {memory.unproductive_for:.0f} s"
    return f"{phase}: nothing has moved for {memory.idle_for:.0f} s"
