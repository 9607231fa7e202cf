"""What is remembered of a server that has answered: what it produced, who waits for it, and where its workers stand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from hangguard.facts import (
    NOT_ASKED,
    Port,
    Reply,
    Sample,
    Serving,
    Stack,
    StackFrame,
    Unseen,
)
from hangguard.judge.at_work import Look, below_workers, is_new, look_of, used_cpu, what_works, workers_of
from hangguard.judge.idle import is_idle
from hangguard.judge.kin import BEGAN, Kin, read_kin
from hangguard.judge.rules import Rules
from hangguard.judge.sites import main_thread, site_of_frames

Demand: TypeAlias = Literal["", "weak", "strong"]
"""weak: clients are connected, and may be waiting; strong: the server itself counts requests, or a canary is open."""

FRESH = 15.0
"""Seconds for which counters, and the look at who is connected, stand for the present. The metrics are asked every
two seconds while requests are there, else every five, and a route may be late by the probe's deadline."""

WINDOW = 5.0
"""Seconds over which the workers are judged; the same as in a start."""

CANARY_EVERY, CANARY_AT_MOST = 60.0, 600.0
"""Seconds between two canaries; doubled after each good one, up to the second figure."""

KEPT_RATES = 8


@dataclass(frozen=True, slots=True)
class Stood:
    """Where the main thread of one worker has stood, unchanged, in all looks of this stretch."""

    pid: int
    started: int
    at: tuple[tuple[str, str], ...]
    """(function, file) of its frames, innermost first."""
    first_at: float
    last_at: float
    stack: Stack


@dataclass(frozen=True, slots=True)
class ServingMemory:
    """All of it. Times are monotonic."""

    now: float = 0.0
    produced_at: float = 0.0
    """When a token or an answer came last."""
    produced_by: str = ""
    worked_at: float = 0.0
    """When work that has not produced anything yet was seen last: a GPU at work, a compiler, bytes, news, quiet."""
    worked_by: str = ""
    demand: Demand = ""
    demand_by: str = ""
    demand_since: float | None = None
    requests_since: float | None = None
    """Since when the server has counted requests in flight."""
    gpu_unclear_at: float | None = None
    """When it could not be told last whether a GPU works for us."""
    counters: Serving | None = None
    """The newest numbers, however old."""
    rates: tuple[tuple[float, int], ...] = ()
    """(when, generated tokens so far), the last few."""
    clients: int | None = None
    clients_at: float = 0.0
    canary_since: float | None = None
    """Since when one has been open."""
    canary_ended_at: float | None = None
    canary_every: float = CANARY_EVERY
    looks: tuple[Look, ...] = ()
    active: tuple[int, ...] = ()
    """Pids of members that used CPU over the last window."""
    kin: Kin = Kin()
    """Who lives, and what kinds of processes began since it is ready."""
    stood: tuple[Stood, ...] = ()
    restless: tuple[int, ...] = ()
    """Pids of workers that stood somewhere else in the last look than in the one before it."""
    stacks_at: float | None = None
    stacks_unseen: str = ""
    asleep: frozenset[str] = frozenset()
    """Which of its lines (:attr:`QuietLine.begins`) have said that it sleeps, and were not taken back."""
    asleep_at: float = 0.0
    """When the last of them was read."""
    woke_at: float | None = None
    """When the last of them was taken back."""
    is_quiet: bool = False
    """Whether stillness is wanted now."""

    @property
    def moved_at(self) -> float:
        """When anything was produced or worked on last."""
        return max(self.produced_at, self.worked_at)

    @property
    def is_counted(self) -> bool:
        """Whether the server's own numbers say how many are waiting, now, and whether tokens come."""
        c = self.counters if self.is_fresh else None
        return c is not None and c.generated_tokens is not None and (c.running, c.waiting) != (None, None)

    @property
    def is_fresh(self) -> bool:
        """Whether the newest numbers stand for the present."""
        return self.counters is not None and self.now - self.counters.at <= FRESH

    @property
    def requests(self) -> int:
        """Requests in flight, as the server counts them; 0 where it does not, or no longer."""
        c = self.counters if self.is_fresh else None
        return (c.running or 0) + (c.waiting or 0) if c is not None else 0

    @property
    def tokens_a_second(self) -> float | None:
        """Generated tokens a second over the last few numbers; ``None``: not counted."""
        if len(self.rates) < 2:
            return None
        (t0, n0), (t1, n1) = self.rates[0], self.rates[-1]
        return (n1 - n0) / (t1 - t0) if t1 > t0 else None


