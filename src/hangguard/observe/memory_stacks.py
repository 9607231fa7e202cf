"""Python stacks that were read from memory, by the guardian or by this process: into facts."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import anyio

from hangguard.facts import StackFrame, ThreadStack, Unseen
from hangguard.observe.lane import Lane
from hangguard.pystacks import read_threads

_LANES: dict[int, tuple[Lane, threading.Lock]] = {}
"""One for the whole program, by pid: a forked child inherits the lane and not its thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonThreads:
    """What was read of one process."""

    threads: tuple[ThreadStack, ...] | Unseen
    is_python: bool = True
    by: str = ""
    """Who read it."""


Reader: TypeAlias = Callable[..., Awaitable[PythonThreads]]
"""Called with (pid, start time) and ``within=`` seconds."""


def understand(answer: Mapping[str, Any], *, by: str) -> PythonThreads:
    """Return the facts in an answer of :func:`hangguard.pystacks.read_threads`."""
    try:
        if "unseen" in answer:
            return PythonThreads(threads=Unseen(str(answer["unseen"])), is_python=bool(answer["is_python"]), by=by)
        return PythonThreads(threads=tuple(_thread(thread) for thread in answer["threads"]), by=by)
    except (KeyError, TypeError, ValueError) as problem:
        return PythonThreads(threads=Unseen(f"what {by} read is not understood: {problem!r}"), by=by)


async def read_directly(member: tuple[int, int], *, within: float) -> PythonThreads:
    """Read the stacks of (pid, start time) from this process: where the kernel allows it, without any other program."""
    by = "this program"
    if member[0] == os.getpid():
        return PythonThreads(threads=Unseen("it is this program itself"), by=by)
    lane, in_use = _LANES.setdefault(os.getpid(), (Lane("stacks"), threading.Lock()))
    ends_at = time.monotonic() + within
    while (left := ends_at - time.monotonic()) > 0:
        if in_use.acquire(blocking=False):
            try:
                answer = await lane.ask(partial(read_threads, *member, within=left), within=left)
            finally:
                in_use.release()
            if isinstance(answer, Unseen):
                return PythonThreads(threads=answer, by=by)
            return understand(answer, by=by)
        await anyio.sleep(0.002)  # somebody else's question
    return PythonThreads(threads=Unseen(f"no answer within {within:.3g} s"), by=by)


def _thread(thread: Mapping[str, Any]) -> ThreadStack:
    return ThreadStack(
        name="MainThread" if thread["is_main"] else "",
        thread_id=int(thread["id"]),
        active=False,
        frames=tuple(StackFrame(function=str(f), file=str(file), line=int(n)) for f, file, n in thread["frames"]),
    )
