"""What mirakuru and circus test of stops and of readiness, told of ours, with titles and sessions that hide a process.

https://github.com/dbfixtures/mirakuru (3.x): tests/executors/test_executor_kill.py, sample_daemon.py, and the tests of
its TCP, HTTP and output executors. It finds what it started by a marker in the environment, compared as a part of it,
so that a new title hides a child and a longer number is a stranger's. https://github.com/circus-tent/circus (0.19):
circus/tests/test_watcher.py, stop with children; it said "ok" with two descendants alive.
"""

import os
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from commands import run as command_line
from faces import fetch, is_gone, living_of_runs, plain, run_ids
from seen import until_sync

from hangguard import GaveUp, Limits, NotReadyInTime
from hangguard.facts import Exited

long = pytest.mark.long

DAEMON = """
import http.server, os, sys
port, written, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if how == "with an empty environment" and len(sys.argv) < 5:
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:], "again"], {})
if os.fork():
    os._exit(0)
os.setsid()
os.umask(0)
os.chdir("/")
if os.fork():
    os._exit(0)
os.closerange(0, 64)
null = os.open("/dev/null", os.O_RDWR)
os.dup2(null, 1), os.dup2(null, 2)
if how == "retitled":
    import setproctitle
    setproctitle.setproctitle("postgres: writer process")
import signal
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open(written + ".part", "w") as out:
    out.write(str(os.getpid()))
os.rename(written + ".part", written)
http.server.test(http.server.SimpleHTTPRequestHandler, port=port, bind="127.0.0.1")
"""
"""A daemon by the book: two forks, a session, no descriptor of whoever started it."""


def daemon(written, how="", port="{port}"):
    return [sys.executable, "-c", DAEMON, port, str(written), how]


def process_in(written):
    until_sync(Path(written).exists, within=30.0)
    return psutil.Process(int(Path(written).read_text()))


@pytest.mark.parametrize(
    "how",
    ["retitled", pytest.param("", marks=long), pytest.param("with an empty environment", marks=long)],
)
def test_a_daemon_by_the_book_is_found_and_ended_and_one_with_our_marker_in_its_environment_is_not(tmp_path, how):
    """test_daemons_killing; its bystanders have our run id in their environment, as it is and as a part."""
    with plain(tmp_path, daemon(tmp_path / "pid", how), limits=Limits(stop_grace=1, ready_within=60)) as server:
        ours = process_in(tmp_path / "pid")
        assert fetch(server.url) == 200
        (run_id,) = run_ids(tmp_path)
        strangers = [
            subprocess.Popen(["/bin/sleep", "100"], env={**os.environ, "HANGGUARD_RUN_ID": marker})
            for marker in (run_id, f"9{run_id}:1")
        ]
        release = server.stop()
        assert release.answer == "released"
        assert is_gone(ours)
    lived = [stranger.poll() is None for stranger in strangers]
    for stranger in strangers:
        stranger.kill()
        stranger.wait()
    assert lived == [True, True]


@pytest.mark.parametrize("by", ["library", pytest.param("command line", marks=long)])
def test_it_is_called_released_only_when_the_last_grandchild_is_gone(tmp_path, by):
    """circus: a stop that answers, with descendants that left the tree, ignore SIGTERM and have another title."""
    here = Path(__file__).with_name("programs") / "tree_server.py"
    kinds = ("setsid", "double", "retitled", "empty")
    web = 'python -m http.server "$1" --bind 127.0.0.1'.replace("python", sys.executable)
    script = f"{sys.executable} {here} {tmp_path} {' '.join(kinds)} stubborn & exec {web}"
    argv = ["sh", "-c", f"cd {tmp_path}; {script}", "sh", "{port}"]
    limits = Limits(stop_grace=1, ready_within=60)
    if by == "library":
        with plain(tmp_path, argv, limits=limits) as server:
            found = [process_in(tmp_path / kind) for kind in (*kinds, "root")]
            assert server.stop().answer == "released"
            assert all(map(is_gone, found))
        return
    with command_line(tmp_path, "--url", "http://127.0.0.1:{port}", command=argv) as running:
        running.event("ready", within=60.0)
        found = [process_in(tmp_path / kind) for kind in (*kinds, "root")]
        running.ask()
        assert running.wait(60) == 0
        assert all(map(is_gone, found))
        assert running.named("ended")[-1]["left_behind"] == []


