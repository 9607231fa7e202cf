"""What every verdict carries: where it stands, since when, what moved last, what was unseen."""

from __future__ import annotations

from typing import TypeVar

from hangguard.facts import Confidence, Judged, Measure, Phase, Sample, Unseen
from hangguard.judge.boards import measures
from hangguard.judge.memory import Memory
from hangguard.judge.sites import wait_of
from hangguard.judge.stillness import phase_by_stacks, working_members

V = TypeVar("V", bound=Judged)


def judged(
    make: type[V],
    memory: Memory,
    sample: Sample,
    why: str,
    kind: str = "",
    *,
    numbers: tuple[Measure, ...] = (),
    confidence: Confidence = "high",
) -> V:
    """Make a verdict with what every verdict says."""
    return make(
        phase=phase_of(memory),
        kind=kind,
        still_for=memory.unproductive_for,
        moved=memory.progress_by,
        unseen=unseen(memory, sample),
        why=why,
        numbers=numbers,
        confidence=confidence,
    )


def phase_of(memory: Memory) -> Phase:
    """Return the phase by the stacks of the still stretch where they tell it, else by the log."""
    if memory.agreement is None or memory.tree is None:
        return memory.place.phase
    workers = working_members(memory.tree, memory.rules)
    if found := phase_by_stacks(memory.agreement.stacks, workers, memory.rules):
        return found
    pids = {p.pid for p in workers}
    sites = [wait_of(s, memory.rules) for s in memory.agreement.stacks if s.pid in pids]
    rendezvous = any(site is not None and site.waits_for in {"peers", "communicator"} for site in sites)
    return "dist-init" if rendezvous and memory.ready_at is None else memory.place.phase


def phase_at(memory: Memory, t: float) -> Phase | None:
    """Return the phase at that moment: the others go on for a while after a death, and may come into the next one."""
    return next((phase for phase, since in reversed(memory.phases) if since <= t), None)


def numbers(memory: Memory) -> tuple[Measure, ...]:
    """Return what a verdict goes by, as numbers: how long it is still, CPU over the last seconds, every board."""
    found = [Measure("nothing produced for", memory.unproductive_for, "s"), Measure("idle for", memory.idle_for, "s")]
    if len(memory.recent) > 1:
        earlier, now = memory.recent[0], memory.recent[-1]
        before = {(pid, started): cpu for pid, started, cpu, _ in earlier.cpu}
        used = sum(cpu - before.get((pid, started), cpu) for pid, started, cpu, _ in now.cpu)
        found.append(Measure("CPU of all members", 100.0 * used / max(now.t - earlier.t, 1e-3), "% of a core"))
    return (*found, *measures(memory.boards))


def unseen(memory: Memory, sample: Sample) -> tuple[str, ...]:
    """Return the sources that could not be seen, each with its reason."""
    sources = {
        "processes": sample.tree,
        "log": sample.log,
        "port": sample.port,
        "health": sample.health,
        "answer": sample.answer,
        "GPUs": sample.gpus,
        "host": sample.host,
    }
    found = [f"{name}: {fact.reason}" for name, fact in sources.items() if isinstance(fact, Unseen)]
    stacks = (f"stacks: {memory.stacks_unseen}",) if memory.stacks_unseen else ()
    return (*found, *memory.boards.unseen, *stacks)
