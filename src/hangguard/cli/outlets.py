"""What is written for others to read: lines for people, events as JSON, the server's log.

Every outlet has a thread of its own: a reader that is slow, gone, or never came costs lines, never supervision.
"""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import queue
import re
import select
import threading
import time
from collections.abc import Callable
from typing import TextIO

from hangguard.errors import BadLaunch
from hangguard.observe.log_lines import LineReader
from hangguard.redact import clean_text, redact
from hangguard.supervision.events import Event

BACKLOG = 10_000
FAREWELL = 2.0
"""Seconds that a reader gets at the end to take what is still there."""
TURN_SECONDS = 0.1
"""Seconds between two turns of following the log: a flood costs a quarter of a core."""

_DESCRIPTOR = re.compile(r"/dev/fd/(\d+)|/proc/self/fd/(\d+)", re.ASCII)


class Outlet(io.TextIOBase):
    """A text stream onto one descriptor that never blocks its writer. Broken for good once its reader is gone."""

    def __init__(self, stream: TextIO | None, open_: Callable[[], int] | None = None) -> None:
        self._stream = stream
        self._open = open_ or (lambda: -1 if stream is None else stream.fileno())
        self._queue: queue.Queue[bytes | None] = queue.Queue(BACKLOG)
        self._done = threading.Event()
        self.lost = 0
        """Pieces that were dropped because nobody took them."""
        self.problem: OSError | None = None
        threading.Thread(target=self._write_all, name="hangguard-outlet", daemon=True).start()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        """The encoding of the stream behind."""
        return getattr(self._stream, "encoding", None) or "utf-8"

    def isatty(self) -> bool:
        """Return whether a terminal is behind it."""
        return self._stream is not None and self._stream.isatty()

    def write(self, text: str) -> int:
        """Queue a piece. Never blocks."""
        try:
            self._queue.put_nowait(text.encode(self.encoding, errors="replace"))
        except queue.Full:
            self.lost += 1
        return len(text)

    def finish(self) -> None:
        """Wait a moment for the reader to take what is queued."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        if not self._done.wait(FAREWELL):
            self.lost += self._queue.qsize()

    def _write_all(self) -> None:
        try:
            fd = self._open()
            while (piece := self._queue.get()) is not None:
                if fd >= 0:
                    write_whole(fd, piece)
        except OSError as problem:
            self.problem = problem
        finally:
            self._done.set()


class EventWriter:
    """A hook that writes each event as one JSON line, at once."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._outlet = Outlet(None, _opened(where))

    def __call__(self, event: Event) -> None:
        """Queue one event. Never blocks."""
        self._outlet.write(json.dumps(event.as_json(), ensure_ascii=True) + "\n")

    def close(self) -> str:
        """Wait a moment for the reader; return what was lost, in words."""
        self._outlet.finish()
        if self._outlet.problem is not None:
            return f"no more events could be written to {self._where}: {self._outlet.problem.strerror}"
        return f"{self._outlet.lost} events were not taken from {self._where}" if self._outlet.lost else ""


def is_stdout(where: str | None) -> bool:
    """Return whether these events go to standard output, under any of its names."""
    return where in {"-", "/dev/stdout", "/dev/fd/1", "/proc/self/fd/1"}


def _opened(where: str) -> Callable[[], int]:
    """Open the file of the events, or return how to: a FIFO without a reader is opened by its outlet, which waits.

    Raises :class:`BadLaunch` for a file that cannot be written. Links are not followed, but for the names that
    a shell gives to open descriptors.
    """
    number = 1 if is_stdout(where) else 2 if where == "/dev/stderr" else None
    if found := _DESCRIPTOR.fullmatch(where):
        number = int(found[1] or found[2])
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NOCTTY
    try:
        fd = os.dup(number) if number is not None else os.open(where, flags | os.O_NONBLOCK, 0o600)
    except OSError as problem:
        if problem.errno == errno.ENXIO:  # a FIFO that nobody reads, see fifo(7)
            return lambda: os.open(where, flags, 0o600)
        raise BadLaunch(f"No events can be written to {where!r}: {problem.strerror}") from problem
    return lambda: fd


class LogFollower:
    """Copies the server's log to a stream as it grows, secrets and control characters out, in its own thread."""

    def __init__(self, out: TextIO | None, known: frozenset[str]) -> None:
        self._fd = -1 if out is None else out.fileno()
        self._known = known
        self._path: str | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="hangguard-log", daemon=True)
        self._thread.start()

    def follow(self, path: str | None) -> None:
        """Go on with this file, once the one before is copied to its end."""
        self._path = path

    def close(self) -> None:
        """Wait a moment for the reader to take the rest."""
        self._over.set()
        self._thread.join(FAREWELL)

    def _follow(self) -> None:
        done: str | None = None
        with contextlib.suppress(OSError):  # the reader is gone; the log itself stays where it is
            while not self._over.is_set() or done != self._path:
                path = self._path
                if path is None or path == done:
                    self._over.wait(0.1)
                else:
                    self._copy(path)
                    done = path

    def _copy(self, path: str) -> None:
        log = LineReader(path)
        try:
            while True:
                is_last = self._path != path or self._over.is_set()
                self._print(log.read(), path)
                if log.is_at_end() and is_last:
                    break
                time.sleep(0 if is_last else TURN_SECONDS)
            self._print(log.rest(), path)
        finally:
            log.close()

    def _print(self, lines: list[tuple[int, bytes]], path: str) -> None:
        if self._fd < 0:
            return
        for left_out, line in lines:
            if left_out:
                write_whole(self._fd, f"[hangguard: {left_out:,} bytes are left out here; see {path}]\n".encode())
            text = clean_text(redact(line.decode(errors="replace"), known=self._known))
            write_whole(self._fd, text.encode() + b"\n")


def write_whole(fd: int, data: bytes) -> None:
    """Write all of it, also to a descriptor that somebody has made non-blocking."""
    while data:
        try:
            data = data[os.write(fd, data) :]
        except BlockingIOError:
            select.select((), (fd,), ())
