"""Progress and activity: what moved between two readings.

Progress is an OR over sources: something was produced. Activity (CPU time, runnable threads, GPU utilisation)
is busy without product: it keeps a stretch from being idle, and proves nothing. The limits were measured on
real vLLM and SGLang starts and hangs, on CPU and on a GPU: healthy starts never fell below them for a whole
window, hung trees never rose above. See "How a verdict is reached" in the documentation.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hangguard.facts import Log, Process, Tree
from hangguard.judge.boards import Boards
from hangguard.judge.rules import TRACKERS, matches

WINDOW = 5.0
"""Seconds over which rates are judged. Ticks of 10 ms reach 4 % of a core in 1 s where the truth is 1.5 %."""

GAP = 12.0
"""A hole between samples longer than this was not watched: no stillness is counted across it. Shorter ones
come from probes that use up their deadlines; the counters are cumulative and tell what happened meanwhile."""

CPU_RATE, CPU_RATE_PER_THREAD, CPU_SLACK = 0.02, 0.0002, 0.03
"""Of a core per process: hung processes reached 1.73 % with 100 threads (about 0.017 % a thread, polling)."""

FAULT_RATE, FAULT_SLACK = 50.0, 20.0
"""Minor faults a second over the tree: hung at most 2, idle 9; healthy with CPU and disk at least 91."""

BYTE_RATE, BYTE_SLACK = 64 * 1024.0, 64 * 1024.0
"""Bytes a second, read or written: hung at most 0.3 KiB."""

RSS_STEP = 4 * 1024**2
"""Resident memory of hung trees moved by at most 1 MiB."""

GPU_MEMORY_STEP = 16 * 1024**2

MAJOR_FAULT_RATE, MAJOR_FAULT_SLACK = 2.0, 5.0
"""Pages a second that had to be read from a disk: hung at most 0.5; mapped weights on a slow disk far more."""

HOT_SHARE = 0.5
"""Of a core: a process that uses more is hot. Hung ones that poll stay below 2 %, those that spin at 95 to 100 %."""

HOT_RUNNABLE = 0.9
"""Of the looks: a process that had a runnable thread in so many is hot too, where it gets less of a core because
others want it. A thread that spins is runnable in every look; one that polls sleeps in nearly every one."""

COMPILERS = frozenset({
    "nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "ninja", "make", "cmake", "gcc", "g++", "c++", "cc",
    "cc1", "cc1plus", "clang", "clang++", "cl", "as", "ld", "lld", "ld.lld", "ld.gold", "ld.bfd", "collect2", "hipcc",
    "triton", "tilelang", "nvrtc",
})  # fmt: skip
"""The kernel's names of programs that compile, at most 15 characters."""

COMPILE_WORKERS = (r"torch/_inductor/compile_worker", r"torch\._inductor\.compile_worker", r"\bptxas\b", r"\bcicc\b")
"""Titles of Python processes that compile for others (torch/_inductor/compile_worker/__main__.py)."""

BUSY_SHARE = 0.6
"""Threads in R or D: in at least 88 % of the samples of 5 s of every healthy start, at most 50 % of a hang's."""

DISK_WAIT = "threads in disk wait"
COMPILING = "a compiler's CPU time"

BUSY_LOOKS = 4
"""Fewer looks at the thread states than this within the window say nothing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The counters of one sample, reduced to what movement is told by."""

    t: float
    cpu: tuple[tuple[int, int, float, int], ...] = ()
    """(pid, start time, own and reaped CPU seconds, threads) of every member."""
    orphan_cpu: float = 0.0
    minor_faults: int = 0
    read_chars: int = 0
    written_chars: int = 0
    disk_read_bytes: int = 0
    rss_bytes: int = 0
    busy: Literal["", "R", "D"] | None = None
    """Whether any thread was runnable or in disk wait; ``None``: not looked at."""
    runnable: tuple[tuple[int, int], ...] = ()
    """(pid, start time) of every member with a runnable thread, if that was looked at."""
    gpu_memory: tuple[tuple[str, int], ...] = ()
    """(board, bytes) of every board that no stranger holds."""
    gpu_busy: bool | None = None
    major_faults: int = 0
    sockets: tuple[tuple[int, int, int], ...] = ()
    """(pid, start time, bytes received over the connections it has now) of every member that was looked at."""
    compilers: tuple[tuple[int, int], ...] = ()
    """(pid, start time) of every member that compiles."""


