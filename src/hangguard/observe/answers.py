"""Whether the server answers: its health route, and the request that means ready."""

from __future__ import annotations

from typing import ClassVar, cast

import anyio

from hangguard.delegates import HERE
from hangguard.facts import NOT_ASKED, Ask, Port, Reply, Unseen
from hangguard.observe.client import Client
from hangguard.observe.lane import Lane
from hangguard.observe.questions import Answer, Question, callers_question, path_question, request_question
from hangguard.observe.target import Shared, Target

_HEALTH_EVERY = 5.0
_BAD_AGAIN = 2.0
_AT_ONCE = 0.2
"""How long a look waits for a request that it has just sent: most are answered in milliseconds."""
_DETAIL = 400


class HealthProbe:
    """Asks the health route every five seconds, one request at a time."""

    field: ClassVar[str] = "health"
    after: ClassVar[tuple[str, ...]] = ("port",)

    def __init__(self, target: Target, shared: Shared) -> None:
        self._client = Client(target)
        path = target.health_path
        question = path_question(self._client, path) if path is not None else None
        waits = {"good": _HEALTH_EVERY, "bad": _BAD_AGAIN, "failed": 0.0}
        self._asker = _Asker(target, shared, question, waits, "no health route is known for this server")

    async def look(self, ask: Ask) -> Reply | Unseen:
        """Return how the newest request stands, after sending one if it is time.

        None while the requests in flight are counted: SGLang's health route generates a token, which is one of them.
        """
        return await self._asker.look(may_send=not ask.counters)

    async def aclose(self) -> None:
        """Close the connection. The request ends with the observer's tasks."""
        await self._client.aclose()


class ReadinessProbe:
    """Asks until there has been one good answer, one request at a time.

    A request is left open for as long as the attempt lives: a slow first answer is an answer, and asking
    again while the server still works on the first would only add load.
    """

    field: ClassVar[str] = "answer"
    after: ClassVar[tuple[str, ...]] = ("port",)

    def __init__(self, target: Target, shared: Shared) -> None:
        self._client = Client(target)
        self._lane = Lane("ready")
        waits = {"good": float("inf"), "bad": _BAD_AGAIN, "failed": 0.0}
        nothing = "nothing was given by which readiness is known"
        if not target.launch.answers:
            nothing = "this node serves no requests of its own: no answer could prove it ready"
        self._asker = _Asker(target, shared, self._question(target), waits, nothing)

    async def look(self, _ask: Ask) -> Reply | Unseen:
        """Return how the newest request stands, after sending one if it is time."""
        return await self._asker.look()

    async def aclose(self) -> None:
        """Close the connection, and let the thread go, also where the caller's function sits in it."""
        self._lane.close()
        await self._client.aclose()

    def _question(self, target: Target) -> Question | None:
        ready = target.ready
        if isinstance(ready, str):
            return path_question(self._client, ready)
        if ready is not None:
            return callers_question(ready, target.launch.url, self._lane)
        if target.request is not None:
            return request_question(self._client, target.request, target.launch.model)
        return None


class _Asker:
    """One request at a time, sent only where the server is expected to listen."""

    def __init__(
        self,
        target: Target,
        shared: Shared,
        question: Question | None,
        waits: dict[str, float],
        nothing_to_ask: str,
    ) -> None:
        self._target = target
        self._shared = shared
        self._question = question
        self._waits = waits
        self._reply: Reply | None = None
        self._nothing_to_ask = nothing_to_ask

    async def look(self, *, may_send: bool = True) -> Reply:
        now = self._target.clock()
        if self._question is None:
            return Reply(state="not-asked", since=now, detail=self._nothing_to_ask)
        if not may_send:
            return self._reply or Reply(state="not-asked", since=now, detail=NOT_ASKED.reason)
        if self._is_time(now):
            obstacle = _why_not_yet(self._shared.port, self._target)
            if obstacle:
                return Reply(state="not-asked", since=now, detail=obstacle)
            await self._send(self._question, now)
        return cast("Reply", self._reply)

    def _is_time(self, now: float) -> bool:
        last = self._reply
        if last is None:
            return True
        return last.state != "waiting" and now - last.since >= self._waits[last.state]

    async def _send(self, question: Question, now: float) -> None:
        self._reply = Reply(state="waiting", since=now)
        answered = anyio.Event()
        self._shared.tasks.start_soon(self._await_answer, question, answered, name="hangguard request")
        with anyio.move_on_after(_AT_ONCE):
            await answered.wait()

    async def _await_answer(self, question: Question, answered: anyio.Event) -> None:
        answer = await _without_errors(question)
        self._reply = Reply(
            state=answer.state,
            since=self._target.clock(),
            status=answer.status,
            detail=" ".join(answer.detail[:_DETAIL].split()),
            refuses=answer.refuses,
        )
        answered.set()


async def _without_errors(question: Question) -> Answer:
    """Run it; whatever goes wrong, in httpx or in the caller's function, is an answer too."""
    try:
        return await question()
    except Exception as problem:  # noqa: BLE001 - the named edge: a request must not end the supervision
        return Answer("failed", detail=f"{type(problem).__name__}: {problem}".removesuffix(": "))


def _why_not_yet(port: Port | Unseen, target: Target) -> str:
    """Return why nothing is sent now; empty: send.

    A stranger's answer must never count. Where the port cannot be seen, or the server runs elsewhere (in a
    container, on another node), asking is the only way to know.
    """
    launch = target.launch
    if isinstance(port, Unseen) or (launch.delegates_to is not None and launch.delegates_to not in HERE):
        return ""
    place = f"port {port.port}" if launch.socket_path is None else f"socket {launch.socket_path}"
    if port.listener is None:
        return f"nobody listens on {place} yet"
    if port.listener.ours is False:
        return f"{place} is held by process {port.listener.pid} ({port.listener.title}), not by ours"
    return ""
