# ruff: noqa: F811 - fixtures
"""What Supervisor tests, told of ours: a clock that is set back, starts that fail, an end that does not come.

https://github.com/Supervisor/supervisor, supervisor/tests/test_process.py: the tests of a clock rollback, of spawn()
with errors of every kind, and fixtures/unkillable_spew.py. Supervisor counts in wall-clock time and has to notice that
it was set; here nothing that decides anything reads that clock.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import tenacity
from faces import PROGRAMS, User, is_gone, living_of_runs, plain
from seen import until_sync
from states import freezer, thawing
from test_guardian import bystanders, keep, members, serve, soon  # noqa: F401

from hangguard import GaveUp, Limits, Retry, supervise
from hangguard.errors import CommandNotExecutable, CommandNotFound, HangguardError, LeftBehind
from hangguard.facts import Unseen
from hangguard.observe.lane import Lane

long = pytest.mark.long
HOUR = 3600

# ------------------------------------------------------------------------------------- the clock is set


@pytest.fixture
def clock(tmp_path):
    """Return a program's way to a wall clock of its own, and a function that sets it: for all that it starts, too."""
    shift, library = tmp_path / "shift", tmp_path / "clock.so"
    source = Path(__file__).with_name("realtime_shift.c")
    options = ["-Wall", "-Werror", "-O1", "-shared", "-fPIC", f'-DSHIFT_FILE="{shift}"']
    subprocess.run(["gcc", *options, "-o", str(library), str(source)], check=True)
    etc = tmp_path / "etc"
    shutil.copytree("/etc", etc, symlinks=True)
    (etc / "ld.so.preload").write_text(f"{library}\n")
    inside = ["unshare", "--mount", "sh", "-c", f'mount --bind {etc} /etc && exec "$@"', "sh"]

    def set_by(seconds):
        part = tmp_path / ".shift"
        part.write_text(str(seconds))
        part.rename(shift)

    set_by(0)
    return inside, set_by


