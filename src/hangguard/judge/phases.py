"""Where start-up is: from log lines, and more exactly from stacks.

Phases may be skipped and may come in another order in another engine or version: the last marker wins. After
an end marker the launch is in the gap before the next phase; a stack then places it exactly.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hangguard.facts import PHASES, Marker, Phase, Stack, StackMarker, Unseen


@dataclass(frozen=True, slots=True)
class Place:
    """A phase, since when, and whether only the end of the one before it was seen."""

    phase: Phase = "import"
    since: float = 0.0
    gap: bool = False
    said: Literal["", "begin", "end"] = ""
    """What the last line that told a phase told of it; "": there was none."""


def advance(place: Place, lines: Iterable[str], markers: tuple[Marker, ...], t: float) -> Place:
    """Return the place after these log lines."""
    for line in lines:
        for marker in markers:
            if re.search(marker.pattern, line):
                if marker.phase != place.phase:
                    place = Place(marker.phase, t, marker.gap)
                elif place.gap and not marker.gap:
                    place = Place(place.phase, place.since)
                place = replace(place, said="end" if marker.gap else "begin")
                break
    return place


def phase_of_stack(stack: Stack, markers: tuple[StackMarker, ...]) -> Phase | None:
    """Return the phase that the innermost telling frame of any thread names, or ``None``."""
    if isinstance(stack.threads, Unseen):
        return None
    found = [
        phase
        for thread in stack.threads
        for phase in [_phase_of_frames([(f.function, f.file) for f in thread.frames], markers)]
        if phase is not None
    ]
    return min(found, key=PHASES.index) if found else None


def _phase_of_frames(frames: list[tuple[str, str]], markers: tuple[StackMarker, ...]) -> Phase | None:
    for function, file in frames:
        for marker in markers:
            if marker.file in file and re.fullmatch(marker.function, function):
                return marker.phase
    return None


def is_later(phase: Phase, than: Phase) -> bool:
    """Say whether a stop in ``phase`` is further along than one in ``than``."""
    return PHASES.index(phase) > PHASES.index(than)
