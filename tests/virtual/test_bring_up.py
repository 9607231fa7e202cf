"""The story under a clock of its own: hours, in milliseconds. Nothing is started, everything else is real."""

from dataclasses import replace

import anyio
import pytest
import tenacity
import trio
import trio.testing

from hangguard import (
    Broken,
    Exited,
    Expired,
    Fallback,
    GaveUp,
    Launch,
    Limits,
    Listener,
    NotReadyInTime,
    Permanent,
    PortInUse,
    Ready,
    Retry,
    ServerLost,
    Stuck,
    Unseen,
)
from hangguard.testing.scripted import (
    Script,
    ScriptedWorld,
    held_by_ours,
    plain_sample,
    scripted_launch,
    scripted_supervision,
)

MIB = 1 << 20
HOUR = 3600.0


def play(scripts, *, body=None, **options):
    """Play under an autojump clock; return what happened: the error or None, the events, the world, the history."""
    played = Played()

    async def main():
        began = trio.current_time()
        played.clock = lambda: trio.current_time() - began
        played.world = ScriptedWorld(scripts, played.clock, listener=options.pop("listener", None))
        supervision = scripted_supervision(played.world, clock=played.clock, **options)
        events = supervision._run.announcer.subscribe()
        try:
            async with supervision as server:
                played.ready_at = played.clock()
                if body is not None:
                    await body(server)
        except Exception as error:
            played.error = error
        played.ended_at = played.clock()
        played.events = [event async for event in events]
        played.history = supervision.history

    trio.run(main, clock=trio.testing.MockClock(autojump_threshold=0))
    return played


class Played:
    error = None
    ready_at = None

    def names(self):
        return [event.event for event in self.events]

    def verdicts(self):
        return [event.verdict for event in self.events if event.event == "verdict"]


def deadlocks(age):
    """Moves for a minute, then stands for ever."""
    moved = min(age, 60.0)
    return plain_sample(cpu_seconds=moved, read_bytes=int(moved) * MIB)


def answers(age):
    return plain_sample(cpu_seconds=age, answer="good" if age >= 30.0 else "failed")


def moves_for_ever(age):
    return plain_sample(cpu_seconds=age, read_bytes=int(age) * MIB)


def spins(age):
    """Burns CPU and produces nothing."""
    return plain_sample(cpu_seconds=age, states="R")


def fallback(name, flag, *answers):
    def change(launch):
        return None if flag in launch.argv else scripted_launch(*launch.argv, flag)

    return Fallback(name=name, change=change, answers=answers, alters="speed", cost="slower")


# --------------------------------------------------------------------------------------------- a load


