"""Who still waits for an answer, before a stop that lets requests finish: looked at again and again, never guessed."""

from __future__ import annotations

from dataclasses import dataclass, replace

from hangguard.facts import NOT_ASKED, Port, Sample, Serving, ToldBy, Unseen

EMPTY_LOOKS = 2
"""Looks in a row that must find nobody. A client of the program around us counts from its second look on, and a
request may be between the connection and the counter."""

SETTLED_FOR = 2.0
"""Seconds for which the counters must say zero, and nothing work, where somebody is still connected. The gauges of
vLLM travel with the engine's outputs, so that a request in its first step (a long prefill) is not in them yet; an
open connection may as well be a client's idle pool."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """What the looks since the beginning of the wait have shown."""

    left: int | Unseen = Unseen("it was not looked at")
    by: ToldBy = ""
    is_over: bool = False
    """Whether nobody is in flight any more."""
    empty_looks: int = 0
    empty_since: float = 0.0
    """When the first of these looks was, monotonic."""
    counted_at: float = float("-inf")
    """When the newest answer with counters came: the same one in the next sample is no other look."""


def look_again(before: InFlight, sample: Sample, *, worked_at: float) -> InFlight:
    """Return what is in flight after one more sample; ``worked_at`` is when the server was last seen to work.

    The server's own counters go first. Where they cannot be seen, whoever is connected counts as waiting. What is
    unseen is never nobody.
    """
    requests, clients = _requests(sample.serving), _clients(sample)
    if isinstance(sample.serving, Serving) and not isinstance(requests, Unseen):
        if sample.serving.at <= before.counted_at:
            return before
        now = replace(before, left=requests, by="counters", counted_at=sample.serving.at)
        if requests == 0 and clients != 0 and worked_at > before.empty_since:
            now = replace(now, empty_looks=0)  # somebody is connected, and something works: not in the gauges yet
        return _judged(now, sample.t, wait=0.0 if clients == 0 else SETTLED_FOR)
    if not isinstance(clients, Unseen):
        return _judged(replace(before, left=clients, by="clients"), sample.t, wait=0.0)
    assert isinstance(requests, Unseen)
    return replace(before, left=Unseen(f"{requests.reason}; {clients.reason}"), by="", empty_looks=0)


def _judged(now: InFlight, t: float, *, wait: float) -> InFlight:
    if now.left != 0:
        return replace(now, empty_looks=0)
    since = now.empty_since if now.empty_looks else t
    looks = now.empty_looks + 1
    return replace(now, empty_looks=looks, empty_since=since, is_over=looks >= EMPTY_LOOKS and t - since >= wait)


def _requests(serving: Serving | Unseen) -> int | Unseen:
    if isinstance(serving, Unseen):
        return serving
    if serving.running is None:
        return Unseen("the server does not count its requests")
    return serving.running + (serving.waiting or 0)


def _clients(sample: Sample) -> int | Unseen:
    if not isinstance(sample.port, Port):
        return sample.port
    return Unseen("nobody looked who is connected") if sample.port.clients == NOT_ASKED else sample.port.clients
