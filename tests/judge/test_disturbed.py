"""Starts on worse days, and hours of serving: whatever is disturbed, what is healthy is never called stuck.

A few seeds of what ``nox -s scoreboard`` does by the hundred.
"""

import random
from itertools import takewhile

import pytest
from disturbing import a_day
from modelled import PIECES
from recorded import HEALTHY, HUNG
from served_hours import Server, a_stall, hours

ALARMS = {"stuck", "broken"}


@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_start_on_a_worse_day_is_never_stuck(name):
    for memory in a_day(name, "two").memories():
        assert memory.verdict.verdict not in ALARMS, (memory.now, memory.verdict)


@pytest.mark.parametrize("name", HUNG)
def test_a_hang_on_a_slower_machine_is_found_in_seconds(name):
    day = a_day(name, "slower", everything_seen=True)
    found = next(m for m in day.memories() if m.verdict.verdict == "stuck")
    assert 5.0 <= found.now - day.fault_at <= 20.0


@pytest.mark.parametrize("name", HUNG)
def test_nothing_is_stuck_before_its_fault(name):
    day = a_day(name, "two")
    before = [m.verdict.verdict for m in takewhile(lambda m: m.now < day.fault_at, day.memories())]
    assert before
    assert not ALARMS & set(before)


def test_hours_of_serving_bring_no_false_alarm():
    kinds = set()
    for seed in range(6, 12):
        server = Server(random.Random(seed))
        for memory in hours(server, 1500.0):
            kinds.add(server.piece.what)
            assert memory.verdict.verdict not in ALARMS, (server.piece, memory.now, memory.verdict)
        assert server.canaries_to_sleepers == 0
    assert kinds == {make(random.Random(0)).what for make in PIECES}, "not every kind of healthy stillness was there"


def test_the_same_seed_gives_the_same_day_and_another_seed_another():
    assert a_day("eager-plain-1", "one").samples == a_day("eager-plain-1", "one").samples
    assert a_day("eager-plain-1", "one").samples != a_day("eager-plain-1", "two").samples


@pytest.mark.parametrize("how", ["idle", "hot"])
def test_a_stall_of_a_server_whose_counters_are_read_is_found(how):
    servers = [Server(random.Random(seed)) for seed in range(20)]
    counted = [server for server in servers if server.metrics == "read" and server.gpus and not server.neighbour]
    for server in counted[:6]:
        seconds = a_stall(server, how)
        assert seconds is not None
        assert seconds <= 30.0, (server.engine, server.gpus)
