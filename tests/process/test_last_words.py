"""Before it is killed, a hung member says where it stands; nobody else is asked, and nobody who would leave a core."""

import contextlib
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from pythons import PYTHONS
from seen import until_sync
from test_guardian import bystanders, eventually, is_gone, keep, serve  # noqa: F401 - fixtures
from test_stacks import DEADLOCK

from hangguard.act import _aside, _membership, _signals, _titles
from hangguard.facts import Stack, StackFrame, ThreadStack, Unseen
from hangguard.observe._last_words import parse_last_words
from hangguard.supervision.last_words import hear_last_words

pytestmark = pytest.mark.anyio
PROGRAM = Path(__file__).parent / "programs" / "last_words.py"
TOLD = {**os.environ, "PYTHONFAULTHANDLER": "1"}


def identity(pid):
    return _membership.read_entry(pid).identity


def unseen(process):
    return Stack(pid=process.pid, started=identity(process.pid)[1], title="it", threads=Unseen("not permitted"))


def functions(stack):
    return [frame.function for frame in stack.threads[0].frames]


@pytest.fixture
def hung(serve, tmp_path):  # noqa: F811
    """Return a function that serves the tree of a hung server, and one that gives its processes once they stand."""

    def start(workers=3, **options):
        argv = [sys.executable, str(PROGRAM), str(workers), str(tmp_path)]
        return serve(argv=argv, **{"env": TOLD, **options})

    def stand(workers=3):
        eventually(lambda: len(list(tmp_path.glob("worker.*"))) == workers and list(tmp_path.glob("parent.*")))
        (parent,) = tmp_path.glob("parent.*")
        return (
            psutil.Process(int(parent.suffix[1:])),
            [psutil.Process(int(path.suffix[1:])) for path in tmp_path.glob("worker.*")],
        )

    return start, stand


@pytest.fixture
def twins(keep, tmp_path):  # noqa: F811
    """Return processes with the same command line, title and environment, that are none of the launch."""
    there = tmp_path / "twin"
    there.mkdir()
    found = [
        subprocess.Popen([sys.executable, str(PROGRAM), "0", str(there)], env=TOLD),
        subprocess.Popen([sys.executable, str(DEADLOCK)], env=TOLD, stdout=subprocess.DEVNULL),
    ]
    for process in found:
        keep(process)
    eventually(lambda: list(there.glob("parent.*")))
    yield found
    assert [process.poll() for process in found] == [None, None]
    for process in found:  # the first one's tracker ends with it, and takes its shared memory along
        process.kill()
    eventually(lambda: not Path("/dev/shm", (there / "shm-name").read_text()).exists())


# -------------------------------------------------------------------------------- safety comes first


async def test_only_members_that_were_named_are_asked_and_their_twins_live_on(hung, twins, bystanders):  # noqa: F811
    start, stand = hung
    async with start() as server:
        parent, workers = stand()
        wanted = [identity(workers[0].pid), *(identity(twin.pid) for twin in twins)]
        heard = await server.last_words(wanted, within=5)
        eventually(lambda: is_gone(workers[0]))
        assert [(said.pid, said.why_not) for said in heard if said.begins is not None] == [(workers[0].pid, "")]
        strangers = [said for said in heard if said.begins is None]
        assert {said.pid for said in strangers} == {twin.pid for twin in twins}
        assert {said.why_not for said in strangers} == {"it is no member of this launch, or has ended"}
        assert not any(is_gone(process) for process in (parent, *workers[1:]))
        assert {name for name, other in bystanders.items() if other.poll() is not None} == set()


async def test_a_pid_that_somebody_else_has_now_is_not_asked(hung):
    start, stand = hung
    async with start() as server:
        parent, _ = stand()
        (said,) = await server.last_words([(parent.pid, identity(parent.pid)[1] - 1)], within=5)
        assert said.begins is None
        assert not is_gone(parent)


async def test_a_pristine_launch_is_never_asked(hung):
    start, stand = hung
    async with start(pristine=True) as server:
        parent, workers = stand()
        assert await server.last_words([identity(parent.pid)], within=5) == ()
        assert not any(is_gone(process) for process in (parent, *workers))


async def test_who_would_leave_a_core_is_not_asked(hung):
    start, stand = hung
    async with start() as server:
        parent, _ = stand()
        most = resource.prlimit(parent.pid, resource.RLIMIT_CORE)[1]
        resource.prlimit(parent.pid, resource.RLIMIT_CORE, (most, most))
        (said,) = await server.last_words([identity(parent.pid)], within=5)
        assert said.begins is None
        assert "its core limit is" in said.why_not
        assert not is_gone(parent)


