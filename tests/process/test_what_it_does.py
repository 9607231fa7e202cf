"""All that a supervising program does to the world, as Python's own audit hears it.

The lines of the safety page about connections, programs, files and signals of this process, from its import to the
proof of the release. What the guardian does has tests of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from faces import PROGRAMS, little

from hangguard.observe.stacks import find_py_spy

WITHIN = 120
LOOPBACK = "127.0.0.1"


@pytest.fixture(
    scope="module", params=["a healthy start", pytest.param("a hang that is cured", marks=pytest.mark.long)]
)
def heard(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("audited")
    (folder / "somebody's").write_text("his")
    command = little(deadlock_at_capture=request.param != "a healthy start")
    env = {**os.environ, "XDG_STATE_HOME": str(folder / "state"), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, str(PROGRAMS / "audited_user.py"), str(folder / "runs"), *command]
    done = subprocess.run(words, env=env, cwd=folder, capture_output=True, text=True, timeout=WITHIN, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["attempts"]) == (1 if request.param == "a healthy start" else 2)
    assert {attempt["release"] for attempt in told["attempts"]} == {"released"}
    assert (folder / "somebody's").read_text() == "his"
    return {**told, "folder": folder}


def of_the_run(heard, path):
    """Whether a path lies where runs and lessons are kept."""
    folder = heard["folder"]
    return any(Path(path).is_relative_to(place) for place in (folder / "runs", folder / "state" / "hangguard"))


def test_it_connects_to_the_server_and_to_nccl_in_it_and_to_nobody_else(heard):
    hosts = {host for host, _ in heard["did"]["connects"]}
    ports = {port for _, port in heard["did"]["connects"]}
    assert hosts == {LOOPBACK}
    assert {attempt["port"] for attempt in heard["attempts"][-1:]} <= ports
    assert len(ports - {attempt["port"] for attempt in heard["attempts"]}) <= len(heard["attempts"])
    assert heard["did"]["asks for"] == []  # no name was looked up


def test_it_binds_ports_for_a_moment_and_listens_at_one_socket_in_its_folder(heard):
    ports = [place for place in heard["did"]["binds"] if isinstance(place, list)]
    sockets = [place for place in heard["did"]["binds"] if isinstance(place, str)]
    assert {host for host, _ in ports} == {LOOPBACK}
    assert {port for _, port in ports} <= {0, *(attempt["port"] for attempt in heard["attempts"])}
    assert [Path(place).name for place in sockets] == ["control.sock"]


def test_it_starts_helpers_of_its_own_and_nothing_else(heard):
    import hangguard

    own, helpers = Path(hangguard.__file__).parent, set()
    for words in heard["did"]["starts"]:
        program = next((word for word in words[1:] if not word.startswith("-")), "")
        if words[0] == sys.executable and Path(program).is_relative_to(own):
            helpers.add(Path(program).name)
        else:
            # trio looks for its thread library when httpx loads it: ctypes.util.find_library.
            assert words[0] == find_py_spy() or words == ["/sbin/ldconfig", "-p"], words
    # The kernel is asked about names that somebody else has made in /dev/shm meanwhile, if anybody has.
    assert {"guardian.py", "_nvml_reader.py"} <= helpers <= {"guardian.py", "_nvml_reader.py", "_lease.py"}


def test_it_writes_only_where_runs_and_lessons_are_kept(heard):
    written = [*heard["did"]["writes"], *(path for both in heard["did"]["renames"] for path in both)]
    assert [path for path in written if not of_the_run(heard, path) and path != "/dev/null"] == []


def test_it_removes_its_own_socket_and_nothing_else(heard):
    assert heard["did"]["removes"] == ["control.sock"]


def test_it_signals_its_own_helpers_only_and_leaves_the_server_to_the_guardian(heard):
    assert set(heard["did"]["kills"]) <= {"its own child"}


def test_importing_it_starts_writes_and_connects_nothing(heard):
    assert heard["at import"] == {}
