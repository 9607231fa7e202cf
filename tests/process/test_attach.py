"""``attach`` and ``hangguard attach``: the watch over a server that somebody else started, which is left alone."""

import inspect
import json
import os
import signal
import threading
from contextlib import ExitStack

import anyio
import pytest
from commands import hangguard, poll
from looked_at import little

from hangguard import (
    AsyncWatch,
    Attached,
    BadLaunch,
    BecameReady,
    Ended,
    Exited,
    Limits,
    NoSuchServer,
    Ready,
    Released,
    Stopping,
    Stuck,
    VerdictChanged,
    Watch,
    WrongProcess,
    attach,
)
from hangguard.observe.ports import free_port
from hangguard.observe.procfs import read_started

pytestmark = pytest.mark.anyio

HUNG = "Capture target decode CUDA graph begin"
READY = "ready to roll"
QUICK = Limits(patience=4.0, stop_grace=2.0)


@pytest.fixture
def server(tmp_path):
    with little(tmp_path / "server", tp=1) as made:
        yield made.says(READY)


@pytest.fixture
def hung(tmp_path):
    with little(tmp_path / "hung", deadlock_at_capture=True, ignore_term=True) as made:
        yield made.says(HUNG, times=2)


def named(events, kind):
    return [event for event in events if isinstance(event, kind)]


# -------------------------------------------------------------------------------------------- watching


async def test_a_healthy_server_is_ready_and_leaving_leaves_it_alone(server):
    before, told = server.states(), []
    async with attach(server.pid, hooks=[told.append]) as watch:
        assert (watch.pid, watch.started, watch.url) == (server.pid, server.started, server.url)
        stream = watch.events()
        with anyio.fail_after(20):
            while not isinstance(watch.verdict, Ready):
                await anyio.sleep(0.05)
        assert (await watch.sample()).tree.members[0].pid == server.pid
        assert watch.diagnosis.findings == ()
    assert {event.attempt async for event in stream} <= {1}  # ends with the watch
    assert server.process.poll() is None
    assert server.states() == before
    poll(lambda: named(told, BecameReady))
    assert [told[0].pid, told[0].started] == [server.pid, server.started]
    assert isinstance(told[0], Attached)
    assert not named(told, Stopping)


async def test_a_hang_is_told_and_nothing_is_touched(hung):
    before, told = hung.states(), []
    async with attach(hung.pid, limits=QUICK, hooks=[told.append]) as watch:
        with anyio.fail_after(40):
            while not isinstance(watch.verdict, Stuck):
                await anyio.sleep(0.05)
        assert watch.verdict.phase == "graph-capture"
        assert watch.diagnosis.findings
        await anyio.sleep(2)  # not waiting for anything: it goes on watching, and does nothing
        assert isinstance(watch.verdict, Stuck)
        assert watch.release is None
    assert hung.states() == before
    assert [event.verdict.verdict for event in named(told, VerdictChanged)][-1] == "stuck"
    assert not named(told, (Stopping, Released, Ended))


async def test_it_ends_when_the_server_ends(server):
    told = []
    async with attach(server.pid, hooks=[told.append]) as watch:
        with pytest.raises(TimeoutError):
            await watch.wait(0.1)
        os.kill(server.pid, signal.SIGTERM)
        server.process.wait(10)
        verdict = await watch.wait(20)
        assert isinstance(verdict, Exited)
    assert named(told, Ended)


async def test_what_the_body_raises_arrives_as_it_is(server):
    with pytest.raises(ZeroDivisionError):
        async with attach(server.pid):
            raise ZeroDivisionError
    assert server.process.poll() is None


async def test_it_is_entered_once(server):
    attachment = attach(server.pid)
    async with attachment:
        pass
    with pytest.raises(RuntimeError, match="entered before"):
        async with attachment:
            pass


