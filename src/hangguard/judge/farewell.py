"""Farewell: the engine says that it has failed, or gathers what a crash left, and ends by itself after that. Or not."""

from __future__ import annotations

from dataclasses import replace

from hangguard.facts import Broken, Measure, Sample, Suspect, Unseen, Waiting
from hangguard.judge.at_work import workers_of
from hangguard.judge.broken import HANGS_ON, dead_and_others, quiet_for
from hangguard.judge.endings import failure_told, how
from hangguard.judge.memory import Memory
from hangguard.judge.ranks import rank_of
from hangguard.judge.telling import judged

FAREWELL = 75.0
"""Seconds after its last words within which a start that has failed ends by itself. SGLang waits for 65 s for core
dumps, NCCL's watchdog for some 60 s. vLLM 0.26 on two H200 said that its engine core had failed to start, and lived on
for six minutes, until it was ended: a worker went round in the destructor of a workspace (FlashInfer 0.6.14)."""

LAST_WORDS = 15.0
"""Seconds within which the rest of its last words is written. What is produced later comes from another start, as
scripts make one that try again by themselves: then the old words tell of nothing that lives."""


def judge_farewell(memory: Memory, sample: Sample) -> Waiting | Broken | None:
    """Return the verdict over a server that has failed and still lives; ``None``: it has not, as far as is seen.

    Nobody gets more time for it than the whole start has.
    """
    if sample.exit is not None or isinstance(sample.tree, Unseen) or quiet_for(memory) < HANGS_ON:
        return None
    if memory.ready_at is None and sample.t >= memory.rules.deadline:
        return None
    return _gathers(memory, sample) or _has_failed(memory, sample)


def _gathers(memory: Memory, sample: Sample) -> Waiting | None:
    """A member is dead, and the engine says for how long it gathers what the crash left (SGLang: 60 s)."""
    left = memory.trouble.dumping_until - sample.t
    dead, others = dead_and_others(memory, sample)
    if left <= 0.0 or dead is None or not others:
        return None
    why = (
        f"{dead.title[:80]} (pid {dead.pid}) ended by {how(dead.exit_code)}, and the engine says that it gathers what "
        f"the crash left before it ends too, for {left:.0f} s more at most"
    )
    return judged(Waiting, memory, sample, why, "farewell")


def _has_failed(memory: Memory, sample: Sample) -> Waiting | Broken | None:
    """The engine has said that its start failed, nothing was produced since, and nobody has died of it."""
    said_at = max((told.at for told in memory.told if told.final), default=None)
    if said_at is None or memory.ready_at is not None or memory.progress_at - said_at > LAST_WORDS:
        return None
    until = max(said_at + FAREWELL, memory.trouble.dumping_until)
    ending, ago = failure_told(memory.told), sample.t - said_at
    if sample.t < until:
        why = f"it said {ago:.0f} s ago that it has failed, and has {until - sample.t:.0f} s left to end: {ending.why}"
        return judged(Waiting, memory, sample, why, "farewell")
    why = f"it said {ago:.0f} s ago that it has failed, and does not end by itself: {ending.why}"
    verdict = judged(Broken, memory, sample, why, "failed", numbers=(Measure("failed", ago, "s ago"),))
    members = workers_of(memory.tree, memory.rules) if memory.tree is not None else ()
    suspects = tuple(
        Suspect(pid=p.pid, title=p.title, rank=rank_of(p.title), note="does not end") for p in members[:16]
    )
    return replace(verdict, suspects=suspects, reason=ending.reason, permanent=ending.permanent)
