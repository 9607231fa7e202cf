"""What the tests of the probes share."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import anyio

from hangguard.facts import Launch, Process
from hangguard.observe import Target
from hangguard.observe.procfs import read_started, read_stat

PROGRAMS = Path(__file__).parent / "programs"


def launch(port=1, **more):
    more.setdefault("url", f"http://127.0.0.1:{port}")
    return Launch(argv=("server",), env=(), cwd="/", host="127.0.0.1", port=port, **more)


def target(guardian=0, root=(0, 0), *, port=1, log_path=None, given=None, **more):
    more.setdefault("probe_within", 5.0)
    return Target(guardian_pid=guardian, root=root, log_path=log_path, launch=given or launch(port), **more)


async def until(condition, *, within=10.0):
    """Ask ``condition`` (plain or a coroutine function) until its answer is true; return that."""
    deadline = time.monotonic() + within
    while True:
        answer = condition()
        if hasattr(answer, "__await__"):
            answer = await answer
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {within} s: {condition}"
        await anyio.sleep(0.01)


def until_sync(condition, *, within=10.0):
    deadline = time.monotonic() + within
    while not (answer := condition()):
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.01)
    return answer


class Clock:
    """Real time, and a jump where a test wants one."""

    def __init__(self):
        self.jumped = 0.0

    def __call__(self):
        return time.monotonic() + self.jumped


@contextmanager
def in_a_thread(server):
    """Let an HTTP server answer; its ``gate`` lets go at the end whom it keeps waiting."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield
    finally:
        server.gate.set()
        server.shutdown()
        thread.join()
        server.server_close()


def member(pid):
    """A process as a member of the launch, of which nothing but its identity counts."""
    stat = read_stat(f"/proc/{pid}/stat")
    return Process(
        pid=pid, started=stat.started, parent=stat.parent, title="rank", name="rank", state=stat.state, threads=1,
        cpu_seconds=0, reaped_cpu_seconds=0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip


class Family:
    """A stand-in guardian with one program below it; what the program says can be read line by line."""

    def __init__(self, argv, env):
        self.process = subprocess.Popen(
            [sys.executable, str(PROGRAMS / "seen_guardian.py"), *argv],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self.lines = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.guardian = self.process.pid
        self.root_pid = int(self.line(0))
        try:
            self.root = (self.root_pid, read_started(self.root_pid))
        except OSError:
            self.root = (self.root_pid, 0)

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def line(self, index):
        """The line of that number; the first is the pid of the program."""
        until_sync(lambda: len(self.lines) > index)
        return self.lines[index]

    def end(self):
        """End everything below the guardian that we started, by descent, then the guardian itself."""
        deadline = time.monotonic() + 10
        while self.process.poll() is None and (below := _below(self.guardian)):
            assert time.monotonic() < deadline
            for pid in below:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
            if all(_state(pid) == "Z" for pid in below):
                break
            time.sleep(0.01)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.reader.join(5)
        self.process.stdout.close()


@contextmanager
def family(*argv, **env):
    made = Family(argv, env)
    try:
        yield made
    finally:
        made.end()


@contextmanager
def tree(*arguments, **env):
    with family(sys.executable, str(PROGRAMS / "seen_tree.py"), *arguments, **env) as made:
        yield made


def _state(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def _below(pid):
    try:
        tasks = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    found = []
    for task in tasks:
        try:
            children = Path(f"/proc/{pid}/task/{task}/children").read_text().split()
        except OSError:
            continue
        for child in map(int, children):
            found += [child, *_below(child)]
    return found
