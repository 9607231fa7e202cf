"""What must hold for every timeline, beyond ``test_properties.py``: sureness, gaps, serving, neighbours, attempts."""

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from making import BUSY, MIB, Story, first, gpu, rules, seen, watch
from recorded import HEALTHY, HUNG, agreeing, mark, rules_of, timeline
from shaped import FIRST, IDLE, LOCK, STEP, STREAM, Served, boards
from test_properties import CORE, KINDS, PLACES, told

from hangguard.facts import GpuHolder, Reply, Serving, Unseen
from hangguard.judge import next_ask, start, step
from hangguard.judge.progress import GAP, WINDOW

FEW = settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
HIDDEN = Unseen("hidden by the test")
SURE = {"": 0, "low": 1, "medium": 2, "high": 3}
ALARMS = {"stuck", "broken"}

stretches = st.lists(st.tuples(st.integers(1, 30), st.integers(0, len(KINDS) - 1)), min_size=1, max_size=5)
places = st.sampled_from(PLACES)


def sureness(memory) -> int:
    return SURE[memory.verdict.confidence] if memory.verdict.verdict in ALARMS else 0


# ---------------------------------------------------------------------------------------------- sureness


@FEW
@given(stretches, st.sampled_from(["stacks", "gpus", "log", "tree", "locks", "host"]), places)
def test_hiding_a_source_never_makes_it_surer(made, hidden, place):
    # The growth of folders is left out: no verdict needs it, and hiding it hides a sign of progress.
    plain = told([*made, (14, 0)], place).samples
    poorer = [replace(s, **{hidden: HIDDEN}) for s in plain]
    so_far = 0
    for before, after in zip(watch(plain), watch(poorer), strict=True):
        so_far = max(so_far, sureness(before))
        assert sureness(after) <= so_far
        assert after.verdict.verdict != "stuck" or hidden not in {"log", "tree"}


@FEW
@given(
    stretches,
    st.sampled_from([{"faults": 400.0}, {"reads": 2.0 * MIB}, {"disk": 2.0 * MIB}, {"gpu_memory": 64 * MIB},
                     {"rss": 8 * MIB}, {"writes": 2.0 * MIB}, {"download": 1.0 * MIB}, {"cache": 5000.0},
                     {"sockets": 2.0 * MIB}]),
    places,
)  # fmt: skip
def test_with_progress_by_any_one_source_it_is_never_a_hang(made, progress, place):
    story = Story(holders=(GpuHolder(pid=CORE.pid, used_bytes=None),)).goes(3, **BUSY).moves_to(CORE.pid, *place)
    for seconds, kind in made:
        rates = {k: v for k, v in KINDS[kind].items() if k not in {"hide", "lines"}}
        story.goes(seconds, **{**rates, **progress})
    assert not ALARMS & seen(watch(story.samples))


@FEW
@example([(23, 5)], PLACES[1], 8)
@given(stretches, places, st.integers(0, 80))
def test_a_second_that_was_not_watched_long_enough_is_no_stillness(made, place, at):
    """A hole longer than the watcher's own bound begins the stretch anew: a window is needed after it."""
    samples = told([*made, (20, 0)], place).samples
    hole = samples[at % len(samples)].t
    holed = [replace(s, t=s.t + GAP + 5.0) if s.t > hole else s for s in samples]
    after = [m for m in watch(holed) if hole < m.now <= hole + GAP + 5.0 + WINDOW]
    assert not [m for m in after if m.verdict.verdict == "stuck" and m.verdict.kind != "stopped"]


# ----------------------------------------------------------------------------------------- down-sampling


@pytest.mark.parametrize("name", [*HUNG, *HEALTHY])
def test_every_second_sample_of_a_recording_ends_in_the_same_verdict(name):
    samples = timeline(name)
    done = mark(name, "sigstop") or float("inf")
    samples = [s for s in samples if s.t < done - 0.5]
    ends = []
    for every in (1, 2):
        chosen = thinned(samples, every)
        ends.append(watch(chosen, rules_of(name))[-1].verdict)
    assert (ends[0].verdict, ends[0].kind, ends[0].phase) == (ends[1].verdict, ends[1].kind, ends[1].phase)


def thinned(samples, every):
    """Every so manieth sample, the last one among them; lines of the log are read later, and not lost."""
    kept, lines = [], ()
    for n, sample in enumerate(samples):
        lines = (*lines, *sample.log.lines)
        if (len(samples) - 1 - n) % every == 0:
            kept.append(replace(sample, log=replace(sample.log, lines=lines)))
            lines = ()
    return kept


# ------------------------------------------------------------------------------------------------ serving

MOMENTS = (
    {"running": 0, "at": IDLE["vllm"]},
    {"running": 3, "at": (*LOCK, *STEP["vllm"])},
    {"running": 3, "at": (*STREAM, *STEP["vllm"]), "percent": 100.0, "watts": 124.0, "cpu": 1.0},
    {"running": 3, "at": ("forward model.py", *STEP["vllm"]), "percent": 95.0, "watts": 400.0, "cpu": 1.0},
    {"running": 0, "clients": 4, "canary": "waiting", "at": (*LOCK, *STEP["vllm"])},
    {"running": 2, "counters": Unseen("no answer"), "at": (*LOCK, *STEP["vllm"])},
    {"running": 2, "stacks": Unseen("not permitted")},
)
hours = st.lists(st.tuples(st.integers(1, 40), st.integers(0, len(MOMENTS) - 1)), min_size=1, max_size=4)


def played(made, **more) -> Served:
    server = Served().flows(8)
    for seconds, n in made:
        server.goes(seconds, **{**MOMENTS[n], **more})
    return server


