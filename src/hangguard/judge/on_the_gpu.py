"""Possible causes on the GPU and beside it: graphs, kernels, the drafter, the overlap scheduler, hardware, driver."""

from __future__ import annotations

import re

from hangguard.facts import Finding, Unseen
from hangguard.judge.boards import is_busy_for_nothing
from hangguard.judge.findings import found, frames_like, given, is_stopped, not_there, told
from hangguard.judge.memory import Memory
from hangguard.judge.stood import sites_of_workers

_KERNELS = re.compile(r"flashinfer|flash_attn|flashattention|triton_kernels|deep_gemm|cutlass|flashmla|attention[/_.]")
_DRAFTS = re.compile(r"(?i:draft|eagle|verify|specul|medusa|ngram)")
_GRAPHS = re.compile(r"(?i:cuda_?graph|cudagraph|graph_runner)|(?:^|\.)(?:capture|replay)\w*$")
_OVERLAP = re.compile(r"event_loop_overlap|copy_done|AsyncOutput|async_scheduling|resolve_batch_result")


def cuda_graphs(memory: Memory) -> Finding:
    """The capture or the replay of CUDA graphs."""
    name = "CUDA graphs"
    if off := given(memory, "--disable-cuda-graph", "--enforce-eager"):
        return found(name, "ruled out", f"switched off by {off}")
    at = frames_like(memory, _GRAPHS)
    if memory.verdict.phase == "graph-capture" and is_stopped(memory):
        return found(name, "supported", "it stopped in graph-capture", *at[:2])
    if at:
        return found(name, "supported", *at[:2])
    return not_there(memory, name, "graph-capture")


def kernel(memory: Memory) -> Finding:
    """A kernel that never ends: an attention or another backend."""
    name, boards = "an attention backend or another kernel", memory.boards
    at = frames_like(memory, _KERNELS)
    spins = [f"{b.name} is busy at {b.watts:.0f} W, its floor" for b in boards.at_floor if b.watts is not None]
    if is_busy_for_nothing(boards):
        waits = [str(s) for s in sites_of_workers(memory) if s.waits_for == "kernel"]
        return found(name, "confirmed" if waits and is_stopped(memory) else "supported", *spins, *waits[:2], *at[:2])
    if boards.seen and not boards.boards:
        return found(name, "ruled out", "there is no GPU")
    if at and is_stopped(memory):
        return found(name, "supported", *at[:2])
    if boards.is_busy is False and is_stopped(memory):
        return found(name, "ruled out", "no kernel is resident on any GPU (0 %)")
    return found(name, "open", "a GPU is busy" if boards.is_busy else "the GPUs cannot be judged")


def drafter(memory: Memory) -> Finding:
    """Speculative decoding."""
    name = "speculative decoding (the drafter)"
    if memory.rules.argv is None:
        return found(name, "open", "the options of the server are not known")
    asked = given(memory, "--speculative", "--spec-method", "--spec-model", "--spec-tokens", "-sc")
    if not asked:
        return found(name, "ruled out", "no option asks for it")
    at = frames_like(memory, _DRAFTS)
    return found(name, "supported" if at else "open", f"asked for by {asked}", *at[:2])


def overlap(memory: Memory) -> Finding:
    """The overlap of scheduling and running."""
    name = "the overlap scheduler"
    if off := given(memory, "--disable-overlap-schedule", "--no-async-scheduling"):
        return found(name, "ruled out", f"switched off by {off}")
    if at := frames_like(memory, _OVERLAP):
        return found(name, "supported" if memory.verdict.kind == "serving" else "open", *at[:2])
    return not_there(memory, name, "warm-up")


def hardware(memory: Memory) -> Finding:
    """The hardware is at fault."""
    name, trouble = "the hardware", memory.trouble
    lines = told(memory, "hardware")
    ours = [f for f in trouble.faults if f.is_of_the_board and trouble.may_be_ours(f) is not False]
    if lines or any(f.is_broken for f in ours):
        return found(name, "confirmed", *lines[:2], *(str(f) for f in ours[:4]))
    if ours:
        return found(name, "supported", *(str(f) for f in ours[:4]))
    gpus = memory.last.gpus if memory.last else Unseen("no sample")
    if isinstance(gpus, Unseen):
        return found(name, "open", gpus.reason)
    blind = [g.faults.reason for g in gpus if isinstance(g.faults, Unseen)]
    if blind:
        return found(name, "open", blind[0])
    old = [f"GPU {g.index} has had {f.kind}" for g in gpus if not isinstance(g.faults, Unseen) for f in g.faults
           if f.at is None and not f.by_program]  # fmt: skip
    return found(name, "open" if old else "ruled out", *(old[:4] or ["no Xid, no ECC error, no board lost meanwhile"]))


def driver(memory: Memory) -> Finding:
    """The driver does not let a member go."""
    name, waits = "a wedged driver", memory.trouble.in_driver
    if lines := told(memory, "driver"):
        return found(name, "confirmed", *lines[:2])
    if waits:
        evidence = [f"{w.title[:40]} ({w.pid}) in {w.channel} for {memory.now - w.since:.0f} s" for w in waits[:4]]
        return found(name, "confirmed" if memory.verdict.kind == "wedged" else "supported", *evidence)
    gpus = memory.last.gpus if memory.last else Unseen("no sample")
    if isinstance(gpus, Unseen):
        return found(name, "open", gpus.reason)
    if not gpus:
        return found(name, "ruled out", "there is no GPU")
    return found(name, "ruled out", "NVML answers, and no member waits uninterruptibly inside the driver")
