"""A drain under a clock of its own: what ends it, and that something always does."""

from dataclasses import replace

import anyio
import pytest
from test_bring_up import play

from hangguard import Ask, Drained, Exited, Port, Ready, Serving, Stuck, Unseen
from hangguard.engines.sglang import SGLANG
from hangguard.testing.scripted import Script, ScriptedWatcher, plain_sample

ENDLESS = float("inf")
NOTHING = Ask()


def busy(until, *, frees=ENDLESS, counted=True):
    """Answers from the first second on; a request is in flight until an age, and its client is connected."""

    def look(age):
        running = int(age < until)
        clients = Port(port=8000, listener=None, clients=running)
        counts = Serving(running=running, waiting=0, generated_tokens=int(10 * min(age, frees)), at=age)
        sample = plain_sample(cpu_seconds=age, answer="good" if age >= 1.0 else "failed")
        return replace(sample, port=clients, serving=counts if counted else Unseen("switched off"))

    return look


def drained(played):
    return played.history[-1].drained


def stop(**how):
    async def body(server):
        played_at = anyio.current_time()
        release = await server.stop(**how)
        assert release.answer == "released"
        return played_at

    return body


@pytest.mark.parametrize("counted", [True, False])
def test_it_waits_for_the_last_request_and_then_stops_with_the_usual_grace(counted):
    played = play([Script(look=busy(300.0, counted=counted), stop_takes=5.0)], body=stop(drain=1000))
    assert played.error is None
    seen = drained(played)
    assert (seen.left, seen.by, seen.ending) == (0, "counters" if counted else "clients", "done")
    assert 297.0 <= seen.seconds <= 303.0
    assert played.world.guards[0].stops == [15.0]
    assert isinstance(played.history[-1].verdict, Ready)


def test_a_request_that_never_ends_is_cut_off_when_the_seconds_are_over():
    played = play([Script(look=busy(ENDLESS))], body=stop(drain=600))
    seen = drained(played)
    assert (seen.left, seen.by, seen.ending) == (1, "counters", "time")
    assert 600.0 <= seen.seconds <= 601.0


def test_nobody_in_flight_is_not_waited_for():
    played = play([Script(look=busy(0.0))], body=stop(drain=600))
    seen = drained(played)
    assert (seen.left, seen.ending) == (0, "done")
    assert seen.seconds < 1.0


def test_what_cannot_be_seen_is_waited_for_to_the_end_and_the_record_says_why():
    def look(age):
        hidden = Port(port=8000, listener=None, clients=Unseen("who is connected is hidden"))
        return replace(busy(0.0)(age), port=hidden, serving=Unseen("no counters are known"))

    played = play([Script(look=look)], body=stop(drain=50))
    seen = drained(played)
    assert (seen.by, seen.ending) == ("", "time")
    assert seen.left == Unseen("no counters are known; who is connected is hidden")
    assert 50.0 <= seen.seconds <= 51.0


def test_a_server_that_hangs_has_nothing_to_wait_for_and_is_stopped_as_asked():
    def look(age):
        sample = busy(ENDLESS, frees=20.0)(age)
        still = plain_sample(cpu_seconds=min(age, 20.0), frames=("acquire", "run_batch"))
        (worker,), (stack,) = still.tree.members, still.stacks
        named = replace(still.tree, members=(replace(worker, title="sglang::scheduler"),))
        return replace(sample, tree=named, stacks=(replace(stack, title="sglang::scheduler"),))

    played = play([Script(look=look)], body=stop(drain=3000), engine=SGLANG)
    assert played.error is None  # it was asked for, and is no failure
    seen = drained(played)
    assert (seen.left, seen.ending) == (1, "hung")
    assert 20.0 <= seen.seconds <= 60.0
    assert isinstance(played.history[-1].verdict, Stuck)
    assert played.history[-1].stopped_because == "asked"


def test_a_server_that_ends_has_nothing_to_wait_for():
    played = play([Script(look=busy(ENDLESS), exits=(100.0, 1))], body=stop(drain=3000))
    assert played.error is None
    assert drained(played).ending == "exited"
    assert drained(played).seconds < 110.0
    assert isinstance(played.history[-1].verdict, Exited)


@pytest.mark.parametrize("how", ["stop", "terminate", "kill"])
def test_a_stop_without_a_drain_ends_one_at_once(how):
    async def body(server):
        async with anyio.create_task_group() as group:
            group.start_soon(stop(drain=600), server)
            await anyio.sleep(50)
            if how == "stop":
                await server.stop()
            else:
                getattr(server, how)()

    played = play([Script(look=busy(ENDLESS), stop_takes=100.0)], body=body)
    seen = drained(played)
    assert (seen.left, seen.ending) == (1, "cut")
    assert 50.0 <= seen.seconds <= 51.0
    assert played.world.guards[0].stops == [0.0 if how == "kill" else 15.0]


