"""The real vLLM and SGLang with tensor parallelism on GPUs: how they are spelled, and what is kept of their story.

``HANGGUARD_ENGINES`` names a folder with ``vllm/`` and ``sglang/``, each with the packages of that engine, and
``model/``, the model that they serve (``tests/real/make_tiny_model.py``, without weights). Where the machine has one
GPU, two ranks share it (``faults/sitecustomize.py``).
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import ranked
from hangguard.facts import Serving
from hangguard.supervision.evidence import as_plain

FAULTS = Path(__file__).parent / "faults"
ENGINES = Path(os.environ.get("HANGGUARD_ENGINES", "/nowhere"))
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
WITHOUT_MULTICAST_PASSES = json.dumps(
    {"pass_config": {"fuse_allreduce_rms": False, "fuse_gemm_comms": False, "enable_sp": False}}
)
"""vLLM's compiled code uses NVLink multicast in these (FlashInfer's backend mnnvl, symmetric memory)."""
ANYTHING = re.compile(r".*")
"""What the engines leave in their temporary folder on a GPU is told in the row."""


@dataclass(frozen=True)
class Served:
    """One engine, as a test starts it."""

    name: str
    words: tuple[str, ...]
    env: dict[str, str]
    rank: str
    """What a rank's process calls itself, up to its number."""

    def command(self, ranks):
        facts = {"model": ENGINES / "model", "ranks": ranks, "port": "{port}", "compilation": WITHOUT_MULTICAST_PASSES}
        return [sys.executable, *(word.format(**facts) for word in self.words)]

    def environment(self, caches, *, ranks, fault=""):
        """The whole environment; what is compiled is kept below ``caches``, apart from each launch's own folder."""
        plain = {name: value for name, value in os.environ.items() if not name.startswith(("HG_", "PYTHON"))}
        return {
            **plain,
            **ranked.WITHOUT_MULTICAST,
            **self.env,
            **{name: str(caches / name.lower()) for name in CACHES},
            "PYTHONPATH": f"{FAULTS}{os.pathsep}{ENGINES / self.name}",
            "HF_HUB_OFFLINE": "1",
            "HG_FAULT": fault,
            "HG_ONE_BOARD": "1" if len(boards()) < ranks else "",
        }


ENGINES_SERVED = {
    "vllm": Served(
        name="vllm",
        words=(
            *("-m", "vllm.entrypoints.openai.api_server", "--model", "{model}", "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", "{port}", "--load-format", "dummy", "--max-model-len", "2048"),
            *("--tensor-parallel-size", "{ranks}", "--distributed-executor-backend", "mp"),
            *("--disable-custom-all-reduce", "--gpu-memory-utilization", "0.3", "--kv-cache-memory-bytes", "30G"),
            *("--max-cudagraph-capture-size", "8"),
            *("--compilation-config", "{compilation}"),
        ),
        env={
            "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",  # it would use NVLink multicast, and so does the next by "auto"
            "VLLM_FLASHINFER_ALLREDUCE_BACKEND": "trtllm",
            "VLLM_WORKER_MULTIPROCESSING_METHOD": "spawn",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
        },
        rank="VLLM::Worker_TP",
    ),
    "sglang": Served(
        name="sglang",
        words=(
            *("-m", "sglang.launch_server", "--model-path", "{model}", "--served-model-name", "tiny"),
            *("--host", "127.0.0.1", "--port", "{port}", "--load-format", "dummy", "--context-length", "2048"),
            *("--tp", "{ranks}", "--disable-custom-all-reduce", "--mem-fraction-static", "0.3"),
            *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--cuda-graph-max-bs-decode", "8", "--disable-prefill-cuda-graph", "--enable-metrics"),
            "--enforce-disable-flashinfer-allreduce-fusion",  # as vLLM's
        ),
        env={"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"},
        rank="sglang::scheduler_TP",
    ),
}


def boards():
    """Return used memory in MiB, power in watts and utilisation in percent of every GPU, as nvidia-smi prints them."""
    words = ["nvidia-smi", "--query-gpu=memory.used,power.draw,utilization.gpu", "--format=csv,noheader,nounits"]
    out = subprocess.run(words, check=True, capture_output=True, text=True, timeout=60).stdout
    return [tuple(float(part) for part in line.split(",")) for line in out.splitlines()]


def works(samples):
    """Whether the newest looks saw requests at work, and tokens that became more."""
    counted = [sample.serving for sample in samples[-12:] if isinstance(sample.serving, Serving)]
    return len({c.generated_tokens for c in counted if c.running}) > 1


def chapter(story, name, attempts, attempt, *, verdict=None, at=None, fault_at=None):
    """Return the part of a story that is one attempt, or (``verdict``, ``at``) what of it was before a moment."""
    later = [a.started_at for a in attempts if a.started_at > attempt.started_at]
    until = min(later, default=math.inf)
    if verdict is not None:
        attempt = replace(attempt, verdict=verdict, settled_at=at, last_movement_at=at, release=None)
        until = at
    samples = [sample for sample in story.samples if attempt.started_at <= sample.t < until]
    return ranked.Story(name, samples=samples, attempt=attempt, fault_at=fault_at, series=story.series)


def keep_all(story, watch):
    """Keep what was told and how every attempt went, for those whose test has failed."""
    if folder := os.environ.get("HANGGUARD_RECORD"):
        document = {
            "scenario": story.name,
            "events": [event.as_json() for event in watch.told],
            "attempts": [as_plain(attempt) for attempt in watch.made.history],
        }
        with open(os.path.join(folder, f"{story.series}-told.jsonl"), "a") as out:
            out.write(json.dumps(document) + "\n")
        for number in range(1, len(watch.made.history) + 2):
            if (log := watch.made.log_path(number)) and os.path.exists(log):
                shutil.copy(log, os.path.join(folder, f"{story.name}-{number}.log"))
