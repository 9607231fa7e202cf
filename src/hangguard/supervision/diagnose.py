"""One look at a server that hangs right now, or does not: nothing of it is touched, nothing is written.

A quarter of a minute of samples, the dear sources from the start, and the same judgement as everywhere. No signal is
sent and nothing is stopped: stacks are read from memory. The server is asked its health route and its counters; a
completion is asked for only where the caller wants a canary.
"""

from __future__ import annotations

import re
import time
from dataclasses import replace

import anyio

from hangguard.engines.base import Engine
from hangguard.errors import BadLaunch
from hangguard.facts import (
    Ask,
    Broken,
    Exited,
    Limits,
    Moving,
    Ready,
    Sample,
    Stuck,
    Unclear,
    Unseen,
    Verdict,
)
from hangguard.judge import Memory, diagnose_memory, start, step
from hangguard.judge.boards import works
from hangguard.judge.silence import culprits_of
from hangguard.observe.lane import in_time
from hangguard.redact import redact, secrets_of
from hangguard.store import tail_of
from hangguard.supervision.advice import advice_for, missing_in, newest_stacks
from hangguard.supervision.evidence import without_bulk
from hangguard.supervision.found import FoundServer, choose
from hangguard.supervision.logfile import OpenLog
from hangguard.supervision.look import Look
from hangguard.supervision.watch import Watch, watching

WITHIN = 13.5
"""Seconds for the whole look: with the start of the program under 15."""
FAREWELL = 1.0
"""Of these, kept for the end of the log and for letting everything go."""
PERIOD = 1.0
APART = 3.0
"""Seconds between two looks at the dear sources, as the judgement wants its stacks apart."""
PROBE_WITHIN = 4.0
ENOUGH_MOVEMENT = 6.0
"""Seconds after which a server that still moves has moved enough."""
MOSTLY = 0.6
"""The share of a look in which nothing came out, from which on that is said. Not all: a server is ready to us only once
its health route has answered."""
TAIL_LINES = 60
_NUMBER = re.compile(r"\d+")


async def adiagnose(
    target: int | str | None = None,
    *,
    url: str | None = None,
    pid: int | None = None,
    engine: str | Engine | None = None,
    log: str | None = None,
    canary: bool = False,
    within: float = WITHIN,
) -> Look:
    """Look once at a server that runs already; see :func:`hangguard.diagnose`, its blocking twin."""
    began = time.monotonic()
    pid, url = _meant(target, pid, url)
    if not within > FAREWELL:
        raise BadLaunch(f"within is {within!r}", advice=f"It must be more than {FAREWELL:g} seconds")
    server = await choose(pid=pid, url=url, engine=engine)
    limits = Limits(ready_within=float("inf"), probe_within=min(PROBE_WITHIN, within / 3))
    async with watching(server, log=log, limits=limits) as watch:
        silent_before = watch.log.silent_for() if isinstance(watch.log, OpenLog) else None
        memory, samples = await _watch(watch, canary=canary, ends_at=began + within - FAREWELL)
        tail = await _tail(watch.log, within=FAREWELL / 2)
        silent_for = _silent_for(watch.log, silent_before, memory)
        log_path = watch.log.name if isinstance(watch.log, OpenLog) else None
    look = Look(
        server=server,
        verdict=_in_one_look(memory, samples, server),
        diagnosis=diagnose_memory(memory),
        stacks=newest_stacks(samples),
        samples=samples,
        missing=missing_in(samples, server),
        log_path=log_path,
        log_tail=tail,
        log_silent_for=silent_for,
        advice=(),
        seconds=samples[-1].t - samples[0].t if samples else 0.0,
    )
    return _without_secrets(replace(look, advice=advice_for(look, memory)))


def _without_secrets(look: Look) -> Look:
    """Secrets out of everything that was seen; the engine's table is ours, and full of words that look like some."""
    plain = redact(look, secrets_of(look.server.launch))
    return replace(plain, server=replace(plain.server, engine=look.server.engine))


def _meant(target: int | str | None, pid: int | None, url: str | None) -> tuple[int | None, str | None]:
    """Return pid and URL; a word of the command line may be either."""
    if isinstance(target, str) and target.strip().isdecimal():
        target = int(target)
    if isinstance(target, bool) or (target is not None and not isinstance(target, (int, str))):
        raise BadLaunch(f"target is a {type(target).__name__}", advice="It must be a pid or a URL")
    if target is not None and (pid is not None if isinstance(target, int) else url is not None):
        raise BadLaunch("The server is named twice", advice="Give a pid or a URL once")
    pid = target if isinstance(target, int) else pid
    url = target if isinstance(target, str) else url
    if pid is not None and pid <= 1:
        raise BadLaunch(f"{pid} is the pid of no server", advice="Give the pid of the server's first process")
    return pid, url


