"""The state file is read with distrust: whatever is wrong with it is said, nothing is touched, nothing raises."""

import json
import os
import random
from dataclasses import asdict, replace

import pytest

from hangguard.act.leftovers import look_at_runs
from hangguard.facts import HeldFile, RunState, Unseen
from hangguard.run_state import (
    MOST_BYTES,
    SCHEMA,
    STATE,
    is_same_memory,
    list_runs,
    read_run,
    this_place,
    why_elsewhere,
    write_state,
)
from hangguard.store import open_run_folder

NO_STATES = [
    "1", "[]", "null", '"x"', "{}", '{"schema": 1}', "NaN", '{"schema": 1, "run_id": 5}', "\ufeff{}", "{'schema': 1}",
]  # fmt: skip


NASTY = (
    "1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1e308", str(10**400), str(-(10**400)), "1" * 5000,
    str(1 << 64), str(1 << 63), "-1", "0", "true", "false", "null", '"' + "9" * 100_000 + '"', '"\\u0000"',
    '"\\ud800"', "[]", "{}", "[[[]]]", "1.5", "-0.0",
)  # fmt: skip
"""What JSON may hold where a number should be."""


@pytest.fixture
def folder(tmp_path):
    return open_run_folder(tmp_path / "runs")


def state_of(folder, **more):
    file = HeldFile(path="/dev/shm/x", device=1, inode=2, kind="file", held="shared", pid=3, started=4)
    return RunState(
        run_id=folder.run_id, place=this_place(), began=1.5, supervisor=(2**22, 7), guardian=(2**22, 8),
        root=(2**22, 9),
        members=((2**22, 9),), log_id=(1, 2), shm_before=((3, 4),), files=(file,), gpus_before=(("GPU-1", 5),),
        socket_path=None, **more,
    )  # fmt: skip


def write(folder, text):
    with open(folder.file(STATE), "wb") as file:
        file.write(text if isinstance(text, bytes) else text.encode())
    os.chmod(folder.file(STATE), 0o600)


def why(folder):
    found = read_run(folder.path)
    assert found.run_id == folder.run_id
    assert isinstance(found.state, Unseen), found.state
    (now,) = look_at_runs([found])
    assert now.standing == "unreadable"
    assert now.why == found.state.reason
    return found.state.reason


def test_what_was_written_is_read_again_whole(folder):
    state = state_of(folder, command=("vllm", "serve", "\udcff\u00e9\u2028"), changes=("--x",))
    write_state(folder, state)
    assert read_run(folder.path).state == state
    assert [run.state for run in list_runs(os.path.dirname(folder.path))] == [state]
    assert os.stat(folder.file(STATE)).st_mode & 0o777 == 0o600


def test_cut_at_every_length_it_is_said_to_be_damaged(folder):
    write_state(folder, state_of(folder))
    with open(folder.file(STATE), "rb") as file:
        whole = file.read()
    for length in range(len(whole)):
        write(folder, whole[:length])
        assert "damaged" in read_run(folder.path).state.reason


def test_with_a_byte_changed_anywhere_it_is_read_or_refused_and_never_raises(folder):
    write_state(folder, state_of(folder))
    with open(folder.file(STATE), "rb") as file:
        whole = bytearray(file.read())
    dice = random.Random(15)
    for _ in range(300):
        changed = bytearray(whole)
        changed[dice.randrange(len(changed))] = dice.randrange(256)
        write(folder, bytes(changed))
        state = read_run(folder.path).state
        assert isinstance(state, (RunState, Unseen))


