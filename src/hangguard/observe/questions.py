"""Questions whose answers tell whether a server works, and what an answer means."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

from hangguard.facts import Request, Unseen
from hangguard.observe.client import Client, filled, names_its_model
from hangguard.observe.lane import Lane

_DETAIL = 200

# What the engines answer to a request for something that their model does not do, besides 404 and 405:
# vLLM "The model does not support Completions API" (400 to 0.9, 501 later; entrypoints/*/api_router.py),
# SGLang "This model does not appear to be an embedding model by default" (managers/tokenizer_manager.py).
_OTHER_TASK = re.compile(r"does not support \w+(?: [\w()]+){0,3} API|does not appear to be an? \w+ model")
# vLLM and SGLang: "The model `x` does not exist." (404, as OpenAI says it); SGLang to 0.5: "not found".
_OTHER_MODEL = re.compile(r"[Mm]odel\b.{0,300}\b(?:does not exist|not found)", re.DOTALL)


class Answer(NamedTuple):
    """How one question ended."""

    state: Literal["good", "bad", "failed"]
    status: int | None = None
    detail: str = ""
    refuses: Literal["key", "task", "model"] | None = None


Question: TypeAlias = Callable[[], Awaitable[Answer]]


def path_question(client: Client, path: str) -> Question:
    """Ask a path; any 2xx is good."""

    async def ask() -> Answer:
        status, body = await client.send(Request(method="GET", path=path), limit=_DETAIL)
        if 200 <= status < 300:
            return Answer("good", status)
        return _refused_key(client, status, body) or Answer("bad", status, _text(body))

    return ask


def callers_question(ready: Callable[[str], object], url: str, lane: Lane) -> Question:
    """Ask the caller's own function, which may block, or coroutine."""

    async def ask() -> Answer:
        result: object
        if inspect.iscoroutinefunction(ready):
            result = await ready(url)
        else:
            result = await lane.ask(lambda: ready(url), within=float("inf"))
            if inspect.isawaitable(result):
                result = await result
        if isinstance(result, Unseen):
            return Answer("bad", detail=result.reason)
        return Answer("good") if result else Answer("bad", detail=f"ready() returned {result!r}")

    return ask


def request_question(client: Client, request: Request, model: str | None) -> Question:
    """Ask the engine's own request, or one of those that it falls back on where the server does not do that one.

    A GET has no content to look at (SGLang's health routes: empty).
    """
    return _Asking(client, request, model).ask


@dataclass(slots=True)
class _Asking:
    """Remembers what the server said of its model and its task, so that the next time is one request."""

    client: Client
    request: Request
    model: str | None
    first: int = 0
    """Index of the first request that was not refused for what it asks."""

    async def ask(self) -> Answer:
        requests = (self.request, *self.request.otherwise)
        refusal: Answer | None = None
        for index in range(self.first, len(requests)):
            if await _is_ruled_out(self.client, requests[index]):
                continue
            answer = await self._ask_one(requests[index])
            if answer.refuses != "task":
                self.first = index
                return answer
            refusal = refusal or answer
        self.first = 0
        return _nothing_fits(requests, refusal)

    async def _ask_one(self, request: Request) -> Answer:
        asked_for = self.model
        if names_its_model(request) and self.model is None:
            named = await _first_model(self.client)
            if isinstance(named, Answer):
                return named
            self.model = named
        answer = await _answer_to(self.client, request, self.model)
        if answer.refuses == "model" and asked_for is not None:
            # The flags do not name it as the server does (a script set another name): the server knows its own.
            named = await _first_model(self.client)
            if isinstance(named, str) and named != asked_for:
                self.model = named
                return await _answer_to(self.client, request, named)
        return answer


async def _answer_to(client: Client, request: Request, model: str | None) -> Answer:
    status, body = await client.send(filled(request, model) if model is not None else request)
    if not 200 <= status < 300:
        return _refusal(client, request, status, body, model)
    if request.method == "POST" and not _is_proved(body, request.proof):
        return Answer("bad", status, f"an answer without content: {_text(body)}")
    return Answer("good", status)


