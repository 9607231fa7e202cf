"""Who still waits for an answer: told by counters or by connections, never guessed, and unseen is never nobody."""

from dataclasses import replace

import pytest

from hangguard.facts import NOT_ASKED, Port, Sample, Serving, Unseen
from hangguard.judge.in_flight import SETTLED_FOR, InFlight, look_again

HIDDEN = Unseen("no permission")


def look(t, running=0, clients=0, *, waiting=0, at=None):
    """One sample; ``at`` is when the numbers came, at the time of the sample if it is not said."""
    counts = running if isinstance(running, Unseen) else Serving(running=running, waiting=waiting, at=at or t)
    return Sample(t=t, serving=counts, port=Port(port=1, listener=None, clients=clients))


def watch(*samples, worked_at=0.0):
    seen = InFlight()
    for sample in samples:
        seen = look_again(seen, sample, worked_at=worked_at)
    return seen


def test_zero_and_nobody_connected_is_over_at_the_second_look_and_not_at_the_first():
    assert not watch(look(1)).is_over
    seen = watch(look(1), look(1.2))
    assert (seen.left, seen.by, seen.is_over) == (0, "counters", True)


def test_the_same_answer_of_the_server_in_two_samples_is_one_look():
    assert not watch(look(1), look(1.2, at=1), look(1.4, at=1)).is_over
    assert watch(look(1), look(1.2, at=1), look(1.4)).is_over


def test_a_request_between_two_empty_looks_begins_the_count_anew():
    assert not watch(look(1), look(2, running=1), look(3)).is_over
    assert watch(look(1), look(2, running=1), look(3), look(4)).is_over


def test_those_who_queue_count_as_those_who_run():
    seen = watch(look(1, running=2, waiting=3), look(2, running=2, waiting=3))
    assert (seen.left, seen.is_over) == (5, False)


def test_an_open_connection_without_a_request_holds_it_for_a_moment_only():
    """A pool of idle connections is no request."""
    assert not watch(look(1, clients=4), look(1.5, clients=4)).is_over
    assert watch(look(1, clients=4), look(2, clients=4), look(1 + SETTLED_FOR, clients=4)).is_over


def test_zero_is_not_believed_while_somebody_is_connected_and_something_works():
    """The gauges of vLLM do not have a request in its first step: a long prefill."""
    looks = [look(t, clients=1) for t in range(10, 20)]
    seen = InFlight()
    for sample in looks:
        seen = look_again(seen, sample, worked_at=sample.t)
        assert not seen.is_over
    for t in (20.0, 21.0, 22.0, 23.0):
        seen = look_again(seen, look(t, clients=1), worked_at=19.0)
    assert seen.is_over


def test_it_may_work_for_itself_where_nobody_is_connected():
    assert watch(look(1), look(2), worked_at=2.0).is_over


@pytest.mark.parametrize("uncounted", [HIDDEN, None])
def test_without_counters_the_clients_tell(uncounted):
    seen = watch(look(1, uncounted, clients=2), look(2, uncounted, clients=2))
    assert (seen.left, seen.by, seen.is_over) == (2, "clients", False)
    assert not watch(look(1, uncounted, 2), look(2, uncounted, 0)).is_over
    gone = watch(look(1, uncounted, 2), look(2, uncounted, 0), look(3, uncounted, 0))
    assert (gone.left, gone.by, gone.is_over) == (0, "clients", True)


@pytest.mark.parametrize("clients", [HIDDEN, NOT_ASKED])
def test_what_nobody_can_see_is_never_over_and_says_why(clients):
    seen = watch(*(look(t, HIDDEN, clients) for t in range(1, 100)))
    assert not seen.is_over
    assert seen.by == ""
    assert isinstance(seen.left, Unseen)
    assert "no permission" in seen.left.reason


def test_a_port_that_cannot_be_seen_is_no_proof_that_nobody_is_connected():
    hidden = [replace(look(t, HIDDEN), port=Unseen("hidden")) for t in (1, 2, 3)]
    assert not watch(*hidden).is_over
    counted = [replace(look(t), port=Unseen("hidden")) for t in (1, 2, 3.5)]
    assert not watch(*counted[:2]).is_over
    assert watch(*counted).is_over


def test_counters_that_say_zero_from_before_they_were_lost_are_not_two_looks():
    assert not watch(look(1), look(2, HIDDEN, HIDDEN), look(3)).is_over
