"""Possible causes, one function each: what the evidence says for and against it.

A hypothesis is a function from the memory of an attempt to a :class:`Finding`; add one by writing it and
naming it in ``HYPOTHESES``.
"""

from __future__ import annotations

from collections.abc import Callable

from hangguard.facts import Diagnosis, Exited, Expired, Finding, Standing, Stuck, Unseen
from hangguard.judge.endings import name_of
from hangguard.judge.memory import Memory

LOW_MEMORY_SHARE = 0.02


def host_memory(memory: Memory) -> Finding:
    """The machine ran out of memory."""
    name = "out of host memory"
    host = memory.last.host if memory.last else Unseen("no sample")
    if memory.oom_kills:
        return Finding(hypothesis=name, standing="supported", evidence=(f"{memory.oom_kills} OOM kills meanwhile",))
    if isinstance(host, Unseen):
        return Finding(hypothesis=name, standing="open", evidence=(host.reason,))
    free = host.memory_available_bytes / max(host.memory_total_bytes, 1)
    evidence = (f"{host.memory_available_bytes / 1024**3:.1f} GiB available",)
    if free < LOW_MEMORY_SHARE:
        return Finding(hypothesis=name, standing="supported", evidence=evidence)
    if isinstance(host.oom_kills, Unseen):
        return Finding(hypothesis=name, standing="open", evidence=(*evidence, host.oom_kills.reason))
    return Finding(hypothesis=name, standing="ruled out", evidence=(*evidence, "no OOM kill"))


def gpu_memory(memory: Memory) -> Finding:
    """A GPU ran out of memory."""
    name = "out of GPU memory"
    lines = tuple(t.line for t in memory.told if t.reason == "gpu-oom")
    if lines:
        return Finding(hypothesis=name, standing="confirmed", evidence=lines[:2])
    gpus = memory.last.gpus if memory.last else Unseen("no sample")
    if isinstance(gpus, Unseen):
        return Finding(hypothesis=name, standing="open", evidence=(gpus.reason,))
    if not gpus:
        return Finding(hypothesis=name, standing="ruled out", evidence=("there is no GPU",))
    return Finding(hypothesis=name, standing="ruled out", evidence=("no such error in the log",))


def crash(memory: Memory) -> Finding:
    """A member crashed."""
    name = "a crash of a member"
    bad = [d for d in memory.departed if not isinstance(d.exit_code, Unseen) and d.exit_code != 0]
    lines = tuple(t.line for t in memory.told if t.reason == "crash")
    evidence = (*(f"{name_of(d)} ended with {d.exit_code}" for d in bad[:3]), *lines[:2])
    if lines or any(isinstance(d.exit_code, int) and d.exit_code < 0 for d in bad):
        return Finding(hypothesis=name, standing="supported", evidence=evidence)
    if isinstance(memory.verdict, Exited) and memory.verdict.kind == "crash":
        return Finding(hypothesis=name, standing="confirmed", evidence=(memory.verdict.why,))
    if memory.tree is None:
        return Finding(hypothesis=name, standing="open", evidence=("the processes were never seen",))
    return Finding(hypothesis=name, standing="ruled out", evidence=(f"{len(memory.tree.members)} members live",))


def slow_load(memory: Memory) -> Finding:
    """The weights are still being loaded, slowly."""
    name = "a slow load of the weights"
    if memory.tree is None:
        return Finding(hypothesis=name, standing="open", evidence=("the processes were never seen",))
    if memory.idle_for >= 5.0:
        evidence = (f"no byte read, no page fault and no CPU time for {memory.idle_for:.0f} s",)
        return Finding(hypothesis=name, standing="ruled out", evidence=evidence)
    standing: Standing = "supported" if memory.place.phase == "weights-load" else "open"
    return Finding(hypothesis=name, standing=standing, evidence=(f"{memory.progress_by} moved last",))


def compile_or_capture(memory: Memory) -> Finding:
    """The compile step or the capture of CUDA graphs deadlocks."""
    name = "JIT compile or CUDA graph capture"
    phase = memory.verdict.phase
    if phase in {"jit-compile", "graph-capture"} and isinstance(memory.verdict, (Stuck, Expired)):
        return Finding(hypothesis=name, standing="supported", evidence=(f"it stopped in {phase}",))
    return Finding(hypothesis=name, standing="open", evidence=(f"it was in {phase}",))


def between_ranks(memory: Memory) -> Finding:
    """The ranks wait for one another: NCCL, all-reduce, the rendezvous."""
    name = "communication between the ranks"
    if memory.rules.ranks == 1 and memory.rules.nodes == 1:
        return Finding(hypothesis=name, standing="ruled out", evidence=("there is one rank",))
    if memory.verdict.phase == "dist-init" and isinstance(memory.verdict, (Stuck, Expired)):
        return Finding(hypothesis=name, standing="supported", evidence=("it stopped in dist-init",))
    return Finding(hypothesis=name, standing="open", evidence=(f"{memory.rules.ranks} ranks",))


HYPOTHESES: tuple[Callable[[Memory], Finding], ...] = (
    host_memory,
    gpu_memory,
    crash,
    slow_load,
    compile_or_capture,
    between_ranks,
)


def diagnose_memory(memory: Memory, hypotheses: tuple[Callable[[Memory], Finding], ...] = HYPOTHESES) -> Diagnosis:
    """Return every hypothesis with its evidence, and what a person could try."""
    return Diagnosis(findings=tuple(h(memory) for h in hypotheses), advice=_advice(memory))


def _advice(memory: Memory) -> tuple[str, ...]:
    verdict = memory.verdict
    if isinstance(verdict, Exited) and verdict.permanent:
        return ("mend the command: the same launch would end the same way again",)
    if isinstance(verdict, Stuck):
        stacks = verdict.suspects[0] if verdict.suspects else "the stacks in the evidence"
        return (f"look at {stacks}",)
    if isinstance(verdict, Expired) and verdict.kind == "ready_within":
        return ("raise ready_within if it was still moving",)
    return ()