def reading_of(t: float, tree: Tree, boards: Boards, answering: frozenset[tuple[int, int]] = frozenset()) -> Reading:
    """Reduce a sample to its counters.

    The bytes of members that answer our own questions are left out: for one GET /metrics SGLang's front end reads
    135 kB (0.5.23; prometheus_client keeps the numbers of several processes in files).
    """
    asked = tuple(p for p in tree.members if p.identity in answering)
    return Reading(
        t=t,
        cpu=tuple((p.pid, p.started, p.cpu_seconds + p.reaped_cpu_seconds, p.threads) for p in tree.members),
        orphan_cpu=tree.orphan_cpu_seconds,
        minor_faults=tree.minor_faults,
        read_chars=tree.read_chars - sum(p.read_chars or 0 for p in asked),
        written_chars=tree.written_chars - sum(p.written_chars or 0 for p in asked),
        disk_read_bytes=tree.disk_read_bytes,
        rss_bytes=sum(p.rss_bytes for p in tree.members),
        busy=_busy(tree),
        runnable=tuple(p.identity for p in tree.members if "R" in (p.thread_states or "")),
        gpu_memory=tuple((b.uuid, b.memory) for b in boards.boards if b.memory is not None),
        gpu_busy=boards.is_busy,
        major_faults=sum(p.major_faults for p in tree.members),
        sockets=tuple((*p.identity, p.socket_bytes) for p in tree.members if p.socket_bytes is not None),
        compilers=tuple(p.identity for p in tree.members if compiles(p)),
    )


def compiles(process: Process) -> bool:
    """Say whether the process is a compiler, or a worker that compiles for others."""
    return process.name in COMPILERS or matches(COMPILE_WORKERS, process.title)


def _busy(tree: Tree) -> Literal["", "R", "D"] | None:
    states = [p.thread_states for p in tree.members if not matches(TRACKERS, p.title)]
    seen = "".join(s for s in states if s is not None)
    if not states or None in states:
        return None
    return "D" if "D" in seen else "R" if "R" in seen else ""


def what_progressed(earlier: Reading, now: Reading) -> str:
    """Return the source that shows that something was produced between the two readings; "" if none."""
    dt = now.t - earlier.t
    grown = {
        "minor faults": (now.minor_faults - earlier.minor_faults, FAULT_RATE * dt + FAULT_SLACK),
        "bytes read": (now.read_chars - earlier.read_chars, BYTE_RATE * dt + BYTE_SLACK),
        "bytes written": (now.written_chars - earlier.written_chars, BYTE_RATE * dt + BYTE_SLACK),
        "disk": (now.disk_read_bytes - earlier.disk_read_bytes, BYTE_RATE * dt + BYTE_SLACK),
        "memory": (abs(now.rss_bytes - earlier.rss_bytes), RSS_STEP),
        "major faults": (now.major_faults - earlier.major_faults, MAJOR_FAULT_RATE * dt + MAJOR_FAULT_SLACK),
        "bytes received": (_received(earlier, now), BYTE_RATE * dt + BYTE_SLACK),
        "GPU memory": (_gpu_memory_step(earlier, now), GPU_MEMORY_STEP),
    }
    found = next((source for source, (delta, allowed) in grown.items() if delta > allowed), "")
    return found or (COMPILING if _compiled(earlier, now) else "")


def _gpu_memory_step(earlier: Reading, now: Reading) -> int:
    before = dict(earlier.gpu_memory)
    return max((abs(used - before.get(board, used)) for board, used in now.gpu_memory), default=0)


def _received(earlier: Reading, now: Reading) -> int:
    before = {(pid, started): count for pid, started, count in earlier.sockets}
    return sum(max(0, count - before.get((pid, started), count)) for pid, started, count in now.sockets)


def _compiled(earlier: Reading, now: Reading) -> bool:
    dt, compilers = now.t - earlier.t, set(now.compilers)
    return any(_is_above_floor(used, n, dt) for who, used, n in _cpu_used(earlier, now) if who in compilers)


def what_was_active(window: tuple[Reading, ...], now: Reading) -> str:
    """Return the source that shows that something was busy in this window; "" if none."""
    if now.gpu_busy:
        return "GPU busy"
    for earlier in _ends(window):
        if _cpu_moved(earlier, now):
            return "CPU"
    looks = looks_at_threads((*window, now))
    busy = [look for look in looks if look]
    if len(looks) >= BUSY_LOOKS and len(busy) / len(looks) > BUSY_SHARE:
        return DISK_WAIT if busy.count("D") > len(busy) / 2 else "runnable threads"
    return ""


def looks_at_threads(window: tuple[Reading, ...]) -> tuple[str, ...]:
    """Return, for every reading in which the thread states were seen, whether a thread was busy: R, D, or ""."""
    return tuple(r.busy for r in window if r.busy is not None)


def slide(window: tuple[Reading, ...], now: Reading) -> tuple[Reading, ...]:
    """Return the window with the newest reading: the last seconds, but never too few to judge thread states."""
    recent = tuple(r for r in window if r.t > now.t - WINDOW - 0.5)
    return (*max(recent, window[-(BUSY_LOOKS - 1) :], key=len), now)


