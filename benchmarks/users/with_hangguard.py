"""A user's program: starts the server with hangguard, and writes down what it is told.

Arguments: JSON with command, url, out (a file of JSON lines), run_dir, quiet (seconds, 0: no wish). SIGTERM ends it.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

import tenacity

from hangguard import Event, GaveUp, Retry, ServerLost, VerdictChanged, supervise
from hangguard.facts import Attempt, Verdict

ASKED = json.loads(sys.argv[1])


class AskedToEnd(Exception):
    """SIGTERM came."""


def end(number: int, frame: object) -> None:
    del number, frame
    raise AskedToEnd


def write(**facts: object) -> None:
    with Path(ASKED["out"]).open("a") as out:
        out.write(json.dumps({"t": time.monotonic(), **facts}) + "\n")


def of(verdict: Verdict) -> dict[str, object]:
    suspects = [str(suspect) for suspect in getattr(verdict, "suspects", ())]
    return {
        "verdict": verdict.verdict,
        "kind": verdict.kind,
        "phase": verdict.phase,
        "suspects": suspects,
        "why": verdict.why,
        "still_for": verdict.still_for,
    }


def tell(event: Event) -> None:
    if isinstance(event, VerdictChanged):
        write(event="verdict", **of(event.verdict))
    else:
        write(event=event.event)


def the_end(error: Exception, history: tuple[Attempt, ...]) -> None:
    last = history[-1] if history else None
    released = last.release.answer if last is not None and last.release is not None else ""
    write(event="lost", error=type(error).__name__, released=released, **(of(last.verdict) if last else {}))


def main() -> None:
    signal.signal(signal.SIGTERM, end)
    supervision = supervise(
        ASKED["command"],
        engine="sglang",  # the little server speaks like it
        retry=Retry(stop=tenacity.stop_after_attempt(1)),  # one verdict is enough here
        run_dir=ASKED["run_dir"],
        hooks=[tell],
    )
    try:
        with supervision as server:
            if ASKED["quiet"]:
                with server.quiet(at_most=ASKED["quiet"]):  # the owner of the pause says so: nobody else could know
                    server.wait()
            server.wait()
    except AskedToEnd:
        write(event="ended")
    except (GaveUp, ServerLost) as error:
        the_end(error, supervision.history)


main()
