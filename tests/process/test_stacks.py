"""Stacks: where the threads of a hung server stand, or why that cannot be told. Nothing is changed by it."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import anyio
import pytest

from hangguard.facts import Process, Unseen
from hangguard.observe.stacks import MISSING, find_py_spy, take_stacks

pytestmark = pytest.mark.anyio
DEADLOCK = Path(__file__).parent / "programs" / "stack_deadlock.py"


def stat(pid):
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def member(pid, *, started=None):
    return Process(
        pid=pid, started=int(stat(pid)[19]) if started is None else started, parent=1, title=f"member {pid}",
        name="", state="S", threads=1, cpu_seconds=0.0, reaped_cpu_seconds=0.0, minor_faults=0, major_faults=0,
        rss_bytes=0,
    )  # fmt: skip


def wait_until(condition, within=10.0):
    give_up_at = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.01)


@contextlib.contextmanager
def running(*argv, lines=0, **options):
    """A program of ours, once it has printed so many lines."""
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, **options)
    try:
        for _ in range(lines):
            assert process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        if process.stdin:
            process.stdin.close()


@pytest.fixture
def deadlocked():
    with running(sys.executable, str(DEADLOCK), lines=2) as process:
        # Both threads are in the lock's wait once the kernel has them asleep.
        tasks = Path(f"/proc/{process.pid}/task")
        wait_until(lambda: all("futex" in (task / "wchan").read_text() for task in tasks.iterdir()))
        yield process


def stand_in(folder, text):
    """A program named py-spy that does something else."""
    program = folder / "py-spy"
    program.write_text(text)
    program.chmod(0o755)
    return (str(folder),)


def processes_of(program):
    """Every process whose command line names this file."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(program).encode() in entry.read_bytes():
                found.append(int(entry.parent.name))
    return found


async def test_a_deadlock_stands_where_it_stands(deadlocked):
    first = await take_stacks((member(deadlocked.pid),), within=5)
    second = await take_stacks((member(deadlocked.pid),), within=5)
    assert first == second
    (stack,) = first
    assert (stack.pid, stack.title, stack.is_python) == (deadlocked.pid, f"member {deadlocked.pid}", True)
    assert "futex" in stack.wait_channel
    main, loader = stack.threads
    assert main.name == "MainThread"
    if sys.version_info >= (3, 11):  # before, py-spy does not know the kernel's numbers
        assert main.thread_id == deadlocked.pid
        assert not any(thread.active for thread in stack.threads)
    assert [frame.function for frame in main.frames] == ["wait_for_the_lock", "<module>"]
    assert (main.frames[0].file, main.frames[0].line) == (str(DEADLOCK), 11)
    assert loader.name == "loader"
    # Innermost first, and without the class that py-spy gives only from Python 3.11 on.
    functions = [frame.function for frame in loader.frames]
    assert functions == ["wait_for_the_lock", "run", "_bootstrap_inner", "_bootstrap"]


async def test_a_stopped_program_is_read_and_stays_stopped(deadlocked):
    os.kill(deadlocked.pid, signal.SIGSTOP)
    wait_until(lambda: stat(deadlocked.pid)[0] == "T")
    (stack,) = await take_stacks((member(deadlocked.pid),), within=5)
    assert stack.threads[0].frames[0].function == "wait_for_the_lock"
    assert stat(deadlocked.pid)[0] == "T"


async def test_many_members_come_in_their_order(deadlocked):
    with contextlib.ExitStack() as stack:
        others = [stack.enter_context(running(sys.executable, str(DEADLOCK), lines=2)) for _ in range(9)]
        members = tuple(member(process.pid) for process in (deadlocked, *others))
        stacks = await take_stacks(members, within=10)
        assert [found.pid for found in stacks] == [process.pid for process in (deadlocked, *others)]
        assert {found.threads[0].frames[0].function for found in stacks} == {"wait_for_the_lock"}


async def test_a_program_without_python_has_its_wait_channel():
    with running("sleep", "60") as process:
        wait_until(lambda: "nanosleep" in Path(f"/proc/{process.pid}/wchan").read_text())
        (stack,) = await take_stacks((member(process.pid),), within=5)
    assert not stack.is_python
    assert stack.threads == Unseen("not a Python program")
    assert "nanosleep" in stack.wait_channel


async def test_python_is_known_by_its_library_too(tmp_path):
    """A program that embeds Python is no foreign program, whatever its name."""
    library, program = tmp_path / "libpython3.so", tmp_path / "engine"
    library.write_bytes(bytes(4096))
    shutil.copy(os.path.realpath(sys.executable), program)
    code = (
        "import mmap, sys\n"
        "file = open(sys.argv[1], 'r+b')\n"
        "mapped = mmap.mmap(file.fileno(), 0)\n"
        "print('mapped', flush=True)\n"
        "sys.stdin.read()"
    )
    argv = (str(program), "-c", code, str(library))
    env = {**os.environ, "PYTHONHOME": sys.base_prefix}
    folders = stand_in(tmp_path, "#!/bin/sh\necho 'Error: cannot' >&2\nexit 1\n")
    with running(*argv, lines=1, stdin=subprocess.PIPE, env=env) as process:
        (stack,) = await take_stacks((member(process.pid),), within=5, folders=folders)
    assert stack.is_python
    assert stack.threads == Unseen("py-spy: cannot")


