"""A run is found by its id, by the beginning of that, and by the path of its folder; never a wrong one."""

import os

import pytest

from hangguard.facts import FoundRun, Unseen
from hangguard.run_state import find_run

NEWER, OLDER = "20260102-030405-aaaaaa", "20260102-030405-a1b2c3"


@pytest.fixture
def base(tmp_path):
    for name in (OLDER, NEWER, "20251231-000000-000000", "notes"):
        (tmp_path / name).mkdir(mode=0o700)
    return tmp_path


def test_a_run_is_found_by_its_id_by_a_beginning_that_only_it_has_and_by_its_path(base, monkeypatch):
    for name in (NEWER, "20260102-030405-aa", str(base / NEWER), str(base / NEWER) + "/"):
        found = find_run(name, base)
        assert isinstance(found, FoundRun)
        assert (found.run_id, found.path) == (NEWER, str(base / NEWER))
    monkeypatch.chdir(base)
    assert find_run(f"./{NEWER}").path == str(base / NEWER)
    assert find_run(NEWER).path == str(base / NEWER)  # as the shell completes it


def test_a_beginning_of_several_gives_all_of_them_newest_first(base):
    assert [run.run_id for run in find_run("20260102", base)] == [NEWER, OLDER]


@pytest.mark.parametrize("name", ["", "2027", "notes-", "20260102-030405-aaaaaa0", "/no/such/folder", "a\0b", "a\0/b"])
def test_what_no_run_is_called_is_said_and_nothing_else_is_found(base, name):
    found = find_run(name, base)
    assert isinstance(found, Unseen)
    assert "/" in name or "\0" in name or str(base) in found.reason


def test_a_folder_of_something_else_is_said_to_be_none_of_a_run(base):
    found = find_run(str(base / "notes"), base)
    assert found == Unseen(f"{base / 'notes'} is no run folder: no state.json is seen in it")
    (base / "notes" / "state.json").write_text("{")  # as a run that had to be made in a temporary place has one
    assert isinstance(find_run(str(base / "notes"), base), FoundRun)


def test_a_folder_that_cannot_be_listed_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    assert isinstance(find_run("2026", tmp_path / "file"), Unseen)
    assert isinstance(find_run("2026", tmp_path / "missing"), Unseen)
    assert isinstance(find_run("x" * 5000 + os.sep, tmp_path), Unseen)
