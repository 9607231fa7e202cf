"""A launch before it is made: read, looked around, judged. Nothing is changed, and nothing of the target is started."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

from hangguard.engines import ENGINES, engine_named
from hangguard.engines.base import Engine
from hangguard.engines.generic import GENERIC
from hangguard.errors import BadLaunch
from hangguard.facts import Launch, Limits, Preflight, Unseen
from hangguard.judge import rules_for
from hangguard.judge.checks import Ground, check_all, patience_over
from hangguard.launching import read_command
from hangguard.observe.lane import in_time
from hangguard.redact import redact, secrets_of
from hangguard.supervision.surroundings import LookAround

WITHIN = 8.0
"""Seconds for all of it: with what must be let go afterwards, and the start of the program, under 10."""
READING = 0.3
"""The share of it in which the files that the command names must be read."""


async def apreflight(
    command: str | Sequence[str] | Launch,
    *,
    engine: str | Engine | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    within: float = WITHIN,
) -> Preflight:
    """Look around before a launch; see :func:`hangguard.preflight`, its blocking twin."""
    began = time.monotonic()
    if not 0.0 < within < float("inf"):
        raise BadLaunch(f"within is {within!r}", advice="It must be a number of seconds above zero")
    launch, known = await _read(command, engine, url=url, env=env, cwd=cwd, within=READING * within)
    seen = await LookAround(launch, known, run_dir, within - (time.monotonic() - began)).take()
    secrets = secrets_of(launch)
    # Before it is judged: what is refused carries what was seen of a stranger.
    ground = Ground(launch=launch, engine=known, rules=rules_for(known, launch, limits), seen=redact(seen, secrets))
    table = redact(check_all(ground), secrets)
    return Preflight(
        launch=redact(launch, secrets),
        checks=table,
        patience=patience_over(ground, table),
        best_patience=ground.at_best,
        seconds=time.monotonic() - began,
    )


async def _read(
    command: str | Sequence[str] | Launch,
    engine: str | Engine | None,
    *,
    url: str | None,
    env: Mapping[str, str] | None,
    cwd: str | os.PathLike[str] | None,
    within: float,
) -> tuple[Launch, Engine]:
    """Return what the command means; a program that is not there is a row of the table, not an error here."""
    if isinstance(command, Launch):
        return command, _engine_of(command, engine)
    folder = os.path.abspath(os.getcwd() if cwd is None else os.fspath(cwd))  # noqa: ASYNC240, PTH100, PTH109 - of words
    read = partial(read_command, command, engine=engine, url=url, env=env, cwd=folder, must_exist=False)
    found = await in_time("command", read, within=within)
    if not isinstance(found, Unseen):
        return found
    launch, known = await _without_files(read, within=within)
    note = f"the files that the command names were not read: {found.reason}"
    return replace(launch, notes=(note, *launch.notes)), known


async def _without_files(read: partial[tuple[Launch, Engine]], *, within: float) -> tuple[Launch, Engine]:
    found = await in_time("words", lambda: read(reads_files=False), within=within)
    if isinstance(found, Unseen):
        raise BadLaunch(f"The command cannot be read ({found.reason})")
    return found


def _engine_of(launch: Launch, engine: str | Engine | None) -> Engine:
    if engine is not None:
        return engine if isinstance(engine, Engine) else engine_named(engine)
    return next((known for known in ENGINES if known.name == launch.engine), GENERIC)
