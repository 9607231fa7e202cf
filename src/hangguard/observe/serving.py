"""What the server counts of its own work: requests that run and wait, tokens that came out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Generic, TypeVar

import anyio

from hangguard.facts import Ask, LoadRoute, QuietRoute, Request, Serving, Unseen
from hangguard.observe._prometheus import read_metrics
from hangguard.observe.answers import _AT_ONCE, _why_not_yet
from hangguard.observe.client import BODY_LIMIT, Client
from hangguard.observe.target import Shared, Target

T = TypeVar("T")

_BUSY_EVERY = 2.0
_IDLE_EVERY = 5.0
_MISSING_EVERY = 60.0
"""A route that is not there will hardly appear, and each question is a line in the server's log."""
_NOT_FOUND = 404


class ServingProbe:
    """Asks the metrics route, every two seconds while requests are there, else every five.

    A metrics route that does not answer, or is switched off, is unseen and never zero. Where the engine has
    another route that counts requests, that one is asked when the metrics have none, or when nothing moves in
    them: the gauge of an engine that idles may be old.
    """

    field: ClassVar[str] = "serving"
    after: ClassVar[tuple[str, ...]] = ("port",)

    def __init__(self, target: Target, shared: Shared) -> None:
        self._target = target
        self._shared = shared
        self._client = Client(target)
        self._metrics = self._counter(target.metrics_path, self._read_metrics) if target.metrics_path else None
        self._loads = tuple(self._counter(route.path, _reader_of_loads(route)) for route in target.load_routes)
        self._quiet: tuple[_Counter[bool], ...] = tuple(
            self._counter(route.path, _reader_of_quiet(route))
            for route in target.quiet_routes
            if target.launch.environment().get(route.variable, "0") not in {"", "0"}
        )
        self._last: tuple[Serving, Serving] | None = None
        """The newest two answers of the metrics route."""

    async def look(self, ask: Ask) -> Serving | Unseen:
        """Return the newest numbers, after asking for new ones if it is time, or if they are wanted now."""
        if self._metrics is None and not self._loads:
            return Unseen("no counters are known of this server")
        obstacle = _why_not_yet(self._shared.port, self._target)
        if obstacle:
            return Unseen(obstacle)
        counts = await self._count(at_once=ask.counters)
        is_quiet = await self._is_quiet()
        if isinstance(counts, Unseen) or is_quiet is None:
            return counts
        return replace(counts, is_asleep=is_quiet or bool(counts.is_asleep))

    async def aclose(self) -> None:
        """Close the connections. The requests end with the observer's tasks."""
        await self._client.aclose()

    async def _count(self, *, at_once: bool) -> Serving | Unseen:
        counts: Serving | Unseen = Unseen("")
        if self._metrics is not None:
            counts = await self._newest(self._metrics, every=0.0 if at_once else self._period())
            if isinstance(counts, Serving):
                self._remember(counts)
                if counts.running is not None and not self._stands_still():
                    return counts
        after = counts.at if isinstance(counts, Serving) else None
        loads = await self._ask_loads(after=after, at_once=at_once)
        if isinstance(loads, Serving) and isinstance(counts, Serving):
            return replace(counts, running=loads.running, waiting=loads.waiting)
        if isinstance(counts, Serving) or loads is None:
            return counts
        if isinstance(loads, Unseen) and counts.reason:
            return Unseen(f"{counts.reason}; {loads.reason}")
        return loads

    async def _is_quiet(self) -> bool | None:
        known: bool | None = None
        for route in self._quiet:
            answer = await self._newest(route)
            if isinstance(answer, bool):
                known = bool(known) or answer
        return known

    def _period(self) -> float:
        newest = self._last[1] if self._last is not None else None
        return _BUSY_EVERY if newest is not None and (newest.running or newest.waiting) else _IDLE_EVERY

    def _remember(self, counts: Serving) -> None:
        if self._last is None:
            self._last = (counts, counts)
        elif counts.at != self._last[1].at:
            self._last = (self._last[1], counts)

    def _stands_still(self) -> bool:
        """Tell whether requests are said to be there, and nothing was counted from one answer to the next."""
        if self._last is None:
            return False
        before, now = self._last
        return (
            before.at != now.at
            and bool(now.running or now.waiting)
            and (before.generated_tokens, before.prompt_tokens) == (now.generated_tokens, now.prompt_tokens)
        )

    async def _ask_loads(self, *, after: float | None, at_once: bool) -> Serving | Unseen | None:
        """Ask the first of the load routes that is there; ``None``: there is none.

        An answer from before ``after`` is older than the metrics and not taken.
        """
        problem: Unseen | None = None
        for route in self._loads:
            is_older = after is not None and route.at is not None and route.at < after
            answer = await self._newest(route, every=0.0 if is_older or at_once else _BUSY_EVERY)
            if isinstance(answer, Serving):
                return answer if after is None or answer.at >= after else problem
            problem = answer
            if not route.is_missing:
                return problem
        return problem

    async def _newest(self, route: _Counter[T], *, every: float = _IDLE_EVERY) -> T | Unseen:
        await route.ask(every=every)
        return route.newest(overdue_after=self._target.probe_within)

    def _counter(self, path: str, read: Callable[[bytes, float], T | Unseen]) -> _Counter[T]:
        return _Counter(self._client, self._shared, self._target, path, read)

    def _read_metrics(self, body: bytes, at: float) -> Serving | Unseen:
        counts = read_metrics(body.decode(errors="replace"), self._target.metrics, at=at)
        if counts == Serving(at=at):
            return Unseen(_with_hint("the metrics have none of the counters that are known", self._target))
        return counts


