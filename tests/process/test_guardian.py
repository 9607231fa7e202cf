"""A launch ends as a whole, whoever dies first, and nothing else ends with it."""

import asyncio
import contextlib
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import anyio
import psutil
import pytest

from hangguard.act import _link, _membership, _signals, _titles
from hangguard.act.spawn import guarded
from hangguard.act.trial import try_guardian
from hangguard.elsewhere import Elsewhere
from hangguard.errors import CommandNotExecutable, CommandNotFound, GuardianFailed, WrongProcess
from hangguard.facts import Unseen

pytestmark = pytest.mark.anyio

PROGRAMS = Path(__file__).with_name("programs")
SERVER = str(PROGRAMS / "tree_server.py")
ESCAPES = ("plain", "setsid", "double", "retitled", "empty", "stopped")


def eventually(condition, within=10.0):
    ends = time.monotonic() + within
    while not condition():
        assert time.monotonic() < ends, f"not within {within} s"
        time.sleep(0.01)


async def soon(condition, within=10.0):
    with anyio.fail_after(within):
        while not condition():
            await anyio.sleep(0.01)


def is_gone(process):
    """As psutil sees it, not we."""
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def keep():
    """Take processes whose end the test must see to, whatever happens."""
    processes = []
    yield processes.append
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
        if isinstance(process, subprocess.Popen):
            process.wait()


@pytest.fixture
def members(tmp_path, keep):
    """Return a function that gives the process of each kind, once it stands."""

    def find(*kinds):
        found = {}
        for kind in kinds:
            eventually((tmp_path / kind).exists)
            found[kind] = psutil.Process(int((tmp_path / kind).read_text()))
            keep(found[kind])
        return found

    return find


@pytest.fixture
def serve(tmp_path):
    """Return a function that guards a server of these kinds."""

    def start(*kinds, argv=None, folder=tmp_path, **options):
        options = {
            "env": dict(os.environ),
            "cwd": str(folder),
            "log_path": str(folder / "server.log"),
            "lock_path": str(folder / "lock"),
            "death_grace": 0.5,
            "on_death": "stop",
            "pristine": False,
        } | options
        return guarded(argv=argv or [sys.executable, SERVER, str(folder), *kinds], **options)

    return start


@pytest.fixture
def bystanders(tmp_path, keep):
    """Return processes that look like members and are none."""
    log = tmp_path / "server.log"
    log.touch()
    copies = {
        "same command line": ["/bin/sleep", "119.5"],
        "same program": [sys.executable, "-c", "import time; time.sleep(100)", SERVER, str(tmp_path)],
        "same title": [
            sys.executable,
            "-c",
            "import setproctitle as s, time; s.setproctitle('VLLM::Worker_TP0'); time.sleep(100)",
        ],
        "reads the log": ["tail", "-f", str(log)],
    }
    found = {name: subprocess.Popen(argv, stdout=subprocess.DEVNULL) for name, argv in copies.items()}
    for process in found.values():
        keep(process)
    return found


def supervisor(keep, tmp_path, *arguments):
    process = subprocess.Popen([sys.executable, str(PROGRAMS / "tree_supervisor.py"), *arguments])
    keep(process)
    eventually((tmp_path / "told").exists)
    return process, json.loads((tmp_path / "told").read_text())


# ------------------------------------------------------------------------------------------ stopping


async def test_a_guardian_that_guards_nothing_yet_answers_a_question():
    """So preflight tries it."""
    trial = await try_guardian(within=20.0)
    assert trial.problem == ""