@pytest.mark.parametrize(
    ("soft", "pattern", "reason"),
    [
        ("0", b"core\n", ""),
        ("1", b"|/usr/lib/systemd/systemd-coredump\n", ""),
        ("0", b"|/usr/lib/systemd/systemd-coredump\n", "cores are piped to a program here, whatever the limit is"),
        ("0", b"@/run/cores.socket\n", "cores are sent to a socket here"),
        ("1", b"@@/run/cores.socket\n", "cores are sent to a socket here"),
        ("unlimited", b"core\n", "its core limit is unlimited"),
        ("4096", b"core\n", "its core limit is 4096"),
    ],
)
def test_what_a_core_limit_means_depends_on_where_cores_go(soft, pattern, reason):
    limits = f"Limit   Soft Limit  Hard Limit  Units\nMax core file size        {soft}     unlimited     bytes\n"
    assert _aside._core_of(limits.encode(), pattern) == reason


async def test_who_was_started_without_faulthandler_is_not_asked(hung):
    start, stand = hung
    env = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    async with start(env=env) as server:
        parent, workers = stand()
        heard = await server.last_words([identity(process.pid) for process in (parent, *workers)], within=5)
        assert {said.why_not for said in heard} == {"nothing in it answers SIGABRT"}
        assert not any(is_gone(process) for process in (parent, *workers))


async def test_who_answers_sigabrt_in_a_way_of_its_own_is_not_asked(serve, tmp_path):  # noqa: F811
    code = "import signal, sys; signal.signal(6, lambda *_: None); print('up', flush=True); signal.pause()"
    env = {name: value for name, value in os.environ.items() if name != "PYTHONFAULTHANDLER"}
    async with serve(argv=[sys.executable, "-c", code], env=env) as server:
        eventually(lambda: b"up" in (tmp_path / "server.log").read_bytes())
        (said,) = await server.last_words([(server.pid, server.started)], within=5)
        assert said.why_not == "it was started without PYTHONFAULTHANDLER"


async def test_a_member_under_a_debugger_is_left_to_it(serve, keep, tmp_path):  # noqa: F811
    tracer = (
        "import ctypes, os, sys\n"
        "libc = ctypes.CDLL(None); pid = int(sys.argv[1])\n"
        "assert libc.ptrace(0x4206, pid, None, None) == 0\n"  # PTRACE_SEIZE: it runs on
        "print('has it', flush=True); sys.stdin.read()\n"
    )
    async with serve(argv=[sys.executable, str(DEADLOCK)], env=TOLD) as server:
        eventually(lambda: (tmp_path / "server.log").read_bytes().count(b"waiting") == 2)
        argv = [sys.executable, "-c", tracer, str(server.pid)]
        with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as debugger:
            keep(debugger)
            assert debugger.stdout.readline() == b"has it\n"
            (said,) = await server.last_words([(server.pid, server.started)], within=5)
            assert said.why_not == "a debugger has it"
            assert server.exit is None
            debugger.kill()


async def test_the_resource_tracker_is_spared_and_unlinks_what_is_left(hung, tmp_path):
    start, stand = hung
    async with start() as server:
        parent, workers = stand()
        (tracker,) = [child for child in parent.children() if _titles.TRACKER in " ".join(child.cmdline())]
        everybody = [identity(process.pid) for process in (parent, *workers, tracker)]
        heard = {said.pid: said.why_not for said in await server.last_words(everybody, within=5)}
        assert heard[tracker.pid] == "it unlinks what the others leave"
        assert {heard[process.pid] for process in (parent, *workers)} == {""}
        eventually(lambda: not Path("/dev/shm", (tmp_path / "shm-name").read_text()).exists())


async def test_once_a_stop_has_begun_nobody_is_asked(hung, tmp_path):
    start, stand = hung
    async with start() as server:
        parent, _ = stand()
        asked = [identity(parent.pid)]
        assert (await server.stop(grace=5)).survivors == ()
        assert await server.last_words(asked, within=5) == ()
        assert b"Fatal Python error" not in (tmp_path / "server.log").read_bytes()


def test_a_stop_in_the_middle_ends_the_asking(monkeypatch):
    asked = []

    def send(who, number, _members):
        asked.append((who, number))
        return True

    monkeypatch.setattr(_signals, "send", send)
    with contextlib.ExitStack() as stack:
        children = []
        for _ in range(2):
            argv = [sys.executable, "-X", "faulthandler", "-c", "print('up', flush=True); input()"]
            child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=TOLD)
            stack.callback(child.communicate)
            stack.callback(child.kill)
            resource.prlimit(child.pid, resource.RLIMIT_CORE, (0, resource.prlimit(child.pid, resource.RLIMIT_CORE)[1]))
            assert child.stdout.readline() == b"up\n"
            children.append(child)
        wanted = [identity(child.pid) for child in children]
        answer = _aside.last_words(
            wanted, find=lambda _: set(wanted), log_size=lambda: 0, is_over=lambda: bool(asked), within=5
        )
    assert [number for _, number in asked] == [signal.SIGABRT, signal.SIGCONT]
    assert [said["why_not"] for said in answer["heard"]] == ["", "the stop began"]