@pytest.mark.parametrize(
    "text", [*NO_STATES, random.Random(1).randbytes(5000), b"\0" * 100, "[" * 100_000, '{"a":' * 50_000]
)
def test_what_is_no_state_is_damaged(folder, text):
    write(folder, text)
    assert "damaged" in why(folder)


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"schema": SCHEMA + 1}, "another version"),
        ({"schema": None}, "another version"),
        ({"run_id": "20260101-000000-aaaaaa"}, "it is that of"),
        ({"stage": "flying"}, "stage"),
        ({"root": [1]}, "root"),
        ({"root": ["1", 2]}, "root"),
        ({"root": [True, 2]}, "root"),
        ({"members": [[1, 2, 3]]}, "members"),
        ({"members": {"1": 2}}, "members"),
        ({"port": 1.5}, "port"),
        ({"began": "now"}, "began"),
        ({"place": {"host": "h"}}, "not whole"),
        ({"files": [{"path": "/etc/passwd"}]}, "not whole"),
        ({"files": [{"path": "/etc/passwd", "kind": "disk"}]}, "kind"),
        ({"supervisor": None}, "supervisor"),
        ({"new": 1}, "not known here"),
    ],
)
def test_a_field_that_is_not_what_it_should_be_spoils_it(folder, changed, says):
    write(folder, json.dumps({"schema": SCHEMA, **asdict(state_of(folder)), **changed}))
    assert says in why(folder)


def places_in(value, path=()):
    """Yield the path of everything in a document: of each object's fields, and of each list's first item."""
    items = value.items() if isinstance(value, dict) else enumerate(value[:1]) if isinstance(value, list) else ()
    for name, inner in items:
        yield (*path, name)
        yield from places_in(inner, (*path, name))


def with_in_it(document, path, nasty):
    """Return the document as text, with something nasty in the place."""
    document = json.loads(json.dumps(document))
    inner = document
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = "here it goes"
    return json.dumps(document).replace('"here it goes"', nasty)


def test_with_a_nasty_number_anywhere_nothing_raises_and_the_other_runs_are_seen(folder):
    beside = open_run_folder(os.path.dirname(folder.path))
    write_state(beside, state_of(beside))
    document = json.loads(json.dumps({"schema": SCHEMA, **asdict(state_of(folder))}))
    damaged = 0
    for path in places_in(document):
        for nasty in NASTY:
            write(folder, with_in_it(document, path, nasty))
            found = read_run(folder.path)
            damaged += isinstance(found.state, Unseen)
    assert damaged > 100
    base = os.path.dirname(folder.path)
    folders = [open_run_folder(base) for _ in NASTY]
    for path in [
        ("began",),
        ("supervisor", 0),
        ("supervisor", 1),
        ("port",),
        ("shm_before", 0, 1),
        ("gpus_before", 0, 1),
    ]:
        for one, nasty in zip(folders, NASTY, strict=True):
            write(one, with_in_it({**document, "run_id": one.run_id}, path, nasty))
        runs = list_runs(base)
        assert isinstance({run.run_id: run.state for run in runs}[beside.run_id], RunState)
        assert {now.standing for now in look_at_runs(runs)} == {"over", "unreadable"}


@pytest.mark.parametrize("nasty", ["1e999", "NaN", "-Infinity", str(10**400), str(-(10**400))])
@pytest.mark.parametrize("path", [("began",), ("supervisor", 0), ("port",), ("log_id", 1)])
def test_a_number_that_nothing_can_have_is_damage(folder, path, nasty):
    document = json.loads(json.dumps({"schema": SCHEMA, **asdict(state_of(folder))}))
    write(folder, with_in_it(document, path, nasty))
    assert "damaged" in why(folder)


def test_the_largest_numbers_of_the_kernel_are_read(folder):
    most = (1 << 64) - 1
    state = replace(state_of(folder), log_id=(most, most), shm_before=((0, most),), exit_code=-9, began=-1.5)
    write_state(folder, state)
    assert read_run(folder.path).state == state


