"""What a front end reads and writes may be the answers to our own questions; what its workers read never is."""

from dataclasses import replace

import pytest
from making import API, BUSY, CORE, MARKERS, Story, first, rules, seen, watch

from hangguard.facts import Listener, Marker, Port, Reply

AN_ANSWER = 135_294
"""Bytes that SGLang 0.5.23 reads for one GET /metrics."""


def with_reads(samples, pid, *, listens=True):
    """From the sixth second on the front end listens, and this member reads so much in every second."""
    for n, sample in enumerate(samples):
        read = max(0, n - 5) * AN_ANSWER
        members = tuple(replace(p, read_chars=read if p.pid == pid else 0) for p in sample.tree.members)
        tree = replace(sample.tree, members=members, read_chars=sample.tree.read_chars + read)
        listener = Listener(pid=API.pid, title=API.title, ours=True) if listens and n > 5 else None
        yield replace(sample, tree=tree, port=Port(port=8000, listener=listener))


def a_hang():
    return Story().goes(5, **BUSY).goes(60)


def test_a_hang_behind_an_open_port_is_found_although_the_front_end_answers_us():
    """SGLang listens before its warm-up request, and its metrics are asked from then on."""
    stuck = first(watch(with_reads(a_hang().samples, API.pid)), "stuck")
    assert stuck is not None
    assert stuck.verdict.still_for < 15


@pytest.mark.parametrize(
    ("pid", "listens", "by"),
    [
        (CORE.pid, True, rules()),
        (API.pid, False, rules()),  # nobody can have asked it
        (API.pid, True, rules(workers=())),  # where the engine names no workers it may do the work itself
    ],
    ids=["a worker", "a front end without a port", "a server of one process"],
)
def test_bytes_that_are_no_answers_are_progress(pid, listens, by):
    memories = watch(with_reads(a_hang().samples, pid, listens=listens), by)
    assert "stuck" not in seen(memories)


def walking(samples, pid):
    """The main thread of this member stands in another function in every look."""
    for n, sample in enumerate(samples):
        yield replace(
            sample, stacks=tuple(at(stack, f"step_{n}") if stack.pid == pid else stack for stack in sample.stacks)
        )


def at(stack, function):
    (main, *others) = stack.threads
    frames = (replace(main.frames[0], function=function), *main.frames[1:])
    return replace(stack, threads=(replace(main, frames=frames), *others))


@pytest.mark.parametrize(("pid", "is_stuck"), [(API.pid, True), (CORE.pid, False)], ids=["front end", "worker"])
def test_a_front_end_that_answers_us_may_stand_anywhere(pid, is_stuck):
    samples = walking(with_reads(a_hang().samples, API.pid), pid)
    assert ("stuck" in seen(watch(samples))) is is_stuck


@pytest.mark.parametrize(("line", "is_ready"), [("fired up and ready to roll!", True), ("Capturing graphs", False)])
def test_a_server_of_somebody_else_is_past_its_start_where_its_log_says_so(line, is_ready):
    """The health route of a SGLang whose scheduler hangs is open for 20 s: nothing else says that it was ready."""
    story = Story().goes(30, lines=(line,), health=Reply(state="waiting", since=1000.0))
    by = rules(attached=True, markers=(*MARKERS, Marker(pattern="ready to roll", phase="serving")))
    assert (watch(with_reads(story.samples, API.pid), by)[-1].ready_at is not None) is is_ready
