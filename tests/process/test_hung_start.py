# ruff: noqa: F811 - fixtures
"""A start that is broken off, or hangs, leaves no server, now or later, and touches nobody else."""

import contextlib
import fcntl
import os
import pickle
import resource
import signal
import subprocess
import sys
from pathlib import Path

import anyio
import psutil
import pytest
from test_guardian import bystanders, eventually, is_gone, keep, members, serve, soon  # noqa: F401

from hangguard.act import _link, _membership, guarded, hung_start
from hangguard.act.belongings import Belongings
from hangguard.act.guarded import Guarded
from hangguard.act.trial import try_guardian
from hangguard.errors import GuardianFailed

pytestmark = pytest.mark.anyio

STUBBORN = ["/bin/sh", "-c", 'trap "" TERM; echo started; while :; do sleep 0.1; done']


def writers(log):
    log_id = (log.stat().st_dev, log.stat().st_ino)
    return _membership.log_writers(log_id, _membership.read_entries())


def guardians():
    return [child for child in psutil.Process().children() if _is_guardian(child)]


def _is_guardian(process):
    with contextlib.suppress(psutil.Error):
        return _link.GUARDIAN in " ".join(process.cmdline())
    return False  # it has ended


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path):
    """What a test that fails has found left behind."""
    yield
    log = tmp_path / "server.log"
    for pid in writers(log) if log.exists() else ():
        psutil.Process(pid).kill()


@pytest.fixture
def impatient(monkeypatch):
    """A start limit and a patience with the guardian that a test can wait for."""
    monkeypatch.setattr(guarded, "START_WITHIN", 0.5)
    monkeypatch.setattr(guarded, "TAKE_OVER_WITHIN", 0.5)


@pytest.fixture
def locked_program(tmp_path):
    """A program whose exec waits as for a dead disk: somebody has a write lease on it, for 45 s at most.

    It writes its pid into the folder that is its argument, if it starts. Call it to give the lease up.
    """
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho $$ > "$1/started"\nexec sleep 100\n')
    program.chmod(0o755)
    lease = os.open(program, os.O_RDONLY)
    fcntl.fcntl(lease, fcntl.F_SETSIG, signal.SIGURG)  # the kernel asks for it back with SIGIO, which kills
    fcntl.fcntl(lease, fcntl.F_SETLEASE, fcntl.F_WRLCK)

    def give_up():
        nonlocal lease
        if lease >= 0:
            os.close(lease)
            lease = -1

    yield str(program), give_up
    give_up()


@pytest.fixture
def other_start(tmp_path, keep, locked_program):
    """Somebody else who starts the same program, and waits as we do."""
    other = tmp_path / "other"
    other.mkdir()
    start = f"import subprocess; subprocess.run({[locked_program[0], str(other)]!r})"
    process = subprocess.Popen([sys.executable, "-c", start], start_new_session=True)
    keep(process)
    eventually(psutil.Process(process.pid).children)
    [child] = psutil.Process(process.pid).children()
    keep(child)
    return child, other / "started"


# ------------------------------------------------------------------------------------------- broken off


@pytest.mark.parametrize("on_death", ["keep", pytest.param("stop", marks=pytest.mark.long)])
async def test_a_start_that_is_cancelled_leaves_no_server_also_under_keep(serve, bystanders, tmp_path, on_death):
    with anyio.CancelScope() as scope:
        scope.cancel()  # what is shielded goes on until the launch was sent
        async with serve(argv=STUBBORN, on_death=on_death):
            await anyio.sleep(100)  # the answer was faster
    assert scope.cancelled_caught
    assert guardians() == []
    assert writers(tmp_path / "server.log") == set()
    assert {name for name, process in bystanders.items() if process.poll() is not None} == set()


@pytest.mark.long
async def test_a_server_that_was_started_when_the_start_failed_is_ended_under_keep(
    serve, bystanders, tmp_path, monkeypatch
):
    def refuse(*_):
        raise OSError("no room")

    monkeypatch.setattr(Belongings, "begin", refuse)
    with pytest.raises(OSError, match="no room"):
        async with serve(argv=STUBBORN, on_death="keep"):
            pytest.fail("the body was entered")
    assert guardians() == []
    assert writers(tmp_path / "server.log") == set()
    assert {name for name, process in bystanders.items() if process.poll() is not None} == set()


async def test_a_stop_that_raises_hides_neither_the_bodys_exception_nor_lets_the_server_live(
    serve, bystanders, tmp_path, monkeypatch
):
    async def fail(*_, **__):
        raise OSError("the stop failed")

    monkeypatch.setattr(Guarded, "stop", fail)
    with pytest.raises(ValueError, match="mine"):
        async with serve(argv=STUBBORN, on_death="keep"):
            raise ValueError("mine")
    assert writers(tmp_path / "server.log") == set()
    with pytest.raises(OSError, match="the stop failed"):
        async with serve(argv=STUBBORN, on_death="keep"):
            pass
    assert writers(tmp_path / "server.log") == set()
    with anyio.move_on_after(0.3) as scope:  # the task groups around it are whole
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(anyio.sleep, 100)
    assert scope.cancelled_caught
    assert {name for name, process in bystanders.items() if process.poll() is not None} == set()


# ------------------------------------------------------------------------------------------------ hanging


