"""Good starts of the same kind, read before a start is judged and noted after one: in a thread, bounded in time."""

from __future__ import annotations

import logging

from hangguard import learned
from hangguard.facts import Gpu, Launch, Unseen
from hangguard.observe.lane import in_time

log = logging.getLogger("hangguard")

WITHIN = 2.0
"""Seconds that the disk may take. A home on a wedged network disk must not hold a start up."""


async def patience_learned(launch: Launch, gpus: tuple[Gpu, ...] | Unseen) -> learned.Stretches:
    """Return how long the phases of good starts like this one stood still; nothing where that is not known."""

    def read() -> learned.Stretches:
        path = learned.default_path()
        if path is None:
            return ()
        return learned.read_lesson(path, learned.key_of(launch, gpus, learned.driver_version())).patience

    try:
        known = await in_time("learned", read, within=WITHIN)
    except OSError as problem:
        log.info("what good starts have taught cannot be read: %s", problem)
        return ()
    return () if isinstance(known, Unseen) else known


async def note_good_start(launch: Launch, gpus: tuple[Gpu, ...] | Unseen, still: learned.Stretches) -> None:
    """Remember how long the phases of this start stood still. It is no fault where that cannot be."""

    def note() -> None:
        path = learned.default_path()
        if path is not None:
            learned.note_start(path, learned.key_of(launch, gpus, learned.driver_version()), still)

    try:
        await in_time("learned", note, within=WITHIN)
    except OSError as problem:
        log.info("this good start cannot be remembered: %s", problem)
