"""What members have in shared memory is asked for when it may have changed, and never of somebody else's server."""

from making import BUSY, Story, rules, watch

from hangguard.facts import Reply
from hangguard.judge import next_ask, start

GOOD = Reply(state="good", since=1000.0, status=200)


def asked(story, by=None):
    """After which samples files are asked for; 0: before the first."""
    memories = [start(by or rules()), *watch(story.samples, by)]
    return [number for number, memory in enumerate(memories) if next_ask(memory).files]


def test_at_the_beginning_and_at_each_new_phase_of_a_start_that_moves():
    story = Story().goes(10, **BUSY)
    story.goes(10, lines=("Loading weights took 3 s",), **BUSY)
    story.goes(10, lines=("Capturing graphs",), **BUSY)
    assert asked(story) == [0, 1, 11, 21]


def test_when_it_has_become_ready():
    story = Story().goes(5, **BUSY).goes(10, answer=GOOD, **BUSY)
    assert asked(story)[-1] == 6


def test_when_it_is_flat_and_no_more_often_than_stacks():
    story = Story().goes(5, **BUSY).goes(20)
    memories = watch(story.samples)
    flat = [memory for memory in memories if memory.idle_for >= 3]
    assert any(next_ask(memory).files for memory in flat)
    assert all(next_ask(memory).stacks for memory in flat if next_ask(memory).files)


def test_never_of_a_server_that_somebody_else_started():
    story = Story().goes(10, **BUSY).goes(30)
    assert asked(story, rules(attached=True)) == []
