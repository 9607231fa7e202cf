"""The pair: twenty seconds in which only CPU moves, once of a healthy compile and once of a hang, both as recorded.

A cold vLLM start on an H200 waits for ``ptxas`` (``trace-gpu-vllm-healthy``), and rank 0 of 2 waits for its peer in the
making of NCCL's communicator (``trace-nccl_one_rank_barrier``). Log, bytes, births and GPU memory stand still in both,
over the same length; minor faults, log text and stacks were not recorded. Patience cannot part them: it would be too
long for the one or too short for the other. Names of children and stacks do.
"""

from dataclasses import replace
from functools import lru_cache

import pytest
from making import seen, watch
from recorded import NCCL, agreeing, timeline
from shaped import FRONT, by

from hangguard.facts import NOT_ASKED, Sample, Stack, StackFrame, ThreadStack, Unseen
from hangguard.judge import Memory, next_ask, start, step

COMPILE, HANG = "trace-gpu-vllm-healthy", "trace-nccl_one_rank_barrier"
UNTIL = {COMPILE: 180.0, HANG: 24.9}
"""Seconds up to which nobody disturbed the recording: it was ready, or py-spy held it."""
WAITS_FOR_NVCC = (
    StackFrame(function="communicate", file="subprocess.py", line=1),
    StackFrame(function="run_ninja", file="flashinfer/jit/cpp_ext.py", line=1),
    StackFrame(function="kernel_warmup", file="vllm/model_executor/warmup/kernel_warmup.py", line=1),
)


@lru_cache(maxsize=2)
def recorded(name: str) -> tuple[Sample, ...]:
    """The recording, by the sources with which the pair was found: resident memory is left out."""
    samples = timeline(name)
    return tuple(
        replace(s, tree=replace(s.tree, members=tuple(replace(p, rss_bytes=0) for p in s.tree.members)))
        for s in samples
        if s.t - samples[0].t < UNTIL[name]
    )


def nameless(sample: Sample) -> Sample:
    """Without what parts the two: the names of the children, and the stacks."""
    members = tuple(replace(p, name="python3", title="python3") for p in sample.tree.members)
    return replace(sample, tree=replace(sample.tree, members=members), stacks=Unseen("not recorded"))


@lru_cache(maxsize=2)
def picture(name: str) -> tuple[Memory, ...]:
    """What is seen of the longest stretch without product when nothing tells the two apart."""
    memories = watch(map(nameless, recorded(name)), by("generic"))
    last = max(memories, key=lambda m: m.unproductive_for)
    return tuple(m for m in memories if last.progress_at < m.now <= last.now)


def length() -> float:
    return min(picture(name)[-1].unproductive_for for name in (COMPILE, HANG))


def stretch(name: str) -> tuple[float, float]:
    """From the last product on, as long as both are."""
    begin = picture(name)[0].progress_at
    return begin, begin + length()


def stacks_of(name: str, sample: Sample) -> tuple[Stack, ...]:
    """Where they stand: the engine waits for its compilers, the rank for its peer; a compiler has no Python."""
    at, channel = (NCCL, "") if name == HANG else (WAITS_FOR_NVCC, "do_wait")
    front = tuple(StackFrame(function=f.split()[0], file=f.split()[1], line=1) for f in FRONT["vllm"])
    members = {p.pid: p for p in sample.tree.members}
    front_end = (ThreadStack(name="MainThread", thread_id=1, active=False, frames=front),)
    found = []
    for stack in agreeing(sample.tree, channel, at):
        process = members[stack.pid]
        if name == HANG or "EngineCore" in process.title:
            found.append(stack)
            continue
        python = process.name == "python3"
        threads = front_end if python else Unseen("no Python in it")
        found.append(replace(stack, is_python=python, threads=threads, wait_channel="poll_schedule_timeout"))
    return tuple(found)


def judged(name: str, *, of: str | None = None, plain: bool = False) -> list[Memory]:
    """Judge the stretch with names, and with the stacks of one of the two."""
    begin, end = stretch(name)
    memory, memories = start(by("vllm" if name == COMPILE else "generic")), []
    for sample in recorded(name):
        if sample.t > end:
            break
        stacks = agreeing(sample.tree, "", NCCL) if plain else stacks_of(of or name, sample)
        shown = replace(nameless(sample) if plain else sample, stacks=stacks)
        memory = step(memory, shown if next_ask(memory).stacks else replace(shown, stacks=NOT_ASKED))
        memories.append(memory)
    return [m for m in memories if begin < m.now]


def test_the_pair_of_twenty_seconds_has_one_picture_and_opposite_verdicts():
    for name in (COMPILE, HANG):
        last = max((m for m in picture(name) if m.now <= stretch(name)[1]), key=lambda m: m.now)
        assert last.unproductive_for >= 18.5
        assert (last.verdict.verdict, last.activity_by) == ("moving", "CPU")
        assert last.idle_for <= 1.0
    healthy, hung = judged(COMPILE), judged(HANG)
    assert seen(healthy) == {"moving"}
    assert "compiler process" in healthy[-1].verdict.why
    verdict = hung[-1].verdict
    assert (verdict.verdict, verdict.kind, verdict.phase, verdict.confidence) == ("stuck", "hot", "dist-init", "high")
    assert verdict.suspects[0].at[0].startswith("_new_process_group_helper")


@pytest.mark.parametrize("name", [COMPILE, HANG])
def test_without_names_and_stacks_neither_is_called_within_that_time(name):
    assert seen(picture(name)) == {"moving"}


def test_it_is_the_names_and_the_stacks_that_part_them():
    # The healthy stretch told without the compilers' names, and with everybody in NCCL's init, is a hang.
    assert judged(COMPILE, plain=True)[-1].verdict.kind == "hot"


def test_names_alone_and_stacks_alone_are_enough_for_the_healthy_one():
    assert seen(judged(COMPILE, of=HANG)) == {"moving"}
    begin, end = stretch(COMPILE)
    nobody = [replace(nameless(s), stacks=stacks_of(COMPILE, s)) for s in recorded(COMPILE) if s.t <= end]
    assert "stuck" not in seen(m for m in watch(nobody, by("generic")) if m.now > begin)