@dataclass(slots=True)
class _Counter(Generic[T]):
    """One route that is asked again and again: one request at a time, left open until it is answered."""

    client: Client
    shared: Shared
    target: Target
    path: str
    read: Callable[[bytes, float], T | Unseen]
    at: float | None = None
    """When the newest answer came."""
    is_missing: bool = False
    asked_at: float | None = None
    """When the request in flight was sent."""
    answer: T | Unseen = Unseen("")

    async def ask(self, *, every: float) -> None:
        """Send a request, if none is in flight and the newest answer is so old; wait a moment for its answer."""
        now = self.target.clock()
        every = _MISSING_EVERY if self.is_missing else every
        if self.asked_at is not None or (self.at is not None and now - self.at < every):
            return
        self.asked_at = now
        answered = anyio.Event()
        self.shared.tasks.start_soon(self._await_answer, answered, name=f"hangguard GET {self.path}")
        with anyio.move_on_after(_AT_ONCE):
            await answered.wait()

    def newest(self, *, overdue_after: float) -> T | Unseen:
        """Return the newest answer; unseen while the next one is overdue."""
        now = self.target.clock()
        if self.asked_at is not None and (self.at is None or now - self.asked_at >= overdue_after):
            return Unseen(f"GET {self.path}: no answer for {now - self.asked_at:.0f} s")
        return self.answer

    async def _await_answer(self, answered: anyio.Event) -> None:
        answer = await self._get()
        self.answer, self.at, self.asked_at = answer, self.target.clock(), None
        answered.set()

    async def _get(self) -> T | Unseen:
        try:
            status, body = await self.client.send(Request(method="GET", path=self.path), limit=BODY_LIMIT)
        except Exception as problem:  # noqa: BLE001 - the named edge: httpx, its transports, a broken connection
            return Unseen(f"GET {self.path}: {type(problem).__name__}: {problem}".removesuffix(": "))
        self.is_missing = status == _NOT_FOUND
        if self.is_missing and self.path == self.target.metrics_path:
            return Unseen(_with_hint(f"GET {self.path}: 404", self.target))
        if not 200 <= status < 300:
            return Unseen(f"GET {self.path}: {status}")
        if len(body) >= BODY_LIMIT:
            return Unseen(f"GET {self.path}: the answer is larger than {BODY_LIMIT >> 20} MiB")
        return self.read(body, self.target.clock())


def _with_hint(problem: str, target: Target) -> str:
    return f"{problem}; {target.metrics_hint}" if target.metrics_hint else problem


def _reader_of_loads(route: LoadRoute) -> Callable[[bytes, float], Serving | Unseen]:
    def read(body: bytes, at: float) -> Serving | Unseen:
        try:
            answer = json.loads(body)
            entries: list[dict[str, Any]] = answer if route.under is None else answer[route.under]
            waiting = sum(int(entry[route.waiting]) for entry in entries)
            if route.running is not None:
                running = sum(int(entry[route.running]) for entry in entries)
            else:
                running = sum(int(entry[str(route.total)]) for entry in entries) - waiting
        except (ValueError, LookupError, TypeError, OverflowError, RecursionError) as problem:
            return Unseen(f"GET {route.path} is not understood: {problem!r}")
        # A snapshot that nobody has written yet: SGLang answers with an empty list.
        return Serving(running=running, waiting=waiting, at=at) if entries else Unseen(f"GET {route.path} is empty")

    return read


def _reader_of_quiet(route: QuietRoute) -> Callable[[bytes, float], bool | Unseen]:
    def read(body: bytes, _at: float) -> bool | Unseen:
        try:
            return bool(json.loads(body)[route.key])
        except (ValueError, LookupError, TypeError, RecursionError) as problem:
            return Unseen(f"GET {route.path} is not understood: {problem!r}")

    return read
