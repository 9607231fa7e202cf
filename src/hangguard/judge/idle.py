"""Where a worker stands that has nothing to do."""

from __future__ import annotations

import re

from hangguard.facts import IdlePlace, StackFrame


def is_idle(frames: tuple[StackFrame, ...], places: tuple[IdlePlace, ...]) -> bool:
    """Say whether a thread waits for its next piece of work: in a known loop, with only known waits inside it."""
    return any(_is_at(frames, place) for place in places)


def _is_at(frames: tuple[StackFrame, ...], place: IdlePlace) -> bool:
    for n, frame in enumerate(frames):
        if re.fullmatch(place.loop, frame.function):
            return all(re.fullmatch(place.inside, inner.function) for inner in frames[:n])
    return False
