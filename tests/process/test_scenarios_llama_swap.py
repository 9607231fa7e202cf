# ruff: noqa: F811 - fixtures
"""What llama-swap tests of its processes, told of ours: wrappers that fork, and starts and stops that race.

https://github.com/mostlygeek/llama-swap: internal/process/process_command_forking_test.go and process_command_test.go
(of 2026). There a wrapper's child once held the stop up for ever, and once lived on; ``cmdStop`` and a process group
were the answers. Here neither is asked for.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import psutil
import pytest
from faces import fetch, is_gone, living_of_runs, plain, until_nothing_left
from seen import until_sync
from test_guardian import bystanders, keep, members, serve, soon  # noqa: F401

from hangguard import Limits
from hangguard.errors import PortInUse
from hangguard.observe.ports import free_port

long = pytest.mark.long

SERVER = """
import http.server, os, pathlib, signal, sys, time
port, pid, done = int(sys.argv[1]), pathlib.Path(sys.argv[2]), pathlib.Path(sys.argv[3])
def end(*_):
    time.sleep(0.6)
    done.write_text("done")
    os._exit(0)
signal.signal(signal.SIGTERM, end)
pid.write_text(str(os.getpid()))
http.server.test(http.server.SimpleHTTPRequestHandler, port=port, bind="127.0.0.1")
"""
"""It takes a moment to end, and says when it could."""

WRAPPERS = {
    "forks and waits": '"$@" &\nwait',
    "forks in the foreground": '"$@"\necho ended',
    "execs": 'exec "$@"',
    "passes the signal on": 'trap \'kill -TERM "$child"; wait "$child"; exit 0\' TERM\n"$@" &\nchild=$!\nwait "$child"',
    "forks and exits": '"$@" &\nexit 0',
    "forks a wrapper that forks": 'sh -c \'"$@" & wait\' sh "$@" &\nwait',
    "forks into a session of its own": 'setsid "$@" &\nwait',
}


@pytest.fixture
def bystander(tmp_path):
    """The same server behind the same wrapper, started by somebody else."""
    folder = tmp_path / "bystander"
    folder.mkdir()
    with (folder / "log").open("wb") as log:
        argv = wrapped(folder, WRAPPERS["forks and waits"], str(free_port()))
        process = subprocess.Popen(argv, stdout=log, stderr=log, start_new_session=True)
    until_sync(lambda: pid_of(folder), within=20.0)
    family = [psutil.Process(process.pid), psutil.Process(pid_of(folder))]
    yield
    assert not any(is_gone(member) for member in family)
    for member in family:
        member.kill()
    process.wait()


def wrapped(folder, script, port="{port}"):
    wrapper = folder / "wrapper.sh"
    wrapper.write_text(f"#!/bin/sh\n{script}\n")
    wrapper.chmod(0o755)
    return [str(wrapper), sys.executable, "-c", SERVER, port, str(folder / "pid"), str(folder / "done")]


def pid_of(folder):
    with contextlib.suppress(OSError, ValueError):
        return int((folder / "pid").read_text())
    return None


# ------------------------------------------------------------------------------------------- wrappers


@pytest.mark.parametrize("how", [pytest.param(how, marks=[] if how == "forks and waits" else long) for how in WRAPPERS])
def test_a_server_behind_a_wrapper_is_asked_and_gets_its_grace_and_ends_with_it(tmp_path, bystander, how):
    """TestProcessCommand_StopForkingWrapper, _StopHonorsGracefulTimeout and _StopReapsForkedGrandchild in one."""
    with plain(tmp_path, wrapped(tmp_path, WRAPPERS[how]), limits=Limits(ready_within=30, stop_grace=20)) as server:
        assert fetch(server.url) == 200
        behind = psutil.Process(pid_of(tmp_path))
        began = time.monotonic()
        release = server.stop()
        seconds = time.monotonic() - began
        assert release.answer == "released"
        assert is_gone(behind)
        assert (tmp_path / "done").exists()
        assert 0.5 < seconds < 15  # the moment that it takes, and not the whole grace
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("guardian", ["lives", "is dead"])
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_behind_a_leader_that_tells_nobody_the_next_one_is_asked_and_a_deaf_one_not_waited_for(
    serve, members, bystanders, tmp_path, guardian
):
    async with serve("setsid", "asked") as server:
        found = members("root", "setsid", "asked")
        if guardian == "is dead":
            server.remember([(found[kind].pid, started(found[kind].pid)) for kind in found])
            os.kill(server.guardian_pid, signal.SIGKILL)
            await soon(lambda: not server.guardian_alive)
        stopped = await server.stop(grace=60.0)
        assert (tmp_path / "asked-done").exists()
        assert stopped.survivors == ()
        assert stopped.seconds < 20
        assert all(map(is_gone, found.values()))
    assert not [name for name, process in bystanders.items() if process.poll() is not None]


def started(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_a_wrapper_that_dies_of_sigterm_while_the_server_is_deaf_costs_a_moment_and_not_the_grace(tmp_path):
    deaf = "trap '' TERM\n" + '(exec "$@") &\ntrap - TERM\nwait'
    command = [str(tmp_path / "wrapper.sh"), sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
    wrapped(tmp_path, deaf)
    with plain(tmp_path, command, limits=Limits(ready_within=30, stop_grace=60)) as server:
        began = time.monotonic()
        assert server.stop().answer == "released"
        assert time.monotonic() - began < 20
    assert not living_of_runs(tmp_path)


# ------------------------------------------------------------------------------------- races of start and stop


def test_of_twenty_stops_at_once_all_get_the_same_proof_and_the_server_is_stopped_once(tmp_path):
    """TestProcessCommand_Stop_Idempotent, from twenty threads."""
    told = []
    with plain(tmp_path, hooks=[told.append], limits=Limits(stop_grace=5)) as server:
        together = threading.Barrier(20)
        with ThreadPoolExecutor(20) as pool:
            releases = [stop.result(60) for stop in [pool.submit(at, together, server.stop) for _ in range(20)]]
        assert releases == [server.stop()] * 20
        assert releases[0].answer == "released"
    names = [event.event for event in told]
    assert (names.count("stopping"), names.count("released"), names.count("ended")) == (1, 1, 1)
    assert not living_of_runs(tmp_path)


@long
def test_stopped_while_it_starts_the_start_is_over_at_once_and_nothing_is_left(tmp_path, bystander):
    """TestProcessCommand_StopCancelsRun: the stop comes while the start waits for an answer that never comes."""
    mute = (
        "import socket, time; s = socket.create_server(('127.0.0.1', int(__import__('sys').argv[1])));time.sleep(100)"
    )
    told = []
    supervision = plain(tmp_path, [sys.executable, "-c", mute, "{port}"], hooks=[told.append])
    outcome = []

    def start():
        try:
            outcome.append(supervision.start())
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    until_sync(lambda: [event for event in told if event.event == "launched"])
    began = time.monotonic()
    supervision.close()
    thread.join(20)
    assert not thread.is_alive()
    assert time.monotonic() - began < 15
    assert isinstance(outcome[0], BaseException)
    until_nothing_left(tmp_path)


@long
@pytest.mark.anyio
async def test_cancelled_at_any_moment_of_its_life_it_leaves_nothing(tmp_path, bystander):
    """TestProcessCommand_ConcurrentRunStop: a start and a stop that race, again and again, at random distances."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    for n in range(12):
        folder = tmp_path / str(n)
        folder.mkdir()
        with anyio.fail_after(30), anyio.move_on_after(dice.uniform(0.0, 1.6)):
            async with plain(folder, wrapped(folder, WRAPPERS["forks and waits"]), limits=Limits(stop_grace=1)):
                await anyio.sleep_forever()
        assert not living_of_runs(folder)
        pid = pid_of(folder)
        assert pid is None or not Path(f"/proc/{pid}").exists()


