"""The two faces, over real servers."""

import asyncio
import inspect
import json
import os
import pickle
import signal
import stat
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import anyio
import pytest
import tenacity
import trio
from faces import User, complete, fetch, little, living_of_runs, plain, takes_at_most
from seen import until, until_sync

import hangguard
from hangguard import (
    AsyncServer,
    CommandNotFound,
    Exited,
    Fallback,
    GaveUp,
    HangguardError,
    Limits,
    NotReadyInTime,
    Permanent,
    Ready,
    Retry,
    Server,
    ServerLost,
    Stuck,
    supervise,
)
from hangguard.changes import with_flag

KEY = "correct-horse-battery"


def pids_live(*pids):
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


# ------------------------------------------------------------------------------------ what it gives


def test_with_gives_a_server_that_has_answered(tmp_path):
    events = []
    with supervise(little(api_key=KEY), run_dir=tmp_path / "runs", hooks=[events.append]) as server:
        assert complete(server.url, KEY)
        assert (server.history, server.changes) == ((), ())
        assert server.attempt.number == 1
        assert isinstance(server.attempt.verdict, Ready)
        assert server.launch.engine == "sglang"
        assert (server.poll(), server.returncode) == (None, None)
        assert server.sample().answer.state == "good"
        stream = server.events()
        first = server.pid
        with pytest.raises(TimeoutError):
            server.wait(0.05)

        server.restart()
        assert server.pid != first
        assert complete(server.url, KEY)
        assert [attempt.was_ready for attempt in server.history] == [True]

        release = server.stop()
        assert release.answer == "released"
        assert server.wait() == server.returncode == server.poll() == 0
        assert server.stop() == release
        told = [event.event for event in stream]
        assert [name for name in told if name not in {"phase", "verdict"}] == [
            *("stopping", "released", "launched", "ready", "stopping", "released", "ended")
        ]
    assert server.returncode == 0
    assert len(server.history) == 2
    with pytest.raises(RuntimeError, match="block was left"):
        server.sample()
    assert [event.event for event in events][-len(told) :] == told
    assert not living_of_runs(tmp_path)
    assert_private(tmp_path, KEY)
    assert KEY not in "".join(json.dumps(event.as_json()) + repr(event) for event in events)


def assert_private(folder, key):
    """Everything that hangguard wrote: ours alone to read, and without the key. The log is the server's own."""
    (run,) = (folder / "runs").iterdir()
    assert stat.S_IMODE(run.stat().st_mode) == 0o700
    for file in run.iterdir():
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert file.name == "attempt-1.log" or key not in file.read_text(errors="replace")


@pytest.mark.anyio
async def test_async_with_gives_the_same(tmp_path):
    told = []

    async def follow(events):
        told.extend([event.event async for event in events])

    async with supervise(little(), run_dir=tmp_path / "runs") as server, anyio.create_task_group() as group:
        assert await anyio.to_thread.run_sync(complete, server.url)
        assert server.poll() is None
        assert (await server.sample()).answer.state == "good"
        group.start_soon(follow, server.events())
        first = server.pid
        await server.restart()
        assert server.pid != first
        with pytest.raises(TimeoutError):
            await server.wait(0.05)
        assert (await server.stop()).answer == "released"
        assert await server.wait() == 0
        with pytest.raises(RuntimeError, match="was stopped"):
            await server.restart()
    assert told[-1] == "ended"
    assert told.count("ready") == 1
    assert not living_of_runs(tmp_path)


def test_terminate_and_kill_do_not_wait_and_asking_is_no_loss(tmp_path):
    def end(how):
        with plain(tmp_path) as server:
            getattr(server, how)()
            assert server.wait(10) == -signal.SIGTERM
            assert server.history[-1].stopped_because == "asked"

    side_by_side(lambda: end("terminate"), lambda: end("kill"))


def test_both_faces_have_the_same_names_and_signatures():
    def face(kind):
        return {
            name: "property"
            if isinstance(member, property)
            else [(p.name, p.kind, p.default) for p in inspect.signature(member).parameters.values()]
            for name, member in vars(kind).items()
            if not name.startswith("_")
        }

    assert face(Server) == face(AsyncServer)
    assert {"url", "changes", "sample", "restart", "stop"} <= set(face(Server))
    for name, member in vars(AsyncServer).items():
        if not name.startswith("_"):
            assert (
                inspect.getdoc(getattr(Server, name))
                .splitlines()[0]
                .startswith(inspect.getdoc(member).splitlines()[0].split(", as an")[0])
            )


