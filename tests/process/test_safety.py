"""What is not ours is never touched, what is ours is never lost from sight, and no secret gets out.

Every attack has a bystander that lives on.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import anyio
import psutil
import pytest
from faces import little, plain
from seen import launch, until_sync
from test_guardian import PROGRAMS, eventually, is_gone, keep, members, serve  # noqa: F401 - fixtures
from test_stacks import member

from hangguard import Limits, supervise
from hangguard.act import _membership
from hangguard.errors import BadLaunch, GaveUp, GuardianFailed, PortInUse, ServerLost
from hangguard.facts import Tree
from hangguard.observe.ports import free_port
from hangguard.observe.stacks import take_stacks
from hangguard.redact import redact, secrets_of
from hangguard.store import open_run_folder, tail_of

SLEEP = "/bin/sleep"
IN_OUR_NAMESPACE = "unshare --pid --fork --mount-proc"
IN_ANOTHERS_PROC = "unshare --pid --fork"
FEW_RIGHTS = (
    "unshare --mount --pid --fork --mount-proc sh -c 'mount -o remount,hidepid=2 /proc && exec setpriv --reuid 65534 "
    '--regid 65534 --clear-groups --inh-caps +dac_read_search,+setuid --ambient-caps +dac_read_search,+setuid "$@"\' sh'
)


@pytest.fixture
def bystander(keep):  # noqa: F811
    process = subprocess.Popen([SLEEP, "100"])
    keep(process)
    yield process
    assert process.poll() is None


# ---------------------------------------------------------------------------------------- who is ours


@pytest.mark.anyio
@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_whoever_opens_our_log_himself_is_no_member(serve, members, keep, tmp_path, guardian):  # noqa: F811
    log, link = tmp_path / "server.log", tmp_path / "link"
    async with serve("double", "empty") as server:
        found = members("root", "double", "empty")
        os.link(log, link)
        strangers = {
            "appends": subprocess.Popen(["sh", "-c", f"exec {SLEEP} 100 >> '{log}' 2>&1"]),
            "by a hard link": subprocess.Popen(["sh", "-c", f"exec {SLEEP} 100 > '{link}'"]),
            "by a member's descriptor": subprocess.Popen(
                ["sh", "-c", f"exec {SLEEP} 100 2> /proc/{found['root'].pid}/fd/1"]
            ),
            "tee": subprocess.Popen(["tee", "-a", str(log)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL),
        }
        for stranger in strangers.values():
            keep(stranger)
        eventually(lambda: len(_membership.log_writers(server.log_id, _membership.read_entries())) >= 6)
        if guardian == "is dead":
            psutil.Process(server.guardian_pid).kill()
            with anyio.fail_after(5):
                while server.guardian_alive:
                    await anyio.sleep(0.01)
        stopped = await server.stop(grace=0.2)
        assert stopped.survivors == ()
        assert all(is_gone(member) for member in found.values())
    assert {name for name, stranger in strangers.items() if stranger.poll() is not None} == set()
    strangers["tee"].stdin.close()


@pytest.fixture(scope="module")
def said():
    """Start all programs at once, each where it has to be, and return a function that says what one of them said."""
    places = {
        "orphan-takeover": IN_OUR_NAMESPACE,
        "reused-pid": IN_OUR_NAMESPACE,
        "reused-pid-guarded": IN_OUR_NAMESPACE,
        "orphan": IN_ANOTHERS_PROC,
        "orphan-of-another-user": FEW_RIGHTS,
        "no-descriptors": "",
        "forked": "",
    }
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o711)
        running = {}
        for kind, place in places.items():
            own = Path(folder, kind)
            own.mkdir()
            own.chmod(0o777)
            command = [sys.executable, str(PROGRAMS / "safety_user.py"), kind, str(own)]
            running[kind] = subprocess.Popen(
                ["sh", "-c", f'exec {place} "$@"', "sh", *command], stdout=subprocess.PIPE, text=True
            )

        def answer(kind):
            text, _ = running[kind].communicate(timeout=40)
            heard = json.loads(text)
            assert heard.pop("bystander") is None
            return heard

        yield answer
        for process in running.values():
            process.kill()
            process.communicate()


def test_the_forked_child_of_a_program_that_took_stacks_takes_its_own(said):
    assert said("forked") == {"parent": 1, "child": 1}


def test_a_proc_of_another_namespace_is_refused_before_anything_starts(said):
    refused = said("orphan")
    assert refused["error"] == "GuardianFailed"
    assert "another pid namespace" in refused["text"]


def test_the_first_process_of_a_container_takes_over_from_a_dead_guardian(said):
    assert said("orphan-takeover") == {"by": "supervisor", "survivors": [], "alive": False}


@pytest.mark.parametrize("kind", ["reused-pid", "reused-pid-guarded"])
def test_whoever_has_the_pid_of_a_dead_member_now_is_left_alone(said, kind):
    """By the supervisor after the guardian's death, and by the guardian."""
    assert said(kind) == {"same_pid": True, "survivors": [], "root_alive": False, "heir_alive": True}


