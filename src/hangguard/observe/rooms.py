"""Folders that a run and its server will write to: is there room, may they be written. Nothing is made or tried."""

from __future__ import annotations

import os
from pathlib import Path

from hangguard.facts import Room


def room_at(path: str, proc: str = "/proc") -> Room:
    """Return the room at a path; of one that does not exist, at the nearest folder above it. Blocks.

    Raises OSError where that cannot be looked at.
    """
    nearest = _nearest(Path(path))
    figures = os.statvfs(nearest)
    return Room(
        path=path,
        exists=str(nearest) == os.path.abspath(path),  # noqa: PTH100 - links stay
        free_bytes=figures.f_bavail * figures.f_frsize,
        # Of the file system too: access(2) says EROFS of a read-only one, to root as well.
        is_writable=nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK, effective_ids=True),
        filesystem=filesystem_of(str(nearest), proc),
    )


def filesystem_of(path: str, proc: str = "/proc") -> str:
    """Return the type of the file system that a path lies on; "" where it is not told."""
    path = os.path.realpath(path)
    best, found = -1, ""
    with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="replace") as mounts:  # noqa: PTH123 - a kernel file
        for line in mounts:
            before, _, after = line.partition(" - ")
            point = before.split()[4].replace("\\040", " ")
            inside = path == point or path.startswith(point.rstrip("/") + "/")
            if inside and len(point) >= best:  # of several at one place the last is on top
                best, found = len(point), after.split()[0]
    return found


def _nearest(path: Path) -> Path:
    path = Path(os.path.abspath(path))  # noqa: PTH100
    while not os.path.lexists(path) and path != path.parent:
        path = path.parent
    return path