# ----------------------------------------------------------------------------------------- readiness

LISTENS = "import socket, sys, time; s = socket.create_server(('127.0.0.1', int(sys.argv[1]))); time.sleep(100)"
SAYS_SO = (
    "import sys, time; print('INFO: Uvicorn running on http://127.0.0.1:' + sys.argv[1], flush=True); time.sleep(100)"
)
FIRST_500 = """
import http.server, sys, time
begun = time.monotonic()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        is_well = time.monotonic() - begun > 2.0
        open(sys.argv[2], "a").write(f"{200 if is_well else 500}\\n")
        self.send_response(200 if is_well else 500)
        self.end_headers()
    do_POST = do_GET
http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def connects(url):
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=2):
        return True


def never_ready(folder, code, **options):
    limits = Limits(ready_within=4, stop_grace=1, release_within=2)
    command = [sys.executable, "-c", code, "{port}"]
    with pytest.raises(NotReadyInTime), plain(folder, command, limits=limits, **options) as server:
        pytest.fail(f"it was called ready: {server.attempt.verdict}")
    assert not living_of_runs(folder)


@long
def test_a_port_that_is_open_is_no_answer_unless_that_is_what_is_asked_for(tmp_path):
    """TCPExecutor."""
    never_ready(tmp_path, LISTENS)
    (tmp_path / "asked").mkdir()
    with plain(tmp_path / "asked", [sys.executable, "-c", LISTENS, "{port}"], ready=connects) as server:
        assert connects(server.url)


@long
def test_a_banner_is_no_answer(tmp_path):
    """OutputExecutor: there the line would do."""
    never_ready(tmp_path, SAYS_SO)


@long
def test_it_is_ready_with_the_first_good_answer_and_not_with_an_error(tmp_path):
    """HTTPExecutor: a status other than 2xx is no readiness."""
    statuses = tmp_path / "statuses"
    command = [sys.executable, "-c", FIRST_500, "{port}", str(statuses)]
    with plain(tmp_path, command, ready="/health", limits=Limits(ready_within=60)) as server:
        assert fetch(server.url + "/health") == 200
        said = statuses.read_text().split()
    assert said[0] == "500"
    assert said[-1] == "200"


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=long)])
def test_a_process_that_ends_before_it_is_ready_is_told_at_once_with_its_code(tmp_path, code):
    """test_executor_dont_start_when_process_exits: mirakuru waits out its time-out."""
    with pytest.raises(GaveUp) as told, plain(tmp_path, ["sh", "-c", f"echo foo; exit {code}"]):
        pytest.fail("it never answers")
    assert isinstance(told.value.history[-1].verdict, Exited)
    assert told.value.history[-1].exit_code == code
    assert "foo" in "".join(told.value.history[-1].log_tail)


TAKES_IT = """
import subprocess, sys, time
open(sys.argv[2], "w").close()
time.sleep(100)
"""


@long
def test_the_answer_of_a_stranger_who_took_the_port_meanwhile_is_not_taken_for_the_servers(tmp_path):
    """test_fail_if_other_executor_running, where the other one comes between the look and the start."""
    started, strangers = tmp_path / "started", []

    def take_the_port(event):
        if event.event == "launched":
            until_sync(started.exists, within=30.0)
            (folder := tmp_path / "stranger").mkdir()
            port = next(word for word in event.argv if word.isdigit())
            web = [sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1"]
            strangers.append(subprocess.Popen(web, cwd=folder, stderr=subprocess.DEVNULL))

    command = [sys.executable, "-c", TAKES_IT, "{port}", str(started)]
    limits = Limits(ready_within=8, stop_grace=1, release_within=2)
    try:
        with pytest.raises((NotReadyInTime, GaveUp)), plain(tmp_path, command, limits=limits, hooks=[take_the_port]):
            pytest.fail("a stranger's answer was taken for the server's")
        assert [stranger.poll() for stranger in strangers] == [None]
    finally:
        for stranger in strangers:
            stranger.kill()
            stranger.wait()
    assert not living_of_runs(tmp_path)
