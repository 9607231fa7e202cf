"""A request that makes the server really work, sent only when nothing else can tell whether it still does."""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

from hangguard.facts import Ask, Reply, Serving, Unseen
from hangguard.observe.answers import _Asker
from hangguard.observe.client import Client
from hangguard.observe.questions import request_question
from hangguard.observe.target import Shared, Target

_AGAIN = 60.0
"""Whoever asks for canaries all the time still gets no more than one a minute: it is work for the server."""


class CanaryProbe:
    """Sends the canary when it is asked for, one at a time, and leaves it open until it is answered."""

    field: ClassVar[str] = "canary"
    after: ClassVar[tuple[str, ...]] = ("port", "serving")

    def __init__(self, target: Target, shared: Shared) -> None:
        self._shared = shared
        self._client = Client(target)
        request = target.canary
        question = request_question(self._client, request, target.launch.model) if request is not None else None
        waits = {"good": _AGAIN, "bad": _AGAIN, "failed": _AGAIN}
        nothing = "no request is known that makes this server work"
        self._asker = _Asker(target, shared, question, waits, nothing)

    async def look(self, ask: Ask) -> Reply | Unseen:
        """Return how the newest canary stands, after sending one if it was asked for.

        None is sent to a server that sleeps: that can end it (vllm#14311).
        """
        serving = self._shared.serving
        sleeps = isinstance(serving, Serving) and serving.is_asleep is True
        reply = await self._asker.look(may_send=ask.canary and not sleeps)
        return replace(reply, detail="it sleeps") if sleeps and reply.state == "not-asked" else reply

    async def aclose(self) -> None:
        """Close the connection. The request ends with the observer's tasks."""
        await self._client.aclose()
