"""What real threads sleep in: told apart where the kernel's function alone does not."""

import subprocess
import sys
import threading
from contextlib import contextmanager

import pytest
from seen import until, until_sync

from hangguard.facts import Process, Unseen
from hangguard.observe import _waits, stacks
from hangguard.observe.procfs import read_started

HEAD = "import threading, time, os; lock = threading.Lock(); lock.acquire(); "
BESIDE = HEAD + "threading.Thread(target={}, daemon=True).start(); lock.acquire()"


@contextmanager
def program(code):
    child = subprocess.Popen([sys.executable, "-c", code])
    try:
        yield child.pid
    finally:
        child.kill()
        child.wait()


def member(pid):
    return Process(
        pid=pid, started=read_started(pid), parent=1, title="it", name="it", state="S", threads=2, cpu_seconds=0.0,
        reaped_cpu_seconds=0.0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("code", "timed"), [("lock.acquire()", False), ("lock.acquire(timeout=100)", True)], ids=["lock", "with timeout"]
)
def test_a_lock_with_a_timeout_is_told_from_one_without(code, timed):
    with program(HEAD + code) as pid:
        wanted = "timed futex" if timed else "futex"
        until_sync(lambda: _waits.wait_channels(pid)[pid].startswith(wanted))


@pytest.mark.anyio
async def test_every_thread_has_its_own_and_the_main_one_is_the_members(tmp_path):
    with program(BESIDE.format("lambda: time.sleep(100)")) as pid:

        async def look():
            (stack,) = await stacks.take_stacks((member(pid),), within=5.0)
            there = not isinstance(stack.threads, Unseen) and stack.wait_channel.startswith("futex")
            return stack if there and len(stack.other_channels) == 1 and stack.other_channels != ("",) else None

        stack = await until(look)
        assert "sleep" in stack.other_channels[0] or "poll" in stack.other_channels[0]  # 3.10 sleeps in select
        main, beside = stack.threads
        assert main.wait_channel in {stack.wait_channel, None}
        assert beside.wait_channel in {stack.other_channels[0], None}


def test_where_the_arguments_are_missing_the_wait_may_be_timed(tmp_path):
    (tmp_path / "wchan").write_text("futex_wait_queue")
    assert _waits.wait_channel(str(tmp_path)) == "perhaps timed futex_wait_queue"
    (tmp_path / "syscall").write_text("449 0x1 0x2 0x3 0x0 0x0 0x0 0x7ffe 0x7f01\n")
    assert _waits.wait_channel(str(tmp_path)) == "perhaps timed futex_wait_queue"
    (tmp_path / "syscall").write_text("running\n")
    assert _waits.wait_channel(str(tmp_path)) == ""


def test_a_process_that_has_ended_is_an_error():
    child = subprocess.Popen(["true"])
    child.wait()
    with pytest.raises(FileNotFoundError):
        _waits.wait_channels(child.pid)


@pytest.mark.anyio
async def test_a_look_that_hangs_leaves_the_member_unseen_and_ends_in_time(monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(stacks, "wait_channels", lambda _pid: over.wait(30) and {})
    with program(HEAD + "lock.acquire()") as pid:
        (stack,) = await stacks.take_stacks((member(pid),), within=0.5)
        assert "did not answer" in stack.threads.reason
    over.set()
