"""``hangguard stop``: end a run from outside, with proof."""

from __future__ import annotations

import json
import math
import os
import shlex
from dataclasses import asdict, dataclass

from hangguard.cli.exits import ASKED, LEFT
from hangguard.cli.outside import ask_outside
from hangguard.errors import BadLaunch
from hangguard.redact import clean_text, redact
from hangguard.supervision.reattach import AsyncReattachment


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions:
    """The command line of ``hangguard stop``, checked by click."""

    run: str | None = None
    drain: float | None = None
    within: float | None = None
    run_dir: str | None = None
    as_json: bool = False


def run_stop(options: StopOptions) -> int:
    """Stop it, print what that came to, return the exit code."""
    return ask_outside(lambda: _stop(options))


async def _stop(options: StopOptions) -> int:
    for name, seconds in (("--drain", options.drain), ("--within", options.within)):
        if seconds is not None and not math.isfinite(seconds):
            raise BadLaunch(f"{name} is {seconds}", advice="It must be a number of seconds, and finite")
    async with AsyncReattachment(options.run, options.run_dir) as run:
        try:
            stopped = await run.stop(drain=options.drain, within=options.within)
        except TimeoutError:
            raise TimeoutError(f"Run {run.run_id} is not over yet; its stop goes on.") from None
        except RuntimeError as refused:
            raise BadLaunch(str(refused)) from refused
    code = LEFT if stopped.left_behind else ASKED
    if options.as_json:
        print(json.dumps(redact({"schema": 1, **asdict(stopped), "exit_code": code}), ensure_ascii=True))
        return code
    print(f"stopped {stopped.run_id}")
    print(clean_text(redact(f"outcome {stopped.outcome}")))
    for left in stopped.left_behind:
        print(clean_text(redact(f"left {left}")))
    if stopped.left_behind:
        print(f"next hangguard clean {_named(options, stopped.run_id)}")
    return code


def _named(options: StopOptions, run_id: str) -> str:
    """Return the words that lead ``clean`` to the same run."""
    if options.run and os.sep in options.run:
        return shlex.quote(options.run)
    return run_id + (f" --run-dir {shlex.quote(options.run_dir)}" if options.run_dir else "")
