"""The server's log for whoever asks: line by line, attempt after attempt, at his own pace."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from contextlib import suppress

import anyio

from hangguard.facts import LogLine
from hangguard.observe.lane import Lane
from hangguard.observe.log_lines import BEHIND, LineReader
from hangguard.redact import clean_text, redact, secrets_of
from hangguard.supervision.serve import Story
from hangguard.supervision.stream import Stream

PERIOD = 0.2
"""Seconds between two looks at a log in which nothing is new: a look is one fstat(2)."""
WITHIN = 5.0
"""Seconds that a disk may take for one turn; a reader then asks again."""


class LogLines(Stream[LogLine]):
    """Lines of the server's log, as an asynchronous iterator that ends with the supervision. Dropping it ends it.

    Nothing is queued for a reader but one turn of 128 KiB. Who is more than 16 MiB behind goes on at the newest lines,
    and the first of them says how much was left out.
    """

    def __init__(self, story: Story, *, follow: bool = True) -> None:
        """Begin with the present attempt. ``follow``: go on as the log grows, and into the next attempt."""
        self._story = story
        self._follow = follow
        self._number = story.now.number if story.now is not None else max(1, len(story.history))
        self._known = story.run.folder.known_secrets | secrets_of(story.run.launch)
        self._lines: deque[LogLine] = deque()
        self._reader: LineReader | None = None
        self._is_over = False
        self._alone = threading.Lock()
        self._lane = Lane("log lines")
        weakref.finalize(self, self._lane.close).atexit = False

    async def next_or_none(self) -> LogLine | None:
        """Return the next line, or ``None`` at the end. Raises :class:`OSError` when the log cannot be read."""
        while not self._lines and not self._is_over:
            if await self._lane.ask(self._turn, within=WITHIN) is not True:
                await anyio.sleep(PERIOD)
        return self._pop()

    def take(self) -> LogLine | None:
        """Return the next line of a supervision that is over, in this thread; ``None``: that was the last one."""
        while not self._lines and not self._is_over and self._turn():
            pass
        return self._pop()

    def _pop(self) -> LogLine | None:
        with suppress(IndexError):
            return self._lines.popleft()
        return None

    def _turn(self) -> bool:
        """Read on; return whether there may be more at once. In a thread: it blocks on the disk."""
        if not self._alone.acquire(blocking=False):
            return False
        try:
            is_settled = not self._follow or self._story.over.is_set() or len(self._story.history) >= self._number
            reader = self._open()
            if reader is not None:
                self._pass_on(reader.read())
                if not reader.is_at_end():
                    return True
            if not is_settled:  # asked before the look, so that what was written last is read
                return bool(self._lines)
            self._next_attempt()
            return True
        finally:
            self._alone.release()

    def _open(self) -> LineReader | None:
        """Return the reader of this attempt's log; ``None``: it has not begun, or never came to be."""
        if self._reader is None and (path := self._story.run.folder.file(f"attempt-{self._number}.log")) is not None:
            with suppress(FileNotFoundError):
                self._reader = LineReader(path, behind=BEHIND if self._follow else None)
        return self._reader

    def _next_attempt(self) -> None:
        """Go on with the next attempt, where there is or will be one."""
        if self._reader is not None:
            self._pass_on(self._reader.rest())
            self._reader.close()
            self._reader = None
        self._is_over = not self._follow or (self._story.over.is_set() and len(self._story.history) <= self._number)
        self._number += 1

    def _pass_on(self, lines: list[tuple[int, bytes]]) -> None:
        for left_out, line in lines:
            text = clean_text(redact(line.decode(errors="replace"), known=self._known))
            self._lines.append(LogLine(attempt=self._number, text=text, left_out_bytes=left_out))
