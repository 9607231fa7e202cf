"""A guardian that is killed in the middle of a stop takes nothing that it saw with it; its word alone removes nothing.

Every file of ours has one beside it that is somebody else's, and stays.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import anyio
import psutil
import pytest
from seen import until, until_sync
from test_files import answers, file_id, killed_guardian, litter, plain, program, said  # noqa: F401 - a fixture
from test_guardian import keep, serve  # noqa: F401 - fixtures

from hangguard.act import _lease, _link, _telling
from hangguard.act.files import unattributed_names
from hangguard.elsewhere import Elsewhere

pytestmark = pytest.mark.anyio

SHM = Path("/dev/shm")
STUBBORN = """
import pathlib, signal, subprocess, sys, time
folder, child = pathlib.Path(sys.argv[1]), subprocess.Popen(sys.argv[2:])
def asked(*_):
    if "last" in sys.argv:
        child.send_signal(signal.SIGTERM)
    else:
        child.kill()
        child.wait()
    (folder / "asked").touch()
signal.signal(signal.SIGTERM, asked)
(folder / "child").write_text(str(child.pid))
ends = time.monotonic() + 120
while time.monotonic() < ends:
    time.sleep(1)
"""
"""A launcher that ends its worker when it is asked to end, and stays itself; with ``last`` it hands the question on."""


def stubborn(folder, *words):
    return [sys.executable, "-c", STUBBORN, str(folder), *program(folder, *words)]


def child_of(folder):
    until_sync((folder / "child").exists)
    return psutil.Process(int((folder / "child").read_text()))


@contextlib.asynccontextmanager
async def stopping(server, came_to):
    """Stop it meanwhile; what it came to is in ``came_to``."""

    async def stop():
        came_to.append(await server.stop(grace=60.0))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(stop)
        yield


async def kill_guardian_and_hurry(server):
    await killed_guardian(server)
    server.hurry()


@pytest.fixture
def strangers(litter):  # noqa: F811
    """Files of somebody else that look like ours, at rest and new; all are there at the end."""
    found = []

    def make():
        path = SHM / f"psm_{os.urandom(6).hex()}"
        path.write_bytes(b"somebody's")
        litter.append(path)
        found.append((path, file_id(path)))
        return path

    yield make
    assert [path for path, who in found if not path.exists() or file_id(path) != who] == []


async def test_what_only_a_guardian_saw_that_is_killed_in_the_middle_of_a_stop_goes_and_a_strangers_stays(
    serve,  # noqa: F811
    tmp_path,
    litter,  # noqa: F811
    strangers,
):
    came_to = []
    async with serve(argv=stubborn(tmp_path, "shared", "semaphore", "listens", "datagram")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        theirs = strangers()
        async with stopping(server, came_to):
            await until((tmp_path / "asked").exists)  # whoever had them has ended
            assert all(path.exists() for path in ours.values())
            await kill_guardian_and_hurry(server)
    (stopped,) = came_to
    assert (stopped.by, stopped.survivors, stopped.unproved_files) == ("supervisor", (), ())
    assert answers(stopped.files) == dict.fromkeys(ours.values(), "removed")
    assert not any(path.exists() for path in ours.values())
    assert theirs.read_bytes() == b"somebody's"


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_is_made_in_a_stop_is_told_too(serve, tmp_path, litter, strangers):  # noqa: F811
    came_to = []
    async with serve(argv=stubborn(tmp_path, "shared", "last")) as server:
        litter += said(tmp_path).values()
        strangers()
        async with stopping(server, came_to):
            await until(lambda: "last" in said(tmp_path))
            ours = said(tmp_path)
            litter += ours.values()
            await until(lambda: {file["path"] for file in server._told.seen} >= set(map(str, ours.values())))
            child_of(tmp_path).kill()
            await kill_guardian_and_hurry(server)
    assert answers(came_to[0].files) == dict.fromkeys(ours.values(), "removed")
    assert not any(path.exists() for path in ours.values())


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_name_that_a_stranger_has_by_then_is_his(serve, tmp_path, litter):  # noqa: F811
    came_to = []
    async with serve(argv=stubborn(tmp_path, "shared", "listens", "semaphore")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        async with stopping(server, came_to):
            await until((tmp_path / "asked").exists)
            new = SHM / f"new-{ours['shared'].name}"
            new.write_bytes(b"somebody's")
            new.replace(ours["shared"])
            ours["listens"].unlink()
            with socket.socket(socket.AF_UNIX) as dead:
                dead.bind(str(ours["listens"]))
            his = {name: file_id(ours[name]) for name in ("shared", "listens")}
            await kill_guardian_and_hurry(server)
    files = {ours["shared"]: "gone", ours["listens"]: "gone", ours["semaphore"]: "removed"}
    assert answers(came_to[0].files) == files
    assert {name: file_id(ours[name]) for name in his} == his
    assert ours["shared"].read_bytes() == b"somebody's"


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_somebody_has_by_then_stays(serve, tmp_path, litter):  # noqa: F811
    came_to = []
    async with serve(argv=stubborn(tmp_path, "shared", "semaphore")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        async with stopping(server, came_to):
            await until((tmp_path / "asked").exists)
            with ours["shared"].open("rb"):
                await kill_guardian_and_hurry(server)
                await until(lambda: came_to)
                assert answers(came_to[0].files) == {ours["shared"]: "busy", ours["semaphore"]: "removed"}
                assert ours["shared"].exists()


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_a_guardian_saw_that_died_before_it_told_is_listed_and_stays(
    serve,  # noqa: F811
    tmp_path,
    litter,  # noqa: F811
    monkeypatch,
):
    monkeypatch.setattr(_link.Link, "wake", lambda link: None)  # it stays stopped
    before, came_to = frozenset(os.listdir(SHM)), []
    async with serve(argv=stubborn(tmp_path, "shared")) as server:
        ours = said(tmp_path)["shared"]
        litter.append(ours)
        os.kill(server.guardian_pid, signal.SIGSTOP)
        child_of(tmp_path).kill()
        async with stopping(server, came_to):
            await kill_guardian_and_hurry(server)
    assert (came_to[0].by, came_to[0].files) == ("supervisor", ())
    assert ours.exists()
    assert str(ours) in unattributed_names(before, came_to[0].files)


# ---------------------------------------------------------------------------------- the word of one


def claim(path, who, **fields):
    (file,) = _lease.carried([plain(path, pid=who[0], started=who[1], **fields)])
    return file


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_message_alone_removes_nothing(serve, tmp_path, litter, strangers, keep):  # noqa: F811
    """Claimed is what a member never had, what a stranger has, what was there before, and what is no file at all."""
    before = strangers()
    bystander = subprocess.Popen(["/bin/sleep", "100"])
    keep(bystander)
    him = (bystander.pid, int(Path(f"/proc/{bystander.pid}/stat").read_text().rpartition(")")[2].split()[19]))
    async with serve(argv=program(tmp_path, "shared")) as server:
        ours, root = said(tmp_path)["shared"], (server.pid, server.started)
        litter.append(ours)
        at_rest, his, folded = strangers(), strangers(), Path(tempfile.mkdtemp(), "s")
        litter.append(folded)
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(folded))
        good = claim(at_rest, root)
        told = [
            good, claim(his, him), claim(before, root), claim(folded, root, kind="socket", held="bound"),
            {**good, "inode": "1"}, {**good, "more": 1}, {**good, "kind": "folder"}, {**good, "path": "\u20ac"},
            "x", None,
        ]  # fmt: skip
        for message in ({"files": told, "id": 7}, {"files": 1, "others": [1, ["a", 2]], "id": "x"}, {}):
            server._hear({"say": "found", **message})
        await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {ours: "removed"}
    assert set(stopped.unproved_files) == {str(at_rest), str(his), str(folded)}
    assert folded.is_socket()
    assert bystander.poll() is None


@pytest.mark.long
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_what_is_told_to_be_somebody_elses_too_stays(serve, tmp_path, litter):  # noqa: F811
    async with serve(argv=program(tmp_path, "shared", "semaphore")) as server:
        ours = said(tmp_path)
        litter += ours.values()
        server._hear({"say": "found", "files": [], "others": [list(file_id(ours["shared"]))], "id": 0})
        await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {ours["semaphore"]: "removed"}
    assert ours["shared"].exists()


# ------------------------------------------------------------------------- the guardian by itself


class Alone:
    """A guardian whose supervisor is the test: it says what it likes, and reads when it likes."""

    def __init__(self, keep, folder, argv, room):  # noqa: F811
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(30.0)
        theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, room)
        reads, self.death = os.pipe()
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-S", _link.GUARDIAN, str(theirs.fileno()), str(reads), "-1"],
            pass_fds=[theirs.fileno(), reads],
        )
        keep(self.process)
        theirs.close()
        os.close(reads)
        self._lines = self.socket.makefile("r")
        launch = {
            "argv": argv, "env": dict(os.environ), "cwd": str(folder), "log_path": None, "lock_path": None,
            "port": None, "death_grace": 0.5, "on_death": "stop", "pristine": False, "elsewhere": Elsewhere().carried(),
        }  # fmt: skip
        self.say("launch", **launch)
        self.root = self.hear("launched")["pid"]

    def say(self, do, **fields):
        self.socket.sendall(json.dumps({"v": 1, "do": do, **fields}).encode() + b"\n")

    def messages(self):
        return map(json.loads, self._lines)

    def hear(self, *said):
        return next(message for message in self.messages() if message["say"] in said)

    def close(self):
        os.close(self.death)
        self._lines.close()
        self.socket.close()
        self.process.wait(20)


@pytest.fixture
def alone(keep, tmp_path):  # noqa: F811
    begun = []

    def begin(*argv, room=1 << 18):
        begun.append(Alone(keep, tmp_path, list(argv), room))
        return begun[-1]

    yield begin
    for one in begun:
        one.close()


def test_it_tells_before_it_signals_and_waits_until_it_is_heard(alone, tmp_path, litter, monkeypatch):  # noqa: F811
    guardian = alone(*stubborn(tmp_path, "shared", "listens"))
    ours = said(tmp_path)
    litter += ours.values()
    guardian.say("stop", grace=60.0)
    first = guardian.hear("found", "progress")
    assert first["say"] == "found"
    assert {file["path"] for file in first["files"]} == set(map(str, ours.values()))
    assert {file["pid"] for file in first["files"]} == {child_of(tmp_path).pid}
    guardian.say("heard", id=first["id"])
    assert guardian.hear("found", "progress")["step"] == "grace"  # nothing is told twice
    until_sync((tmp_path / "asked").exists)
    guardian.say("hurry")
    assert {file["answer"] for file in guardian.hear("stopped")["files"]} == {"removed"}


MANY = """
import pathlib, socket, sys, time
folder, kept = pathlib.Path(sys.argv[1]), []
for number in range(int(sys.argv[2])):
    kept.append(socket.socket(socket.AF_UNIX))
    kept[-1].bind(str(folder / str(number)))
