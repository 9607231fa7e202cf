# ruff: noqa: F401, F811 - fixtures
"""Who belongs to a launch and who does not, all of them side by side, whoever of ours dies first."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from looked_at import AS_NOBODY
from seen import until_sync
from test_guardian import PROGRAMS, is_gone, keep, members, serve, soon

from hangguard.act import _daemons, _membership
from hangguard.act.stop import prove_release
from hangguard.cli.live import _line_for_release
from hangguard.facts import Daemon, Release
from hangguard.observe.devices import look_who_has_gpus_open, who_has_open
from hangguard.observe.ports import free_port
from hangguard.supervision.attach import stop_members

pytestmark = pytest.mark.anyio

KINDS = ("plain", "setsid", "double", "retitled", "empty", "stopped", "forker", "runner")
"""Members of every kind; the server's own process ignores SIGTERM too."""

APART = tuple(kind.executable for kind in _daemons.KINDS if kind.executable not in {"tmux", "raylet"})
DAEMONS = (*APART, "tmux+below", "raylet+helper", "sccache+writer")
LEFT = (*DAEMONS, "tmux+below.child", "raylet+helper.helper")
"""Whoever of them stands apart from the launch lives on."""

OURS = ("screen+log", "screen+port", "screen+shm", "screen+session", "notadaemon", "screen+title")
ENDED = (*OURS, "sccache+writer.child")
"""The same programs, and each has something of the launch; and what only says that it is one."""


@pytest.fixture
def port():
    return free_port()


@pytest.fixture
def command(tmp_path, port):
    def words(*daemons, kinds=()):
        program = str(PROGRAMS / "member_server.py")
        return [sys.executable, program, str(tmp_path), str(port), *daemons, "--", *kinds]

    return words


@pytest.fixture
def decoys(tmp_path, keep):
    """Return strangers that look like members, each for another reason. All must live at the end."""
    log, other = tmp_path / "server.log", tmp_path / "other"
    other.mkdir()
    title = "import setproctitle as s, sys, time; s.setproctitle(sys.argv[1]); time.sleep(100)"
    words = {
        "same command line": [sys.executable, str(PROGRAMS / "tree_server.py"), str(other), "stubborn"],
        "same words as a member": ["/bin/sleep", "119.5"],
        "same title": [sys.executable, "-c", title, "VLLM::Worker_TP0"],
        "its name begins like the title": [sys.executable, "-c", title, "VLLM::Worker_TP0_and_more"],
        "reads the log": ["tail", "-F", str(log)],
        "appends to the log": ["sh", "-c", f"sleep 0.1; exec /bin/sleep 100 >> '{log}' 2>&1"],
        "a daemon that we did not start": [_copy_of_sleep(other, "tmux"), "100"],
    }

    def start():
        found = {name: subprocess.Popen(argv, stdout=subprocess.DEVNULL) for name, argv in words.items()}
        for process in found.values():
            keep(process)
        until_sync(lambda: os.path.samefile(f"/proc/{found['appends to the log'].pid}/fd/1", log))
        return found

    return start


def _copy_of_sleep(folder, name):
    copy = folder / name
    copy.write_bytes(Path("/bin/sleep").read_bytes())
    copy.chmod(0o755)
    return str(copy)


def dead(processes):
    return {name for name, process in processes.items() if process.poll() is not None}


def gone(processes):
    return {name for name, process in processes.items() if is_gone(process)}


# ------------------------------------------------------------------------------------------ the matrix


