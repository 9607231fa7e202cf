"""What to do next, purely: keep the server, relaunch it with one change, or give up and say why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hangguard.changes import describe
from hangguard.engines.base import Engine
from hangguard.facts import (
    AppliedChange,
    Attempt,
    Broken,
    Exited,
    Expired,
    Fallback,
    Launch,
    Permission,
    Ready,
    Stuck,
    Verdict,
)
from hangguard.judge.phases import is_later
from hangguard.judge.words import in_one_line

OFF = "fallbacks are off"
"""The caller allows none."""
TRANSIENT = ("port", "download", "dist-timeout")
"""Reasons of an exit after which the very same launch may well come up: a port that a predecessor has not let go yet,
a hub that did not answer, a peer that was late."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What the retry policy still allows."""

    another: bool
    """Whether one more attempt may be made."""
    after: float = 0.0
    """Seconds to wait before it."""
    why: str = ""
    """Why not, in words."""


@dataclass(frozen=True, slots=True)
class Keep:
    """The last attempt is ready."""


@dataclass(frozen=True, slots=True)
class Relaunch:
    """Start again. ``fallback`` is ``None`` for an unchanged retry."""

    launch: Launch
    after: float
    fallback: AppliedChange | None
    changes: tuple[AppliedChange, ...]
    why: str = ""
    failed: tuple[str, ...] = ()
    """What is to be told of fallbacks whose change raised, and that were passed over."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """No further attempt makes sense, or is allowed."""

    why: str
    kind: Literal["permanent", "expired", "exhausted"]
    failed: tuple[str, ...] = ()
    """As in :class:`Relaunch`."""


Move: TypeAlias = Keep | Relaunch | GiveUp


def permitted(fallbacks: Permission | Sequence[Fallback] | None, offered: tuple[Fallback, ...]) -> tuple[Fallback, ...]:
    """Return the fallbacks that the caller allows, in the order in which they are tried.

    ``None``: none; ``"auto"``: the engine's that alter speed at most; ``"any"``: all of the engine's; a
    sequence: the caller's own, whatever they alter.
    """
    if fallbacks is None:
        return ()
    if isinstance(fallbacks, str):
        return tuple(f for f in offered if fallbacks == "any" or f.alters != "results")
    return tuple(fallbacks)


def why_none(fallbacks: Permission | Sequence[Fallback] | None, engine: Engine) -> str:
    """Return why the caller gets no fallback at all, in words; empty: he gets some."""
    if permitted(fallbacks, engine.fallbacks):
        return ""
    if not isinstance(fallbacks, str):
        return OFF
    if engine.fallbacks:
        return f"all fallbacks that are known for the {engine.name} engine may alter results, which was not allowed"
    name_it = "; name yours with engine=" if engine.name == "generic" else ""
    return f"no fallbacks are known for the {engine.name} engine{name_it}"


def next_move(
    history: tuple[Attempt, ...],
    fallbacks: tuple[Fallback, ...],
    budget: Budget,
    *,
    retry_hangs: bool = False,
    no_fallbacks: str = "",
) -> Move:
    """Return what to do after the last attempt of ``history``.

    One change per relaunch. A change after which the launch came further is kept, any other is taken back.
    ``retry_hangs`` allows one unchanged retry of a hang that no fallback answers. ``no_fallbacks`` says why there
    are none.
    """
    last = history[-1]
    verdict = last.verdict
    if isinstance(verdict, Ready):
        return Keep()
    if stop := _no_relaunch(last):
        return stop
    if verdict.left_locks:  # before any option is blamed: none of them ends this wait
        return _after_a_lock(history, budget)
    if not budget.another:
        return _used_up(verdict, budget)
    launch, changes = _base(history)
    tried = {name for attempt in history for name in attempt.fallbacks}
    failed: tuple[str, ...] = ()
    for fallback in fallbacks:
        if fallback.name in tried or not set(fallback.answers) & _questions(verdict):
            continue
        changed, how = changed_by(fallback, launch)
        if changed is None:
            failed += (how,) if how else ()
            continue
        applied = AppliedChange(name=fallback.name, change=how, alters=fallback.alters)
        return Relaunch(changed, budget.after, applied, (*changes, applied), fallback.cost, failed)
    if _may_retry_unchanged(history, retry_hangs=retry_hangs):
        # What a server held when it hung is lost already: nothing is gained by waiting.
        after = 0.0 if verdict.phase == "serving" and not isinstance(verdict, Exited) else budget.after
        return Relaunch(launch, after, None, changes, "an unchanged retry", failed)
    why = _nothing_left(fallbacks, tried) if fallbacks else no_fallbacks or OFF
    return GiveUp(f"{in_one_line(verdict)}; {why}", "exhausted", failed)


def changed_by(fallback: Fallback, launch: Launch) -> tuple[Launch | None, str]:
    """Return the changed launch and what differs, or ``None`` and why there is none; empty: it does not apply."""
    try:
        changed = fallback.change(launch)
        if changed is None or changed == launch:
            return None, ""
        if not isinstance(changed, Launch):  # the caller's own, of which no type checker has seen anything
            return None, f"fallback {fallback.name!r} failed: it returned a {type(changed).__name__}, not a Launch"
        return changed, describe(launch, changed)
    except Exception as problem:  # noqa: BLE001 - a named edge: the change may be the caller's own
        return None, f"fallback {fallback.name!r} failed: {type(problem).__name__}: {problem}"


def _no_relaunch(last: Attempt) -> GiveUp | None:
    verdict = last.verdict
    if isinstance(verdict, Exited) and verdict.permanent:
        return GiveUp(f"{verdict.kind}: {verdict.why}", "permanent")
    if isinstance(verdict, Expired) and verdict.kind == "ready_within":
        return GiveUp(verdict.why, "expired")
    if isinstance(verdict, Broken) and (verdict.permanent or verdict.kind in {"hardware", "wedged"}):
        return GiveUp(f"{verdict.kind}: {verdict.why}", "permanent")
    if last.release is not None and last.release.left_behind:
        return GiveUp("something of the last attempt is left: " + "; ".join(last.release.left_behind), "exhausted")
    return None


def _after_a_lock(history: tuple[Attempt, ...], budget: Budget) -> Move:
    """Start the same again where the lock was ours and is gone; otherwise the next server would wait as well."""
    last = history[-1]
    locks, release = last.verdict.left_locks, last.release
    removed = {f.path for f in release.files if f.kind == "lock" and f.answer == "removed"} if release else set()
    ours = [path for path in locks if path in removed]
    if ours and not any(attempt.verdict.left_locks for attempt in history[:-1]):
        if not budget.another:
            return _used_up(last.verdict, budget)
        why = f"{ours[0]}, which a killed build of this launch had left, is removed"
        return Relaunch(last.launch, budget.after, None, last.changes, why)
    why = f"no option of the server ends a wait for a lock that was left ({', '.join(locks)}), nor does a relaunch"
    return GiveUp(f"{why}: {last.verdict.why}", "exhausted")


def _questions(verdict: Verdict) -> set[str]:
    """What a fallback may answer: the phase of a hang, or the reason of an exit.

    No flag wakes what somebody stopped.
    """
    if isinstance(verdict, Stuck) and verdict.kind == "stopped":
        return set()
    if isinstance(verdict, Broken) and verdict.reason:
        return {verdict.reason, verdict.phase}
    if isinstance(verdict, (Stuck, Broken)) or (isinstance(verdict, Expired) and verdict.kind == "unclear"):
        return {verdict.phase}
    return {verdict.kind}


def _base(history: tuple[Attempt, ...]) -> tuple[Launch, tuple[AppliedChange, ...]]:
    """The launch to change next: the last one if its change brought it further, else the one before that."""
    base = history[0]
    for attempt in history[1:]:
        if attempt.changes != base.changes and is_later(attempt.verdict.phase, base.verdict.phase):
            base = attempt
    return base.launch, base.changes


def _may_retry_unchanged(history: tuple[Attempt, ...], *, retry_hangs: bool) -> bool:
    verdict = history[-1].verdict
    unchanged = [a for a in history if a.changes == history[-1].changes]
    if len(unchanged) > 1:
        return False
    if isinstance(verdict, Exited):
        return verdict.kind in TRANSIENT
    return retry_hangs and isinstance(verdict, (Stuck, Broken))


def _used_up(verdict: Verdict, budget: Budget) -> GiveUp:
    return GiveUp(f"{in_one_line(verdict)}; {budget.why or 'no attempts left'}", "exhausted")


def _nothing_left(fallbacks: tuple[Fallback, ...], tried: set[str]) -> str:
    """Say that those that there are do not answer this, or do not apply to this launch, and which were tried."""
    names = [fallback.name for fallback in fallbacks]
    before = [name for name in names if name in tried]
    if before:
        return f"no fallback that answers this is left (of {', '.join(names)}; tried: {', '.join(before)})"
    return f"no fallback answers this (of {', '.join(names)})"
