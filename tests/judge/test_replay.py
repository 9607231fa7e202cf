"""Recorded starts of real servers, replayed: healthy ones are never stuck, hung ones are found in seconds.

The replay is the worst case for a false alarm: stacks that always agree, in waits that nothing outside can end.
"""

import json
import re
from dataclasses import replace
from functools import lru_cache

import pytest
from making import first, seen, watch
from recorded import DATA, HEALTHY, HOT, HUNG, LOCK, NCCL, SYNC, mark, rules_of, timeline

from hangguard.facts import Sample, Stack, StackFrame, ThreadStack
from hangguard.judge import Memory


@lru_cache(maxsize=256)
def replayed(
    name: str, *, every: int = 1, stacks: bool = True, shift: float = 0.0, at: tuple[StackFrame, ...] = LOCK
) -> tuple[Memory, ...]:
    """Every memory of the worst case, after each sample, up to the moment when somebody stopped a member on purpose."""
    stopped = mark(name, "sigstop")
    samples = timeline(name, stacks=stacks, shift=shift, at=at)[::every]
    return tuple(watch((s for s in samples if stopped is None or s.t < stopped + shift - 0.5), rules_of(name)))


def test_every_recording_is_judged():
    # What hangguard recorded itself is judged in test_h200*.py, test_tp_recordings.py and test_vllm_ranks.py.
    own = ("h200", "tp2", "vllm-tp2")
    names = {f.name.removesuffix(".jsonl.gz") for f in DATA.glob("*.jsonl.gz") if not f.name.startswith(own)}
    others = {"slow-load-sleep60", "trace-store_wait"} | {f"trace-gpu-{e}-capture-deadlock" for e in ("vllm", "sglang")}
    others |= {"trace-idle_ready", "trace-serve_bursts", "trace-xid"}  # in test_trace_replays.py
    assert names == {*HEALTHY, *HUNG, *HOT, *others}
    assert len(HEALTHY) == 22