@pytest.mark.parametrize("guardian", ["lives", "is dead"])
async def test_every_member_ends_and_every_decoy_and_daemon_lives_on(serve, members, command, port, decoys, guardian):
    argv = command(*DAEMONS, *OURS, kinds=("stubborn", *KINDS))
    async with serve(argv=argv, port=port) as server:
        ours = members("root", *KINDS, *ENDED)
        daemons = members(*LEFT)
        others = decoys()
        if guardian == "is dead":
            # As the samples do: whoever descends is remembered, daemons too.
            seen = [psutil.Process(server.guardian_pid), *psutil.Process(server.guardian_pid).children(recursive=True)]
            server.remember(entry.identity for process in seen[1:] if (entry := _membership.read_entry(process.pid)))
            psutil.Process(server.guardian_pid).kill()
            await soon(lambda: not server.guardian_alive)
        stopped = await server.stop(grace=0.5)
        assert stopped.by == ("guardian" if guardian == "lives" else "supervisor")
        assert stopped.survivors == ()
        assert set(ours) - gone(ours) == set()
        assert gone(daemons) == set()
        assert {daemon.pid for daemon in stopped.daemons} == {process.pid for process in daemons.values()}
        assert dead(others) == set()
    assert gone(daemons) == set()
    assert dead(others) == set()


@pytest.mark.parametrize("terminal", [True, False])
def test_when_the_supervisor_is_killed_the_guardian_alone_tells_them_apart(
    tmp_path,
    keep,
    members,
    command,
    port,
    decoys,
    terminal,
    anyio_backend,
):
    with supervised(tmp_path, keep, command(*DAEMONS, *OURS, kinds=("stubborn", *KINDS)), port, terminal) as told:
        ours, daemons, others = members("root", *KINDS, *ENDED), members(*LEFT), decoys()
        own_child, in_the_terminal = psutil.Process(told["own child"]), psutil.Process(told["in the terminal"])
        guardian = psutil.Process(told["guardian"])
        os.kill(told["supervisor"], signal.SIGKILL)
        until_sync(lambda: set(ours) == gone(ours), within=5.0)
        until_sync(lambda: is_gone(guardian))  # it does not wait for daemons
        assert gone(daemons) == set()
        assert dead(others) == set()
        assert not is_gone(own_child)
        assert not is_gone(in_the_terminal)


def test_when_both_are_killed_in_the_same_instant_the_server_stays_as_the_safety_page_says(
    tmp_path,
    keep,
    members,
    command,
    port,
    decoys,
    anyio_backend,
):
    with supervised(tmp_path, keep, command("tmux", kinds=("stubborn", "setsid")), port, terminal=False) as told:
        ours, daemons, others = members("root", "setsid"), members("tmux"), decoys()
        ends = [psutil.Process(told[name]) for name in ("supervisor", "guardian")]
        for process in ends:
            process.suspend()  # neither may notice the other's end
        for process in ends:
            process.kill()
        until_sync(lambda: all(map(is_gone, ends)))
        assert gone(ours) | gone(daemons) | dead(others) == set()


@contextlib.contextmanager
def supervised(folder, keep, command, port, terminal):
    """A supervising program in a session of its own, perhaps on a terminal, with a job of the user's beside it."""
    log = folder / "server.log"
    words = [sys.executable, str(PROGRAMS / "member_supervisor.py"), str(folder), str(log), str(port), *command]
    script = '/bin/sleep 118.9 & echo $! > "$0/job"; "$@" & echo $! > "$0/supervisor"; wait'
    leader, end = pty.openpty()
    reader = threading.Thread(target=_drain, args=(leader,), daemon=True)
    reader.start()
    place = {"stdin": end, "stdout": end, "stderr": end} if terminal else {"stdin": subprocess.DEVNULL}
    shell = subprocess.Popen(
        ["setsid", *(["--ctty"] if terminal else []), "--wait", "sh", "-c", script, str(folder), *words], **place
    )
    os.close(end)
    keep(shell)
    until_sync((folder / "told").exists)
    told = json.loads((folder / "told").read_text())
    told |= {
        "in the terminal": int((folder / "job").read_text()),
        "supervisor": int((folder / "supervisor").read_text()),
    }
    for pid in told.values():
        keep(psutil.Process(pid))
    yield told
    os.close(leader)


def _drain(leader):
    with contextlib.suppress(OSError):
        while os.read(leader, 4096):
            pass


