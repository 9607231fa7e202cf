"""A guardian for a moment, without a server: whether it works here, and whether a server's stacks can be read."""

from __future__ import annotations

import os
import time
from typing import Any

import anyio

from hangguard.act._link import Link, start_guardian
from hangguard.errors import GuardianFailed
from hangguard.facts import GuardianTrial, Process, Unseen
from hangguard.observe import procfs
from hangguard.observe.lane import Lane
from hangguard.observe.memory_stacks import read_directly
from hangguard.observe.stacks import find_py_spy, take_stacks

FAREWELL = 2.0
"""Seconds in which a guardian without a server ends by itself once it is alone; it takes milliseconds."""
_LOOKS, _APART = 20, 0.005
"""A tenth of a second in all: a guardian that has answered has nothing more to do, and sleeps."""


async def try_guardian(*, within: float) -> GuardianTrial:
    """Start a guardian, ask it something, look at it as at a server, and let it end: about ``within`` seconds at most.

    It is our child, as the server will be its: whoever may read the stacks of the one may read those of the other, but
    where the server changes its user. Nothing is launched, and no file is opened but its own.
    """
    ends_at = time.monotonic() + within
    try:
        link = await start_guardian(within=0.6 * within)
    except GuardianFailed as failure:
        return GuardianTrial(problem=failure.problem)
    try:
        problem = await _ask(link, within=max(0.2, 0.5 * (ends_at - time.monotonic())))
        if problem:
            return GuardianTrial(problem=problem)
        return await _look_at(link, within=max(0.2, ends_at - time.monotonic()))
    finally:
        link.hang_up()
        with anyio.CancelScope(shield=True):
            await link.end_guardian(within=FAREWELL)
        link.close()


async def _ask(link: Link, *, within: float) -> str:
    """Return why it does not answer; empty: it does. It is asked for stacks that are none of its business."""
    answer: dict[str, Any] = {}
    with anyio.move_on_after(within) as limit:
        await link.send({"do": "stacks", "id": 0, "pid": link.process.pid, "started": link.started, "within": within})
        answer = await link.next_message()
    if answer.get("say") == "stacks":
        return ""
    if limit.cancelled_caught:
        return f"it did not answer within {within:.3g} s"
    return str(answer.get("problem") or "it ended at once")


async def _look_at(link: Link, *, within: float) -> GuardianTrial:
    member = (link.process.pid, link.started)
    lane = Lane("hangguard-trial")
    try:
        found = await lane.ask(lambda: _seen_as_process(*member), within=0.3 * within)
    except OSError as problem:
        return GuardianTrial(stacks=Unseen(f"its processes cannot be read ({problem.strerror})"))
    finally:
        lane.close()
    if isinstance(found, Unseen):
        return GuardianTrial(stacks=found, wait_channel=found)
    process, channel, py_spy = found
    stacks = await take_stacks((process,), within=0.7 * within, reader=read_directly)
    threads = stacks if isinstance(stacks, Unseen) else stacks[0].threads
    return GuardianTrial(stacks=threads if isinstance(threads, Unseen) else None, wait_channel=channel, py_spy=py_spy)


def _seen_as_process(pid: int, started: int) -> tuple[Process, str | Unseen, str]:
    stat, channel = procfs.read_stat(f"/proc/{pid}/stat"), _channel_of(pid)
    process = Process(
        pid=pid, started=started, parent=stat.parent, title="guardian", name=stat.name, state=stat.state, threads=1,
        cpu_seconds=0.0, reaped_cpu_seconds=0.0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip
    return process, channel, find_py_spy() or ""


def _channel_of(pid: int) -> str | Unseen:
    """Return where in the kernel it sleeps; empty: that is never told. While it runs it is nowhere: asked again."""
    for _ in range(_LOOKS):
        try:
            channel = procfs.read_bytes(f"/proc/{pid}/wchan", 256).decode(errors="replace").strip("\0\n")
        except OSError as problem:
            return Unseen(f"wchan: {problem.strerror or os.strerror(problem.errno or 0)}")
        if channel != "0":
            return channel
        time.sleep(_APART)  # in the lane's own thread
    return ""