# ------------------------------------------------------------------------------------------- hangs


@pytest.fixture(scope="module")
def hangs(tmp_path_factory):
    """Four deadlocks at capture, side by side: what came of each."""
    eager = Fallback(
        name="mine", change=lambda launch: with_flag(launch, "--disable-cuda-graph"), answers=("graph-capture",),
        alters="speed", cost="slower",
    )  # fmt: skip
    asked = {
        "auto": {"fallbacks": "auto"},
        "none": {"fallbacks": None},
        "own": {"fallbacks": [eager]},
        "report": {"on_hang": "report"},
    }

    def play(name, options):
        folder = tmp_path_factory.mktemp(name)
        played = {"folder": folder, "events": [], "error": None}
        supervision = supervise(
            little(tp=2, deadlock_at_capture=True, api_key=KEY),
            limits=Limits(patience=5.0, stop_grace=2.0, ready_within=60.0),
            retry=Retry(wait=tenacity.wait_none()),
            run_dir=folder / "runs",
            hooks=[played["events"].append],
            **options,
        )
        if name == "report":
            anyio.run(watch, supervision, played)
            return played | {"history": supervision.history}
        try:
            with supervision as server:
                played["changes"] = server.changes
                played["answer"] = complete(server.url, KEY)
        except GaveUp as error:
            played["error"] = error
        return played | {"history": supervision.history}

    async def watch(supervision, played):
        """Go away three samples after the hang was told."""

        async def until_told(leave):
            await until(
                lambda: any(e.event == "verdict" and e.verdict.kind == "idle" for e in played["events"]), within=30
            )
            seen = supervision.now.samples[-1].t
            await until(lambda: supervision.now.samples[-1].t > seen + 2.0)
            played["lives"] = pids_live(supervision.now.guarded.pid)
            leave.cancel()

        async with anyio.create_task_group() as group:
            group.start_soon(until_told, group.cancel_scope)
            async with supervision:
                raise AssertionError("it cannot be ready")

    with ThreadPoolExecutor(len(asked)) as pool:
        futures = {name: pool.submit(play, name, options) for name, options in asked.items()}
        return {name: future.result() for name, future in futures.items()}


def test_a_deadlock_at_capture_is_cured_by_the_ladder_and_said(hangs):
    played = hangs["auto"]
    assert played["answer"]
    assert [(change.change, change.alters) for change in played["changes"]] != []
    assert all(change.alters == "speed" for change in played["changes"])
    first, second = played["history"]
    assert isinstance(first.verdict, Stuck)
    assert first.verdict.phase == "graph-capture"
    assert first.settled_at - first.last_movement_at <= 15.0
    assert first.release.answer == "released"
    assert second.fallbacks == tuple(change.name for change in played["changes"])
    (ready,) = [event for event in played["events"] if event.event == "ready"]
    assert ready.changes == played["changes"]
    assert not living_of_runs(played["folder"])


def test_without_fallbacks_it_gives_up_and_tells_the_whole_story(hangs):
    played = hangs["none"]
    error = played["error"]
    assert type(error) is GaveUp
    (attempt,) = error.history
    text = str(error)
    assert "graph-capture" in text
    assert f"nothing moved for {attempt.verdict.still_for:.0f} s" in text
    assert "ruled out: out of host memory" in text
    assert error.report_path in text
    evidence = Path(error.report_path)
    document = json.loads(evidence.read_text())
    frames = json.dumps([sample["stacks"] for sample in document["samples"]])
    assert "init_cuda_graphs" in frames
    assert document["attempt"]["verdict"]["verdict"] == "stuck"
    assert_private(played["folder"], KEY)
    everything = text + repr(error) + "".join(json.dumps(e.as_json()) + repr(e) for e in played["events"])
    assert KEY not in everything
    assert not living_of_runs(played["folder"])


def test_fallbacks_of_the_callers_own_are_tried_in_their_order(hangs):
    played = hangs["own"]
    assert played["answer"]
    assert [change.name for change in played["changes"]] == ["mine"]
    assert "--disable-cuda-graph" in played["history"][-1].launch.argv


