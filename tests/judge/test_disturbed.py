"""Starts on worse days, and hours of serving: whatever is disturbed, what is healthy is never called stuck.

A few seeds of what ``nox -s scoreboard`` does by the hundred.
"""

import random

import pytest
from disturbing import HEALTHY, HUNG, a_day
from modelled import PIECES
from served_hours import Server, a_stall, hours

ALARMS = {"stuck", "broken"}


@pytest.mark.parametrize("seed", ["one", "two"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_start_on_a_worse_day_is_never_stuck(name, seed):
    for memory in a_day(name, seed).memories():
        assert memory.verdict.verdict not in ALARMS, (memory.now, memory.verdict)


@pytest.mark.parametrize("name", HUNG)
def test_a_hang_on_a_slower_machine_is_found_in_seconds(name):
    day = a_day(name, "slower", everything_seen=True)
    found = next(m for m in day.memories() if m.verdict.verdict == "stuck")
    assert 5.0 <= found.now - day.fault_at <= 20.0


@pytest.mark.parametrize("seed", ["one", "two"])
@pytest.mark.parametrize("name", HUNG)
def test_nothing_is_stuck_before_its_fault(name, seed):
    day = a_day(name, seed)
    before = [m for m in day.memories() if m.now < day.fault_at]
    assert before
    assert not ALARMS & {m.verdict.verdict for m in before}


@pytest.mark.parametrize("seed", range(8))
def test_an_hour_of_serving_brings_no_false_alarm(seed):
    server = Server(random.Random(seed))
    for memory in hours(server, 1800.0):
        assert memory.verdict.verdict not in ALARMS, (server.piece, memory.now, memory.verdict)
    assert server.canaries_to_sleepers == 0


def test_the_same_seed_gives_the_same_day_and_another_seed_another():
    assert a_day("eager-plain-1", "one").samples == a_day("eager-plain-1", "one").samples
    assert a_day("eager-plain-1", "one").samples != a_day("eager-plain-1", "two").samples


def test_the_hours_hold_every_kind_of_healthy_stillness():
    kinds = {make(random.Random(0)).what for make in PIECES}
    seen = set()
    for seed in range(8):
        server = Server(random.Random(seed))
        seen |= {server.piece.what for _ in hours(server, 1800.0)}
    assert seen == kinds


@pytest.mark.parametrize("how", ["idle", "hot"])
def test_a_stall_of_a_server_whose_counters_are_read_is_found(how):
    found = 0
    for seed in range(40):
        server = Server(random.Random(f"{how} {seed}"))
        if server.metrics == "read" and not server.neighbour:
            found += 1
            assert a_stall(server, how) is not None, (server.engine, server.gpus)
    assert found > 5
