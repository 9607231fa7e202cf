"""``reattach``: a run of another program is asked and told; what is not provably of it is neither."""

import fcntl
import inspect
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import anyio
import pytest
from faces import fetch, plain
from seen import until

from hangguard import (
    AsyncReattachedRun,
    NoAnswer,
    NoSuchRun,
    ReattachedRun,
    RunOver,
    StoppedEarly,
    WrongProcess,
    reattach,
    supervise,
)
from hangguard.act import _membership
from hangguard.act.guardians import tell_to_end, why_not_its_guardian
from hangguard.facts import RunState
from hangguard.run_state import read_run, this_place, write_state
from hangguard.store import CONTROL, open_run_folder
from hangguard.supervision.asking import asking
from hangguard.supervision.control_socket import listen_in
from hangguard.testing import little_server_command

pytestmark = pytest.mark.anyio

GONE = (2, 1)
"""No process: pid 2 is the kernel's, and did not start at that tick."""


@pytest.fixture
def foreign():
    """A process of somebody else's, as far as any run is concerned."""
    with sleeping() as process:
        yield process


@contextmanager
def sleeping(program="import time; print('up', flush=True); time.sleep(100)", *arguments, may_end=False, **how):
    process = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE, **how)
    try:
        assert process.stdout.readline()
        yield process
        assert may_end or process.poll() is None, "it was ended by somebody"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def identity(process):
    return _membership.read_entry(process.pid).identity


def noted(folder, **fields):
    """A run of which there is nothing but its folder and its state file."""
    made = open_run_folder(folder)
    state = RunState(
        **{"run_id": made.run_id, "place": this_place(), "began": 0.0, "stage": "ready", "supervisor": GONE, **fields}
    )
    write_state(made, state)
    return made, state


# ----------------------------------------------------------------------------------------- a living run


async def test_a_run_is_asked_told_and_stopped_and_the_one_beside_it_goes_on(tmp_path):
    async with plain(tmp_path) as beside, plain(tmp_path) as server:
        run_id = server._story.run.folder.run_id
        async with reattach(run_id, run_dir=tmp_path / "runs") as run:
            assert (run.run_id, run.url, run.pid) == (run_id, server.url, server.pid)
            status = await run.status()
            assert (status.told_by, status.state.stage, status.state.verdict) == ("supervisor", "ready", "ready")
            assert status.state.members
            assert await run.wait("ready", timeout=10) == "ready"
            stream = run.events()
            await stream.begin()
            stopped = await run.stop()
            assert (stopped.released, stopped.left_behind, stopped.by) == ("released", (), "supervisor")
            assert stopped.outcome == "stopped as asked from outside"
            assert [event["event"] async for event in stream] == ["stopping", "released", "ended"]
        assert await server.wait(5) is not None
        assert fetch(beside.url) == 200
        with pytest.raises(RunOver, match="stopped as asked from outside"):
            async with reattach(run_id, run_dir=tmp_path / "runs"):
                pass
        async with reattach(beside._story.run.folder.path) as run:  # leaving leaves it alone
            assert (await run.status()).state.stage == "ready"
        assert fetch(beside.url) == 200


def test_the_blocking_face_restarts_a_run_and_a_forked_child_is_told_that_it_is_not_his(tmp_path):
    with plain(tmp_path) as server, reattach(server._server._story.run.folder.path) as run:
        before = run.pid
        run.restart()
        assert run.pid == server.pid != before
        assert [past.number for past in run.status().history] == [1]
        assert fetch(run.url) == 200
        run._owner = -1
        with pytest.raises(WrongProcess):
            run.status()
        run._owner = os.getpid()
    with pytest.raises(RuntimeError, match="the block was left"):
        run.status()


async def test_a_run_that_is_stopped_while_it_starts_says_so_to_whoever_waits_for_it(tmp_path):
    supervision = supervise(little_server_command(phase_seconds=5.0, tp=1, hold_mb=1), run_dir=tmp_path)
    done = []

    async def start():
        try:
            async with supervision:
                done.append("entered")
        except StoppedEarly as early:
            done.append(early)

    async with anyio.create_task_group() as group:
        group.start_soon(start)
        with anyio.fail_after(20):
            while supervision.now is None:
                await anyio.sleep(0.05)
        async with reattach(supervision.run_id, run_dir=tmp_path) as run:
            assert (await run.status()).state.stage == "starting"
            with pytest.raises(TimeoutError):
                await run.wait("ready", timeout=0.2)
            assert (await run.stop(drain=30)).left_behind == ()  # nobody is in flight yet
    assert isinstance(done[0], StoppedEarly)
    assert done[0].history[0].release.answer == "released"


