"""Every recorded trace and timeline, replayed second by second as supervision would see it.

``test_replay.py`` holds the worst case for a false alarm: stacks that always agree. Here the same healthy recordings
run with stacks as such starts have them, and without any; the small GPU programs run too, and what was done to the real
engines at the end of their recordings. Of the hung ones phase and stacks are supplied, with the wait channels as
recorded where they were. A source that was not recorded is unseen, with that reason.
"""

import re
from dataclasses import replace
from functools import lru_cache

import pytest
from making import first, seen
from recorded import DATA, HEALTHY, HOT, HUNG, agreeing, lines_of, mark, timeline
from shaped import C10D, DEVICE, FRONT, GROUP, LOCK, STORE, by

from hangguard.facts import NOT_ASKED, GpuFault, Reply, Sample, Serving, Stack, StackFrame, ThreadStack, Unseen
from hangguard.judge import Memory, next_ask, start, step
from hangguard.judge.progress import COMPILERS

ALARMS = {"stuck", "broken"}
NOT_RECORDED = Unseen("not recorded")
PROGRAMS = ("trace-idle_ready", "trace-serve_bursts", "trace-xid")
CAPTURES = ("trace-gpu-vllm-capture-deadlock", "trace-gpu-sglang-capture-deadlock")


def engine_of(name: str) -> str:
    if name.startswith("trace-") and "gpu" not in name:
        return "generic"
    return "sglang" if "sgl" in name else "vllm"


def a_second_each(name: str) -> list[tuple[int, Sample]]:
    """One sample a second, each with its place in the recording, and what nobody recorded unseen."""
    samples = timeline(name)
    every = 2 if samples[2].t - samples[0].t < 1.5 else 1
    hidden = dict.fromkeys(("growth", "locks", "communicators", "serving", "canary"), NOT_RECORDED)
    return [(n, replace(s, **hidden)) for n, s in enumerate(samples)][::every]


def judge(name: str, samples, stacks_at) -> list[Memory]:
    """``stacks_at`` returns the stacks of one sample, if they are asked for."""
    memory, memories = start(by(engine_of(name))), []
    for n, sample in samples:
        asked = next_ask(memory).stacks
        memory = step(memory, replace(sample, stacks=stacks_at(n, sample) if asked else NOT_ASKED))
        memories.append(memory)
    return memories


# ----------------------------------------------------------------------------------- stacks as a start has them


def frame(place: str) -> StackFrame:
    function, _, file = place.partition(" ")
    return StackFrame(function=function, file=file or "engine.py", line=7)


BUSY_AT = ("forward torch/nn/modules/module.py", "copy_ torch/_ops.py", "load_weights model.py", "exec importlib.py")


def as_they_stand(name: str):
    """Workers at work move on from look to look; those that sleep wait for a lock that somebody will give back."""
    engine = engine_of(name)

    def at(n: int, sample: Sample) -> tuple[Stack, ...]:
        channels = _channels(name, n)
        return tuple(_stack(p, engine, n, sample.tree.members[0].pid, channels.get(p.pid)) for p in sample.tree.members)

    return at


