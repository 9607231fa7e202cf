"""The control socket of a run: from outside, a living run can be asked how it stands, and told to stop or restart.

A Unix socket in the run's private folder, served by the supervision itself. One request a connection, one JSON object a
line. Whoever asks must be this user, or root, as the kernel says. Nobody can hold anything up: lines, connections and
waits are bounded, and every answer that is not taken in time ends its connection.
"""

from __future__ import annotations

import logging
import math
import os
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, TypeVar

import anyio

from hangguard.errors import HangguardError
from hangguard.facts import Unseen
from hangguard.observe.lane import in_time
from hangguard.redact import redact
from hangguard.supervision.announcer import Subscription
from hangguard.supervision.control_line import LONGEST_REQUEST, BadLineError, ControlLine
from hangguard.supervision.control_socket import listen_in, peer_of, unlink_in
from hangguard.supervision.events import BecameReady, Notice, VerdictChanged
from hangguard.supervision.first_of import first_of
from hangguard.supervision.serve import Story
from hangguard.supervision.standing import standing, status_of
from hangguard.supervision.stop_within import StopWithin

if TYPE_CHECKING:
    from hangguard.supervision.handle import AsyncServer

T = TypeVar("T")

log = logging.getLogger("hangguard")

FROM_OUTSIDE = "asked from outside"
"""Why a server was stopped."""
MOST_CONNECTIONS = 32
"""Of one more the oldest is hung up that has not asked anything yet; where all have, the new one is."""
ASK_WITHIN = 5.0
"""Seconds from a connection to its request."""
TAKE_WITHIN = 10.0
"""Seconds in which an answer must be taken."""
OPEN_WITHIN = 2.0
"""Seconds that a run gives the disk to make, or remove, its socket."""
FAREWELL = 1.0
"""Seconds for those who wait for the end, to be told of it."""


@asynccontextmanager
async def answering(story: Story, server: AsyncServer) -> AsyncIterator[Control]:
    """Serve the control socket inside the block, from the moment on in which the run is noted."""
    control = Control(story, server)
    # Not `async with`: a task group around the body would wrap what it raises.
    group = anyio.create_task_group()
    await group.__aenter__()
    group.start_soon(control.serve)
    try:
        yield control
    finally:
        control.scope.cancel()
        await group.__aexit__(None, None, None)


