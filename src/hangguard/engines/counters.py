"""What an engine counts of its own work, by version, and the request that makes it work."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

from hangguard.engines.base import Engine
from hangguard.engines.common import in_range
from hangguard.facts import Launch, LoadRoute, Metric, Request

CANARY_TOKENS = 128
"""Enough to leave the first steps behind: 128 passed where 227 hung (sglang#29548), and 1 proves a prefill only."""

_LENGTHS = ("max_tokens", "max_completion_tokens", "max_new_tokens")
"""OpenAI's name, its newer one, and that of SGLang's own routes (in ``sampling_params``)."""


def metrics_for(engine: Engine, version: str | None) -> tuple[Metric, ...]:
    """Return the counters of this version; of an unknown version, all."""
    return tuple(metric for metric in engine.metrics if in_range(version, metric.since, metric.until))


def load_routes_for(engine: Engine, version: str | None) -> tuple[LoadRoute, ...]:
    """Return the routes of this version; of an unknown version, all."""
    return tuple(route for route in engine.load_routes if in_range(version, route.since, route.until))


def canary_for(engine: Engine, launch: Launch) -> Request | None:
    """Return the request that makes this launch really work; ``None``: none is known."""
    return engine.canary(launch) if engine.canary is not None and launch.answers else None


def longer(request: Request, tokens: int = CANARY_TOKENS) -> Request:
    """Return the request with so many tokens to generate, whatever comes out; one that generates none stays as it is.

    ``ignore_eos`` is an extension that both engines take in all releases read.
    """
    body = json.loads(request.body) if request.body is not None else None
    if isinstance(body, dict):
        request = replace(request, body=json.dumps(_stretched(body, tokens)))
    return replace(request, otherwise=tuple(longer(other, tokens) for other in request.otherwise))


def _stretched(body: dict[str, Any], tokens: int) -> dict[str, Any]:
    nested = {key: _stretched(value, tokens) if isinstance(value, dict) else value for key, value in body.items()}
    lengths = {key: tokens for key in _LENGTHS if key in body}
    return {**nested, **lengths, **({"ignore_eos": True} if lengths else {})}
