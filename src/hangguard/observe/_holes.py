"""Holes of a log: where its middle was given back to the disk, it reads as zero bytes."""

from __future__ import annotations

import os

_LEAST = 4096
"""Zero bytes in a row that are taken for a hole: no program writes a page of them."""
_ZEROS = bytes(_LEAST)


def before_hole(piece: bytes) -> bytes:
    """Return what stands before a hole that begins inside of ``piece``; all of it where none does."""
    found = piece.find(_ZEROS)
    return piece[:found] if found > 0 else piece


def skip_hole(file: int, at: int, piece: bytes) -> int:
    """Return where reading goes on after the hole that begins at ``at``, whose bytes are ``piece``; ``at``: none does.

    What stands there is the rest of a line, or nothing but its end. The kernel is asked only where zero bytes were
    read, so that an ordinary log never depends on its answer (lseek(2), SEEK_DATA: a file system that does not know
    says that all is data).
    """
    if not piece.startswith(b"\0"):
        return at
    zeros = len(piece) - len(piece.lstrip(b"\0"))
    try:
        data = os.lseek(file, at, os.SEEK_DATA)
    except OSError:  # ENXIO: nothing but a hole up to the end
        data = at
    if data > at:
        return data
    return at + zeros if zeros >= _LEAST else at
