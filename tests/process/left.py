# ruff: noqa: F811  fixtures are imported by their names
"""A run whose supervisor and guardian are dead: made by hand, or a real one whose two ends were killed."""

import fcntl
import os
import secrets
import signal
import subprocess
import time
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import commands
import psutil
import pytest
from faces import is_gone
from seen import until_sync
from test_guardian import keep  # noqa: F401 - fixture

from hangguard import clean_up
from hangguard.act import _membership
from hangguard.facts import HeldFile, RunState, Unseen
from hangguard.run_state import list_runs, read_run, this_place, write_state
from hangguard.store import open_run_folder

SLEEP = ["/bin/sleep", "100"]


def identity(process):
    return _membership.read_entry(process.pid).identity


def nobody():
    """(pid, start time) of a process that has ended, and was waited for."""
    process = subprocess.Popen(["/bin/true"])
    who = identity(process)
    process.wait()
    return who


class Made:
    """A run made by hand; its server is a sleeper, started as a guardian would."""

    def __init__(self, base, keep, *, argv=SLEEP, env=None):
        self.folder = open_run_folder(base)
        self.run_id, self.path = self.folder.run_id, Path(self.folder.path)
        self.keep = keep
        self.log = os.open(self.path / "attempt-1.log", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        fcntl.flock(self.log, fcntl.LOCK_EX)
        self.server = self.start(argv, stdout=self.log, env=env)
        found = os.fstat(self.log)
        self.state = RunState(
            run_id=self.run_id,
            place=this_place(),
            began=time.time(),
            stage="ready",
            supervisor=nobody(),
            guardian=nobody(),
            root=identity(self.server),
            members=(identity(self.server),),
            log_id=(found.st_dev, found.st_ino),
            shm_before=(),
        )
        self.note()

    def start(self, argv=SLEEP, *, stdout=subprocess.DEVNULL, env=None, **how):
        process = subprocess.Popen(
            argv, stdout=stdout, stderr=stdout, env={**os.environ, **(env or {})}, start_new_session=True, **how
        )
        self.keep(process)
        return process

    def note(self, **changed):
        self.state = replace(self.state, **changed)
        write_state(self.folder, self.state)

    def file(self, name=None, *, noted=True, content=b"x" * 4096, **fields):
        """A file of shared memory that a member was seen to have, and has no more."""
        path = Path("/dev/shm") / (name or f"psm_{secrets.token_hex(6)}")
        path.write_bytes(content)
        if noted:
            self.note(files=(*self.state.files, self.held(path, **fields)))
        return path

    def held(self, path, *, kind="file", how="shared", **fields):
        found, (pid, started) = path.lstat(), self.state.root
        made = found.st_mtime_ns if kind == "socket" else 0
        return HeldFile(
            **{
                "path": str(path), "device": found.st_dev, "inode": found.st_ino, "kind": kind, "held": how,
                "pid": pid, "started": started, "made_ns": made, **fields,
            }
        )  # fmt: skip


@contextmanager
def killed(folder, command, *words, until=lambda run: True):
    """Run ``hangguard run`` until ``until``, and kill its supervisor and its guardian in the same instant."""
    folder.mkdir(exist_ok=True)
    base = folder / "runs"
    with commands.run(folder, "--run-dir", base, *words, command=command) as running:
        running.event("launched")
        found = until_sync(lambda: launched(base, running.process.pid), within=30.0)
        family = psutil.Process(found.state.guardian[0]).children(recursive=True)
        until_sync(lambda: until(running), within=30.0)
        family = {*family, *psutil.Process(found.state.guardian[0]).children(recursive=True)}
        os.kill(found.state.guardian[0], signal.SIGSTOP)  # so that it does not notice the first death before its own
        for pid in (running.process.pid, found.state.guardian[0]):
            os.kill(pid, signal.SIGKILL)
        running.process.wait()
        until_sync(lambda: not _membership.is_alive(found.state.guardian))
        yield read_run(found.path), {process for process in family if not is_gone(process)}


def launched(base, supervisor):
    """The run of this supervisor, once it has noted what it launched."""
    runs = [run for run in list_runs(base) if not isinstance(run.state, Unseen)]
    mine = (run for run in runs if run.state.supervisor[0] == supervisor and run.state.root is not None)
    return next(mine, None)


@pytest.fixture
def made(tmp_path, keep):
    return Made(tmp_path / "runs", keep)


@pytest.fixture
def bystander(made, tmp_path):
    """Everybody who looks like a member, for one reason each, and is none. All live at the end."""
    log, mark = made.path / "attempt-1.log", f"HANGGUARD_RUN_ID={made.run_id}"
    found = {
        "reads the log": made.start(["tail", "-f", str(log)]),
        "opened the log himself": made.start(["sh", "-c", f"exec sleep 100 >>'{log}' 2>&1"]),
        "has another run's mark": made.start(env={"HANGGUARD_RUN_ID": f"{made.run_id}0"}),
        "has the mark as the end of another": made.start(env={"MY_HANGGUARD_RUN_ID": made.run_id}),
        "has the mark in its words": made.start(["sh", "-c", f": {mark}; sleep 100; :"]),
        "has the words of the server": made.start(),
    }
    until_sync(lambda: os.path.samefile(f"/proc/{found['opened the log himself'].pid}/fd/1", log))
    yield found
    assert {name for name, process in found.items() if process.poll() is not None} == set()


@pytest.fixture
def in_shm():
    found = []
    yield found.append
    for path in found:
        path.unlink(missing_ok=True)


def cleaned(made, *, really=True):
    return clean_up(str(made.path), really=really)


def of(report, what):
    return [item for item in report.items if item.what == what and item.whose != "unknown"]


def is_over(made):
    return read_run(str(made.path)).state.outcome == "cleaned up"


def below(process):
    return _membership.descendants([process.pid], _membership.read_entries())
