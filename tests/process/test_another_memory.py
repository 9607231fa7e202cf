# ruff: noqa: F811  fixtures are imported by their names
"""A file of shared memory goes only in the very /dev/shm that the run had: elsewhere its number is a stranger's."""

import json
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from left import bystander, cleaned, in_shm, keep, made, of  # noqa: F401 - fixtures

from hangguard.act.leftovers import look_at_runs
from hangguard.run_state import STATE, read_run, this_place


def test_through_another_mount_of_the_same_memory_it_is_removed_too(made, in_shm):
    """Whoever cleans may be in a mount namespace of his own: a service, a sandbox."""
    file = made.file()
    in_shm(file)
    program = f"import hangguard; print(hangguard.clean_up({str(made.path)!r}, really=True).answer)"
    words = ["unshare", "--mount", sys.executable, "-c", program]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "released\n"
    assert not file.exists()


def moved(made, **place):
    made.note(place=replace(this_place(), **place))


@pytest.mark.parametrize(
    ("place", "whose", "says"),
    [
        ({"shared_memory": "27:1234"}, "somebody else's", "another /dev/shm than the run had"),
        ({"shared_memory": None}, "unknown", "the run did not note which /dev/shm it had"),
    ],
)
def test_what_is_not_surely_the_runs_own_is_listed_and_left_under_whatever_name(
    made, bystander, in_shm, place, whose, says
):
    stranger, renamed, pool = made.file(), made.file(), made.file(kind="pool")
    other = renamed.with_name(f"{renamed.name}-renamed")
    renamed.rename(other)
    for path in (stranger, other, pool):
        in_shm(path)
    moved(made, **place)
    report = cleaned(made)
    items = {item.name: item for item in report.items if item.what in {"file", "pool"} and item.name != "/dev/shm"}
    assert set(items) == {str(stranger), str(other), str(pool)}
    assert {item.whose for item in items.values()} == {whose}
    assert all(says in item.proof for item in items.values())
    assert all(path.exists() for path in (stranger, other, pool))
    assert report.left_behind == ()
    assert made.server.wait(5) == -signal.SIGTERM  # pid and start time mean the same
    (now,) = look_at_runs([read_run(str(made.path))])
    assert bool(now.files) == (whose == "unknown")  # what is surely a stranger's is not said to be left behind
    assert report.answer == "unknown"


def test_what_is_known_by_its_time_too_is_removed_there(made, tmp_path):
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
    made.note(files=(made.held(path, kind="socket", how="bound"),))
    moved(made, shared_memory="27:1234")
    cleaned(made)
    assert not path.exists()


def test_a_state_file_of_an_older_version_is_read_and_its_processes_are_ended(made, in_shm):
    file = made.file()
    in_shm(file)
    document = json.loads((made.path / STATE).read_text())
    for name in ("first_started", "shared_memory"):
        del document["place"][name]
    (made.path / STATE).write_text(json.dumps(document))
    report = cleaned(made)
    assert made.server.wait(5) == -signal.SIGTERM
    assert file.exists()
    (item,) = [item for item in report.items if item.name == str(file)]
    assert f"rm -- {file}" in item.proof


def test_in_a_later_namespace_of_the_same_number_nothing_is_touched(made, in_shm):
    file = made.file()
    in_shm(file)
    moved(made, first_started=(this_place().first_started or 0) + 1)
    report = cleaned(made)
    (item,) = report.items
    assert "another pid namespace" in item.proof
    assert made.server.poll() is None
    assert file.exists()


def test_the_place_is_told_by_the_kernel_and_what_is_hidden_is_unseen():
    here = this_place()
    assert here.first_started == int(Path("/proc/1/stat").read_text().rpartition(")")[2].split()[19])
    assert here.shared_memory == this_place().shared_memory is not None
    program = "from hangguard.run_state import this_place as p; print(p().first_started, p().shared_memory)"
    hidden = 'mount -t tmpfs none /proc/1 && mount -t tmpfs -o mode=0 none /dev && exec "$@"'
    words = ["unshare", "--mount", "sh", "-c", hidden, "sh", sys.executable, "-c", program]
    done = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "None None\n"
