"""The attacks that take longer: other places, pids and inodes that are given away, a whole supervision."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from seen import until
from test_attacks import anyio_backend, children, segment, told, trainer  # noqa: F401 - fixtures
from test_files import SERVES, answers, killed_guardian, litter, look, program, said  # noqa: F401 - a fixture
from test_guardian import keep, serve  # noqa: F401 - fixtures

from hangguard import held, supervise

pytestmark = pytest.mark.anyio


async def test_a_supervision_leaves_the_memory_of_a_trainer_and_removes_its_own(tmp_path, segment, litter):  # noqa: F811
    words = program(tmp_path, "shared", f"later={segment}")
    argv = [sys.executable, "-c", SERVES.format(program=words), "{port}"]
    async with supervise(argv, url="http://127.0.0.1:{port}", run_dir=tmp_path / "runs") as server:
        ours = said(tmp_path)["shared"]
        litter.append(ours)
        (state,) = (tmp_path / "runs").glob("*/state.json")
        with trainer(segment):
            os.kill(children(server.pid)[0], signal.SIGUSR1)
            file = list(held.file_id(segment.stat()))
            await until(lambda: file in json.loads(state.read_text())["shm_before"], within=30)
        await until(lambda: "later" in said(tmp_path))
    release = server.attempt.release
    assert answers(release.files) == {ours: "removed"}
    assert str(segment) in release.unattributed_files
    assert segment.read_bytes()[:5] == b"ours!"


async def test_a_stranger_who_only_reads_ours_and_a_fork_of_a_member_keep_nothing(serve, tmp_path, litter):  # noqa: F811
    forks = f"import os, runpy, sys; sys.argv = {program(tmp_path, 'shared')[1:]!r}\n"
    forks += "import time\n"
    forks += "import threading; threading.Timer(1.0, lambda: os.fork() or time.sleep(60)).start()\n"
    forks += "runpy.run_path(sys.argv[0], run_name='__main__')"
    reads = "import mmap, os, sys; m = mmap.mmap(os.open(sys.argv[1], os.O_RDONLY), 0, access=mmap.ACCESS_READ)\n"
    reads += "print('has', flush=True); sys.stdin.readline()"
    async with serve(argv=[sys.executable, "-c", forks]) as server:
        ours = said(tmp_path)["shared"]
        litter.append(ours)
        child = (await until(lambda: children(server.pid)))[0]
        await until(lambda: str(ours) in Path(f"/proc/{child}/maps").read_text())
        words = [sys.executable, "-c", reads, str(ours)]
        with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdout.readline() == "has\n"
            seen = await look(server.pid)  # the fork was not seen yet
            server.remember_files(seen.files, seen.others)
            reader.communicate("\n", timeout=10)
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {ours: "removed"}


ENTERED_AND_NOT_LISTED = (
    "mount -t tmpfs -o mode=1333 none /dev/shm && exec setpriv --bounding-set -dac_override,-dac_read_search "
    '--inh-caps -dac_override,-dac_read_search "$@"'
)


def test_where_shared_memory_cannot_be_listed_nothing_in_it_is_taken_for_new(tmp_path):
    seen = told("unlisted", tmp_path, "unshare", "--mount", "sh", "-c", ENTERED_AND_NOT_LISTED, "sh")
    assert seen["listing"] == "Permission denied"
    assert seen["theirs"] == "somebody's"
    assert seen["files"] == []
    assert seen["item"][0] == "unknown"
    assert "before" in seen["item"][1]
    assert seen["unattributed"] == []  # so that nobody is told to remove what was there before


def test_the_pid_of_a_guardian_that_the_program_itself_has_reaped_is_not_signalled(tmp_path):
    seen = told("reused-guardian", tmp_path, "unshare", "--pid", "--fork", "--mount-proc")
    assert seen == {"same_pid": True, "heir": None, "root_lives": False, "in_time": True}


def with_the_inode_of(log, folder):
    """Make a file that gets the inode which a file that is gone has had."""
    for number in range(2000):  # others on the same disk make files too
        path = folder / f"inode-{number}"
        path.touch()
        if held.file_id(path.stat()) == log:
            return path
    raise AssertionError(f"no file got {log}")


async def test_another_run_whose_log_has_got_the_inode_of_a_removed_one_lives_on(serve, tmp_path):  # noqa: F811
    """The guardian is dead, and nobody of the launch has the log any more: the kernel gives its inode to the next."""
    argv = [sys.executable, "-c", "import os, time; os.closerange(0, 3); time.sleep(60)"]
    async with serve(argv=argv) as server:
        log = Path(tmp_path / "server.log")
        await until(lambda: not os.listdir(f"/proc/{server.pid}/fd"))
        await killed_guardian(server)
        other = tmp_path / "other"
        other.mkdir()
        log.unlink()
        with_the_inode_of(server.log_id, tmp_path).rename(other / "server.log")
        async with serve(argv=["/bin/sleep", "60"], folder=other) as neighbour:
            assert neighbour.log_id == server.log_id
            stopped = await server.stop(grace=0.2)
            assert stopped.survivors == ()
            assert not psutil.pid_exists(server.pid)
            assert psutil.pid_exists(neighbour.pid)
            assert neighbour.exit is None