def test_a_state_of_before_the_place_told_of_shared_memory_is_read(folder):
    document = json.loads(json.dumps({"schema": SCHEMA, **asdict(state_of(folder))}))
    for name in ("first_started", "shared_memory"):
        del document["place"][name]
    write(folder, json.dumps(document))
    state = read_run(folder.path).state
    assert (state.place.first_started, state.place.shared_memory) == (None, None)
    assert why_elsewhere(state, this_place()) == ""
    assert is_same_memory(state, this_place()) is None


def test_what_is_too_large_is_not_read(folder):
    write_state(folder, state_of(folder))
    os.truncate(folder.file(STATE), MOST_BYTES + 1)
    assert "MiB large" in why(folder)


def test_without_a_state_file_it_says_so(folder):
    assert why(folder) == "it has no state file"


# ------------------------------------------------------------------------------------- planted by others


def planted(folder, how):
    path, other = folder.file(STATE), os.path.join(os.path.dirname(folder.path), "other")
    write_state(folder, state_of(folder))
    if how == "a symlink":
        os.rename(path, other)
        os.symlink(other, path)
    elif how == "with a second name":
        os.link(path, other)
    elif how == "a pipe":
        os.unlink(path)
        os.mkfifo(path)
    elif how == "a device":
        os.unlink(path)
        os.symlink("/dev/zero", path)
    elif how == "a folder":
        os.unlink(path)
        os.mkdir(path)
    elif how == "writable by others":
        os.chmod(path, 0o666)
    elif how == "in a folder that is open to others":
        os.chmod(folder.path, 0o750)
    elif how == "in a folder that is a symlink":
        os.rename(folder.path, other)
        os.symlink(other, folder.path)
    elif how == "of another user":
        os.chown(path, 65534, 65534)
    elif how == "in a folder of another user":
        os.chown(folder.path, 65534, 65534)


KINDS = (
    "a symlink", "with a second name", "a pipe", "a device", "a folder", "writable by others",
    "in a folder that is open to others", "in a folder that is a symlink",
)  # fmt: skip
BY_OTHERS = ("of another user", "in a folder of another user") if os.geteuid() == 0 else ()


@pytest.mark.parametrize("how", [*KINDS, *BY_OTHERS])
def test_what_others_could_have_planted_is_not_read(folder, how):
    planted(folder, how)
    assert why(folder)


def test_the_folder_of_a_run_in_a_temporary_place_is_found_by_its_path(folder, tmp_path):
    write_state(folder, state_of(folder))
    os.rename(folder.path, tmp_path / "hangguard-abc")
    assert read_run(str(tmp_path / "hangguard-abc")).run_id == folder.run_id


# -------------------------------------------------------------------------------------------- the place


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({}, ""),
        ({"boot_id": "x"}, "started again"),
        ({"boot_id": "x", "host": "h"}, "it ran on h"),
        ({"host": "h"}, ""),  # renamed, or a container that shares our pid namespace
        ({"pid_namespace": "pid:[1]"}, "another pid namespace"),
        ({"user": 12345}, "user 12345"),
        ({"first_started": 2**40}, "another pid namespace"),  # its number was given again
        ({"first_started": None}, ""),  # hidden then, or not noted
        ({"shared_memory": "0:1"}, ""),
    ],
)
def test_its_numbers_mean_something_only_where_they_were_noted(folder, changed, says):
    here = this_place()
    state = replace(state_of(folder), place=replace(here, **changed))
    said = why_elsewhere(state, here)
    assert says in said
    assert bool(said) == bool(says)


def test_a_state_that_is_replaced_while_it_is_read_is_whole(folder, monkeypatch):
    write_state(folder, state_of(folder))
    fstat = os.fstat

    def replaced(file):
        monkeypatch.setattr(os, "fstat", fstat)
        opened = fstat(file)  # of the folder, which is looked at first
        monkeypatch.setattr(
            os, "fstat", lambda file: (write_state(folder, state_of(folder, stage="ready")), fstat(file))[1]
        )
        return opened

    monkeypatch.setattr(os, "fstat", replaced)
    assert isinstance(read_run(folder.path).state, RunState)
