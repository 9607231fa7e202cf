"""Rules over a start that has not answered: what its stillness and its activity mean."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from hangguard.facts import Confidence, Moving, Port, Process, Sample, Stuck, Tree, Unclear, Unseen, Verdict
from hangguard.judge import patience
from hangguard.judge.boards import is_busy_for_nothing
from hangguard.judge.headline import headline
from hangguard.judge.memory import Memory
from hangguard.judge.progress import BUSY_LOOKS, WINDOW, active_members, hot_members, looks_at_threads
from hangguard.judge.ranks import suspects
from hangguard.judge.rules import TRACKERS, Rules, matches
from hangguard.judge.sites import WITHIN, Found, wait_of
from hangguard.judge.stillness import all_wait_for_work, may_wake_by_itself, movers, phase_by_stacks, working_members
from hangguard.judge.telling import judged, numbers, phase_of
from hangguard.judge.waits import is_in_vfork, looked_at, waits, waits_for_ours

SILENT_BYTES = 200
"""A log that cannot be read was silent if the whole tree wrote less than this since anything moved."""

STOPPED_BESIDE_BUSY = 30.0
"""Seconds without product for which a stopped member's neighbours may be busy: a vLLM worker went on compiling for
25 s after its engine core was stopped."""


def starting(memory: Memory, sample: Sample) -> Verdict:
    """Decide over a start that has not answered."""
    return (
        _stopped(memory, sample)
        or waits(memory, sample)
        or _idle(memory, sample)
        or _burning(memory, sample)
        or _going_on(memory, sample)
    )


# ------------------------------------------------------------------------------------------------ stopped


def _stopped(memory: Memory, sample: Sample) -> Verdict | None:
    """A member that a signal or a debugger keeps from running, over a whole window, while nothing else progresses."""
    enough = patience.short(memory.rules, phase_of(memory))
    if memory.unproductive_for < enough or memory.outside.is_quiet(sample.t):
        return None
    if memory.idle_for < enough and memory.unproductive_for < STOPPED_BESIDE_BUSY:
        return None
    held = _held(memory, sample, enough)
    return _stopped_by(memory, sample, held) if held and not _blind(memory, sample, threads=False) else None


def _held(memory: Memory, sample: Sample, enough: float) -> list[tuple[Process, str, float]]:
    """Return the needed members that a signal or a debugger has kept from running for so long: who, state, since."""
    if memory.tree is None:
        return []
    needed = {p.identity: p for p in _depended_on(memory.tree, memory.rules, memory.root)}
    stopped = memory.outside.stopped
    return [(needed[who], state, at) for who, state, at in stopped if who in needed and sample.t - at >= enough]


def _stopped_by(memory: Memory, sample: Sample, held: list[tuple[Process, str, float]]) -> Stuck:
    process, state, at = held[0]
    cause = "stopped by a signal (SIGSTOP, or a terminal's), and SIGCONT may cure it"
    if state == "t":
        cause = "held by a debugger (ptrace stop); letting it go, or SIGCONT, may cure it"
    why = f"{process.title[:80]} ({process.pid}) is in state {state} since {sample.t - at:.0f} s: {cause}"
    return _stuck(memory, sample, "stopped", why, stopped=tuple(p.identity for p, _, _ in held))


def _burning(memory: Memory, sample: Sample) -> Verdict | None:
    """CPU or GPU is burnt for nothing; where a member is stopped meanwhile, that is what the others burn it for."""
    found = _hot(memory, sample) or _busy(memory, sample)
    held = _held(memory, sample, WINDOW) if found else []
    return _stopped_by(memory, sample, held) if held else found


def _depended_on(tree: Tree, rules: Rules, root: tuple[int, int] | None) -> tuple[Process, ...]:
    able = tuple(p for p in tree.members if not matches(TRACKERS, p.title))
    if not any(matches(rules.workers, p.title) for p in able):
        return able
    return tuple(p for p in able if p.identity == root or matches((*rules.workers, *rules.front_end), p.title))


# --------------------------------------------------------------------------------------------------- idle


def _idle(memory: Memory, sample: Sample) -> Verdict | None:
    """A stretch in which nothing progressed and nothing was active."""
    phase = phase_of(memory)
    if memory.idle_for < patience.short(memory.rules, phase) or memory.tree is None or not memory.tree.members:
        return None
    if blind := _blind(memory, sample):
        return judged(Unclear, memory, sample, f"nothing moves, and {blind}", numbers=numbers(memory))
    doubt = _doubt(memory, sample, movers(memory.tree, memory.rules))
    if not doubt:
        return _stuck(memory, sample, "idle", "two equal stack samples of every member, all idle")
    if memory.idle_for >= patience.long(memory.rules, phase):
        why = f"nothing moved at all; judged with the long patience because {doubt}"
        return _stuck(memory, sample, "idle", why, confidence="medium")
    return judged(Unclear, memory, sample, f"nothing moves, but {doubt}", numbers=numbers(memory))


def _blind(memory: Memory, sample: Sample, *, threads: bool = True) -> str:
    """Return what is unseen without which nothing is ever called stuck; "" if all of it is seen."""
    if isinstance(sample.log, Unseen) and not _wrote_nothing(memory):
        return f"the log cannot be seen ({sample.log.reason})"
    if isinstance(sample.answer, Unseen) and _may_be_ready(memory, sample):
        return f"whether it answers cannot be seen ({sample.answer.reason}): ready and unasked it would look just so"
    if threads and len(looks_at_threads(memory.window)) < BUSY_LOOKS:
        return "the states of the threads cannot be seen"
    if memory.tree is not None and any(p.read_chars is None for p in memory.tree.members):
        return "the bytes that the processes read cannot be seen"
    return ""


def _may_be_ready(memory: Memory, sample: Sample) -> bool:
    """Whether a start whose answers are unseen may be over: somebody may listen, and no worker stands in a start."""
    if isinstance(sample.port, Port) and sample.port.listener is None:
        return False
    return memory.tree is None or phase_by_stacks(
        looked_at(memory), working_members(memory.tree, memory.rules), memory.rules
    ) in {None, "serving"}


def _wrote_nothing(memory: Memory) -> bool:
    """Whether the members wrote too little since anything moved for there to be a line of the log in it."""
    if memory.tree is None or memory.written_before is None:
        return False
    seen = all(p.written_chars is not None for p in memory.tree.members)
    return seen and memory.tree.written_chars - memory.written_before < SILENT_BYTES


def _doubt(memory: Memory, sample: Sample, able: tuple[Process, ...]) -> str:
    """Return why the short patience may not be used; "" if it may."""
    if memory.agreement is None:
        return memory.stacks_unseen or "no stacks were taken yet"
    if not memory.agreement.holds_since(memory.last_movement_at):
        return memory.stacks_unseen or "the stacks were not yet equal twice"
    if isinstance(sample.gpus, Unseen):
        return f"the GPUs cannot be seen ({sample.gpus.reason})"
    if memory.boards.is_busy is None:
        return f"GPU utilisation cannot be seen ({'; '.join(memory.boards.unseen)})"
    if _waits_for_a_question(memory, sample):
        return "somebody listens, its workers wait for work, and a question of ours may still be on its way"
    return may_wake_by_itself(memory.agreement.stacks, able, memory.rules, ours=waits_for_ours(memory))


def _waits_for_a_question(memory: Memory, sample: Sample) -> bool:
    """Whether the server may be up and unasked: on a starved machine the watcher is late as well, by many seconds."""
    listens = isinstance(sample.port, Port) and sample.port.listener is not None
    return listens and memory.tree is not None and all_wait_for_work(looked_at(memory), memory.tree, memory.rules)


# ---------------------------------------------------------------------------------------------------- hot


def _hot(memory: Memory, sample: Sample) -> Verdict | None:
    """CPU is burnt and nothing is produced, with stacks that do not change."""
    if memory.tree is None or memory.agreement is None or memory.boards.is_busy:
        return None
    burning = hot_members(memory.recent)
    if not burning or _blind(memory, sample, threads=False):
        return None
    phase, idle_gpus = phase_of(memory), memory.boards.is_busy is False
    sites = _sites(memory)
    if memory.rules.idle_spins and all(_is(sites.get(who), "work") for who in burning):
        return None  # it asks for work as fast as it can, which is how this engine waits
    known = _spins_in_wait(memory, frozenset(active_members(memory.recent)), sites, idle_gpus=idle_gpus)
    agreed = memory.agreement.holds_since(memory.progress_at)
    if known and idle_gpus and agreed and memory.unproductive_for >= patience.busy(memory.rules, phase):
        return _stuck(memory, sample, "hot", f"CPU is burnt and nothing is produced: {known}", hot=burning)
    if not (idle_gpus or known) or not _agrees_for_long(memory, sites):
        return None
    why = known or "no place is known in which that is a wait; judged with the long patience"
    same = f"every stack sample of {memory.unproductive_for:.0f} s is the same"
    why = f"CPU is burnt, nothing is produced, and {same}: {why}"
    return _stuck(memory, sample, "hot", why, confidence="medium", hot=burning)


def _sites(memory: Memory) -> dict[tuple[int, int], Found]:
    found = {(s.pid, s.started): wait_of(s, memory.rules) for s in looked_at(memory)}
    return {who: site for who, site in found.items() if site is not None}


def _is(found: Found | None, *waits_for: str) -> bool:
    return found is not None and found.waits_for in waits_for


def _spins_in_wait(
    memory: Memory,
    active: frozenset[tuple[int, int]],
    sites: dict[tuple[int, int], Found],
    *,
    idle_gpus: bool,
) -> str:
    """Return who spins in a wait for whom, if every member that could move the launch waits; "" if one may work."""
    assert memory.tree is not None
    spinning = (*WITHIN, "kernel") if idle_gpus else tuple(WITHIN)
    if any(not _is(sites.get(who), *spinning, "work") for who in active):
        return ""
    idle = tuple(p for p in movers(memory.tree, memory.rules) if p.identity not in active)
    if may_wake_by_itself(looked_at(memory), idle, memory.rules, ours=waits_for_ours(memory)):
        return ""
    titles = {p.identity: f"{p.title[:60]} ({p.pid})" for p in memory.tree.members}
    return next((f"{titles.get(who, '')} spins in {sites[who]}" for who in active if _is(sites[who], *spinning)), "")


def _agrees_for_long(memory: Memory, sites: dict[tuple[int, int], Found]) -> bool:
    """Whether all stack samples of the long budget were the same, in no place in which that is work."""
    agreement = memory.agreement
    if agreement is None or not agreement.complete or any(_is(s, "lock", "download") for s in sites.values()):
        return False
    enough = patience.hot(memory.rules, phase_of(memory))
    if any(_is(site, "compile") for site in sites.values()):
        enough = max(enough, patience.hot(memory.rules, "jit-compile"))
    return len(agreement.looks) >= patience.HOT_LOOKS and agreement.last_at - agreement.first_at >= enough


# --------------------------------------------------------------------------------------------------- busy


def _busy(memory: Memory, sample: Sample) -> Verdict | None:
    """A kernel that never ends: utilisation at its top over the whole window, power at the floor, nothing produced."""
    phase = phase_of(memory)
    if memory.tree is None or memory.agreement is None or not memory.boards.spinning:
        return None
    if memory.unproductive_for < patience.busy(memory.rules, phase) or _blind(memory, sample, threads=False):
        return None
    for_nothing = is_busy_for_nothing(memory.boards)
    if for_nothing is False:
        return None
    sites = _sites(memory)
    at_work = [who for who in active_members(memory.recent) if not _is(sites.get(who), *WITHIN, "kernel", "work")]
    names = ", ".join(board.name for board in memory.boards.spinning)
    agreed = memory.agreement.holds_since(memory.progress_at)
    if for_nothing and agreed and not at_work:
        why = f"kernels run all the time on {names} at the power of an idle context, and nothing is produced"
        return _stuck(memory, sample, "busy", why)
    if not _agrees_for_long(memory, sites):
        return None
    but = "the host is busy as well" if for_nothing else "their power tells nothing, as the floor was not learned"
    why = f"kernels run all the time on {names}, every stack sample is the same, nothing is produced ({but})"
    return _stuck(memory, sample, "busy", why, confidence="medium")


# ----------------------------------------------------------------------------------------------- going on


def _going_on(memory: Memory, sample: Sample) -> Verdict:
    """Anything else: it moves, or nobody can tell."""
    if memory.unproductive_for < patience.UNPROVEN:
        return replace(judged(Moving, memory, sample, headline(memory)), phase=memory.place.phase)
    busy = "a wait in vfork for a child" if is_in_vfork(memory) else memory.activity_by or "nothing"
    why = f"{busy}, but nothing was produced"
    return judged(Unclear, memory, sample, f"{why}; {_what_it_would_take(memory, sample)}", numbers=numbers(memory))


def _what_it_would_take(memory: Memory, sample: Sample) -> str:
    """Say why a busy start that produces nothing is not called stuck."""
    if blind := _blind(memory, sample, threads=False):
        return blind
    if memory.agreement is None or not memory.agreement.complete:
        return memory.stacks_unseen or "stacks of every member would tell"
    if isinstance(sample.gpus, Unseen):
        return f"the GPUs cannot be seen ({sample.gpus.reason})"
    if memory.boards.unseen:
        return "; ".join(memory.boards.unseen)
    if memory.boards.is_busy:
        return "a GPU is busy, and its power is neither that of an idle context nor clearly that of work"
    return "no stack stands where that is known to be a wait"


def _stuck(
    memory: Memory,
    sample: Sample,
    kind: Literal["idle", "hot", "busy", "stopped"],
    why: str,
    *,
    confidence: Confidence = "high",
    stopped: tuple[tuple[int, int], ...] = (),
    hot: frozenset[tuple[int, int]] = frozenset(),
) -> Stuck:
    assert memory.tree is not None
    still = memory.idle_for if kind == "idle" else memory.unproductive_for
    found = suspects(memory.tree, memory.rules, looked_at(memory), said=memory.said, stopped=stopped, hot=hot)
    verdict = judged(Stuck, memory, sample, why, kind, confidence=confidence, numbers=numbers(memory))
    return replace(verdict, still_for=still, suspects=found)