def test_the_blocking_face(server):
    told = []
    with attach(url=server.url, hooks=[told.append]) as watch:
        assert watch.pid == server.pid
        assert watch.sample().tree.members[0].pid == server.pid
        stream = watch.events()
        ends = threading.Timer(1.0, lambda: os.kill(server.pid, signal.SIGTERM))
        ends.start()
        assert isinstance(watch.wait(30), Exited)
        ends.join()
        server.process.wait(10)
        assert [event.event for event in stream][-1] == "ended"  # ends with the watch
    with pytest.raises(RuntimeError, match="block was left"):
        watch.sample()


def test_a_forked_child_gets_a_clear_error(server):
    with attach(server.pid) as watch:
        out, into = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                watch.sample()
            except WrongProcess:
                os.write(into, b"wrong process")
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        assert os.read(out, 100) == b"wrong process"
        os.close(out)
        os.close(into)


def public_members(kind):
    return {name: member for name, member in inspect.getmembers(kind) if not name.startswith("_")}


def test_the_two_watches_have_the_same_names_and_signatures():
    blocking, asynchronous = public_members(Watch), public_members(AsyncWatch)
    assert blocking.keys() == asynchronous.keys()
    for name in blocking.keys() - {"events"}:
        of = [one.fget if isinstance(one, property) else one for one in (blocking[name], asynchronous[name])]
        assert inspect.signature(of[0]) == inspect.signature(of[1])


# ---------------------------------------------------------------------------------------------- acting


WITH_A_NEIGHBOUR = ("bash", "-c", '(sleep 600 & echo $! >neighbour.new; mv neighbour.new neighbour); exec "$@"', "bash")
"""In the server's session, process group and folder, with its log as output, and no descendant of it."""


async def test_acting_stops_exactly_the_members_and_no_bystander(tmp_path):
    """A twin with the same command line, and a neighbour in its session who writes to its log, live on."""
    with ExitStack() as both:
        port, options = free_port(), {"deadlock_at_capture": True, "ignore_term": True}
        hung = both.enter_context(little(tmp_path / "hung", port=port, inside=WITH_A_NEIGHBOUR, **options))
        twin = both.enter_context(little(tmp_path / "twin", port=port, **options))
        hung.says(HUNG, times=2)
        twin.says(HUNG, times=2)
        neighbour = int(poll(lambda: (hung.folder / "neighbour").read_text().strip()))
        assert os.getpgid(neighbour) == hung.pid
        members, told = hung.members(), []
        asked = attach(
            hung.pid, started=hung.started, on_hang="act", limits=QUICK, hooks=[told.append], run_dir=tmp_path / "runs"
        )
        async with asked as watch:
            verdict = await watch.wait(60)
            assert isinstance(verdict, Stuck)
        assert watch.release.left_behind == ()
        assert {item.resource: item.answer for item in watch.release.items}["processes"] == "released"
        assert hung.process.wait(10) == -signal.SIGKILL  # it ignores SIGTERM
        assert not [pid for pid in members[1:] if alive(pid)]
        assert alive(neighbour)
        assert twin.process.poll() is None
        assert len(twin.members()) == 4
    assert [event.event for event in told][-3:] == ["stopping", "released", "ended"]
    (evidence,) = (tmp_path / "runs").glob("*/attempt-1.evidence.json")
    assert json.loads(evidence.read_text())["attempt"]["verdict"]["verdict"] == "stuck"


def alive(pid):
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


async def test_a_pid_that_means_another_process_by_now_is_never_acted_on(server):
    for started in (server.started + 1, 0):
        with pytest.raises(NoSuchServer, match="another one now"):
            async with attach(server.pid, started=started, on_hang="act"):
                pass
    assert server.process.poll() is None


