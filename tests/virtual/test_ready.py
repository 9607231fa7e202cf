"""A ready server under a clock of its own: hangs while it serves, stillness that is wanted, what good starts teach."""

import math
from dataclasses import replace

import anyio
import pytest
import trio
import trio.testing

from hangguard import Limits, Ready, ServerLost, Serving, Stuck, Waiting
from hangguard.engines.generic import GENERIC
from hangguard.facts import IdlePlace, Port
from hangguard.testing.scripted import Script, ScriptedWorld, plain_sample, scripted_supervision

MIB = 1 << 20
HOUR = 3600.0
KNOWN = replace(
    GENERIC, name="known", workers=(r"server\.py",), idle_places=(IdlePlace(loop="wait_for_work", inside="recv"),)
)
"""An engine whose workers are known by their title."""
FOUND_WITHIN = 30.0


class Played:
    error = None

    def verdicts(self):
        return [event.verdict for event in self.events if event.event == "verdict"]


def play(scripts, *, body, learned=(), **options):
    """Play under an autojump clock; return what happened."""
    played = Played()

    async def main():
        began = trio.current_time()
        played.clock = lambda: trio.current_time() - began
        played.world = ScriptedWorld(scripts, played.clock, learned=learned)
        supervision = scripted_supervision(played.world, clock=played.clock, engine=KNOWN, **options)
        events = supervision._run.announcer.subscribe()
        try:
            async with supervision as server:
                await body(server)
        except Exception as error:
            played.error = error
        played.events = [event async for event in events]
        played.history = supervision.history

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return played


def serves(*, hangs_at=math.inf, frames=("acquire", "forward", "step")):
    """Ready at once; eight requests run from second 10 on, tokens come until it hangs."""

    def look(age):
        works = min(age, hangs_at)
        sample = plain_sample(cpu_seconds=works, minor_faults=int(works) * 500, answer="good", frames=frames)
        running = 8 if age >= 10.0 else 0
        tokens = int(max(0.0, works - 10.0)) * 400
        counted = Serving(running=running, waiting=0, generated_tokens=tokens, prompt_tokens=tokens, at=age)
        return replace(sample, serving=counted, port=Port(port=8000, listener=None, clients=running))

    return look


def test_a_hang_with_requests_in_flight_is_found_in_time_and_the_body_is_told():
    async def body(server):
        await anyio.sleep(HOUR)

    played = play([Script(look=serves(hangs_at=100.0))], body=body)
    assert isinstance(played.error, ServerLost)
    (attempt,) = played.history
    assert isinstance(attempt.verdict, Stuck)
    assert (attempt.verdict.kind, attempt.verdict.phase) == ("serving", "serving")
    assert attempt.was_ready
    assert attempt.settled_at - 100.0 <= FOUND_WITHIN
    assert attempt.diagnosis.findings
    assert "server.py" in str(played.error)


def test_a_report_of_the_hang_touches_nothing():
    async def body(server):
        await anyio.sleep(300.0)

    played = play([Script(look=serves(hangs_at=100.0))], body=body, on_hang="report")
    assert played.error is None
    assert any(isinstance(v, Stuck) and v.kind == "serving" for v in played.verdicts())
    assert played.world.guards[0].stops == [Limits().stop_grace]
    assert played.clock is not None


def test_a_server_that_serves_is_ready_all_the_time():
    async def body(server):
        await anyio.sleep(HOUR / 2)

    played = play([Script(look=serves())], body=body)
    assert played.error is None
    assert {type(v) for v in played.verdicts()[1:]} <= {Ready}


def test_wanted_stillness_is_no_hang_and_the_patience_begins_anew_after_it():
    async def body(server):
        await anyio.sleep(90.0)
        with server.quiet(at_most=HOUR):
            await anyio.sleep(600.0)
        await anyio.sleep(HOUR)

    played = play([Script(look=serves(hangs_at=100.0))], body=body)
    assert isinstance(played.error, ServerLost)
    assert any(isinstance(v, Waiting) and v.kind == "quiet" for v in played.verdicts())
    assert 690.0 < played.history[0].settled_at <= 690.0 + FOUND_WITHIN + 10.0


def test_stillness_is_wanted_no_longer_than_was_said():
    async def body(server):
        async with server.quiet(at_most=300.0):
            await anyio.sleep(HOUR)

    played = play([Script(look=serves(hangs_at=100.0))], body=body)
    assert isinstance(played.error, ServerLost)
    assert 300.0 < played.history[0].settled_at <= 300.0 + FOUND_WITHIN + 10.0


def test_the_longest_of_two_blocks_counts():
    async def body(server):
        with server.quiet(at_most=100.0), server.quiet(at_most=500.0):
            await anyio.sleep(HOUR)

    played = play([Script(look=serves(hangs_at=50.0))], body=body)
    assert 500.0 < played.history[0].settled_at <= 500.0 + FOUND_WITHIN + 10.0


@pytest.mark.parametrize("at_most", [0, -1.0, math.inf, math.nan, "600", None, True])
def test_a_quiet_time_must_be_a_bounded_one(at_most):
    async def body(server):
        with pytest.raises(ValueError, match="finite"):
            server.quiet(at_most=at_most)

    assert play([Script(look=serves())], body=body).error is None


def slow_then_ready(still):
    """Reads, stands still for a while (nothing can be proved: no stacks), reads again, is ready."""

    def look(age):
        moved = age if age < 20.0 else 20.0 if age < 20.0 + still else age - still
        return plain_sample(
            cpu_seconds=moved, read_bytes=int(moved) * 8 * MIB, answer="good" if moved >= 60.0 else "failed"
        )

    return look


def test_a_good_start_teaches_how_long_it_stood_still():
    async def body(server):
        await anyio.sleep(1.0)

    played = play([Script(look=slow_then_ready(6.0))], body=body)
    assert played.error is None
    (still,) = played.world.good_starts
    assert 4.0 <= dict(still)["import"] <= 8.0


def test_what_was_learned_lengthens_the_patience_and_a_hang_ends_all_the_same():
    async def body(server):
        await anyio.sleep(1.0)

    script = [Script(look=slow_then_ready(14.0))]
    hasty = play(script, body=body)
    assert isinstance(hasty.history[0].verdict, Stuck)
    patient = play(script, body=body, learned=(("import", 5.0),))
    assert patient.error is None
    hung = play([Script(look=slow_then_ready(math.inf))], body=body, learned=(("import", 5.0),))
    assert isinstance(hung.history[0].verdict, Stuck)