def test_on_hang_report_tells_and_touches_nothing_until_it_is_left(hangs):
    played = hangs["report"]
    names = [event.event for event in played["events"]]
    (launched,) = [event for event in played["events"] if event.event == "launched"]
    (stuck,) = [event for event in played["events"] if event.event == "verdict" and event.verdict.kind == "idle"]
    assert isinstance(stuck.verdict, Stuck)
    assert played["lives"] == [launched.pid]
    (attempt,) = played["history"]
    stopping = next(event for event in played["events"] if event.event == "stopping")
    assert stopping.t - stuck.t >= 2.0
    assert names[-1] == "ended"
    assert attempt.release.answer == "released"


# ----------------------------------------------------------------------------------------- readiness


@pytest.mark.long
@pytest.mark.anyio
async def test_ready_is_a_path_or_a_callable_of_either_colour(tmp_path):
    asked = []

    def plainly(url):
        asked.append(threading.current_thread())
        return fetch(url) == 200

    async def softly(url):
        await anyio.sleep(0)
        asked.append(url)
        return True

    async def bring_up(ready):
        async with plain(tmp_path, ready=ready) as server:
            assert await anyio.to_thread.run_sync(fetch, server.url) == 200

    async with anyio.create_task_group() as group:
        for ready in ("/", plainly, softly):
            group.start_soon(bring_up, ready)
    assert len(asked) >= 2
    assert threading.main_thread() not in asked


def test_a_callable_that_raises_is_not_ready_and_the_reason_is_kept(tmp_path):
    def ready(url):
        raise LookupError("no such model yet")

    limits = Limits(ready_within=2.5)
    with pytest.raises(NotReadyInTime) as caught, plain(tmp_path, ready=ready, limits=limits):
        pass
    assert "no such model yet" in Path(caught.value.report_path).read_text()
    assert not living_of_runs(tmp_path)


# ---------------------------------------------------------------------------------------------- loss


@pytest.mark.anyio
async def test_a_lost_server_cancels_the_body_and_the_block_raises_it_bare(tmp_path):
    with pytest.raises(ServerLost) as caught:
        async with plain(tmp_path) as server:
            os.kill(server.pid, signal.SIGKILL)
            await anyio.sleep(60)
    assert isinstance(caught.value.attempt.verdict, Exited)
    assert caught.value.attempt.exit_code == -signal.SIGKILL
    assert "SIGKILL" in str(caught.value)


def test_blocking_the_next_call_raises_it_and_so_does_the_end_of_the_block(tmp_path):
    with pytest.raises(ServerLost) as at_the_end, plain(tmp_path) as server:
        os.kill(server.pid, signal.SIGKILL)
        until_sync(lambda: server.returncode is not None and server.history)
        with pytest.raises(ServerLost) as at_the_call:
            server.sample()
        assert server.wait() == -signal.SIGKILL
    assert at_the_end.value is at_the_call.value


def test_the_body_goes_before_the_loss_and_close_raises_it(tmp_path):
    def body_raises():
        with pytest.raises(ZeroDivisionError), plain(tmp_path) as server:
            os.kill(server.pid, signal.SIGKILL)
            until_sync(lambda: server.history)
            raise ZeroDivisionError

    def closed():
        supervision = plain(tmp_path)
        server = supervision.start()
        os.kill(server.pid, signal.SIGKILL)
        until_sync(lambda: server.history)
        with pytest.raises(ServerLost):
            supervision.close()
        supervision.close()

    before = threading.active_count()
    side_by_side(body_raises, closed)
    until_sync(lambda: threading.active_count() <= before)


def side_by_side(*bodies):
    with ThreadPoolExecutor(len(bodies)) as pool:
        for future in [pool.submit(body) for body in bodies]:
            future.result()


# --------------------------------------------------------------------------------- what the body does

RAISED = (ValueError("mine"), KeyboardInterrupt(), SystemExit(3))