(folder / "made").touch()
time.sleep(100)
"""


@pytest.mark.long
@pytest.mark.parametrize("reads", [True, False])
def test_a_link_that_is_full_holds_nothing_up_for_long(alone, reads):
    """The names of 400 sockets are twenty times what this link carries at once; nobody answers, or even reads."""
    folder, number = Path(tempfile.mkdtemp()), 400
    guardian = alone(sys.executable, "-c", MANY, str(folder), str(number), room=4096)
    until_sync((folder / "made").exists)
    guardian.say("stop", grace=20.0)
    if reads:
        told = []
        for message in guardian.messages():
            told += message["files"] if message["say"] == "found" else []
            if message["say"] == "stopped":
                break
        assert {file["path"] for file in told} == {str(folder / str(n)) for n in range(number)}
        assert len(told) == number
    until_sync(lambda: {path.name for path in folder.iterdir()} == {"made"}, within=30.0)
    (folder / "made").unlink()
    folder.rmdir()


def test_who_was_deaf_once_is_not_waited_for_again_in_the_same_stop():
    put, now = [], [0.0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_telling.time, "monotonic", lambda: now[0])
        telling = _telling.Telling(lambda say, **fields: put.append(fields), lambda: True)
        telling.add([{"n": n} for n in range(_telling.MOST_AT_ONCE + 1)], [])
        assert [len(message["files"]) for message in put] == [_telling.MOST_AT_ONCE, 1]
        assert telling.holds_until(alone=False) == _telling.TELL_WITHIN
        assert telling.holds_until(alone=True) == 0.0
        now[0] = _telling.TELL_WITHIN
        assert telling.holds_until(alone=False) == 0.0
        telling.add([{"n": 1}], [])
        assert telling.holds_until(alone=False) == 0.0
        telling.begin()
        assert telling.holds_until(alone=False) == 0.0  # its time for these is over
        telling.hear(2)
        telling.hear(99)  # never said so far
        telling.begin()
        telling.add([{"n": 2}], [])
        assert telling.holds_until(alone=False) == 2 * _telling.TELL_WITHIN
        telling.hear(4)
        assert telling.holds_until(alone=False) == 0.0
