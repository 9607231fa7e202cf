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
from hangguard.facts import Attempt

ASKED, INTERNAL, USAGE = 0, 1, 2
USED_UP, PERMANENT, LEFT, REFUSED, LOST, TOO_LATE = 10, 11, 12, 13, 14, 124
NOT_EXECUTABLE, NOT_FOUND = 126, 127

SIGNAL_BASE = 128
"""As shells do: a server that ended by signal N gives 128 + N."""


def exit_code_of(failure: BaseException | None, last: Attempt | None, *, pass_through: bool) -> int:
    """Return the exit code for how the run ended.

    ``pass_through``: one attempt and no fallbacks, so a non-zero code of the server itself is given as it is.
    """
    before_launch: tuple[tuple[type[BaseException], int], ...] = (
        (BadLaunch, USAGE),
        (CommandNotExecutable, NOT_EXECUTABLE),
        (CommandNotFound, NOT_FOUND),
        (Refused, REFUSED),
    )
    for kind, code in before_launch:
        if isinstance(failure, kind):
            return code
    left = last is not None and last.release is not None and bool(last.release.left_behind)
    if left or isinstance(failure, LeftBehind):
        return LEFT
    if pass_through and isinstance(failure, (GaveUp, ServerLost)) and last is not None and last.exit_code:
        return last.exit_code if last.exit_code > 0 else SIGNAL_BASE - last.exit_code
    after_launch: tuple[tuple[type[BaseException], int], ...] = (
        (NotReadyInTime, TOO_LATE),
        (Permanent, PERMANENT),
        (GaveUp, USED_UP),
        (ServerLost, LOST),
    )
    for kind, code in after_launch:
        if isinstance(failure, kind):
            return code
    return ASKED if failure is None else INTERNAL
