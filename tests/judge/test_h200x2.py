"""Real ranks on several H200, recorded by hangguard itself while they hung, judged again sample by sample."""

import json
from functools import lru_cache
from pathlib import Path

import pytest

from hangguard.facts import Launch
from hangguard.judge import rules_for, start, step
from hangguard.testing.recordings import read_samples
from ranked import FAULTS, RANKED

DATA = Path(__file__).parent / "data"
ROWS = {row["scenario"]: row for row in map(json.loads, (DATA / "h200x2-rows.jsonl").read_text().splitlines())}
FOUND_WITHIN = 20.0
"""Seconds without product within which every hang is found."""


@lru_cache(maxsize=8)
def memories(name):
    """The memory after every sample of one recording, up to the verdict that ended it."""
    memory, found = start(rules_for(RANKED, launch(name))), []
    for sample in read_samples(DATA / f"h200x2-{name}.jsonl.gz"):
        if sample.exit is not None:  # the healthy one was ended as it should
            break
        memory = step(memory, sample)
        found.append(memory)
        if memory.verdict.verdict in {"stuck", "broken", "exited", "expired"}:
            break
    return found


def launch(name):
    ranks = ROWS[name]["ranks"]
    return Launch(argv=("x",), env=(), cwd="/", url="http://h:1", host="h", port=1, ranks=ranks)


@pytest.mark.parametrize("name", [name for name in ROWS if name in FAULTS])
def test_every_hang_between_the_ranks_is_found_and_the_rank_is_named(name):
    fault, row = FAULTS[name], ROWS[name]
    verdict = memories(name)[-1].verdict
    kind = fault.kinds[0 if row["gpus"] else -1]
    assert (verdict.verdict, verdict.kind, verdict.phase) == (fault.verdict, kind, fault.phase)
    assert verdict.still_for <= FOUND_WITHIN
    assert verdict.confidence == "high"
    if fault.names_rank:
        assert verdict.suspects[0].title == f"ranks::worker_TP{row['rank']}"


def test_no_second_of_the_healthy_start_is_called_a_hang():
    assert {memory.verdict.verdict for memory in memories("healthy")} == {"moving", "ready"}
