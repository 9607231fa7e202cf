"""``hangguard demo``: a small real server that deadlocks at graph capture comes up anyway."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import anyio
from rich.table import Table
from rich.text import Text

from hangguard.cli.exits import exit_code_of
from hangguard.cli.live import Terminal, from_home
from hangguard.cli.run import until_the_end
from hangguard.facts import Attempt, Limits
from hangguard.supervision.events import Event
from hangguard.supervision.handle import AsyncServer
from hangguard.sync import supervise
from hangguard.testing import little_server_command

READY_WITHIN = 55.0

OPENING = """\
A small real server: four processes, memory held, no GPU, no model. It deadlocks at graph capture:
two threads, two locks; no error, no port, 0 % CPU. hangguard must find out, and bring it up anyway.
"""


def run_demo(*, as_json: bool) -> int:
    """Tell the story; return the exit code."""
    began = time.monotonic()
    hooks: list[Callable[[Event], object]] = []
    supervision = supervise(
        little_server_command(deadlock_at_capture=True),
        fallbacks="auto",
        limits=Limits(ready_within=READY_WITHIN, stop_grace=3.0),
        hooks=[lambda event: [hook(event) for hook in hooks]],
    )
    terminal = Terminal(quiet=as_json, events_on_stdout=as_json, supervision=supervision)
    hooks.append(terminal.tell)
    terminal.print(OPENING)
    failure, last = anyio.run(until_the_end, supervision, terminal, _stop_at_once)
    document = summary(supervision.history, time.monotonic() - began)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print_story(terminal, supervision.history, document)
    code = exit_code_of(failure, last, pass_through=False)
    if failure is not None or not document["ready"]:
        terminal.last_line(failure, last, code)
    terminal.finish()
    return code


async def _stop_at_once(_server: AsyncServer) -> None:
    """It has answered: that is the end of the story."""


def summary(history: tuple[Attempt, ...], seconds: float) -> dict[str, Any]:
    """Return the story as one JSON document."""
    return {
        "ready": bool(history) and history[-1].was_ready,
        "seconds": round(seconds, 2),
        "attempts": [_attempt(attempt) for attempt in history],
        "left_behind": [line for a in history if a.release is not None for line in a.release.left_behind],
    }


def _attempt(attempt: Attempt) -> dict[str, Any]:
    verdict = attempt.verdict
    return {
        "number": attempt.number,
        "verdict": verdict.verdict,
        "kind": verdict.kind,
        "phase": verdict.phase,
        "still_for": round(verdict.still_for, 2),
        "seconds_to_verdict": round(attempt.settled_at - attempt.last_movement_at, 2),
        "fallbacks": list(attempt.fallbacks),
        "released": attempt.release.answer if attempt.release is not None else "unknown",
    }


def _print_story(terminal: Terminal, history: tuple[Attempt, ...], document: dict[str, Any]) -> None:
    terminal.print()
    terminal.print(_table(document["attempts"]))
    hung = next((attempt for attempt in history if attempt.verdict.verdict == "stuck"), None)
    if hung is not None and document["ready"]:
        waited = f"{hung.settled_at - hung.last_movement_at:.1f} s after its last movement"
        terminal.print(f"Hung at {hung.verdict.phase}, found out {waited}, ended with proof,")
        changes = " and ".join(change.change.removeprefix("+ ") for change in history[-1].changes)
        terminal.print(Text(f"started again with {changes}: it answered a request.", "bold green"))
    left = ", ".join(document["left_behind"]) or "nothing"
    terminal.print(f"{document['seconds']:.0f} s in all. Left behind: {left}.")
    if hung is not None and hung.evidence_path is not None:
        terminal.print(f"Evidence: {from_home(hung.evidence_path)}")


def _table(attempts: list[dict[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("attempt", "with", "verdict", "phase", "found after", "then"):
        table.add_column(heading, justify="right" if heading == "found after" else "left", no_wrap=True)
    for attempt in attempts:
        kind = f" ({attempt['kind']})" if attempt["kind"] else ""
        found = f"{attempt['seconds_to_verdict']:.1f} s" if attempt["verdict"] == "stuck" else "-"
        verdict = Text(attempt["verdict"] + kind, "green" if attempt["verdict"] == "ready" else "red")
        changed = ", ".join(attempt["fallbacks"]) or "as asked for"
        table.add_row(str(attempt["number"]), changed, verdict, attempt["phase"], found, attempt["released"])
    return table