@long
def test_of_a_stop_and_a_restart_that_race_one_wins_and_nothing_is_left(tmp_path):
    """Start while stopping: either the restart came first, and is stopped too, or it is told that it came too late."""
    for n in range(8):
        folder = tmp_path / str(n)
        folder.mkdir()
        with plain(folder, limits=Limits(stop_grace=1)) as server, ThreadPoolExecutor(2) as pool:
            together = threading.Barrier(2)
            restarted, stopped = pool.submit(at, together, server.restart), pool.submit(at, together, server.stop)
            release = stopped.result(60)
            assert release is None or release.answer == "released"
            assert restarted.exception(60) is None or "stopped" in str(restarted.exception())
            assert server.returncode is not None
        assert not living_of_runs(folder)


def at(together, call):
    together.wait(10)
    return call()


@long
def test_a_server_that_starts_on_the_port_of_one_that_stops_is_refused_or_gets_it_and_touches_nobody(tmp_path):
    """Start while stopping, by another program: the port is the old one's until it is free."""
    port = free_port()
    slow = [str(tmp_path / "wrapper.sh"), sys.executable, "-c", SERVER, str(port)]
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        folder.mkdir()
    wrapped(tmp_path, 'exec "$@"')
    url = f"http://127.0.0.1:{port}"

    def start(folder):
        return plain(folder, [*slow, str(folder / "pid"), str(folder / "done")], url=url, limits=Limits(stop_grace=20))

    first = start(old)
    server = first.start()
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(server.stop)
        refusals = []
        while True:
            second = start(new)
            try:
                got = second.start()
            except PortInUse as error:
                refusals.append(error.listener)
                continue
            break
        # Of a process that is just ending the kernel does not tell which it was.
        assert {listener.pid for listener in refusals if listener is not None} <= {pid_of(old), None}
        assert (old / "done").exists()  # it had its time to end
        assert stopping.result(30).answer == "released"
        assert pid_of(new) in [member.pid for member in got.sample().tree.members]
        assert fetch(url) == 200
        second.close()
    first.close()
    assert not living_of_runs(old) + living_of_runs(new)


@long
def test_entered_again_while_it_runs_it_is_refused_and_the_first_goes_on(tmp_path):
    """TestProcessCommand_Run_Idempotent."""
    supervision = plain(tmp_path)
    server = supervision.start()
    with pytest.raises(RuntimeError, match="entered before"):
        supervision.start()
    assert fetch(server.url) == 200
    supervision.close()
    assert not living_of_runs(tmp_path)


@long
def test_started_and_stopped_again_and_again_each_is_as_the_first(tmp_path):
    """TestProcessCommand_RunStopCycle."""
    for _ in range(4):
        with plain(tmp_path) as server:
            assert fetch(server.url) == 200
            assert server.stop().answer == "released"
    assert not living_of_runs(tmp_path)


@long
def test_a_server_that_is_killed_while_it_is_stopped_was_stopped_and_not_lost(tmp_path):
    """Killed by somebody else in the middle of the stop that was asked for."""
    with plain(tmp_path, wrapped(tmp_path, 'exec "$@"'), limits=Limits(stop_grace=20)) as server:
        server.terminate()
        os.kill(pid_of(tmp_path), signal.SIGKILL)
        assert server.stop().answer == "released"
    assert server.attempt.stopped_because == "asked"
    assert server.returncode == -signal.SIGKILL
    assert not living_of_runs(tmp_path)