async def test_daemons_that_hold_the_boards_are_members_where_the_launch_started_them(
    serve, members, command, port, tmp_path, keep
):
    other = tmp_path / "other"
    other.mkdir()
    holders = ("nvidia-cuda-mps-server", "nvidia-persistenced")
    strangers = {name: subprocess.Popen([_copy_of_sleep(other, name), "100"]) for name in holders}
    for process in strangers.values():
        keep(process)
    async with serve(argv=command(*holders, "nvidia-cuda-mps-control"), port=port) as server:
        ours, control = members("root", *holders), members("nvidia-cuda-mps-control")
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        assert set(ours) == gone(ours)
        assert gone(control) == set()
        assert dead(strangers) == set()


@pytest.mark.long
async def test_a_second_run_beside_it_keeps_its_server_and_its_daemons(serve, members, command, port, tmp_path, keep):
    other = tmp_path / "other"
    other.mkdir()
    beside = [sys.executable, str(PROGRAMS / "member_server.py"), str(other), str(free_port()), "tmux", "--", "setsid"]
    async with serve(argv=beside, folder=other) as neighbour, serve(argv=command("tmux", kinds=("setsid",))) as server:
        ours = members("root", "setsid")
        members("tmux")
        until_sync(lambda: (other / "setsid").exists() and (other / "tmux").exists())
        theirs = {kind: psutil.Process(int((other / kind).read_text())) for kind in ("setsid", "tmux")}
        keep(theirs["tmux"])
        await server.stop(grace=0.3)
        assert set(ours) == gone(ours)
        assert gone(theirs) == set()
        assert neighbour.exit is None


async def test_daemons_are_named_in_the_proof_and_hold_nothing_up(serve, members, command, port):
    async def nothing(*_):
        return ()

    async def nobody(_port):
        return None

    async with serve(argv=command("tmux", kinds=("plain",)), port=port) as server:
        members("root", "plain")
        daemon = members("tmux")["tmux"]
        server.remember([_membership.read_entry(daemon.pid).identity])  # a sample saw it below the launch
        stopped = await server.stop(grace=1.0)
        proof = {
            "port": port, "members": server.members, "stopped": stopped, "gpu_baseline": (), "look_at_gpus": nothing,
            "who_listens": nobody, "shm_before": frozenset(os.listdir("/dev/shm")), "within": 1.0,
        }  # fmt: skip
        release = await prove_release(**proof)
        assert release.answer == "released"
        (told,) = release.daemons
        assert (told.pid, told.title) == (daemon.pid, "tmux 119.4")
        assert "a tmux server" in told.why
        daemon.kill()
        until_sync(lambda: is_gone(daemon))
        assert (await prove_release(**proof)).daemons == ()


async def test_with_keep_the_guardian_waits_for_the_server_and_not_for_its_daemons(
    serve, members, command, keep, tmp_path
):
    async with serve(argv=command("tmux", kinds=("plain",)), on_death="keep") as server:
        guardian, found = psutil.Process(server.guardian_pid), members("root", "plain")
        daemon = members("tmux")["tmux"]
        keep(guardian)
        server._link.hang_up()  # as our death would
        await soon(lambda: not server.guardian_alive or guardian.is_running())
        assert not is_gone(found["plain"])
        for process in found.values():
            process.kill()
        await soon(lambda: is_gone(guardian))
        assert not is_gone(daemon)


async def test_a_server_that_somebody_else_started_is_stopped_without_its_daemons(members, command, port, keep):
    process = subprocess.Popen(command("tmux", kinds=("setsid",)), start_new_session=True, stdout=subprocess.DEVNULL)
    keep(process)
    ours, daemon = members("root", "setsid"), members("tmux")["tmux"]
    pids = (process.pid, ours["setsid"].pid, daemon.pid)
    root, *rest = [_membership.read_entry(pid).identity for pid in pids]
    stopped = await stop_members(root, {root, *rest}, grace=1.0, port=port)
    assert [left.pid for left in stopped.daemons] == [daemon.pid]
    assert stopped.survivors == ()
    assert set(ours) == gone(ours)
    assert not is_gone(daemon)


def test_the_line_of_a_release_names_the_daemons():
    daemon = Daemon(pid=7, started=1, title="tmux new -d", why="a tmux server")
    line, style = _line_for_release(Release(items=(), daemons=(daemon,)))
    assert line == "released: nothing of it is left; left running, for it is no part of the server: pid 7 (tmux new -d)"
    assert style == ""


