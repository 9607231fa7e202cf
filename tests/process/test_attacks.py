"""Whoever else is on this machine keeps what is his, however alike it is, and whatever cannot be seen.

Every attack is real, and each has somebody whose thing survives it.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from seen import PROGRAMS, target, tree, until
from test_files import answers, killed_guardian, litter, look, program, said  # noqa: F401 - a fixture
from test_guardian import keep, serve  # noqa: F401 - fixtures

from hangguard import held
from hangguard.act import _membership
from hangguard.act._hole import HollowFile
from hangguard.facts import Ask
from hangguard.observe import Shared
from hangguard.observe.held_files import HeldFilesProbe
from hangguard.observe.processes import ProcessProbe
from hangguard.observe.procfs import read_started

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    """One is enough: none of this is about the event loop."""
    return "asyncio"


SHM = Path("/dev/shm")


def told(kind, folder, *place, **env):
    """What a supervising program says in a place of its own."""
    command = [*place, sys.executable, str(PROGRAMS / "attacks_user.py"), kind, str(folder)]
    env = {**os.environ, **env}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


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


@pytest.mark.parametrize("guardian", ["lives", pytest.param("is dead", marks=pytest.mark.long)])
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


@pytest.mark.parametrize("guardian", ["lives", pytest.param("is dead", marks=pytest.mark.long)])
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


def children(pid):
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


# ------------------------------------------------------------------------------------------- processes


async def test_whoever_has_the_pid_of_a_dead_guardian_has_no_members():
    with tree("child") as family:
        assert family.line(1)
        for started, expected in ((read_started(family.guardian), 2), (read_started(family.guardian) - 1, 0)):
            probe = ProcessProbe(target(family.guardian, (1, 1), guardian_started=started))
            try:
                assert len((await probe.look(Ask())).members) == expected
            finally:
                await probe.aclose()


def test_children_that_cannot_be_listed_are_not_none(monkeypatch):
    """A list that cannot be opened would be the proof that nobody is left."""
    assert children(os.getpid()) == _membership.own_children() == []
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    tasks = os.listdir("/proc/self/task")
    monkeypatch.setattr(os, "listdir", lambda _: tasks)  # the first descriptor is there, the second is not
    free = os.dup(0)
    os.close(free)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (free, before[1]))
        with pytest.raises(OSError, match="Too many open files"):
            _membership.own_children()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


# ------------------------------------------------------------------------------------------------ files


def test_a_log_that_was_moved_away_is_kept_as_it_is(tmp_path):
    """By somebody who wants to keep it; the server writes on into it."""
    log = tmp_path / "server.log"
    log.write_bytes(b"line\n" * 1_000_000)
    file = HollowFile(str(log), held.file_id(log.stat()), 1 << 20)
    try:
        assert file.keep() > 0
        kept = log.rename(tmp_path / "kept.log")
        with kept.open("ab") as writer:
            writer.write(b"line\n" * 1_000_000)
        content = kept.read_bytes()
        for take_its_name in (lambda: None, lambda: log.write_bytes(b"somebody's")):
            take_its_name()
            with pytest.raises(OSError, match="another name"):
                file.keep()
        assert kept.read_bytes() == content
        kept.replace(log)
        assert file.keep() > 0
    finally:
        file.close()


def owned(folder, user):
    folder.mkdir(parents=True)
    os.chown(folder, user, user)
    return folder


@pytest.fixture
def open_tmp():
    """A folder that every user can enter."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o755)
        yield Path(folder)


def test_root_keeps_nothing_in_the_home_of_the_user_who_called_sudo(open_tmp):
    home = owned(open_tmp / "home", 65534)
    state = owned(home / ".local" / "state" / "hangguard", 65534)
    temp = owned(home / "tmp", 65534)
    lessons = state / "learned.json"
    lessons.write_text("the user's")
    os.chown(lessons, 65534, 65534)
    env = {"HOME": str(home), "TMPDIR": str(temp), "XDG_STATE_HOME": ""}
    seen = told("places", open_tmp, **env)
    made = Path(seen["path"])
    made.joinpath(".hangguard-run").unlink(missing_ok=True)
    made.rmdir()
    assert made.parent == Path("/tmp")
    assert (seen["home"], seen["learned"]) == (None, None)
    assert f"{home} belongs to user 65534, and this is root" in " ".join(seen["lost"])
    assert sorted(path.name for path in home.rglob("*")) == [".local", "hangguard", "learned.json", "state", "tmp"]
    assert lessons.stat().st_uid == 65534


def test_root_keeps_its_own_in_its_own_home_and_a_user_his_in_his(open_tmp):
    own = open_tmp / "root"
    own.mkdir()
    seen = told("places", open_tmp, HOME=str(own), XDG_STATE_HOME="")
    assert Path(seen["path"]).is_relative_to(own)
    assert seen["lost"] == []
    assert seen["learned"] == str(own / ".local/state/hangguard/learned.json")
