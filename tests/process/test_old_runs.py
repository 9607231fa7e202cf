"""Runs do not pile up, and nothing is deleted that is not provably an old run of ours."""

import fcntl
import json
import os
import subprocess
import sys
import time

import pytest
from disks import disk_bytes
from faces import little
from seen import until_sync
from test_guardian import keep  # noqa: F401 - fixture

from hangguard import supervise
from hangguard.act.old_runs import delete_in
from hangguard.store import CONTROL, MARKER, SUPERVISOR_LOG, mark_of, open_run_folder
from hangguard.supervision.control_socket import listen_in

ALL = {"newest": 0, "newest_bad": 0}
"""Every old run is one too many, but for the newest by bytes: there is none."""


@pytest.fixture
def home(tmp_path):
    made = tmp_path / "runs"
    made.mkdir(mode=0o700)
    return made


def old_run(home, number, *, bad=False, size=5000, says=None):
    """What a run leaves; the number is its age."""
    name = f"20260101-00{99 - number:02}00-{number:06x}"
    folder = home / name
    folder.mkdir(mode=0o700)
    (folder / MARKER).write_text(json.dumps({**mark_of(name), **(says or {})}))
    (folder / "lock").touch()
    (folder / "attempt-1.log").write_bytes(b"x" * size)
    if bad:
        (folder / "attempt-1.evidence.json").write_text("{}")
    return folder


def names(*folders):
    return tuple(folder.name for folder in folders)


# -------------------------------------------------------------------------------------------- the rule


def test_a_control_socket_that_a_killed_supervisor_left_goes_and_a_file_in_its_place_is_somebodys(home):
    left, other = old_run(home, 1), old_run(home, 2)
    listener, _ = listen_in(str(left))
    listener.close()
    (left / SUPERVISOR_LOG).write_text("READY")
    (other / CONTROL).write_text("mine")
    assert delete_in(str(home), **ALL) == names(left)
    assert (other / CONTROL).read_text() == "mine"


def test_the_newest_stay_and_of_those_before_them_the_newest_that_went_wrong(home):
    runs = [old_run(home, number, bad=number % 2 == 1) for number in range(12)]
    gone = delete_in(str(home), newest=3, newest_bad=2)
    kept = [*runs[:3], runs[3], runs[5]]
    assert set(gone) == {run.name for run in runs if run not in kept}
    assert {run.name for run in home.iterdir()} == set(names(*kept))
    assert delete_in(str(home), newest=3, newest_bad=2) == ()


def test_what_is_too_much_for_the_disk_goes_oldest_first_and_the_newest_stays(home):
    runs = [old_run(home, number, size=1 << 20) for number in range(5)]
    each = sum(map(disk_bytes, runs[0].iterdir()))
    assert delete_in(str(home), most_bytes=3 * each) == names(*runs[3:])
    assert delete_in(str(home), most_bytes=10) == names(*runs[1:3])
    assert [run.name for run in home.iterdir()] == [runs[0].name]


