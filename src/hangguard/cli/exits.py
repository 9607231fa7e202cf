"""The exit codes: which ending gives which, the first that applies."""

from __future__ import annotations

from hangguard.errors import (
    BadLaunch,
    CommandNotExecutable,
    CommandNotFound,
    GaveUp,
    LeftBehind,
    NotReadyInTime,
    Permanent,
    Refused,
    ServerLost,
)
from hangguard.facts import Attempt, Broken, Exited, Expired, Moving, Ready, Stuck, Verdict

ASKED, INTERNAL, USAGE = 0, 1, 2
USED_UP, PERMANENT, LEFT, REFUSED, LOST, TOO_LATE = 10, 11, 12, 13, 14, 124
NOT_EXECUTABLE, NOT_FOUND = 126, 127
HANGS, UNPROVED, NO_SERVER = 20, 21, 22
"""Of ``hangguard diagnose``: it hangs or is broken; that could neither be proved nor ruled out; there is none, or
several of which none was chosen. 0: it moves, or is ready."""

SIGNAL_BASE = 128
"""As shells do: a server that ended by signal N gives 128 + N."""


def exit_code_of(failure: BaseException | None, last: Attempt | None, *, pass_through: bool) -> int:
    """Return the exit code for how the run ended.

    ``pass_through``: one attempt and no fallbacks, so a non-zero code of the server itself is given as it is.
    """
    match failure:
        case BadLaunch():
            return USAGE
        case CommandNotExecutable():
            return NOT_EXECUTABLE
        case CommandNotFound():
            return NOT_FOUND
        case Refused():
            return REFUSED
        case _:
            return _after_launch(failure, last, pass_through=pass_through)


def exit_code_before_launch(refusals: tuple[Exception, ...]) -> int:
    """Return the exit code for what a look before the launch came to: of the first refusal, as ``run`` gives it."""
    if not refusals:
        return ASKED
    code = exit_code_of(refusals[0], None, pass_through=False)
    return REFUSED if code == INTERNAL else code  # a guardian that does not work: seen, not a fault while it ran


def exit_code_of_look(verdict: Verdict) -> int:
    """Return the exit code for what one look came to."""
    match verdict:
        case Moving() | Ready():
            return ASKED
        case Stuck() | Broken() | Expired():
            return HANGS
        case Exited():
            return LOST
        case _:
            return UNPROVED


def _after_launch(failure: BaseException | None, last: Attempt | None, *, pass_through: bool) -> int:
    if isinstance(failure, LeftBehind) or (last is not None and last.release is not None and last.release.left_behind):
        return LEFT
    own_end = last if last is not None and isinstance(last.verdict, Exited) else None
    if pass_through and isinstance(failure, (GaveUp, ServerLost)) and own_end is not None and own_end.exit_code:
        return own_end.exit_code if own_end.exit_code > 0 else SIGNAL_BASE - own_end.exit_code
    match failure:
        case NotReadyInTime():
            return TOO_LATE
        case Permanent():
            return PERMANENT
        case GaveUp() if own_end is not None and own_end.exit_code == 0:
            return LOST  # it ended unasked, and called that a success
        case GaveUp():
            return USED_UP
        case ServerLost():
            return LOST
        case _:
            return ASKED if failure is None else INTERNAL
