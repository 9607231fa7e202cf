"""A drain over real servers and real clients: who streams gets every token, and nothing waits without an end."""

import os
import signal
import threading

import anyio
import pytest
from faces import is_gone, little, living_of_runs
from psutil import Process
from seen import until
from streams import ENDLESS, Client, streaming

from hangguard import Limits, supervise

QUICK = Limits(stop_grace=2.0)


def server(folder, *, engine=None, limits=QUICK, **options):
    """A little server, or one of which nothing is known but where it answers."""
    command = little(**{"token_seconds": 0.05, **options})
    if engine is None:
        return supervise(command, run_dir=folder / "runs", limits=limits)
    url = "http://127.0.0.1:{port}"
    return supervise(command, engine=engine, url=url, ready="/v1/models", run_dir=folder / "runs", limits=limits)


# ------------------------------------------------------------------------------------ finished, or cut off


@pytest.mark.anyio
@pytest.mark.parametrize("counted", [True, False], ids=["counted", "connected"])
async def test_a_stream_in_flight_is_finished_and_its_client_gets_every_token(tmp_path, counted):
    async with server(tmp_path, engine=None if counted else "generic") as running:
        client = streaming(running.url, 40)
        release = await running.stop(drain=60)
        assert release.answer == "released"
        assert (len(client.tokens), client.is_done, client.error) == (40, True, None)
        seen = running.attempt.drained
        assert (seen.left, seen.by, seen.ending) == (0, "counters" if counted else "clients", "done")
        assert running.returncode == 0
    assert not living_of_runs(tmp_path)


def test_the_blocking_face_waits_for_it_too(tmp_path):
    told = []
    supervision = server(tmp_path)
    with supervision as running:
        stream = running.events()
        client = streaming(running.url, 40)
        assert running.stop(drain=60).answer == "released"
        told = [event for event in stream if event.event in {"draining", "stopping", "released"}]
        assert (len(client.tokens), client.is_done) == (40, True)
    assert [event.event for event in told][-2:] == ["stopping", "released"]
    assert [event.left for event in told if event.event == "draining"][-1] == 0
    assert supervision.history[-1].drained.ending == "done"


@pytest.mark.anyio
async def test_a_request_that_never_ends_is_cut_off_when_the_seconds_are_over(tmp_path):
    async with server(tmp_path) as running:
        client = streaming(running.url, ENDLESS)
        assert (await running.stop(drain=6)).answer == "released"
        seen = running.attempt.drained
        assert (seen.left, seen.by, seen.ending) == (1, "counters", "time")
        assert seen.seconds == pytest.approx(6, abs=2)
        client.thread.join(10)
        assert not client.is_done
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
@pytest.mark.parametrize("engine", [None, "generic"])
async def test_nobody_in_flight_is_not_waited_for(tmp_path, engine):
    async with server(tmp_path, engine=engine) as running:
        assert (await running.stop(drain=100)).answer == "released"
        seen = running.attempt.drained
        assert (seen.left, seen.ending) == (0, "done")
        assert seen.seconds < 50


@pytest.mark.anyio
async def test_an_idle_connection_is_no_request_where_requests_are_counted_and_may_be_one_where_not(tmp_path):
    async with anyio.create_task_group() as group:

        async def one(engine, ending, name, seconds):
            async with server(tmp_path / name, engine=engine) as running:
                client = Client(running.url)
                await running.stop(drain=seconds)
                assert running.attempt.drained.ending == ending
                client.close()

        (tmp_path / "counted").mkdir()
        (tmp_path / "uncounted").mkdir()
        group.start_soon(one, None, "done", "counted", 60)
        group.start_soon(one, "generic", "time", "uncounted", 6)


# ------------------------------------------------------------------------------------------- what ends it