class Control:
    """Answers for one run. It reads the story, and adds wishes to it, as the handle does."""

    def __init__(self, story: Story, server: AsyncServer) -> None:
        self._story = story
        self._server = server
        # Shielded: a stop, which goes on while everything is being cancelled, is what others wait for.
        self.scope = anyio.CancelScope(shield=True)
        self.is_listening = False
        """Whether anybody can ask by now."""
        self._ended = anyio.Event()
        self._outcome = ""
        self._unasked: list[anyio.CancelScope] = []
        self._connections = 0
        self._idle = anyio.Event()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    async def serve(self) -> None:
        """Listen and answer, until cancelled."""
        with self.scope:
            try:
                await self._story.noted.wait()
                folder = self._story.run.folder.path
                if folder is not None and self._story.run.notes.state is not None:  # else it was told why
                    await self._serve_in(folder)
            except Exception:  # a named edge: nobody outside can be answered then, and the run goes on
                log.exception("the control socket is not served any more")

    async def _serve_in(self, folder: str) -> None:
        made = await _shielded(lambda: listen_in(folder))
        if isinstance(made, Unseen):
            text = f"this run cannot be asked or stopped from outside, it has no control socket: {made.reason}"
            self._story.run.announcer.tell(Notice(t=self._story.run.world.clock(), attempt=1, text=text))
            return
        listener, identity = made
        try:
            with listener:
                self.is_listening = True
                await self._accept(listener)
        finally:
            self.is_listening = False
            with anyio.CancelScope(shield=True):
                await _shielded(lambda: unlink_in(folder, identity))

    async def say_goodbye(self, outcome: str) -> None:
        """Tell those who wait that it is over, and give them a moment to hear it."""
        self._outcome = outcome
        self._ended.set()
        for subscription in tuple(self._subscriptions):
            subscription.end()
        with anyio.move_on_after(FAREWELL, shield=True):
            while self._connections > len(self._unasked):
                self._idle = anyio.Event()
                await self._idle.wait()

    # ------------------------------------------------------------------------------------ connections

    async def _accept(self, listener: socket.socket) -> None:
        async with anyio.create_task_group() as group:
            while True:
                await anyio.wait_readable(listener)
                try:
                    connection, _ = listener.accept()
                except (BlockingIOError, ConnectionError):
                    continue
                except OSError:  # no descriptors now: whoever wants something waits in the queue
                    await anyio.sleep(0.2)
                    continue
                group.start_soon(self._meet, connection)

    async def _meet(self, connection: socket.socket) -> None:
        line = ControlLine(connection, longest=LONGEST_REQUEST)
        self._connections += 1
        try:
            if (why := _refusal(connection)) or (why := self._make_room()):
                with anyio.move_on_after(1.0):
                    await line.put(say="error", problem=why)
                return
            request = await self._request_on(line)
            if request is not None:
                await self._answer(line, request)
        except Exception:  # a named edge: a fault in an answer must not end the run
            log.exception("a request over the control socket was not answered")
        finally:
            self._connections -= 1
            self._idle.set()
            line.close()

    def _make_room(self) -> str:
        if self._connections > MOST_CONNECTIONS:
            if not self._unasked:
                return f"{MOST_CONNECTIONS} others are being answered"
            self._unasked.pop(0).cancel()
        return ""

    async def _request_on(self, line: ControlLine) -> dict[str, Any] | None:
        with anyio.move_on_after(ASK_WITHIN) as scope:
            self._unasked.append(scope)
            try:
                return await line.take()
            except BadLineError as bad:
                with anyio.move_on_after(1.0):
                    await line.put(say="error", problem=str(bad))
            finally:
                if scope in self._unasked:
                    self._unasked.remove(scope)
        return None

    # ------------------------------------------------------------------------------------ answers

    async def _answer(self, line: ControlLine, request: dict[str, Any]) -> None:
        answers: dict[object, Callable[[ControlLine, dict[str, Any]], Awaitable[None]]] = {
            "status": self._tell_status,
            "events": self._tell_events,
            "stop": self._stop,
            "restart": self._restart,
            "wait": self._wait,
        }
        what = request.get("do")
        answer = answers.get(what) if isinstance(what, str) else None
        if answer is None:
            await _put(line, say="error", problem=f"there is no request {str(what)[:60]!r}")
            return
        try:
            await answer(line, request)
        except BadLineError as bad:
            await _put(line, say="error", problem=str(bad))

    async def _tell_status(self, line: ControlLine, request: dict[str, Any]) -> None:
        if request.get("unreadable") is True:
            self._story.run.notes.write_again()
        await _put(line, say="status", status=asdict(status_of(self._story)))

    async def _tell_events(self, line: ControlLine, _request: dict[str, Any]) -> None:
        subscription = self._subscribe()

        async def tell() -> None:
            if not await _put(line, say="begin"):
                return
            while (event := await subscription.next_or_none()) is not None:
                if not await _put(line, say="event", event=event.as_json()):
                    return
            await _put(line, say="end", missed=subscription.missed)

        await first_of(tell, line.until_hung_up)

    async def _stop(self, line: ControlLine, request: dict[str, Any]) -> None:
        """Ask for the stop, and tell what it came to. It goes on where nobody waits for the answer any more."""
        drain = _seconds(request, "drain") or 0.0
        grace, within = _seconds(request, "grace"), _seconds(request, "within")
        self._wish_stop(drain, grace, within)
        if not await _put(line, say="stopping"):
            return

        async def tell() -> None:
            await self._ended.wait()
            last = self._story.history[-1] if self._story.history else None
            release = last.release if last is not None else None
            await _put(
                line,
                say="stopped",
                released=release.answer if release is not None else "released",
                left_behind=list(release.left_behind) if release is not None else [],
                exit_code=last.exit_code if last is not None else None,
                outcome=self._outcome,
            )

        await first_of(tell, line.until_hung_up)

    def _wish_stop(self, drain: float, grace: float | None, within: float | None) -> None:
        wishes, clock = self._story.wishes, self._story.run.world.clock
        is_first = not wishes.stop_because
        if within is not None:
            asked = StopWithin(seconds=within, ends=clock() + within)
            wishes.within = asked if wishes.within is None or asked.ends < wishes.within.ends else wishes.within
        if grace:
            wishes.grace = grace if wishes.grace is None else min(grace, wishes.grace)
        self._server._ask_to_stop(0.0 if grace == 0.0 else None, drain=drain)  # noqa: SLF001 - another face of it
        if is_first:
            wishes.stop_because = FROM_OUTSIDE

    async def _restart(self, line: ControlLine, _request: dict[str, Any]) -> None:
        if self._story.over.is_set() or self._story.wishes.stop_because:
            await _put(line, say="error", problem="the run is being stopped, or over")
            return
        if not await _put(line, say="restarting"):
            return

        async def tell() -> None:
            try:
                await self._server.restart()
            except (HangguardError, RuntimeError) as problem:
                await _put(line, say="failed", problem=str(redact(str(problem))))
            else:
                await _put(line, say="ready", url=self._server.url)

        await first_of(tell, line.until_hung_up)

    async def _wait(self, line: ControlLine, request: dict[str, Any]) -> None:
        wanted = request.get("for")
        if wanted not in ("ready", "stuck", "exit"):
            raise BadLineError(f"nobody can wait for {str(wanted)[:60]!r}: for ready, stuck or exit")

        async def tell() -> None:
            await _put(line, say="reached", what=await self._until(wanted))

        await first_of(tell, line.until_hung_up)

    async def _until(self, wanted: str) -> str:
        """Return what was reached first: what is wanted, or what makes that impossible."""
        subscription = self._subscribe()
        story = self._story
        reached = standing(story.now.memory.verdict) if story.now is not None else ""
        # Ready only once the story says so: after a restart was asked for the old attempt still looks so.
        while reached != wanted or (wanted == "ready" and not story.ready.is_set()):
            if reached == "stuck" and wanted == "ready" and story.run.on_hang == "report":
                break  # nobody will do anything about it
            event = await subscription.next_or_none()
            if event is None:
                reached = "exit"
                break
            if isinstance(event, BecameReady):
                reached = "ready"
            elif isinstance(event, VerdictChanged):
                reached = standing(event.verdict)
        if reached == "exit":
            await self._ended.wait()
        return reached

    def _subscribe(self) -> Subscription:
        subscription = self._story.run.announcer.subscribe()
        if self._ended.is_set():
            subscription.end()
        self._subscriptions.add(subscription)
        return subscription


# ------------------------------------------------------------------------------------------ below


async def _shielded(question: Callable[[], T]) -> T | Unseen:
    """Shielded: a socket that was made has somebody who removes it."""
    done: T | Unseen = Unseen("not asked")
    try:
        with anyio.CancelScope(shield=True):
            done = await in_time("control socket", question, within=OPEN_WITHIN)
    except OSError as problem:
        done = Unseen(problem.strerror or str(problem))
    return done


def _refusal(connection: socket.socket) -> str:
    """Return why whoever has connected is not answered; empty: he is."""
    try:
        _, user = peer_of(connection)
    except OSError as problem:
        return f"who asks is not known ({problem.strerror})"
    return "" if user in {os.geteuid(), 0} else f"user {user} is not answered here"


async def _put(line: ControlLine, **fields: object) -> bool:
    with anyio.move_on_after(TAKE_WITHIN):
        if await line.put(**fields):
            return True
    return False


def _seconds(request: dict[str, Any], name: str) -> float | None:
    value = request.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0.0 <= value < math.inf:
        raise BadLineError(f"{name} must be seconds, zero or more and finite, not {str(value)[:60]!r}")
    return float(value)
