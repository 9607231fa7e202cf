"""Which members of a server that has answered are at work, by their own counters."""

from __future__ import annotations

from dataclasses import dataclass

from hangguard.facts import Process, Tree
from hangguard.judge.progress import (
    BYTE_RATE,
    CPU_RATE,
    CPU_RATE_PER_THREAD,
    CPU_SLACK,
    FAULT_RATE,
    FAULT_SLACK,
    compiles,
)
from hangguard.judge.rules import TRACKERS, Rules, matches


@dataclass(frozen=True, slots=True)
class Look:
    """The counters of every member at one moment."""

    t: float
    members: tuple[tuple[int, int, float, int, int, int], ...]
    """(pid, start time, CPU seconds with reaped children, threads, minor faults, bytes read)."""


def look_of(tree: Tree, t: float) -> Look:
    """Return the counters of every member now."""
    return Look(
        t,
        tuple(
            (p.pid, p.started, p.cpu_seconds + p.reaped_cpu_seconds, p.threads, p.minor_faults, p.read_chars or 0)
            for p in tree.members
        ),
    )


def is_worker(process: Process, rules: Rules) -> bool:
    """Say whether it does the work: by its title, or, where the engine names none, because it is no front end."""
    if rules.workers:
        return matches(rules.workers, process.title)
    return not matches(TRACKERS, process.title) and not matches(rules.front_end, process.title)


def workers_of(tree: Tree, rules: Rules) -> tuple[Process, ...]:
    """Return all that do the work, an engine core beside its own workers: either may be the one that hangs."""
    return tuple(p for p in tree.members if is_worker(p, rules))


def used_cpu(process: Process, earlier: Look, t: float) -> bool:
    """Say whether it used CPU since an earlier look, more than threads that only poll."""
    before = _before(process, earlier)
    allowed = (CPU_RATE + CPU_RATE_PER_THREAD * process.threads) * (t - earlier.t) + CPU_SLACK
    return before is not None and process.cpu_seconds + process.reaped_cpu_seconds - before[0] > allowed


def below_workers(tree: Tree, rules: Rules) -> frozenset[int]:
    """Return the pids of all that descend from a worker, as far as the engine names its workers."""
    parents = {p.pid: p.parent for p in tree.members}
    named = {p.pid for p in tree.members if rules.workers and is_worker(p, rules)}
    found = set()
    for pid, parent in parents.items():
        above, steps = parent, 0
        while above in parents and above not in named and steps < len(parents):
            above, steps = parents[above], steps + 1
        if above in named:
            found.add(pid)
    return frozenset(found)


def is_new(process: Process, earlier: tuple[Look, ...]) -> bool:
    """Say whether it was in none of these looks; never, where there are none."""
    return bool(earlier) and all(_before(process, look) is None for look in earlier)


def what_works(
    process: Process, earlier: Look, t: float, rules: Rules, active: tuple[int, ...], below: frozenset[int]
) -> str:
    """Return what shows that a member works on something: a compiler's CPU time, a worker's bytes or page faults.

    A front end is not asked: it answers probes and refuses clients beside every hang. Nor is who is no compiler and not
    ``below`` a worker: a shell that asks for the health of the server, or nvidia-smi, every few seconds.
    """
    if matches(TRACKERS, process.title) or matches(rules.front_end, process.title):
        return ""
    if rules.workers and not is_worker(process, rules):
        helps = process.pid in below or compiles(process)
        return f"{process.name} ({process.pid}), a helper" if helps and process.pid in active else ""
    before, dt = _before(process, earlier), t - earlier.t
    if before is None:
        return ""
    if process.minor_faults - before[1] > FAULT_RATE * dt + FAULT_SLACK:
        return f"page faults of {process.name} ({process.pid})"
    if process.read_chars is not None and process.read_chars - before[2] > BYTE_RATE * (dt + 1.0):
        return f"bytes read by {process.name} ({process.pid})"
    return ""


def _before(process: Process, earlier: Look) -> tuple[float, int, int] | None:
    found = (m for m in earlier.members if (m[0], m[1]) == process.identity)
    return next(((cpu, faults, read) for _, _, cpu, _, faults, read in found), None)
