"""SIGKILL of the supervising program, whenever it comes: nothing of ours is left, and nobody else's is touched."""

import os
import random
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest
from faces import User, fetch, is_gone, little
from seen import until_sync

from hangguard.observe.gpus import READER
from hangguard.observe.ports import free_port

WITHIN = 5.0
AT_ONCE = 4
PHASES = ("import", "dist-init", "weights-load", "kv-cache", "jit-compile", "graph-capture", "warm-up", "serving")


@pytest.fixture(scope="module")
def bystander(tmp_path_factory):
    """Another little server, started by the test itself: the same program, the same titles."""
    port = free_port()
    command = [str(port) if word == "{port}" else word for word in little()]
    with (tmp_path_factory.mktemp("bystander") / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    until_sync(lambda: answers(port), within=20.0)
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert len(family) >= 3
    yield lambda: [member for member in family if is_gone(member)]
    for member in family:
        member.kill()
    process.wait()


def answers(port):
    try:
        return fetch(f"http://127.0.0.1:{port}/health") == 200
    except OSError:
        return False


def killed(user, wait, *, sleeps=False):
    """Let it come to a point, SIGKILL it there, and return who is left after the time that is allowed."""
    try:
        user.said("begun")
        wait(user)
        if sleeps:
            user.said("sleeper")
        user.tree()
        assert user.process.poll() is None
        os.kill(user.process.pid, signal.SIGKILL)
        user.process.wait()
        ends = time.monotonic() + WITHIN
        while user.left() and time.monotonic() < ends:
            time.sleep(0.05)
        left = user.left()
        if user.has("sleeper"):
            assert int(user.said("sleeper")) in user.sleepers()  # the user's own child is not ours to end
        return left
    finally:
        user.close()


def at_age(seconds):
    """A point in time, not a thing to wait for."""
    return lambda user: time.sleep(seconds)


def in_phase(phase):
    if phase == "import":
        return lambda user: user.until_told("verdict")
    return lambda user: user.until_told("phase", phase=phase)


def stuck_in(phase):
    return {} if phase == "serving" else {"faults": [[phase, "sleep:300"]]}


def all_killed(users):
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [future.result() for future in [pool.submit(run) for run in users]]


def test_the_reader_of_gpus_ends_when_its_program_died_while_it_started_though_a_fork_holds_its_stdin():
    """Its parent is another by the time it looks: a machine under load gives it seconds for that."""
    gone = subprocess.Popen(["/bin/true"])
    gone.wait()
    started = {"orphan": (*READER, str(gone.pid)), "bystander": (*READER, str(os.getpid()))}
    readers = {}
    for name, argv in started.items():
        readers[name] = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert readers["orphan"].wait(20) == 0
        assert readers["bystander"].stdout.readline().startswith(b'{"hello"')
        assert readers["bystander"].poll() is None
    finally:
        for reader in readers.values():
            reader.kill()
            reader.communicate()


@pytest.mark.long
def test_at_ten_random_points_of_start_up_and_serving(tmp_path, bystander):
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    ages = [dice.uniform(0.0, 3.5) for _ in range(10)]

    def run(n):
        user = User(tmp_path / str(n), mode="sleeper" if n % 2 else "serve")
        return killed(user, at_age(ages[n]))

    assert all_killed([lambda n=n: run(n) for n in range(10)]) == [set()] * 10
    assert bystander() == []


@pytest.mark.long
def test_in_every_phase_with_and_without_a_child_of_the_users(tmp_path, bystander):
    def run(n, phase):
        user = User(tmp_path / phase, mode="serve" if n % 2 else "sleeper", server=stuck_in(phase))
        return killed(user, in_phase(phase), sleeps=n % 2 == 0)

    left = all_killed([lambda n=n, phase=phase: run(n, phase) for n, phase in enumerate(PHASES)])
    assert dict(zip(PHASES, left, strict=True)) == {phase: set() for phase in PHASES}
    assert bystander() == []


def test_in_the_middle_of_a_stop(tmp_path, bystander):
    """The grace of the stop that was asked for gives way to the short one of a dead supervisor."""
    user = User(tmp_path / "stop", mode="sleeper", server={"ignore_term": True}, limits={"stop_grace": 100.0})

    def wait(user):
        user.said("serving")
        user.tree()
        user.interrupt()
        user.until_told("stopping")

    assert killed(user, wait, sleeps=True) == set()
    assert bystander() == []
