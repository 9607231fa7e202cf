"""Whether the server answers: its health route, and the request that means ready."""

from __future__ import annotations

import inspect
import json
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, Literal, NamedTuple, cast

import anyio

from hangguard.facts import Ask, Port, Reply, Request, Unseen
from hangguard.observe.lane import Lane
from hangguard.observe.target import Shared, Target

if TYPE_CHECKING:
    import httpx

_HEALTH_EVERY = 5.0
_BAD_AGAIN = 2.0
_AT_ONCE = 0.2
"""How long a look waits for a request that it has just sent: most are answered in milliseconds."""
_BODY_LIMIT = 4 * 1024 * 1024
"""An embedding has some 100 kB; whoever sends more is not read to the end."""
_DETAIL = 200


class HealthProbe:
    """Asks the health route every five seconds, one request at a time."""

    field: ClassVar[str] = "health"
    after: ClassVar[tuple[str, ...]] = ("port",)

    def __init__(self, target: Target, shared: Shared) -> None:
        self._client = _Client(target)
        path = target.health_path
        question = _path_question(self._client, path) if path is not None else None
        waits = {"good": _HEALTH_EVERY, "bad": _BAD_AGAIN, "failed": 0.0}
        self._asker = _Asker(target, shared, question, waits, "no health route is known for this server")

    async def look(self, _ask: Ask) -> Reply | Unseen:
        """Return how the newest request stands, after sending one if it is time."""
        return await self._asker.look()

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
        self._client = _Client(target)
        self._lane = Lane("ready")
        waits = {"good": float("inf"), "bad": _BAD_AGAIN, "failed": 0.0}
        question = self._question(target)
        self._asker = _Asker(target, shared, question, waits, "nothing was given by which readiness is known")

    async def look(self, _ask: Ask) -> Reply | Unseen:
        """Return how the newest request stands, after sending one if it is time."""
        return await self._asker.look()

    async def aclose(self) -> None:
        """Close the connection, and let the thread go, also where the caller's function sits in it."""
        self._lane.close()
        await self._client.aclose()

    def _question(self, target: Target) -> _Question | None:
        ready = target.ready
        if isinstance(ready, str):
            return _path_question(self._client, ready)
        if ready is not None:
            return _callers_question(ready, target.launch.url, self._lane)
        if target.request is not None:
            return _request_question(self._client, target.request, target.launch.model)
        return None


class _Answer(NamedTuple):
    state: Literal["good", "bad", "failed"]
    status: int | None = None
    detail: str = ""


_Question = Callable[[], Awaitable[_Answer]]


class _Asker:
    """One request at a time, sent only where the server is expected to listen."""

    def __init__(
        self,
        target: Target,
        shared: Shared,
        question: _Question | None,
        waits: dict[str, float],
        nothing_to_ask: str,
    ) -> None:
        self._target = target
        self._shared = shared
        self._question = question
        self._waits = waits
        self._reply: Reply | None = None
        self._nothing_to_ask = nothing_to_ask

    async def look(self) -> Reply:
        now = self._target.clock()
        if self._question is None:
            return Reply(state="not-asked", since=now, detail=self._nothing_to_ask)
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

    async def _send(self, question: _Question, now: float) -> None:
        self._reply = Reply(state="waiting", since=now)
        answered = anyio.Event()
        self._shared.tasks.start_soon(self._await_answer, question, answered, name="hangguard request")
        with anyio.move_on_after(_AT_ONCE):
            await answered.wait()

    async def _await_answer(self, question: _Question, answered: anyio.Event) -> None:
        answer = await _without_errors(question)
        self._reply = Reply(
            state=answer.state,
            since=self._target.clock(),
            status=answer.status,
            detail=" ".join(answer.detail[:_DETAIL].split()),
        )
        answered.set()


async def _without_errors(question: _Question) -> _Answer:
    """Run it; whatever goes wrong, in httpx or in the caller's function, is an answer too."""
    try:
        return await question()
    except Exception as problem:  # noqa: BLE001 - the named edge: a request must not end the supervision
        return _Answer("failed", detail=f"{type(problem).__name__}: {problem}".removesuffix(": "))


def _why_not_yet(port: Port | Unseen, target: Target) -> str:
    """Return why nothing is sent now; empty: send.

    A stranger's answer must never count. Where the port cannot be seen, or the server runs elsewhere (in a
    container, on another node), asking is the only way to know.
    """
    if isinstance(port, Unseen) or target.launch.delegates_to is not None:
        return ""
    if port.listener is None:
        return f"nobody listens on port {port.port} yet"
    if port.listener.ours is False:
        return f"port {port.port} is held by process {port.listener.pid} ({port.listener.title}), not by ours"
    return ""


def _path_question(client: _Client, path: str) -> _Question:
    async def ask() -> _Answer:
        status, body = await client.send(Request(method="GET", path=path), limit=_DETAIL)
        if 200 <= status < 300:
            return _Answer("good", status)
        return _Answer("bad", status, _text(body))

    return ask


