"""The lines of a log as it grows, at the pace of whoever reads: nothing is kept but where he stands."""

from __future__ import annotations

import os
import re
import weakref

from hangguard.observe._holes import before_hole, skip_hole

TURN = 128 * 1024
"""Bytes that are read in one turn."""
BEHIND = 16 * 1024 * 1024
"""Where a reader that follows is further behind the log than this, the middle is left out, and that is said."""
LONGEST = 16 * 1024
"""What is passed on of one line, in bytes."""

_LINE_ENDS = re.compile(rb"\r?\n\r*|\r+(?!\n|\Z)")


class LineReader:
    """Reads one log from its start. Blocks on the disk only: it is for a thread."""

    def __init__(self, path: str, *, behind: int | None = BEHIND) -> None:
        """Open the file. ``behind``: how far a reader may be; ``None``: nothing is left out that is still there."""
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._file)
        self._at = 0
        self._behind = behind
        self._cutter = _Cutter()

    def read(self) -> list[tuple[int, bytes]]:
        """Return the lines that have ended since the last turn, each after how many bytes that are left out.

        Empty: there is no whole line now, or it was a long turn in the middle of one; see :meth:`is_at_end`.
        """
        size = os.fstat(self._file).st_size
        if size < self._at:  # truncated in place: what comes now is new
            self._at, self._cutter = 0, _Cutter()
        lines: list[tuple[int, bytes]] = []
        if self._behind is not None and size - self._at > self._behind and self._at > 0:  # the start tells most
            lines += self._leave_out(size - TURN)
        piece = before_hole(os.pread(self._file, TURN, self._at))
        if (after := skip_hole(self._file, self._at, piece)) > self._at:
            return lines + self._leave_out(after)
        self._at += len(piece)
        return lines + self._cutter.lines(piece)

    def is_at_end(self) -> bool:
        """Return whether everything that is written has been read."""
        return os.fstat(self._file).st_size <= self._at

    def rest(self) -> list[tuple[int, bytes]]:
        """Return what has no end yet, as a line; an empty one where the last thing that was done is to leave out."""
        return self._cutter.rest() or self._cutter.left_out()

    def close(self) -> None:
        """Let the file go."""
        self._close()

    def _leave_out(self, until: int) -> list[tuple[int, bytes]]:
        """Go on there, at the next whole line: half a line could be half a secret, and nobody could tell."""
        lines = self._cutter.rest()
        self._cutter.leave_out(until - self._at)
        self._at = until
        return lines


class _Cutter:
    """Cuts a log into lines, a progress bar into one a step; a line without end costs no memory."""

    def __init__(self) -> None:
        self._rest = b""
        self._dropped = 0
        self._left_out = 0
        self._is_inside = False

    def lines(self, piece: bytes) -> list[tuple[int, bytes]]:
        """Return the lines that end in this piece."""
        *whole, self._rest = _LINE_ENDS.split(self._rest + piece)
        if self._is_inside:
            whole = self._drop_first(whole)
        lines = [self._short(line) for line in whole]
        if len(self._rest) > LONGEST:
            self._dropped += len(self._rest) - LONGEST
            self._rest = self._rest[:LONGEST]
        return lines

    def rest(self) -> list[tuple[int, bytes]]:
        """Return what has no end yet."""
        rest, self._rest = self._rest, b""
        return [self._short(rest)] if rest else []

    def left_out(self) -> list[tuple[int, bytes]]:
        """Return what was left out since the last line, as an empty one."""
        return [self._short(b"")] if self._left_out else []

    def leave_out(self, number: int) -> None:
        """Go on so many bytes further, probably inside of a line."""
        self._left_out += number
        self._is_inside = True

    def _drop_first(self, whole: list[bytes]) -> list[bytes]:
        if not whole:
            self._left_out += len(self._rest)
            self._rest = b""
            return []
        self._left_out += len(whole[0])
        self._is_inside = False
        return whole[1:]

    def _short(self, line: bytes) -> tuple[int, bytes]:
        left_out, self._left_out = self._left_out, 0
        dropped, self._dropped = self._dropped + max(0, len(line) - LONGEST), 0
        return left_out, line if not dropped else line[:LONGEST] + b" [hangguard: %d more bytes in this line]" % dropped
