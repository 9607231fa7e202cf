"""What the tests of the two faces share: quick servers, users' programs, and looks at what is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import psutil
from seen import until_sync

from hangguard import Limits, supervise
from hangguard.testing import little_server_command

PROGRAMS = Path(__file__).with_name("programs")
PLAIN = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
"""The quickest server there is."""


def little(**options):
    return little_server_command(**{"phase_seconds": 0.02, "hold_mb": 2, "tp": 1, **options})


def plain(folder, command=None, **options):
    """Supervise a plain web server, of which nothing is known but its URL."""
    options.setdefault("url", "http://127.0.0.1:{port}")
    return supervise(command or PLAIN, cwd=folder, run_dir=folder / "runs", **options)


def complete(url, key=None):
    """Ask for a real completion."""
    body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 4}).encode()
    request = urllib.request.Request(url + "/v1/completions", body, {"Content-Type": "application/json"})
    if key:
        request.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(request, timeout=10) as answer:
        return json.load(answer)["choices"][0]["text"]


def fetch(url):
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.status


def run_ids(folder):
    """The ids of the runs whose folders are below."""
    runs = folder / "runs"
    return {entry.name for entry in runs.iterdir()} if runs.exists() else set()


def living_of_runs(folder):
    """Every living process whose environment names one of these runs."""
    wanted = {f"HANGGUARD_RUN_ID={run_id}".encode() for run_id in run_ids(folder)}
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted & set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def is_gone(process):
    """As psutil sees it, not we."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class User:
    """A user's program in a session of its own; what it started is ended with the test, whatever happens."""

    def __init__(self, folder, face="sync", mode="serve", *, server=None, limits=None):
        folder.mkdir(exist_ok=True, parents=True)
        self.folder = folder
        asked = {"face": face, "folder": str(folder), "mode": mode, "server": server or {}, "limits": limits or {}}
        self.command = [sys.executable, str(PROGRAMS / "face_user.py"), json.dumps(asked)]
        with (folder / "stderr").open("wb") as errors:
            self.process = subprocess.Popen(self.command, start_new_session=True, stderr=errors)
        self.seen = {}

    def has(self, name):
        return (self.folder / name).exists()

    def said(self, name, within=20.0):
        """Wait for what it writes under this name."""
        until_sync(lambda: self.has(name) or self.process.poll() is not None, within=within)
        assert self.has(name), (self.folder / "stderr").read_text()
        return (self.folder / name).read_text()

    def events(self):
        lines = (self.folder / "events").read_text().splitlines(keepends=True) if self.has("events") else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def has_told(self, event, **fields):
        return any(e["event"] == event and fields.items() <= e.items() for e in self.events())

    def until_told(self, event, within=20.0, **fields):
        until_sync(lambda: self.has_told(event, **fields) or self.process.poll() is not None, within=within)
        assert self.has_told(event, **fields), (self.folder / "stderr").read_text()

    def tree(self):
        """Everybody below it, remembered for good: the children of the guardian too."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen[child.pid, child.create_time()] = child
        return list(self.seen.values())

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)

    def ends(self, within):
        """Wait for its end, and return what it said then."""
        try:
            self.process.wait(within)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended within {within} s: {(self.folder / 'stderr').read_text()}") from None
        return json.loads(self.said("end"))

    def left(self):
        """Who of its tree still lives, the sleeping child of its own not counted."""
        known = {process.pid for process in self.seen.values() if not is_gone(process)}
        return (known | set(living_of_runs(self.folder))) - self.sleepers()

    def sleepers(self):
        """Its forked children: they have its command line, with our folder in it."""
        found = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != self.process.pid and self.command == process.cmdline():
                    found.add(process.pid)
        return found

    def close(self):
        self.process.kill()
        self.process.wait()
        for pid in self.sleepers():
            os.kill(pid, signal.SIGKILL)
        until_sync(lambda: not self.left(), within=30.0)  # by the guardian


def until_nothing_left(folder, within=5.0):
    until_sync(lambda: not living_of_runs(folder), within=within)


@contextlib.contextmanager
def takes_at_most(seconds):
    began = time.monotonic()
    yield
    assert time.monotonic() - began <= seconds


__all__ = ["Limits", "supervise"]