def test_what_the_body_raises_arrives_as_it_is_when_blocking(tmp_path):
    def run(error):
        with pytest.raises(BaseException) as caught, plain(tmp_path):
            raise error
        assert caught.value is error

    side_by_side(*[lambda error=error: run(error) for error in RAISED])
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
async def test_what_the_body_raises_arrives_as_it_is(tmp_path):
    async def run(error):
        with pytest.raises(BaseException) as caught:
            async with plain(tmp_path):
                raise error
        assert caught.value is error

    async with anyio.create_task_group() as group:
        for error in RAISED:
            group.start_soon(run, error)
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
async def test_a_cancellation_from_outside_ends_in_its_own_scope_and_the_stop_is_complete(tmp_path):
    serving, starting = plain(tmp_path), supervise(
        little(faults=(("weights-load", "sleep:300"),)), run_dir=tmp_path / "runs"
    )  # fmt: skip

    async def while_serving():
        with anyio.CancelScope() as scope:
            async with serving:
                scope.cancel()
                await anyio.sleep(60)
        assert scope.cancelled_caught

    async def while_starting():
        with anyio.move_on_after(1.5) as scope:
            async with starting:
                raise AssertionError("it cannot be ready")
        assert scope.cancelled_caught

    with takes_at_most(10):
        async with anyio.create_task_group() as group:
            group.start_soon(while_serving)
            group.start_soon(while_starting)
    for supervision in (serving, starting):
        assert [attempt.release.answer for attempt in supervision.history] == ["released"]
    assert not living_of_runs(tmp_path)


def test_nested_reentered_from_other_threads_and_ended_from_one(tmp_path):
    outer = plain(tmp_path)
    server = outer.start()
    with pytest.raises(RuntimeError, match="entered before"):
        outer.start()
    with plain(tmp_path) as inner:
        assert fetch(server.url) == fetch(inner.url) == 200
        assert server.pid != inner.pid
        with ThreadPoolExecutor(8) as pool:
            samples = list(pool.map(lambda _: (server.sample().t, inner.poll()), range(80)))
    assert len(samples) == 80
    assert fetch(server.url) == 200  # the end of one is not the end of the other
    leaving = threading.Thread(target=outer.close)
    leaving.start()
    leaving.join(20)
    outer.close()
    assert outer.history[-1].release.answer == "released"
    with pytest.raises(RuntimeError, match="entered before"), outer:
        pass
    plain(tmp_path).close()  # never started
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
async def test_entering_twice_is_refused(tmp_path):
    supervision = plain(tmp_path)
    async with supervision:
        with pytest.raises(RuntimeError, match="entered before"):
            async with supervision:
                pass
        with pytest.raises(RuntimeError, match="entered before"), supervision:
            pass
    assert supervision.history[-1].release.answer == "released"


@pytest.mark.long
@pytest.mark.parametrize("run", [asyncio.run, trio.run], ids=["asyncio", "trio"])
def test_blocking_inside_a_running_loop(tmp_path, run):
    def use():
        with plain(tmp_path) as server:
            assert server.sample().answer.state == "good"
            return fetch(server.url)

    async def main():
        in_a_thread = asyncio.to_thread(use) if run is asyncio.run else trio.to_thread.run_sync(use)
        return await in_a_thread, use()

    assert run(main) == (200, 200) if run is trio.run else run(main()) == (200, 200)


@pytest.mark.long
def test_a_forked_child_may_not_touch_it_and_ends_nothing(tmp_path):
    user = User(tmp_path, mode="fork")
    try:
        serving = json.loads(user.said("serving"))
        outcome = json.loads(user.said("child"))
        assert len(outcome) == 8
        assert set(outcome.values()) == {"WrongProcess"}
        assert user.said("reaped") == "0"
        assert user.said("pid_after") == str(serving["pid"])
        assert user.ends(10) == {"raised": None, "released": "released"}
        assert [event["event"] for event in user.events()].count("stopping") == 1
    finally:
        user.close()


# -------------------------------------------------------------------------------------------- hooks


def test_a_raising_hook_loses_that_call_three_in_a_row_end_it_and_one_that_blocks_stops_nothing(tmp_path, caplog):
    often, always, behind, stuck = [], [], [], threading.Event()

    def sometimes(event):
        often.append(event)
        if len(often) % 2:
            raise LookupError

    def exits(event):
        always.append(event)
        sys.exit(1)

    def blocks(event):
        behind.append(event)
        if event.event == "ready":
            stuck.wait(30)

    try:
        with takes_at_most(20), plain(tmp_path, hooks=[sometimes, exits, blocks]) as server:
            until_sync(lambda: behind and behind[-1].event == "ready")
            assert server.sample().answer.state == "good"
        assert len(often) == len(behind) > 3
        assert len(always) == 3
        assert "is not called again" in caplog.text
        assert "has not come back" in caplog.text
        assert not living_of_runs(tmp_path)
    finally:
        stuck.set()


