"""A look before a launch as lines for people, and as one JSON document. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from hangguard.changes import as_shell
from hangguard.facts import Check, Preflight
from hangguard.redact import clean_text, redact
from hangguard.report.text import Line, duration
from hangguard.supervision.evidence import as_plain

SCHEMA = 1
_COLUMN = 23
"""Where what was found begins: the longest name, and two blanks."""
STYLES = {"refused": "bold red", "missing": "yellow", "poor": "yellow", "unseen": "magenta", "good": "green"}
_ORDER = ("refused", "missing", "unseen", "poor", "good")


def lines_of(preflight: Preflight) -> list[Line]:
    """Return the table as people read it: what stands in the way first, what is good last."""
    launch = preflight.launch
    place = f", answering at {launch.socket_path or launch.url}" if launch.url else ""
    lines = [*_head(preflight), Line(""), Line(f"{as_shell(launch)}{place}")]
    lines += [Line(f"note: {note}") for note in launch.notes]
    for answer in _ORDER:
        rows = [check for check in preflight.checks if _kind(check) == answer]
        lines += [Line(""), Line(_HEADINGS[answer], style=STYLES[answer])] if rows else []
        lines += [line for check in rows for line in _row(check, preflight.best_patience)]
    return [Line(clean_text(line.text), line.indent, line.style, line.hang) for line in lines]


def as_json(preflight: Preflight) -> dict[str, Any]:
    """Return it as plain values; within one schema keys may come, and none goes."""
    return {
        "schema": SCHEMA,
        "refused": bool(preflight.refusals),
        "patience_seconds": preflight.patience,
        "best_patience_seconds": preflight.best_patience,
        "seconds": round(preflight.seconds, 2),
        "launch": as_plain(preflight.launch),
        "checks": [_as_json(check) for check in preflight.checks],
    }


def _as_json(check: Check) -> dict[str, Any]:
    error = check.error
    return {
        "what": check.what,
        "answer": check.answer,
        "found": check.found,
        "means": check.means,
        "patience_seconds": check.patience,
        "loses": check.loses,
        "helps": check.helps,
        "error": None if error is None else {"type": type(error).__name__, "text": redact(str(error))},
    }


_HEADINGS = {
    "refused": "In the way",
    "missing": "Missing",
    "unseen": "Could not be seen",
    "poor": "Poor",
    "good": "Good",
}


def _kind(check: Check) -> str:
    return "refused" if check.error is not None else check.answer


def _head(preflight: Preflight) -> Iterable[Line]:
    if preflight.refusals:
        yield Line("REFUSED: it cannot be started like this", style=STYLES["refused"])
        return
    doubts = len(preflight.poor)
    rest = f"; {doubts} thing{'s' if doubts > 1 else ''} to look at" if doubts else ""
    yield Line(f"Nothing stands in the way{rest}", style="bold green")
    after = duration(preflight.patience)
    if preflight.patience <= preflight.best_patience:
        yield Line(f"A start that hangs is given up after {after}: all that this takes can be seen")
        return
    slow = dict.fromkeys(check.what for check in preflight.checks if check.patience == preflight.patience)
    best = duration(preflight.best_patience)
    yield Line(f"A start that hangs is given up after {after} instead of {best}: see {', '.join(slow)}")


def _row(check: Check, best: float) -> Iterable[Line]:
    yield Line(f"{check.what:<{_COLUMN - 2}}{check.found}", 2, "" if check.answer == "good" else "bold", _COLUMN - 2)
    if check.means:
        yield Line(check.means, _COLUMN, hang=0)
    for cost in _costs(check, best):
        yield Line(cost, _COLUMN, hang=0)
    if check.helps:
        yield Line(f"->  {check.helps}", _COLUMN, hang=4)


def _costs(check: Check, best: float) -> Iterable[str]:
    if check.patience is not None and check.patience > best:
        yield f"costs: a start that hangs is given up after {duration(check.patience)} instead of {duration(best)}"
    if check.loses:
        yield f"lost: {check.loses}"