# ------------------------------------------------------------------------------------------- refusals


def _refusal(client: Client, request: Request, status: int, body: bytes, model: str | None) -> Answer:
    """Tell what a status other than 2xx says: a 4xx that names what is wrong is a living front end."""
    key = _refused_key(client, status, body)
    if key is not None:
        return key
    text = _text(body)
    if status == 404 and request.method == "POST" and _OTHER_MODEL.search(text):
        advice = f"the server does not know the model {model!r}: check --served-model-name, or give ready="
        return Answer("bad", status, f"{advice} ({text})", "model")
    is_route = status in {404, 405} and request.method == "POST"
    if is_route or (status in {400, 422, 500, 501} and _OTHER_TASK.search(text)):
        return Answer("bad", status, text, "task")
    return Answer("bad", status, text)


def _refused_key(client: Client, status: int, body: bytes) -> Answer | None:
    if status not in {401, 403}:
        return None
    if client.has_key:
        advice = "the server refuses the API key that its command or environment shows"
    else:
        advice = "the server wants an API key, and its command shows none"
    where = "give it with --api-key in the command (vLLM: or VLLM_API_KEY in env=), or give ready='/health'"
    return Answer("bad", status, f"{advice}: {where} ({_text(body)})", "key")


def _nothing_fits(requests: tuple[Request, ...], refusal: Answer | None) -> Answer:
    if refusal is None:
        return Answer("bad", detail="the server says that it does none of what could be asked: give ready=")
    asked = ", ".join(dict.fromkeys(request.path for request in requests))
    detail = f"the server does none of what was asked ({asked}): give ready= a path or a function ({refusal.detail})"
    return Answer("bad", refusal.status, detail, "task")


async def _is_ruled_out(client: Client, request: Request) -> bool:
    if request.unless_false is None:
        return False
    path, key = request.unless_false
    status, body = await client.send(Request(method="GET", path=path))
    return status == 200 and _at(_read_json(body), key) is False


async def _first_model(client: Client) -> str | Answer:
    status, body = await client.send(Request(method="GET", path="/v1/models"))
    if not 200 <= status < 300:
        return _refused_key(client, status, body) or Answer("bad", status, f"GET /v1/models: {_text(body)}")
    name = _at(_read_json(body), "data.0.id")
    return str(name) if name is not None else Answer("bad", status, f"GET /v1/models names no model: {_text(body)}")


# --------------------------------------------------------------------------------------------- content


def _is_proved(body: bytes, proof: tuple[str, ...]) -> bool:
    """Tell whether an answer holds something computed: at one of these places, or, without any, in its own form."""
    answer = _read_json(body)
    return any(_holds(_at(answer, place)) for place in proof) if proof else _has_content(answer)


def _has_content(answer: Any) -> bool:
    """Tell whether an answer has content in one of the forms that are known.

    The text of a single token can be empty (a part of a character, or the end), so a choice counts as such.
    OpenAI: ``choices``, ``data``; SGLang's own routes: ``text``, ``embedding``, alone or in a list.
    """
    first = answer[0] if isinstance(answer, list) and answer else answer
    if not isinstance(first, dict):
        return False
    return isinstance(first.get("text"), str) or any(first.get(key) for key in ("choices", "data", "embedding"))


def _holds(value: Any) -> bool:
    """Tell whether something is there. A score of zero is; so are no words, where silence was transcribed."""
    return value is not None and value is not False and value not in ([], {})


def _at(value: Any, place: str) -> Any:
    for step in place.split("."):
        if isinstance(value, dict):
            value = value.get(step)
        elif isinstance(value, list) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        else:
            return None
    return value


def _read_json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _text(body: bytes) -> str:
    return body[:_DETAIL].decode(errors="replace")