def test_a_member_that_is_another_users_and_hidden_from_us_is_never_called_gone(said):
    seen = said("orphan-of-another-user")
    assert seen["alive"]
    assert len(seen["survivors"]) == 1


def test_a_program_without_descriptors_still_ends_its_server_and_says_what_it_could_not_see(said):
    seen = said("no-descriptors")
    assert seen["alive"] is False
    assert seen["answers"]["processes"] == "unknown"


# ------------------------------------------------------------------------------------ a hostile server


HOSTILE = """
import http.server, os, signal, sys
for number in (1, 2, 3, 10, 15):
    signal.signal(number, signal.SIG_IGN)
    os.killpg(0, number)
signal.signal(signal.SIGUSR2, lambda *_: os.kill(os.getppid(), int(sys.argv[2])))
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def hostile(folder, number):
    """A server that signals its own group, and on SIGUSR2 its parent."""
    command = [sys.executable, "-c", HOSTILE, "{port}", str(int(number))]
    return plain(folder, command, limits=Limits(ready_within=20, stop_grace=0.3))


def test_a_server_that_signals_its_group_and_kills_its_guardian_is_ended_all_the_same(tmp_path, bystander):
    with hostile(tmp_path, signal.SIGKILL) as server:
        process = psutil.Process(server.pid)
        guardian = process.parent()
        process.send_signal(signal.SIGUSR2)
        until_sync(lambda: is_gone(guardian))
    assert is_gone(process)
    assert server.attempt.release.answer == "released"


def test_a_server_that_asks_its_guardian_to_stop_is_stopped_and_that_is_told(tmp_path, bystander):
    supervision = hostile(tmp_path, signal.SIGTERM)
    with pytest.raises(ServerLost), supervision as server:
        process = psutil.Process(server.pid)
        process.send_signal(signal.SIGUSR2)
        server.wait(20)
    assert is_gone(process)
    assert supervision.history[-1].release.answer == "released"


@pytest.mark.anyio
async def test_a_guardian_that_was_stopped_goes_on_when_it_is_needed(serve, members):  # noqa: F811
    async with serve("setsid") as server:
        found = members("root", "setsid")
        os.kill(server.guardian_pid, signal.SIGSTOP)
        stopped = await server.stop(grace=0.2)
        assert stopped.by == "guardian"
        assert stopped.survivors == ()
        assert all(is_gone(member) for member in found.values())


# ---------------------------------------------------------------------------------- a poor environment


@pytest.mark.anyio
async def test_a_guardian_without_descriptors_waits_for_some_and_calls_nobody_gone(serve, members):  # noqa: F811
    async with serve("setsid") as server:
        found = members("root", "setsid")
        before = resource.prlimit(server.guardian_pid, resource.RLIMIT_NOFILE)
        used = {int(name) for name in os.listdir(f"/proc/{server.guardian_pid}/fd")}
        none_free = min(set(range(len(used) + 1)) - used)
        resource.prlimit(server.guardian_pid, resource.RLIMIT_NOFILE, (none_free, before[1]))
        later = threading.Timer(0.6, resource.prlimit, (server.guardian_pid, resource.RLIMIT_NOFILE, before))
        later.start()
        stopped = await server.stop(grace=0.1)
        assert later.finished.is_set()
        assert stopped.by == "guardian"
        assert stopped.survivors == ()
        assert all(is_gone(member) for member in found.values())


@pytest.mark.anyio
async def test_a_take_over_that_cannot_look_says_so_for_every_member(serve, members, monkeypatch, bystander):  # noqa: F811
    def no_more():
        raise OSError(errno.EMFILE, "Too many open files")

    async with serve("setsid") as server:
        found = members("root", "setsid")
        psutil.Process(server.guardian_pid).kill()
        with anyio.fail_after(5):
            while server.guardian_alive:
                await anyio.sleep(0.01)
        with monkeypatch.context() as poor:
            poor.setattr(_membership, "read_entries", no_more)
            stopped = await server.stop(grace=0.1)
        assert found["root"].pid in {survivor.pid for survivor in stopped.survivors}
        assert "Too many open files" in stopped.survivors[0].title
    assert all(is_gone(member) for member in found.values())  # leaving the block, there were descriptors again


@pytest.mark.parametrize("pidfds", ["missing", "refused"])
def test_without_pidfds_everything_is_seen_and_ended(tmp_path, monkeypatch, bystander, pidfds):
    def refuse(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    if pidfds == "missing":  # a Python built for an old Linux and an old glibc
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(os, "memfd_create")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    else:  # an old kernel, or a sandbox
        monkeypatch.setattr(os, "pidfd_open", refuse)
    with plain(tmp_path, limits=Limits(ready_within=20)) as server:
        process = psutil.Process(server.pid)
        assert isinstance(server.sample().tree, Tree)
        assert [member.pid for member in server.sample().tree.members] == [server.pid]
    assert is_gone(process)
    assert server.attempt.release.answer == "released"


@pytest.mark.anyio
async def test_stacks_are_taken_where_there_are_neither_pidfds_nor_files_in_memory(monkeypatch, bystander):
    monkeypatch.delattr(os, "pidfd_open")
    monkeypatch.delattr(os, "memfd_create")
    (stack,) = await take_stacks((member(os.getpid()),), within=30)
    assert any(thread.name == "MainThread" for thread in stack.threads)


# --------------------------------------------------------------------------------------- files, secrets


def test_all_folders_that_are_made_for_a_run_are_private_whatever_the_umask(tmp_path):
    before = os.umask(0)
    try:
        folder = open_run_folder(tmp_path / "state" / "hangguard" / "runs")
        written = Path(folder.write_json("x.json", {}))
    finally:
        os.umask(before)
    made = [written.parent, *list(written.parent.parents)[:3]]
    assert [oct(path.stat().st_mode & 0o777) for path in made] == ["0o700"] * 4
    assert written.stat().st_mode & 0o777 == 0o600


@pytest.mark.anyio
async def test_a_log_that_is_also_somebody_elses_file_is_refused_and_stays_as_it_is(serve, tmp_path):  # noqa: F811
    theirs = tmp_path / "theirs"
    theirs.write_text("mine")
    os.link(theirs, tmp_path / "server.log")
    with pytest.raises(GuardianFailed, match="another name"):
        async with serve(argv=["/bin/echo", "hello"]):
            pass
    assert theirs.read_text() == "mine"


def test_a_key_that_no_header_can_carry_is_in_no_file_event_or_error_and_in_no_guardian(tmp_path):
    key = "correcthorsebattery"
    events, guardians = [], []

    def note(event):
        events.append(json.dumps(event.as_json()) + str(event))
        if event.event == "launched":
            guardian = psutil.Process(event.pid).parent()
            guardians.append(" ".join(guardian.cmdline()) + str(guardian.environ()))

    command = [*little(), "--api-key", key + "\n"]
    before = os.umask(0)
    try:
        with (
            pytest.raises(GaveUp) as raised,
            supervise(command, run_dir=tmp_path / "runs", limits=Limits(ready_within=2), hooks=[note]),
        ):
            pass
    finally:
        os.umask(before)
    assert len(guardians) == 1
    assert key not in str(events) + str(guardians) + str(raised.value) + repr(raised.value)
    files = [path for path in (tmp_path / "runs").rglob("*") if path.is_file()]
    assert len(files) >= 3
    assert [path.name for path in files if key.encode() in path.read_bytes()] == []
    assert {path.stat().st_mode & 0o777 for path in files} == {0o600}


def test_the_key_of_the_stranger_on_our_port_is_not_told(tmp_path, keep):  # noqa: F811
    port = free_port()
    program = f"import socket, time; s = socket.create_server(('127.0.0.1', {port})); time.sleep(60)"
    stranger = subprocess.Popen([sys.executable, "-c", program, "--api-key", "somebodyelses"])
    keep(stranger)
    until_sync(lambda: psutil.Process(stranger.pid).net_connections())
    command = [sys.executable, "-m", "http.server", str(port)]
    with pytest.raises(PortInUse) as refused, plain(tmp_path, command, url=f"http://127.0.0.1:{port}"):
        pass
    assert str(stranger.pid) in str(refused.value)
    assert "somebodyelses" not in str(refused.value)
    assert stranger.poll() is None


def test_the_password_in_a_url_that_is_refused_is_not_told(tmp_path):
    with pytest.raises(BadLaunch) as refused:
        plain(tmp_path, url="http://user:hunter2hunter@127.0.0.1:80/?q=1")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    "line",
    [
        "non-default args: {'api_key': ['corre",
        "non-default args: {'api_key': ['first', 'corre",
        'args: {"api_key": "corre',
        "using correcthor",
    ],
)
def test_a_line_that_ends_inside_a_secret_shows_nothing_of_it(line):
    shown = redact(line, {"correcthorsebattery"})
    assert "corre" not in shown
    assert redact(shown, {"correcthorsebattery"}) == shown
    assert redact("a corrected line", {"correcthorsebattery"}) == "a corrected line"


def test_the_end_of_a_log_begins_with_a_whole_line(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"api_key='correcthorsebattery'\nnext\n")
    assert tail_of(str(log), at_most=15) == ("next",)
    assert tail_of(str(log)) == ("api_key='correcthorsebattery'", "next")


def test_a_secret_is_known_in_the_forms_in_which_errors_show_it():
    known = secrets_of(launch(api_key="corréct\\horse\n"))
    assert redact("Illegal header value 'Bearer corréct\\\\horse\\n'", known).count("horse") == 0
    assert redact("the key corréct\\horse is wrong", known).count("horse") == 0
