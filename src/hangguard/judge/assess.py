"""``step`` and ``assess``: from samples to a verdict, purely.

``assess`` is ``step`` over a whole timeline. A memory holds what later judgement needs, so a day of watching
costs no more per sample than a minute. No clock, no I/O: time is carried in the samples.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce

from hangguard.delegates import advice_for
from hangguard.facts import (
    Ask,
    Broken,
    Exited,
    Expired,
    Phase,
    Reply,
    Sample,
    Stuck,
    Unclear,
    Unseen,
    Verdict,
    Waiting,
)
from hangguard.judge.asking import ask_while_starting
from hangguard.judge.asks import ask_serving
from hangguard.judge.broken import judge_broken
from hangguard.judge.endings import reason_of
from hangguard.judge.farewell import judge_farewell
from hangguard.judge.followers import cannot_be_seen_ready
from hangguard.judge.memory import Memory, note
from hangguard.judge.patience import short
from hangguard.judge.rules import TRACKERS, Rules, matches
from hangguard.judge.serving import UNASKED, judge_serving
from hangguard.judge.startup import starting
from hangguard.judge.telling import judged, phase_at, unseen
from hangguard.judge.waits import with_left_locks
from hangguard.judge.words import named, reasons

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
    undecided = isinstance(verdict, (Waiting, Unclear)) and verdict.kind != UNASKED
    begun = memory.undecided_since is not None and memory.progress_at < sample.t
    memory = replace(memory, undecided_since=(memory.undecided_since if begun else sample.t) if undecided else None)
    verdict = _out_of_budget(memory, sample, verdict) or with_left_locks(memory, sample, verdict)
    verdict = _dated(verdict, memory.verdict if memory.last else None, sample.t)
    hang = verdict if isinstance(verdict, (Stuck, Broken)) else memory.hang
    return replace(memory, last=sample, verdict=verdict, hang=hang)


def next_ask(memory: Memory) -> Ask:
    """Return what the next sample should look at: the dear sources only when the cheap ones are flat."""
    if memory.ready_at is not None:
        return ask_serving(memory)
    return ask_while_starting(memory)


def _decide(memory: Memory, sample: Sample) -> Verdict:
    return (
        _ended(memory, sample)
        or judge_broken(memory, sample)
        or judge_farewell(memory, sample)
        or judge_serving(memory, sample)
        or _out_of_time(memory, sample)
        or _unseen_or_elsewhere(memory, sample)
        or starting(memory, sample)
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
        cgroup_oom_kills=memory.trouble.cgroup_oom_kills,
        shm_free_share=memory.trouble.shm_free_share,
        hardware=memory.trouble.of_the_board(),
    )
    words = f"; its last words: {memory.last_words.strip()[:200]}" if memory.last_words and not memory.told else ""
    survivors = f"; still there: {', '.join(f'{p.title[:40]} ({p.pid})' for p in alive[:8])}" if alive else ""
    return Exited(
        phase=_phase_of_the_end(memory) if alive else memory.place.phase,
        kind=ending.reason,
        still_for=memory.unproductive_for,
        moved=memory.progress_by,
        unseen=unseen(memory, sample),
        why=ending.why + words + survivors,
        exit_code=code if isinstance(code, int) else None,
        permanent=ending.permanent,
        evidence=ending.evidence,
    )


def _phase_of_the_end(memory: Memory) -> Phase:
    """Return the phase in which the launched process was seen to be gone: those it leaves may come further."""
    root = next((member for member in memory.departed if (member.pid, member.started) == memory.root), None)
    found = phase_at(memory, root.noticed_at) if root is not None else None
    return found or memory.place.phase


def _out_of_time(memory: Memory, sample: Sample) -> Verdict | None:
    if sample.t < memory.rules.deadline:
        return None
    why = f"not ready within {memory.rules.limits.ready_within:.0f} s"
    if memory.hang is not None:
        said = f"had been said {sample.t - memory.hang.since:.0f} s before"
        why = f"{why}; {named(memory.hang)} {said}: {reasons(memory.hang)}"
    return judged(Expired, memory, sample, why, "ready_within")


def _out_of_budget(memory: Memory, sample: Sample, verdict: Verdict) -> Verdict | None:
    """Say that a verdict which decides nothing has stood for too long."""
    if memory.undecided_since is None or (isinstance(verdict, Waiting) and verdict.kind == "quiet"):
        return None  # quiet ends when whoever asked for it said, or when the server wakes
    if cannot_be_seen_ready(memory):
        return None  # it may serve well; only its death, or the end of ready_within, says something
    limits = memory.rules.limits
    budget = limits.waiting if isinstance(verdict, Waiting) else limits.unclear
    if sample.t - memory.undecided_since < budget:
        return None
    why = f"{verdict.verdict} for {budget:.0f} s: {verdict.why}"
    expired = judged(Expired, memory, sample, why, verdict.verdict)
    return replace(expired, left_locks=with_left_locks(memory, sample, verdict).left_locks)


def _unseen_or_elsewhere(memory: Memory, sample: Sample) -> Verdict | None:
    if isinstance(sample.tree, Unseen):
        return judged(Unclear, memory, sample, f"the processes cannot be seen: {sample.tree.reason}")
    if isinstance(sample.answer, Reply) and sample.answer.state == "bad":
        return judged(Unclear, memory, sample, _refusal(sample.answer))
    if memory.rules.delegates_to and memory.idle_for >= short(memory.rules, memory.place.phase):
        return judged(
            Unclear,
            memory,
            sample,
            f"the server itself is started by {memory.rules.delegates_to} elsewhere and cannot be seen from here: "
            f"{advice_for(memory.rules.delegates_to)}",
        )
    return None


def _refusal(answer: Reply) -> str:
    """Say what a front end that lives refuses; what it wants of the key, the task or the model, the detail says."""
    advice = "" if answer.refuses else " (give ready= if it is to be asked in another way)"
    return f"the server answers, but with status {answer.status}: {answer.detail}{advice}"


def _dated(verdict: Verdict, before: Verdict | None, t: float) -> Verdict:
    """Keep the beginning of a verdict that only goes on."""
    if before is not None and (type(verdict), verdict.kind) == (type(before), before.kind):
        return replace(verdict, since=before.since)
    return replace(verdict, since=t)
