"""A run whose state file says nothing, or no longer what is true: it is reached, and told of, all the same."""

import json
import os
import signal
from pathlib import Path

from commands import poll
from test_detach import detached, folder_of, state_of, stop, told, words_of

from hangguard.act._membership import read_entry
from hangguard.run_state import read_run


def damage(folder):
    (folder / "state.json").write_text('{"schema": 1,')


def is_gone(pid):
    entry = read_entry(pid)
    return entry is None or entry.dead


def test_a_living_run_with_a_damaged_state_file_is_asked_mended_and_stopped(tmp_path):
    with detached(tmp_path) as (_, run_id, url):
        folder = folder_of(tmp_path)
        before = state_of(folder)
        damage(folder)
        code, out, _ = told(tmp_path, "status", run_id)
        assert (code, words_of(out)["stage"], words_of(out)["url"]) == (0, "ready", url)
        assert words_of(out)["told"] == "by supervisor"
        poll(lambda: not hasattr(read_run(str(folder)).state, "reason"))  # it was written again
        assert state_of(folder)["root"] == before["root"]
        damage(folder)
        code, out, err = told(tmp_path, "clean", run_id, "--yes")
        assert code == 21
        assert "hangguard stop" in " ".join((out + err).split())
        assert not is_gone(before["root"][0])
        code, out, _ = stop(tmp_path, run_id)
        assert (code, words_of(out)["stopped"]) == (0, run_id)
        assert is_gone(before["root"][0])
        assert state_of(folder)["stage"] == "over"


def test_where_nobody_answers_the_guardian_is_named_and_nothing_is_signalled(tmp_path):
    with detached(tmp_path, "--on-death", "keep") as (_, run_id, _url):
        folder = folder_of(tmp_path)
        state = state_of(folder)
        guardian, root = state["guardian"][0], state["root"][0]
        os.kill(state["supervisor"][0], signal.SIGKILL)
        poll(lambda: is_gone(state["supervisor"][0]))
        whole = (folder / "state.json").read_bytes()
        damage(folder)
        code, out, err = stop(tmp_path, run_id)
        assert (code, out) == (22, "")
        assert f"Its guardian is pid {guardian}; it ends its server when it gets SIGTERM: kill {guardian}" in err
        assert "Expecting" not in err  # the parser's own words
        assert not is_gone(guardian)
        assert not is_gone(root)
        os.kill(guardian, signal.SIGTERM)
        poll(lambda: is_gone(guardian) and is_gone(root))
        code, _, err = stop(tmp_path, run_id)
        assert code == 22
        assert "guardian" not in err
        (folder / "state.json").write_bytes(whole)


def test_whoever_holds_another_lock_is_no_guardian(tmp_path):
    """A process that has the folder's lock open, and not locked, is named by nobody."""
    folder = tmp_path / "20260101-000000-abcdef"
    folder.mkdir(mode=0o700)
    damage(folder)
    with (folder / "lock").open("w"):
        code, _, err = told(tmp_path, "stop", str(folder))
    assert code == 22
    assert "guardian" not in err
    assert "hangguard clean" in err


def test_a_dead_run_is_not_said_to_be_ready(tmp_path):
    with detached(tmp_path, "--on-death", "keep") as (_, run_id, url):
        folder = folder_of(tmp_path)
        state = state_of(folder)
        for who in ("supervisor", "guardian"):
            os.kill(state[who][0], signal.SIGKILL)
            poll(lambda who=who: is_gone(state[who][0]))
        root = state["root"][0]
        code, out, _ = told(tmp_path, "status", run_id)
        assert code == 14
        assert words_of(out)["stage"] == "left behind"
        assert "url" not in words_of(out)
        assert "verdict" not in words_of(out)
        assert url not in out
        code, out, _ = told(tmp_path, "status", run_id, "--json")
        document = json.loads(out)
        assert document["state"]["stage"] == "left behind"
        assert (document["state"]["url"], document["state"]["verdict"]) == ("", "")
        assert told(tmp_path, "clean", run_id, "--yes")[0] == 0
        assert is_gone(root)
        assert words_of(told(tmp_path, "status", run_id)[1])["stage"] == "over"
        assert Path(folder).is_dir()