# --------------------------------------------------------------------------------- what is not retried


def test_what_is_permanent_is_not_retried_and_says_so(tmp_path):
    options = {"fallbacks": "any", "run_dir": tmp_path / "runs"}
    with pytest.raises(Permanent) as caught, supervise([*little(), "--nonsense"], **options):
        pass
    (attempt,) = caught.value.history
    assert attempt.exit_code == 2
    assert attempt.verdict.kind == "bad-flag"
    assert "unrecognized arguments: --nonsense" in str(caught.value)
    with pytest.raises(CommandNotFound):
        supervise(["no-such-server-anywhere", "--port", "1"], url="http://127.0.0.1:1")
    assert not living_of_runs(tmp_path)


def test_a_secret_that_the_server_repeats_stays_out_of_the_story(tmp_path):
    """It is in the line that names the reason."""
    code = "import sys; sys.exit('error: unrecognized arguments: ' + sys.argv[-1])"
    events = []
    command = [sys.executable, "-c", code, "--api-key", KEY]
    with pytest.raises(Permanent) as caught, plain(tmp_path, command, hooks=[events.append]):
        pass
    everything = str(caught.value) + repr(caught.value.history[0].verdict) + str(caught.value.history[0].log_tail)
    everything += "".join(repr(event) + json.dumps(event.as_json()) for event in events)
    assert "unrecognized arguments" in everything
    assert KEY not in everything
    assert KEY in Path(caught.value.history[0].log_path).read_text()
    assert_private(tmp_path, KEY)


def test_the_stop_of_the_retry_is_asked_of_real_attempts(tmp_path):
    more = Fallback(
        name="more", change=lambda launch: with_flag(launch, "--more"), answers=("crash",), alters="speed", cost="none"
    )
    command = [sys.executable, "-c", "import sys; sys.exit(3)"]

    def give_up(stop):
        retry = Retry(stop=stop, wait=tenacity.wait_none())
        with pytest.raises(GaveUp) as caught, plain(tmp_path, command, retry=retry, fallbacks=[more]):
            pass
        assert caught.value.retryable
        assert "no attempts left" in caught.value.why
        assert len(caught.value.history) == 1

    after_one, after_a_while = tenacity.stop_after_attempt(1), tenacity.stop_after_delay(0.01)
    both = tenacity.stop_after_delay(3600) | after_one
    side_by_side(*[lambda stop=stop: give_up(stop) for stop in (after_one, after_a_while, both)])


# ------------------------------------------------------------------------------------------ pickling


def every_error(attempt):
    release = attempt.release
    return [
        hangguard.BadLaunch("no port", advice="give one"),
        hangguard.Refused("no"),
        hangguard.CommandNotFound("/x", what="directory"),
        hangguard.CommandNotExecutable("/x", problem="no"),
        hangguard.PortInUse(8000, hangguard.Listener(pid=1, title="init", ours=False)),
        *[
            kind("why", (attempt,), diagnosis=attempt.diagnosis, report_path="/r", retryable=True)
            for kind in (GaveUp, Permanent, NotReadyInTime, hangguard.StoppedEarly)
        ],
        ServerLost(attempt),
        hangguard.LeftBehind(release),
        hangguard.NoSuchServer("none", ((7, "sglang"),), advice="start one"),
        hangguard.NoSuchRun("none", ("20260102-030405-abcdef",)),
        hangguard.RunOver("20260102-030405-abcdef", "stopped as asked", (7,)),
        hangguard.NoAnswer("20260102-030405-abcdef", 7, "it is stopped"),
        hangguard.GuardianFailed("no"),
        hangguard.WrongProcess(1, 2),
        HangguardError("plain"),
    ]


def kinds_of(kind):
    return {kind}.union(*map(kinds_of, kind.__subclasses__()))


def test_every_error_survives_pickling_with_its_fields_and_its_text(hangs):
    errors = every_error(hangs["none"]["history"][0])
    assert {type(error) for error in errors} == kinds_of(HangguardError)
    for error in [*errors, hangs["none"]["error"]]:
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is type(error)
        assert vars(again) == vars(error)
        assert (str(again), again.args) == (str(error), error.args)
        assert str(error)
