"""Real vLLM 0.26.0 and SGLang 0.5.16 on one H200, recorded by hangguard itself, a sample a second, and judged again.

Serving counters and stacks of the spinning kernel were not recorded then: they are supplied as the same run showed
them (eight requests, 877 tokens, ``Event.synchronize`` below ``AsyncOutput.get_output``).
"""

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import (
    Broken,
    Launch,
    Ready,
    Sample,
    Serving,
    Stack,
    StackFrame,
    Stuck,
    ThreadStack,
    Unclear,
    Waiting,
)
from hangguard.judge import next_ask, rules_for, start, step
from hangguard.testing.recordings import read_samples

DATA = Path(__file__).parent / "data"
FOUND_WITHIN = 12.0
"""Seconds after the last movement within which a deadlock at start is found, where stacks are seen."""
SERVING_WITHIN = 30.0


@lru_cache(maxsize=8)
def attempts(name: str) -> tuple[tuple[Sample, ...], ...]:
    """The samples of each attempt: another root is another attempt."""
    found: dict[int, list[Sample]] = {}
    for sample in read_samples(DATA / f"h200-{name}.jsonl.gz"):
        members = sample.tree.members
        root = min((p.pid for p in members), default=None)
        if root is None and not found:
            continue
        known = next((r for r in reversed(found)), None)
        is_new = known is None or (root is not None and root > known and all(p.pid != known for p in members))
        found.setdefault(root if is_new else known, []).append(sample)
    return tuple(tuple(samples) for samples in found.values())


def rules(name: str):
    engine, version = (VLLM, "0.26.0") if "vllm" in name else (SGLANG, "0.5.16")
    launch = Launch(argv=("x",), env=(), cwd="/", version=version, url="http://h:1", host="h", port=1)
    return rules_for(engine, launch)


def watch(name: str, samples):
    memory = start(rules(name))
    for sample in samples:
        memory = step(memory, sample)
        yield memory, sample


@pytest.mark.parametrize("name", ["vllm-healthy", "sglang-healthy"])
def test_no_second_of_a_healthy_start_and_of_its_serving_is_called_a_hang(name):
    """Cold caches: the longest stretch with a silent log, 0 % GPU and floor watts was 115 s."""
    (samples,) = attempts(name)
    verdicts = [memory.verdict for memory, sample in watch(name, samples) if sample.exit is None]
    assert not [v for v in verdicts if isinstance(v, (Stuck, Broken, Waiting, Unclear))]
    assert isinstance(verdicts[-1], Ready)


@pytest.mark.parametrize("name", ["vllm-capture", "sglang-capture"])
def test_a_deadlock_at_graph_capture_is_found_in_time_and_its_cure_is_ready(name):
    hung, cured = attempts(name)
    stuck = next(memory for memory, _ in watch(name, hung) if isinstance(memory.verdict, Stuck))
    assert (stuck.verdict.kind, stuck.verdict.phase) == ("idle", "graph-capture")
    assert stuck.now - stuck.last_movement_at <= FOUND_WITHIN
    assert stuck.verdict.confidence == "high"
    assert "capture" in str(stuck.verdict.suspects[0])
    verdicts = [memory.verdict for memory, sample in watch(name, cured) if sample.exit is None]
    assert not [v for v in verdicts if isinstance(v, (Stuck, Broken))]
    assert isinstance(verdicts[-1], Ready)


def spinning():
    """From the hundredth answer on a kernel never ends: GPU 100 % at the floor's watts, health 200."""
    (samples,) = attempts("vllm-spin")
    tokens = 0
    for sample in samples:
        busy = bool(sample.gpus) and sample.gpus[0].utilization_percent >= 20
        loaded = tokens > 0 or busy
        tokens = 877 if loaded else 0
        serving = Serving(running=8 if loaded else 0, waiting=0, generated_tokens=tokens, prompt_tokens=0, at=sample.t)
        yield replace(sample, serving=serving)


def stacks_of(sample: Sample):
    at = {
        "VLLM::EngineCore": ("synchronize streams.py", "get_output gpu_model_runner.py", "step core.py"),
        "": ("select selectors.py", "run_once base_events.py"),
    }
    return tuple(
        Stack(
            pid=p.pid,
            started=p.started,
            title=p.title,
            threads=(
                ThreadStack(
                    name="MainThread",
                    thread_id=p.pid,
                    active=False,
                    frames=tuple(
                        StackFrame(function=f.split()[0], file=f.split()[1], line=1) for f in at.get(p.title, at[""])
                    ),
                ),
            ),
            wait_channel="hrtimer_nanosleep",
        )
        for p in sample.tree.members
    )


def test_a_kernel_that_never_ends_is_found_while_eight_requests_wait():
    memory, began = start(rules("vllm-spin")), None
    for sample in spinning():
        ask = next_ask(memory)
        memory = step(memory, replace(sample, stacks=stacks_of(sample)) if ask.stacks else sample)
        if memory.ready_at is not None and sample.gpus and sample.gpus[0].utilization_percent == 100:
            began = began or sample.t
        if isinstance(memory.verdict, Stuck):
            break
    assert isinstance(memory.verdict, Stuck)
    assert (memory.verdict.kind, memory.verdict.phase) == ("serving", "serving")
    assert memory.now - began <= SERVING_WITHIN
    assert memory.verdict.suspects[0].title == "VLLM::EngineCore"


def test_the_same_kernel_at_working_watts_is_work():
    """A long prefill freezes the counters too, but it draws power."""
    memory = start(rules("vllm-spin"))
    for sample in spinning():
        gpus = tuple(replace(g, power_watts=320.0) if g.utilization_percent >= 20 else g for g in sample.gpus)
        at_work = replace(sample, gpus=gpus)
        ask = next_ask(memory)
        memory = step(memory, replace(at_work, stacks=stacks_of(sample)) if ask.stacks else at_work)
        assert not isinstance(memory.verdict, (Stuck, Broken))
    assert isinstance(memory.verdict, Ready)