def note_serving(
    memory: ServingMemory,
    sample: Sample,
    rules: Rules,
    *,
    ready_at: float,
    works: str = "",
    may_work: bool = False,
    news: bool = False,
) -> ServingMemory:
    """Return the memory after one more sample.

    ``works`` names a GPU that is at work, with its watts ("": none is seen to be), ``may_work`` says whether one may be
    that cannot be told, and ``news`` whether the log had any.
    """
    memory = replace(memory, now=sample.t, produced_at=max(memory.produced_at, ready_at))
    memory = _note_sleep(memory, sample, rules)
    memory = _note_counters(memory, sample)
    memory = _note_answers(memory, sample)
    memory = _note_clients(memory, sample)
    memory = _note_members(memory, sample, rules)
    if may_work:
        memory = replace(memory, gpu_unclear_at=sample.t)
    if works or news:
        memory = _worked(memory, sample.t, works or "log")
    quiet = sample.quiet_until is not None and sample.quiet_until > sample.t
    quiet = quiet or bool(memory.asleep) or bool(memory.counters and memory.counters.is_asleep)
    memory = replace(memory, is_quiet=quiet)
    if quiet:
        memory = _worked(memory, sample.t, "quiet, as asked for")
    memory = _note_stacks(memory, sample, rules)
    return _note_demand(memory, sample.t)


def _note_sleep(memory: ServingMemory, sample: Sample, rules: Rules) -> ServingMemory:
    if isinstance(sample.log, Unseen) or not rules.quiet_lines:
        return memory
    asleep = set(memory.asleep)
    for line in sample.log.lines:
        for quiet in rules.quiet_lines:
            if re.search(quiet.begins, line):
                asleep.add(quiet.begins)
            elif re.search(quiet.ends, line):
                asleep.discard(quiet.begins)
    if asleep - memory.asleep:
        memory = replace(memory, asleep_at=sample.t)
    if memory.asleep and not asleep:
        memory = replace(memory, woke_at=sample.t)
    return replace(memory, asleep=frozenset(asleep))


# ------------------------------------------------------------------------------------ what came out


def _note_counters(memory: ServingMemory, sample: Sample) -> ServingMemory:
    now, before = sample.serving, memory.counters
    if isinstance(now, Unseen) or (before is not None and now.at <= before.at):
        return memory
    if before is not None:
        for name in ("generated_tokens", "prompt_tokens"):
            old, new = getattr(before, name), getattr(now, name)
            if old is not None and new is not None and new != old:
                memory = _produced(memory, min(now.at, sample.t), "tokens")
                if before.at > memory.asleep_at:  # the line that took it back was missed
                    memory = replace(memory, asleep=frozenset())
    rates = memory.rates
    if now.generated_tokens is not None:
        rates = (*rates, (now.at, now.generated_tokens))[-KEPT_RATES:]
        rates = tuple(r for r in rates if r[0] > now.at - FRESH)
    return replace(memory, counters=now, rates=rates)


def _note_answers(memory: ServingMemory, sample: Sample) -> ServingMemory:
    if isinstance(sample.answer, Reply) and sample.answer.state == "good":
        memory = _produced(memory, sample.answer.since, "an answer")
    canary = sample.canary
    if isinstance(canary, Unseen) or canary.state == "not-asked":
        return memory
    if canary.state == "waiting":
        return replace(memory, canary_since=canary.since)
    ended = memory.canary_ended_at is None or canary.since > memory.canary_ended_at
    memory = replace(memory, canary_since=None)
    if not ended:
        return memory
    memory = replace(memory, canary_ended_at=canary.since)
    if not _is_alive(canary):
        return memory
    every = min(2 * memory.canary_every, CANARY_AT_MOST)
    return _produced(replace(memory, canary_every=every), canary.since, "an answer")


def _is_alive(reply: Reply) -> bool:
    """A refusal is an answer; a 5xx is what a front end says whose engine is dead, busy or starting."""
    return reply.state == "good" or (reply.state == "bad" and reply.status is not None and reply.status < 500)


def _produced(memory: ServingMemory, at: float, by: str) -> ServingMemory:
    if at <= memory.produced_at:
        return memory
    return replace(memory, produced_at=at, produced_by=by, stood=())


def _worked(memory: ServingMemory, t: float, by: str) -> ServingMemory:
    return replace(memory, worked_at=t, worked_by=by, stood=())


# --------------------------------------------------------------------------------------- who waits


def _note_clients(memory: ServingMemory, sample: Sample) -> ServingMemory:
    if isinstance(sample.port, Port) and not isinstance(sample.port.clients, Unseen):
        return replace(memory, clients=sample.port.clients, clients_at=sample.t)
    return memory


