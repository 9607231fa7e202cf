"""What the tests of the command line share: a real ``python -m hangguard``, and what it left."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from pathlib import Path

from hangguard.testing import little_server_command

MARK = "HANGGUARD_TEST_MARK"


def poll(look, within=20.0):
    """Look again until the answer is true; say what was seen last where it never is."""
    end = time.monotonic() + within
    while True:
        seen = look()
        if seen:
            return seen
        assert time.monotonic() < end, f"not within {within} s; last seen: {seen!r}"
        time.sleep(0.02)


def small(**options):
    """The command of a little server that is ready as soon as can be."""
    quick = {"phase_seconds": 0.02, "hold_mb": 1, "tp": 1}
    return little_server_command(**{**quick, **options})


def marked(mark):
    """Return the pids of everything that inherited this mark, but for zombies and ourselves."""
    wanted = f"{MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                environment = (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if wanted in environment:
                found.append(int(entry.name))
    return found


class Running:
    """One hangguard in a session of its own. Its output goes to files, so that nobody has to drain it."""

    def __init__(self, folder, words, *, env=None, stdout=None, stderr=None, without=(), inside=()):
        self.folder = folder
        self.mark = uuid.uuid4().hex
        self.out_path, self.err_path = folder / f"{self.mark}.out", folder / f"{self.mark}.err"
        self.events_path = folder / "events"
        environment = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), **(env or {}), MARK: self.mark}
        for name in without:
            environment.pop(name, None)
        with self.out_path.open("wb") as out, self.err_path.open("wb") as err:
            self.process = subprocess.Popen(
                [*inside, sys.executable, "-m", "hangguard", *words],
                stdin=subprocess.DEVNULL,
                stdout=stdout if stdout is not None else out,
                stderr=stderr if stderr is not None else err,
                env=environment,
                start_new_session=True,
            )

    @property
    def out(self):
        return self.out_path.read_text(errors="surrogateescape")

    @property
    def err(self):
        return self.err_path.read_text(errors="surrogateescape")

    @property
    def last_line(self):
        return self.err.splitlines()[-1]

    def events(self, text=None):
        """Every event so far; a line that is still being written is left out."""
        text = self.events_path.read_text() if text is None and self.events_path.exists() else text or ""
        return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]

    def event(self, name, within=30.0):
        """Wait for an event in the file, and return it."""

        def look():
            assert self.process.poll() is None or self.named(name), f"ended without {name}: {self.err}"
            return self.named(name)

        return poll(look, within)[0]

    def named(self, name):
        return [event for event in self.events() if event["event"] == name]

    def ask(self, number=signal.SIGINT):
        self.process.send_signal(number)

    def wait(self, within=30.0):
        return self.process.wait(within)

    def end(self):
        """End what the test left running, by its mark; what is found then was left by hangguard if it had ended."""
        had_ended = self.process.poll() is not None
        deadline = time.monotonic() + 3.0
        while had_ended and marked(self.mark) and time.monotonic() < deadline:
            time.sleep(0.05)
        left = [pid for pid in marked(self.mark) if pid != self.process.pid]
        for pid in (*left, *([] if had_ended else [self.process.pid])):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(10)
        assert not (had_ended and left), f"left behind: {left}"


@contextmanager
def hangguard(folder, *words, **how):
    """Run ``hangguard WORDS``; at the end nothing of it may be there."""
    running = Running(folder, [str(word) for word in words], **how)
    try:
        yield running
    finally:
        running.end()


def run(folder, *words, command=None, events=True, **how):
    """``hangguard run WORDS -- COMMAND`` with its events in a file."""
    given = ["--events", folder / "events"] if events else []
    return hangguard(folder, "run", *given, *words, "--", *(small() if command is None else command), **how)
