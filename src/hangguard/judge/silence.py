"""A stretch in which somebody waits and nothing comes out: how long it is, who stands where, what may still be work."""

from __future__ import annotations

import re

from hangguard.facts import Process
from hangguard.judge.at_work import workers_of
from hangguard.judge.boards import is_busy_for_nothing
from hangguard.judge.idle import is_idle
from hangguard.judge.memory import Memory
from hangguard.judge.ranks import rank_of
from hangguard.judge.served import Stood, frames_of
from hangguard.judge.sites import WITHIN, Found, site_of_frames
from hangguard.judge.stillness import APART

SPIN_SITES = frozenset({"kernel", "communicator", "collective", "peers"})
"""What a worker may wait for with a hot core, without getting anywhere."""

POLL_SITES = SPIN_SITES | {"message", "start-up"}
"""What a member may wait for with a hot core: all of those, and one of its own launch (vLLM's core and its workers
poll their shared memory in sched_yield)."""

OUTSIDE_SITES = frozenset({"lock", "download", "compile"})
"""What ends by itself, or by somebody else."""

UNCLEAR_FOR = 15.0
"""Seconds for which a board that could not be judged keeps its counters from proving anything: utilisation is the
share of the last moments only, and a neighbour's bursts come and go."""

STOOD_HOT = 60.0
"""Seconds in one place with a hot core and no known wait there, beside a GPU that does nothing: a grammar or a kernel
that is built in the worker goes round through its functions."""

STOOD_LONG = 240.0
"""Seconds in one place that no step of a model takes: a long prefill goes round through its layers and chunks."""

_EQUAL_SHARE = re.compile(r"TP\d+")


def silent_for(memory: Memory) -> float:
    """Return the seconds since anything came out or was seen to work, and since somebody waits.

    Connected clients may only keep their connection: requests that the server counts begin the time anew.
    """
    served = memory.serving
    since = served.requests_since if served.requests_since is not None else served.demand_since
    return memory.now - max(served.moved_at, since if since is not None else 0.0)


def canary_open_for(memory: Memory) -> float:
    """Return the seconds for which a test request has been open; 0.0: none is."""
    since = memory.serving.canary_since
    return memory.now - max(since, memory.serving.woke_at or since) if since is not None else 0.0


def all_idle(memory: Memory) -> bool:
    """Say whether every worker was seen, and waits for work."""
    places = memory.rules.idle_places
    stood = {(s.pid, s.started): s for s in memory.serving.stood}
    seen = [stood.get(p.identity) for p in workers(memory)]
    return bool(seen) and all(s is not None and is_idle(frames_of(s.stack), places) for s in seen)


def counts_others(memory: Memory) -> bool:
    """Say whether the server counts a request that is not our own test request."""
    served = memory.serving
    if served.canary_since is None or not served.requests:
        return served.requests > 0
    before = served.requests_since is not None and served.requests_since < served.canary_since
    return before or served.requests > 1


def workers(memory: Memory) -> tuple[Process, ...]:
    """Return the members that do the work, of the last tree that was seen."""
    return workers_of(memory.tree, memory.rules) if memory.tree is not None else ()


def culprits_of(memory: Memory, *, at_least: float = APART) -> tuple[Stood, ...]:
    """Return the workers that stood for so long where none stands without work; those that wait for nobody first.

    A parent waits for its workers, and a rank in a collective, or at the kernel of one, for the ranks that are not.
    """
    found = tuple(
        s for s in memory.serving.stood if s.last_at - s.first_at >= at_least and _is_culprit(memory, s, at_least)
    )
    parents = _parents(memory)
    return tuple(sorted(found, key=lambda s: (s.pid in parents, wait_for_peer(memory, s) is not None)))


def wait_for_peer(memory: Memory, stood: Stood) -> Found | None:
    """Return the place in which this worker waits for another rank; ``None``: it stands somewhere else."""
    site = site_of_frames(frames_of(stood.stack), memory.rules.wait_sites)
    return site if site is not None and site.waits_for in {*WITHIN, "kernel"} else None