def _note_demand(memory: ServingMemory, t: float) -> ServingMemory:
    demand, by = _demand(memory, t)
    since = memory.demand_since if demand and memory.demand else t
    requests_since = (memory.requests_since if memory.requests_since is not None else t) if memory.requests else None
    return replace(
        memory,
        demand=demand,
        demand_by=by,
        demand_since=since if demand else None,
        requests_since=requests_since,
    )


def _requests(number: int) -> str:
    return f"{number} request{' is' if number == 1 else 's are'}"


def _demand(memory: ServingMemory, t: float) -> tuple[Demand, str]:
    c = memory.counters
    if c is not None and memory.requests:
        return "strong", f"{_requests(c.running or 0)} running and {c.waiting or 0} waiting"
    if memory.canary_since is not None:
        return "strong", "a test request is open"
    if memory.clients and t - memory.clients_at <= FRESH:
        return "weak", f"{memory.clients} client{'s are' if memory.clients > 1 else ' is'} connected"
    return "", ""


# ------------------------------------------------------------------------------------- the members


def _note_members(memory: ServingMemory, sample: Sample, rules: Rules) -> ServingMemory:
    if isinstance(sample.tree, Unseen):
        return _worked(replace(memory, looks=(), active=(), kin=Kin()), sample.t, "unseen processes")
    tree, t = sample.tree, sample.t
    look = look_of(tree, t)
    if memory.looks and t - memory.looks[-1].t > 2 * WINDOW + 2.0:
        memory = _worked(replace(memory, looks=()), t, "a gap of the watcher itself")
    recent = tuple(k for k in memory.looks if k.t > t - WINDOW - 0.5)
    looks = (*(recent or memory.looks[-1:]), look)
    earlier = looks[0]
    active = tuple(p.pid for p in tree.members if used_cpu(p, earlier, t))
    below, known = below_workers(tree, rules), memory.looks[-1:]
    kin, news = read_kin(memory.kin, tree)
    memory = replace(memory, looks=looks, active=active, kin=kin)
    if news == BEGAN or any(is_new(p, known) for p in tree.members if p.pid in below):
        memory = _worked(memory, t, BEGAN)
    by = next((what for p in tree.members if (what := what_works(p, earlier, t, rules, active, below))), "")
    return _worked(memory, t, by) if by else memory


# -------------------------------------------------------------------------------------- the stacks


def _note_stacks(memory: ServingMemory, sample: Sample, rules: Rules) -> ServingMemory:
    if isinstance(sample.stacks, Unseen):
        asked = sample.stacks != NOT_ASKED
        return replace(memory, stacks_unseen=sample.stacks.reason, stacks_at=sample.t) if asked else memory
    if isinstance(sample.tree, Unseen):
        return memory
    wanted = {p.identity for p in workers_of(sample.tree, rules)}
    before = {(s.pid, s.started): s for s in memory.stood}
    stood, missing, restless, went_on = [], [], [], False
    for stack in sample.stacks:
        if (stack.pid, stack.started) not in wanted:
            continue
        frames = frames_of(stack)
        if not frames:
            missing.append(f"{stack.title}: {_why(stack)}")
            continue
        at = tuple((f.function, f.file) for f in frames)
        old = before.get((stack.pid, stack.started))
        first_at = old.first_at if old is not None and old.at == at else sample.t
        if old is not None and old.at != at:
            restless.append(stack.pid)
            waited = _waits(frames, rules) and _waits(frames_of(old.stack), rules)
            went_on = went_on or (stack.pid in memory.active and not waited)
        stood.append(Stood(stack.pid, stack.started, at, first_at, sample.t, stack))
    if went_on:
        memory = _worked(memory, sample.t, "stacks")
    return replace(
        memory,
        stood=tuple(stood),
        restless=tuple(restless),
        stacks_at=sample.t,
        stacks_unseen="; ".join(missing[:3]),
    )


def _waits(frames: tuple[StackFrame, ...], rules: Rules) -> bool:
    """Whether that is a place of waiting: between two of those a worker that polls comes and goes."""
    site = site_of_frames(frames, rules.wait_sites)
    return is_idle(frames, rules.idle_places) or (site is not None and site.waits_for != "compile")


def frames_of(stack: Stack) -> tuple[StackFrame, ...]:
    """Return the frames of its main thread, innermost first; none where they could not be seen."""
    main = None if isinstance(stack.threads, Unseen) else main_thread(stack.threads)
    return main.frames if main is not None else ()


def _why(stack: Stack) -> str:
    return stack.threads.reason if isinstance(stack.threads, Unseen) else "no frames"
