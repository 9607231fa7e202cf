"""Servers that the tests look at: started by the test itself, with their output in a file, and ended with it."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import psutil
from commands import poll

from hangguard.observe.ports import free_port
from hangguard.observe.procfs import read_started
from hangguard.testing import little_server_command

AS_NOBODY = (
    "setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups",
    "--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search",
)  # fmt: skip
"""Another user who can still read the interpreter, wherever that lies; what belongs to processes he may not see."""


class Started:
    """A server in a session of its own."""

    def __init__(self, folder, command, *, inside=(), env=None, port=0, out="log"):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.port = folder, port
        self.url = f"http://127.0.0.1:{port}"
        self.log = folder / "log"
        self.log.touch()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [*inside, *command],
                stdin=subprocess.DEVNULL,
                stdout=log if out == "log" else out,
                stderr=log if out == "log" else out,
                cwd=folder,
                env={**os.environ, **(env or {})},
                start_new_session=True,
            )
        self.pid = self.process.pid
        self.started = read_started(self.pid)

    def says(self, text, times=1):
        """Wait until its log has the text."""
        poll(lambda: self.log.read_text(errors="replace").count(text) >= times, 30.0)
        return self

    def members(self):
        root = psutil.Process(self.pid)
        return [self.pid, *sorted(child.pid for child in root.children(recursive=True))]

    def states(self):
        """Of every thread of every member: the tracer, the pending signals, and whether it is stopped.

        Not what it blocks: a thread that is being made blocks everything for a moment.
        """
        found = {}
        for pid in self.members():
            for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
                lines = Path(f"/proc/{pid}/task/{task}/status").read_text().splitlines()
                kept = ("TracerPid", "SigPnd", "ShdPnd", "SigIgn", "SigCgt", "PPid")
                found[pid, int(task)] = [line for line in lines if line.startswith(kept)]
                found[pid, int(task)] += ["stopped"] if any(line.startswith("State:\tT") for line in lines) else []
        return found

    def end(self):
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            pass
        self.process.wait(10)


@contextmanager
def started(folder, command, **how):
    made = Started(folder, command, **how)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def little(folder, **options):
    """A little server; ``how`` are the options of :class:`Started`."""
    how = {name: options.pop(name) for name in ("inside", "env", "out") if name in options}
    port = options.pop("port", None) or free_port()
    quick = {"phase_seconds": 0.02, "hold_mb": 1, "tp": 2, "port": port}
    with started(folder, little_server_command(**{**quick, **options}), port=port, **how) as made:
        yield made


def python(folder, program, *words, **how):
    """A program of a test's own, from a file: its text shall not stand in its command line."""
    folder.mkdir(parents=True)
    (folder / "program.py").write_text(program)
    return started(folder, [sys.executable, str(folder / "program.py"), *map(str, words)], **how)


def wait_until(condition, within=10.0):
    ends = time.monotonic() + within
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)
