"""What the server has written: new lines, and how much there was that nobody could read."""

from __future__ import annotations

import os
import re
from collections import deque
from typing import ClassVar

from hangguard.facts import Ask, Log, Unseen
from hangguard.observe._holes import before_hole, skip_hole
from hangguard.observe.lane import Lane
from hangguard.observe.target import why_unseen

_BUDGET = 16 * 1024 * 1024
"""Bytes read in one look: 13 ms (measured: 0.8 ms a MB), and no marker is lost in a flood of 16 MB/s."""
_CHUNK = 1024 * 1024
_PARTIAL = 64 * 1024
"""What is kept of a line without an end."""
_LINE = 8 * 1024
"""What is passed on of a line."""
_TEXT = 256 * 1024
_SHORT = 512
"""What is passed on of a line where all lines of one look are longer than that together (judging costs 0.7 s a MB),
and where in a left-out line it is searched for what tells something: prefixes and markers are shorter."""
_FIRST = _LAST = _TELLING = 200
"""Lines passed on of one look; of the middle of a flood only those that tell something."""

_ENDS = re.compile(rb"[\r\n]+")
_ESCAPES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]{0,256}(?:\x07|\x1b\\)|[ -/]*[0-~])")
_CONTROLS = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069]")
"""Control characters but the tab, and those of Unicode that turn the direction of text."""


class LogProbe:
    """Reads the file into which the server's output goes. Nothing here can make the server wait.

    Looked at with ``stat`` once a sample: inotify costs 25 times as much in a flood (measured).
    """

    field: ClassVar[str] = "log"
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self, path: str | None, *, within: float, budget: int = _BUDGET, telling: tuple[str, ...] = ()
    ) -> None:
        """``telling``: patterns of lines that are never left out (an engine's markers and symptoms)."""
        pattern = re.compile("|".join(f"(?:{one})" for one in telling).encode()) if telling else None
        self._follower = _Follower(path, budget, pattern) if path is not None else None
        self._within = within
        self._lane = Lane("log")

    async def look(self, _ask: Ask) -> Log | Unseen:
        """Return what is new since the last look."""
        if self._follower is None:
            return Unseen("the output of the server goes to no file of ours")
        try:
            return await self._lane.ask(self._follower.read, within=self._within)
        except OSError as problem:
            return why_unseen(problem)

    async def aclose(self) -> None:
        """Let the file and the thread go."""
        if self._follower is not None:
            await self._lane.ask(self._follower.close, within=self._within)
        self._lane.close()


class _Follower:
    """Where the reading of one file stands. Runs in the lane."""

    def __init__(self, path: str, budget: int, telling: re.Pattern[bytes] | None = None) -> None:
        self._path = path
        self._telling = telling
        self._budget = budget
        self._file: int | None = None
        self._offset = 0
        self._before = 0
        self._skipped = 0
        self._splitter = _Splitter()

    def read(self) -> Log:
        """Read on. The file stays open: a server goes on writing into one that was removed."""
        if self._file is None:
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        lines = _Lines(self._telling)
        size = os.fstat(self._file).st_size
        if size < self._offset:  # truncated in place: what comes now is new
            self._start_over()
        elif size == self._offset and self._is_replaced(self._file):
            self.close()
            self._file = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
            size = os.fstat(self._file).st_size
            self._start_over()
        self._read_up_to(self._file, size, lines)
        return Log(
            total_bytes=self._before + self._offset,
            lines=lines.passed_on(),
            left_out=lines.left_out,
            skipped_bytes=self._skipped,
        )

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _start_over(self) -> None:
        self._before += self._offset
        self._offset = 0
        self._splitter = _Splitter()

    def _is_replaced(self, file: int) -> bool:
        """Tell whether another file with something in it has the name, and the old one is at its end."""
        try:
            now = os.stat(self._path)  # noqa: PTH116
        except OSError:
            return False
        return now.st_size > 0 and not os.path.samestat(now, os.fstat(file))

    def _read_up_to(self, file: int, size: int, lines: _Lines) -> None:
        """Read what is new, the start and the end of it where that is more than the budget."""
        if size == self._offset:
            self._splitter.pause(lines)
            return
        if size - self._offset > self._budget:
            begin = self._budget // 4
            self._read_range(file, self._offset + begin, lines)
            if (excess := size - (self._budget - begin) - self._offset) > 0:
                self._leave_out(excess, lines)
        self._read_range(file, size, lines)

    def _read_range(self, file: int, end: int, lines: _Lines) -> None:
        while self._offset < end:
            chunk = before_hole(os.pread(file, min(_CHUNK, end - self._offset), self._offset))
            if not chunk:
                return
            if (behind := skip_hole(file, self._offset, chunk)) > self._offset:
                self._leave_out(behind - self._offset, lines)
                continue
            self._offset += len(chunk)
            self._splitter.feed(chunk, lines)

    def _leave_out(self, number: int, lines: _Lines) -> None:
        """Go on so many bytes further, probably inside of a line."""
        self._splitter.pause(lines)
        self._splitter = _Splitter(is_inside=True)
        self._skipped += number
        self._offset += number