# ------------------------------------------------------------------------------------- what is not of it


async def test_a_state_file_that_names_a_stranger_as_guardian_has_nobody_signalled(tmp_path, foreign):
    made, state = noted(tmp_path, guardian=identity(foreign), members=(identity(foreign),))
    Path(made.file("lock")).touch()
    with pytest.raises(RunOver) as over:
        async with reattach(made.run_id, run_dir=tmp_path):
            pass
    assert over.value.living == (foreign.pid,)
    assert f"hangguard clean {made.path}" in str(over.value)
    assert "does not hold the lock" in tell_to_end(state.guardian, made.path)


def test_one_who_has_the_lock_file_open_without_its_lock_is_not_the_guardian(tmp_path):
    made, _ = noted(tmp_path)
    lock = os.open(made.file("lock"), os.O_RDWR | os.O_CREAT)
    with sleeping(pass_fds=[lock]) as holder:
        assert "does not hold the lock" in why_not_its_guardian(identity(holder), made.path)
        assert "does not hold the lock" in tell_to_end(identity(holder), made.path)
        fcntl.flock(lock, fcntl.LOCK_EX)  # of the open file, which he has too
        assert why_not_its_guardian(identity(holder), made.path) == ""
        pid, started = identity(holder)
        assert "is not its guardian any more" in why_not_its_guardian((pid, started + 1), made.path)
    os.close(lock)


@pytest.mark.parametrize("kind", ["a stranger's socket", "a link to a socket", "a file", "nothing", "no listener"])
async def test_a_socket_at_which_not_the_supervisor_listens_is_told_nothing(tmp_path, foreign, kind, monkeypatch):
    monkeypatch.setattr("hangguard.supervision.asking.ANSWER_WITHIN", 0.5)
    made, _ = noted(tmp_path, supervisor=identity(foreign))
    listener = None
    if kind == "a file":
        Path(made.file(CONTROL)).touch()
    elif kind == "a link to a socket":
        other = open_run_folder(tmp_path)
        listener, _ = listen_in(other.path)
        os.symlink(other.file(CONTROL), made.file(CONTROL))
    elif kind != "nothing":
        listener, _ = listen_in(made.path)
    if kind == "no listener":
        listener.close()
    with pytest.raises(NoAnswer) as silent:
        async with reattach(made.run_id, run_dir=tmp_path):
            pass
    if kind == "a stranger's socket":
        assert f"process {os.getpid()} of user {os.geteuid()} listens" in str(silent.value)
        connection, _ = listener.accept()
        assert connection.recv(10) == b""  # nothing was said to us
        connection.close()
    elif kind == "a link to a socket":
        with pytest.raises(BlockingIOError):
            listener.accept()
    if listener is not None:
        listener.close()


async def test_a_run_of_another_place_is_not_reached(tmp_path, foreign):
    here = this_place()
    for place in (
        replace(here, boot_id="x"),
        replace(here, pid_namespace="pid:[1]"),
        replace(here, user=here.user + 1),
    ):
        made, _ = noted(tmp_path, place=place, supervisor=identity(foreign), guardian=identity(foreign))
        with pytest.raises(NoSuchRun, match="cannot be reached from here"):
            async with reattach(made.run_id, run_dir=tmp_path):
                pass


async def test_names_of_no_run_of_several_and_of_a_damaged_one_are_told_apart(tmp_path):
    made, _ = noted(tmp_path)
    with pytest.raises(NoSuchRun, match="hangguard ps"):
        async with reattach("20990101-000000-abcdef", run_dir=tmp_path):
            pass
    noted(tmp_path)
    with pytest.raises(NoSuchRun, match=r"^2 runs begin with .*\. Which one\?\n"):
        async with reattach(made.run_id[:4], run_dir=tmp_path):
            pass
    Path(made.file("state.json")).write_text("{")
    with pytest.raises(NoSuchRun, match="nothing can be believed"):
        async with reattach(made.run_id, run_dir=tmp_path):
            pass