@pytest.mark.anyio
async def test_cancelling_the_body_ends_the_drain_and_not_the_proof(tmp_path):
    supervision = server(tmp_path)
    with anyio.CancelScope() as scope:
        async with supervision as running, anyio.create_task_group() as group:
            stream = running.events()
            streaming(running.url, ENDLESS)

            async def cancel_when_it_drains():
                async for event in stream:
                    if event.event == "draining" and event.left == 1:
                        scope.cancel()

            group.start_soon(cancel_when_it_drains)
            await running.stop(drain=1000)
    assert scope.cancelled_caught
    (attempt,) = supervision.history
    assert (attempt.drained.left, attempt.drained.ending) == (1, "cut")
    assert attempt.release.answer == "released"
    assert not living_of_runs(tmp_path)


@pytest.mark.anyio
async def test_leaving_the_block_ends_the_drain_of_another_task(tmp_path):
    supervision = server(tmp_path)
    async with anyio.create_task_group() as group:
        async with supervision as running:
            stream = running.events()
            streaming(running.url, ENDLESS)
            group.start_soon(lambda: running.stop(drain=1000))
            async for event in stream:
                if event.event == "draining" and event.left == 1:
                    break
    assert supervision.history[-1].drained.ending == "cut"
    assert not living_of_runs(tmp_path)


def test_of_two_threads_that_stop_it_the_one_in_a_hurry_decides_and_both_get_the_proof(tmp_path):
    with server(tmp_path) as running:
        stream, releases = running.events(), []
        streaming(running.url, ENDLESS)
        patient = threading.Thread(target=lambda: releases.append(running.stop(drain=1000)), daemon=True)
        patient.start()
        next(event for event in stream if event.event == "draining" and event.left == 1)
        releases.append(running.stop())
        patient.join(10)
        assert running.history[-1].drained.ending == "cut"
    assert [release.answer for release in releases] == ["released", "released"]
    assert releases[0] == releases[1]


@pytest.mark.anyio
async def test_a_server_that_is_killed_meanwhile_is_not_waited_for(tmp_path):
    async with server(tmp_path) as running:
        stream = running.events()
        streaming(running.url, ENDLESS)
        main = Process(running.pid)
        async with anyio.create_task_group() as group:
            group.start_soon(lambda: running.stop(drain=1000))
            async for event in stream:
                if event.event == "draining" and event.left == 1:
                    break
            main.kill()
        assert running.attempt.drained.ending == "exited"
        assert running.returncode == -signal.SIGKILL
        assert is_gone(main)
    assert not living_of_runs(tmp_path)


@pytest.mark.long
@pytest.mark.anyio
async def test_a_server_that_hangs_with_a_request_in_flight_is_not_waited_for(tmp_path):
    limits = Limits(stop_grace=1.0)
    async with server(tmp_path, tp=2, enable_metrics=True, shallow_health=True, limits=limits) as running:
        client = streaming(running.url, ENDLESS)
        workers = [p for p in Process(running.pid).children() if any("scheduler" in word for word in p.cmdline())]
        os.kill(workers[-1].pid, signal.SIGSTOP)
        await until(lambda: workers[-1].status() == "stopped")
        assert (await running.stop(drain=300)).answer == "released"
        seen = running.attempt.drained
        assert (seen.left, seen.ending) == (1, "hung")
        assert seen.seconds < 60
        assert running.history[-1].verdict.verdict == "stuck"
        assert not client.is_done
    assert not living_of_runs(tmp_path)


# --------------------------------------------------------------------------------------------- bad words


def test_what_is_no_number_of_seconds_is_refused_by_the_blocking_face_and_nothing_is_stopped(tmp_path):
    with server(tmp_path) as running:
        for seconds in (-0.1, float("nan"), float("inf"), False, "10"):
            with pytest.raises(ValueError, match=r"stop\(drain=\) must be a number of seconds"):
                running.stop(drain=seconds)
        assert running.poll() is None
        client = streaming(running.url, 3)
        client.thread.join(10)
        assert client.is_done
