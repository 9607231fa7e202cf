"""A supervising program for places that a test cannot be in itself: prints one JSON object.

Arguments: the server to start, one of those below, and a folder. It runs in namespaces, without rights, or with few
descriptors; what it says is judged by the test.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio

from hangguard import Limits, supervise
from hangguard.act.spawn import guarded
from hangguard.errors import HangguardError
from hangguard.facts import Process, Unseen
from hangguard.observe.procfs import read_started
from hangguard.observe.stacks import take_stacks

KIND, FOLDER = sys.argv[1], Path(sys.argv[2])
SERVER = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
ORPHAN = """
import os, sys, time
if os.fork():
    time.sleep(60)
os.setsid()
if os.fork() == 0:
    os.setuid(int(sys.argv[2]))
    open(sys.argv[1], "w").write(str(os.getpid()))
    os.execve("/bin/sleep", ["sleep", "60"], {})
"""


def until(condition):
    ends = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.01)


def lives(pid):
    """Whether it can be signalled and is no zombie, as far as that can be seen."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except ProcessLookupError:
        return False
    except OSError:
        return True


async def guard_an_orphan(*, kill_guardian=False, uid=0):
    """A server with a member that left it, emptied its environment, and perhaps became somebody else."""
    written = FOLDER / "orphan"
    async with guarded(
        argv=[sys.executable, "-c", ORPHAN, str(written), str(uid)], env={}, cwd="/",
        log_path=str(FOLDER / "log"), lock_path=None, death_grace=0.2, on_death="stop", pristine=False,
    ) as server:  # fmt: skip
        until(lambda: written.exists() and written.read_text())
        if kill_guardian:
            os.kill(server.guardian_pid, signal.SIGKILL)
            with anyio.fail_after(5):
                while server.guardian_alive:
                    await anyio.sleep(0.01)
        stopped = await server.stop(grace=0.2)
        said = {
            "by": stopped.by,
            "survivors": [survivor.pid for survivor in stopped.survivors],
            "alive": lives(int(written.read_text())),
        }
        if stopped.survivors:  # leaving the block would try once more; they end with this namespace
            tell(said)
            os._exit(0)
    return said


async def give_the_pid_of_a_member_away(*, kill_guardian):
    """In a pid namespace of our own, where the next pid can be chosen."""
    async with guarded(
        argv=["/bin/sh", "-c", "/bin/sleep 60 & wait; exec /bin/sleep 60"], env={}, cwd="/",
        log_path=str(FOLDER / "log"), lock_path=None, death_grace=0.2, on_death="stop", pristine=False,
    ) as server:  # fmt: skip
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children")
        until(children.read_text)
        member = int(children.read_text())
        server.remember([(member, read_started(member))])
        if kill_guardian:
            os.kill(server.guardian_pid, signal.SIGKILL)
            with anyio.fail_after(5):
                while server.guardian_alive:
                    await anyio.sleep(0.01)
        os.kill(member, signal.SIGKILL)
        until(lambda: not Path(f"/proc/{member}").exists())
        time.sleep(0.02)  # a start time is told to the hundredth of a second, and forks come faster than that
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(member - 1))
        heir = subprocess.Popen(["/bin/sleep", "60"])
        stopped = await server.stop(grace=0.2)
        return {
            "same_pid": heir.pid == member,
            "survivors": [survivor.pid for survivor in stopped.survivors],
            "root_alive": lives(server.pid),
            "heir_alive": heir.poll() is None,
        }


def serve_without_descriptors():
    limits = Limits(ready_within=20, stop_grace=1, release_within=1)
    with supervise(SERVER, url="http://127.0.0.1:{port}", cwd=FOLDER, run_dir=FOLDER / "runs", limits=limits) as server:
        pid = server.pid
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        take_all_descriptors()
        time.sleep(1.5)  # some samples see nothing
        take_all_descriptors()  # those too that were in use for a moment
    release = server.attempt.release
    return {"alive": lives(pid), "answers": {item.resource: item.answer for item in release.items}}


def take_all_descriptors():
    try:
        while True:
            os.dup(0)
    except OSError:
        pass


def stacks_in_a_forked_child():
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    reads, writes = os.pipe()
    first = how_many_stacks(sleeper.pid)
    if os.fork() == 0:
        os.write(writes, str(how_many_stacks(sleeper.pid)).encode())
        os._exit(0)
    os.close(writes)
    second = os.read(reads, 100).decode()
    sleeper.kill()
    return {"parent": first, "child": int(second or -1)}


def how_many_stacks(pid):
    member = Process(pid=pid, started=read_started(pid), parent=0, title="", name="", state="S", threads=1,
                     cpu_seconds=0, reaped_cpu_seconds=0, minor_faults=0, major_faults=0, rss_bytes=0,
                     read_chars=0, written_chars=0, disk_read_bytes=0)  # fmt: skip
    (stack,) = anyio.run(lambda: take_stacks((member,), within=5))
    return -2 if isinstance(stack.threads, Unseen) else len(stack.threads)


KINDS = {
    "orphan": lambda: anyio.run(guard_an_orphan),
    "orphan-takeover": lambda: anyio.run(lambda: guard_an_orphan(kill_guardian=True)),
    "orphan-of-another-user": lambda: anyio.run(lambda: guard_an_orphan(uid=1)),
    "reused-pid": lambda: anyio.run(lambda: give_the_pid_of_a_member_away(kill_guardian=True)),
    "reused-pid-guarded": lambda: anyio.run(lambda: give_the_pid_of_a_member_away(kill_guardian=False)),
    "no-descriptors": serve_without_descriptors,
    "forked": stacks_in_a_forked_child,
}


def tell(said):
    said["bystander"] = bystander.poll()
    bystander.kill()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    bystander = subprocess.Popen(["/bin/sleep", "60"])
    try:
        tell(KINDS[KIND]())
    except HangguardError as error:
        tell({"error": type(error).__name__, "text": str(error)})