async def _watch(watch: Watch, *, canary: bool, ends_at: float) -> tuple[Memory, tuple[Sample, ...]]:
    """Take samples until the verdict can get no better, or the time is over."""
    memory = start(watch.rules)
    samples: list[Sample] = []
    dear_at = float("-inf")
    with anyio.move_on_after(max(0.0, ends_at - time.monotonic())):
        while True:
            now = time.monotonic()
            dear = bool(samples) and now - dear_at >= APART - 0.1
            dear_at = now if dear else dear_at
            ask = Ask(
                thread_states=True,
                stacks=dear,
                sockets=dear,
                growth=dear,
                locks=dear,
                communicators=dear,
                canary=canary,
            )
            sample = await watch.observer.take_sample(ask)
            samples.append(without_bulk(sample))
            memory = step(memory, sample)
            if _is_settled(memory):
                break
            await anyio.sleep(max(0.05, now + PERIOD - time.monotonic()))
    return memory, tuple(samples)


def _in_one_look(memory: Memory, samples: tuple[Sample, ...], server: FoundServer) -> Verdict:
    """Return the verdict, without the benefit of the doubt that a watch gives: it can wait, and one look cannot."""
    verdict = memory.verdict
    if not samples or memory.started_at is None:
        return Unclear(phase="import", why="nothing could be looked at in that time", confidence="low")
    looked_for = memory.now - memory.started_at
    if not server.pid:
        return replace(_unclear(verdict, "unseen", _answers_only(samples[-1])), phase="serving")
    if isinstance(verdict, Moving) and memory.progress_at <= memory.started_at:
        busy = f"it is busy ({memory.activity_by})" if memory.idle_for < APART and memory.activity_by else "it is still"
        why = f"{busy}, and produced nothing in these {looked_for:.0f} s; a longer look tells more"
        return _unclear(verdict, "busy", why, still_for=memory.unproductive_for)
    if isinstance(verdict, Ready) and (why := _why_doubtful(memory, looked_for)):
        return _unclear(verdict, "serving", f"{why}; a longer look can tell", still_for=looked_for)
    return verdict


def _unclear(verdict: Verdict, kind: str, why: str, *, still_for: float = 0.0) -> Unclear:
    return Unclear(
        phase=verdict.phase,
        kind=kind,
        still_for=still_for,
        moved=verdict.moved,
        unseen=verdict.unseen,
        why=why,
        numbers=verdict.numbers,
        confidence="low",
    )


def _why_doubtful(memory: Memory, looked_for: float) -> str:
    """Return what speaks against a ready server: somebody waits, and nothing came out meanwhile; "": nothing."""
    served = memory.serving
    silent = memory.now - served.produced_at >= MOSTLY * looked_for
    if not served.demand or not silent or works(memory.boards) is True:
        return ""
    culprits = culprits_of(memory)
    if not culprits and served.demand == "weak":
        return ""  # an open connection alone is no request
    stands = f", and {culprits[0].stack.title[:40]} stands in {culprits[0].at[0][0]}" if culprits else ""
    return f"{served.demand_by}, nothing came out in these {looked_for:.0f} s{stands}"


def _answers_only(newest: Sample) -> str:
    health = newest.health
    if isinstance(health, Unseen):
        return f"only its answers can be seen, and it was not asked: {health.reason}"
    said = f" ({health.status})" if health.status is not None else f" ({health.detail})" if health.detail else ""
    return {
        "good": f"its health route answers{said}, and more cannot be seen from here: a dead engine may answer so too",
        "bad": f"its health route answers with an error{said}, as busy servers do too; more cannot be seen from here",
        "waiting": "its health route was asked and has not answered; more cannot be seen from here",
        "failed": f"nobody answers at its address{said}",
        "not-asked": f"only its answers can be seen, and it was not asked: {health.detail}",
    }[health.state]


def _is_settled(memory: Memory) -> bool:
    match memory.verdict:
        case Stuck() | Broken() | Exited():
            return True
        case Moving():
            looked_for = memory.now - (memory.started_at or memory.now)
            return looked_for >= ENOUGH_MOVEMENT and memory.unproductive_for < PERIOD / 2
        case _:
            return False


def _silent_for(log: OpenLog | Unseen, before: float | None, memory: Memory) -> float | None:
    """Return for how long the log has had no news: what only our own questions wrote (access lines) is none."""
    now = log.silent_for() if isinstance(log, OpenLog) else None
    if now is None or before is None or memory.started_at is None:
        return now
    looked_for = memory.now - memory.started_at
    is_news = memory.progress_by == "log" and memory.progress_at > memory.started_at
    return now if is_news or now > looked_for else before + looked_for


async def _tail(log: OpenLog | Unseen, *, within: float) -> tuple[str, ...]:
    if isinstance(log, Unseen):
        return ()
    try:
        lines = await in_time("log", lambda: tail_of(log.path, lines=4 * TAIL_LINES), within=within)
    except OSError:
        return ()
    return () if isinstance(lines, Unseen) else _without_steps(lines)[-TAIL_LINES:]


def _without_steps(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Leave out all but the last step of a progress bar: they would fill the tail."""
    forms = [_NUMBER.sub("#", line) if "%" in line else str(number) for number, line in enumerate(lines)]
    return tuple(line for line, form, after in zip(lines, forms, [*forms, ""][1:], strict=True) if form != after)
