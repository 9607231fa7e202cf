"""Which dear sources the next sample should look at: only those that can still tell something."""

from __future__ import annotations

from hangguard.facts import Ask
from hangguard.judge.memory import Memory
from hangguard.judge.outside import DOWNLOAD
from hangguard.judge.stillness import APART

LOOK_CLOSER = 2.0
"""Seconds without product after which the states of the threads are asked for, and idle ones after which stacks
are: two samples 3 s apart fit the patience."""

LOOK_AT_BUSY = 5.0
"""Busy seconds without product after which stacks are asked for."""

SELDOM_AFTER = 30.0
"""Seconds after which looks come at a third of the rate."""


def ask_while_starting(memory: Memory) -> Ask:
    """Return what the next sample of a start that has not answered should look at."""
    still = memory.unproductive_for >= LOOK_CLOSER - 0.5
    flat = memory.idle_for >= LOOK_CLOSER - 0.5
    closer = flat or memory.unproductive_for >= LOOK_AT_BUSY
    often = memory.idle_for < SELDOM_AFTER if flat else memory.unproductive_for < SELDOM_AFTER
    every = APART if often else 3 * APART
    due = closer and (memory.stacks_at is None or memory.now - memory.stacks_at >= every - 0.5)
    downloading = memory.progress_by in {DOWNLOAD, "bytes received"} and memory.unproductive_for < SELDOM_AFTER
    return Ask(
        thread_states=still,
        stacks=due,
        sockets=still or downloading,
        growth=due or downloading,
        locks=due,
        communicators=due and memory.rules.ranks > 1,
        files=ask_files(memory) or (due and not memory.rules.attached),
    )


def ask_files(memory: Memory) -> bool:
    """Whether to look what members have in /dev/shm: at the beginning, and when a phase has just begun.

    It goes with their end; nothing is removed of a server that somebody else started.
    """
    return not memory.rules.attached and (memory.last is None or memory.place.since == memory.now)