# ------------------------------------------------------------------------- what makes a daemon ours


@pytest.fixture
def holder(keep, tmp_path):
    """Return a function that starts a process which has something, in a session of its own; it writes a line."""

    def start(code, **options):
        options = {"start_new_session": True, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL} | options
        script = f"import time, sys\n{code}\nsys.stdout.write('up\\n'); sys.stdout.flush(); time.sleep(100)"
        process = subprocess.Popen([sys.executable, "-c", script], text=True, **options)
        keep(process)
        if process.stdout is not None:
            with process.stdout:
                assert process.stdout.readline() == "up\n"
        return process

    return start


@pytest.fixture
def as_daemon(monkeypatch):
    """Let the Python of the tests be the program of a known daemon."""
    name = os.path.basename(os.path.realpath(sys.executable))

    def known(**options):
        monkeypatch.setitem(_daemons.BY_EXECUTABLE, name, _daemons.Kind(name, "a daemon of the tests", **options))

    known()
    return known


def spared(process, **options):
    options = {"root_pid": os.getpid(), "log_id": None} | options
    return process.pid in _daemons.Daemons(**options).spare([process.pid], _membership.read_entries())


MAPS = """
import mmap
with open({path!r}, "r+b") as file:
    memory = mmap.mmap(file.fileno(), 4096)
"""


def test_with_nothing_of_ours_it_is_spared_and_by_title_alone_it_is_not(holder, as_daemon, monkeypatch):
    process = holder("")
    assert spared(process)
    monkeypatch.undo()
    assert not spared(process)


def test_in_the_session_of_the_launch_it_is_a_member(holder, as_daemon):
    assert not spared(holder("", start_new_session=False))


def test_with_a_member_in_its_session_it_is_a_member(holder, as_daemon, keep):
    process = holder("import subprocess; p = subprocess.Popen(['/bin/sleep', '99']); sys.stdout.write('')")
    assert spared(process)
    (other,) = psutil.Process(process.pid).children()
    keep(other)
    entries = _membership.read_entries()
    entries[other.pid].parent = 1  # no child of it
    daemons = _daemons.Daemons(root_pid=os.getpid(), log_id=None)
    assert daemons.spare([process.pid, other.pid], entries) == set()
    as_daemon(has_helpers=True)
    assert daemons.spare([process.pid, other.pid], entries) == {process.pid, other.pid}


@pytest.mark.parametrize(("name", "is_own"), [("psm_ours", False), ("plasmaXYZ", True)])
def test_shared_memory_that_is_mapped_only_makes_it_a_member_unless_it_is_its_own(holder, as_daemon, name, is_own):
    path = Path("/dev/shm") / f"{name}_hangguard_test_{os.getpid()}"
    path.write_bytes(bytes(4096))
    try:
        as_daemon(own_memory="plasma")
        assert spared(holder(MAPS.format(path=str(path)))) == is_own
    finally:
        path.unlink()


@pytest.mark.parametrize("is_ours", [True, False])
def test_a_listener_on_our_port_makes_it_a_member_and_on_another_it_does_not(holder, as_daemon, is_ours):
    port = free_port()
    process = holder(f"import socket; s = socket.create_server(('127.0.0.1', {port}))")
    assert spared(process, port=port if is_ours else free_port()) != is_ours


def test_a_gpu_makes_it_a_member_for_good(holder, as_daemon, tmp_path):
    """A stand-in for the file of a board, really open."""
    (tmp_path / "nvidia0").touch()
    let_go = "import os, signal; signal.signal(10, lambda *_: (file.close(), open(sys.argv[0] + '.let-go', 'w')))"
    process = holder(f"file = open({str(tmp_path / 'nvidia0')!r}); sys.argv[0] = {str(tmp_path / 'x')!r}\n{let_go}")
    devices = _daemons.Daemons(root_pid=os.getpid(), log_id=None, devices=f"{tmp_path}/nvidia\\d+")
    assert devices.spare([process.pid], _membership.read_entries()) == set()
    process.send_signal(signal.SIGUSR1)
    until_sync((tmp_path / "x.let-go").exists)
    assert devices.spare([process.pid], _membership.read_entries()) == set()
    assert spared(process)


