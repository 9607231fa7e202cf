"""What hypotheses have in common: how a finding is made, and where evidence is found."""

from __future__ import annotations

import re
from collections.abc import Iterable

from hangguard.facts import Broken, Expired, Finding, Phase, Standing, Stuck
from hangguard.judge.memory import Memory
from hangguard.judge.phases import is_later
from hangguard.judge.ranks import groups, ranks_seen, standings
from hangguard.judge.stood import frames_of_workers, stacks_of, stopped_at


def found(name: str, standing: Standing, *evidence: str) -> Finding:
    """Make a finding."""
    return Finding(hypothesis=name, standing=standing, evidence=evidence)


def told(memory: Memory, reason: str) -> tuple[str, ...]:
    """Return the lines of the log that name this reason."""
    return tuple(t.line for t in memory.told if t.reason == reason)


def is_stopped(memory: Memory) -> bool:
    """Say whether it came to a stand: also where the time of a start ran out over a hang that had been told."""
    if isinstance(memory.verdict, Expired) and memory.verdict.kind == "ready_within":
        return memory.hang is not None and memory.progress_at <= memory.hang.since
    return isinstance(memory.verdict, (Stuck, Broken, Expired))


def given(memory: Memory, *options: str) -> str:
    """Return the word of the command that begins with one of these options; "" if none does, or none is known."""
    words = [word.replace("_", "-") for word in memory.rules.argv or ()]
    starts = tuple(option for option in options if option.startswith("--"))
    return next((w for w in words if w.startswith(starts) or w.partition("=")[0] in options), "")


def frames_like(memory: Memory, pattern: re.Pattern[str]) -> list[str]:
    """Return the frames of the workers that the pattern fits, innermost first, each once."""
    frames: Iterable[tuple[str, str]] = frames_of_workers(memory)
    return list(
        dict.fromkeys(f"{function} ({file})" for function, file in frames if pattern.search(f"{file} {function}"))
    )


def not_there(memory: Memory, name: str, first: Phase) -> Finding:
    """Rule out what begins in a phase that was not reached, or what the stacks do not show."""
    phase = memory.verdict.phase
    has_phases = bool(memory.rules.markers or memory.rules.stack_markers)  # else it never leaves the first
    if has_phases and stopped_at(memory) and not is_later(phase, first) and phase != first:
        return found(name, "ruled out", f"it did not get that far ({phase})")
    if frames_of_workers(memory) and is_stopped(memory):
        return found(name, "ruled out", "no worker stands there")
    return found(name, "open", f"it is in {phase}" if has_phases else "its phases are not known")


def said_by_nccl(memory: Memory) -> list[str]:
    """Return what NCCL itself tells: by its log (Init START without COMPLETE), or by its RAS thread."""
    begun = [f"pid {pid}: NCCL init began {a} times and ended {b} times" for pid, a, b in memory.said.nccl if a > b]
    kinds = (
        ("missing_ranks", "missing"),
        ("uninitialised_ranks", "not initialised"),
        ("failed_ranks", "failed"),
        ("behind_ranks", "behind the others"),
    )
    return begun + [
        f"communicator {c.name[:20]}: rank{'s' if len(these) > 1 else ''} {', '.join(map(str, these[:8]))} {what}"
        for c in memory.trouble.communicators
        for field, what in kinds
        if (these := getattr(c, field))
    ]


def odd_one(memory: Memory) -> list[str]:
    """Return the ranks beside one another, where they do not all stand at the same place."""
    if memory.tree is None or max(memory.rules.ranks, len(ranks_seen(memory.tree))) < 2:
        return []
    members = [s for s in standings(memory.tree, memory.rules, stacks_of(memory)) if s.where]
    ranked = [s for s in members if s.rank]
    together = groups(tuple(ranked if len(ranked) > 1 else members))
    if len(together) < 2:
        return []
    return [f"{', '.join(m.name for m in group[:4])} in {group[0].where[-1]}" for group in together[:4]]
