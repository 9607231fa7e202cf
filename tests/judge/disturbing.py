"""Recorded starts on a worse day: a slower machine, a watcher with gaps, sources hidden for a while, busy neighbours.

A *disturbed* start is made from a recording and a seed; the same seed gives the same samples. The recording is
stretched piece by piece, so every rate falls, and looked at once a second through whatever the day brings. Stacks
were not recorded: every member always stands in the same lock, which is the worst case for a false alarm.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from recorded import agreeing, mark, rules_of, timeline

from hangguard.facts import (
    NOT_ASKED,
    Ask,
    Gpu,
    GpuHolder,
    Host,
    Log,
    Reply,
    Sample,
    Tree,
    Unseen,
)
from hangguard.judge import Memory, next_ask, start, step

HIDDEN = Unseen("hidden by the disturbance")
NOT_RECORDED = Unseen("not recorded")

SLOWEST = 5.0
"""The factor up to which a piece of a start is stretched."""

WATCHED_AFTER_FAULT = 200.0
"""Seconds for which a hang is watched: longer than the long patience."""

AT_ITS_END = {"sigstop", "kill", "sigkill", "pyspy"}
"""Marks in recordings of healthy starts from which on they are not healthy any more."""

NEEDED = ("log", "tree", "thread_states", "bytes", "stacks", "gpus")
IN_THE_PROCESSES = {"thread_states": "thread_states", "bytes": "read_chars"}
OTHERS = ("port", "host", "answer", "health")
NEIGHBOURS = ("", "", "board", "latched", "machine")


@dataclass(frozen=True)
class Day:
    """What was done to one recording."""

    name: str
    samples: tuple[Sample, ...]
    fault_at: float | None
    """When the recorded fault happened, on the clock of this day."""
    hides_after_fault: bool
    """Whether a source that the short patience needs was hidden after the fault, or the watcher slept."""
    many_threads: bool
    """Whether the tree has so many that their states are looked at only when that is asked for."""

    def memories(self) -> Iterator[Memory]:
        """Judge it as supervision does: the dear sources are in a sample only when they were asked for."""
        memory = start(rules_of(self.name))
        for sample in self.samples:
            ask = next_ask(memory)
            seen = as_asked(sample, ask)
            memory = step(memory, seen if ask.thread_states or not self.many_threads else without_states(seen))
            yield memory


def a_day(name: str, seed: str, *, everything_seen: bool = False) -> Day:
    """Return the recording as it may go on another day; with ``everything_seen`` only time and place differ."""
    rng = random.Random(f"{name} {seed}")
    recorded = _recording(name)
    fault = mark(name, "fault")
    warp = Warp.random(rng, recorded[0].t, recorded[-1].t, stretched_until=fault)
    end = warp.there(recorded[-1].t)
    gaps = () if everything_seen else _stretches(rng, warp.there(recorded[0].t), end, chance=0.6, longest=40.0)
    hidden = () if everything_seen else _hidden(rng, warp.there(recorded[0].t), end)
    neighbour = "" if everything_seen else rng.choice(NEIGHBOURS)
    samples = [
        _on(sample, rng, neighbour, [source for source, since, until in hidden if since <= sample.t <= until])
        for sample in _looked_at(rng, recorded, warp, end, gaps)
    ]
    fault_at = None if fault is None else warp.there(fault)
    needed = [(since, until) for source, since, until in hidden if source in NEEDED]
    blind = fault_at is not None and any(until > fault_at for _, until in (*gaps, *needed))
    return Day(
        name,
        tuple(samples),
        fault_at,
        hides_after_fault=blind or neighbour in {"board", "latched"},
        many_threads=rng.random() < 0.3,
    )


@dataclass(frozen=True)
class Warp:
    """A clock that runs slower, piece by piece."""

    here_at: tuple[float, ...]
    there_at: tuple[float, ...]
    factors: tuple[float, ...]

    @classmethod
    def random(cls, rng: random.Random, begin: float, end: float, *, stretched_until: float | None) -> Warp:
        here, there, factors = [begin], [begin], []
        usual = rng.choice((1.0, 1.0, rng.uniform(1.0, SLOWEST), SLOWEST))
        while here[-1] < end:
            length, factor = rng.uniform(3.0, 30.0), rng.choice((usual, rng.uniform(1.0, SLOWEST)))
            if stretched_until is not None and here[-1] >= stretched_until:
                length, factor = end - here[-1] + 1.0, 1.0  # a hang is as still on a slow machine as on a fast one
            elif stretched_until is not None:
                length = min(length, stretched_until - here[-1])
            factors.append(factor)
            here.append(here[-1] + max(length, 1 / 64))
            there.append(there[-1] + max(length, 1 / 64) * factor)
        return cls(tuple(here), tuple(there), tuple(factors))

    def there(self, t: float) -> float:
        """Return the moment of this day for a moment of the recording."""
        n = min(max(bisect_right(self.here_at, t) - 1, 0), len(self.factors) - 1)
        return self.there_at[n] + (t - self.here_at[n]) * self.factors[n]

    def here(self, t: float) -> float:
        """Return the moment of the recording for a moment of this day."""
        n = min(max(bisect_right(self.there_at, t) - 1, 0), len(self.factors) - 1)
        return self.here_at[n] + (t - self.there_at[n]) / self.factors[n]


@lru_cache(maxsize=64)
def _recording(name: str) -> tuple[Sample, ...]:
    """The samples as recorded: a healthy start until somebody ended it, a hang for as long as it is watched."""
    samples = timeline(name, stacks=False)
    ended = [at for word in AT_ITS_END if (at := mark(name, word)) is not None]
    if ended:
        samples = [sample for sample in samples if sample.t < min(ended) - 1.0]
    fault = mark(name, "fault")
    return tuple(samples if fault is None else _prolonged(samples, fault, WATCHED_AFTER_FAULT))


def _prolonged(samples: list[Sample], fault: float, seconds: float) -> list[Sample]:
    """Repeat the hung part, its small movements included, until it is as long as this."""
    hung = [sample for sample in samples if sample.t >= fault + 5.0]
    span = hung[-1].t - hung[0].t
    out = list(samples)
    for turn in range(1, 1 + int((fault + seconds - samples[-1].t) // span + 1)):
        out += [_later(sample, hung[0], hung[-1], turn, span) for sample in hung[1:]]
    return [sample for sample in out if sample.t <= fault + seconds]


def _later(sample: Sample, first: Sample, last: Sample, turn: int, span: float) -> Sample:
    assert isinstance(sample.tree, Tree)
    assert isinstance(first.tree, Tree)
    assert isinstance(last.tree, Tree)
    grown = {
        name: getattr(sample.tree, name) + turn * (getattr(last.tree, name) - getattr(first.tree, name))
        for name in COUNTERS
    }
    before, after = ({p.identity: p for p in tree.members} for tree in (first.tree, last.tree))
    members = tuple(
        replace(
            p,
            cpu_seconds=p.cpu_seconds
            + turn
            * (after.get(p.identity, p).cpu_seconds - before.get(p.identity, after.get(p.identity, p)).cpu_seconds),
        )
        for p in sample.tree.members
    )
    return replace(sample, t=sample.t + turn * span, tree=replace(sample.tree, members=members, **grown))


COUNTERS = ("minor_faults", "read_chars", "written_chars", "disk_read_bytes", "births", "deaths")


def _looked_at(
    rng: random.Random,
    recorded: Sequence[Sample],
    warp: Warp,
    end: float,
    gaps: tuple[tuple[float, float], ...],
) -> Iterator[Sample]:
    """Look at the recording about once a second; some looks are late, some are lost."""
    times, t, told = [sample.t for sample in recorded], warp.there(recorded[0].t), 0
    while t <= end:
        n = bisect_right(times, warp.here(t)) - 1
        if 0 <= n and not any(since <= t <= until for since, until in gaps):
            after = recorded[min(n + 1, len(recorded) - 1)]
            lines = [line for s in recorded[told : n + 1] if isinstance(s.log, Log) for line in s.log.lines]
            told = n + 1
            yield _between(recorded[n], after, warp.here(t), t, tuple(lines))
        t += rng.uniform(0.9, 1.1) if rng.random() > 0.05 else rng.uniform(1.1, 5.0)
        t = round(t * 64) / 64


def _between(a: Sample, b: Sample, here: float, t: float, lines: tuple[str, ...]) -> Sample:
    """What a look between two recorded samples sees: counters lie on the line between them."""
    assert isinstance(a.tree, Tree)
    assert isinstance(b.tree, Tree)
    assert isinstance(a.log, Log)
    share = 0.0 if b.t <= a.t else min(1.0, (here - a.t) / (b.t - a.t))

    def on_the_line(x: float, y: float) -> float:
        return x + (max(y, x) - x) * share

    later = {p.identity: p for p in b.tree.members}
    members = tuple(
        replace(
            p,
            cpu_seconds=on_the_line(p.cpu_seconds, q.cpu_seconds),
            reaped_cpu_seconds=on_the_line(p.reaped_cpu_seconds, q.reaped_cpu_seconds),
            rss_bytes=round(p.rss_bytes + (q.rss_bytes - p.rss_bytes) * share),
        )
        for p in a.tree.members
        for q in [later.get(p.identity, p)]
    )
    counters = {
        name: round(on_the_line(getattr(a.tree, name), getattr(b.tree, name)))
        for name in COUNTERS
        if name not in {"births", "deaths"}
    }
    tree = replace(a.tree, members=members, **counters)
    answer = replace(a.answer, since=t) if isinstance(a.answer, Reply) else a.answer
    return replace(
        a,
        t=t,
        tree=tree,
        log=replace(a.log, lines=lines),
        answer=answer,
        health=Reply(state="not-asked", since=t),
        stacks=agreeing(tree, "futex_do_wait"),
        growth=NOT_RECORDED,
        locks=NOT_RECORDED,
        communicators=NOT_RECORDED,
    )


def _stretches(
    rng: random.Random, begin: float, end: float, *, chance: float, longest: float
) -> tuple[tuple[float, float], ...]:
    found, t = [], begin
    while rng.random() < chance:
        t = rng.uniform(t, end)
        length = rng.choice((rng.uniform(1.0, 12.0), rng.uniform(1.0, longest)))
        found.append((t, t + length))
        t += length
    return tuple(found)


def _hidden(rng: random.Random, begin: float, end: float) -> tuple[tuple[str, float, float], ...]:
    hidden = [
        (rng.choice((*NEEDED, *OTHERS)), since, until)
        for since, until in _stretches(rng, begin, end, chance=0.7, longest=60.0)
    ]
    if rng.random() < 0.25:
        hidden.append((rng.choice(("stacks", "gpus", *OTHERS)), begin, float("inf")))
    return tuple(hidden)


def _on(sample: Sample, rng: random.Random, neighbour: str, hidden: Iterable[str]) -> Sample:
    sample = _beside(sample, rng, neighbour)
    for source in hidden:
        if source in IN_THE_PROCESSES:
            sample = _without(sample, IN_THE_PROCESSES[source])
        else:
            sample = replace(sample, **{source: HIDDEN})
    return sample


def _beside(sample: Sample, rng: random.Random, neighbour: str) -> Sample:
    """Somebody else on the same board, a board whose utilisation stayed at 100 %, or a busy machine."""
    if neighbour in {"board", "latched"}:
        return replace(sample, gpus=(_board(sample, rng, theirs=neighbour == "board"),))
    if neighbour == "machine" and isinstance(sample.host, Host):
        host = replace(
            sample.host,
            memory_available_bytes=1 << 30,
            oom_kills=int(sample.t) // 60,
            cpu_stall_seconds=sample.t * rng.uniform(0.5, 0.5001),
            io_stall_seconds=sample.t * 0.1,
        )
        return replace(sample, host=host)
    return sample


def _board(sample: Sample, rng: random.Random, *, theirs: bool) -> Gpu:
    ours = sample.gpus[0] if isinstance(sample.gpus, tuple) and sample.gpus else None
    used = ours.memory_used_bytes if ours is not None else 1 << 30
    holders = ours.holders if ours is not None else ()
    if theirs and isinstance(holders, tuple):
        holders = (*holders, GpuHolder(pid=999_999, used_bytes=20 << 30))
    return Gpu(
        index=0,
        uuid="GPU-0",
        name="a board that others use too",
        memory_used_bytes=used if not theirs or isinstance(used, Unseen) else used + rng.randrange(4) * (1 << 28),
        memory_total_bytes=140 << 30,
        utilization_percent=rng.choice((0.0, 60.0, 100.0)) if theirs else 100.0,
        power_watts=rng.uniform(120.0, 600.0) if theirs else rng.uniform(119.0, 121.0),
        holders=holders,
    )


def without_states(sample: Sample) -> Sample:
    """Return the sample without the states of the threads."""
    return _without(sample, "thread_states")


def _without(sample: Sample, field: str) -> Sample:
    if isinstance(sample.tree, Unseen):
        return sample
    members = tuple(replace(p, **{field: None}) for p in sample.tree.members)
    return replace(sample, tree=replace(sample.tree, members=members))


def as_asked(sample: Sample, ask: Ask) -> Sample:
    """Return what a look with this question brings."""
    return replace(
        sample,
        stacks=sample.stacks if ask.stacks else NOT_ASKED,
        growth=sample.growth if ask.growth else NOT_ASKED,
        locks=sample.locks if ask.locks else NOT_ASKED,
        communicators=sample.communicators if ask.communicators else NOT_ASKED,
    )
