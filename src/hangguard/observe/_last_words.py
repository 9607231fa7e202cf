"""Python's own dump on a fatal signal (``faulthandler``), read back from a log."""

from __future__ import annotations

import re

from hangguard.facts import StackFrame, ThreadStack

_THREAD = re.compile(r"^(Thread|Current thread) 0x([0-9a-f]+)(?: \[(.*)\])? \(most recent call first\):$")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')

_BEGINS = "Fatal Python error: "
"""Perhaps behind the beginning of another writer's line."""

MOST_THREADS, MOST_FRAMES = 100, 100
"""``MAX_NTHREADS`` and ``MAX_FRAME_DEPTH`` of Python/traceback.c: no dump has more."""


def parse_last_words(text: str) -> tuple[ThreadStack, ...]:
    """Return the threads of the first dump in ``text``, innermost frame first; empty: there is none.

    The numbers are those of pthread_self(3). The thread that took the signal, the main thread unless it blocks
    signals, comes first and under that name. Lines between that belong to no dump are passed over, a frame whose line
    was broken by another writer is left out.
    """
    threads: dict[int, tuple[bool, str, list[StackFrame]]] = {}
    number = 0
    _, _, dump = text.partition(_BEGINS)
    for line in dump.partition(_BEGINS)[0].splitlines():
        if header := _THREAD.match(line):
            number = int(header[2], 16)
            if len(threads) < MOST_THREADS:
                threads[number] = (header[1] == "Current thread", header[3] or "", [])
        elif number in threads and (frame := _FRAME.match(line)) and len(threads[number][2]) < MOST_FRAMES:
            file, at, function = frame.groups()
            threads[number][2].append(StackFrame(function=function, file=file, line=int(at) if at.isdigit() else 0))
    found = [
        ThreadStack(name="MainThread" if current else name, thread_id=number, active=False, frames=tuple(frames))
        for number, (current, name, frames) in threads.items()
    ]
    return tuple(sorted(found, key=lambda thread: thread.name != "MainThread"))
