"""The story: start the server, relaunch it with one change at a time until it is ready, then keep watch.

Start reading here. Everything that is stored (the number of the attempt, the history, what was changed) is
owned by the one task that runs :func:`serve`; the handle asks it through :class:`Story`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from hangguard.errors import GaveUp, LeftBehind, NotReadyInTime, Permanent, ServerLost
from hangguard.facts import AppliedChange, Attempt, Exited, Launch, Ready
from hangguard.judge import GiveUp, Keep, Move, Relaunch, next_move
from hangguard.supervision.attempt import RunningAttempt, Wishes, attempting
from hangguard.supervision.events import BecameReady, Ended, FallbackChosen, GivenUp, Notice
from hangguard.supervision.retry import budget
from hangguard.supervision.run import Run


@dataclass(slots=True)
class Story:
    """What the handle may know of the running story, and ask of it."""

    run: Run
    history: tuple[Attempt, ...] = ()
    """Attempts that are over, oldest first."""
    now: RunningAttempt | None = None
    """The attempt that runs."""
    ready: anyio.Event = field(default_factory=anyio.Event)
    """Set when the server has answered, and when it never will any more: then ``over`` is set too."""
    over: anyio.Event = field(default_factory=anyio.Event)
    wishes: Wishes = field(default_factory=Wishes)


async def serve(story: Story) -> None:
    """Run the story to its end: until the server is lost, or asked to stop, or no attempt becomes ready.

    Raises :class:`GaveUp`, :class:`ServerLost`, or the errors of a start that was refused. Cancelling it stops
    the server, with proof.
    """
    run = story.run
    launch = run.launch
    changes: tuple[AppliedChange, ...] = ()
    before = 0  # attempts of earlier starts: a restart has the whole budget again
    deadline = run.world.clock() + run.limits.ready_within  # bounds the looking, never the stopping
    for loss in run.folder.lost:
        run.announcer.tell(Notice(t=run.world.clock(), attempt=1, text=loss))
    try:
        while True:
            attempt = await try_once(story, launch, changes, deadline)
            if story.wishes.restart and not story.wishes.stop_because:
                launch, changes, deadline = _again(story, attempt)
                before = len(story.history)
                continue
            if attempt.was_ready or story.wishes.stop_because:
                return _end(attempt)
            match _next_move(run, story.history[before:]):
                case Keep():
                    return None
                case Relaunch() as relaunch:
                    _announce(run, attempt, relaunch)
                    await anyio.sleep(min(relaunch.after, max(0.0, deadline - run.world.clock())))
                    launch, changes = relaunch.launch, relaunch.changes
                case GiveUp() as giving_up:
                    run.announcer.tell(GivenUp(t=run.world.clock(), attempt=attempt.number, why=giving_up.why))
                    raise _gave_up(giving_up, story.history)
    finally:
        _announce_end(story)
        story.over.set()
        story.ready.set()


async def try_once(story: Story, launch: Launch, changes: tuple[AppliedChange, ...], deadline: float) -> Attempt:
    """Make one attempt: until it is settled, and while it is ready; return its record, after its release."""
    number = len(story.history) + 1
    made = attempting(story.run, launch, changes, number=number, deadline=deadline, wishes=story.wishes)
    try:
        async with made as attempt:
            story.now = attempt
            if isinstance(await attempt.until_settled(), Ready):
                _announce_ready(story, attempt)
                await attempt.until_lost()
    finally:
        if story.now is not None:
            story.history = (*story.history, story.now.record())
            story.now = None
    return story.history[-1]


def _announce_ready(story: Story, attempt: RunningAttempt) -> None:
    event = BecameReady(
        t=story.run.world.clock(), attempt=attempt.number, url=attempt.launch.url, changes=attempt.changes
    )
    story.run.announcer.tell(event)
    story.ready.set()


def _next_move(run: Run, history: tuple[Attempt, ...]) -> Move:
    now = run.world.clock()
    return next_move(history, run.fallbacks, budget(run.retry, history, now), retry_hangs=run.retry_hangs)


def _announce(run: Run, attempt: Attempt, relaunch: Relaunch) -> None:
    if relaunch.fallback is None:
        return
    change = relaunch.fallback
    run.announcer.tell(
        FallbackChosen(
            t=run.world.clock(),
            attempt=attempt.number,
            name=change.name,
            change=change.change,
            alters=change.alters,
            cost=relaunch.why,
        )
    )


def _again(story: Story, attempt: Attempt) -> tuple[Launch, tuple[AppliedChange, ...], float]:
    """A restart: the launch that runs, once more, with a fresh time to become ready."""
    story.wishes.restart = False
    story.wishes.changed = anyio.Event()
    return attempt.launch, attempt.changes, story.run.world.clock() + story.run.limits.ready_within


def _end(attempt: Attempt) -> None:
    """The last attempt is over: lost if nobody asked for it."""
    if isinstance(attempt.verdict, Exited):
        raise ServerLost(attempt)
    if attempt.release is not None and attempt.release.left_behind:
        raise LeftBehind(attempt.release)


def _gave_up(move: GiveUp, history: tuple[Attempt, ...]) -> GaveUp:
    last = history[-1]
    if last.release is not None and last.release.left_behind:
        kind: type[GaveUp] = GaveUp
    else:
        kind = {"permanent": Permanent, "expired": NotReadyInTime}.get(move.kind, GaveUp)
    return kind(
        move.why,
        history,
        diagnosis=last.diagnosis,
        report_path=last.evidence_path,
        retryable=move.kind == "exhausted",
    )


def _announce_end(story: Story) -> None:
    run = story.run
    last = story.history[-1] if story.history else None
    run.announcer.tell(
        Ended(
            t=run.world.clock(),
            attempt=max(1, len(story.history)),
            exit_code=last.exit_code if last else None,
            left_behind=last.release.left_behind if last and last.release else (),
        )
    )
