# ruff: noqa: F811 - fixtures
"""An ending with no descriptor, no thread or no time left: it goes on, or says what it does not know."""

import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
from dataclasses import dataclass

import anyio
import pytest
from test_guardian import bystanders, is_gone, keep, members, serve, soon  # noqa: F401
from test_hung_start import only_free

from hangguard import held
from hangguard.act import _aside, _link, _membership, _signals, without_guardian
from hangguard.act.conversation import Conversation
from hangguard.act.without_guardian import stop_members

pytestmark = pytest.mark.anyio


@pytest.fixture
def sleepers(keep):
    """A process to be ended, and one that is not."""
    found = [subprocess.Popen(["/bin/sleep", "100"]) for _ in range(2)]
    for process in found:
        keep(process)
    return found


def survive(bystanders):
    return [name for name, process in bystanders.items() if process.poll() is not None] == []


# ------------------------------------------------------------------------------------------- no thread


def test_a_look_at_everybody_that_gets_no_thread_is_not_done_and_says_why(monkeypatch):
    def no_more(_):
        raise RuntimeError("can't start new thread")

    others = held.Others()
    mapped = {"device": 1, "inode": 2, "path": "/dev/shm/hangguard-test", "kind": "file", "held": "shared"}
    monkeypatch.setattr(threading.Thread, "start", no_more)
    others.run([mapped], [], [])
    assert not others.is_done
    assert "can't start new thread" in others.problem
    assert others.settled([mapped]) == []


@pytest.mark.parametrize(
    "problem",
    [RuntimeError("can't start new thread"), pytest.param(ValueError("odd text in /proc"), marks=pytest.mark.long)],
)
async def test_with_the_guardian_dead_a_look_for_files_that_fails_does_not_prevent_the_end(
    serve, members, bystanders, monkeypatch, problem
):
    def fail(*_):
        raise problem

    async with serve("setsid", "stubborn") as server:
        found = members("root", "setsid")
        os.kill(server.guardian_pid, signal.SIGKILL)
        await soon(lambda: not server.guardian_alive)
        monkeypatch.setattr(held.Others, "run", fail)
        stopped = await server.stop(grace=0.2)
        assert stopped.survivors == ()
        assert [why for why in stopped.files_unseen if str(problem) in why] != []
    assert all(map(is_gone, found.values()))
    assert survive(bystanders)


# -------------------------------------------------------------------------------------- no descriptor


def test_a_pidfd_that_cannot_be_proved_is_closed_and_nobody_is_signalled(sleepers):
    identity = _membership.read_entry(sleepers[0].pid).identity
    before = len(os.listdir("/proc/self/fd"))
    with only_free(1):
        with pytest.raises(OSError, match="Too many open files") as refused:
            _signals.open_pidfd(identity)
        assert not _signals.send(identity, signal.SIGKILL, {identity})
    assert refused.value.errno == errno.EMFILE
    assert len(os.listdir("/proc/self/fd")) == before
    with only_free(0):
        assert not _signals.send(identity, signal.SIGKILL, {identity})
    assert [process.poll() for process in sleepers] == [None, None]
    assert _signals.send(identity, signal.SIGKILL, {identity})
    assert sleepers[0].wait(10) == -signal.SIGKILL
    assert sleepers[1].poll() is None


@pytest.mark.long
async def test_the_end_of_a_process_that_nobody_can_look_at_is_not_seen(sleepers):
    ended = without_guardian.wait_for_end(_membership.read_entry(sleepers[0].pid).identity, None)
    with only_free(0), anyio.move_on_after(0.7) as limit:
        await ended
    assert limit.cancelled_caught


# --------------------------------------------------------------------------------------------- no time


@pytest.mark.parametrize("how", ["no time", "no descriptor"])
async def test_an_ending_that_does_not_come_back_leaves_survivors_unknown_and_not_none(sleepers, monkeypatch, how):
    identity = _membership.read_entry(sleepers[0].pid).identity
    held_up = threading.Event()

    def slow():
        if how == "no descriptor":
            raise OSError(errno.EMFILE, "Too many open files")
        held_up.wait(20)
        return {}

    with monkeypatch.context() as poor:
        poor.setattr(without_guardian, "TAKE_OVER_WITHIN", 0.2)
        poor.setattr(_membership, "read_entries", slow)
        stopped = await stop_members(identity, {identity}, grace=0.0)
    held_up.set()
    [survivor] = stopped.survivors
    assert (survivor.pid, survivor.started) == identity
    assert survivor.title in {"no answer within 0.2 s", "nobody could look: Too many open files"}
    assert stopped.ended == 0
    assert sleepers[1].poll() is None


# -------------------------------------------------------------------------------------- two at a time


@dataclass
class Pair:
    ours: _link.Link
    theirs: socket.socket


@pytest.fixture
def slow_guardian(keep):
    """A link whose other end reads only what the test reads."""
    ours, theirs = socket.socketpair()
    ours.settimeout(0.0)
    theirs.settimeout(10)
    process = subprocess.Popen(["/bin/sleep", "100"])
    keep(process)
    death = _link.Descriptor(os.open("/dev/null", os.O_WRONLY))
    link = _link.Link(process=process, started=0, control=ours, death=death, pidfd=None)
    yield Pair(link, theirs)
    link.close()
    theirs.close()


async def test_two_messages_at_once_wait_for_room_one_after_the_other(slow_guardian):
    link, theirs = slow_guardian.ours, slow_guardian.theirs
    arrived = bytearray()
    async with anyio.create_task_group() as tasks:
        for number in range(2):
            tasks.start_soon(link.send, {"do": "remember", "number": number, "much": "x" * 1_000_000})
        await anyio.wait_all_tasks_blocked()
        theirs.setblocking(False)
        while arrived.count(b"\n") < 2:
            with contextlib.suppress(BlockingIOError):
                arrived += theirs.recv(1 << 16)
            await anyio.sleep(0)
    assert [line[:40].count(b'"do": "remember"') for line in arrived.splitlines()] == [1, 1]


async def test_two_stops_that_read_for_themselves_get_the_same_answer(slow_guardian):
    """As at the end of asyncio.run(), which cancels the task that reads."""
    talk, heard, answers = Conversation(slow_guardian.ours), [], []

    async def nothing():
        pass

    async def stop():
        answers.append(await talk.ask_to_stop(0.0, within=20.0, hear=heard.append, after_each=nothing))

    with anyio.fail_after(10):
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(stop)
            tasks.start_soon(stop)
            await anyio.wait_all_tasks_blocked()
            slow_guardian.theirs.sendall(b'{"v": 1, "say": "stopped"}\n')
    assert [answer["say"] for answer in answers] == ["stopped", "stopped"]
    assert len(heard) == 1


# ------------------------------------------------------------------------------------------ no limits


@pytest.mark.parametrize("limits", [b"", b"Max core file size", b"Limit  Soft Limit  Hard Limit  Units\n"])
def test_limits_that_are_not_told_are_a_reason_not_to_abort(limits):
    assert "core limit is not told" in _aside._core_of(limits, b"core\n")
