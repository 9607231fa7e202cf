"""How a run stands, in short, for whoever asks from outside."""

from __future__ import annotations

from dataclasses import replace

from hangguard.facts import Attempt, Broken, PastAttempt, ReachedState, Ready, RunStatus, Stuck, Verdict
from hangguard.redact import redact
from hangguard.supervision.attach import AsyncWatch
from hangguard.supervision.events import BecameReady, VerdictChanged
from hangguard.supervision.serve import Story


def standing(verdict: Verdict) -> str:
    """Return what somebody may wait for: ready or stuck; empty: neither."""
    match verdict:
        case Ready():
            return "ready"
        case Stuck() | Broken():
            return "stuck"
        case _:
            return ""


async def until_standing(watch: AsyncWatch, wanted: ReachedState) -> ReachedState:
    """Wait until a server that is only watched is ready or stuck, or its watch is over; for what is wanted of that.

    Stuck is told to those who wait for ready too: nobody will do anything about it.
    """
    subscription = watch.events()
    reached = standing(watch.verdict)
    while reached != wanted and (reached, wanted) != ("stuck", "ready"):
        event = await subscription.next_or_none()
        if event is None:
            return "exit"
        if isinstance(event, BecameReady):
            reached = "ready"
        elif isinstance(event, VerdictChanged):
            reached = standing(event.verdict)
    return "stuck" if reached == "stuck" else "ready"


def status_of(story: Story) -> RunStatus:
    """Return how the run stands now."""
    state, now = story.run.notes.state, story.now
    assert state is not None
    state = replace(state, files=(), shm_before=())
    history = tuple(map(_in_short, story.history))
    if now is None:
        return RunStatus(state=state, history=history)
    verdict = redact(now.settled or now.memory.verdict, story.run.folder.known_secrets)
    state = replace(
        state,
        url=now.launch.url,
        attempt=now.number,
        changes=tuple(change.change for change in now.changes),
        verdict=verdict.verdict,
        kind=verdict.kind,
        phase=verdict.phase,
        why=verdict.why,
    )
    return RunStatus(state=state, still_for=round(verdict.still_for, 2), unseen=verdict.unseen, history=history)


def _in_short(attempt: Attempt) -> PastAttempt:
    verdict = attempt.verdict
    return PastAttempt(
        number=attempt.number,
        verdict=verdict.verdict,
        kind=verdict.kind,
        phase=verdict.phase,
        why=verdict.why,
        fallbacks=attempt.fallbacks,
        was_ready=attempt.was_ready,
        exit_code=attempt.exit_code,
    )
