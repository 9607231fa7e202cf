"""What is written for others to read: events as JSON lines, the server's log. A reader can never block us."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import sys
import threading
import time
from typing import TextIO

from hangguard.redact import clean_text, redact
from hangguard.supervision.events import Event

BACKLOG = 10_000
FAREWELL = 2.0
"""Seconds that a reader gets at the end to take what is still there."""


class EventWriter:
    """A hook that writes each event as one JSON line, flushed, from a thread of its own.

    A FIFO that nobody reads, a full disk or a reader that went away costs events, never supervision.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        self._queue: queue.Queue[Event | None] = queue.Queue(BACKLOG)
        self._done = threading.Event()
        threading.Thread(target=self._write_all, name="hangguard-events", daemon=True).start()

    def __call__(self, event: Event) -> None:
        """Queue one event. Never blocks."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(event)

    def close(self) -> None:
        """Wait a moment for the reader to take what is queued."""
        with contextlib.suppress(queue.Full):
            self._queue.put_nowait(None)
        self._done.wait(FAREWELL)

    def _write_all(self) -> None:
        try:
            with self._open() as out:
                while (event := self._queue.get()) is not None:
                    out.write(json.dumps(event.as_json(), ensure_ascii=True) + "\n")
                    out.flush()
        except OSError as problem:
            print(f"hangguard: no events are written to {self._where}: {problem}", file=sys.stderr)
        finally:
            self._done.set()

    def _open(self) -> TextIO:
        if self._where == "-":
            return os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.fdopen(os.open(self._where, flags, 0o600), "w", encoding="utf-8")


class LogFollower:
    """Copies the server's log to a stream as it grows, secrets and control characters out, in its own thread."""

    def __init__(self, out: TextIO, known: frozenset[str]) -> None:
        self._out = out
        self._known = known
        self._path: str | None = None
        self._at_end = threading.Event()
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
        try:
            done: str | None = None
            while not self._over.is_set() or done != self._path:
                path = self._path
                if path is None or path == done:
                    time.sleep(0.1)
                    if self._over.is_set():
                        return
                    continue
                self._copy(path)
                done = path
        except OSError:
            return  # the reader is gone; the log itself stays where it is

    def _copy(self, path: str) -> None:
        rest = ""
        with open(path, encoding="utf-8", errors="replace", newline="") as log:  # noqa: PTH123
            while True:
                text = log.read(65536)
                if text:
                    *lines, rest = (rest + text).split("\n")
                    for line in lines:
                        self._print(line)
                elif self._path != path or self._over.is_set():
                    break
                else:
                    time.sleep(0.1)
        if rest:
            self._print(rest)

    def _print(self, line: str) -> None:
        self._out.write(clean_text(redact(line.replace("\r", "\n"), known=self._known)) + "\n")
        self._out.flush()
