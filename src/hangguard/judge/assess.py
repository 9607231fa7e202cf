"""``step`` and ``assess``: from samples to a verdict, purely.

``assess`` is ``step`` over a whole timeline. A memory holds what later judgement needs, so a day of watching
costs no more per sample than a minute. No clock, no I/O: time is carried in the samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from typing import TypeVar

from hangguard.facts import (
    Ask,
    Exited,
    Expired,
    Judged,
    Moving,
    Phase,
    Process,
    Ready,
    Reply,
    Sample,
    Stack,
    Stuck,
    Unclear,
    Unseen,
    Verdict,
    Waiting,
)
from hangguard.judge.endings import reason_of
from hangguard.judge.memory import Memory, note
from hangguard.judge.progress import (
    BUSY_LOOKS,
    DISK_WAIT,
    WINDOW,
    looks_at_threads,
)
from hangguard.judge.rules import TRACKERS, Rules, matches
from hangguard.judge.stillness import (
    APART,
    may_end_from_outside,
    may_wake_by_itself,
    movers,
    phase_by_stacks,
    suspects,
    working_members,
)

V = TypeVar("V", bound=Judged)

PATIENCE = 10.0
"""Idle seconds before a hang is called, in every phase, when two stack samples agree. Healthy starts were
never idle for one second; this leaves a margin of ten."""

PATIENCE_WITHOUT_STACKS = 120.0
"""The same without stacks, or where a member may wake by itself: a loader that sleeps for a minute looks just
like a deadlock in every other signal."""

UNPROVEN = 60.0
"""Busy seconds without any product after which the verdict says that it is unclear. Healthy JIT compiles were
silent in everything but CPU for 21 s."""

LOOK_CLOSER = 2.0
"""Idle seconds after which thread states and stacks are asked for: two samples 3 s apart fit the patience."""

FAREWELL = 10.0
"""Seconds that members may outlive the launched process before its end counts as the end."""


def start(rules: Rules) -> Memory:
    """Return the memory before the first sample."""
    return Memory(rules=rules)


def assess(samples: Iterable[Sample], rules: Rules) -> Verdict:
    """Return the verdict over a whole timeline: ``reduce(step, samples, start(rules)).verdict``."""
    return reduce(step, samples, start(rules)).verdict


def step(memory: Memory, sample: Sample) -> Memory:
    """Return the memory after one more sample, its ``verdict`` included."""
    memory = note(memory, sample)
    verdict = _decide(memory, sample)
    undecided = isinstance(verdict, (Waiting, Unclear))
    begun = memory.undecided_since is not None and memory.progress_at < sample.t
    memory = replace(memory, undecided_since=(memory.undecided_since if begun else sample.t) if undecided else None)
    verdict = _out_of_budget(memory, sample, verdict) or verdict
    return replace(
        memory,
        last=sample,
        verdict=_dated(verdict, memory.verdict if memory.last else None, sample.t),
    )


def next_ask(memory: Memory) -> Ask:
    """Return what the next sample should look at: the dear sources only when the cheap ones are flat."""
    if memory.ready_at is not None:
        return Ask()
    flat = memory.idle_for >= LOOK_CLOSER - 0.5
    every = APART if memory.idle_for < 3 * PATIENCE else 3 * APART
    due = memory.stacks_at is None or memory.now - memory.stacks_at >= every - 0.5
    return Ask(thread_states=flat, stacks=flat and due)


def _decide(memory: Memory, sample: Sample) -> Verdict:
    return (
        _ended(memory, sample)
        or _answered(memory, sample)
        or _out_of_time(memory, sample)
        or _unseen_or_elsewhere(memory, sample)
        or _idle(memory, sample)
        or _going_on(memory, sample)
    )


def _ended(memory: Memory, sample: Sample) -> Verdict | None:
    if sample.exit is None:
        return None
    code, seen = sample.exit.code, not isinstance(sample.tree, Unseen)
    members = memory.tree.members if memory.tree is not None and seen else ()
    alive = [p for p in members if not matches(TRACKERS, p.title) and p.identity != memory.root]
    forked = code == 0 and (memory.ready_at is None or sample.exit.at < memory.ready_at)
    if (alive or not seen) and (forked or sample.t - sample.exit.at < FAREWELL):
        return None  # it forked and went away: the oldest of those that live is the server now
    ending = reason_of(
        sample.exit,
        memory.told,
        memory.departed,
        root=memory.root,
        oom_kills=memory.oom_kills,
        was_ready=memory.ready_at is not None,
        rules=memory.rules,
    )
    words = f"; its last words: {memory.last_words.strip()[:200]}" if memory.last_words and not memory.told else ""
    survivors = f"; still there: {', '.join(f'{p.title[:40]} ({p.pid})' for p in alive[:8])}" if alive else ""
    return Exited(
        phase=memory.place.phase,
        kind=ending.reason,
        still_for=memory.unproductive_for,
        moved=memory.progress_by,
        unseen=_unseen(memory, sample),
        why=ending.why + words + survivors,
        exit_code=code if isinstance(code, int) else None,
        permanent=ending.permanent,
        evidence=ending.evidence,
    )


def _answered(memory: Memory, sample: Sample) -> Verdict | None:
    if memory.ready_at is None:
        return None
    return Ready(phase="serving", moved=memory.progress_by, unseen=_unseen(memory, sample), why="it has answered")


def _out_of_time(memory: Memory, sample: Sample) -> Verdict | None:
    limits = memory.rules.limits
    if sample.t >= memory.rules.deadline:
        return _judged(Expired, memory, sample, f"not ready within {limits.ready_within:.0f} s", "ready_within")
    return None


def _out_of_budget(memory: Memory, sample: Sample, verdict: Verdict) -> Verdict | None:
    """Say that a verdict which decides nothing has stood for too long."""
    if memory.undecided_since is None:
        return None
    limits = memory.rules.limits
    budget = limits.waiting if isinstance(verdict, Waiting) else limits.unclear
    if sample.t - memory.undecided_since < budget:
        return None
    return _judged(Expired, memory, sample, f"{verdict.verdict} for {budget:.0f} s: {verdict.why}", verdict.verdict)


def _judged(make: type[V], memory: Memory, sample: Sample, why: str, kind: str = "") -> V:
    """Make a verdict with what every verdict over a start says."""
    return make(
        phase=_phase(memory),
        kind=kind,
        still_for=memory.unproductive_for,
        moved=memory.progress_by,
        unseen=_unseen(memory, sample),
        why=why,
    )


def _unseen_or_elsewhere(memory: Memory, sample: Sample) -> Verdict | None:
    if isinstance(sample.tree, Unseen):
        return _judged(Unclear, memory, sample, f"the processes cannot be seen: {sample.tree.reason}")
    if isinstance(sample.answer, Reply) and sample.answer.state == "bad":
        why = f"the server answers, but with status {sample.answer.status}: {sample.answer.detail[:200]}"
        return _judged(Unclear, memory, sample, f"{why} (give ready= if it is to be asked in another way)")
    if memory.rules.delegates_to and memory.idle_for >= _capped(PATIENCE, memory):
        return _judged(
            Unclear,
            memory,
            sample,
            f"the server itself is started by {memory.rules.delegates_to} elsewhere and cannot be seen from here",
        )
    return None


def _idle(memory: Memory, sample: Sample) -> Verdict | None:
    """Decide over a stretch in which nothing progressed and nothing was active."""
    idle = memory.idle_for
    if idle < _capped(PATIENCE, memory) or memory.tree is None or not memory.tree.members:
        return None
    if blind := _blind(memory, sample):
        return _judged(Unclear, memory, sample, f"nothing moves, and {blind}")
    able = movers(memory.tree, memory.rules)
    stacks = memory.agreement.stacks if memory.agreement else ()
    if memory.rules.nodes > 1 and _phase(memory) in {"import", "dist-init"}:
        return _judged(Waiting, memory, sample, "it may be waiting for the other machines of this launch", "peers")
    if outside := may_end_from_outside(stacks, able):
        kind, where = outside
        return _judged(Waiting, memory, sample, f"something outside may still end the wait: {where}", kind)
    doubt = _doubt(memory, sample, stacks, able)
    if not doubt:
        return _stuck(memory, sample, "two equal stack samples of every member, all idle")
    if idle >= _capped(PATIENCE_WITHOUT_STACKS, memory):
        return _stuck(memory, sample, f"nothing moved at all; judged with the long patience because {doubt}")
    return _judged(Unclear, memory, sample, f"nothing moves, but {doubt}")


def _blind(memory: Memory, sample: Sample) -> str:
    """Return what is unseen without which nothing is ever called stuck; "" if all of it is seen."""
    if isinstance(sample.log, Unseen):
        return f"the log cannot be seen ({sample.log.reason})"
    if len(looks_at_threads(memory.window)) < BUSY_LOOKS:
        return "the states of the threads cannot be seen"
    if memory.tree is not None and any(p.read_chars is None for p in memory.tree.members):
        return "the bytes that the processes read cannot be seen"
    return ""


def _capped(patience: float, memory: Memory) -> float:
    """A caller's cap shortens the patience, but never below one full window."""
    cap = memory.rules.limits.patience
    return patience if cap is None else min(patience, max(cap, WINDOW))


