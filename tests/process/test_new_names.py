"""What is new in /dev/shm and nobody's that is known: what somebody has is told apart, and no command names it."""

import os
import socket
import sys
import tempfile
from pathlib import Path

import pytest
from faces import little
from test_files import goes_on, holding

from hangguard import supervise
from hangguard.act import files
from hangguard.act.new_names import look_at_new_names
from hangguard.report.releases import file_notes

pytestmark = pytest.mark.anyio

SHM = Path("/dev/shm")


@pytest.fixture
def made():
    """Return a maker of files in /dev/shm, which are removed at the end."""
    paths = []

    def make(word):
        path = SHM / f"hangguard-test-{os.getpid()}-{word}"
        path.write_bytes(b"xxx" * 2000)
        paths.append(path)
        return str(path)

    yield make
    for path in paths:
        path.unlink(missing_ok=True)


async def uses(*paths):
    return {name.path: name.use for name in await look_at_new_names(paths)}


async def test_a_name_that_somebody_has_mapped_is_in_use_and_he_is_named(made):
    rests, theirs = made("rests"), made("theirs")
    with holding(theirs) as bystander:
        told = {name.path: name for name in await look_at_new_names([rests, theirs, f"{theirs}-gone"])}
        assert {path: name.use for path, name in told.items()} == {rests: "at rest", theirs: "in use"}
        assert f"pid {bystander.pid} (" in told[theirs].why
        assert told[theirs].command == ""
        assert told[rests].command == f"rm -- {rests}"
        assert goes_on(bystander)
    assert Path(theirs).read_bytes() == Path(rests).read_bytes() == b"xxx" * 2000


async def test_at_the_end_of_a_launch_the_command_leaves_out_what_a_trainer_has(made, tmp_path):
    async with supervise(little(), run_dir=tmp_path) as server:
        rests, theirs = made("rests"), made("trainer")
        stack = holding(theirs)
        bystander = stack.__enter__()
    release = server.attempt.release
    notes = file_notes(release)
    assert {rests, theirs} <= set(release.unattributed_files)
    (command,) = (note.rpartition("if nobody's: ")[2] for note in notes if "if nobody's" in note)
    assert rests in command.split()
    assert theirs not in command.split()
    assert any("in use, left alone" in note and theirs in note for note in notes)
    assert goes_on(bystander)
    stack.__exit__(None, None, None)


async def test_who_cannot_be_seen_by_a_scan_is_seen_by_the_kernel(made, monkeypatch):
    theirs = made("theirs")
    monkeypatch.setattr(files, "who_has", lambda wanted, elsewhere=None: {})  # another container's, another user's
    with holding(theirs) as bystander:
        assert await uses(theirs) == {theirs: "in use"}
        assert goes_on(bystander)


async def test_a_lease_of_the_owner_is_not_broken_by_the_look(made):
    theirs = made("leased")
    code = "signal.signal(signal.SIGIO, lambda *_: os._exit(7)); fd = os.open(path, os.O_RDWR)"
    code += "; fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK); kept = b'xxx'"
    with holding(theirs, f"import fcntl, signal\n{code}") as bystander:
        assert await uses(theirs) == {theirs: "in use"}
        assert goes_on(bystander)


async def test_where_it_cannot_be_asked_there_is_no_command(made, monkeypatch):
    path = made("dark")
    monkeypatch.setattr(sys, "executable", "/nowhere")
    (name,) = await look_at_new_names([path])
    assert (name.use, name.command) == ("unknown", "")
    assert "FileNotFoundError" in name.why
    monkeypatch.undo()
    os.link(path, f"{path}-again")
    try:
        assert await uses(path) == {path: "unknown"}  # it has two names
    finally:
        Path(f"{path}-again").unlink()


async def test_where_there_is_no_time_there_is_no_command_and_the_names_are_told(made):
    path = made("late")
    (name,) = await look_at_new_names([path], within=0.0)
    assert (name.path, name.use, name.command) == (path, "unknown", "")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_DGRAM])
async def test_a_living_socket_is_in_use_and_gets_no_connection_by_that(kind, monkeypatch):
    # As in another network namespace, whose sockets no list of ours has.
    monkeypatch.setattr(files, "who_has", lambda wanted, elsewhere=None: {})
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, kind) as listener:
        path = f"{folder}/tmpabcdefgh"
        listener.bind(path)
        if kind == socket.SOCK_STREAM:
            listener.listen()
        listener.setblocking(False)
        assert await uses(path) == {path: "in use"}
        with pytest.raises(BlockingIOError):
            listener.accept() if kind == socket.SOCK_STREAM else listener.recv(1)
        listener.close()
        assert await uses(path) == {path: "at rest"}
        assert Path(path).is_socket()
