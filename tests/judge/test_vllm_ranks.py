"""The real vLLM with two ranks on the CPU, recorded by hangguard itself, judged again sample by sample.

``HANGGUARD_RECORD=tests/judge/data nox -s real-full -- -k v18`` (tests/real/test_full_ranks.py) makes the recordings.
"""

from functools import lru_cache
from pathlib import Path

import pytest

from hangguard.engines.vllm import VLLM
from hangguard.facts import HeldFiles, Launch
from hangguard.judge import rules_for, start, step
from hangguard.judge.stood import stacks_of
from hangguard.testing.recordings import read_samples

DATA = Path(__file__).parent / "data"
LAUNCH = Launch(argv=("x",), env=(), cwd="/", url="http://h:1", host="h", port=1, ranks=2, version="0.32.0")
FOUND_WITHIN = 30.0
"""Seconds from the last movement within which every hang is found in which no core is hot for a reason of its own."""


@lru_cache(maxsize=2)
def memories(name):
    """The memory after every sample of one recording."""
    memory, found = start(rules_for(VLLM, LAUNCH)), []
    for sample in read_samples(DATA / f"vllm-tp2-{name}.jsonl.gz"):
        memory = step(memory, sample)
        found.append(memory)
    return found


def first(name, *verdicts):
    return next(m for m in memories(name) if m.verdict.verdict in verdicts)


def names(name):
    return list(dict.fromkeys(m.verdict.verdict for m in memories(name)))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_stopped_within_its_steps_is_named_and_when_it_goes_on_the_server_is_ready(rank):
    verdict = first(f"stopped-{rank}", "stuck").verdict
    assert (verdict.kind, verdict.phase, verdict.confidence) == ("stopped", "serving", "high")
    assert [s.rank for s in verdict.suspects] == [f"TP{rank}"]
    assert verdict.still_for <= FOUND_WITHIN
    after = [m.verdict.verdict for m in memories(f"stopped-{rank}") if m.now > first(f"stopped-{rank}", "stuck").now]
    assert "ready" in after


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_within_its_steps_is_named_though_both_end_by_sigkill_and_the_server_with_0(rank):
    verdict = first(f"killed-{rank}", "exited", "stuck", "broken").verdict
    assert (verdict.verdict, verdict.kind, verdict.phase) == ("exited", "crash", "serving")
    assert verdict.exit_code == 0
    assert verdict.why.startswith(f"VLLM::Worker_TP{rank} ")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_locks_up_is_named_while_the_other_burns_a_core_in_the_all_reduce(rank):
    verdict = first(f"locked-{rank}", "stuck").verdict
    assert (verdict.kind, verdict.phase, verdict.confidence) == ("serving", "serving", "high")
    assert verdict.still_for <= FOUND_WITHIN
    assert [s.rank for s in verdict.suspects[:2]] == [f"TP{rank}", f"TP{1 - rank}"]
    assert "_lock_twice" in verdict.suspects[0].at[0]
    assert verdict.suspects[1].note == "waits for a peer in all_reduce (cpu_communicator.py)"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_in_an_endless_loop_is_named_while_the_other_burns_a_core_in_the_all_reduce(rank):
    """The loops leave the machine nothing to spare; of rank 1 every other sample without stacks was left out."""
    verdict = first(f"spun-{rank}", "stuck").verdict
    assert (verdict.kind, verdict.phase, verdict.confidence) == ("serving", "serving", "medium")
    assert [s.rank for s in verdict.suspects[:2]] == [f"TP{rank}", f"TP{1 - rank}"]
    assert "_spin" in verdict.suspects[0].at[0]


def test_a_deadlock_of_all_ranks_in_the_compile_step_names_both():
    found = first("deadlock", "stuck")
    verdict = found.verdict
    assert (verdict.kind, verdict.phase, verdict.confidence) == ("idle", "jit-compile", "high")
    assert verdict.still_for <= FOUND_WITHIN / 2
    assert {s.rank for s in verdict.suspects[:2]} == {"TP0", "TP1"}
    assert all("_lock_twice" in s.at[0] for s in verdict.suspects[:2])
    assert {s.title for s in stacks_of(found)} >= {"VLLM::Worker_TP0", "VLLM::Worker_TP1", "VLLM::EngineCore"}


def test_a_rank_that_comes_late_is_never_called_stuck():
    assert set(names("late")) <= {"moving", "unclear", "waiting", "ready", "exited"}
    assert "ready" in names("late")


def test_a_recording_that_tells_of_held_files_can_be_read():
    samples = read_samples(DATA / "vllm-tp2-locked-1.jsonl.gz")
    held = [file for s in samples if isinstance(s.files, HeldFiles) for file in s.files.files]
    assert any(file.path.startswith("/dev/shm/") for file in held)
