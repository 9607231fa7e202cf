"""How many attempts, and how long between them: tenacity's stops and waits, evaluated on our own history."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hangguard.facts import Attempt
from hangguard.judge.policy import Budget

if TYPE_CHECKING:
    from tenacity import RetryCallState

ATTEMPTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """When to stop trying, and how long to wait before the next attempt.

    ``stop`` and ``wait`` are any of tenacity's, combined with ``|``, ``&`` and ``+``; ``None`` means four
    attempts and a random backoff that grows to at most ten seconds. They are asked with a small state that has
    ``attempt_number``, ``seconds_since_start``, ``upcoming_sleep``, ``idle_for`` and ``outcome``
    (always ``None``): each attempt is another launch, not another call of one function.
    """

    stop: Callable[[Any], bool] | None = None
    wait: Callable[[Any], float] | None = None


@dataclass(slots=True)
class RetryState:
    """What tenacity's stops and waits read (tenacity 9: these five, found by trying all of them)."""

    attempt_number: int
    seconds_since_start: float
    upcoming_sleep: float = 0.0
    idle_for: float = 0.0
    outcome: None = None


def budget(retry: Retry, history: tuple[Attempt, ...], now: float) -> Budget:
    """Ask the stop and the wait of ``retry`` after the last attempt. The wait may be random: draw it once."""
    stop, wait = _filled(retry)
    state = RetryState(attempt_number=len(history), seconds_since_start=now - history[0].started_at)
    state.upcoming_sleep = max(0.0, float(wait(state)))
    if stop(state):
        return Budget(another=False, why=f"no attempts left ({_made(len(history), stop)})")
    return Budget(another=True, after=state.upcoming_sleep)


def _made(attempts: int, stop: object) -> str:
    """Return how many were made, of how many where a number alone decides (tenacity 9: ``max_attempt_number``)."""
    most = getattr(stop, "max_attempt_number", None)
    return f"{attempts} of {most}" if isinstance(most, int) else f"{attempts} made"


def _filled(retry: Retry) -> tuple[Callable[[Any], bool], Callable[[Any], float]]:
    # tenacity pulls asyncio in: loaded when the first attempt has failed, not with hangguard
    import tenacity  # noqa: PLC0415

    stop: Callable[[RetryCallState], bool] = retry.stop or tenacity.stop_after_attempt(ATTEMPTS)
    wait: Callable[[RetryCallState], float] = retry.wait or tenacity.wait_random_exponential(multiplier=1.0, max=10.0)
    return stop, wait
