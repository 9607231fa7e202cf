# ruff: noqa: F811 - fixtures
"""Whoever is killed, and in whatever order: what belongs to a launch ends as a whole, and nobody beside it does."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from faces import User
from seen import until_sync
from test_files import STRANGER, answers, left_by, litter  # noqa: F401
from test_guardian import (  # noqa: F401
    ESCAPES,
    bystanders,
    is_gone,
    keep,
    members,
    serve,
    soon,
    supervisor,
)

from hangguard.act import _membership

pytestmark = pytest.mark.anyio

SHM = Path("/dev/shm")
TRACKER = "resource_tracker"


def alive(processes):
    return {name for name, process in processes.items() if lives(process)}


def lives(process):
    """Whether any thread of it does: psutil calls a process whose first thread has ended a zombie."""
    states = []
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{process.pid}/task"):
            stat = Path(f"/proc/{process.pid}/task/{thread}/stat")
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return process.is_running() and bool(set(states) - {"Z", "X"})


def dead(processes):
    return {name for name, process in processes.items() if process.poll() is not None}


def remember_as_samples_do(server):
    below = psutil.Process(server.guardian_pid).children(recursive=True)
    server.remember(entry.identity for process in below if (entry := _membership.read_entry(process.pid)))


def tracker_of(server):
    (found,) = [
        process
        for process in psutil.Process(server.guardian_pid).children(recursive=True)
        if not is_gone(process) and TRACKER in " ".join(process.cmdline())
    ]
    return found


# --------------------------------------------------------------------------------------- before the stop

ORDERS = (
    ("root",),
    ("setsid", "root"),
    ("root", "guardian"),
    ("guardian", "root"),
    ("guardian", "tracker", "root"),
    ("tracker", "root", "guardian"),
    ("root", "setsid", "tracker", "guardian", "double"),
)


@pytest.mark.long
@pytest.mark.parametrize("order", ORDERS, ids="-".join)
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_in_whatever_order_they_are_killed_before_the_stop_all_the_others_end(
    serve, members, bystanders, tmp_path, litter, order
):
    kinds = (*ESCAPES, "unreaped", "shm", "headless")
    async with serve(*kinds, "stubborn") as server:
        found = members("root", *kinds)
        memory = [SHM / (tmp_path / name).read_text() for name in ("shm-name", "headless-shm")]
        litter += memory
        remember_as_samples_do(server)
        targets = {**found, "guardian": psutil.Process(server.guardian_pid), "tracker": tracker_of(server)}
        for name in order:
            targets[name].kill()
            await soon(lambda name=name: is_gone(targets[name]))
        if "guardian" in order:
            await soon(lambda: not server.guardian_alive)
        stopped = await server.stop(grace=0.3)
        assert stopped.by == ("supervisor" if "guardian" in order else "guardian")
        assert stopped.survivors == ()
        assert alive(found) == set()
        assert is_gone(targets["tracker"])
        assert not any(path.exists() for path in memory)
    assert dead(bystanders) == set()


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_guardian_that_is_killed_in_the_middle_of_a_stop_is_replaced(serve, members, bystanders):
    async with serve(*ESCAPES, "stubborn") as server:
        found = members("root", *ESCAPES)

        def on_progress(progress):
            if progress.step == "grace" and server.guardian_alive:
                os.kill(server.guardian_pid, signal.SIGKILL)

        stopped = await server.stop(grace=1.0, on_progress=on_progress)
        assert (stopped.by, stopped.survivors) == ("supervisor", ())
        assert alive(found) == set()
    assert dead(bystanders) == set()


# --------------------------------------------------------------------------- where nobody is left to end it


@pytest.mark.long
@pytest.mark.parametrize("how", ["in the same instant", "the guardian before it is done", "the guardian long before"])
def test_what_is_left_when_both_are_dead_is_found_again_by_its_log_and_nobody_else_is(
    tmp_path, keep, members, bystanders, how
):
    """As the safety page says: then the server stays. What it has of the launch still proves whose it is."""
    kinds = (*ESCAPES, "headless")
    process, told = supervisor(keep, tmp_path, "asyncio", str(tmp_path), "plain", *kinds, "stubborn")
    found, guardian = members("root", *kinds), psutil.Process(told["guardian"])
    keep(guardian)
    (SHM / (tmp_path / "headless-shm").read_text()).unlink()
    if how == "in the same instant":
        guardian.suspend()
        process.kill()
        guardian.kill()
    elif how == "the guardian long before":
        guardian.kill()
        until_sync(lambda: is_gone(guardian))
        process.kill()
    else:
        process.kill()
        process.wait()  # its members have their last grace of 1.5 s now
        guardian.kill()
    until_sync(lambda: process.poll() is not None and is_gone(guardian))
    assert alive(found) == set(found)
    log = (tmp_path / "server.log").stat()
    again = _membership.find_members(_membership.read_entries(), log_id=(log.st_dev, log.st_ino))
    assert {member.pid for member in found.values()} <= {pid for pid, _ in again}
    assert not {bystander.pid for bystander in bystanders.values()} & {pid for pid, _ in again}
    assert dead(bystanders) == set()


# --------------------------------------------------------------------------------------- zombie leaders

HEADLESS_SERVER = """
import ctypes, http.server, signal, sys, threading
if sys.argv[2] == "ignores":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), http.server.SimpleHTTPRequestHandler)
threading.Thread(target=server.serve_forever).start()
print("serves", flush=True)
ctypes.CDLL(None).pthread_exit(0)
"""


@pytest.mark.parametrize("answer", ["ignores", "ends"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_server_whose_first_thread_has_ended_is_no_ended_server(serve, tmp_path, answer):
    argv = [sys.executable, "-c", HEADLESS_SERVER, "0", answer]
    async with serve(argv=argv) as server:
        root = psutil.Process(server.pid)
        await soon(lambda: root.status() == psutil.STATUS_ZOMBIE and "serves" in (tmp_path / "server.log").read_text())
        assert server.exit is None
        assert _membership.is_alive((server.pid, server.started))
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        assert server.exit.code == (-signal.SIGKILL if answer == "ignores" else -signal.SIGTERM)
        assert not _membership.is_alive((server.pid, server.started))


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_member_whose_first_thread_has_ended_is_found_with_all_that_it_has(
    serve, members, bystanders, tmp_path, litter, guardian
):
    """/proc shows its descriptors and maps under its other threads only; nobody had seen it before."""
    async with serve("headless") as server:
        found = members("root", "headless")
        memory = SHM / (tmp_path / "headless-shm").read_text()
        litter.append(memory)
        await soon(lambda: found["headless"].status() == psutil.STATUS_ZOMBIE)
        if guardian == "is dead":
            psutil.Process(server.guardian_pid).kill()
            await soon(lambda: not server.guardian_alive)
        assert memory.exists()
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        entry = _membership.read_entry(
            found["headless"].pid
        )  # without a guardian it is pid 1 that reaps it, in its time
        assert entry is None or entry.dead
        assert answers(stopped.files) == {memory: "removed"}
        assert not memory.exists()
    assert dead(bystanders) == set()


async def test_a_child_that_nobody_waits_for_holds_nothing_up(serve, members):
    async with serve("unreaped") as server:
        members("root", "unreaped")
        stopped = await server.stop(grace=5.0)
        assert stopped.survivors == ()
        assert stopped.seconds < 5


# --------------------------------------------------------------------------- forking while it is being killed


@pytest.mark.long
@pytest.mark.parametrize("guardian", ["lives", "is dead"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_who_forks_hundreds_of_children_when_it_is_asked_to_end_is_ended_with_all_of_them(
    serve, members, bystanders, guardian
):
    async with serve("forker") as server:
        members("root", "forker")
        remember_as_samples_do(server)
        if guardian == "is dead":
            psutil.Process(server.guardian_pid).kill()
            await soon(lambda: not server.guardian_alive)
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        assert stopped.ended > 20
        assert not _membership.log_writers(server.log_id, _membership.read_entries())
    assert dead(bystanders) == set()


# ------------------------------------------------------------------------------- 200 files of a stranger


@pytest.mark.long
@pytest.mark.parametrize("who", ["the supervisor", "the guardian"])
def test_200_files_of_a_stranger_survive_also_where_one_of_us_is_killed(tmp_path, litter, who):
    user = User(tmp_path, server={"leave": ("mapped", "semaphore", "worker"), "tp": 2})
    try:
        user.said("serving")
        guardian = [p for p in user.tree() if "guardian.py" in " ".join(p.cmdline())]
        ours = left_by(next(tmp_path.glob("runs/*/attempt-1.log")))
        litter += ours
        made = subprocess.run([sys.executable, "-c", STRANGER], capture_output=True, text=True, check=True).stdout
        strangers = {Path(line) for line in made.splitlines()}
        litter += strangers
        assert all(path.exists() for path in ours)
        if who == "the supervisor":
            os.kill(user.process.pid, signal.SIGKILL)
        else:
            (killed,) = guardian
            killed.kill()
            user.until_told("notice")
            user.interrupt()
            assert user.ends(within=20.0)["released"] == "released"
        until_sync(lambda: not any(path.exists() for path in ours), within=5.0)
        until_sync(lambda: not user.left(), within=5.0)
    finally:
        user.close()
    assert len(strangers) == 200
    assert all(path.read_bytes() == b"somebody's" for path in strangers)
