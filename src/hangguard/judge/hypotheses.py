"""Possible causes, one function each: what the evidence says for and against it.

A hypothesis is a function from the memory of an attempt to a :class:`Finding`; add one by writing it and
naming it in ``HYPOTHESES``. What was not looked at leaves a cause open, and never rules it out.
"""

from __future__ import annotations

from collections.abc import Callable

from hangguard.facts import Broken, Diagnosis, Exited, Finding, Unseen
from hangguard.judge.advice import about_left_locks, advice_for
from hangguard.judge.endings import name_of
from hangguard.judge.findings import found, is_stopped, odd_one, said_by_nccl, told
from hangguard.judge.memory import Memory
from hangguard.judge.on_the_gpu import cuda_graphs, drafter, driver, hardware, kernel, overlap
from hangguard.judge.outside import STALLED_SHARE, THROTTLED_SHARE
from hangguard.judge.phases import is_later
from hangguard.judge.progress import compiles
from hangguard.judge.ranks import prefix_tree, ranks_seen, standings
from hangguard.judge.sites import WITHIN
from hangguard.judge.stood import sites_of_workers, stacks_of
from hangguard.judge.waits import waits_by_presence

LOW_MEMORY_SHARE = 0.02

STILL = 5.0
"""Seconds without any movement after which a slow step is ruled out: no healthy start was ever so still for one."""


def host_memory(memory: Memory) -> Finding:
    """The machine ran out of memory."""
    name, trouble = "out of host memory", memory.trouble
    if isinstance(memory.verdict, Exited) and memory.verdict.kind == "oom-kill":
        return found(name, "confirmed", memory.verdict.why)
    if trouble.cgroup_oom_kills:
        return found(name, "supported", f"{trouble.cgroup_oom_kills} OOM kills in its control group")
    if memory.oom_kills and trouble.cgroup_oom_kills is None:
        return found(name, "supported", f"{memory.oom_kills} OOM kills meanwhile, on the whole machine")
    host = memory.last.host if memory.last else Unseen("no sample")
    if isinstance(host, Unseen):
        return found(name, "open", host.reason)
    free = host.memory_available_bytes / max(host.memory_total_bytes, 1)
    evidence = f"{host.memory_available_bytes / 1024**3:.1f} GiB available"
    if free < LOW_MEMORY_SHARE:
        return found(name, "supported", evidence)
    if isinstance(host.oom_kills, Unseen) and trouble.cgroup_oom_kills is None:
        return found(name, "open", evidence, host.oom_kills.reason)
    return found(name, "ruled out", evidence, "no OOM kill of its own" if memory.oom_kills else "no OOM kill")


def gpu_memory(memory: Memory) -> Finding:
    """A GPU ran out of memory."""
    name = "out of GPU memory"
    if lines := told(memory, "gpu-oom"):
        return found(name, "confirmed", *lines[:2])
    gpus = memory.last.gpus if memory.last else Unseen("no sample")
    if isinstance(gpus, Unseen):
        return found(name, "open", gpus.reason)
    held = [f"GPU {g.index}: {g.memory_used_bytes / 1024**2:,.0f} MiB held" for g in gpus[:8]
            if not isinstance(g.memory_used_bytes, Unseen)]  # fmt: skip
    return found(name, "ruled out", "no such error in the log" if gpus else "there is no GPU", *held)


def crash(memory: Memory) -> Finding:
    """A member crashed."""
    name = "a crash of a member"
    bad = [d for d in memory.departed if not isinstance(d.exit_code, Unseen) and d.exit_code != 0]
    lines = told(memory, "crash")
    xids = [str(f) for f in memory.trouble.faults if not f.is_of_the_board]
    evidence = (*(f"{name_of(d)} ended with {d.exit_code}" for d in bad[:3]), *lines[:2], *xids[:2])
    verdict = memory.verdict
    if (isinstance(verdict, Exited) and verdict.kind == "crash") or (
        isinstance(verdict, Broken) and (verdict.kind == "survivors" or verdict.reason == "crash")
    ):
        return found(name, "confirmed", verdict.why, *evidence)
    if lines or any(isinstance(d.exit_code, int) and d.exit_code < 0 for d in bad):
        return found(name, "supported", *evidence)
    if memory.tree is None:
        return found(name, "open", "the processes were never seen")
    return found(name, "ruled out", f"{len(memory.tree.members)} members live")


