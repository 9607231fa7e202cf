"""Everything refused at once: the server starts, answers, is stopped with proof, and nobody else is touched."""

import json
import signal
from pathlib import Path

import pytest
from lockdown import ALL, HIDDEN, run_locked, told_of

from hangguard.learned import default_path
from hangguard.store import open_run_folder


@pytest.mark.long
def test_locked_down_in_every_way_a_server_starts_and_is_stopped_and_what_cannot_be_seen_is_said(tmp_path):
    told = told_of(tmp_path, ALL, {"name": "it"}, backend="trio")["it"]
    assert told["answer"]
    assert told["log_path"] is None
    assert any("this run has no log" in notice for notice in told["notices"])
    assert any("no home folder" in notice for notice in told["notices"])
    assert any(line.startswith("log: ") for line in told["verdict"]["unseen"])
    assert told["release"]["answer"] == "released"


def test_members_that_proc_hides_are_unseen_and_asked_to_end_before_they_are_killed(tmp_path):
    """What is hidden is not gone, not still, and has nothing "released" that could not be looked at."""
    told = told_of(tmp_path, ["hidden-pids"], {"name": "it", **HIDDEN})["it"]
    assert told["answer"]
    assert told["exit_code"] != -signal.SIGKILL
    assert "/proc hides members" in told["unseen"]["tree"]
    assert any(line.startswith("processes: /proc hides members") for line in told["verdict"]["unseen"])
    items = told["release"]["items"]
    assert items["processes"][0] == "released"  # the guardian's own list of children is empty: that is a proof
    assert items["files"][0] == "unknown"
    assert "/proc hides members" in items["files"][1]


def test_a_table_is_given_where_nothing_can_be_looked_at(tmp_path):
    command = ["-m", "hangguard", "preflight", "--json", "--", "/bin/sh", "-c", "exit", "{port}"]
    said = run_locked(tmp_path / "preflight", ALL, [*command])
    found = json.loads(said.out)
    answers = {check["what"]: check["answer"] for check in found["checks"]}
    assert "Traceback" not in said.err
    assert said.code == 0
    assert {what for what, answer in answers.items() if answer == "missing"} >= {"log and evidence", "pidfds"}
    assert answers["processes"] == "poor"


def test_without_a_home_no_folder_of_that_name_is_made(tmp_path, monkeypatch):
    """An older platformdirs then gives "~/…", which is a place below the working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("platformdirs.user_state_dir", lambda *_, **__: "~/.local/state/hangguard")
    folder = open_run_folder()
    assert "no home folder" in folder.lost[0]
    assert default_path() is None
    assert not list(tmp_path.iterdir())
    folder = Path(folder.path)
    folder.rmdir()
