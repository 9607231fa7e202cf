"""Delivers events: to hooks in a thread of their own, to subscribers in the event loop. Neither can block."""

from __future__ import annotations

import logging
import math
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import anyio

from hangguard.redact import redact
from hangguard.supervision.events import Event
from hangguard.supervision.stream import Stream

Hook: TypeAlias = Callable[[Event], object]

log = logging.getLogger("hangguard")

BACKLOG = 10_000
"""Events kept for a hook or subscriber that is slow; what is over that is dropped, and said."""

FAILURES = 3
"""A hook that raises this many times in a row is not called again."""

FAREWELL = 2.0
"""Seconds that hooks get at the end to take what is still queued."""


class Subscription(Stream[Event]):
    """Events from the moment of subscribing on, as an asynchronous iterator. Dropping it ends it."""

    def __init__(self) -> None:
        self._queue: deque[Event] = deque(maxlen=BACKLOG)
        self._more = anyio.Event()
        self._over = False
        self.missed = 0
        """Events that were dropped because nobody took them."""

    async def next_or_none(self) -> Event | None:
        """Return the next event, or ``None`` when the supervision is over."""
        while not self._queue and not self._over:
            if self._more.is_set():  # else somebody waits for it already: both get to know
                self._more = anyio.Event()
            await self._more.wait()
        return self.take()

    def take(self) -> Event | None:
        """Return the next event if there is one. For any thread."""
        try:
            return self._queue.popleft()
        except IndexError:
            return None

    def put(self, event: Event) -> None:
        """Queue one event. Never blocks."""
        self.missed += len(self._queue) == BACKLOG
        self._queue.append(event)
        self._more.set()

    def end(self) -> None:
        """Let the iterator end once the queue is empty."""
        self._over = True
        self._more.set()


class Announcer:
    """Takes events from the supervision, hands them on in order."""

    def __init__(self, hooks: Sequence[Hook] = (), known: frozenset[str] = frozenset()) -> None:
        self._known = known
        self._hooks = [_Caller(hook) for hook in hooks]
        self._queue: queue.Queue[Event | None] = queue.Queue(BACKLOG)
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()
        self._thread: threading.Thread | None = None
        self._drained = threading.Event()
        self._closed = False
        self.dropped = 0

    def tell(self, event: Event) -> None:
        """Hand one event on, secrets out. Never blocks."""
        event = redact(event, self._known)
        for subscription in tuple(self._subscriptions):
            subscription.put(event)
        if self._hooks:
            self._put(event)

    def subscribe(self) -> Subscription:
        """Receive every event from now on; the subscription ends with the supervision."""
        subscription = Subscription()
        if self._closed:
            subscription.end()
        self._subscriptions.add(subscription)
        return subscription

    async def aclose(self) -> None:
        """End the streams, and give the hooks a moment to take what is queued."""
        self._closed = True
        for subscription in tuple(self._subscriptions):
            subscription.end()
        if self._thread is None:
            return
        self._put(None)
        for _ in range(math.ceil(FAREWELL / 0.02)):
            if self._drained.is_set():
                return
            await anyio.sleep(0.02)
        log.warning("a hook has not come back; %d events were not delivered to it", self._queue.qsize())

    def _put(self, event: Event | None) -> None:
        try:
            if self._thread is None:
                thread = threading.Thread(target=self._deliver, name="hangguard-hooks", daemon=True)
                thread.start()
                self._thread = thread
        except RuntimeError as problem:  # the next event tries again, and brings those that wait
            log.warning("the hooks cannot be called now: %s", problem)
        try:
            self._queue.put_nowait(event)
        except queue.Full:
            self.dropped += 1

    def _deliver(self) -> None:
        while (event := self._queue.get()) is not None:
            for hook in self._hooks:
                hook.call(event)
        self._drained.set()


class _Caller:
    """One hook, with its failures in a row."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self._failures = 0

    def call(self, event: Event) -> None:
        if self._failures >= FAILURES:
            return
        try:
            self._hook(event)
        except BaseException:  # a named edge: a hook's fault must not end the run, nor its sys.exit() this thread
            self._failures += 1
            log.exception("hook %r failed at %s (%d in a row)", self._hook, event.event, self._failures)
            if self._failures >= FAILURES:
                log.warning("hook %r is not called again", self._hook)
        else:
            self._failures = 0
