"""What a look has changed: the turn to another phase or verdict, as events."""

from __future__ import annotations

from collections.abc import Iterator

from hangguard.judge import Memory
from hangguard.supervision.events import PhaseChanged, VerdictChanged


def turns(before: Memory, after: Memory, *, t: float, attempt: int) -> Iterator[PhaseChanged | VerdictChanged]:
    """Return the phases that were entered since ``before``, then the verdict if it is another one."""
    for (previous, _), (phase, at) in zip(after.phases, after.phases[1:], strict=False):
        if (phase, at) not in before.phases:
            yield PhaseChanged(t=at, attempt=attempt, phase=phase, previous=previous)
    old, new = before.verdict, after.verdict
    if before.last is None or (type(old), old.kind) != (type(new), new.kind):
        yield VerdictChanged(t=t, attempt=attempt, verdict=new)