def test_a_hurry_from_a_signal_handler_wakes_nobody_and_is_heard_all_the_same():
    async def body(server):
        async with anyio.create_task_group() as group:
            group.start_soon(stop(drain=600), server)
            await anyio.sleep(50.1)
            server._hurry()

    played = play([Script(look=busy(ENDLESS), stop_takes=100.0)], body=body)
    assert drained(played).ending == "cut"
    assert 50.0 <= drained(played).seconds <= 50.5
    assert played.world.guards[0].stops == [0.0]


def test_a_look_that_hangs_holds_up_neither_the_end_of_the_seconds_nor_a_second_stop(monkeypatch):
    take = ScriptedWatcher.take_sample

    async def slowly(self, ask=NOTHING):
        if ask.counters:
            await anyio.sleep(5.0)
        return await take(self, ask)

    monkeypatch.setattr(ScriptedWatcher, "take_sample", slowly)
    played = play([Script(look=busy(ENDLESS))], body=stop(drain=2))
    assert drained(played).ending == "time"
    assert drained(played).left == Unseen("it was not looked at")
    assert 2.0 <= drained(played).seconds <= 2.1

    async def body(server):
        async with anyio.create_task_group() as group:
            group.start_soon(stop(drain=600), server)
            await anyio.sleep(7.0)
            await server.stop()

    played = play([Script(look=busy(ENDLESS))], body=body)
    assert drained(played).ending == "cut"
    assert 7.0 <= drained(played).seconds <= 7.1


@pytest.mark.parametrize(("first", "second"), [(600, 20), (20, 600)])
def test_of_two_drains_the_shorter_one_holds(first, second):
    async def body(server):
        async with anyio.create_task_group() as group:
            group.start_soon(stop(drain=first), server)
            group.start_soon(stop(drain=second), server)

    played = play([Script(look=busy(ENDLESS))], body=body)
    assert drained(played).ending == "time"
    assert 20.0 <= drained(played).seconds <= 21.0


def test_a_drain_after_a_stop_was_asked_for_changes_nothing():
    async def body(server):
        server.terminate()
        await server.stop(drain=600)

    played = play([Script(look=busy(ENDLESS))], body=body)
    assert drained(played) is None
    assert played.ended_at - played.ready_at < 3.0


def test_cancelling_the_call_ends_the_drain_and_the_stop_goes_on():
    async def body(server):
        with anyio.move_on_after(30):
            await server.stop(drain=600)
        assert await server.wait(timeout=2) is not None

    played = play([Script(look=busy(ENDLESS))], body=body)
    assert played.error is None
    seen = drained(played)
    assert (seen.left, seen.ending) == (1, "cut")
    assert 30.0 <= seen.seconds <= 31.0


@pytest.mark.parametrize("seconds", [None, 0, 0.0])
def test_without_seconds_nothing_is_waited_for_and_the_record_says_so(seconds):
    played = play([Script(look=busy(ENDLESS))], body=stop(drain=seconds))
    assert drained(played) is None
    assert "draining" not in played.names()


def test_what_is_in_flight_is_told_whenever_it_changes_and_the_stop_says_how_it_ended():
    played = play([Script(look=busy(100.0))], body=stop(drain=600))
    told = [event for event in played.events if event.event == "draining"]
    assert [event.left for event in told] == [1, 0]
    assert [event.as_json()["by"] for event in told] == ["counters", "counters"]
    assert 599.0 <= told[0].at_most <= 600.0
    (stopping,) = [event for event in played.events if event.event == "stopping"]
    assert stopping.drained == drained(played)
    assert stopping.as_json()["drained"]["ending"] == "done"
    assert played.names().index("draining") < played.names().index("stopping")


@pytest.mark.parametrize("seconds", [-1, float("nan"), float("inf"), True, "10", (1,)])
def test_what_is_no_number_of_seconds_is_refused_and_the_server_serves_on(seconds):
    async def body(server):
        with pytest.raises(ValueError, match=r"stop\(drain=\) must be a number of seconds, zero or more and finite"):
            await server.stop(drain=seconds)
        await anyio.sleep(100)
        assert server.poll() is None

    played = play([Script(look=busy(ENDLESS))], body=body)
    assert played.error is None
    assert not isinstance(drained(played), Drained)
