"""The judge alone: recorded starts on worse days, and hours of serving that never happened. Seconds for hours."""

from __future__ import annotations

import multiprocessing
import os
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "judge"))

from disturbing import a_day
from recorded import HEALTHY, HUNG
from served_hours import Server, a_stall, hours

T = TypeVar("T")
ALARMS = {"stuck", "broken"}


@dataclass(frozen=True)
class Alarm:
    """A false one: which run, when, and what was said."""

    run: str
    second: float
    verdict: str
    why: str


@dataclass(frozen=True)
class Watched:
    """Something healthy that was watched."""

    name: str
    seconds: float
    alarm: Alarm | None
    undecided: float
    """Seconds of ``waiting`` and ``unclear``."""
    canaries: int = 0
    canaries_to_sleepers: int = 0


@dataclass(frozen=True)
class Hung:
    """A hang that was watched, and the seconds after which it was called one."""

    name: str
    seen: bool
    """Whether nothing that the short patience needs was hidden, and the watcher did not sleep."""
    seconds: float | None
    kind: str = ""


def healthy_day(job: tuple[str, str]) -> Watched:
    name, seed = job
    day = a_day(name, seed)
    alarm, undecided, last = None, 0.0, day.samples[0].t
    for memory in day.memories():
        verdict = memory.verdict
        if verdict.verdict in ALARMS and alarm is None:
            said = f"{verdict.verdict} {verdict.kind}"
            alarm = Alarm(f"{name} seed {seed!r}", memory.now - day.samples[0].t, said, verdict.why)
        undecided += (memory.now - last) * (verdict.verdict in {"waiting", "unclear"})
        last = memory.now
    return Watched(name, last - day.samples[0].t, alarm, undecided)


def hung_day(job: tuple[str, str, bool]) -> Hung:
    name, seed, everything_seen = job
    day = a_day(name, seed, everything_seen=everything_seen)
    assert day.fault_at is not None
    for memory in day.memories():
        if memory.verdict.verdict in ALARMS:
            return Hung(name, not day.hides_after_fault, memory.now - day.fault_at, memory.verdict.kind)
    return Hung(name, not day.hides_after_fault, None)


def served_hour(seed: str) -> Watched:
    server = Server(random.Random(seed))
    began, alarm, undecided, last = server.t, None, 0.0, server.t
    for memory in hours(server, 3600.0):
        verdict = memory.verdict
        if verdict.verdict in ALARMS and alarm is None:
            who = f"{seed!r}: {server.engine}, {server.gpus} GPUs, metrics {server.metrics}, {server.piece.what}"
            alarm = Alarm(who, memory.now - began, f"{verdict.verdict} {verdict.kind}", verdict.why)
        undecided += (memory.now - last) * (verdict.verdict in {"waiting", "unclear"})
        last = memory.now
    return Watched(server.engine, last - began, alarm, undecided, server.canaries, server.canaries_to_sleepers)


def stalled(job: tuple[str, str]) -> Hung:
    seed, how = job
    server = Server(random.Random(seed))
    seen = server.metrics == "read" and not server.neighbour and (how == "idle" or server.gpus > 0)
    return Hung(f"{server.engine} {how}", seen, a_stall(server, how), how)


def at_once(work: Callable[..., T], jobs: Sequence[object]) -> list[T]:
    """Do the jobs on all cores, in order."""
    with multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool:
        return pool.map(work, jobs, chunksize=4)


def healthy_days(runs: int, seed: int) -> list[Watched]:
    return at_once(healthy_day, [(HEALTHY[n % len(HEALTHY)], f"{seed}-{n}") for n in range(runs)])


def hung_days(runs: int, seed: int) -> list[Hung]:
    return at_once(
        hung_day, [(HUNG[n % len(HUNG)], f"{seed}-{n}", n % (2 * len(HUNG)) < len(HUNG)) for n in range(runs)]
    )


def served_hours(count: int, seed: int) -> list[Watched]:
    return at_once(served_hour, [f"{seed}-{n}" for n in range(count)])


def stalls(runs: int, seed: int) -> list[Hung]:
    return at_once(stalled, [(f"{seed}-{n}", ("idle", "hot")[n % 2]) for n in range(runs)])


def percentile(times: Sequence[float], percent: int) -> float | None:
    """Return the smallest of these that so many percent do not exceed; ``times`` are sorted."""
    return times[max(0, -(-len(times) * percent // 100) - 1)] if times else None


if __name__ == "__main__":  # for a look at the judge alone
    SEED = int(sys.argv[1]) if len(sys.argv) > 1 else 2026
    for days in (healthy_days(528, SEED), served_hours(100, SEED)):
        alarms = [day.alarm for day in days if day.alarm]
        print(len(days), "watched,", sum(day.seconds for day in days) / 3600, "h,", len(alarms), "false alarms")
        print("  canaries", sum(d.canaries for d in days), "to sleepers", sum(d.canaries_to_sleepers for d in days))
        for alarm in alarms[:20]:
            print("  ", alarm)
    for hung in (hung_days(320, SEED), stalls(200, SEED)):
        for seen in (True, False):
            times = sorted(h.seconds for h in hung if h.seen is seen and h.seconds is not None)
            count = sum(h.seen is seen for h in hung)
            marks = [percentile(times, percent) for percent in (50, 95)]
            print(f"seen={seen}: {len(times)} of {count} found, median and 95 %: {marks}")
            print("  ", sorted({h.name for h in hung if h.seen is seen and h.seconds is None}))
