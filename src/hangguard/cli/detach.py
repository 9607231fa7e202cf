"""``hangguard run --detach``: a supervisor in the background, with a terminal that only waits until it is ready."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, Any

from hangguard.cli.exits import ASKED, LOST, SIGNAL_BASE, TOO_LATE, USAGE
from hangguard.cli.outlets import is_stdout, write_whole
from hangguard.store import SUPERVISOR_LOG

if TYPE_CHECKING:
    from hangguard.cli.run import Options

STDERR = 2
TURN_SECONDS = 0.1
READY, KEPT_BYTES, LAST_LINE_WITHIN = b"READY at ", 4096, 1.0
MARGIN = 300.0
"""Seconds beyond ``--ready-within`` until nobody waits any more: evidence, stop and proof of the last attempt."""


def run_detached(options: Options, words: Sequence[str]) -> int:
    """Start the same command line in the background; wait until it is ready or over; return the exit code.

    ``words``: the command line after ``hangguard``, which begins with ``run``.
    """
    if is_stdout(options.events):
        print("hangguard: --events needs a file where --detach is given. Try 'hangguard run --help'.", file=sys.stderr)
        return USAGE
    reads, writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    os.set_blocking(writes, True)
    try:
        process = subprocess.Popen(
            [*_ourselves(words), words[0], f"--told-at={writes}", *words[1:]],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # Until it has a log of its own: what is wrong with the command line is said here.
            start_new_session=True,
            pass_fds=(writes,),
        )
    finally:
        os.close(writes)
    waiting = _Waiting(process, reads)
    try:
        with _asking_to_stop(process) as asked:
            ends = time.monotonic() + options.ready_within + MARGIN
            while not waiting.is_over and time.monotonic() < ends:
                waiting.turn()
    finally:
        waiting.close()
    return _exit_code(waiting, options, was_asked=bool(asked))


def _exit_code(waiting: _Waiting, options: Options, *, was_asked: bool) -> int:
    if waiting.url is not None:
        _print_ready(waiting, as_json=options.as_json)
        return ASKED
    code = waiting.process.returncode
    if code is None:
        print(f"hangguard: run {waiting.run_id} is neither ready nor over yet; it goes on.", file=sys.stderr)
        waiting.let_go()
        return TOO_LATE
    if code == ASKED and not was_asked:
        print("hangguard: it was stopped before it was ready.", file=sys.stderr)
        return LOST
    return int(code) if code >= 0 else SIGNAL_BASE - int(code)


class _Waiting:
    """What is heard from the background, and its log, copied to standard error as it grows."""

    def __init__(self, process: subprocess.Popen[bytes], reads: int) -> None:
        self.process = process
        self.run_id = ""
        self.folder = ""
        self.url: str | None = None
        self.changes: list[str] = []
        self._reads = reads
        self._heard = b""
        self._log = -1
        self._copied = b""

    @property
    def is_over(self) -> bool:
        return self.url is not None or self.process.returncode is not None

    def turn(self) -> None:
        """Hear what there is to hear, for a moment."""
        has_ended = self.process.poll() is not None  # first: what it said before its end is heard below
        if self._reads < 0:
            time.sleep(TURN_SECONDS)
        elif select.select([self._reads], [], [], 0.0 if has_ended else TURN_SECONDS)[0]:
            self._hear()
        self._copy_log()
        if self.url is not None:
            self._copy_the_last_line()
            self.let_go()

    def let_go(self) -> None:
        """Let it live on without us."""
        self.process.returncode = self.process.returncode or 0  # Popen must not complain that it still runs

    def close(self) -> None:
        for descriptor in (self._reads, self._log):
            if descriptor >= 0:
                os.close(descriptor)

    def _hear(self) -> None:
        more = os.read(self._reads, 1 << 16)
        if not more:
            os.close(self._reads)
            self._reads = -1
        *lines, self._heard = (self._heard + more).split(b"\n")
        for line in lines:
            self._understand(json.loads(line))

    def _understand(self, told: dict[str, Any]) -> None:
        if "run" in told:
            self.run_id, self.folder = told["run"], told["folder"]
            path = os.path.join(self.folder, SUPERVISOR_LOG)  # noqa: PTH118 - a string
            self._log = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
        elif "url" in told:
            self.url, self.changes = told["url"], told["changes"]

    def _copy_the_last_line(self) -> None:
        """What it prints of being ready may be a moment behind: a thread of its own does it. Nothing with --quiet."""
        ends = time.monotonic() + LAST_LINE_WITHIN
        while self._copied and READY not in self._copied and time.monotonic() < ends:
            time.sleep(0.02)
            self._copy_log()

    def _copy_log(self) -> None:
        while self._log >= 0 and (piece := os.read(self._log, 1 << 16)):
            self._copied = (self._copied + piece)[-KEPT_BYTES:]
            try:
                write_whole(STDERR, piece)
            except OSError:  # nobody reads; the log stays where it is
                return


def _print_ready(waiting: _Waiting, *, as_json: bool) -> None:
    if as_json:
        document = {
            "schema": 1,
            "run": waiting.run_id,
            "url": waiting.url,
            "changes": waiting.changes,
            "folder": waiting.folder,
        }
        text = json.dumps(document, ensure_ascii=True)
    else:
        text = f"run {waiting.run_id}\nurl {waiting.url}"
    print(text, flush=True)


def _ourselves(words: Sequence[str]) -> list[str]:
    """Return how this program was started: interpreter, its options, and the script or module."""
    prefix = sys.orig_argv[: len(sys.orig_argv) - len(words)]
    if len(prefix) > 1 and sys.orig_argv[len(prefix) :] == list(words):
        return [sys.executable, *prefix[1:]]
    return [sys.executable, "-m", "hangguard"]


@contextmanager
def _asking_to_stop(process: subprocess.Popen[bytes]) -> Iterator[list[int]]:
    """Pass Ctrl-C on, which the terminal gives only to us; give the signals that came. A hang-up just ends us."""
    asked: list[int] = []

    def ask(number: int, _frame: FrameType | None) -> None:
        asked.append(number)
        if process.returncode is None:  # not waited for yet, so the pid is its own
            process.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