class _Splitter:
    """Cuts bytes into lines; keeps a line without an end, up to a size.

    ``is_inside``: the first bytes are the rest of a line whose start was skipped.
    """

    def __init__(self, *, is_inside: bool = False) -> None:
        self._partial = b""
        self._said = b""
        self._is_inside = is_inside

    def feed(self, chunk: bytes, lines: _Lines) -> None:
        """Pass on every line that ends in ``chunk``."""
        *whole, rest = _ENDS.split(chunk)
        if not whole:
            self._partial = (self._partial + rest[:_PARTIAL])[:_PARTIAL]
            return
        first = (self._partial + whole[0][:_PARTIAL])[:_PARTIAL]
        if not self._is_inside and first != self._said:
            lines.add(first)
        for line in whole[1:]:
            lines.add(line)
        self._partial, self._said, self._is_inside = rest[:_PARTIAL], b"", False

    def pause(self, lines: _Lines) -> None:
        """Pass on a line that has stopped in its middle: the last words of a program often have no end.

        Once it goes on, it is passed on again as a whole, because a marker may lie across the stop.
        """
        if self._partial and self._partial != self._said and not self._is_inside:
            self._said = self._partial
            lines.add(self._partial)


class _Lines:
    """The lines of one look: the first and the last ones, and between them those that tell something."""

    def __init__(self, telling: re.Pattern[bytes] | None) -> None:
        self._telling = telling
        self._first: list[bytes] = []
        self._between: list[bytes] = []
        self._last: deque[bytes] = deque()
        self._searched = b""
        self._count = 0

    def add(self, line: bytes) -> None:
        if not line:
            return
        self._count += 1
        if len(self._first) < _FIRST:
            self._first.append(line)
            return
        self._last.append(line)
        if len(self._last) > _LAST:
            self._leave_out(self._last.popleft())

    def _leave_out(self, line: bytes) -> None:
        if self._telling is None or len(self._between) >= _TELLING or line == self._searched:
            return  # a flood is often one line over and over, and searching is what costs
        self._searched = line
        if self._telling.search(line, 0, _SHORT):
            self._between.append(line)

    @property
    def left_out(self) -> int:
        """Return how many are not passed on."""
        return self._count - len(self._first) - len(self._between) - len(self._last)

    def passed_on(self) -> tuple[str, ...]:
        """Return them as clean text, without the empty ones."""
        lines = (*self._first, *self._between, *self._last)
        longest = _LINE if sum(min(len(line), _LINE) for line in lines) <= _TEXT else _SHORT
        cleaned = (_clean(line, longest) for line in lines)
        return tuple(line for line in cleaned if line)


def _clean(line: bytes, longest: int) -> str:
    text = line[: 2 * longest].decode(errors="replace")
    return _CONTROLS.sub("", _ESCAPES.sub("", text))[:longest].rstrip()