def test_output_on_our_log_makes_it_a_member_and_on_another_file_it_does_not(holder, as_daemon, tmp_path):
    log, other = tmp_path / "log", tmp_path / "other"
    for path in (log, other):
        path.touch()
    log_id = (log.stat().st_dev, log.stat().st_ino)
    for path in (log, other):
        with path.open("a") as file:
            process = holder("", stdout=file)
        until_sync(lambda path=path: path.read_text() == "up\n")
        assert spared(process, log_id=log_id) == (path == other)


def test_what_cannot_be_looked_at_is_not_proved(holder, as_daemon, monkeypatch):
    process = holder("")
    stuck = threading.Event()

    def slow_open(path, *arguments, **options):
        if str(path) == f"/proc/{process.pid}/maps":
            stuck.wait(30)
        return open(path, *arguments, **options)

    monkeypatch.setattr(_daemons, "open", slow_open, raising=False)
    assert not spared(process)
    stuck.set()
    monkeypatch.delattr(_daemons, "open")

    assert spared(process)
    real = os.listdir

    def refuse(path):
        if path == f"/proc/{process.pid}/fd":
            raise PermissionError(13, "Permission denied", path)
        return real(path)

    monkeypatch.setattr(_daemons.os, "listdir", refuse)
    assert not spared(process)


HIDES = """
import ctypes, sys, time
if sys.argv[1] == "hides":
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE, as ssh-agent does to keep its keys
print("up", flush=True)
time.sleep(100)
"""
ASKS = """
import os, subprocess, sys
from hangguard.act import _daemons, _membership
name = os.path.basename(os.path.realpath(sys.executable))
_daemons.BY_EXECUTABLE[name] = _daemons.Kind(name, "a daemon of the tests")
for kind in ("hides", "shows"):
    with subprocess.Popen([sys.executable, "-c", sys.argv[1], kind], stdout=subprocess.PIPE, text=True,
                          start_new_session=True) as process:
        assert process.stdout.readline() == "up\\n"
        spared = _daemons.Daemons(root_pid=os.getpid(), log_id=None).spare([process.pid], _membership.read_entries())
        print(kind, "is spared" if spared else "is a member")
        process.kill()
"""


def test_a_daemon_that_hides_its_program_is_a_member_to_a_normal_user():
    """ssh-agent does so: its keys would be in a core, or in the hands of a debugger."""
    asks = subprocess.run([*AS_NOBODY, sys.executable, "-c", ASKS, HIDES], capture_output=True, text=True, check=False)
    assert asks.stdout.splitlines() == ["hides is a member", "shows is spared"], asks.stderr


# -------------------------------------------------------------------------------------------- the GPU


KEEPER = """
import os, sys, time
board = os.open(sys.argv[1], os.O_RDONLY)
if os.fork() == 0:
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(100)
until = time.monotonic() + 10
while not os.path.exists(sys.argv[2]) and time.monotonic() < until:
    time.sleep(0.01)
os._exit(9)
"""


async def test_a_forked_child_that_keeps_the_board_of_a_dead_owner_is_found_and_ended(serve, keep, tmp_path):
    board, wrote, pattern = tmp_path / "nvidia0", tmp_path / "keeper", f"{tmp_path}/nvidia\\d+"
    board.touch()
    with board.open() as mine:
        bystander = subprocess.Popen(["/bin/sleep", "100"], stdin=mine)
    keep(bystander)
    async with serve(argv=[sys.executable, "-c", KEEPER, str(board), str(wrote)]) as server:
        assert (await server.wait_exit()).code == 9
        child = int(wrote.read_text())
        seen = await look_who_has_gpus_open(pattern)
        assert {holder.pid for holder in seen.found} == {child, bystander.pid}
        await server.stop(grace=0.2)
        assert [holder.pid for holder in who_has_open(pattern).found] == [bystander.pid]
    assert bystander.poll() is None