async def test_acting_needs_pid_start_time_and_the_word():
    with pytest.raises(BadLaunch, match="needs pid= and started="):
        attach(5, on_hang="act")
    with pytest.raises(BadLaunch, match="needs pid= and started="):
        attach(url="http://127.0.0.1:1", started=7, on_hang="act")
    with pytest.raises(BadLaunch, match="needs pid= and started="):
        attach(match="vllm", on_hang="act")
    with pytest.raises(BadLaunch, match="must be"):
        attach(5, on_hang="kill")
    for nothing in ({}, {"match": " "}, {"pid": 5, "match": "x"}):
        with pytest.raises(BadLaunch):
            attach(**nothing)


async def test_whoever_started_us_is_never_acted_on():
    parent = os.getppid()
    for pid in (os.getpid(), parent):
        with pytest.raises(BadLaunch, match="this program"):
            async with attach(pid, started=read_started(pid), on_hang="act"):
                pass


# --------------------------------------------------------------------------------------------- matching


async def test_a_match_must_be_exactly_one_process_tree(tmp_path):
    name = f"model-{os.getpid()}"
    with little(tmp_path / "one", tp=1, model_path=name) as one:
        one.says(READY)
        async with attach(match=name) as watch:  # its children have it in their command lines too
            assert watch.pid == one.pid
        with little(tmp_path / "two", tp=1, model_path=name) as two:
            two.says(READY)
            with pytest.raises(NoSuchServer) as several:
                async with attach(match=name):
                    pass
            assert {pid for pid, _ in several.value.candidates} == {one.pid, two.pid}
    with pytest.raises(NoSuchServer, match="0 process trees"):
        async with attach(match=f"{name}-nowhere"):
            pass


# ----------------------------------------------------------------------------------------- command line


def test_ctrl_c_stops_watching_and_leaves_the_server_alone(tmp_path, server):
    for number in (signal.SIGINT, signal.SIGTERM):
        with hangguard(tmp_path, "attach", server.pid, "--events", tmp_path / "events") as running:
            running.event("verdict")
            running.ask(number)
            assert running.wait() == 0
            assert "the server was left alone" in running.out
            assert running.named("attached")[0]["pid"] == server.pid
            assert running.named("stopping") == []
        assert server.process.poll() is None
        (tmp_path / "events").unlink()


def test_the_command_line_ends_with_the_server(tmp_path, server):
    with hangguard(tmp_path, "attach", server.url, "--events", tmp_path / "events") as running:
        running.event("ready")
        os.kill(server.pid, signal.SIGTERM)
        server.process.wait(10)
        assert running.wait(40) == 14
        assert "the server has ended by itself" in running.out


def test_the_command_line_acts_only_with_the_start_time(tmp_path, hung):
    with hangguard(tmp_path, "attach", hung.pid, "--on-hang", "act") as running:
        assert running.wait() == 2
        assert "--on-hang act needs PID and --started" in running.err
    words = ("attach", hung.pid, "--on-hang", "act", "--started", hung.started, "--events", "-")
    with hangguard(tmp_path, *words) as running:
        poll(lambda: hung.process.poll() is not None, 60)
        assert running.wait(60) == 20
        events = running.events(running.out)
        assert [event["event"] for event in events][-3:] == ["stopping", "released", "ended"]
        assert "was stopped" in running.err


@pytest.mark.parametrize(
    ("words", "code"),
    [((), 2), (("--match", "no such text anywhere in any command line"), 22), (("nonsense",), 2), (("999999999",), 22)],
)
def test_what_cannot_be_watched(tmp_path, words, code):
    with hangguard(tmp_path, "attach", *words) as running:
        assert running.wait() == code
        assert "Traceback" not in running.err
        assert running.out == ""


def test_what_could_be_meant_instead_is_said_one_a_line(tmp_path, server):
    with hangguard(tmp_path, "attach", "999999999") as running:
        assert running.wait() == 22
        assert running.out == ""
        first, *candidates = running.err.splitlines()
        assert first == "hangguard: Process 999999999 does not exist. [exit code 22]"
        assert [line for line in candidates if line.startswith(f"  pid {server.pid}: ")]
        assert all(line.startswith("  pid ") for line in candidates)
