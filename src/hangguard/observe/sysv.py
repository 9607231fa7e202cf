"""Shared memory of the System V kind (shmget(2)): it stays after the last process, and no file shows it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hangguard.facts import SharedSegment, Unseen
from hangguard.observe.lane import in_time

PATH = "/proc/sysvipc/shm"
WITHIN = 2.0


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment of this IPC namespace, as the kernel lists it."""

    id: int
    """The kernel counts on when it gives a slot to another segment, so that a number does not come again soon."""
    size_bytes: int
    creator: int
    """The pid that made it; 0: a process of another pid namespace."""
    attached: int
    """How many have it."""


def parse_segments(text: str) -> tuple[Segment, ...]:
    """Return what /proc/sysvipc/shm lists (ipc/shm.c, ``sysvipc_shm_proc_show``); columns are found by their names."""
    head, *lines = text.splitlines() or [""]
    names = head.split()
    found = []
    for line in lines:
        row = dict(zip(names, line.split(), strict=False))
        try:
            found.append(
                Segment(
                    id=int(row["shmid"]),
                    size_bytes=int(row["size"]),
                    creator=int(row["cpid"]),
                    attached=int(row["nattch"]),
                )
            )
        except (KeyError, ValueError):
            continue
    return tuple(found)


def left_by(
    segments: tuple[Segment, ...], members: frozenset[tuple[int, int]], before: tuple[Segment, ...]
) -> tuple[SharedSegment, ...]:
    """Return what members made since ``before`` and nobody has attached.

    Somebody whose pid one of them had meanwhile would be taken for him, so it is told and not removed.
    """
    known, pids = {segment.id for segment in before}, {pid for pid, _ in members}
    return tuple(
        SharedSegment(id=segment.id, size_bytes=segment.size_bytes, creator=segment.creator)
        for segment in segments
        if segment.attached == 0 and segment.creator in pids and segment.id not in known
    )


async def list_segments() -> tuple[Segment, ...] | Unseen:
    """Return all segments that there are now, or why they cannot be seen."""
    try:
        text = await in_time("sysv", lambda: Path(PATH).read_text(encoding="ascii", errors="replace"), within=WITHIN)
    except OSError as problem:
        return Unseen(f"{PATH}: {problem.strerror}")
    return text if isinstance(text, Unseen) else parse_segments(text)
