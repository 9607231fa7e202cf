"""A supervising program of the soak; also called in the soak's own process.

Argument: JSON with command, env, run_dir, events (a file of JSON lines), face, attempts, ending, ending_at, forks,
forked (a file in which a forked child says who it is). The last line that it prints is its outcome, as JSON: how it
ended, and what the last release says.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import anyio
import tenacity

from hangguard import AsyncServer, Event, GaveUp, Limits, Retry, Server, ServerLost, Supervision, supervise

ENDS_OF_ITSELF = {"stop", "terminate", "kill", "restart", "leave", "raise", "cancel"}
SERVES_FOR = 90.0
"""Seconds for which one waits for what is done to it from outside."""


class Raised(Exception):
    """What the body of the block raises."""


def use(asked: dict[str, Any]) -> dict[str, Any]:
    """Start, end, and tell; raises only what must not be."""
    supervision = _begin(asked)
    try:
        if asked["face"] == "sync":
            how = _use_blocking(supervision, asked)
        else:
            how = anyio.run(functools.partial(_use_async, supervision, asked), backend=asked["face"])
    except Raised:
        how = "raised"
    except (GaveUp, ServerLost) as lost:  # it was killed, or it ended with a worker that was
        how = type(lost).__name__
    return {"how": how, **_told_of(supervision)}


def _begin(asked: dict[str, Any]) -> Supervision:
    def write(event: Event) -> None:
        with Path(asked["events"]).open("a") as out:
            out.write(json.dumps({**event.as_json(), "wall": time.time()}) + "\n")
        if event.event == "launched" and asked["forks"] and os.fork() == 0:  # it inherits every descriptor
            _sleep(asked["forked"])

    retry = Retry(stop=tenacity.stop_after_attempt(asked["attempts"]), wait=tenacity.wait_none())
    limits = Limits(stop_grace=1.0, ready_within=120.0)
    return supervise(
        asked["command"],
        engine="sglang",
        env=asked["env"],
        run_dir=asked["run_dir"],
        retry=retry,
        limits=limits,
        hooks=[write],
    )


def _sleep(said: str) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    part = Path(f"{said}.part")
    part.write_text(f"{os.getpid()} {fields[19]}")
    part.rename(said)
    time.sleep(SERVES_FOR)
    os._exit(0)


def _told_of(supervision: Supervision) -> dict[str, Any]:
    releases = [attempt.release for attempt in supervision.history if attempt.release is not None]
    return {
        "answers": [release.answer for release in releases],
        "left_behind": [line for release in releases for line in release.left_behind],
        "unattributed": [name for release in releases for name in release.unattributed_files],
    }


def _use_blocking(supervision: Supervision, asked: dict[str, Any]) -> str:
    ending = asked["ending"]
    with supervision as server:
        _wait(server, asked)
        if ending == "stop":
            server.stop()
        elif ending in {"terminate", "kill"}:
            getattr(server, ending)()
            server.wait(60.0)
        elif ending == "restart":
            server.restart()
        elif ending == "raise":
            raise Raised
    return ending


def _wait(server: Server, asked: dict[str, Any]) -> None:
    with contextlib.suppress(TimeoutError):
        server.wait(asked["ending_at"]["seconds"] if asked["ending"] in ENDS_OF_ITSELF else SERVES_FOR)


async def _use_async(supervision: Supervision, asked: dict[str, Any]) -> str:
    if asked["ending"] != "cancel":
        async with supervision as server:
            return await _use_server(server, asked)
    how = "cancel"
    async with anyio.create_task_group() as group:
        group.start_soon(_cancel_at, group.cancel_scope, asked)
        try:
            async with supervision:
                await anyio.sleep(SERVES_FOR)
        except (GaveUp, ServerLost) as lost:  # here, so that no group is put around it
            how = type(lost).__name__
        group.cancel_scope.cancel()
    return how


async def _cancel_at(scope: anyio.CancelScope, asked: dict[str, Any]) -> None:
    wanted = {"launched": "launched", "ready": "ready"}.get(asked["ending_at"]["after"])
    ends = time.monotonic() + SERVES_FOR
    while wanted and time.monotonic() < ends and not has_told(asked["events"], wanted):  # noqa: ASYNC110
        await anyio.sleep(0.01)
    await anyio.sleep(asked["ending_at"]["seconds"])
    scope.cancel()


def told(events: str) -> list[dict[str, Any]]:
    """Return the events so far."""
    try:
        lines = Path(events).read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def has_told(events: str, wanted: str) -> bool:
    return any(event["event"] == wanted for event in told(events))


async def _use_server(server: AsyncServer, asked: dict[str, Any]) -> str:
    ending = asked["ending"]
    with contextlib.suppress(TimeoutError):
        await server.wait(asked["ending_at"]["seconds"] if ending in ENDS_OF_ITSELF else SERVES_FOR)
    if ending == "stop":
        await server.stop()
    elif ending in {"terminate", "kill"}:
        getattr(server, ending)()
        await server.wait(60.0)
    elif ending == "restart":
        await server.restart()
    elif ending == "raise":
        raise Raised
    return str(ending)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        outcome = use(json.loads(sys.argv[1]))
    except KeyboardInterrupt:
        outcome = {"how": "KeyboardInterrupt"}
    print(json.dumps(outcome), flush=True)
