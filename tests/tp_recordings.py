"""Recordings of real vLLM and SGLang with two ranks on one or two H200, judged again by the code of now.

``judge/test_tp_recordings.py`` asserts what must be said of them, ``gpu/several_gpus_page.py`` tells it on a page.
"""

import json
from functools import lru_cache
from pathlib import Path

from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import Launch
from hangguard.judge import rules_for, start, step
from hangguard.testing.recordings import read_samples

DATA = Path(__file__).parent / "judge" / "data"
ROWS = tuple(map(json.loads, (DATA / "tp-rows.jsonl").read_text().splitlines()))
ENGINES = {"vllm": VLLM, "sglang": SGLANG}
ENDS = {"stuck", "broken", "exited", "expired"}


def name_of(row):
    return f"{row['scenario']}-{row['boards']}"


@lru_cache(maxsize=16)
def _memories(engine, version, ranks, path, until):
    launch = Launch(
        argv=("x",), env=(), cwd="/", version=version, url="http://h:1", host="h", port=1, ranks=ranks, nodes=1
    )
    memory, found = start(rules_for(ENGINES[engine], launch)), []
    for sample in read_samples(DATA / path):
        if sample.t > until:
            break
        memory = step(memory, sample)
        found.append(memory)
        if memory.verdict.verdict in ENDS:
            break
    return found


def judged_again(row):
    """Return the memory after every sample of a row, up to the verdict that ended it."""
    engine, fault = row["scenario"].split("-")
    healthy = fault == "healthy"  # the beginning of what one of its ranks was stopped in
    path = f"tp{row['ranks']}x{row['boards']}-{engine}-{'stopped' if healthy else fault}.jsonl.gz"
    until = row["settled_at"] if healthy else float("inf")
    return _memories(engine, row["version"], row["ranks"], path, until)
