"""The folder of a run is made when the run begins; one in which nothing was ever launched is known, and can go."""

import fcntl
import os
import sys

import pytest
from faces import plain
from runs_said import hangguard, listed  # noqa: F401 - fixtures

from hangguard import clean_up, supervise
from hangguard.store import MARKER, open_run_folder


def test_nothing_is_made_before_the_block_is_entered_and_then_under_the_id_that_was_told(tmp_path):
    supervision = plain(tmp_path)
    assert not (tmp_path / "runs").exists()
    assert (supervision.folder, supervision.log_path(1)) == (None, None)
    with supervision:
        assert [path.name for path in (tmp_path / "runs").iterdir()] == [supervision.run_id]
        assert supervision.folder == str(tmp_path / "runs" / supervision.run_id)
    supervise(["sleep", "1"], url="http://127.0.0.1:1", run_dir=tmp_path / "others")
    assert not (tmp_path / "others").exists()


def test_a_relative_place_is_that_of_the_call(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    supervision = supervise(command, url="http://127.0.0.1:{port}", run_dir="runs")
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    with supervision:
        assert supervision.folder == str(tmp_path / "runs" / supervision.run_id)


def test_a_command_line_that_is_refused_leaves_no_folder(tmp_path, hangguard):  # noqa: F811
    words = ("run", "--url", "http://127.0.0.1:1", "--run-dir", tmp_path / "runs")
    code, _, said = hangguard(*words, "--events", "/nonexistent/x", "--", "sleep", "1")
    assert (code, "/nonexistent/x" in said) == (2, True)
    assert not (tmp_path / "runs").exists()


def test_a_folder_without_a_run_is_told_as_never_started_and_goes(tmp_path, hangguard, listed):  # noqa: F811
    left = open_run_folder(tmp_path / "runs")
    path = left.path
    assert listed(tmp_path / "runs", "--all")[left.run_id]["standing"] == "unreadable"  # we have it, and may begin
    del left
    (row,) = listed(tmp_path / "runs", "--all").values()
    assert row["standing"] == "never started"
    assert listed(tmp_path / "runs") == {}
    code, out, _ = hangguard("clean", path)
    assert (code, os.path.isdir(path)) == (0, True)
    assert "would be removed" in out
    assert "To do it:" in out
    code, out, _ = hangguard("clean", "--yes", "--run-dir", tmp_path / "runs")
    assert (code, os.path.exists(path)) == (0, False)
    assert "1 folder of a run that never started" in out


@pytest.mark.parametrize("kept", ["a log", "a file of the user's", "a lock on the mark", "no mark", "another's mark"])
def test_a_folder_stays_in_which_there_is_anything_or_that_somebody_has(tmp_path, kept):
    left = open_run_folder(tmp_path / "runs")
    path, run_id = left.path, left.run_id
    del left
    mark = os.path.join(path, MARKER)
    held = None
    if kept == "a log":
        open(os.path.join(path, "attempt-1.log"), "w").close()
    elif kept == "a file of the user's":
        open(os.path.join(path, "notes.txt"), "w").close()
    elif kept == "a lock on the mark":
        held = open(mark)
        fcntl.flock(held, fcntl.LOCK_SH)
    elif kept == "no mark":
        os.unlink(mark)
    else:
        with open(mark, "w") as file:
            file.write('{"run": "20260101-000000-abcdef"}')
    report = clean_up(path, really=True)
    (item,) = report.items
    assert (item.name, item.answer) == (run_id, "unknown")
    assert os.path.isdir(path)
    clean_up(really=True, run_dir=tmp_path / "runs")
    assert os.path.isdir(path)
    if held is not None:
        held.close()
