"""The story: start an LLM server, relaunch it with one change at a time until it has answered, then keep watch.

Start reading here. A *launch* is what to start; an *attempt* is one launch from spawn to the proof that nothing of
it is left; a *fallback* is one change to a launch (a flag, a variable) that may cure what went wrong. What the
attempt looks like inside stands in ``attempt.py``, what to do next is decided purely in ``judge/policy.py``, and
the caller's side is ``block.py`` (``async with``), ``handle.py`` (what that gives) and ``sync.py`` (``with``).

Everything that is stored (the history, what was changed, the time that is left) is owned by the one task that runs
:func:`serve`. The handle reads it through :class:`Story` and asks through its ``wishes``. A server that was ready and
ends or hangs is lost: it is not started again by itself, its clients have lost their state already.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from hangguard.act.old_runs import delete_old_runs
from hangguard.errors import GaveUp, LeftBehind, NotReadyInTime, Permanent, ServerLost
from hangguard.facts import AppliedChange, Attempt, Launch, Ready
from hangguard.judge import GiveUp, Keep, Move, Relaunch, next_move
from hangguard.judge.patience import timer_warnings
from hangguard.judge.words import in_one_line
from hangguard.redact import redact, redact_argv
from hangguard.supervision.attempt import attempting
from hangguard.supervision.drain import drain
from hangguard.supervision.events import BecameReady, Ended, FallbackChosen, GivenUp, Notice
from hangguard.supervision.retry import budget
from hangguard.supervision.run import Run
from hangguard.supervision.running import RunningAttempt
from hangguard.supervision.usable_port import on_a_fresh_port
from hangguard.supervision.wishes import Wishes


@dataclass(slots=True)
class Story:
    """The state of one supervision: written by the task of :func:`serve`, read by the handle, who adds wishes."""

    run: Run
    history: tuple[Attempt, ...] = ()
    """Attempts that are over, oldest first."""
    now: RunningAttempt | None = None
    """The attempt that runs."""
    ready: anyio.Event = field(default_factory=anyio.Event)
    """Set when the server has answered, and when it never will any more: then ``over`` is set too."""
    over: anyio.Event = field(default_factory=anyio.Event)
    noted: anyio.Event = field(default_factory=anyio.Event)
    """Set when the state file was begun, or never will be: from then on it can be asked about from outside."""
    wishes: Wishes = field(default_factory=Wishes)


async def serve(story: Story) -> None:
    """Run the story to its end; return when the server was asked to stop, and has.

    Raises :class:`GaveUp` (or :class:`Permanent`, :class:`NotReadyInTime`) when no attempt since the last restart
    became ready, :class:`ServerLost` when a ready server ended by itself or hung, :class:`LeftBehind` when it was
    asked to stop or restart and something of it cannot be ended (the first two say that too), and what a refused
    start raises (:class:`~hangguard.errors.Refused`). Cancelling it stops the server, with proof.
    """
    run, wishes = story.run, story.wishes
    launch = run.launch
    changes: tuple[AppliedChange, ...] = ()  # how ``launch`` differs from what was asked for
    told: set[str] = set()  # of changes that failed
    earlier = 0  # attempts before the last restart: after one, retry budget and time begin anew
    deadline = run.world.clock() + run.limits.ready_within  # bounds the looking, never the stopping
    try:
        await _note_the_start(run)
        story.noted.set()
        await delete_old_runs(run.folder)
        _tell_what_is_lost(run)
        _tell_timers(run)
        while True:
            attempt = await try_once(story, launch, changes, deadline)  # in there for as long as it is ready
            if wishes.stop_because:
                return _refuse_leftovers(attempt)
            if wishes.restart:
                _refuse_leftovers(attempt)
                launch, changes, earlier = attempt.launch, attempt.changes, len(story.history)
                deadline = run.world.clock() + run.limits.ready_within
                wishes.restart, wishes.changed = False, anyio.Event()
                continue
            if attempt.was_ready:
                raise ServerLost(attempt)
            move = _next_move(run, story.history[earlier:], deadline)
            _tell_failed_changes(run, attempt, move, told)
            match move:
                case Relaunch() as relaunch:
                    _tell_relaunch(run, attempt, relaunch)
                    with anyio.move_on_after(relaunch.after):
                        await wishes.changed.wait()
                    if wishes.stop_because:
                        return None  # nothing runs: over leftovers the policy does not relaunch
                    wishes.restart, wishes.changed = False, anyio.Event()  # this relaunch is the restart
                    launch, changes = on_a_fresh_port(relaunch.launch), relaunch.changes
                case GiveUp() as giving_up:
                    run.announcer.tell(GivenUp(t=run.world.clock(), attempt=attempt.number, why=giving_up.why))
                    raise _gave_up(giving_up, story.history)
                case Keep():  # only of a ready attempt, and that was dealt with above
                    return None
    finally:
        _tell_the_end(story)
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
                await attempt.note_ready()
                _tell_ready(story, attempt)
                await attempt.remember_good_start()
                await attempt.until_lost()
                await drain(attempt)
    finally:
        if story.now is not None:
            story.history = (*story.history, story.now.record())
            story.now = None
    return story.history[-1]


async def _note_the_start(run: Run) -> None:
    launch = run.launch
    await run.notes.begin(
        on_death=run.on_death,
        engine=run.engine.name,
        command=redact_argv(launch.argv, run.folder.known_secrets),
        cwd=launch.cwd,
    )
    if run.notes.lost:
        run.announcer.tell(Notice(t=run.world.clock(), attempt=1, text=run.notes.lost))


def _tell_ready(story: Story, attempt: RunningAttempt) -> None:
    event = BecameReady(
        t=story.run.world.clock(), attempt=attempt.number, url=attempt.launch.url, changes=attempt.changes
    )
    story.run.announcer.tell(event)
    story.ready.set()


def _next_move(run: Run, history: tuple[Attempt, ...], deadline: float) -> Move:
    """Ask the policy; a relaunch that would begin after the deadline is not made."""
    now = run.world.clock()
    allowed = budget(run.retry, history, now)
    move = next_move(history, run.fallbacks, allowed, retry_hangs=run.retry_hangs, no_fallbacks=run.no_fallbacks)
    if isinstance(move, Relaunch) and now + move.after >= deadline:
        late = f"not ready within {run.limits.ready_within:.0f} s"
        return GiveUp(f"{late}; the last attempt: {in_one_line(history[-1].verdict)}", "expired")
    return move


def _refuse_leftovers(attempt: Attempt) -> None:
    if attempt.release is not None and attempt.release.left_behind:
        raise LeftBehind(attempt.release)


def _tell_what_is_lost(run: Run) -> None:
    """Files that this run cannot keep, because their place cannot be written."""
    for loss in run.folder.lost:
        run.announcer.tell(Notice(t=run.world.clock(), attempt=1, text=loss))


def _tell_timers(run: Run) -> None:
    """Limits of the engine's own that would end the server before one of ours fires, and lose the evidence."""
    for warning in timer_warnings(run.engine, run.launch, run.limits):
        run.announcer.tell(Notice(t=run.world.clock(), attempt=1, text=warning))