def test_a_slow_load_that_moves_every_9_s_is_ready_after_an_hour_and_was_never_stuck():
    def look(age):
        step = int(age // 9)
        ready = "good" if age >= HOUR - 60 else "failed"
        return plain_sample(cpu_seconds=step * 0.2, read_bytes=step * 8 * MIB, answer=ready)

    played = play([Script(look=look)], limits=Limits(ready_within=2 * HOUR))
    assert played.error is None
    assert HOUR - 60 <= played.ready_at <= HOUR - 57
    assert not any(isinstance(verdict, (Stuck, Expired)) for verdict in played.verdicts())
    assert played.history[-1].was_ready


def test_a_deadlock_is_found_within_15_s_of_the_last_movement_and_the_next_launch_has_one_change():
    played = play([Script(look=deadlocks), Script(look=answers)], fallbacks=[fallback("eager", "--eager", "import")])
    assert played.error is None
    first, second = played.history
    assert isinstance(first.verdict, Stuck)
    assert first.settled_at - first.last_movement_at <= 15.0
    assert [argv for _, argv in played.world.launches] == [("server",), ("server", "--eager")]
    assert second.fallbacks == ("eager",)
    assert isinstance(second.verdict, Ready)


def test_the_events_come_in_the_order_of_what_happens():
    played = play([Script(look=deadlocks), Script(look=answers)], fallbacks=[fallback("eager", "--eager", "import")])
    story = [name for name in played.names() if name not in {"verdict", "phase", "notice"}]
    attempt = ["launched", "stopping", "released"]
    assert story == [*attempt, "fallback", "launched", "ready", "stopping", "released", "ended"]
    times = [event.t for event in played.events]
    assert times == sorted(times)
    stuck = next(n for n, event in enumerate(played.events) if event.event == "verdict" and event.verdict.kind)
    assert played.names()[stuck + 1] == "stopping"


# ------------------------------------------------------------------------------------------- budgets


def test_ready_within_ends_a_launch_that_moves_for_ever():
    played = play([Script(look=moves_for_ever)], limits=Limits(ready_within=600.0))
    assert isinstance(played.error, NotReadyInTime)
    assert played.error.history[0].verdict.kind == "ready_within"
    assert 600.0 <= played.ended_at <= 605.0


def test_ready_within_is_over_all_attempts():
    played = play(
        [Script(look=deadlocks), Script(look=moves_for_ever)],
        fallbacks=[fallback("eager", "--eager", "import")],
        limits=Limits(ready_within=600.0),
    )
    assert isinstance(played.error, NotReadyInTime)
    assert len(played.history) == 2
    assert 600.0 <= played.ended_at <= 605.0


def test_ready_within_ends_a_hang_that_was_only_to_be_reported_and_names_it():
    played = play([Script(look=deadlocks)], on_hang="report", limits=Limits(ready_within=300.0))
    assert isinstance(played.error, NotReadyInTime)
    assert "not ready within 300 s; stuck (idle) in import had been said" in played.error.why
    assert played.error.diagnosis.advice[0].startswith("look at ")
    assert played.error.diagnosis.advice[-1].startswith("raise ready_within")


def test_a_relaunch_that_would_come_too_late_is_not_made_and_the_hang_is_named():
    wait = tenacity.wait_fixed(400.0)
    fallbacks = [fallback("eager", "--eager", "import")]
    limits = Limits(ready_within=300.0)
    played = play([Script(look=deadlocks)], fallbacks=fallbacks, limits=limits, retry=Retry(wait=wait))
    assert isinstance(played.error, NotReadyInTime)
    assert played.error.why.startswith(
        "not ready within 300 s; the last attempt: stuck (idle) in import: nothing moved"
    )


def test_the_deadline_bounds_the_looking_and_not_the_stopping():
    slow = Script(look=moves_for_ever, stop_takes=120.0)
    played = play([slow], limits=Limits(ready_within=100.0, stop_grace=90.0))
    assert isinstance(played.error, NotReadyInTime)
    assert played.history[0].release.answer == "released"
    assert 190.0 <= played.ended_at <= 195.0


def test_what_is_busy_in_one_place_is_a_hang_after_the_long_budget():
    played = play([Script(look=spins)])
    (attempt,) = played.error.history
    assert (attempt.verdict.verdict, attempt.verdict.kind) == ("stuck", "hot")
    assert 120.0 <= played.ended_at <= 135.0


def test_what_is_busy_without_a_product_and_without_stacks_has_the_budget_of_unclear():
    unseen = Script(look=lambda age: replace(spins(age), stacks=Unseen("py-spy is not installed")))
    played = play([unseen], limits=Limits(unclear=300.0))
    assert isinstance(played.error, GaveUp)
    verdict = played.error.history[0].verdict
    assert (verdict.verdict, verdict.kind) == ("expired", "unclear")
    assert 355.0 <= played.ended_at <= 370.0


def test_what_cannot_be_seen_is_never_stuck_and_has_an_end_too():
    hidden = Script(look=lambda _: plain_sample(tree=Unseen("hidepid")))
    played = play([hidden], limits=Limits(unclear=120.0))
    assert "hidepid" in str(played.error)
    assert not any(isinstance(verdict, Stuck) for verdict in played.verdicts())
    assert 120.0 <= played.ended_at <= 130.0


# ------------------------------------------------------------------------------------------- retries


def test_the_waits_of_the_retry_are_kept():
    retry = Retry(stop=tenacity.stop_after_attempt(4), wait=tenacity.wait_fixed(40))
    ladder = [fallback("one", "--one", "import"), fallback("two", "--two", "import")]
    played = play([Script(look=deadlocks)], fallbacks=ladder, retry=retry)
    assert isinstance(played.error, GaveUp)
    assert len(played.history) == 3  # nothing is left to try after the second change
    ends = [event.t for event in played.events if event.event == "released"]
    starts = [at for at, _ in played.world.launches]
    assert [start - end for start, end in zip(starts[1:], ends, strict=False)] == [40.0, 40.0]


@pytest.mark.parametrize(
    ("stop", "attempts"),
    [
        (tenacity.stop_after_attempt(1), 1),
        (tenacity.stop_after_attempt(2), 2),
        (tenacity.stop_after_delay(100), 2),  # an attempt takes some 71 s
        (tenacity.stop_after_delay(1000) | tenacity.stop_after_attempt(2), 2),
        (tenacity.stop_after_delay(100) & tenacity.stop_after_attempt(3), 3),
    ],
    ids=["one", "two", "delay", "any", "all"],
)
def test_the_stops_of_the_retry_are_kept(stop, attempts):
    ladder = [fallback(name, f"--{name}", "import") for name in ("one", "two", "three", "four")]
    retry = Retry(stop=stop, wait=tenacity.wait_none())
    played = play([Script(look=deadlocks)], fallbacks=ladder, retry=retry)
    assert isinstance(played.error, GaveUp)
    assert played.error.retryable
    assert len(played.history) == attempts


def test_a_restart_has_the_whole_budget_again():
    async def body(server):
        await anyio.sleep(700)
        await server.restart()

    retry = Retry(stop=tenacity.stop_after_attempt(2), wait=tenacity.wait_none())
    played = play(
        [Script(look=answers), Script(look=deadlocks), Script(look=answers)],
        body=body,
        retry=retry,
        limits=Limits(ready_within=600.0),
        fallbacks=[fallback("eager", "--eager", "import")],
    )
    assert played.error is None
    assert [type(attempt.verdict) for attempt in played.history] == [Ready, Stuck, Ready]


def test_what_is_permanent_is_not_tried_again():
    lines = ("error: unrecognized arguments: --nonsense",)
    script = Script(look=lambda age: plain_sample(lines=lines if age < 1.5 else ()), exits=(1.5, 2))
    played = play([script], fallbacks=[fallback("eager", "--eager", "import", "bad-flag")])
    assert isinstance(played.error, Permanent)
    assert not played.error.retryable
    assert len(played.history) == 1
    assert isinstance(played.history[0].verdict, Exited)
    assert played.history[0].verdict.kind == "bad-flag"


# ------------------------------------------------------------------------------------------- release


def test_what_ours_still_holds_blocks_the_relaunch_and_is_named():
    left = "pid 4711 (python worker.py), state D in nvidia_close"
    played = play(
        [Script(look=deadlocks, release=held_by_ours(left)), Script(look=answers)],
        fallbacks=[fallback("eager", "--eager", "import")],
    )
    assert isinstance(played.error, GaveUp)
    assert left in str(played.error)
    assert len(played.world.launches) == 1
    assert played.events[-1].left_behind == (f"processes: {left}",)


def test_a_lost_server_that_left_something_says_both():
    left = "pid 4711 (python worker.py), state D in nvidia_close"

    async def body(_server):
        await anyio.sleep_forever()

    played = play([Script(look=answers, exits=(500.0, 1), release=held_by_ours(left))], body=body)
    assert isinstance(played.error, ServerLost)
    assert "LEFT BEHIND: " in str(played.error)
    assert left in str(played.error)


def test_a_taken_port_is_refused_before_anything_starts():
    played = play([Script(look=answers)], listener=Listener(pid=4711, title="nginx", ours=False))
    assert isinstance(played.error, PortInUse)
    assert "4711 (nginx)" in str(played.error)
    assert played.world.launches == []


# ------------------------------------------------------------------------------------------- serving


def test_a_dead_guardian_is_told_once():
    async def body(server):
        await anyio.sleep(600)

    played = play([Script(look=answers, guardian_dies=100.0)], body=body)
    assert played.error is None
    notices = [event for event in played.events if event.event == "notice"]
    assert len(notices) == 1
    assert "guardian died" in notices[0].text
    assert 100.0 <= notices[0].t <= 102.0


def test_a_server_that_ends_while_it_serves_cancels_the_body():
    async def body(server):
        await anyio.sleep(HOUR)

    played = play([Script(look=answers, exits=(500.0, 1))], body=body)
    assert isinstance(played.error, ServerLost)
    assert 500.0 <= played.ended_at <= 502.0
    assert played.error.attempt.was_ready


def test_a_quiet_server_stays_ready_long_after_every_budget():
    def look(age):
        return plain_sample(cpu_seconds=min(age, 30.0), answer="good" if age >= 30.0 else "failed")

    async def body(server):
        await anyio.sleep(1000)
        assert isinstance(server.attempt.verdict, Ready)

    played = play([Script(look=look)], body=body, limits=Limits(ready_within=100.0, unclear=10.0, waiting=10.0))
    assert played.error is None


def test_on_hang_report_tells_and_touches_nothing():
    def look(age):  # an operator frees it after five minutes
        if age < 300:
            return deadlocks(age)
        return plain_sample(cpu_seconds=age, read_bytes=int(age) * MIB, answer="good")

    played = play([Script(look=look)], on_hang="report", limits=Limits(unclear=60.0))
    assert played.error is None
    assert [verdict.verdict for verdict in played.verdicts()].count("stuck") == 1
    assert len(played.world.launches) == 1
    assert played.ready_at >= 300.0


def test_without_a_grace_to_wait_for_hurry_ends_the_stop():
    async def body(server):
        async with anyio.create_task_group() as group:
            group.start_soon(server.stop)
            await anyio.sleep(5)
            server.kill()

    played = play([Script(look=answers, stop_takes=80.0)], body=body, limits=Limits(stop_grace=90.0))
    assert played.error is None
    assert played.ended_at - played.ready_at <= 6.0


# ------------------------------------------------------------------------------------------- asyncio


def test_the_same_story_on_asyncio_with_a_plain_variable_as_its_clock():
    now = [0.0]

    def look(age):
        now[0] += 20.0
        return answers(age)

    async def main():
        supervision = scripted_supervision([Script(look=look)], clock=lambda: now[0])
        async with supervision as server:
            assert isinstance(server.attempt.verdict, Ready)
            assert server.launch == Launch(
                argv=("server",), env=(), cwd="/", host="127.0.0.1", port=8000, url="http://127.0.0.1:8000"
            )
        return supervision.history

    history = anyio.run(main, backend="asyncio")
    assert [attempt.was_ready for attempt in history] == [True]
    assert not any(isinstance(attempt.verdict, Broken) for attempt in history)


def test_a_fault_of_our_own_while_ending_is_told_as_unknown_and_logged(monkeypatch, caplog):
    """Nothing was proved, and nothing says released: the fault is in the log, the release is unknown with its text."""

    async def broken(self, **_facts):
        raise RuntimeError("a bug")

    monkeypatch.setattr(ScriptedWorld, "_prove_release", broken)
    played = play([Script(look=answers)])
    assert played.error is None
    (release,) = [event.release for event in played.events if event.event == "released"]
    assert release.answer == "unknown"
    assert "RuntimeError: a bug" in release.items[0].detail
    assert "could not be ended as it should" in caplog.text


def test_a_fallback_of_the_callers_own_that_raises_is_told_once_and_the_next_one_is_tried():
    def change(launch):
        raise RuntimeError("no such file: /secret=hunter2")

    mine = Fallback(name="mine", change=change, answers=("import",), alters="speed", cost="")
    fallbacks = (mine, fallback("good", "--good", "import"))
    played = play([Script(look=deadlocks)] * 3, fallbacks=fallbacks, retry_hangs=True)
    notes = [event.text for event in played.events if event.event == "notice" and "failed" in event.text]
    assert len(notes) == 1
    assert notes[0].startswith("fallback 'mine' failed: RuntimeError: ")
    assert [attempt.fallbacks for attempt in played.history][1] == ("good",)
    assert isinstance(played.error, GaveUp)  # and not what the change raised