def _doubt(memory: Memory, sample: Sample, stacks: tuple[Stack, ...], able: tuple[Process, ...]) -> str:
    """Return why the short patience may not be used; "" if it may."""
    if memory.agreement is None:
        return memory.stacks_unseen or "no stacks were taken yet"
    if not memory.agreement.holds:
        return memory.stacks_unseen or "the stacks were not yet equal twice"
    if isinstance(sample.gpus, Unseen):
        return f"the GPUs cannot be seen ({sample.gpus.reason})"
    if sample.gpus and memory.window and memory.window[-1].gpu_busy is None:
        return "GPU utilisation cannot be seen"
    return may_wake_by_itself(stacks, able, memory.rules)


def _stuck(memory: Memory, sample: Sample, why: str) -> Stuck:
    assert memory.tree is not None
    stacks = memory.agreement.stacks if memory.agreement else ()
    verdict = _judged(Stuck, memory, sample, why, "idle")
    return replace(verdict, still_for=memory.idle_for, suspects=suspects(memory.tree, memory.rules, stacks))


def _going_on(memory: Memory, sample: Sample) -> Verdict:
    if memory.unproductive_for >= UNPROVEN:
        if memory.activity_by == DISK_WAIT:
            return _judged(Waiting, memory, sample, "threads wait for the disk, and nothing was produced", "disk")
        return _judged(Unclear, memory, sample, f"{memory.activity_by}, but nothing was produced")
    return replace(_judged(Moving, memory, sample, ""), phase=memory.place.phase)


def _phase(memory: Memory) -> Phase:
    """The phase by the stacks of the still stretch where they tell it, else by the log."""
    if memory.agreement is None or memory.tree is None:
        return memory.place.phase
    workers = working_members(memory.tree, memory.rules)
    return phase_by_stacks(memory.agreement.stacks, workers, memory.rules) or memory.place.phase


def _unseen(memory: Memory, sample: Sample) -> tuple[str, ...]:
    sources = {
        "processes": sample.tree,
        "log": sample.log,
        "port": sample.port,
        "health": sample.health,
        "answer": sample.answer,
        "GPUs": sample.gpus,
        "host": sample.host,
    }
    unseen = [f"{name}: {fact.reason}" for name, fact in sources.items() if isinstance(fact, Unseen)]
    return (*unseen, f"stacks: {memory.stacks_unseen}") if memory.stacks_unseen else tuple(unseen)


def _dated(verdict: Verdict, before: Verdict | None, t: float) -> Verdict:
    """Keep the beginning of a verdict that only goes on."""
    if before is not None and (type(verdict), verdict.kind) == (type(before), before.kind):
        return replace(verdict, since=before.since)
    return replace(verdict, since=t)