def _tell_failed_changes(run: Run, attempt: Attempt, move: Move, told: set[str]) -> None:
    """Changes of the caller's own that raised; each once, though it is asked for again after every attempt."""
    for text in () if isinstance(move, Keep) else move.failed:
        if text not in told:
            told.add(text)
            run.announcer.tell(
                Notice(t=run.world.clock(), attempt=attempt.number, text=redact(text, run.folder.known_secrets))
            )


def _tell_relaunch(run: Run, attempt: Attempt, relaunch: Relaunch) -> None:
    t, change = run.world.clock(), relaunch.fallback
    if change is None:
        run.announcer.tell(Notice(t=t, attempt=attempt.number, text=f"starting the same once more: {relaunch.why}"))
        return
    run.announcer.tell(
        FallbackChosen(
            t=t,
            attempt=attempt.number,
            name=change.name,
            change=change.change,
            alters=change.alters,
            cost=relaunch.why,
        )
    )


def _gave_up(move: GiveUp, history: tuple[Attempt, ...]) -> GaveUp:
    last = history[-1]
    left = last.release is not None and bool(last.release.left_behind)
    kinds: dict[str, type[GaveUp]] = {"permanent": Permanent, "expired": NotReadyInTime}
    kind = GaveUp if left else kinds.get(move.kind, GaveUp)
    return kind(
        move.why,
        history,
        diagnosis=last.diagnosis,
        report_path=last.evidence_path,
        retryable=move.kind == "exhausted" and not left,
    )


def _tell_the_end(story: Story) -> None:
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
