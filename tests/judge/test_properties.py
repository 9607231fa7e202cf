"""What must hold for every timeline."""

from dataclasses import replace
from functools import reduce

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from making import BUSY, CORE, HIDDEN, MIB, Story, first, rules, seen, watch

from hangguard.facts import GpuHolder, Reply
from hangguard.judge import assess, start, step
from hangguard.judge.progress import WINDOW

settings.register_profile(
    "judge", max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("judge")

STILL: dict[str, object] = {}
KINDS: list[dict[str, object]] = [
    STILL,
    STILL,
    STILL,
    BUSY,
    {"cpu": 0.01},
    {"cpu": 1.0},
    {"faults": 60.0},
    {"reads": 1.0 * MIB},
    {"states": "DS"},
    {"states": "RS"},
    {"gpu_percent": 99.0},
    {"gpu_percent": 99.0, "watts": 300.0},
    {"cpu": 1.0, "states": "RS", "gpu_percent": 100.0},
    {"download": 1.0 * MIB},
    {"frozen": True},
    {"states": "T"},
    {"gpu_memory": 64 * MIB},
    {"lines": ("a new line",)},
    {"lines": ("Capturing graphs",)},
    {"hide": ("tree",)},
    {"hide": ("log",)},
    {"hide": ("gpus",)},
    {"hide": ("stacks",)},
    {"hide": ("thread_states",)},
]
stretches = st.lists(st.tuples(st.integers(1, 30), st.integers(0, len(KINDS) - 1)), min_size=1, max_size=6)


PLACES = (
    ("acquire lock.py", "capture_model runner.py"),
    ("_new_process_group_helper torch/distributed/distributed_c10d.py", "init_dist"),
    ("synchronize torch/cuda/__init__.py", "capture_model runner.py"),
    ("barrier torch/distributed/distributed_c10d.py", "load_model"),
)
places = st.sampled_from(PLACES)


def told(stretches, at=PLACES[0]) -> Story:
    story = Story(holders=(GpuHolder(pid=CORE.pid, used_bytes=None),)).goes(3, **BUSY).moves_to(CORE.pid, *at)
    for seconds, kind in stretches:
        story.goes(seconds, **KINDS[kind])
    return story


def stuck_at(memories) -> float:
    found = first(memories, "stuck")
    return float("inf") if found is None else found.now


@given(stretches, places)
def test_nothing_is_stuck_without_a_full_window_in_which_nothing_was_produced(made, place):
    for memory in watch(told(made, place).samples):
        if memory.verdict.verdict == "stuck":
            assert memory.unproductive_for >= WINDOW
            assert memory.verdict.still_for >= WINDOW
            assert memory.verdict.kind != "idle" or memory.idle_for >= WINDOW


@given(stretches, st.integers(0, 60), st.sampled_from([3, 6, 7]), places)
def test_more_progress_never_gives_stuck_earlier(made, at, kind, place):
    # But for one window: looks at busy threads from before the progress no longer count after it.
    plain = told([*made, (20, 0)], place)
    when = plain.samples[at % len(plain.samples)].t
    moved = [_with_news(s, KINDS[kind], when) for s in plain.samples]
    assert stuck_at(watch(moved)) >= stuck_at(watch(plain.samples)) - WINDOW
    assert not when < stuck_at(watch(moved)) < when + 10.0


def _with_news(sample, rates, when):
    """The sample with counters that have grown since ``when``."""
    tree = sample.tree
    if sample.t < when or tree == HIDDEN:
        return sample
    grown = replace(
        tree,
        minor_faults=tree.minor_faults + round(10 * rates.get("faults", 0)),
        read_chars=tree.read_chars + round(10 * rates.get("reads", 0)),
    )
    return replace(sample, tree=grown)


@given(stretches, st.sampled_from(["tree", "log", "thread_states", "stacks"]), st.integers(0, 60), places)
def test_hiding_what_is_needed_never_makes_the_verdict_surer(made, hidden, since, place):
    plain = told(made, place).samples
    poorer = [_without(s, hidden) if n >= since else s for n, s in enumerate(plain)]
    for before, after in zip(watch(plain), watch(poorer), strict=True):
        if after.verdict.verdict == "stuck":
            assert before.verdict.verdict == "stuck"


@given(stretches, st.sampled_from(["gpus", "stacks"]))
def test_hiding_stacks_or_gpus_leaves_only_the_long_patience(made, hidden):
    for memory in watch([_without(s, hidden) for s in told(made).goes(30).samples]):
        if memory.verdict.verdict == "stuck" and memory.verdict.kind != "stopped":
            assert memory.idle_for >= 120.0


def _without(sample, source):
    if source != "thread_states":
        return replace(sample, **{source: HIDDEN})
    if sample.tree == HIDDEN:
        return sample
    members = tuple(replace(p, thread_states=None) for p in sample.tree.members)
    return replace(sample, tree=replace(sample.tree, members=members))


@given(stretches, st.integers(-(2**20), 2**20))
def test_a_shift_in_time_changes_nothing(made, by):
    plain = told(made).samples
    shifted = [replace(s, t=s.t + by) for s in plain]
    for a, b in zip(watch(plain), watch(shifted), strict=True):
        assert replace(a.verdict, since=0.0) == replace(b.verdict, since=0.0)
        assert a.verdict.since + by == b.verdict.since


@pytest.mark.long
@given(stretches, places)
def test_half_the_rate_of_samples_ends_in_the_same_verdict(made, place):
    samples = told([*made, (60, 0)], place).samples
    ends = [(m.verdict.verdict, m.verdict.kind) for m in (watch(samples)[-1], watch(samples[::-1][::2][::-1])[-1])]
    assert ends[0] == ends[1]


@given(stretches, places)
def test_step_by_step_is_assess(made, place):
    samples = told(made, place).samples
    assert reduce(step, samples, start(rules())).verdict == assess(samples, rules())


@given(stretches, st.integers(0, 60))
def test_once_ready_it_is_never_stuck(made, at):
    samples = told(made).samples
    at %= len(samples)
    answered = [replace(s, answer=Reply(state="good", since=s.t)) if n >= at else s for n, s in enumerate(samples)]
    assert seen(watch(answered)[at:]) <= {"ready", "waiting"}, "a frozen control group is waited for"