LISTENS = """
import os, socket, sys
os.chdir(sys.argv[1])
listener = socket.socket(socket.AF_UNIX)
listener.bind("control.sock")
listener.listen()
print("up", flush=True)
while True:
    connection, _ = listener.accept()
    connection.send(os.environ["SAYS"].encode())
"""


@pytest.mark.parametrize(
    ("says", "told"),
    [
        ("x" * 100, "nothing within|may be stopped"),
        ("[]\n", "not understood"),
        ('{"v": 2, "say": "status"}\n', "not understood"),
        ('{"v": 1, "say": "status", "status": {"state": 1}}\n', "not understood"),
        ('{"v": 1, "say": "error", "problem": "no"}\n', "no"),
    ],
)
async def test_a_supervisor_that_says_rubbish_or_nothing_is_no_answer(tmp_path, says, told, monkeypatch):
    monkeypatch.setattr("hangguard.supervision.by_supervisor.ANSWER_WITHIN", 0.5)
    made, state = noted(tmp_path)
    with sleeping(LISTENS, made.path, env={**os.environ, "SAYS": says}) as listens:
        write_state(made, replace(state, supervisor=identity(listens)))
        with pytest.raises(NoAnswer, match=told):
            async with reattach(made.run_id, run_dir=tmp_path):
                pass


async def test_a_supervisor_that_is_stopped_is_no_answer_in_bounded_time(tmp_path, monkeypatch):
    monkeypatch.setattr("hangguard.supervision.by_supervisor.ANSWER_WITHIN", 0.5)
    made, state = noted(tmp_path)
    with sleeping(LISTENS, made.path, env={**os.environ, "SAYS": ""}) as listens:
        write_state(made, replace(state, supervisor=identity(listens)))
        os.kill(listens.pid, signal.SIGSTOP)
        with anyio.fail_after(60), pytest.raises(NoAnswer, match="may be stopped"):
            async with reattach(made.run_id, run_dir=tmp_path):
                pass


def test_a_supervisor_that_dies_while_a_child_that_it_forked_keeps_the_connection_is_noticed(tmp_path):
    forks = "accept()\n    if os.fork() == 0:\n        import time; time.sleep(20)"
    program = LISTENS.replace("accept()", forks)
    made, state = noted(tmp_path)
    with sleeping(program, made.path, env={**os.environ, "SAYS": ""}, may_end=True) as listens:
        write_state(made, replace(state, supervisor=identity(listens)))
        children = []

        async def ask():
            async with asking(read_run(made.path), identity(listens), "wait") as answers:
                with anyio.fail_after(10):
                    while not children:
                        await anyio.sleep(0.01)
                        children.extend(Path(f"/proc/{listens.pid}/task/{listens.pid}/children").read_text().split())
                os.kill(listens.pid, signal.SIGKILL)
                assert await answers.next(10) is None

        try:
            anyio.run(ask)
        finally:
            for child in children:
                os.kill(int(child), signal.SIGKILL)


# ------------------------------------------------------------------------------------------- the faces


def test_both_faces_have_the_same_names_and_signatures():
    faces = [
        {name: member for name, member in inspect.getmembers(face) if not name.startswith("_")}
        for face in (ReattachedRun, AsyncReattachedRun)
    ]
    assert faces[0].keys() == faces[1].keys()
    for name, member in faces[0].items():
        if not isinstance(member, property):
            assert inspect.signature(member).parameters == inspect.signature(faces[1][name]).parameters, name


async def test_a_living_run_whose_state_file_is_damaged_is_reached_through_its_socket_and_mends_it(tmp_path):
    supervision = plain(tmp_path)
    async with supervision as server:
        state = Path(supervision.folder, "state.json")
        state.write_text("{")
        async with reattach(supervision.run_id, run_dir=tmp_path / "runs") as run:
            assert (run.url, run.pid) == (server.url, server.pid)
            await until(lambda: state.read_text() != "{")
            assert (await run.status()).told_by == "supervisor"
