"""Whoever else is on this machine keeps what is his, however alike it is, and whatever cannot be seen.

Every attack is real, and each has somebody whose thing survives it.
"""

import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from seen import PROGRAMS, target, until, until_sync
from test_files import answers, killed_guardian, litter, look, program, said  # noqa: F401 - a fixture
from test_guardian import keep, serve  # noqa: F401 - fixtures

from hangguard import held
from hangguard.act import _tree
from hangguard.facts import Ask
from hangguard.learned import default_path
from hangguard.observe import Shared
from hangguard.observe.held_files import HeldFilesProbe
from hangguard.store import open_run_folder

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """One is enough: none of this is about the event loop."""
    return "asyncio"


SHM = Path("/dev/shm")

# ------------------------------------------------------------------------ shared memory of somebody else's

TRAINER = """
import sys
from multiprocessing import resource_tracker, shared_memory
made = shared_memory.SharedMemory(sys.argv[1], create=True, size=5000)
resource_tracker.unregister(made._name, "shared_memory")
made.buf[:5] = b"ours!"
print("has", flush=True)
sys.stdin.readline()
made.close()
"""
"""Makes it, and keeps it for the next time."""


@contextmanager
def trainer(path):
    words = [sys.executable, "-c", TRAINER, path.name]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "has\n"
        yield process
        process.communicate("\n", timeout=10)


@pytest.fixture
def segment(litter):  # noqa: F811
    path = SHM / f"psm_trainer-{os.getpid()}-{os.urandom(4).hex()}"
    litter.append(path)
    return path


async def makes_later(server, folder):
    os.kill(server.pid, signal.SIGUSR1)
    return await until(lambda: "later" in said(folder))


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_memory_of_a_trainer_that_the_server_writes_to_as_well_survives_them_both(
    serve,  # noqa: F811
    tmp_path,
    segment,
    litter,  # noqa: F811
    guardian,
):
    async with serve(argv=program(tmp_path, "shared", f"later={segment}")) as server:
        ours = said(tmp_path)["shared"]
        litter.append(ours)
        with trainer(segment):
            await makes_later(server, tmp_path)
            seen = await look(server.pid)
            assert {Path(file.path): file.held for file in seen.files} == {ours: "shared", segment: "shared"}
            server.remember_files(seen.files, seen.others)
        if guardian == "is dead":
            await killed_guardian(server)
        stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {ours: "removed"}
    assert segment.read_bytes()[:5] == b"ours!"


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_the_last_look_before_a_stop_sees_who_else_writes_to_it(serve, tmp_path, segment, litter, guardian):  # noqa: F811
    async with serve(argv=program(tmp_path, "shared", f"later={segment}")) as server:
        ours = said(tmp_path)["shared"]
        litter.append(ours)
        with trainer(segment):
            await makes_later(server, tmp_path)
            if guardian == "is dead":
                await killed_guardian(server)
            stopped = await server.stop(grace=1.0)
    assert answers(stopped.files) == {ours: "removed"}  # and the other one was not even asked for
    assert segment.read_bytes()[:5] == b"ours!"


async def test_memory_that_lay_at_rest_before_a_member_opened_it_survives(serve, tmp_path, segment, litter):  # noqa: F811
    probe = HeldFilesProbe(target(), Shared(tasks=None))
    async with serve(argv=program(tmp_path, "shared", f"later={segment}")) as server:
        ours = said(tmp_path)["shared"]
        litter.append(ours)
        await look(server.pid, probe=probe)
        segment.write_bytes(b"x" * 5000)
        for _ in range(2):
            seen = await look(server.pid, probe=probe)
        await makes_later(server, tmp_path)
        assert held.file_id(segment.stat()) in seen.others
        seen = await look(server.pid, probe=probe)
        server.remember_files(seen.files, seen.others)
        stopped = await server.stop(grace=1.0)
    await probe.aclose()
    assert answers(stopped.files) == {ours: "removed"}
    assert segment.read_bytes() == b"x" * 5000


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


def children(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


async def test_where_shared_memory_cannot_be_listed_nothing_in_it_is_taken_for_new(tmp_path):
    """A folder that may be entered and not read: what lay there before the launch is not known."""
    inside = (
        "mount -t tmpfs -o mode=1333 none /dev/shm && exec setpriv --bounding-set -dac_override,-dac_read_search "
        '--inh-caps -dac_override,-dac_read_search "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", inside, "sh", sys.executable, str(PROGRAMS / "unlisted_user.py")]
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["listing"] == "Permission denied"
    assert told["theirs"] == "somebody's"
    assert told["answers"] == []
    assert "before the launch" in told["unseen"]
    assert told["item"][0] == "unknown"
    assert told["unattributed"] == []  # and nobody is told to remove them