def test_a_new_run_in_the_state_folder_deletes_what_is_too_much(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    home = tmp_path / "hangguard" / "runs"
    home.mkdir(mode=0o700, parents=True)
    runs = [old_run(home, number) for number in range(25)]
    with supervise(little()) as server:
        assert not any(run.exists() for run in runs[20:])
        assert all(run.exists() for run in runs[:20])
        assert os.path.exists(server.attempt.log_path)


def test_a_folder_that_the_caller_chose_is_his_own_to_tidy(tmp_path):
    home = tmp_path / "runs"
    home.mkdir(mode=0o700)
    runs = [old_run(home, number) for number in range(25)]
    with supervise(little(), run_dir=home):
        pass
    assert all(run.exists() for run in runs)


# --------------------------------------------------------------------------------------- what is not ours


def untouched(home, folder):
    """What is in a folder, before and after an old run beside it was deleted."""
    before = sorted((path.name, path.lstat().st_ino) for path in folder.iterdir())
    beside = old_run(home, 90)
    assert delete_in(str(home), **ALL) == names(beside)
    assert folder.is_dir()
    assert sorted((path.name, path.lstat().st_ino) for path in folder.iterdir()) == before


def test_a_run_without_a_marker_stays(home):
    run = old_run(home, 1)
    (run / MARKER).unlink()
    untouched(home, run)


@pytest.mark.parametrize(
    "says", [{"run": "20260101-000000-abcdef"}, {"boot": "another", "host": "another"}, {"run": 5}]
)
def test_a_run_that_was_renamed_or_copied_or_is_another_machines_stays(home, says):
    untouched(home, old_run(home, 1, says=says))


def test_a_run_of_an_earlier_boot_of_this_machine_goes(home):
    run = old_run(home, 1, says={"boot": "an earlier one"})
    assert delete_in(str(home), **ALL) == names(run)


@pytest.mark.parametrize("mark", [b"", b"[]", b"{", b"\xff\xfe", b"null", b"7"])
def test_a_marker_that_says_nothing_keeps_its_folder(home, mark):
    run = old_run(home, 1)
    (run / MARKER).write_bytes(mark)
    untouched(home, run)


def test_a_folder_with_something_else_in_it_stays_whole(home):
    run = old_run(home, 1)
    (run / "my notes.txt").write_text("why it hung")
    untouched(home, run)
    run = old_run(home, 2)
    (run / "attempt-2.log").mkdir()
    untouched(home, run)


def test_a_link_is_neither_followed_nor_deleted(home, tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "attempt-1.log").write_text("of somebody else")
    run = old_run(home, 1)
    (run / "attempt-2.log").symlink_to(precious / "attempt-1.log")
    untouched(home, run)
    (home / "20260101-000000-000001").symlink_to(old_run(tmp_path, 3))
    assert delete_in(str(home), **ALL) == ()
    assert (home / "20260101-000000-000001").is_symlink()
    assert (precious / "attempt-1.log").read_text() == "of somebody else"


def test_a_marker_that_is_a_link_proves_nothing(home, tmp_path):
    run = old_run(home, 1)
    (run / MARKER).rename(tmp_path / "marker")
    (run / MARKER).symlink_to(tmp_path / "marker")
    untouched(home, run)


def test_a_folder_that_others_may_enter_or_own_stays(home):
    run = old_run(home, 1)
    run.chmod(0o755)
    untouched(home, run)
    run = old_run(home, 2)
    os.chown(run, 65534, 65534)
    untouched(home, run)
    run = old_run(home, 3)
    os.chown(run / "attempt-1.log", 65534, 65534)
    untouched(home, run)


def test_nothing_is_deleted_where_others_may_write(home):
    run = old_run(home, 1)
    home.chmod(0o777)
    assert delete_in(str(home), **ALL) == ()
    home.chmod(0o700)
    os.chown(home, 65534, -1)
    assert delete_in(str(home), **ALL) == ()
    assert run.exists()


def test_other_names_in_the_state_folder_are_not_looked_at(home):
    for name in ("notes", "20260101-000000", "20260101-000000-abcdef.kept", ".20260101-000000-abcdef"):
        folder = old_run(home, 5)
        folder.rename(home / name)
        (home / name / MARKER).write_text(json.dumps(mark_of(name)))
    assert delete_in(str(home), **ALL) == ()


# ------------------------------------------------------------------------------------------ what still runs


@pytest.mark.parametrize("file", [MARKER, "lock", "attempt-1.log"])
def test_a_run_of_which_anything_is_locked_stays(home, file):
    run = old_run(home, 1)
    with (run / file).open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_SH | fcntl.LOCK_NB)
        untouched(home, run)
    assert delete_in(str(home), **ALL) == names(run)


def test_a_log_that_a_forked_child_of_a_dead_holder_has_stays(home, keep):  # noqa: F811
    run = old_run(home, 1)
    with (run / "attempt-1.log").open("ab") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        child = subprocess.Popen(["/bin/sleep", "100"], stdout=held)
    keep(child)
    untouched(home, run)
    child.kill()
    child.wait()
    assert delete_in(str(home), **ALL) == names(run)


def test_a_run_stays_while_its_supervision_can_still_be_asked(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    home = str(tmp_path / "hangguard" / "runs")
    with supervise(little()) as server:
        assert delete_in(home, **ALL) == ()
    assert delete_in(home, **ALL) == ()
    assert list(server.log(follow=False)) if False else os.path.exists(server.attempt.log_path)
    made = open_run_folder()
    assert delete_in(home, **ALL) == ()
    del made, server
    until_sync(lambda: len(delete_in(home, **ALL)) >= 1)


def test_a_run_whose_supervisor_was_killed_goes_once_its_server_is_gone(tmp_path):
    program = (
        "import sys, time; sys.path.insert(0, sys.argv[1])\n"
        "from faces import little\n"
        "from hangguard import supervise\n"
        "with supervise(little(), on_death='stop') as server:\n"
        "    print(server.pid, flush=True)\n"
        "    time.sleep(100)\n"
    )
    env = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}
    command = [sys.executable, "-c", program, os.path.dirname(__file__)]
    user = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    try:
        pid = int(user.stdout.readline())
        home = str(tmp_path / "hangguard" / "runs")
        assert delete_in(home, **ALL) == ()
    finally:
        user.kill()
        user.wait()
        user.stdout.close()
    began = time.monotonic()
    until_sync(lambda: delete_in(home, **ALL) or not os.path.exists(f"/proc/{pid}"), within=30)
    assert not os.path.exists(f"/proc/{pid}"), f"deleted after {time.monotonic() - began} s while it lived"
    until_sync(lambda: not os.listdir(home) or delete_in(home, **ALL), within=30)
