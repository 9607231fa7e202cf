"""``hangguard demo``: a small real server that deadlocks at graph capture comes up anyway."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import anyio

from hangguard.cli.exits import ASKED, exit_code_of
from hangguard.cli.live import Terminal
from hangguard.errors import HangguardError
from hangguard.facts import Attempt, Limits
from hangguard.supervision.events import Event
from hangguard.sync import Supervision, supervise
from hangguard.testing import little_server_command

READY_WITHIN = 55.0


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
    if not as_json:
        print("A small server of several processes, memory held, no GPU and no model. It deadlocks at graph capture:")
        print("two threads and two locks. No error, no port, 0 % CPU. hangguard finds out and starts it again.\n")
        sys.stdout.flush()
    failure, answer = anyio.run(_tell, supervision, terminal)
    document = summary(supervision.history, time.monotonic() - began)
    if as_json:
        print(json.dumps(document, indent=1))
    else:
        _print_story(document, answer, failure)
    if isinstance(failure, Exception) and not isinstance(failure, HangguardError):
        raise failure
    last = supervision.history[-1] if supervision.history else None
    return ASKED if failure is None else exit_code_of(failure, last, pass_through=False)


async def _tell(supervision: Supervision, terminal: Terminal) -> tuple[Exception | None, str]:
    async with anyio.create_task_group() as group:
        group.start_soon(terminal.show)
        try:
            async with supervision as server:
                now = supervision.now
                reply = now.samples[-1].answer if now is not None and now.samples else None
                answer = f"{server.url} answered: {getattr(reply, 'detail', '') or 'a completion'}"
        except Exception as error:  # noqa: BLE001 - told, and turned into an exit code by the caller
            return error, ""
        finally:
            group.cancel_scope.cancel()
    return None, answer


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


def _print_story(document: dict[str, Any], answer: str, failure: Exception | None) -> None:
    print()
    for attempt in document["attempts"]:
        kind = f" ({attempt['kind']})" if attempt["kind"] else ""
        changed = f", with {', '.join(attempt['fallbacks'])}" if attempt["fallbacks"] else ""
        after = f", {attempt['seconds_to_verdict']} s after the last movement" if attempt["verdict"] == "stuck" else ""
        print(
            f"  attempt {attempt['number']}{changed}: {attempt['verdict']}{kind} in {attempt['phase']}{after}; "
            f"then {attempt['released']}"
        )
    left = document["left_behind"]
    print(f"\n  {answer or failure}")
    print(f"  {document['seconds']} s in all. Left behind: {', '.join(left) if left else 'nothing'}.")