@FEW
@given(hours)
def test_while_tokens_come_it_is_never_a_hang(made):
    made = [(seconds, n) for seconds, n in made if "counters" not in MOMENTS[n]]
    assert not ALARMS & played(made, tokens=1).seen()


@FEW
@given(hours, st.integers(0, 120))
def test_more_tokens_never_make_it_a_hang_earlier(made, at):
    plain = played(made)
    when = plain.memories[at % len(plain.memories)].now
    memory, alarms = start(plain.by), []
    for before in plain.memories:
        sample = before.last
        if not isinstance(sample.serving, Unseen) and sample.t >= when:
            more = replace(sample.serving, generated_tokens=(sample.serving.generated_tokens or 0) + 50)
            sample = replace(sample, serving=more)
        memory = step(memory, sample)
        alarms.append(memory.verdict.verdict in ALARMS)
    for later, before in zip(alarms, plain.memories, strict=True):
        assert not later or before.verdict.verdict in ALARMS


@FEW
@given(hours, st.sampled_from(["asked for", "asleep"]))
def test_in_quiet_it_is_never_a_hang(made, how):
    quiet = {"quiet_until": 1e9} if how == "asked for" else {"asleep": True}
    made = [(seconds, n) for seconds, n in made if "counters" not in MOMENTS[n]]
    server = played(made, **quiet)
    assert not ALARMS & server.seen()


@FEW
@given(stretches, places)
def test_in_quiet_that_was_asked_for_a_start_is_never_a_hang(made, place):
    samples = [replace(s, quiet_until=s.t + 10.0) for s in told(made, place).samples]
    assert not ALARMS & seen(watch(samples))


@pytest.mark.parametrize("at", [IDLE["vllm"], (*LOCK, *STEP["vllm"]), (*STREAM, *STEP["vllm"])])
def test_a_server_whom_nobody_asks_is_never_a_hang_wherever_it_stands(at):
    assert Served().flows(5).goes(700, running=0, at=at, canary="good").seen() == {"ready"}


# --------------------------------------------------------------------------------------------- neighbours

STRANGER = GpuHolder(pid=4711, used_bytes=8 << 30)


@FEW
@given(st.lists(st.tuples(st.sampled_from([0.0, 40.0, 100.0]), st.floats(60.0, 600.0)), min_size=30, max_size=60))
def test_the_load_of_a_foreign_holder_is_neither_our_activity_nor_our_floor(levels):
    story = Story(holders=(GpuHolder(pid=CORE.pid, used_bytes=None),)).goes(
        8, **BUSY, gpu_memory=100 * MIB, watts=122.0
    )
    story.moves_to(CORE.pid, *PLACES[0])
    for percent, watts in levels:
        theirs = gpu(percent=percent, watts=watts, used=1 << 30, holders=(*story.holders, STRANGER))
        story.goes(1, gpus=(theirs,))
    memories = watch(story.samples)
    (board,) = memories[-1].boards.boards
    assert board.floor == 122.0
    assert board.working is None
    assert {m.activity_by for m in memories[9:]} <= {"CPU", ""}
    assert all(m.boards.is_busy is not True for m in memories[9:])
    assert memories[-1].idle_for >= len(levels) - 2
    assert not [m for m in memories if m.verdict.kind in {"busy", "hot"}]


@FEW
@given(st.lists(st.floats(60.0, 600.0), min_size=40, max_size=60), st.booleans())
def test_the_load_of_a_foreign_holder_is_no_work_of_our_server(watts, neighbour):
    """Its own board's figures count; a shared one's never prove that it works, and never that it spins."""
    server = Served().flows(8)
    for drawn in watts:
        (board,) = boards((97.0, drawn))
        holders = (*board.holders, STRANGER) if neighbour else (STRANGER,)
        server.goes(1, running=2, at=(*STREAM, *STEP["vllm"]), gpus=(replace(board, holders=holders),))
    assert not server.memory.boards.working
    assert not server.memory.boards.at_floor
    assert not ALARMS & server.seen()


# ----------------------------------------------------------------------------------------------- attempts


@FEW
@given(stretches, places)
def test_nothing_of_one_attempt_survives_into_the_next(made, place):
    by = rules()
    samples = told([*made, (20, 0)], place).samples
    one = watch(samples, by)
    assert start(by) == start(rules()), "what was judged leaves no trace"
    again = watch(samples, by)
    assert [m.verdict for m in one] == [m.verdict for m in again]
    assert next_ask(start(by)) == next_ask(start(rules()))


def test_an_attempt_after_a_hang_begins_with_a_clean_memory():
    hung = watch(Story().goes(5, **BUSY).goes(30).samples)
    assert first(hung, "stuck") is not None
    fresh = step(start(hung[-1].rules), Story(t=hung[-1].now + 5.0).goes(1).samples[0])
    assert fresh.verdict.verdict == "moving"
    assert (fresh.idle_for, fresh.unproductive_for, fresh.departed) == (0.0, 0.0, ())
    assert fresh.agreement.looks == (fresh.now,)
    assert fresh.boards.boards[0].floor is None
    assert (fresh.serving.counters, fresh.ready_at, fresh.trouble.faults) == (None, None, ())


def test_a_recording_judged_twice_says_the_same():
    name = "gpu-vllm-capture"
    one, two = (watch(timeline(name), rules_of(name)) for _ in range(2))
    assert [m.verdict for m in one] == [m.verdict for m in two]


def test_the_samples_of_a_property_are_what_they_say():
    server = played([(5, 1)])
    assert isinstance(server.memory.last.serving, Serving)
    assert isinstance(server.memory.last.answer, Reply)
    assert agreeing(server.memory.last.tree, "futex_do_wait")
    assert FIRST in {p.pid for p in server.memory.last.tree.members}
