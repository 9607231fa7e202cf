"""System V shared memory that members left is named, with the command; nobody's is ever removed."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from faces import plain
from seen import until_sync

from hangguard import SharedSegment, Unseen
from hangguard.observe import sysv
from hangguard.observe.sysv import Segment, left_by, list_segments, parse_segments

IPC_CREAT, IPC_RMID, IPC_PRIVATE = 0o1000, 0, 0
HEAD = (
    "       key      shmid perms       size  cpid  lpid nattch   uid   gid  cuid  cgid      atime      dtime      ctime"
)
SIZE = 3 << 20

SERVER = """
import ctypes, http.server, os, sys
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
left = libc.shmget(0, 3 << 20, 0o1600)
had = libc.shmget(0, 1 << 20, 0o1600)
assert libc.shmat(had, None, 0) not in (None, ctypes.c_void_p(-1).value)
if os.fork() == 0:
    os.setsid()
    made = libc.shmget(0, 2 << 20, 0o1600)
    print("segments", left, had, made, flush=True)
    os._exit(0)
os.wait()
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler).serve_forever()
"""


def segment(id_, **how):
    return Segment(**{"id": id_, "size_bytes": 4096, "creator": 10, "attached": 0, **how})


@pytest.fixture
def remove():
    """Remove segments of the test's own at its end, each by its number."""
    ids = []
    yield ids.append
    for id_ in ids:
        ctypes.CDLL(None).shmctl(id_, IPC_RMID, None)


# -------------------------------------------------------------------------------------------- pure


def test_the_kernels_table_is_read_by_the_names_of_its_columns():
    row = "         0          5   600    3145728  4242  4243      2     0     0     0     0 1700000000"
    assert parse_segments(f"{HEAD}\n{row}\n") == (Segment(id=5, size_bytes=3 << 20, creator=4242, attached=2),)
    assert parse_segments("") == parse_segments("\n") == parse_segments(HEAD) == ()
    assert parse_segments(f"{HEAD}\n1 2\n{row}\nx y z\n") == parse_segments(f"{HEAD}\n{row}")


@pytest.mark.parametrize(
    ("how", "is_told"),
    [({}, True), ({"attached": 1}, False), ({"creator": 11}, False), ({"creator": 0}, False), ({"id_": 7}, False)],
)
def test_only_what_a_member_made_since_and_nobody_has_is_told(how, is_told):
    seen = segment(how.pop("id_", 6), **how)
    told = left_by((seen,), frozenset({(10, 99)}), before=(segment(7),))
    assert told == ((SharedSegment(id=6, size_bytes=4096, creator=10),) if is_told else ())


def test_the_command_names_that_segment():
    assert SharedSegment(id=42, size_bytes=1, creator=1).command == "ipcrm -m 42"


# -------------------------------------------------------------------------------------------- real


@pytest.mark.anyio
async def test_real_segments_are_seen_as_ipcs_shows_them(remove):
    libc = ctypes.CDLL(None, use_errno=True)
    id_ = libc.shmget(IPC_PRIVATE, SIZE, IPC_CREAT | 0o600)
    remove(id_)
    (seen,) = [one for one in await list_segments() if one.id == id_]
    assert seen == Segment(id=id_, size_bytes=SIZE, creator=os.getpid(), attached=0)
    shown = subprocess.run(["ipcs", "-m", "-i", str(id_)], capture_output=True, text=True, check=True).stdout
    assert f"bytes={SIZE}" in shown
    assert f"cpid={os.getpid()}" in shown


@pytest.mark.anyio
async def test_a_table_that_is_not_there_is_unseen(monkeypatch):
    monkeypatch.setattr(sysv, "PATH", "/proc/sysvipc/nothing")
    assert isinstance(await list_segments(), Unseen)


def test_what_a_launch_left_is_in_its_release_and_a_bystanders_is_not(tmp_path, remove):
    libc = ctypes.CDLL(None, use_errno=True)
    earlier = libc.shmget(IPC_PRIVATE, SIZE, IPC_CREAT | 0o600)
    remove(earlier)
    with plain(tmp_path, [sys.executable, "-c", SERVER, "{port}"]) as server:
        line = until_sync(lambda: next((x for x in server.log(follow=False) if "segments" in x.text), None))
        left, had, made = map(int, line.text.split()[1:])
        for id_ in (left, had, made):
            remove(id_)
        bystander = libc.shmget(IPC_PRIVATE, SIZE, IPC_CREAT | 0o600)
        remove(bystander)
        members = {process.pid for process in server.sample().tree.members}
    told = {one.id: one for one in server.attempt.release.segments}
    assert {left, had} <= set(told)
    assert told[left].size_bytes == SIZE
    assert told[left].creator in members
    assert not {earlier, bystander} & set(told)
    assert server.attempt.release.answer == "released"
    living = {one.id for one in parse_segments(Path(sysv.PATH).read_text())}
    assert {left, had, made, earlier, bystander} <= living  # nothing is removed


def test_a_segment_that_a_stranger_has_attached_is_not_told(tmp_path, remove):
    program = (
        "import ctypes, signal, sys\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.shmat.restype = ctypes.c_void_p\n"
        "libc.shmat(int(sys.argv[1]), None, 0)\n"
        "print('attached', flush=True)\n"
        "signal.pause()\n"
    )
    with plain(tmp_path, [sys.executable, "-c", SERVER, "{port}"]) as server:
        line = until_sync(lambda: next((x for x in server.log(follow=False) if "segments" in x.text), None))
        left, had, made = map(int, line.text.split()[1:])
        for id_ in (left, had, made):
            remove(id_)
        stranger = subprocess.Popen([sys.executable, "-c", program, str(left)], stdout=subprocess.PIPE, text=True)
        assert stranger.stdout.readline() == "attached\n"
    try:
        told = {one.id for one in server.attempt.release.segments}
        assert left not in told
        assert had in told
    finally:
        stranger.send_signal(signal.SIGKILL)
        stranger.wait()
        stranger.stdout.close()
