"""What to look at once a server has answered: the dear sources only where somebody waits, a request of ours last."""

from __future__ import annotations

from hangguard.facts import Ask
from hangguard.judge.asking import ask_files
from hangguard.judge.memory import Memory
from hangguard.judge.served import CANARY_EVERY
from hangguard.judge.silence import all_idle, culprits_of, should_spin, silent_for
from hangguard.judge.stillness import APART

LOOK_AFTER = 8.0
"""Silent seconds with somebody waiting after which stacks are taken: two, 3 s apart, fit the 20 s of a hang."""

SELDOM = 60.0
"""Seconds between two stack samples where clients are connected, and all workers were seen to wait for work."""

OFTEN_FOR = 60.0
"""Silent seconds for which stacks are taken every 3 s; then every 9 s."""

CANARY_AFTER = 10.0
"""Silent seconds after which a canary may be sent."""

ANSWERED_LATELY = 30.0
"""Seconds for which a good answer makes a canary needless."""

CANARY_IDLE_EVERY = 600.0
"""Seconds between canaries while nobody is seen to ask: an engine whose client has given up looks like an idle one."""

DISTRUST_AFTER = 20.0
"""Silent seconds after which counters that say that requests run are not believed against idle workers."""

SOCKETS_EVERY = 5.0
"""Seconds between two looks at who is connected, where the counters do not say that somebody waits."""


def ask_serving(memory: Memory) -> Ask:
    """Return what the next sample of a server that has answered should look at."""
    served, now = memory.serving, memory.now
    if memory.ready_at is None or served.is_quiet:
        return Ask(files=ask_files(memory))
    silent = silent_for(memory)
    closer = silent >= LOOK_AFTER and (served.demand != "" or should_spin(memory))
    every = SELDOM if all_idle(memory) and served.demand == "weak" else APART if silent < OFTEN_FOR else 3 * APART
    due = served.stacks_at is None or now - served.stacks_at >= every - 0.5
    return Ask(
        thread_states=closer,
        stacks=closer and due,
        sockets=not served.requests and now - served.clients_at >= SOCKETS_EVERY - 0.5,
        communicators=closer and due and memory.rules.ranks > 1,
        files=ask_files(memory) or (closer and due and not memory.rules.attached),
        canary=_wants_canary(memory),
    )


def _wants_canary(memory: Memory) -> bool:
    """Whether only a request of ours can tell: no good answer lately, nothing works, and the counters do not say."""
    served, now = memory.serving, memory.now
    lately = now - served.moved_at < CANARY_AFTER or now - served.produced_at < ANSWERED_LATELY
    if served.canary_since is not None or lately or _is_waking(memory) or _counters_tell(memory):
        return False
    wanted = served.demand != "" or should_spin(memory)
    if served.canary_ended_at is None:
        return wanted or now - served.produced_at >= CANARY_IDLE_EVERY
    every = CANARY_EVERY if culprits_of(memory) else served.canary_every if wanted else CANARY_IDLE_EVERY
    return now - served.canary_ended_at >= every


def _is_waking(memory: Memory) -> bool:
    """Whether it was woken lately, and has produced nothing since: weights and cache may come back one by one.

    A request to a SGLang that has its weights again and not its cache can end it.
    """
    served = memory.serving
    if served.woke_at is None or served.produced_at > served.woke_at:
        return False
    return memory.now - served.woke_at < CANARY_IDLE_EVERY


def _counters_tell(memory: Memory) -> bool:
    """Whether the counters say that requests are there: then tokens and stacks tell the rest.

    They say nothing where there are none, and where they are zero: the gauges of a vLLM that hangs in the first
    step after idling never leave its engine core. Where they say that requests run while every worker waits for
    work, one of the two is wrong.
    """
    served = memory.serving
    if not served.is_counted or not served.requests:
        return False
    return not (all_idle(memory) and silent_for(memory) >= DISTRUST_AFTER)