async def test_stop_ends_every_member_and_nobody_else(serve, members, bystanders, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    kinds = (*ESCAPES, "forker", "runner")
    async with serve("setsid", folder=other) as neighbour, serve(*kinds) as server:
        found = members("root", *kinds)
        eventually((other / "setsid").exists)
        stopped = await server.stop(grace=0.5)
        assert stopped.survivors == ()
        assert stopped.by == "guardian"
        assert stopped.ended > len(ESCAPES)
        assert {kind for kind, process in found.items() if not is_gone(process)} == set()
        assert list(_membership.find_members(_membership.read_entries(), log_id=server.log_id)) == []
        assert {name for name, process in bystanders.items() if process.poll() is not None} == set()
        assert neighbour.exit is None
        assert _membership.is_alive((neighbour.pid, neighbour.started))


async def test_a_server_that_obeys_sigterm_is_not_killed(serve, members):
    argv = ["/bin/sh", "-c", "trap 'exit 5' TERM; touch root; while :; do sleep 0.05; done"]
    async with serve(argv=argv) as server:
        await soon(Path(server_folder(server), "root").exists)
        stopped = await server.stop(grace=10.0)
        assert (await server.wait_exit()).code == 5
        assert stopped.seconds < 5


def server_folder(server):
    return os.readlink(f"/proc/{server.pid}/cwd")


async def test_a_stopped_server_is_let_go_on_so_that_it_hears_sigterm_and_a_stopped_bystander_is_not(serve, keep):
    argv = ["/bin/sh", "-c", "trap 'exit 5' TERM; touch root; while :; do sleep 0.05; done"]
    bystander = subprocess.Popen(["/bin/sleep", "100"])
    keep(bystander)
    async with serve(argv=argv) as server:
        await soon(Path(server_folder(server), "root").exists)
        for pid in (server.pid, bystander.pid):
            os.kill(pid, signal.SIGSTOP)
        await soon(
            lambda: _membership.read_entry(server.pid).state == _membership.read_entry(bystander.pid).state == "T"
        )
        stopped = await server.stop(grace=30.0)
        assert (await server.wait_exit()).code == 5
        assert stopped.survivors == ()
        assert _membership.read_entry(bystander.pid).state == "T"


async def test_members_that_outlive_the_root_get_a_moment_and_not_the_whole_grace(serve, members):
    async with serve("setsid") as server:
        found = members("root", "setsid")
        stopped = await server.stop(grace=30.0)
        assert stopped.seconds < 6
        assert is_gone(found["setsid"])


async def test_members_of_a_root_that_left_are_ended(serve, members):
    async with serve("double", "leaves") as server:
        found = members("double")
        assert (await server.wait_exit()).code == 3
        assert not is_gone(found["double"])
        assert (await server.stop(grace=0.3)).survivors == ()
        assert is_gone(found["double"])


async def test_leaving_the_block_stops(serve, members, anyio_backend):
    async with serve("setsid"):
        found = members("root", "setsid")
    assert all(map(is_gone, found.values()))


async def test_the_bodys_exception_arrives_as_it_is(serve):
    with pytest.raises(ValueError, match="mine"):
        async with serve():
            raise ValueError("mine")
    with pytest.raises(KeyboardInterrupt):
        async with serve():
            raise KeyboardInterrupt


async def test_cancelling_the_body_stops_and_stays_a_cancellation(serve, members):
    with anyio.move_on_after(0.5) as scope:
        async with serve("setsid"):
            found = members("root", "setsid")
            await anyio.sleep(100)
    assert scope.cancelled_caught
    assert all(map(is_gone, found.values()))


@pytest.mark.parametrize("caller", ["here", "thread"])
async def test_hurry_ends_the_grace(serve, members, caller):
    async with serve("stubborn") as server, anyio.create_task_group() as tasks:
        members("root")
        steps = []

        def on_progress(progress):
            steps.append(progress.step)
            if progress.step == "grace" and caller == "here":
                server.hurry()
            elif progress.step == "grace":
                threading.Thread(target=server.hurry).start()

        async def stop():
            stopped = await server.stop(grace=60.0, on_progress=on_progress)
            assert stopped.seconds < 10

        tasks.start_soon(stop)
    assert steps[0] == "grace"
    assert steps[-1] == "done"
    assert server.exit.code == -signal.SIGKILL


async def test_a_second_stop_shortens_the_first(serve, members):
    async with serve("stubborn") as server, anyio.create_task_group() as tasks:
        members("root")
        started = anyio.Event()

        async def long_stop():
            await server.stop(grace=60.0, on_progress=lambda _: started.set())

        tasks.start_soon(long_stop)
        await started.wait()
        assert (await server.stop(grace=0.2)).seconds < 10


async def test_shared_memory_is_unlinked_by_its_own_tracker(serve, members, tmp_path):
    foreign = Path("/dev/shm") / f"psm_hangguard_test_{os.getpid()}"
    foreign.touch()
    try:
        async with serve("stubborn", "shm") as server:
            members("root", "shm")
            ours = Path("/dev/shm") / (tmp_path / "shm-name").read_text()
            assert ours.exists()
            assert (await server.stop(grace=0.3)).survivors == ()
            assert not ours.exists()
            assert foreign.exists()
    finally:
        foreign.unlink()


async def test_other_children_of_the_program_keep_their_exit_code(serve):
    mine = subprocess.Popen(["/bin/sh", "-c", "exit 7"])
    async with serve() as server:
        guardian = server.guardian_pid
    assert mine.wait() == 7
    assert guardian not in {child.pid for child in psutil.Process().children()}


# ------------------------------------------------------------------------------------------- deaths


@pytest.mark.parametrize("mode", ["plain", "fork", "stopping"])
def test_when_the_supervisor_is_killed_nothing_is_left_after_five_seconds(
    tmp_path, keep, members, bystanders, mode, anyio_backend
):
    kinds = [*ESCAPES, "stubborn"]
    process, told = supervisor(keep, tmp_path, anyio_backend, str(tmp_path), mode, *kinds)
    found = members("root", *ESCAPES)
    guardian = psutil.Process(told["guardian"])
    if mode == "stopping":
        eventually((tmp_path / "grace").exists)
    if mode == "fork":
        forked = psutil.Process(told["forked"])
        keep(forked)
    process.kill()
    eventually(lambda: all(map(is_gone, found.values())), within=5.0)
    eventually(lambda: is_gone(guardian))
    assert {name for name, other in bystanders.items() if other.poll() is not None} == set()
    assert mode != "fork" or not is_gone(forked)


def test_when_its_event_loop_is_thrown_away_the_server_ends_though_the_program_lives(tmp_path, keep, members):
    process, _ = supervisor(keep, tmp_path, "asyncio", str(tmp_path), "abandon", "setsid")
    found = members("root", "setsid")
    (tmp_path / "go").touch()
    eventually(lambda: all(map(is_gone, found.values())), within=6.0)
    assert process.poll() is None


def test_the_stop_completes_while_asyncio_cancels_every_task(serve, members):
    found = {}

    async def main():
        async with serve("stubborn"):
            found.update(members("root"))
            for task in asyncio.all_tasks():
                asyncio.get_running_loop().call_soon(task.cancel)
            await anyio.sleep(100)

    began = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(main())
    assert is_gone(found["root"])
    assert time.monotonic() - began < 10


def test_with_keep_the_server_outlives_its_supervisor_and_the_guardian_outlives_the_server(tmp_path, keep, members):
    process, told = supervisor(keep, tmp_path, "asyncio", str(tmp_path), "keep", "setsid")
    found = members("root", "setsid")
    guardian = psutil.Process(told["guardian"])
    keep(guardian)
    process.kill()
    process.wait()
    found["root"].terminate()
    eventually(lambda: is_gone(found["root"]))
    # With "stop", the grace and the moment for members without a root would both be over by then.
    ends = time.monotonic() + 3.0
    while time.monotonic() < ends:
        assert guardian.is_running()
        assert not is_gone(found["setsid"])
        time.sleep(0.05)
    found["setsid"].kill()
    eventually(lambda: is_gone(guardian))


async def test_when_the_guardian_is_killed_the_supervisor_takes_over(serve, members, bystanders):
    async with serve(*ESCAPES, "stubborn") as server:
        found = members("root", *ESCAPES)
        os.kill(server.guardian_pid, signal.SIGKILL)
        await soon(lambda: not server.guardian_alive)
        assert not any(map(is_gone, found.values()))
        stopped = await server.stop(grace=0.3)
        assert stopped.survivors == ()
        assert stopped.by == "supervisor"
        assert all(map(is_gone, found.values()))
        assert server.exit.code == -signal.SIGKILL or isinstance(server.exit.code, Unseen)
    assert {name for name, process in bystanders.items() if process.poll() is not None} == set()


async def test_the_end_of_a_server_without_guardian_is_noticed(serve, members):
    async with serve() as server:
        root = members("root")["root"]
        os.kill(server.guardian_pid, signal.SIGKILL)
        await soon(lambda: not server.guardian_alive)
        root.terminate()
        with anyio.fail_after(10):
            ended = await server.wait_exit()
        assert ended.code == -signal.SIGTERM or isinstance(ended.code, Unseen)


async def test_what_was_remembered_is_found_without_guardian_tree_and_log(serve, members):
    async with serve("elsewhere") as server:
        member = members("root", "elsewhere")["elsewhere"]
        server.remember([_membership.read_entry(member.pid).identity])
        os.kill(server.guardian_pid, signal.SIGKILL)
        await server.stop(grace=0.3)
        assert is_gone(member)


@pytest.mark.long
async def test_a_guardian_that_does_not_answer_is_replaced(serve, members, monkeypatch):
    monkeypatch.setattr(_link.Link, "wake", lambda link: None)  # it stays stopped
    async with serve("setsid") as server:
        found = members("root", "setsid")
        os.kill(server.guardian_pid, signal.SIGSTOP)
        stopped = await server.stop(grace=0.2, within=0.5)
        assert stopped.by == "supervisor"
        assert all(map(is_gone, found.values()))


async def test_the_guardian_is_deaf_to_the_terminal_and_obeys_sigterm(serve, members):
    async with serve(*ESCAPES) as server:
        found = members("root", *ESCAPES)
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
            os.kill(server.guardian_pid, number)
        os.kill(server.guardian_pid, signal.SIGTERM)
        assert (await server.wait_exit()).code == -signal.SIGTERM
        await soon(lambda: all(map(is_gone, found.values())), within=6)
        assert server.guardian_alive
        assert (await server.stop(grace=0.1)).survivors == ()


async def test_a_forked_child_can_neither_hurry_nor_stop(serve):
    async with serve() as server:
        child = os.fork()
        if child == 0:
            try:
                server.hurry()
            except WrongProcess:
                server._close()
                os._exit(42)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
        await anyio.sleep(0.1)
        assert server.guardian_alive
        assert server.exit is None


# --------------------------------------------------------------------------------------- the launch


async def test_what_cannot_be_started_is_refused_by_its_reason(serve, tmp_path):
    with pytest.raises(CommandNotFound) as not_found:
        async with serve(argv=["no-such-program"]):
            pass
    assert not_found.value.path == "no-such-program"
    plain = tmp_path / "plain.txt"
    plain.write_text("no program")
    with pytest.raises(CommandNotExecutable):
        async with serve(argv=[str(plain)]):
            pass
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    with pytest.raises(CommandNotExecutable, match="interpreter"):
        async with serve(argv=[str(script)]):
            pass
    with pytest.raises(CommandNotFound) as no_folder:
        async with serve(cwd=str(tmp_path / "nowhere")):
            pass
    assert no_folder.value.what == "directory"
    assert no_folder.value.path == str(tmp_path / "nowhere")


async def test_a_log_or_a_lock_of_somebody_else_is_refused(serve, tmp_path):
    async with serve():
        with pytest.raises(GuardianFailed, match=r"lock.*another launch"):
            async with serve():
                pass
        with pytest.raises(GuardianFailed, match=r"log.*another launch"):
            async with serve(lock_path=None):
                pass
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    with pytest.raises(GuardianFailed, match="link"):
        async with serve(log_path=str(link)):
            pass
    assert not (tmp_path / "target").exists()


async def test_a_writer_of_the_log_from_before_the_launch_is_never_a_member(serve, tmp_path, keep):
    with (tmp_path / "server.log").open("a") as log:
        writer = subprocess.Popen(["/bin/sleep", "100"], stdout=log)
    keep(writer)
    with pytest.raises(GuardianFailed, match="writes to it already"):
        async with serve():
            pass
    assert writer.poll() is None


async def test_the_lock_is_held_as_long_as_the_guardian_lives(serve, tmp_path):
    def is_free():
        with (tmp_path / "lock").open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return False
            return True

    async with serve():
        assert not is_free()
    assert is_free()


async def test_the_server_inherits_no_ignored_or_blocked_signal(serve):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    also = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2, signal.SIGTERM, signal.SIGINT})
    try:
        async with serve(argv=["/bin/sleep", "100"]) as server:
            status = dict(line.split(":\t", 1) for line in Path(f"/proc/{server.pid}/status").read_text().splitlines())
            # Not those that glibc keeps to itself (32, 33): its posix_spawn, which subprocess uses since 3.13, leaves
            # them ignored in whatever starts us, and nobody can set them through glibc.
            ours = sum(1 << (number - 1) for number in signal.valid_signals())
            assert int(status["SigIgn"], 16) & ours == 0
            assert int(status["SigBlk"], 16) & ours == 0
            os.kill(server.pid, signal.SIGINT)
            assert (await server.wait_exit()).code == -signal.SIGINT
    finally:
        signal.signal(signal.SIGHUP, before)
        signal.signal(signal.SIGUSR1, also)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@pytest.mark.parametrize("pristine", [False, True])