def _stack(process, engine, n, root, channel) -> Stack:
    python = process.name not in COMPILERS and process.name != "sh"
    states = process.thread_states or process.state
    where = (
        (BUSY_AT[n // 3 % len(BUSY_AT)], "load_model engine.py")
        if "R" in states
        else ("wait threading.py", "load_model x")
    )
    if process.pid == root and engine != "generic":
        where = FRONT[engine]
    usual = {"R": "", "D": "folio_wait_bit_common"}.get(process.state, "futex_do_wait")
    main = ThreadStack(name="MainThread", thread_id=process.pid, active=False, frames=tuple(map(frame, where)))
    return Stack(
        pid=process.pid,
        started=process.started,
        title=process.title,
        threads=(main,) if python else Unseen("no Python in it"),
        is_python=python,
        wait_channel=usual if channel is None else channel,
    )


@lru_cache(maxsize=4096)
def _channels_of(name: str, n: int) -> tuple[tuple[int, str], ...]:
    procs = lines_of(name)[n].get("procs", ())
    return tuple(
        (p["pid"], "" if p["wchan"] in {"0", ""} else p["wchan"]) for p in procs if isinstance(p.get("wchan"), str)
    )


def _channels(name: str, n: int) -> dict[int, str]:
    """The wait channel of each main thread, where that was recorded."""
    return dict(_channels_of(name, n)) if name.startswith("trace-") else {}


def _no_stacks(_n: int, _sample: Sample) -> Unseen:
    return Unseen("py-spy is not installed")


def _always_agree(_n: int, sample: Sample) -> tuple[Stack, ...]:
    return agreeing(sample.tree, "futex_do_wait")


RECORDED_BY_HANGGUARD = ("h200", "tp2x", "vllm-tp2")
"""Judged by ``test_h200*.py``, ``test_tp_recordings.py`` and ``test_vllm_ranks.py``."""


def test_every_file_is_replayed_somewhere():
    found = (file.name.removesuffix(".jsonl.gz") for file in DATA.glob("*.jsonl.gz"))
    names = {name for name in found if not name.startswith(RECORDED_BY_HANGGUARD)}
    assert names == {*HEALTHY, *PROGRAMS, *HUNG, *HOT, *CAPTURES, "trace-store_wait", "slow-load-sleep60"}


# -------------------------------------------------------------------------------------------- healthy ones


@pytest.mark.parametrize("stacks", ["as they stand", "none"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_recording_is_at_no_second_a_hang(name, stacks):
    done = min((t for word in ("sigstop", "kill") if (t := mark(name, word)) is not None), default=float("inf"))
    samples = [(n, s) for n, s in a_second_each(name) if s.t < done - 0.5]
    memories = judge(name, samples, as_they_stand(name) if stacks == "as they stand" else _no_stacks)
    assert seen(memories) <= {"moving", "ready"}
    if mark(name, "ready") is not None:
        assert memories[-1].verdict.verdict == "ready"


@pytest.mark.parametrize("stacks", [_always_agree, _no_stacks], ids=["agree", "none"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_has_answered_is_at_no_second_a_hang(name, stacks):
    """It answers once it has loaded, and then sleeps, works in bursts, or sleeps over an Xid of its own."""
    samples = a_second_each(name)
    loaded = samples[0][1].t + 7.0
    fault = GpuFault(kind="xid", code=31, at=loaded, by_program=True)
    shown = []
    for n, s in samples:
        answered = Reply(state="good" if s.t >= loaded else "failed", since=loaded)
        faults = (fault,) if name == "trace-xid" and s.t >= loaded else ()
        shown.append((n, replace(s, answer=answered, gpus=tuple(replace(g, faults=faults) for g in s.gpus))))
    memories = judge(name, [(n, s) for n, s in shown if s.tree.members], stacks)
    assert seen(memories) == {"moving", "ready"}
    assert memories[-1].verdict.verdict == "ready"


def test_the_board_works_in_bursts_and_rests_between_them():
    memories = judge("trace-serve_bursts", a_second_each("trace-serve_bursts"), _no_stacks)
    watts = [b.watts for m in memories for b in m.boards.boards if b.watts is not None]
    assert max(watts) > 140.0
    assert not any(m.boards.at_floor for m in memories)


@pytest.mark.parametrize("stacks", ["as they stand", "none"])
def test_a_loader_that_sleeps_is_not_a_hang_within_the_long_patience(stacks):
    name = "slow-load-sleep60"
    at = as_they_stand(name)
    channel = {"as they stand": lambda n, s: tuple(replace(k, wait_channel="hrtimer_nanosleep") for k in at(n, s))}
    memories = judge(name, a_second_each(name), channel.get(stacks, _no_stacks))
    assert not ALARMS & seen(memories)
    assert memories[-1].verdict.verdict in {"unclear", "moving"}


# ------------------------------------------------------------------------------------------------ hung ones

PLACES = {
    "hang-init-absent": ((*STORE, "init_worker_distributed_environment x"), "dist-init"),
    "hang-load-event": (("wait threading.py", "load_model x"), "weights-load"),
    "hang-load-lock": ((*LOCK, "load_model x"), "weights-load"),
    "hang-load-lock-burn": ((*LOCK, "load_model x"), "weights-load"),
    "hang-sgl-graph-lock": ((*LOCK, "capture sglang/x.py"), "graph-capture"),
    "hang-warmup-lock": ((*LOCK, "compile_or_warm_up_model x"), "jit-compile"),
    "gpu-vllm-capture": ((*LOCK, "capture_model x"), "graph-capture"),
    "gpu-sglang-capture": ((*LOCK, "capture sglang/x.py"), "graph-capture"),
}


def stands(name: str, *places: str, channel: str | None = None):
    """Workers stand there, the front end in its own wait; channels as recorded, or this one."""
    healthy = as_they_stand(name)
    at = tuple(map(frame, places))

    def stacks(n: int, sample: Sample) -> tuple[Stack, ...]:
        root = sample.tree.members[0].pid if engine_of(name) != "generic" else 0
        workers = [s for s in healthy(n, sample) if s.pid != root]
        front = [s for s in healthy(n, sample) if s.pid == root]
        return (*front, *(_there(s, at, channel) for s in workers))

    return stacks


def _there(stack: Stack, at: tuple[StackFrame, ...], channel: str | None) -> Stack:
    if isinstance(stack.threads, Unseen):
        return stack
    threads = tuple(replace(t, frames=at) for t in stack.threads)
    return replace(stack, threads=threads, wait_channel=stack.wait_channel if channel is None else channel)


def test_every_timeline_of_a_hang_has_a_place():
    assert set(PLACES) == set(HUNG)


@pytest.mark.parametrize("name", HUNG)
def test_a_hung_timeline_is_stuck_as_soon_as_a_window_fits_and_not_before(name):
    places, phase = PLACES[name]
    fault, healthy, hung = mark(name, "fault"), as_they_stand(name), stands(name, *places, channel="futex_do_wait")
    memories = judge(name, a_second_each(name), lambda n, s: hung(n, s) if s.t >= fault else healthy(n, s))
    stuck = first(memories, "stuck")
    assert 9.5 <= stuck.now - fault <= 17.0
    assert stuck.now - stuck.last_movement_at <= 13.0
    assert (stuck.verdict.kind, stuck.verdict.phase, stuck.verdict.confidence) == ("idle", phase, "high")
    assert "::" in stuck.verdict.suspects[0].title
    assert seen(m for m in memories if m.now >= stuck.now) == {"stuck"}


@lru_cache(maxsize=8)
def longer(name: str, seconds: int) -> tuple[tuple[int, Sample], ...]:
    """A recording that ended too early goes on: its last undisturbed second is repeated, as nothing moved in it."""
    done = min(
        (t for word in ("pyspy", "sigstop", "sigkill") if (t := mark(name, word)) is not None), default=float("inf")
    )
    samples = [(n, s) for n, s in a_second_each(name) if s.t < done - 0.5 and s.tree.members]
    (n, last), (_, before) = samples[-1], samples[-2]
    used = {p.pid: p.cpu_seconds for p in before.tree.members}
    went_on = []
    for k in range(1, seconds + 1):
        members = tuple(
            replace(p, cpu_seconds=p.cpu_seconds + k * (p.cpu_seconds - used.get(p.pid, p.cpu_seconds)))
            for p in last.tree.members
        )
        went_on.append((n, replace(last, t=last.t + k * (last.t - before.t), tree=replace(last.tree, members=members))))
    return (*samples, *went_on)


SPIN = ("synchronize torch/cuda/__init__.py", "capture_model x")


@pytest.mark.parametrize(
    ("name", "places", "kind", "phase", "patience"),
    [
        ("trace-store_wait", (*STORE, "init x"), "idle", "dist-init", 13.0),
        ("trace-nccl_one_rank_barrier", (*GROUP, "init x"), "hot", "dist-init", 16.0),
        ("trace-nccl_one_rank_barrier", (f"barrier {C10D}", "init x"), "hot", "import", 16.0),
        ("trace-spin_kernel", SPIN, "hot|busy", "import", 20.0),
        ("trace-spin_all_sms", (*DEVICE, "x"), "hot|busy", "import", 20.0),
        ("trace-gpu-vllm-capture-deadlock", (*LOCK, "capture_model x"), "idle", "graph-capture", 13.0),
        ("trace-gpu-sglang-capture-deadlock", (*LOCK, "capture sglang/x.py"), "idle", "graph-capture", 13.0),
    ],
)
def test_a_hung_trace_is_stuck_as_soon_as_a_window_fits(name, places, kind, phase, patience):
    samples = longer(name, 25)
    if "spin" in name:
        samples = with_a_floor(samples)
    channel = "futex_do_wait" if name in CAPTURES else None
    memories = judge(name, samples, stands(name, *places, channel=channel))
    stuck = first(memories, "stuck")
    assert re.fullmatch(kind, stuck.verdict.kind)
    assert stuck.verdict.phase == phase
    assert stuck.now - stuck.progress_at <= patience


def with_a_floor(samples):
    """The program span from its first second on, before the floor of its board could be learned: it rested here."""
    spins = [(n, s) for n, s in samples if s.gpus and s.gpus[0].utilization_percent == 100.0]
    (n, one) = spins[0]
    rest = tuple(replace(g, utilization_percent=0.0, power_watts=122.0) for g in one.gpus)
    return (*((n, replace(one, t=one.t - 8.0 + k, gpus=rest)) for k in range(8)), *spins)


# --------------------------------------------------------------------------- what was done to real engines


def while_stopped(name):
    """Judge a recording until a member is killed; return when one was stopped, and what was said from then on."""
    stopped, killed = mark(name, "sigstop"), mark(name, "kill") or float("inf")
    samples = [(n, s) for n, s in a_second_each(name) if s.t < killed]
    return stopped, judge(name, samples, _no_stacks)


def test_a_worker_that_somebody_stopped_is_found_in_seconds_behind_a_front_end_that_answers():
    stopped, memories = while_stopped("trace-gpu-sglang-healthy")
    stuck = first(memories, "stuck")
    assert (stuck.verdict.kind, stuck.verdict.phase) == ("stopped", "serving")
    assert 10.0 <= stuck.now - stopped <= 12.0
    assert stuck.verdict.suspects[0].title == "sglang::scheduler"


def test_a_worker_that_was_stopped_for_seven_seconds_is_not_called_stuck():
    stopped, memories = while_stopped("trace-gpu-vllm-healthy")
    assert memories[-1].now - stopped == pytest.approx(6, abs=1)
    assert first(memories, "stuck") is None


def test_a_program_that_was_stopped_for_less_than_a_window_is_not_called_stopped():
    name = "trace-store_wait"
    memories = judge(name, a_second_each(name), stands(name, *STORE, "init x"))
    assert "stopped" not in {m.verdict.kind for m in memories}


def test_requests_that_the_recording_did_not_count_are_supplied_and_the_stop_is_then_a_stall_too():
    name = "trace-gpu-sglang-healthy"
    ready, load = mark(name, "ready"), mark(name, "load")
    samples = []
    for n, s in a_second_each(name):
        running = 8 if s.t >= load else 0
        samples.append(
            (n, replace(s, serving=Serving(running=running, waiting=0, generated_tokens=int(s.t < load), at=s.t)))
        )
    memories = judge(name, samples, _no_stacks)
    assert not ALARMS & seen(m for m in memories if m.now < mark(name, "sigstop"))
    assert ready < first(memories, "stuck").now
