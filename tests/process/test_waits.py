"""What real threads sleep in: told apart where the kernel's function alone does not."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

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
        assert isinstance(stack.threads, Unseen), "which of the deadlines came first is the machine's affair"
    over.set()


def test_of_another_users_process_nothing_is_made_up():
    """The kernel shows a stranger's wait as "0", which would mean that it runs."""
    code = (
        "import anyio, os, sys, functools\n"
        "from hangguard.facts import Unseen\n"
        "from hangguard.observe import stacks, memory_stacks\n"
        "sys.path.insert(0, sys.argv[2])\n"
        "from test_stacks import member\n"
        "it = member(int(sys.argv[1]))\n"
        "look = functools.partial(stacks.take_stacks, (it,), within=5.0, reader=memory_stacks.read_directly)\n"
        "anyio.run(look)\n"  # so that all is imported: nobody may perhaps not read it
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "(stack,) = anyio.run(look)\n"
        "print(stack.wait_channel.reason, stack.other_channels, repr(stack.system_call), stack.is_python, sep='|')\n"
        "print(stack.threads.reason)\n"
    )
    with program(HEAD + "lock.acquire()") as pid:
        target = pid if os.getuid() == 0 else 1
        argv = [sys.executable, "-c", code, str(target), str(Path(__file__).parent)]
        told, why = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    assert told == "not permitted|()|''|True"
    assert "this program: its memory may not be read: another user's" in why


def test_the_system_call_of_each_thread_is_named():
    with program(BESIDE.format("lambda: os.read(os.pipe()[0], 1)")) as pid:

        def named():
            calls = _waits.system_calls(pid)
            return calls if len(calls) == 2 else None

        calls = until_sync(named)
        until_sync(lambda: sorted(_waits.system_calls(pid).values()) == ["futex", "read"])
        assert _waits.system_calls(pid)[pid] == "futex"
        assert set(calls) == set(map(int, os.listdir(f"/proc/{pid}/task")))