@pytest.mark.parametrize("how", [pytest.param("the limit", marks=pytest.mark.long), "a cancel"])
async def test_a_server_whose_exec_hangs_does_not_start_later(
    serve, tmp_path, impatient, locked_program, other_start, keep, how
):
    program, give_up = locked_program
    seen = []

    async def look(scope):
        await soon(lambda: guardians() and guardians()[0].children())
        seen.extend(guardians()[0].children())
        if how == "a cancel":
            scope.cancel()

    said = ""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look, tasks.cancel_scope)
        try:
            async with serve(argv=[program, str(tmp_path)], on_death="keep"):
                pytest.fail("the body was entered")
        except GuardianFailed as failure:
            said = str(failure)
    [child] = seen
    keep(child)
    assert is_gone(child)
    assert guardians() == []
    if how == "the limit":
        assert "did not start within" in said
        assert "Nothing of the server was left running" in said
    other, started = other_start
    assert not is_gone(other)
    give_up()
    await soon(started.exists)
    assert started.read_text().strip() == str(other.pid)
    assert not (tmp_path / "started").exists()


async def test_a_server_that_starts_after_the_caller_has_gone_is_ended_by_its_guardian_under_keep(
    serve, tmp_path, locked_program, other_start, keep, monkeypatch
):
    program, give_up = locked_program
    hang_up, seen = _link.Link.hang_up, []

    def hang_up_and_let_it_start(link):
        hang_up(link)
        give_up()

    async def nothing_hangs(_):
        pytest.fail("the guardian kept it")

    monkeypatch.setattr(_link.Link, "hang_up", hang_up_and_let_it_start)
    monkeypatch.setattr(guarded, "end_hung_start", nothing_hangs)

    async def look(scope):
        await soon(lambda: guardians() and guardians()[0].children())
        seen.extend(guardians()[0].children())
        scope.cancel()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(look, tasks.cancel_scope)
        async with serve(argv=[program, str(tmp_path)], on_death="keep"):
            pytest.fail("the body was entered")
    [server] = seen
    keep(server)
    assert is_gone(server)
    assert guardians() == []
    assert writers(tmp_path / "server.log") == set()
    other, started = other_start
    await soon(started.exists)
    assert not is_gone(other)


@pytest.mark.long
async def test_what_cannot_be_ended_while_it_starts_is_told(
    serve, tmp_path, impatient, locked_program, keep, monkeypatch
):
    """As where execve waits for a disk that not even SIGKILL interrupts."""
    program, give_up = locked_program
    seen = []

    def kill(processes):
        seen.extend(processes)
        return set(processes)

    monkeypatch.setattr(hung_start, "_kill", kill)
    monkeypatch.setattr(hung_start, "NEWS_WITHIN", 1.0)
    with pytest.raises(GuardianFailed) as failed:
        async with serve(argv=[program, str(tmp_path)]):
            pytest.fail("the body was entered")
    child = psutil.Process(seen[0][0])
    keep(child)
    assert f"Process {child.pid}, which was to become the server" in str(failed.value)
    assert "Nothing of the server" not in str(failed.value)
    assert str(pickle.loads(pickle.dumps(failed.value))) == str(failed.value)
    assert not is_gone(child)
    child.kill()
    give_up()


@pytest.mark.long
async def test_a_guardian_that_is_killed_by_somebody_while_exec_hangs_is_not_called_clean(
    serve, tmp_path, impatient, locked_program, keep
):
    program, _ = locked_program
    seen = []

    async def kill():
        await soon(lambda: guardians() and guardians()[0].children())
        seen.extend(guardians()[0].children())
        guardians()[0].kill()

    caught = None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(kill)
        try:
            async with serve(argv=[program, str(tmp_path)]):
                pytest.fail("the body was entered")
        except GuardianFailed as failure:
            caught = failure
    keep(seen[0])
    assert "may start yet" in str(caught)
    assert "othing of the server was left" not in str(caught)


# ---------------------------------------------------------------------------------- a poor environment


@contextlib.contextmanager
def only_free(count):
    """Leave this process so many descriptors that it can open."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = [os.dup(0) for _ in range(count + 1)]
    for number in free:
        os.close(number)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[-1], before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.long
async def test_a_launch_that_finds_no_descriptor_for_a_pidfd_does_without(serve, members, bystanders, monkeypatch):
    hear, limit = _link.Link.next_message, contextlib.ExitStack()

    async def next_message(link):
        message = await hear(link)
        if message.get("say") == "launched":
            limit.enter_context(only_free(1))
        return message

    monkeypatch.setattr(_link.Link, "next_message", next_message)
    with limit:
        async with serve("setsid") as server:
            limit.close()
            found = members("root", "setsid")
            assert (await server.stop(grace=0.2)).survivors == ()
    assert all(map(is_gone, found.values()))
    assert {name for name, process in bystanders.items() if process.poll() is not None} == set()


@pytest.mark.long
async def test_with_however_few_descriptors_a_guardian_starts_or_is_refused_with_what_helps():
    refused = []
    for count in range(16):
        link = None
        before = set(Path("/proc/self/fd").iterdir())
        with only_free(count):
            try:
                link = await _link.start_guardian()
            except GuardianFailed as failure:
                refused.append(str(failure))
        if link is not None:
            link.hang_up()
            await link.end_guardian()
            link.close()
        await soon(lambda before=before: len(set(Path("/proc/self/fd").iterdir())) <= len(before))
        assert guardians() == []
    assert 0 < len(refused) < 16
    assert [why for why in refused if "ulimit -n" not in why] == []


async def test_preflights_trial_of_a_guardian_says_why_without_descriptors():
    with only_free(2):
        trial = await try_guardian(within=5.0)
    assert "ulimit -n" in trial.problem