# ----------------------------------------------------------------------------------- what they say


@pytest.mark.parametrize("stopped", [False, True])
async def test_each_member_tells_its_own_stacks_workers_first(hung, tmp_path, stopped):
    start, stand = hung
    async with start() as server:
        parent, workers = stand()
        if stopped:
            for worker in workers:
                worker.suspend()
            eventually(lambda: all(worker.status() == psutil.STATUS_STOPPED for worker in workers))
        stacks = tuple(unseen(process) for process in (parent, *workers))
        told = await hear_last_words(server, stacks, str(tmp_path / "server.log"))
        assert [stack.pid for stack in told] == [stack.pid for stack in stacks]
        assert {stack.seen_by for stack in told} == {"last words"}
        assert functions(told[0])[2] == "wait_for_the_workers"
        assert all("wait_for_the_peer" in functions(stack) for stack in told[1:])
        eventually(lambda: all(is_gone(process) for process in (parent, *workers)))
        log = (tmp_path / "server.log").read_text()
        assert log.rindex("wait_for_the_peer") < log.rindex("wait_for_the_workers")
        assert list(tmp_path.glob("core*")) == []
        assert (await server.wait_exit()).code == -signal.SIGABRT


async def test_who_was_seen_or_is_no_python_is_not_asked(hung, tmp_path):
    start, stand = hung
    async with start() as server:
        parent, workers = stand()
        seen = Stack(pid=parent.pid, started=identity(parent.pid)[1], title="", threads=())
        other = Stack(
            pid=workers[0].pid, started=identity(workers[0].pid)[1], title="", threads=Unseen("no"), is_python=False
        )
        assert await hear_last_words(server, (seen, other), str(tmp_path / "server.log")) == (seen, other)
        assert not any(is_gone(process) for process in (parent, *workers))


async def test_who_said_nothing_has_the_reason(serve, tmp_path):  # noqa: F811
    async with serve(argv=["/bin/sleep", "100"], env=TOLD) as server:
        stack = Stack(pid=server.pid, started=server.started, title="", threads=Unseen("not permitted"))
        (told,) = await hear_last_words(server, (stack,), str(tmp_path / "server.log"))
        assert told.threads == Unseen("not permitted; last words: nothing in it answers SIGABRT")
        assert server.exit is None


@pytest.mark.parametrize("python", [python for _, python in PYTHONS], ids=[name for name, _ in PYTHONS])
def test_the_dump_of_every_python_is_read_back(python, keep):  # noqa: F811
    process = subprocess.Popen(
        [python, str(DEADLOCK)], env=TOLD, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    keep(process)
    resource.prlimit(process.pid, resource.RLIMIT_CORE, (0, resource.prlimit(process.pid, resource.RLIMIT_CORE)[1]))
    assert process.stdout.readline() + process.stdout.readline()  # two threads print: perhaps into one another
    until_sync(lambda: all("futex" in task.joinpath("wchan").read_text() for task in tasks(process.pid)))
    process.send_signal(signal.SIGABRT)
    _, text = process.communicate(timeout=20)
    main, loader = parse_last_words(text)
    assert main.name == "MainThread"
    assert main.frames == (
        StackFrame(function="wait_for_the_lock", file=str(DEADLOCK), line=11),
        StackFrame(function="<module>", file=str(DEADLOCK), line=17),
    )
    assert [frame.function for frame in loader.frames] == ["wait_for_the_lock", "run", "_bootstrap_inner", "_bootstrap"]


def tasks(pid):
    return list(Path(f"/proc/{pid}/task").iterdir())


def test_a_dump_among_other_lines_is_found_and_a_broken_line_left_out():
    text = (
        'Thread 0x00000000000000ff (most recent call first):\n  File "before.py", line 1 in before\n'
        "INFO loadFatal Python error: Aborted\n\n"
        "Thread 0x00007f0000000001 (most recent call first):\n"
        '  File "a.py", line 3 in inner\n'
        "INFO ing weights\n"
        '  File "a.p\n'
        '  File "b.py", line ??? in outer\n'
        "\n"
        "Current thread 0x00007f0000000002 [worker] (most recent call first):\n"
        "  <no Python frame>\n"
        "\nExtension modules: torch._C (total: 1)\n"
        "Fatal Python error: Aborted\n\nCurrent thread 0x00007f0000000003 (most recent call first):\n"
    )
    assert parse_last_words(text) == (
        ThreadStack(name="MainThread", thread_id=0x7F0000000002, active=False, frames=()),
        ThreadStack(
            name="",
            thread_id=0x7F0000000001,
            active=False,
            frames=(
                StackFrame(function="inner", file="a.py", line=3),
                StackFrame(function="outer", file="b.py", line=0),
            ),
        ),
    )
    assert parse_last_words("INFO nothing here\n") == ()
    assert parse_last_words("") == ()