@long
@pytest.mark.timeout(240)
@pytest.mark.parametrize("seconds", [-12 * HOUR, 12 * HOUR], ids=["back", "forward"])
def test_a_wall_clock_that_is_set_changes_no_verdict_no_grace_and_no_limit(tmp_path, clock, monkeypatch, seconds):
    """While it starts, while it serves, and in the grace of its stop: for the program, its guardian and the server."""
    inside, set_by = clock
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: popen([*inside, *command], **options))
    options = {"phase_seconds": 0.4, "ignore_term": True}
    user = User(tmp_path / "user", server=options, limits={"stop_grace": 2.0, "ready_within": 60.0})
    monkeypatch.undo()
    try:
        user.until_told("launched", within=60.0)
        set_by(seconds)
        pid = json.loads(user.said("serving", within=60.0))["pid"]
        assert any("clock.so" in line for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
        set_by(0)
        user.tree()
        user.interrupt()
        user.until_told("stopping", within=60.0)
        began = time.monotonic()
        set_by(seconds)
        assert user.ends(within=40.0) == {"raised": "KeyboardInterrupt", "released": "released"}
        assert time.monotonic() - began > 1.5  # the grace was kept
        told = [event for event in user.events() if event["event"] == "verdict"]
        assert {event["verdict"] for event in told} <= {"moving", "ready"}
        assert [event["attempt"] for event in user.events() if event["event"] == "launched"] == [1]
        assert not user.left()
    finally:
        set_by(0)
        user.close()


def test_nothing_that_decides_asks_the_wall_clock(tmp_path, monkeypatch):
    """The seam itself: in a program whose time.time() only ever fails, a server is started, used and stopped."""
    # Ages of files, which only the wall clock tells; and when a run began, for people.
    lessons = ("learned.py", "locks.py", "logfile.py", "notes.py")

    def refuse():
        asked_by = Path(sys._getframe(1).f_code.co_filename)
        if "hangguard" in asked_by.parts and "tests" not in asked_by.parts and asked_by.name not in lessons:
            raise AssertionError(f"{asked_by} asks the wall clock")
        return 0.0

    monkeypatch.setattr(time, "time", refuse)
    with plain(tmp_path, limits=Limits(ready_within=30, stop_grace=2)) as server:
        assert server.sample().answer.state == "good"
        assert server.stop().answer == "released"
    assert not living_of_runs(tmp_path)


# ------------------------------------------------------------------------------------- starts that fail


def on_its_own(folder, *words):
    """Run the program as a user of its own, with nothing else of whose processes there are."""
    uid = 1_000_000 + os.getpid()
    folder.chmod(0o777)
    rights = ["--inh-caps", "+dac_read_search", "--ambient-caps", "+dac_read_search"]  # Python lies in root's folder
    who = ["setpriv", "--reuid", str(uid), "--regid", str(uid), "--clear-groups", *rights]
    environment = {**os.environ, "HOME": str(folder), "TMPDIR": str(folder), "XDG_STATE_HOME": str(folder)}
    command = [*who, sys.executable, str(PROGRAMS / "scenario_few_processes.py"), str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    left = []
    for process in psutil.process_iter():
        try:
            if process.uids().real == uid and not is_gone(process):
                left.append(process)
        except psutil.Error:
            continue
    assert left == []
    return json.loads(done.stdout)


def test_where_no_process_or_thread_can_be_started_it_is_refused_with_the_reason_and_nothing_is_left(tmp_path):
    """EAGAIN of fork: at the limit of the user (or of the control group), one task more or less."""
    found = on_its_own(tmp_path, "guarded:0", "guarded:1", "guarded:2", "refused")
    assert [one["children"] for one in found.values()] == [[]] * 4
    assert "no thread could be started" in found["guarded:0"]["said"]
    assert "could not be started: [Errno 11]" in found["guarded:1"]["said"]
    assert found["guarded:2"]["said"] == "runs"
    assert "'/bin/sleep' could not be started: Resource temporarily unavailable" in found["refused"]["said"]
    assert all(one["said"].startswith("GuardianFailed") for what, one in found.items() if what != "guarded:2")


@long
@pytest.mark.timeout(240)
def test_near_the_limit_of_processes_what_cannot_be_looked_at_is_unseen_and_the_end_is_proved(tmp_path):
    """Every probe has a thread of its own; one that gets none says so, and ends no server and no stop."""
    found = on_its_own(tmp_path, "supervise:2", "supervise:5", "supervise:80")
    assert found["supervise:2"]["said"].startswith("GuardianFailed")
    assert found["supervise:5"]["said"].startswith("NotReadyInTime")
    assert found["supervise:80"]["said"] == "runs"
    assert all(one["children"] == [] and one["seconds"] < 60 for one in found.values())


@pytest.mark.anyio
async def test_a_look_that_gets_no_thread_is_unseen_and_the_next_one_gets_it(monkeypatch):
    lane = Lane("test")
    before = len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:

        def refuse(self):
            raise RuntimeError("can't start new thread")

        patch.setattr(threading.Thread, "start", refuse)
        assert isinstance(await lane.ask(lambda: 1, within=5), Unseen)
    assert len(os.listdir("/proc/self/fd")) == before
    assert await lane.ask(lambda: 1, within=5) == 1
    lane.close()


def test_what_cannot_be_started_is_refused_as_what_it_is(tmp_path):
    """test_spawn_as_child_execv_fail_*, _cwd_fail, and a command that is not there."""
    text, folder = tmp_path / "text", tmp_path / "gone"
    text.write_text("no program")
    folder.mkdir()
    with pytest.raises(CommandNotFound), plain(tmp_path, ["no-such-program"]):
        pass
    with pytest.raises(CommandNotExecutable, match="permission"), plain(tmp_path, [str(text)]):
        pass
    text.chmod(0o755)
    with pytest.raises(CommandNotExecutable, match="format"), plain(tmp_path, [str(text)]):
        pass
    nowhere = supervise(["/bin/sleep", "60"], url="http://127.0.0.1:{port}", cwd=folder, run_dir=tmp_path / "runs")
    shutil.rmtree(folder)
    with pytest.raises(HangguardError, match="directory"), nowhere:
        pass
    assert not living_of_runs(tmp_path)


HOMELESS = """
import os, sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
os.mkdir(sys.argv[1] + "/gone"); os.chdir(sys.argv[1] + "/gone"); os.rmdir(sys.argv[1] + "/gone")
from faces import PLAIN
from hangguard import HangguardError, supervise
try:
    with supervise(PLAIN, url="http://127.0.0.1:{port}", run_dir=sys.argv[1] + "/runs") as server:
        print("runs", server.pid)
except HangguardError as error:
    print(type(error).__name__, error)
"""


def test_a_program_whose_own_directory_was_deleted_hears_that_and_no_error_of_pythons(tmp_path):
    command = [sys.executable, "-c", HOMELESS, str(tmp_path), os.path.dirname(__file__)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "directory" in done.stdout
    assert not living_of_runs(tmp_path)


# ---------------------------------------------------------------------------------- what does not end

WITH_A_CHILD = """
import http.server, os, sys, time
if os.fork() == 0:
    os.setsid()
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(100)
if sys.argv[3] == "fails":
    while not os.path.exists(sys.argv[4]):
        time.sleep(0.01)
    sys.exit("OSError: [Errno 98] Address already in use")
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def with_a_child(folder, how):
    return [sys.executable, "-c", WITH_A_CHILD, "{port}", str(folder / "child"), how, str(folder / "frozen")]


def child_of(folder):
    until_sync(lambda: (folder / "child").exists() and (folder / "child").read_text())
    return int((folder / "child").read_text())


@long
def test_a_member_that_sigkill_does_not_end_is_named_with_its_state_and_the_stop_is_over_in_time(tmp_path):
    """A frozen control group stands for a driver that does not come back: SIGKILL waits for it too."""
    with freezer("freezer") as frozen, thawing(frozen):
        supervision = plain(tmp_path, with_a_child(tmp_path, "serves"), limits=Limits(stop_grace=1, release_within=2))
        server = supervision.start()
        child = psutil.Process(child_of(tmp_path))
        frozen.freeze(child.pid)
        began = time.monotonic()
        with pytest.raises(LeftBehind) as told:
            server.stop()
        assert time.monotonic() - began < 40
        (survivor,) = told.value.release.survivors
        assert (survivor.pid, survivor.state) == (child.pid, "D")
        assert survivor.wait_channel
        assert str(child.pid) in str(told.value)
        assert "reboot" in str(told.value)
        assert told.value.release.answer == "held"
        frozen.thaw()
        until_sync(lambda: is_gone(child))  # it had been killed, and dies as soon as it can
        with pytest.raises(LeftBehind):
            supervision.close()
    assert not living_of_runs(tmp_path)


@long
def test_nothing_is_launched_in_the_place_of_an_attempt_of_which_something_does_not_end(tmp_path):
    told = []
    retry = Retry(stop=tenacity.stop_after_attempt(4), wait=tenacity.wait_none())
    with freezer("freezer") as frozen, thawing(frozen):

        def freeze():
            frozen.freeze(child_of(tmp_path))
            (tmp_path / "frozen").touch()

        freezing = threading.Thread(target=freeze)
        freezing.start()
        limits = Limits(stop_grace=1, release_within=2, ready_within=60)
        with (
            pytest.raises(GaveUp) as gave_up,
            plain(tmp_path, with_a_child(tmp_path, "fails"), limits=limits, retry=retry, hooks=[told.append]),
        ):
            pass
        freezing.join(10)
        assert len(gave_up.value.history) == 1
        assert "LEFT BEHIND" in str(gave_up.value)
        assert [event.event for event in told].count("launched") == 1
    until_sync(lambda: not living_of_runs(tmp_path))


@pytest.mark.anyio
@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_state_d_alone_is_no_reason_to_give_a_member_up(serve, bystanders):
    """A parent waits in D for its child between vfork and exec, and can be ended there."""
    code = "import ctypes, signal; signal.signal(15, signal.SIG_IGN); libc = ctypes.PyDLL(None)\n"
    # Whoever ends first: the parent goes on where its child was, for they share the interpreter's memory.
    code += "if libc.vfork() == 0:\n    while True:\n        libc.pause()\nsignal.pause()"
    async with serve(argv=[sys.executable, "-c", code]) as server:
        root = psutil.Process(server.pid)
        await soon(lambda: root.status() == psutil.STATUS_DISK_SLEEP)
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        assert server.exit.code == -signal.SIGKILL
        assert is_gone(root)
    assert not [name for name, process in bystanders.items() if process.poll() is not None]