async def test_a_process_that_has_ended_says_so(deadlocked):
    gone = subprocess.Popen([sys.executable, "-c", "pass"])
    identity = member(gone.pid)
    gone.wait()
    other = member(deadlocked.pid, started=member(deadlocked.pid).started - 1)  # the pid was used again
    stacks = await take_stacks((identity, other, member(deadlocked.pid)), within=5)
    assert [stack.threads for stack in stacks[:2]] == [Unseen("the process has ended")] * 2
    assert [stack.wait_channel for stack in stacks[:2]] == [Unseen("the process has ended")] * 2
    assert not isinstance(stacks[2].threads, Unseen)


async def test_a_process_that_ends_meanwhile_says_so(deadlocked, tmp_path):
    folders = stand_in(tmp_path, f"#!/bin/sh\nkill -KILL {deadlocked.pid}\necho '[]'\n")
    identity = member(deadlocked.pid)
    ended = anyio.Event()

    async def reap():
        while deadlocked.poll() is None:
            await anyio.sleep(0.01)
        ended.set()

    async with anyio.create_task_group() as group:
        group.start_soon(reap)
        with anyio.fail_after(10):
            (stack,) = await take_stacks((identity,), within=5, folders=folders)
            await ended.wait()
            (later,) = await take_stacks((identity,), within=5)
    assert stack.threads in {(), Unseen("the process has ended")}  # by when its parent has reaped it
    assert later.threads == Unseen("the process has ended")


async def test_stacks_missing_says_how_to_install(tmp_path):
    assert await take_stacks((member(os.getpid()),), within=5, folders=(str(tmp_path),), path="") == MISSING
    assert "pip install 'hangguard[stacks]'" in MISSING.reason
    assert find_py_spy() is not None


async def test_stacks_hanging_is_unseen_within_its_deadline(deadlocked, tmp_path):
    folders = stand_in(tmp_path, "#!/bin/sh\nwhile :; do read x < /dev/zero; done\n")
    bystanders = tmp_path / "bystander"
    bystanders.mkdir()
    stand_in(bystanders, "#!/bin/sh\necho started\nread x\n")
    argv = ("/bin/sh", str(bystanders / "py-spy"), "dump", "--pid", str(deadlocked.pid))
    with running(*argv, lines=1, stdin=subprocess.PIPE) as bystander:
        began = time.monotonic()
        members = tuple(member(pid) for pid in (deadlocked.pid, os.getpid()))
        stacks = await take_stacks(members, within=1, folders=folders)
        assert time.monotonic() - began < 1.5
        assert [stack.threads for stack in stacks] == [Unseen("py-spy did not answer within 0.9 s")] * 2
        assert "futex" in stacks[0].wait_channel
        assert processes_of(tmp_path / "py-spy") == []  # killed and reaped
        assert bystander.poll() is None
        assert deadlocked.poll() is None


async def test_a_cancelled_look_leaves_no_process(deadlocked, tmp_path):
    folders = stand_in(tmp_path, "#!/bin/sh\nwhile :; do read x < /dev/zero; done\n")
    for moment in (0.0, 0.002, 0.02, 0.2):
        with anyio.move_on_after(moment):
            await take_stacks((member(deadlocked.pid),) * 2, within=30, folders=folders)
        wait_until(lambda: processes_of(tmp_path / "py-spy") == [])
    (stack,) = await take_stacks((member(deadlocked.pid),), within=5)
    assert not isinstance(stack.threads, Unseen)


async def test_two_looks_at_once_do_not_hinder_each_other(deadlocked):
    taken = []

    async def look():
        taken.append(await take_stacks((member(deadlocked.pid),), within=5))

    async with anyio.create_task_group() as group:
        for _ in range(3):
            group.start_soon(look)
    assert taken[0] == taken[1] == taken[2]
    assert not isinstance(taken[0][0].threads, Unseen)


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("#!/bin/sh\necho nonsense\n", "py-spy's answer cannot be read"),
        ("#!/bin/sh\necho '[{}]'\n", "py-spy's answer cannot be read"),
        ("#!/bin/sh\nexit 3\n", "py-spy ended with code 3"),
        ("#!/no/such/shell\n", "py-spy cannot be run"),
        ("#!/bin/sh\nexec head -c 17000000 /dev/zero\n", "the dump is larger than 16 MiB"),
    ],
)
async def test_a_py_spy_that_fails_says_why(tmp_path, script, reason):
    (stack,) = await take_stacks((member(os.getpid()),), within=5, folders=stand_in(tmp_path, script))
    assert stack.is_python
    assert reason in stack.threads.reason


async def test_a_process_that_may_not_be_read_says_so(deadlocked, tmp_path):
    """The real py-spy as another user; where the tests are not root, process 1 is somebody else's already."""
    folders, target = None, 1
    with tempfile.TemporaryDirectory(dir="/tmp") as public:
        if os.getuid() == 0:
            target = deadlocked.pid
            copy = Path(public) / "py-spy-of-nobody"
            shutil.copy(find_py_spy(), copy)
            Path(public).chmod(0o755)
            become_nobody = (
                f"#!{sys.executable}\nimport os, sys\nos.setgroups([])\nos.setgid(65534)\nos.setuid(65534)\n"
                f"os.execv({str(copy)!r}, sys.argv)\n"
            )
            folders = stand_in(tmp_path, become_nobody)
        (stack,) = await take_stacks((member(target),), within=5, folders=folders)
    assert stack.is_python  # it cannot be told, so it is missed
    assert stack.threads == Unseen("py-spy may not read this process: another user's, or ptrace is restricted here")