def awaited_rank(memory: Memory, at_least: float) -> Stood | None:
    """Return the one rank that has stood for so long in one place, while all others wait for it in a collective.

    Tensor parallel ranks do equal shares of a step, and the others have done theirs: so it is not that. Of pipelines,
    experts and data parallel engines nobody can say so.
    """
    parents = _parents(memory)
    leaves = [p for p in workers(memory) if p.pid not in parents]
    if not all(_EQUAL_SHARE.fullmatch(rank_of(p.title)) for p in leaves):
        return None
    ranks = {p.identity for p in leaves}
    stood = [s for s in memory.serving.stood if (s.pid, s.started) in ranks and s.last_at - s.first_at >= at_least]
    here = [s for s in stood if not _is_in_collective(memory, s)]
    if not len(here) == 1 < len(stood) == len(ranks):
        return None
    return here[0] if _is_culprit(memory, here[0], at_least) else None


def _is_in_collective(memory: Memory, stood: Stood) -> bool:
    site = wait_for_peer(memory, stood)
    return site is not None and site.waits_for in WITHIN


def _parents(memory: Memory) -> set[int]:
    return {p.parent for p in memory.tree.members} if memory.tree is not None else set()


def _is_culprit(memory: Memory, stood: Stood, at_least: float) -> bool:
    frames, rules = frames_of(stood.stack), memory.rules
    if not rules.idle_places or is_idle(frames, rules.idle_places):
        return False
    site = site_of_frames(frames, rules.wait_sites)
    if site is not None and site.waits_for in OUTSIDE_SITES:
        return False
    hot = stood.pid in memory.serving.active
    return not hot or at_least >= STOOD_HOT or (site is not None and site.waits_for in SPIN_SITES)


def outside_of(memory: Memory) -> Found | None:
    """Return the place outside in which a worker waits: a lock file or a download."""
    for stood in memory.serving.stood:
        site = site_of_frames(frames_of(stood.stack), memory.rules.wait_sites)
        still = stood.last_at - stood.first_at >= APART
        if still and site is not None and site.waits_for in OUTSIDE_SITES - {"compile"}:
            return site
    return None


def doubt(memory: Memory) -> str:
    """Return what may be work, and keeps a silence without culprits from being a hang; "" if nothing is."""
    if by := who_may_work(memory):
        return by
    return "whether a GPU works cannot be told" if gpu_may_work(memory) else ""


def who_may_work(memory: Memory) -> str:
    """Return which worker uses its CPU for more than polling, as far as was seen; "" if none does.

    One that compiles in its own process keeps all other ranks waiting in their next collective (vllm#41834).
    """
    stood = {(s.pid, s.started): s for s in memory.serving.stood}
    for p in workers(memory):
        if p.pid in memory.serving.active and not (p.identity in stood and _polls(memory, stood[p.identity])):
            moves = ", and its stack changes" if p.pid in memory.serving.restless else ""
            return f"{p.title[:40]} ({p.pid}) uses its CPU{moves}"
    return ""


def _polls(memory: Memory, stood: Stood) -> bool:
    """Whether a worker with a hot core only polls: for its next piece of work, or in a known place of hangs."""
    frames = frames_of(stood.stack)
    site = site_of_frames(frames, memory.rules.wait_sites)
    spins = site is not None and site.waits_for in POLL_SITES
    return stood.last_at - stood.first_at >= APART and (spins or is_idle(frames, memory.rules.idle_places))


def gpu_may_work(memory: Memory) -> bool:
    """Say whether a GPU may have worked lately: boards that cannot be seen, or are busy at watts that tell nothing."""
    at = memory.serving.gpu_unclear_at
    return at is not None and memory.now - at < UNCLEAR_FOR


def is_at_work(memory: Memory) -> bool:
    """Say whether a worker uses its CPU and stands somewhere else in every look, outside its idle loop: progress."""
    stood = {s.pid: s for s in memory.serving.stood}
    return any(
        pid in memory.serving.active and pid in stood and not _polls(memory, stood[pid])
        for pid in memory.serving.restless
    )


def should_spin(memory: Memory) -> bool:
    """Say whether its workers burn CPU while they are idle, and one does not: a sign of a fault, not a proof."""
    return memory.rules.idle_spins and any(p.pid not in memory.serving.active for p in workers(memory))


def busy_words(memory: Memory) -> str:
    """Return which GPU is busy at floor power, with its figures; "" if none is."""
    if is_busy_for_nothing(memory.boards) is not True or not memory.boards.at_floor:
        return ""
    board = memory.boards.at_floor[0]
    return f"{board.name} is busy at {board.watts:.0f} W, its floor" if board.watts is not None else ""
