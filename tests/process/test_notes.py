"""The state file is there before the first process is, and whole whenever its writer is killed."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import commands
import pytest
from faces import little
from left import launched
from seen import until_sync

from hangguard import GuardianFailed, supervise
from hangguard.facts import RunState, Unseen
from hangguard.run_state import STATE, list_runs, read_run


def test_before_the_first_process_is_started_it_says_what_will_be(tmp_path, monkeypatch):
    """The guardian is a program here that only copies what it finds, and ends."""
    spy = tmp_path / "spy.py"
    states = f"{str(tmp_path)!r} + '/runs/*/{STATE}'"
    spy.write_text(f"import glob, shutil\nfor file in glob.glob({states}): shutil.copy(file, {str(tmp_path)!r})")
    monkeypatch.setattr("hangguard.act._link.GUARDIAN", str(spy))
    with pytest.raises(GuardianFailed), supervise(little(), run_dir=tmp_path / "runs"):
        pass
    (run,) = list_runs(tmp_path / "runs")
    os.replace(tmp_path / STATE, Path(run.path) / STATE)  # as it was when the guardian began
    state = read_run(run.path).state
    assert isinstance(state, RunState)
    assert (state.stage, state.guardian, state.root, state.members) == ("starting", None, None, ())
    assert state.supervisor[0] == os.getpid()
    assert "hangguard.testing.server" in state.command
    assert state.port


def test_it_follows_the_run_to_its_end(tmp_path):
    with supervise(little(), run_dir=tmp_path / "runs") as server:
        (run,) = list_runs(tmp_path / "runs")
        state = until_sync(lambda: (now := read_run(run.path).state).stage == "ready" and now)
        assert state.root[0] == server.pid
        assert state.url == server.url
        assert {pid for pid, _ in state.members} >= {server.pid}
        assert state.log_id == ((found := os.stat(server.attempt.log_path)).st_dev, found.st_ino)
    state = read_run(run.path).state
    assert (state.stage, state.outcome, state.left_behind) == ("over", "stopped as asked", ())


def test_whenever_its_writer_is_killed_it_is_whole(tmp_path):
    program = (
        "import sys\n"
        "from hangguard.facts import RunState\n"
        "from hangguard.run_state import this_place, write_state\n"
        "from hangguard.store import open_run_folder\n"
        "folder, n = open_run_folder(sys.argv[1]), 0\n"
        "while True:\n"
        "    n += 1\n"
        "    write_state(folder, RunState(run_id=folder.run_id, place=this_place(), began=0.0, supervisor=(1, n),\n"
        "        members=tuple((i, n) for i in range(n % 500))))\n"
    )
    dice = random.Random()
    for _ in range(4):
        base = tmp_path / f"{time.monotonic_ns()}"
        writer = subprocess.Popen([sys.executable, "-c", program, str(base)])
        try:
            (run,) = until_sync(lambda base=base: [run for run in list_runs(base) if not isinstance(run.state, Unseen)])
            time.sleep(dice.uniform(0.0, 0.1))  # a point in time, not a thing to wait for
        finally:
            writer.send_signal(signal.SIGKILL)
            writer.wait()
        state = read_run(run.path).state
        assert isinstance(state, RunState)
        assert all(started == state.supervisor[1] for _, started in state.members)


def test_a_disk_that_takes_nothing_is_said_and_keeps_no_server_from_its_start(tmp_path, monkeypatch):
    def full(folder, state):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hangguard.supervision.notes.write_state", full)
    told = []
    with supervise(little(), run_dir=tmp_path / "runs", hooks=[told.append]) as server:
        assert server.poll() is None
    texts = [event.text for event in told if event.event == "notice"]
    assert any("could not be noted: No space left" in text for text in texts)


def test_a_command_with_a_secret_leaves_none_in_it(tmp_path):
    command = [*commands.small(), "--api-key", "very-secret-word"]
    with commands.run(tmp_path, "--run-dir", tmp_path / "runs", command=command) as running:
        found = until_sync(lambda: launched(tmp_path / "runs", running.process.pid), within=30.0)
        assert b"very-secret-word" not in (Path(found.path) / STATE).read_bytes()
        running.ask()
        running.wait()