def slow_load(memory: Memory) -> Finding:
    """The weights are still being loaded, slowly."""
    name, phase = "a slow load of the weights", memory.verdict.phase
    if memory.tree is None:
        return found(name, "open", "the processes were never seen")
    if is_later(phase, "weights-load"):
        return found(name, "ruled out", f"it is past that: {phase}")
    if memory.idle_for >= STILL:
        return found(name, "ruled out", f"no byte read, no page fault and no CPU time for {memory.idle_for:.0f} s")
    return found(name, "supported" if phase == "weights-load" else "open", f"{memory.progress_by} moved last")


def jit_compile(memory: Memory) -> Finding:
    """Kernels are compiled, slowly or with a cold cache."""
    name, tree = "a slow JIT compile", memory.tree
    if tree is None:
        return found(name, "open", "the processes were never seen")
    at_work = [f"{p.name} ({p.pid})" for p in tree.members if compiles(p)]
    if at_work and memory.idle_for < STILL:
        return found(name, "supported", f"compilers at work: {', '.join(at_work[:4])}")
    if memory.idle_for >= STILL:
        left = f"compilers stand still: {', '.join(at_work[:4])}" if at_work else "no compiler runs"
        return found(name, "ruled out", left, f"no CPU time for {memory.idle_for:.0f} s")
    if sites := [str(s) for s in sites_of_workers(memory) if s.waits_for == "compile"]:
        return found(name, "supported", *sites[:2])
    evidence = (f"it is in {memory.verdict.phase}", "no compiler child was seen")
    return found(name, "open", *evidence)


def lock(memory: Memory) -> Finding:
    """A lock file is waited for."""
    name, left = "a lock file that somebody else holds, or left", memory.verdict.left_locks
    if left:
        is_sure = len(left) == 1 and waits_by_presence(memory)
        return found(name, "confirmed" if is_sure else "supported", *about_left_locks(left))
    waited = [k for k in memory.outside.locks if k.waiters]
    foreign = [k for k in waited if not k.owner_is_member]
    if foreign:
        held = (
            f"{k.path}: {f'held by {k.owner_title} ({k.owner})' if k.owner else 'nobody holds it'}" for k in foreign
        )
        return found(name, "confirmed" if is_stopped(memory) or memory.verdict.kind == "lock" else "supported", *held)
    if sites := [str(s) for s in sites_of_workers(memory) if s.waits_for == "lock"]:
        return found(name, "supported", *sites[:2])
    if not stacks_of(memory):
        return found(name, "open", memory.stacks_unseen or "no stacks were taken")
    return found(name, "ruled out", "no worker waits for a lock file")


def download(memory: Memory) -> Finding:
    """Something is downloaded."""
    name, outside = "a download", memory.outside
    if lines := told(memory, "download"):
        return found(name, "confirmed", *lines[:2])
    if outside.bytes_per_second > 0:
        return found(name, "supported", f"{outside.bytes_per_second / 1e6:.1f} MB/s into {_folders(memory)}")
    if sites := [str(s) for s in sites_of_workers(memory) if s.waits_for == "download"]:
        return found(name, "supported", *sites[:2])
    if is_later(memory.verdict.phase, "weights-load"):
        return found(name, "ruled out", f"it is past that: {memory.verdict.phase}")
    if not stacks_of(memory):
        return found(name, "open", memory.stacks_unseen or "no stacks were taken")
    return found(name, "ruled out", "no worker waits for a hub, and no folder of downloads grows")


def machine(memory: Memory) -> Finding:
    """A disk or the machine is too slow, or keeps the members from running."""
    name, outside = "a slow disk or a starved machine", memory.outside
    if outside.is_frozen:
        return found(name, "confirmed", "the control group is frozen")
    shares = {
        "waiting for a disk": (outside.share("io"), STALLED_SHARE),
        "waiting for a CPU": (outside.share("cpu"), STALLED_SHARE),
        "kept back by the CPU quota": (outside.share("throttled"), THROTTLED_SHARE),
    }
    high = [f"{share:.0%} of the time {what}" for what, (share, limit) in shares.items() if share and share >= limit]
    if isinstance(memory.verdict, Exited):
        return found(name, "open", *(high or ["it has ended"]))  # pressure makes things late, and ends nothing
    if memory.idle_for >= STILL and memory.verdict.kind not in {"disk", "host"}:
        # The machine may be under pressure; whoever sleeps does not feel it.
        return found(name, "ruled out", f"no thread of it waited for a disk or a CPU in {memory.idle_for:.0f} s")
    if high or memory.verdict.kind in {"disk", "host"}:
        return found(name, "supported", *(high or [memory.verdict.why]))
    if all(share is None for share, _ in shares.values()):
        return found(name, "open", "the machine's pressure cannot be seen")
    return found(name, "ruled out", "no pressure on disk or CPU")


