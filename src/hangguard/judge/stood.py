"""Where the workers stood in the last look at their stacks, in a start and in serving alike."""

from __future__ import annotations

from hangguard.facts import Broken, Expired, Stack, Stuck, Unseen
from hangguard.judge.at_work import workers_of
from hangguard.judge.memory import Memory
from hangguard.judge.sites import Found, main_thread, wait_of


def stacks_of(memory: Memory) -> tuple[Stack, ...]:
    """Return the stacks of the last look since anything was produced."""
    if memory.ready_at is not None and memory.serving.stood:
        return tuple(s.stack for s in memory.serving.stood)
    return memory.agreement.stacks if memory.agreement is not None else ()


def frames_of_workers(memory: Memory) -> tuple[tuple[str, str], ...]:
    """Return (function, file) of every frame of the workers' main threads, innermost first."""
    found = []
    for stack in _of_workers(memory):
        main = None if isinstance(stack.threads, Unseen) else main_thread(stack.threads)
        found += [(f.function, f.file) for f in main.frames] if main else []
    return tuple(found)


def sites_of_workers(memory: Memory) -> tuple[Found, ...]:
    """Return what the workers' main threads wait for, where a frame tells."""
    found = (wait_of(stack, memory.rules) for stack in _of_workers(memory))
    return tuple(site for site in found if site is not None)


def stopped_at(memory: Memory) -> bool:
    """Say whether it came to a stand, and does not just go on."""
    return isinstance(memory.verdict, (Stuck, Broken, Expired))


def _of_workers(memory: Memory) -> tuple[Stack, ...]:
    pids = {p.identity for p in workers_of(memory.tree, memory.rules)} if memory.tree is not None else set()
    return tuple(stack for stack in stacks_of(memory) if (stack.pid, stack.started) in pids)