async def test_no_core_is_left_unless_pristine(serve, pristine):
    async with serve(argv=["/bin/sleep", "100"], pristine=pristine) as server:
        soft = psutil.Process(server.pid).rlimit(psutil.RLIMIT_CORE)[0]
        assert soft == (psutil.Process().rlimit(psutil.RLIMIT_CORE)[0] if pristine else 1)


async def test_the_server_gets_exactly_its_environment_and_the_guardian_shows_none_of_it(serve, tmp_path):
    env = {"PATH": os.environ["PATH"], "TOKEN": "s3cret-\udcff", "EMPTY": ""}
    argv = ["/bin/sh", "-c", "cat /proc/self/environ; exec sleep 100", "s3cret-argument"]
    async with serve(argv=argv, env=env) as server:
        log = tmp_path / "server.log"
        await soon(lambda: b"s3cret" in log.read_bytes())
        shown = dict(part.split(b"=", 1) for part in log.read_bytes().split(b"\0") if part)
        assert {name: shown[name] for name in (b"TOKEN", b"EMPTY")} == {b"TOKEN": b"s3cret-\xff", b"EMPTY": b""}
        for name in ("cmdline", "environ"):
            assert b"s3cret" not in Path(f"/proc/{server.guardian_pid}/{name}").read_bytes()
        assert log.stat().st_mode & 0o777 == 0o600
        assert server.log_id == (log.stat().st_dev, log.stat().st_ino)
        assert os.getsid(server.pid) == server.pid
        assert os.getsid(server.guardian_pid) == server.guardian_pid


