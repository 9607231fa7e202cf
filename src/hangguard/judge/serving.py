"""A server that has answered: ready, hung while somebody waits, stopped, or quiet because it was asked to be.

A ready idle server and a deadlock are the same picture (0 % CPU, 0 % GPU, a silent log). What tells them apart is
somebody who waits: the server's own counters where they can tell, else connected clients and a request of ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

from hangguard.facts import (
    Confidence,
    Judged,
    Measure,
    Process,
    Ready,
    Sample,
    Serving,
    Stuck,
    Suspect,
    Unclear,
    Unseen,
    Verdict,
    Waiting,
)
from hangguard.judge.boards import works
from hangguard.judge.idle import is_idle
from hangguard.judge.memory import Memory
from hangguard.judge.ranks import rank_of
from hangguard.judge.served import WINDOW, Stood, frames_of
from hangguard.judge.silence import (
    STOOD_HOT,
    STOOD_LONG,
    all_idle,
    awaited_rank,
    busy_words,
    canary_open_for,
    counts_others,
    culprits_of,
    doubt,
    gpu_may_work,
    is_at_work,
    outside_of,
    silent_for,
    wait_for_peer,
    who_may_work,
    workers,
)
from hangguard.judge.sites import WITHIN
from hangguard.judge.telling import judged

V = TypeVar("V", bound=Judged)

SILENT_FOR = 20.0
"""Seconds in which somebody waits, nothing comes out and nothing works, before a hang is called. The longest healthy
silence with requests in flight that was measured is the JIT compile of a first request (over 8 s, with compilers)."""

SILENT_WITHOUT_STACKS = 120.0
"""The same where the stacks are unseen: with this grace false restarts fell from 8 a day to none (gonka#1421)."""

SILENT_WITHOUT_GPUS = 300.0
"""The same where it cannot be told whether a GPU works. A prefill of minutes looks like a hang then: SGLang's own
watchdog waits as long."""

BUSY_WITHOUT_STACKS = 60.0
"""The same where a GPU is busy at floor power, which no prefill is."""

STOPPED_FOR = 10.0
"""Seconds for which a worker must have been stopped, in every look: as in a start."""

CANARY_OPEN = 20.0
"""Seconds without an answer after which a canary counts, where nothing works."""

CANARY_WITH_STACKS = 10.0
"""The same where a worker stands still outside the places in which it waits for work."""


UNASKED = "unasked"
"""The kind of an unclear verdict over a server that nobody is connected to: it has no budget."""


def judge_serving(memory: Memory, sample: Sample) -> Verdict | None:
    """Return the verdict over a server that has answered; ``None``: it has not yet."""
    if memory.ready_at is None:
        return None
    if sample.exit is not None and not (sample.exit.code == 0 and sample.exit.at < memory.ready_at):
        return _ready(memory, sample, "the launched process has ended; its members are leaving")
    if isinstance(sample.tree, Unseen):
        return _ready(memory, sample, f"it has answered; now its processes cannot be seen ({sample.tree.reason})")
    if memory.outside.is_frozen:
        return _say(Waiting, memory, sample, "its control group is frozen: nothing in it can run until thawed", "host")
    return _quiet(memory, sample) or _stopped(memory, sample) or _hung(memory, sample) or _going_on(memory, sample)


# ------------------------------------------------------------------------------------- wanted stillness


def _quiet(memory: Memory, sample: Sample) -> Waiting | None:
    """Nothing is called stuck in a time in which stillness is wanted; after it the count begins anew."""
    if sample.quiet_until is not None and sample.quiet_until > sample.t:
        left = sample.quiet_until - sample.t
        return _say(Waiting, memory, sample, f"quiet was asked for, for {left:.0f} s more", "quiet")
    if memory.serving.is_quiet:
        return _say(Waiting, memory, sample, "it was put to sleep or paused, and says so", "quiet")
    return None


# ---------------------------------------------------------------------------------------------- stopped


def _stopped(memory: Memory, sample: Sample) -> Stuck | None:
    """A worker that is stopped (SIGSTOP, a debugger) answers nobody, whether somebody waits yet or not."""
    since = {identity: at for identity, _, at in memory.outside.stopped if sample.t - at >= STOPPED_FOR}
    halted = [p for p in workers(memory) if p.identity in since]
    if not halted:
        return None
    named = ", ".join(f"{p.title[:40]} ({p.pid})" for p in halted[:4])
    how = "held by a debugger" if halted[0].state == "t" else "stopped; SIGCONT would let it go on"
    verdict = _say(Stuck, memory, sample, f"{named}: {how}", "stopped")
    suspects = tuple(
        Suspect(pid=p.pid, title=p.title, rank=rank_of(p.title), note=f"state {p.state}") for p in halted[:16]
    )
    return replace(verdict, still_for=sample.t - min(since[p.identity] for p in halted), suspects=suspects)


# ------------------------------------------------------------------------------------------------- hung


def _hung(memory: Memory, sample: Sample) -> Verdict | None:
    """Decide over a stretch in which somebody waits, nothing comes out and nothing is seen to work."""
    served, silent = memory.serving, silent_for(memory)
    if not served.demand or silent < SILENT_FOR:
        return None
    asked = bool(served.requests) or canary_open_for(memory) >= CANARY_WITH_STACKS
    if asked and (outside := outside_of(memory)):
        kind = "download" if outside.waits_for == "download" else "lock"
        return _say(Waiting, memory, sample, f"a worker waits for something outside: {outside}", kind)
    if proof := _proof(memory, silent, asked=asked):
        why, confidence, first = proof
        why = f"{served.demand_by}, nothing came out for {silent:.0f} s, and {why}"
        return _stuck(memory, sample, why, confidence, first or culprits_of(memory))
    if unanswered := _unanswered(memory, sample):
        return unanswered
    if not served.requests:
        return (
            None  # an open connection is no request, and one of ours may stand in a long queue: idle, for all we know
        )
    may_work = doubt(memory)
    if may_work and (silent < SILENT_WITHOUT_STACKS or is_at_work(memory)):
        return None
    lacks = may_work or served.stacks_unseen or "no worker was seen to stand still outside its idle loop"
    why = f"{served.demand_by}, and nothing came out for {silent:.0f} s, but {lacks}"
    return _say(Unclear, memory, sample, why, confidence="low")


def _unanswered(memory: Memory, sample: Sample) -> Unclear | None:
    """A test request that nobody takes up is no proof of a hang: so does a server stand that somebody has paused."""
    served, canary = memory.serving, canary_open_for(memory)
    if canary < CANARY_OPEN or counts_others(memory) or not all_idle(memory):
        return None
    why = (
        f"a test request was not answered for {canary:.0f} s, but every worker waits for work, and no other request is "
        "counted: it was paused, or requests get lost on their way to it"
    )
    return _say(Unclear, memory, sample, why, UNASKED if served.clients == 0 else "", "low")


def _proof(memory: Memory, silent: float, *, asked: bool) -> tuple[str, Confidence, tuple[Stood, ...]] | None:
    """Return what proves the hang, in words, how sure that is, and whom it goes by, if by anybody."""
    served, canary = memory.serving, canary_open_for(memory)
    blind = gpu_may_work(memory)
    if asked and not blind and not who_may_work(memory) and (culprits := culprits_of(memory)):
        return _where(memory, culprits[0]), "high", culprits
    if hot := _hot(memory, silent, blind=blind):
        return hot[0], "medium", hot[1]
    if (
        served.requests
        and blind
        and silent >= SILENT_WITHOUT_GPUS
        and (culprits := culprits_of(memory, at_least=STOOD_LONG))
    ):
        return f"{_where(memory, culprits[0])} (whether a GPU works cannot be told)", "medium", culprits
    if served.requests and silent >= _enough_when_busy(memory) and (busy := busy_words(memory)):
        return busy, "medium", ()
    if doubt(memory):
        return None
    if canary >= CANARY_OPEN and (counts_others(memory) or not all_idle(memory)):
        return f"a test request was not answered for {canary:.0f} s, while nothing works", "medium", ()
    if served.requests and silent >= SILENT_WITHOUT_STACKS and (not served.stood or served.stacks_unseen):
        return "nothing works; judged with the long patience because the stacks were unseen", "medium", ()
    return None


def _enough_when_busy(memory: Memory) -> float:
    """A kernel that waits for the other ranks draws floor power as well, while one of them compiles."""
    if not who_may_work(memory):
        return BUSY_WITHOUT_STACKS
    return float("inf") if memory.serving.stood else SILENT_WITHOUT_STACKS


def _hot(memory: Memory, silent: float, *, blind: bool) -> tuple[str, tuple[Stood, ...]] | None:
    """Where a worker burns its core in one place beside GPUs that do nothing, and who.

    Without GPUs that may be the work, unless all other ranks have done theirs and wait for it.
    """
    if blind or not memory.serving.requests or silent < STOOD_HOT:
        return None
    culprits = culprits_of(memory, at_least=STOOD_HOT)
    if memory.boards.boards:
        return (f"{_where(memory, culprits[0])}, with a hot core, while no GPU works", culprits) if culprits else None
    awaited = awaited_rank(memory, STOOD_HOT)
    if awaited is None:
        return None
    others = (awaited, *(s for s in culprits if s is not awaited))
    return f"{_where(memory, awaited)}, with a hot core, while all other ranks wait for it in a collective", others


def _where(memory: Memory, stood: Stood) -> str:
    busy = busy_words(memory)
    where = f"{stood.stack.title[:40]} ({stood.pid}) stands in {stood.at[0][0]}, outside its idle loop"
    return f"{busy}, and {where}" if busy else where


def _stuck(memory: Memory, sample: Sample, why: str, confidence: Confidence, culprits: tuple[Stood, ...]) -> Stuck:
    verdict = _say(Stuck, memory, sample, why, "serving", confidence)
    return replace(verdict, suspects=_suspects(memory, culprits))


def _suspects(memory: Memory, culprits: tuple[Stood, ...]) -> tuple[Suspect, ...]:
    """Return the workers, those first that stand outside their idle loop, and of them those that wait for nobody."""
    order = {(s.pid, s.started): n for n, s in enumerate(culprits)}
    everyone = sorted(workers(memory), key=lambda p: order.get(p.identity, len(order)))
    stood = {(s.pid, s.started): s for s in memory.serving.stood}
    return tuple(_suspect(p, stood.get(p.identity), memory, culprit=p.identity in order) for p in everyone[:16])


def _suspect(process: Process, stood: Stood | None, memory: Memory, *, culprit: bool) -> Suspect:
    frames = frames_of(stood.stack) if stood is not None else ()
    at = tuple(f"{f.function} ({f.file.rsplit('/', 1)[-1]}:{f.line})" for f in frames[:8])
    idle = bool(frames) and is_idle(frames, memory.rules.idle_places)
    waits = wait_for_peer(memory, stood) if culprit and stood is not None else None
    note = "outside its idle loop" if culprit else "waits for work" if idle else ""
    if waits is not None and waits.waits_for in WITHIN:
        note = f"waits for a peer in {waits.frame.function} ({waits.frame.file.rsplit('/', 1)[-1]})"
    return Suspect(pid=process.pid, title=process.title, rank=rank_of(process.title), at=at, note=note)


# -------------------------------------------------------------------------------------------- healthy


def _going_on(memory: Memory, sample: Sample) -> Ready:
    served, silent = memory.serving, silent_for(memory)
    rate = served.tokens_a_second
    tokens = f", {rate:.0f} tokens/s" if rate else ""
    requests = f"{served.requests} request{'s' if served.requests > 1 else ''}" if served.requests else ""
    if works(memory.boards) is True:
        board = memory.boards.working[0]
        watts = f"{board.name} at {board.watts:.0f} W" if board.watts is not None else f"{board.name} at work"
        what = ("serving: " if rate else "prefill: ") + (f"{requests}, " if requests else "")
        return _ready(memory, sample, f"{what}{watts}{tokens}")
    if requests and served.is_counted:
        still = f", no token for {silent:.0f} s" if not rate and silent >= WINDOW else ""
        return _ready(memory, sample, f"serving: {requests}{tokens}{still}", "high" if silent < SILENT_FOR else "low")
    if memory.ready_by_guess:
        return _ready(memory, sample, memory.ready_by_guess, "low")
    if served.demand:
        return _ready(memory, sample, f"idle, as far as it can be told: {served.demand_by}")
    return _ready(memory, sample, "idle: nobody asks")


def _ready(memory: Memory, sample: Sample, why: str, confidence: Confidence = "high") -> Ready:
    return replace(_say(Ready, memory, sample, why, confidence=confidence), still_for=0.0)


def _say(make: type[V], memory: Memory, sample: Sample, why: str, kind: str = "", confidence: Confidence = "high") -> V:
    verdict = judged(make, memory, sample, why, kind, numbers=_numbers(memory), confidence=confidence)
    moved = memory.serving.produced_by or verdict.moved
    return replace(verdict, phase="serving", still_for=silent_for(memory), moved=moved)


def _numbers(memory: Memory) -> tuple[Measure, ...]:
    served = memory.serving
    c = served.counters or Serving()
    counted = (
        ("requests running", c.running),
        ("requests waiting", c.waiting),
        ("tokens generated", c.generated_tokens),
        ("clients", served.clients),
    )
    found = [Measure(name, float(value)) for name, value in counted if value is not None]
    found.append(Measure("nothing came out for", max(0.0, memory.now - served.produced_at), "s"))
    if served.canary_since is not None:
        found.append(Measure("test request open for", canary_open_for(memory), "s"))
    for board in memory.boards.boards:
        found += [Measure(f"{board.name} power", board.watts, "W")] if board.watts is not None else []
        found += [Measure(f"{board.name} utilisation", board.percent, "%")] if board.percent is not None else []
    return tuple(found)
