"""What vLLM tests of its engine's end, told of ours: the program that started it dies, and a start that takes for ever.

https://github.com/vllm-project/vllm: tests/v1/shutdown/test_parent_death.py and test_startup_timeout_cleanup.py (its
issue 32116: the launcher once waited for ever for an engine that never came, with all of the GPU's memory held).
"""

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest
from faces import is_gone, little, living_of_runs, plain, until_nothing_left
from seen import until_sync

from hangguard import Limits, NotReadyInTime, supervise

long = pytest.mark.long

PROGRAM = """
import multiprocessing, os, signal, subprocess, sys, threading, time
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from faces import little
from hangguard import supervise
server = supervise(little(tp=2, ignore_term=True), run_dir=Path(sys.argv[1]) / "runs").start()
print(server.pid, flush=True)
sys.stdin.readline()
"""
"""A user's program that starts a server and never leaves the block; the end of it is one of the following."""

DEATHS = {
    "SIGKILL": "time.sleep(60)",
    "SIGTERM": "time.sleep(60)",
    "os._exit in a thread": "threading.Thread(target=os._exit, args=(3,)).start(); time.sleep(60)",
    "an exception": "raise RuntimeError('of the user')",
    "a segmentation fault": "import ctypes; ctypes.string_at(0)",
    "abort": "os.abort()",
    "execs another program": "os.execv('/bin/true', ['true'])",
    "SIGKILL after multiprocessing": """
child = multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)); child.start()
print(child.pid, flush=True); os.kill(os.getpid(), 9)""",
    "SIGKILL with a child that has every descriptor": """
child = subprocess.Popen(['/bin/sleep', '60'], close_fds=False)
print(child.pid, flush=True); os.kill(os.getpid(), 9)""",
}
OF_THE_USER = {"SIGKILL after multiprocessing", "SIGKILL with a child that has every descriptor"}
QUICK = {"os._exit in a thread", "SIGKILL after multiprocessing"}


@pytest.fixture
def bystander():
    """A process of the user's that lives through all of it."""
    with subprocess.Popen(["/bin/sleep", "300"]) as process:
        yield
        assert process.poll() is None
        process.kill()


@pytest.mark.parametrize("death", [pytest.param(how, marks=[] if how in QUICK else long) for how in DEATHS])
@pytest.mark.long
def test_when_the_program_that_started_it_dies_in_whatever_way_the_server_is_gone_5_s_later(tmp_path, bystander, death):
    command = [sys.executable, "-c", PROGRAM + DEATHS[death], str(tmp_path), os.path.dirname(__file__)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, text=True, **pipes) as program:
        root = psutil.Process(int(program.stdout.readline()))
        family = [root, *root.children(recursive=True)]
        assert len(family) >= 3
        program.stdin.write("\n")
        program.stdin.flush()
        if death in {"SIGKILL", "SIGTERM"}:
            program.send_signal(getattr(signal, death))
        users = psutil.Process(int(program.stdout.readline())) if death in OF_THE_USER else None
        try:
            assert program.wait(30) != 0 or death == "execs another program"
            until_sync(lambda: all(map(is_gone, family)), within=5.0)
            until_sync(lambda: not set(living_of_runs(tmp_path)) - {users and users.pid}, within=5.0)
            assert users is None or not is_gone(users)  # its own child is not ours to end
        finally:
            for process in (*family, *([users] if users else [])):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()


NEVER_READY = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
for kind in range(2):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        while True:
            time.sleep(1)
while True:  # it moves for ever
    print(f"loading shard {time.monotonic()}", flush=True)
    sum(range(200_000))
    time.sleep(0.05)
"""


@long
def test_a_start_that_never_ends_is_ended_when_its_time_is_over_with_all_that_it_has(tmp_path, bystander):
    """Problem A: bounded by ready_within, and then by the grace, the kill and the proof."""
    began = time.monotonic()
    limits = Limits(ready_within=3, stop_grace=1, release_within=2)
    with pytest.raises(NotReadyInTime) as told, plain(tmp_path, [sys.executable, "-c", NEVER_READY], limits=limits):
        pytest.fail("it never answers")
    assert 3.0 <= time.monotonic() - began < 60
    (attempt,) = told.value.history
    assert attempt.release.answer == "released"
    assert "ready_within" in str(told.value) or "3 s" in str(told.value)
    assert not living_of_runs(tmp_path)


@long
def test_a_start_in_time_is_not_ended_when_that_time_is_over(tmp_path):
    with supervise(little(), run_dir=tmp_path / "runs", limits=Limits(ready_within=20)) as server:
        started_at = server.attempt.started_at
        until_sync(lambda: time.monotonic() > started_at + 21, within=30.0)
        assert server.sample().answer.state == "good"
        assert server.poll() is None


@long
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, RuntimeError])
def test_whatever_is_raised_while_it_starts_ends_it_with_the_usual_proof(tmp_path, bystander, error):
    """Problem B: an exception in the middle of a start must not go round the stop."""
    folder = os.path.dirname(__file__)
    code = f"""
import os, signal, sys, threading
sys.path.insert(0, {folder!r})
from pathlib import Path
from faces import plain
def interrupt(*_):
    raise {error.__name__}("in the start")
signal.signal(signal.SIGUSR1, interrupt)
told = []
def hook(event):
    told.append(event)
    if event.event == "launched":
        os.kill(os.getpid(), signal.SIGUSR1)
supervision = plain(Path({str(tmp_path)!r}), ["/bin/sleep", "100"], hooks=[hook])
try:
    supervision.start()
except BaseException as raised:
    print(type(raised).__name__, supervision.history[-1].release.answer)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == f"{error.__name__} released\n", done.stderr
    until_nothing_left(tmp_path)