async def test_a_launch_larger_than_the_socket_arrives_whole(serve, members):
    env = dict(os.environ) | {f"BIG{n}": "x" * 100_000 for n in range(12)}
    async with serve(env=env) as server:
        root = members("root")["root"]
        assert server.pid == root.pid
        assert root.environ()["BIG11"] == "x" * 100_000


async def test_orphans_are_reaped_and_told_with_their_code(serve):
    argv = ["/bin/sh", "-c", "(sh -c 'sleep 0.2; exit 9' & ) ; exec sleep 100"]
    async with serve(argv=argv, log_path=None, lock_path=None) as server:
        codes = []
        server.on_reaped = lambda identity, code: codes.append((identity, code))
        await soon(lambda: codes)
        [((pid, started), code)] = codes
        assert code == 9
        assert started > 0
        assert not psutil.pid_exists(pid)
        assert server.exit is None
        assert server.log_id is None


# ------------------------------------------------------------------------------------- the protocol


@pytest.fixture
def bare_guardian(keep):
    """Return a socket to a guardian that nobody has spoken to yet, and its process."""
    ours, theirs = socket.socketpair()
    reads, writes = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", _link.GUARDIAN, str(theirs.fileno()), str(reads), "-1"],
        pass_fds=[theirs.fileno(), reads],
        start_new_session=True,
    )
    keep(process)
    theirs.close()
    os.close(reads)
    ours.settimeout(10)
    yield ours, process, writes
    ours.close()
    with contextlib.suppress(OSError):
        os.close(writes)