def between_ranks(memory: Memory) -> Finding:
    """The ranks wait for one another: NCCL, all-reduce, the rendezvous."""
    name = "communication between the ranks"
    ranks = max(memory.rules.ranks, len(ranks_seen(memory.tree)))
    if ranks == 1 and memory.rules.nodes == 1 and memory.rules.workers:  # else nobody knows how many there are
        return found(name, "ruled out", "there is one rank")
    if lines := told(memory, "dist-timeout"):
        return found(name, "confirmed", *lines[:2])
    if said := said_by_nccl(memory):
        return found(name, "confirmed" if is_stopped(memory) else "supported", *said[:4])
    if sites := [str(s) for s in sites_of_workers(memory) if s.waits_for in WITHIN]:
        return found(name, "supported", *sites[:2], *odd_one(memory))
    if is_stopped(memory) and (memory.verdict.phase == "dist-init" or odd_one(memory)):
        return found(name, "supported", f"it stopped in {memory.verdict.phase}", *odd_one(memory))
    unseen = memory.trouble.communicators_unseen
    many = f"{ranks} ranks" if ranks > 1 else "how many ranks there are is not known"
    return found(name, "open", many, unseen or "NCCL's own thread names no rank that is late")


def somebody(memory: Memory) -> Finding:
    """Somebody else stopped it."""
    name, verdict = "somebody else stopped it", memory.verdict
    if memory.outside.stopped:
        halted = (f"pid {pid} has been in state {state}" for (pid, _), state, _ in memory.outside.stopped[:4])
        return found(name, "confirmed", *halted)
    if isinstance(verdict, Exited):
        return found(name, "supported" if verdict.kind == "signal" else "ruled out", verdict.why)
    if memory.tree is None:
        return found(name, "open", "the processes were never seen")
    return found(name, "ruled out", "no member is stopped by a signal or a debugger")


def port(memory: Memory) -> Finding:
    """The port is taken, or a proxy stands between."""
    name = "the port, or a proxy"
    if lines := told(memory, "port"):
        return found(name, "confirmed", *lines[:2])
    sample = memory.last
    if sample is None or isinstance(sample.port, Unseen):
        return found(name, "open", sample.port.reason if sample and isinstance(sample.port, Unseen) else "no sample")
    listener = sample.port.listener
    if listener is not None and listener.ours is False:
        return found(name, "supported", f"port {sample.port.port} is held by {listener.title} ({listener.pid})")
    if memory.rules.proxy and memory.verdict.phase == "warm-up":
        return found(name, "supported", f"{memory.rules.proxy} is set, and loopback is not exempt from it")
    if listener is None:
        return found(name, "ruled out", "nobody listens yet, which is normal until a start is over")
    if listener.ours is None:
        return found(name, "open", f"who listens on port {sample.port.port} cannot be seen")
    return found(name, "ruled out", "a member listens")


HYPOTHESES: tuple[Callable[[Memory], Finding], ...] = (
    host_memory,
    gpu_memory,
    crash,
    slow_load,
    jit_compile,
    lock,
    download,
    machine,
    between_ranks,
    cuda_graphs,
    kernel,
    drafter,
    overlap,
    hardware,
    driver,
    somebody,
    port,
)
"""In the order in which a person would go through them."""


def diagnose_memory(memory: Memory, hypotheses: tuple[Callable[[Memory], Finding], ...] = HYPOTHESES) -> Diagnosis:
    """Return every hypothesis with its evidence, and what a person could try."""
    if memory.verdict.left_locks:  # what explains all of it comes before what a flag could answer
        hypotheses = tuple(sorted(hypotheses, key=lambda h: h is not lock))
    findings = tuple(h(memory) for h in hypotheses)
    return Diagnosis(findings=findings, ranks=_ranks(memory), advice=advice_for(memory, findings))


def _ranks(memory: Memory) -> tuple[str, ...]:
    """Where the workers stand, as a tree; nothing where there is only one, or none was seen."""
    if memory.tree is None:
        return ()
    members = standings(memory.tree, memory.rules, stacks_of(memory))
    return prefix_tree(members) if sum(bool(m.where) for m in members) > 1 else ()


def _folders(memory: Memory) -> str:
    growth = memory.outside.growth
    return ", ".join(growth.folders[:2]) if growth is not None and growth.folders else "a cache"