def _cpu_moved(earlier: Reading, now: Reading) -> bool:
    dt = now.t - earlier.t
    if any(_is_above_floor(used, threads, dt) for _, used, threads in _cpu_used(earlier, now)):
        return True
    return now.orphan_cpu - earlier.orphan_cpu > CPU_RATE * dt + CPU_SLACK


def _cpu_used(earlier: Reading, now: Reading) -> list[tuple[tuple[int, int], float, int]]:
    """(identity, CPU seconds used meanwhile, threads) of every member that was there at both moments."""
    before = {(pid, started): cpu for pid, started, cpu, _ in earlier.cpu}
    return [((pid, started), cpu - before.get((pid, started), cpu), n) for pid, started, cpu, n in now.cpu]


def _is_above_floor(used: float, threads: int, dt: float) -> bool:
    return used > (CPU_RATE + CPU_RATE_PER_THREAD * threads) * dt + CPU_SLACK


def active_members(window: tuple[Reading, ...]) -> dict[tuple[int, int], float]:
    """Return the members that used more CPU in this window than threads that poll, each with its share of a core."""
    if len(window) < 2:
        return {}
    earlier, now = window[0], window[-1]
    dt = now.t - earlier.t
    return {who: used / dt for who, used, n in _cpu_used(earlier, now) if _is_above_floor(used, n, dt)}


def hot_members(window: tuple[Reading, ...]) -> frozenset[tuple[int, int]]:
    """Return the members that burn CPU in this window: most of a core, or all that others leave them."""
    looks = [reading.runnable for reading in window if reading.busy is not None]
    shares = active_members(window)
    return frozenset(who for who, share in shares.items() if share >= HOT_SHARE or _is_always_runnable(who, looks))


def _is_always_runnable(who: tuple[int, int], looks: list[tuple[tuple[int, int], ...]]) -> bool:
    return len(looks) >= BUSY_LOOKS and sum(who in runnable for runnable in looks) >= HOT_RUNNABLE * len(looks)


def progressed_within(window: tuple[Reading, ...], now: Reading) -> str:
    """Return what progressed since the last reading, or since the first one of the window; "" if nothing."""
    return next((what for earlier in _ends(window) if (what := what_progressed(earlier, now))), "")


def _ends(window: tuple[Reading, ...]) -> tuple[Reading, ...]:
    """The newest and the oldest: a burst shows against the one, a trickle against the other."""
    return (window[-1], window[0]) if len(window) > 1 else window


# ------------------------------------------------------------------------------------------- the log

_VARIABLE = re.compile(r"0[xX][0-9a-fA-F]+|\b[0-9a-fA-F]{8,}\b|\d+(?:[.,:]\d+)*|[\u2580-\u259f█▏▎▍▌▋▊▉ ]{2,}|#+")
_POSITION = re.compile(r"(\d{1,3})%(?=\||\s|$)|\b(\d+)/(\d+)\b")


def template(line: str) -> str:
    """Return the line with everything masked that changes from one printing to the next."""
    return _VARIABLE.sub("#", line).strip()[:400]


def bar_position(line: str) -> float | None:
    """Return how far a progress bar is, 0 to 1, or ``None`` where the line is not one."""
    found = _POSITION.search(line)
    if found is None:
        return None
    if found[1]:
        return int(found[1]) / 100
    return int(found[2]) / int(found[3]) if int(found[3]) else None


@dataclass(frozen=True, slots=True)
class LogMemory:
    """The kinds of lines seen in this phase, and how far each progress bar was."""

    templates: frozenset[str] = frozenset()
    bars: tuple[tuple[str, float], ...] = ()


def read_log(memory: LogMemory, log: Log, noise: tuple[str, ...]) -> tuple[LogMemory, str]:
    """Return the memory after these lines, and the last line that was news; "" if none was.

    News is a kind of line not seen in this phase, or a progress bar that rose. Access lines of our own
    probes and statistics of an idle engine are not: they keep the log of a hung server growing.
    """
    templates, bars, news = set(memory.templates), dict(memory.bars), ""
    for line in log.lines:
        if not line.strip() or matches(noise, line):
            continue
        kind = template(line)
        position = bar_position(line)
        if kind not in templates or (position is not None and position > bars.get(kind, -1.0)):
            news = line
        templates.add(kind)
        if position is not None:
            bars[kind] = max(position, bars.get(kind, -1.0))
    if not news:
        return memory, ""
    kept = frozenset(templates) if len(templates) <= 5000 else frozenset()
    return LogMemory(kept, tuple(bars.items())), news