@pytest.mark.parametrize("every", [1, 2], ids=["as recorded", "half the rate"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_start_is_never_stuck(name, every):
    memories = replayed(name, every=every)
    assert seen(memories) <= {"moving", "ready"}
    assert max(m.idle_for for m in memories if m.ready_at is None) <= 2.0
    assert max((longest for _, longest in memories[-1].longest_still), default=0.0) <= 3.0
    if mark(name, "ready") is not None:
        assert memories[-1].verdict.verdict == "ready"


@pytest.mark.parametrize("name", [*HUNG, "slow-load-sleep60"])
def test_a_start_is_not_stuck_before_its_fault(name):
    fault = mark(name, "fault")
    before = [m for m in replayed(name) if m.now <= fault - 1.0]
    assert seen(before) == {"moving"}
    assert max(m.idle_for for m in before) <= 2.0


@pytest.mark.parametrize("every", [1, 2], ids=["as recorded", "half the rate"])
@pytest.mark.parametrize("name", HUNG)
def test_a_hang_is_found_in_seconds(name, every):
    memories = replayed(name, every=every)
    assert first(memories, "stuck").now - mark(name, "fault") <= 16.0
    assert memories[-1].verdict.verdict == "stuck"
    assert memories[-1].verdict.unseen == ()


@pytest.mark.parametrize("name", HUNG)
def test_without_stacks_only_the_long_patience_finds_it(name):
    memories = replayed(name, stacks=False)
    recorded_for = memories[-1].now - mark(name, "fault")
    stuck = first(memories, "stuck")
    if recorded_for >= 125.0:
        assert 120.0 <= stuck.now - mark(name, "fault") <= 125.0
    else:
        assert stuck is None
        assert memories[-1].verdict.verdict == "unclear"


def test_the_only_recording_longer_than_the_long_patience_is_known():
    long = [name for name in HUNG if timeline(name)[-1].t - mark(name, "fault") >= 125.0]
    assert long == ["hang-warmup-lock"]


@pytest.mark.long
@pytest.mark.parametrize("name", [*HUNG, *HEALTHY])
def test_a_shift_in_time_changes_nothing(name):
    here, there = (_classes(replayed(name, shift=s)) for s in (0.0, 1e6))
    assert here == there


def _classes(memories: tuple[Memory, ...]) -> list[str]:
    return [m.verdict.verdict for m in memories]


def test_a_loader_that_sleeps_for_a_minute_is_not_stuck():
    memories = watch(timeline("slow-load-sleep60", channel="hrtimer_nanosleep"), rules_of("vllm"))
    assert "stuck" not in seen(memories)
    assert "hrtimer_nanosleep" in memories[-1].verdict.why


def test_without_its_wait_channel_the_sleep_cannot_be_told_from_a_hang():
    # Why the wait channel must be seen: every other signal of this start is that of a deadlock.
    memories = watch(timeline("slow-load-sleep60"), rules_of("vllm"))
    assert "stuck" in seen(memories)


@pytest.mark.parametrize("name", HOT)
def test_a_busy_wait_in_a_place_that_nobody_knows_is_not_called_within_seconds(name):
    memories = replayed(name)
    assert "stuck" not in seen(memories)


@pytest.mark.parametrize("every", [1, 2], ids=["as recorded", "half the rate"])
@pytest.mark.parametrize("at", [NCCL, SYNC], ids=["in NCCL's init", "in a sync"])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_healthy_start_is_never_stuck_though_all_stacks_stand_in_a_known_hot_wait(name, at, every):
    memories = replayed(name, at=at, every=every)
    assert seen(m for m in memories if m.ready_at is None) == {"moving"}


def test_a_compile_of_21_s_on_a_gpu_is_moving_and_the_hot_wait_in_nccl_of_20_s_is_stuck():
    # In both nothing but CPU time moves (faults and log text were not recorded): the compilers' names part them, and
    # where the stacks stand.
    assert seen(m for m in replayed("trace-gpu-vllm-healthy", at=NCCL) if m.ready_at is None) == {"moving"}
    hung = replayed("trace-nccl_one_rank_barrier", at=NCCL)
    stuck = first(hung, "stuck")
    assert (stuck.verdict.kind, stuck.verdict.phase) == ("hot", "dist-init")
    assert 12.0 <= stuck.unproductive_for <= 14.0


def test_the_floor_of_the_recorded_board_is_learned():
    for name in ("gpu-vllm-cold", "trace-gpu-vllm-healthy", "trace-gpu-sglang-healthy", "trace-nccl_one_rank_barrier"):
        (board,) = replayed(name)[-1].boards.boards
        assert 118.0 <= board.floor <= 123.0


@pytest.mark.parametrize("name", ["trace-spin_kernel", "trace-spin_all_sms"])
def test_a_recorded_spinning_kernel_that_goes_on_is_stuck_once_the_floor_is_known(name):
    spin = [s for s in timeline(name, at=SYNC) if s.gpus[0].utilization_percent == 100.0 and s.tree.members]
    rest = [replace(spin[0], t=spin[0].t - 8.0 + n, gpus=(_drawing(spin[0].gpus[0], 0.0, 122.0),)) for n in range(8)]
    # The kernel never ended by itself: eight seconds of it were recorded, and go on here.
    longer = [*rest, *spin, *(replace(spin[-1], t=spin[-1].t + n) for n in range(1, 20))]
    stuck = first(watch(longer, rules_of("vllm")), "stuck")
    assert (stuck.verdict.kind, stuck.verdict.confidence) == ("busy", "high")
    assert stuck.unproductive_for <= 16.0


def _drawing(gpu, percent, watts):
    return replace(gpu, utilization_percent=percent, power_watts=watts)


def test_the_deadlock_of_the_gpu_trace_is_found_and_the_shorter_one_not_yet():
    stuck = first(watch(timeline("trace-gpu-vllm-capture-deadlock"), rules_of("vllm")), "stuck")
    assert stuck.idle_for <= 11.0
    short = watch(timeline("trace-gpu-sglang-capture-deadlock"), rules_of("sglang"))
    assert seen(short) == {"moving"}
    assert short[-1].idle_for >= 8.0


def test_a_rank_that_polls_the_store_is_stuck_in_dist_init_where_its_stack_says_so():
    at = (StackFrame(function="_create_c10d_store", file="torch/distributed/rendezvous.py", line=1),)
    samples = timeline("trace-store_wait", channel="hrtimer_nanosleep", at=at)[:40]
    stuck = first(watch(samples, rules_of("vllm")), "stuck")
    assert (stuck.verdict.kind, stuck.verdict.phase) == ("idle", "dist-init")


@pytest.mark.parametrize(("channel", "found"), [("futex_do_wait", True), ("hrtimer_nanosleep", False)])
def test_a_rank_that_polls_somewhere_needs_the_long_patience(channel, found):
    # The real channel was hrtimer_nanosleep: the store's client polls.
    samples = timeline("trace-store_wait", channel=channel)[:40]
    assert ("stuck" in seen(watch(samples, rules_of("vllm")))) is found


# ------------------------------------------------------------------------- with the stacks as recorded


@pytest.mark.parametrize(
    ("name", "suspect"),
    [("gpu-vllm-capture", "VLLM::EngineCore"), ("gpu-sglang-capture", "sglang::scheduler")],
)
def test_the_recorded_stacks_agree_and_place_the_hang_in_the_capture(name, suspect):
    stacks = recorded_stacks(name)
    samples = [replace(s, stacks=_stacks_at(s, stacks)) for s in timeline(name)]
    stuck = first(watch(samples, rules_of(name)), "stuck")
    assert stuck.now - mark(name, "fault") <= 16.0
    assert stuck.verdict.phase == "graph-capture"
    assert len(stuck.verdict.suspects) == 1
    assert str(stuck.verdict.suspects[0]).startswith(suspect)
    assert "capture" in str(stuck.verdict.suspects[0])


def recorded_stacks(name: str) -> list[dict[int, tuple[ThreadStack, ...]]]:
    dumps = json.loads((DATA / f"{name}.stacks.json").read_text())
    return [{int(who.split(" ")[0]): _threads(threads) for who, threads in d["members"].items()} for d in dumps]


def _threads(threads) -> tuple[ThreadStack, ...]:
    return tuple(
        ThreadStack(
            name=t["thread"], thread_id=n, active=t["active"], frames=tuple(_frame(text) for text in t["frames"])
        )
        for n, t in enumerate(threads)
    )


def _frame(text: str) -> StackFrame:
    function, file, line = re.fullmatch(r"(.*) \((.*):(\d+)\)", text).groups()
    return StackFrame(function=function, file=file, line=int(line))


def _stacks_at(sample: Sample, dumps) -> tuple[Stack, ...]:
    dump = dumps[round(sample.t) // 4 % len(dumps)]
    return tuple(
        Stack(
            pid=p.pid,
            started=p.started,
            title=p.title,
            threads=dump.get(p.pid, ()),
            wait_channel="futex_do_wait" if "::" in p.title else "poll_schedule_timeout",
        )
        for p in sample.tree.members
    )
