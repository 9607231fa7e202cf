"""Recorded starts of real vLLM and SGLang servers as timelines.

Two forms: ``data/*.jsonl.gz`` (2 Hz: thread states, faults, the last log line) and ``data/trace-*.jsonl.gz`` (GPU
programs: neither faults nor log text nor thread states were recorded, so nothing moves in those; the state of each
main thread was). Stacks were not recorded with the samples: they are supplied, and always agree.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from hangguard.engines.common import markers_for
from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.facts import (
    Gpu,
    GpuHolder,
    Host,
    Listener,
    Log,
    Port,
    Process,
    Reply,
    Sample,
    Stack,
    StackFrame,
    ThreadStack,
    Tree,
    Unseen,
)
from hangguard.judge import Rules

DATA = Path(__file__).parent / "data"
HEALTHY = tuple(
    sorted(
        file.name.removesuffix(".jsonl.gz")
        for file in DATA.glob("*.jsonl.gz")
        if re.match(r"compile|eager|gpu-vllm-cold|idle|sgl|trace-(compile|disk|gpu-.*-(healthy|eager))", file.name)
    )
)
HUNG = (
    "gpu-sglang-capture",
    "gpu-vllm-capture",
    "hang-init-absent",
    "hang-load-event",
    "hang-load-lock",
    "hang-load-lock-burn",
    "hang-sgl-graph-lock",
    "hang-warmup-lock",
)
HOT = ("trace-nccl_one_rank_barrier", "trace-spin_kernel", "trace-spin_all_sms")
MIB = 1024**2
TITLES = {
    "VLLM::EngineCor": "VLLM::EngineCore",
    "sglang::schedul": "sglang::scheduler",
    "sglang::detoken": "sglang::detokenizer",
    "vllm": "/venv/bin/python3 /venv/bin/vllm serve M",
}
STATES = {"running": "R", "sleeping": "S", "disk-sleep": "D", "stopped": "T", "idle": "I", "zombie": "Z"}


@lru_cache(maxsize=64)
def lines_of(name: str) -> tuple[dict[str, Any], ...]:
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt") as file:
        return tuple(json.loads(line) for line in file)


def mark(name: str, word: str) -> float | None:
    """The time of the first sample with this mark."""
    return next((x["t"] for x in lines_of(name) for m in x.get("marks", ()) if m.split(" ")[0] == word), None)


def rules_of(name: str) -> Rules:
    engine = SGLANG if "sgl" in name else VLLM
    return Rules(
        markers=markers_for(engine, None),
        noise=engine.noise,
        stack_markers=engine.stack_markers,
        symptoms=engine.symptoms,
        front_end=engine.front_end,
        workers=engine.workers,
    )


LOCK = (StackFrame(function="acquire", file="lock.py", line=1),)
NCCL = (StackFrame(function="_new_process_group_helper", file="torch/distributed/distributed_c10d.py", line=1),)
SYNC = (StackFrame(function="synchronize", file="torch/cuda/__init__.py", line=1),)


def timeline(
    name: str,
    *,
    channel: str = "futex_do_wait",
    stacks: bool = True,
    shift: float = 0.0,
    at: tuple[StackFrame, ...] = LOCK,
) -> list[Sample]:
    """The samples of one recording, all members standing ``at`` one place; the answer is there from ``ready`` on."""
    ready_at = mark(name, "ready")
    read = _of_trace if name.startswith("trace-") else _of_recording
    samples = []
    for sample in read(name):
        answered = ready_at is not None and sample.t >= ready_at
        t = round(sample.t * 64) / 64 + shift  # exact in binary, so that a shift loses nothing
        samples.append(
            replace(
                sample,
                t=t,
                answer=Reply(state="good" if answered else "failed", since=t),
                port=Port(port=8000, listener=Listener(pid=None, title="", ours=None) if answered else None),
                stacks=agreeing(sample.tree, channel, at) if stacks else Unseen("py-spy is not installed"),
            )
        )
    return samples


def agreeing(tree: Tree, channel: str, at: tuple[StackFrame, ...] = LOCK) -> tuple[Stack, ...]:
    """The worst case: everybody stands still, in a wait that nothing outside can end."""
    return tuple(
        Stack(
            pid=p.pid,
            started=p.started,
            title=p.title,
            threads=(ThreadStack(name="MainThread", thread_id=p.pid, active=False, frames=at),),
            wait_channel=channel,
        )
        for p in tree.members
    )


def _of_recording(name: str) -> Iterator[Sample]:
    for x in lines_of(name):
        pids = sorted(x["p"], key=int)
        core = next((int(p) for p in pids if x["p"][p][0] == "VLLM::EngineCor"), None)
        everyone = "".join(letter * count for letter, count in x["S"].items())
        members = tuple(_member(int(p), x["p"][p], n == 0, core, int(pids[0]), x, everyone) for n, p in enumerate(pids))
        lines = tuple(x.get("lines") or ((x["line"],) if x.get("line") else ()))
        yield _sample(
            x["t"],
            Tree(
                members=members,
                births=x["born"],
                deaths=x["died"],
                minor_faults=x["mnf"],
                read_chars=x["rch"],
                written_chars=x["wch"],
                disk_read_bytes=x["rb"],
            ),
            Log(total_bytes=x["log"], lines=lines),
            _gpus(x["gpu"], x["gpu"]["util"], x["gpu"]["mw"]) if "gpu" in x else (),
        )


def _member(pid: int, p: list[Any], root: bool, core: int | None, root_pid: int, x: Any, everyone: str) -> Process:
    comm, state, ticks, threads, rss = p[0], p[1], p[2], p[10], p[11]
    parent = 1 if root else core if comm == "VLLM::Worker" and core is not None else root_pid
    return Process(
        pid=pid,
        started=pid,
        parent=parent,
        title=TITLES.get(comm, comm),
        name=comm,
        state=state,
        threads=threads,
        cpu_seconds=ticks / 100,
        # Recorded for the tree as a whole, as are the states of the threads.
        reaped_cpu_seconds=x["ccpu"] / 100 if root else 0.0,
        minor_faults=p[8],
        major_faults=p[9],
        rss_bytes=rss * MIB,
        read_chars=p[5],
        thread_states=everyone if root else "",
    )


def _of_trace(name: str) -> Iterator[Sample]:
    known: dict[int, dict[str, int]] = {}
    for x in lines_of(name):
        now = {p["pid"]: p for p in x["procs"] if isinstance(p.get("io"), dict)}
        for pid, p in now.items():
            known[pid] = p["io"]
        totals = {k: sum(io[k] for io in known.values()) for k in ("rchar", "wchar", "read_bytes")}
        root = min(now, default=0)
        members = tuple(
            Process(
                pid=pid,
                started=pid,
                parent=1 if pid == root else root,
                title=TITLES.get(p["name"], p["name"]),
                name=p["name"],
                state=STATES.get(p["st"], "S"),
                threads=p["thr"],
                cpu_seconds=p["cpu"],
                reaped_cpu_seconds=0.0,
                minor_faults=0,
                major_faults=0,
                rss_bytes=p["rss"] * MIB,
                read_chars=p["io"]["rchar"],
                thread_states=STATES.get(p["st"], "S"),
            )
            for pid, p in now.items()
        )
        yield _sample(
            x["t"],
            Tree(
                members=members,
                births=len(known),
                deaths=len(known) - len(now),
                read_chars=totals["rchar"],
                written_chars=totals["wchar"],
                disk_read_bytes=totals["read_bytes"],
            ),
            Log(total_bytes=x["log"]),
            _gpus(x["gpu"], x["gpu"]["util"][0], x["gpu"]["power_mw"]),
        )


def _gpus(gpu: dict[str, Any], percent: float, milliwatts: float) -> tuple[Gpu, ...]:
    return (
        Gpu(
            index=0,
            uuid="GPU-0",
            name="NVIDIA H200",
            memory_used_bytes=gpu["mem"] * MIB,
            memory_total_bytes=143_771 * MIB,
            utilization_percent=percent,
            power_watts=milliwatts / 1000,
            holders=tuple(GpuHolder(pid=pid, used_bytes=mib * MIB) for pid, mib in gpu.get("procs", ())),
        ),
    )


def _sample(t: float, tree: Tree, log: Log, gpus: tuple[Gpu, ...]) -> Sample:
    return Sample(
        t=t,
        tree=tree,
        log=log,
        gpus=gpus,
        port=Port(port=8000, listener=None),
        health=Reply(state="not-asked", since=t),
        host=Host(
            memory_total_bytes=24 << 30,
            memory_available_bytes=16 << 30,
            shm_total_bytes=1 << 30,
            shm_free_bytes=1 << 30,
            oom_kills=0,
        ),
    )
