"""How long a start may stand still, by phase: the short patience, the long one, and those of a busy start.

Measured on real vLLM and SGLang starts (CPU builds, and an H200): on a machine that gives CPU and disk no healthy
start was idle for one second, a starved one for none either once the states of its threads were seen. So the
patience is not set by those starts, but by what was not measured: networks, remote weights, other hosts.
"""

from __future__ import annotations

from typing import NamedTuple

from hangguard.changes import value_of, words_of
from hangguard.engines.base import Engine
from hangguard.engines.common import in_range
from hangguard.facts import Launch, Limits, Phase, Timer
from hangguard.judge.progress import WINDOW
from hangguard.judge.rules import Rules

PATIENCE = 10.0
"""Idle seconds before a hang is called, in every phase, when two stack samples agree. Healthy starts were never
idle for one second; this leaves a margin of ten."""

PATIENCE_WITHOUT_STACKS = 120.0
"""The same without stacks, or where a member may wake by itself: a loader that sleeps for a minute looks just like a
deadlock in every other signal."""

UNPROVEN = 60.0
"""Busy seconds without any product after which the verdict says that it is unclear. Healthy JIT compiles were silent
in everything but CPU for 21 s, and for 3.5 s where minor faults were seen."""

BUSY_PATIENCE = 12.0
"""Busy seconds without any product before a hang is called, where two stack samples agree in a place that burns CPU
or GPU while it waits: NCCL's communicator init, a kernel that never ends."""

HOT_PATIENCE: dict[Phase, float] = {
    "weights-load": 480.0,
    "jit-compile": 480.0,
    "graph-capture": 240.0,
    "warm-up": 240.0,
}
HOT_PATIENCE_ELSEWHERE = 120.0
"""The same where the stacks stand in a place of which nothing is known. Conversions of weights and compilers inside
the process stay in one function for minutes; autotuners were reported to be silent for longer (vllm#58031), with
stacks that change."""

HOT_LOOKS = 6
"""At least so many stack samples, over all of that time, must be equal."""

STALE = 60.0
"""Seconds without a change after which a lock file that nobody holds counts as left behind, and again before a wait for
it counts as a hang."""

LEARNED_FACTOR, LEARNED_AT_MOST = 5.0, 600.0
"""Good starts of the same kind lengthen the patience to so many times their longest still stretch, within a bound."""


def short(rules: Rules, phase: Phase) -> float:
    """Return the idle seconds that are enough where all is seen and the stacks agree."""
    return _within(rules, max(PATIENCE, _learned(rules, phase)))


def long(rules: Rules, phase: Phase) -> float:
    """Return the idle seconds that are enough without stacks."""
    return _within(rules, max(PATIENCE_WITHOUT_STACKS, _learned(rules, phase)))


def busy(rules: Rules, phase: Phase) -> float:
    """Return the busy seconds without product that are enough in a place known to burn while it waits."""
    return _within(rules, max(BUSY_PATIENCE, _learned(rules, phase)))


def hot(rules: Rules, phase: Phase) -> float:
    """Return the busy seconds without product that are enough anywhere."""
    return _within(rules, max(HOT_PATIENCE.get(phase, HOT_PATIENCE_ELSEWHERE), _learned(rules, phase)))


def _learned(rules: Rules, phase: Phase) -> float:
    return min(LEARNED_FACTOR * dict(rules.learned).get(phase, 0.0), LEARNED_AT_MOST)


def _within(rules: Rules, patience: float) -> float:
    """A caller's cap shortens the patience, but never below one full window."""
    cap = rules.limits.patience
    return patience if cap is None else min(patience, max(cap, WINDOW))


class EarlyTimer(NamedTuple):
    """A limit of somebody else's that fires before one of ours."""

    name: str
    seconds: float
    limit: str
    """Which of ours, in words."""
    limit_seconds: float
    raised_by: str
    """Options and variables that change it; empty: there is none."""


def timer_warnings(engine: Engine, launch: Launch, limits: Limits) -> tuple[str, ...]:
    """Return one sentence for each built-in timer that would end the server before one of our limits fires.

    Then the engine, or a library of its, kills the evidence first: stacks, and who stood where.
    """
    return tuple(
        f"{timer.name} ends the server after {timer.seconds:.0f} s, before {timer.limit} ({timer.limit_seconds:.0f} s) "
        "is over: the evidence of a hang would be lost"
        + (f" (raise it with {timer.raised_by}, or lower the limit)" if timer.raised_by else "")
        for timer in early_timers(engine, launch, limits)
    )


def early_timers(engine: Engine, launch: Launch, limits: Limits) -> tuple[EarlyTimer, ...]:
    """Return the built-in timers that would end the server before one of our limits fires."""
    found = []
    for timer in engine.timers:
        if not timer.ends or not in_range(launch.version, timer.since, timer.until):
            continue
        if launch.version is None and timer.until is not None:
            continue  # of an unknown version what the newest ones have is likelier
        seconds = timer_seconds(timer, launch)
        later = [(name, at) for name, at in _limits_over(timer, launch, limits) if at > seconds > 0.0]
        if later:
            how = " or ".join((*timer.options, *((timer.variable,) if timer.variable else ())))
            found.append(EarlyTimer(timer.name, seconds, *max(later, key=lambda pair: pair[1]), how))
    return tuple(found)


def timer_seconds(timer: Timer, launch: Launch) -> float:
    """Return what the timer is set to in this launch: by an option, else by its variable, else its default."""
    env = launch.environment()
    for text in (value_of(words_of(launch), *timer.options) if timer.options else None, env.get(timer.variable or "")):
        try:
            if text:
                return float(text)
        except ValueError:
            continue
    return timer.seconds


def _limits_over(timer: Timer, launch: Launch, limits: Limits) -> tuple[tuple[str, float], ...]:
    """The limits of ours that may have to run out while the timer runs."""
    rules = Rules(limits=limits)
    starting = [phase for phase in timer.covers if phase != "serving"]
    patience = max((max(long(rules, phase), hot(rules, phase)) for phase in starting), default=PATIENCE_WITHOUT_STACKS)
    found = [("the longest patience of this phase", patience)]
    if starting and limits.unclear > Limits().unclear:
        # At its default it is told by nobody: a start is unclear for so long only where stacks cannot be seen.
        found.append(("Limits.unclear", limits.unclear))
    if launch.nodes > 1 and "dist-init" in timer.covers:
        found.append(("Limits.waiting", limits.waiting))
    return tuple(found)