@pytest.mark.parametrize(
    "line", [b'{"v": 2, "do": "launch", "argv": ["/bin/true"]}', b"not json", b'{"v": 1, "do": "dance"}', b"[]"]
)
def test_another_protocol_is_answered_with_an_error_and_nothing_starts(bare_guardian, line):
    control, process, _ = bare_guardian
    control.sendall(line + b"\n")
    answer = json.loads(control.makefile().readline())
    assert answer["v"] == 1
    assert answer["say"] == "error"
    assert process.wait(10) == 0


def launch_line(**fields):
    launch = {"argv": ["/bin/sleep", "117.5"], "env": {}, "cwd": "/", "log_path": None, "lock_path": None}
    policy = {"death_grace": 0.3, "on_death": "stop", "pristine": False, "elsewhere": Elsewhere().carried()}
    return json.dumps({"v": 1, "do": "launch", **launch, **policy, **fields}).encode() + b"\n"


def test_a_later_line_in_another_protocol_does_not_end_the_server(bare_guardian):
    control, process, _ = bare_guardian
    answers = control.makefile()
    control.sendall(launch_line())
    server = psutil.Process(json.loads(answers.readline())["pid"])
    control.sendall(b'{"v": 7, "do": "stop", "grace": 0}\n')
    assert json.loads(answers.readline())["say"] == "error"
    assert not is_gone(server)
    control.sendall(b'{"v": 1, "do": "stop", "grace": 5}\n')
    said = [json.loads(answers.readline())["say"] for _ in range(2)]
    while said[-1] != "stopped":
        said.append(json.loads(answers.readline())["say"])
    assert "exit" in said
    assert is_gone(server)
    control.sendall(b'{"v": 1, "do": "bye"}\n')
    assert process.wait(10) == 0


