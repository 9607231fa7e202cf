"""``hangguard wait``: until a run, or a server by its URL, is ready, stuck, or over; never without an end."""

from __future__ import annotations

import math
from dataclasses import dataclass

import anyio

from hangguard.cli.exits import ASKED, HANGS, LOST, TOO_LATE
from hangguard.cli.outside import ask_outside
from hangguard.errors import BadLaunch, NoAnswer, NoSuchServer, RunOver
from hangguard.facts import ReachedState
from hangguard.supervision.attach import AsyncAttachment, Attaching
from hangguard.supervision.living import folder_of
from hangguard.supervision.reattach import AsyncReattachment
from hangguard.supervision.standing import until_standing

AGAIN = 0.5
"""Seconds between two looks for somebody who is not there yet, or does not answer now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitOptions:
    """The command line of ``hangguard wait``, checked by click."""

    target: str | None = None
    """A run, or a URL; ``None``: the only run that lives."""
    wanted: ReachedState = "ready"
    timeout: float
    run_dir: str | None = None


def run_wait(options: WaitOptions) -> int:
    """Wait, print what was reached, return the exit code."""
    return ask_outside(lambda: _wait(options))


async def _wait(options: WaitOptions) -> int:
    if not math.isfinite(options.timeout):
        raise BadLaunch(f"--timeout is {options.timeout}", advice="It must be a number of seconds, and finite")
    reached, url = "timeout", options.target or ""
    with anyio.move_on_after(options.timeout):
        reached = await (_of_url(options, url) if "://" in url else _of_run(options))
    print(reached, flush=True)
    if reached == options.wanted:
        return ASKED
    return {"timeout": TOO_LATE, "stuck": HANGS}.get(reached, LOST)


async def _of_run(options: WaitOptions) -> ReachedState:
    folder = await folder_of(options.target, options.run_dir)  # once: later another one may be the only one that lives
    while True:
        try:
            async with AsyncReattachment(folder) as run:
                return await run.wait(options.wanted)
        except RunOver as over:
            if over.living:
                raise
            return "exit"
        except NoAnswer:  # it is stopped, or has died: then the next look finds its guardian
            await anyio.sleep(AGAIN)


async def _of_url(options: WaitOptions, url: str) -> ReachedState:
    while True:
        try:
            async with AsyncAttachment(Attaching(url=url)) as watch:
                return await until_standing(watch, options.wanted)
        except NoSuchServer:
            if options.wanted != "ready":
                raise
            await anyio.sleep(AGAIN)
