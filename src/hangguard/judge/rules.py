"""What the judgement of one launch goes by: the engine's table, the launch's shape, the caller's limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hangguard.engines.base import Engine
from hangguard.engines.common import markers_for
from hangguard.facts import Launch, Limits, Marker, StackMarker, Symptom

TRACKERS = (r"multiprocessing[./]resource_tracker", r"multiprocessing[./]forkserver")
"""Helpers of Python's own: they wait for others for as long as those live, and work for nobody."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Everything that ``step`` needs to know beside the samples."""

    limits: Limits = Limits()
    deadline: float = float("inf")
    """When ``ready_within`` is over, monotonic."""
    markers: tuple[Marker, ...] = ()
    noise: tuple[str, ...] = ()
    stack_markers: tuple[StackMarker, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    front_end: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    ranks: int = 1
    nodes: int = 1
    delegates_to: str | None = None


def rules_for(engine: Engine, launch: Launch, limits: Limits | None = None, *, deadline: float = float("inf")) -> Rules:
    """Return the rules for one launch of ``engine``; markers are those of the launch's version."""
    return Rules(
        limits=limits or Limits(),
        deadline=deadline,
        markers=markers_for(engine, launch.version),
        noise=engine.noise,
        stack_markers=engine.stack_markers,
        symptoms=engine.symptoms,
        front_end=engine.front_end,
        workers=engine.workers,
        ranks=launch.ranks,
        nodes=launch.nodes,
        delegates_to=launch.delegates_to,
    )


def matches(patterns: tuple[str, ...], text: str) -> bool:
    """Say whether any of the patterns occurs in ``text``."""
    return bool(patterns) and _any_of(patterns).search(text) is not None


@lru_cache(maxsize=256)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