def test_without_a_pidfd_the_pipe_alone_tells_the_death(bare_guardian):
    control, process, writes = bare_guardian
    control.sendall(launch_line())
    server = psutil.Process(json.loads(control.makefile().readline())["pid"])
    os.close(writes)
    eventually(lambda: is_gone(server), within=5)
    assert process.wait(10) == 0


def test_a_supervisor_that_never_reads_does_not_block_the_guardian(bare_guardian):
    control, process, writes = bare_guardian
    script = "for i in $(seq 3000); do (true &) ; done; exec sleep 100"
    control.sendall(launch_line(argv=["/bin/sh", "-c", script], env={"PATH": os.environ["PATH"]}))
    server = psutil.Process(json.loads(control.recv(4096).split(b"\n")[0])["pid"])
    eventually(lambda: server.name() == "sleep", within=60)
    os.close(writes)
    eventually(lambda: is_gone(server), within=5)
    assert process.wait(10) == 0


# ---------------------------------------------------------------------------------------- who is who


def test_a_leader_that_ended_before_its_threads_is_not_dead(keep):
    code = (
        "import ctypes, threading, time; threading.Thread(target=time.sleep, args=(100,)).start(); "
        "ctypes.CDLL(None).pthread_exit(0)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    keep(process)
    eventually(lambda: _membership.read_entry(process.pid).state == "Z")
    entry = _membership.read_entry(process.pid)
    assert not entry.dead
    assert _membership.is_alive(entry.identity)
    process.kill()
    eventually(lambda: not _membership.is_alive(entry.identity))


def test_only_members_are_signalled_and_only_by_their_identity(keep):
    process = subprocess.Popen(["/bin/sleep", "100"])
    keep(process)
    entry = _membership.read_entry(process.pid)
    later = (entry.pid, entry.started + 1)
    assert not _signals.send(entry.identity, signal.SIGKILL, members=set())
    assert not _signals.send(later, signal.SIGKILL, members={later})
    ourselves = [_membership.read_entry(pid).identity for pid in (os.getpid(), os.getppid(), 1)]
    for identity in ourselves:
        assert not _signals.send(identity, signal.SIGCONT, members=set(ourselves))
    assert process.poll() is None
    assert _signals.send(entry.identity, signal.SIGKILL, members={entry.identity})
    assert process.wait(10) == -signal.SIGKILL


def test_signalling_works_where_there_are_no_pidfds(keep, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    process = subprocess.Popen(["/bin/sleep", "100"])
    keep(process)
    identity = _membership.read_entry(process.pid).identity
    assert not _signals.send((identity[0], identity[1] + 1), signal.SIGKILL, members={(identity[0], identity[1] + 1)})
    assert _signals.send(identity, signal.SIGKILL, members={identity})
    assert process.wait(10) == -signal.SIGKILL


async def test_everything_works_where_there_are_no_pidfds(serve, members, monkeypatch):
    monkeypatch.delattr(os, "pidfd_open")
    async with serve("setsid") as server:
        found = members("root", "setsid")
        os.kill(server.guardian_pid, signal.SIGKILL)
        await soon(lambda: not server.guardian_alive)
        assert (await server.stop(grace=0.2)).survivors == ()
        assert all(map(is_gone, found.values()))
        assert isinstance(server.exit.code, Unseen)


def test_names_with_blanks_and_parentheses_do_not_confuse_the_start_time(keep, tmp_path):
    program = tmp_path / "a) R 1 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "100"])
    keep(process)
    eventually(lambda: psutil.Process(process.pid).name() == "a) R 1 (b")
    entry = _membership.read_entry(process.pid)
    assert entry.parent == os.getpid()
    started = psutil.boot_time() + entry.started / os.sysconf("SC_CLK_TCK")
    assert abs(started - psutil.Process(process.pid).create_time()) < 1.5
    assert entry.state in "SRD"


def test_writers_of_the_log_are_members_and_readers_are_not(tmp_path, keep):
    log = tmp_path / "log"
    with log.open("a") as file:
        writer = subprocess.Popen(["/bin/sleep", "100"], stdout=subprocess.DEVNULL, stderr=file)
    keep(writer)
    with log.open() as file:
        reader = subprocess.Popen(["/bin/sleep", "100"], stdout=file, stderr=file)
    keep(reader)
    log_id = (log.stat().st_dev, log.stat().st_ino)
    assert _membership.log_writers(log_id, _membership.read_entries()) == {writer.pid}


def test_a_command_line_that_blocks_costs_a_moment_and_the_others_are_read(monkeypatch):
    hangs = threading.Event()

    def slow_open(path, *arguments, **options):
        if str(path) == "/proc/1/cmdline":
            hangs.wait(30)
        return open(path, *arguments, **options)

    monkeypatch.setattr(_titles, "open", slow_open, raising=False)
    titles = _titles.Titles()
    began = time.monotonic()
    ours = (os.getpid(), 1)
    titles.learn([(1, 1), ours])
    assert time.monotonic() - began < 5
    assert titles[1, 1] == ""
    assert "pytest" in titles[ours]
    hangs.set()
