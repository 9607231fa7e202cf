"""``hangguard status``: how a run stands."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

import anyio

from hangguard.act.cleanup import look_at
from hangguard.cli.exits import ASKED, LOST, UNPROVED
from hangguard.cli.outside import ask_outside
from hangguard.errors import NoAnswer, NoSuchServer, RunOver
from hangguard.facts import RunStatus, Unseen
from hangguard.observe.lane import in_time
from hangguard.redact import clean_text, redact
from hangguard.report.text import duration
from hangguard.supervision.living import folder_of, read_known
from hangguard.supervision.reattach import AsyncReattachment

WITHIN = 20.0
"""Seconds for all of it. A supervisor answers at once, or is given 5; one that is dead is looked after from here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusOptions:
    """The command line of ``hangguard status``, checked by click."""

    run: str | None = None
    run_dir: str | None = None
    as_json: bool = False


def run_status(options: StatusOptions) -> int:
    """Ask, print, return the exit code."""
    return ask_outside(lambda: _status(options))


async def _status(options: StatusOptions) -> int:
    with anyio.fail_after(WITHIN):
        status, standing, code = await _asked(options)
    if options.as_json:
        document = {"schema": 1, **asdict(status), "exit_code": code}
        document["state"]["stage"] = standing
        print(json.dumps(redact(document), indent=1, ensure_ascii=True))
    else:
        for line in lines_of(status, standing):
            print(clean_text(redact(line)))
    return code


async def _asked(options: StatusOptions) -> tuple[RunStatus, str, int]:
    """Return the status, how the run stands in the words of ``ps``, and the exit code."""
    folder = await folder_of(options.run, options.run_dir)
    try:
        async with AsyncReattachment(folder) as run:
            status = await run.status()
    except NoAnswer as silent:
        return *await _noted(folder, str(silent)), UNPROVED
    except RunOver as over:
        return *await _noted(folder, str(over)), LOST
    return status, "kept" if status.told_by == "guardian" else status.state.stage, ASKED


async def _noted(folder: str, note: str) -> tuple[RunStatus, str]:
    """Return what the state file says, and how the run stands now; of a dead one nothing that is only true of a living.

    The file was written by somebody who may be dead: its stage, its verdict and where it answers are of that time.
    """
    known = await in_time("state file", lambda: read_known(folder), within=5.0)
    if isinstance(known, Unseen):
        raise NoSuchServer(f"The run in {folder} cannot be looked at: {known.reason}")
    found, state = known
    (now,) = await look_at(lambda: (found,))
    state = replace(state, files=(), shm_before=())
    if not now.is_alive:
        state = replace(state, url="", verdict="", kind="", why="")
    return RunStatus(state=state, told_by="state file", note=note), now.standing


def lines_of(status: RunStatus, standing: str) -> Iterator[str]:
    """Yield one fact a line: a stable word, and what there is to say."""
    state = status.state
    yield f"run {state.run_id}"
    yield f"stage {standing}"
    yield f"told by {status.told_by}"
    if state.url:
        yield f"url {state.url}"
    if state.verdict:
        kind = f" ({state.kind})" if state.kind else ""
        yield f"verdict {state.verdict}{kind}{f': {state.why}' if state.why else ''}"
    if state.phase:
        yield f"phase {state.phase}"
    if status.still_for >= 1.0:
        yield f"still {duration(status.still_for)}"
    if status.unseen:
        yield f"unseen {'; '.join(status.unseen)}"
    yield f"attempt {state.attempt}"
    for past in status.history:
        kind = f" ({past.kind})" if past.kind else ""
        yield f"before attempt {past.number}: {past.verdict}{kind} in {past.phase}{f': {past.why}' if past.why else ''}"
    for change in state.changes:
        yield f"changed {change}"
    if state.root is not None:
        yield f"pid {state.root[0]}"
    if state.outcome:
        yield f"outcome {state.outcome}"
    for left in state.left_behind:
        yield f"left {left}"
    if status.note:
        yield f"note {' '.join(status.note.split())}"
