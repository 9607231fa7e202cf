"""The HTTP client of the probes: speaks to one server and to nobody else."""

from __future__ import annotations

import json
import struct
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import anyio

from hangguard.facts import Request, Unseen
from hangguard.observe.connections import own_request
from hangguard.observe.lane import Lane
from hangguard.observe.target import Target

if TYPE_CHECKING:
    import httpx

BODY_LIMIT = 4 * 1024 * 1024
"""An embedding has some 100 kB; whoever sends more is not read to the end."""
_AUDIO_RATE = 16_000


class Client:
    """No proxy, no redirect, no connection kept; a unix socket where the server has one.

    A kept connection is closed by the server just when the next request is sent (uvicorn: after 5 s).
    There is no time limit: a server that does not answer is a state to be told, not an error.
    """

    def __init__(self, target: Target) -> None:
        self._url = target.launch.url
        self._socket_path = target.launch.socket_path
        self._key = target.launch.api_key
        self._client: httpx.AsyncClient | None = None
        self._connecting = anyio.Lock()
        self._lane = Lane("httpx")

    @property
    def has_key(self) -> bool:
        """Whether a key is sent."""
        return self._key is not None

    async def send(self, request: Request, *, limit: int = BODY_LIMIT) -> tuple[int, bytes]:
        """Return the status and the body, as far as ``limit``."""
        async with self._connecting:
            if self._client is None:
                self._client = await self._connect()
        url = self._url + "/" + request.path.lstrip("/")
        with own_request() as traced:
            stream = self._client.stream(request.method, url, extensions={"trace": traced}, **_content_of(request))
            async with stream as response:
                return response.status_code, await _read(response, limit)

    async def aclose(self) -> None:
        """Close the connection."""
        self._lane.close()
        if self._client is not None:
            await self._client.aclose()

    async def _connect(self) -> httpx.AsyncClient:
        # In a thread: the event loop is the caller's, and on a busy machine the import alone takes seconds.
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
        through = None
        if self._socket_path is not None:
            through = httpx.AsyncHTTPTransport(uds=self._socket_path, verify=False, trust_env=False)
        return httpx.AsyncClient(
            headers=headers,
            timeout=None,  # noqa: S113
            trust_env=False,
            verify=False,  # noqa: S501
            transport=through,
        )


def filled(request: Request, model: str) -> Request:
    """Return the request with the model's name in the places that wait for it."""
    # As a JSON string without its quotes: a model may be named by a path with a backslash.
    body = request.body.replace("{model}", json.dumps(model)[1:-1]) if request.body is not None else None
    return replace(
        request, body=body, form=tuple((name, text.replace("{model}", model)) for name, text in request.form)
    )


def names_its_model(request: Request) -> bool:
    """Tell whether the model's name has to be known before it is sent."""
    return "{model}" in (request.body or "") or any("{model}" in text for _, text in request.form)


def _content_of(request: Request) -> dict[str, Any]:
    if request.form or request.audio_seconds:
        return {
            "data": dict(request.form),
            "files": {"file": ("silence.wav", _silence(request.audio_seconds), "audio/wav")},
        }
    if request.body is None:
        return {}
    return {"content": request.body.encode(), "headers": {"Content-Type": "application/json"}}


def _silence(seconds: float) -> bytes:
    """Return a WAV file: one channel of 16-bit samples, all zero."""
    data = bytes(2 * int(seconds * _AUDIO_RATE))
    form = struct.pack("<4sIHHIIHH", b"fmt ", 16, 1, 1, _AUDIO_RATE, 2 * _AUDIO_RATE, 2, 16)
    return (
        struct.pack("<4sI4s", b"RIFF", 36 + len(data), b"WAVE") + form + struct.pack("<4sI", b"data", len(data)) + data
    )


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