def _request_question(client: _Client, request: Request, model: str | None) -> _Question:
    """Return the engine's own question. A GET has no content to look at (SGLang's health routes: empty)."""

    async def ask() -> _Answer:
        filled = request
        if request.body is not None and "{model}" in request.body:
            name = model if model is not None else await _first_model(client)
            if isinstance(name, _Answer):
                return name
            # As a JSON string without its quotes: a model may be named by a path with a backslash.
            filled = replace(request, body=request.body.replace("{model}", json.dumps(name)[1:-1]))
        status, body = await client.send(filled, limit=_BODY_LIMIT)
        if not 200 <= status < 300:
            return _Answer("bad", status, _text(body))
        if request.method == "POST" and not _has_content(body):
            return _Answer("bad", status, f"an answer without content: {_text(body)}")
        return _Answer("good", status)

    return ask


async def _first_model(client: _Client) -> str | _Answer:
    status, body = await client.send(Request(method="GET", path="/v1/models"), limit=_BODY_LIMIT)
    if not 200 <= status < 300:
        return _Answer("bad", status, f"GET /v1/models: {_text(body)}")
    try:
        return str(json.loads(body)["data"][0]["id"])
    except (ValueError, LookupError, TypeError, RecursionError):
        return _Answer("bad", status, f"GET /v1/models names no model: {_text(body)}")


def _callers_question(ready: Callable[[str], object], url: str, lane: Lane) -> _Question:
    async def ask() -> _Answer:
        result: object
        if inspect.iscoroutinefunction(ready):
            result = await ready(url)
        else:
            result = await lane.ask(lambda: ready(url), within=float("inf"))
            if inspect.isawaitable(result):
                result = await result
        if isinstance(result, Unseen):
            return _Answer("bad", detail=result.reason)
        return _Answer("good") if result else _Answer("bad", detail=f"ready() returned {result!r}")

    return ask


def _has_content(body: bytes) -> bool:
    """Tell whether an answer holds something computed.

    The text of a single token can be empty (a part of a character, or the end), so a choice counts as such.
    OpenAI: ``choices``, ``data``; SGLang's own routes: ``text``, ``embedding``, alone or in a list.
    """
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError):
        return False
    first = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(first, dict):
        return False
    return isinstance(first.get("text"), str) or any(first.get(key) for key in ("choices", "data", "embedding"))


def _text(body: bytes) -> str:
    return body[:_DETAIL].decode(errors="replace")


class _Client:
    """Speaks to one server and to nobody else: no proxy, no redirect, no connection kept.

    A kept connection is closed by the server just when the next request is sent (uvicorn: after 5 s).
    There is no time limit: a server that does not answer is a state to be told, not an error.
    """

    def __init__(self, target: Target) -> None:
        self._url = target.launch.url
        self._key = target.launch.api_key
        self._client: httpx.AsyncClient | None = None
        self._lane = Lane("httpx")

    async def send(self, request: Request, *, limit: int) -> tuple[int, bytes]:
        """Return the status and the body, as far as ``limit``."""
        if self._client is None:
            self._client = await self._connect()
        content = request.body.encode() if request.body is not None else None
        headers = {"Content-Type": "application/json"} if content is not None else {}
        url = self._url + "/" + request.path.lstrip("/")
        async with self._client.stream(request.method, url, content=content, headers=headers) as response:
            return response.status_code, await _read(response, limit)

    async def aclose(self) -> None:
        self._lane.close()
        if self._client is not None:
            await self._client.aclose()

    async def _connect(self) -> httpx.AsyncClient:
        # In a thread: the event loop is the caller's, and on a busy machine the import alone takes seconds.
        made = await self._lane.ask(self._make, within=float("inf"))
        made = await self._lane.ask(self._make, within=float("inf"))
        self._lane.close()
        if isinstance(made, Unseen):
            raise OSError(made.reason)
        return made

    def _make(self) -> httpx.AsyncClient:
        import httpx  # noqa: PLC0415 - 60 ms, which only those pay whose server listens

        headers: dict[str, str] = {
            "Connection": "close",
            "Accept-Encoding": "identity",
            "User-Agent": "hangguard",
        }
        if self._key is not None:
            headers["Authorization"] = f"Bearer {self._key}"
        # Whose port it is, is known from the kernel, better than a certificate on loopback could tell.
        return httpx.AsyncClient(headers=headers, timeout=None, trust_env=False, verify=False)  # noqa: S113, S501


async def _read(response: httpx.Response, limit: int) -> bytes:
    """Read the body as far as ``limit``, and then cut the connection.

    Leaving the loop would leave httpx's nested generators unfinished, which trio warns of; the cut ends them
    from the innermost on.
    """
    import httpx  # noqa: PLC0415 - loaded by the client

    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk[: limit - len(body)]
            if len(body) >= limit:
                await response.extensions["network_stream"].aclose()
    except httpx.TransportError:
        if len(body) < limit:
            raise
    return bytes(body)
