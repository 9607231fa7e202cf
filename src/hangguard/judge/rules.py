"""What the judgement of one launch goes by: the engine's table, the launch's shape, the caller's limits."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hangguard.changes import spelled_out
from hangguard.engines.base import Engine
from hangguard.engines.common import markers_for
from hangguard.engines.waiting import EVERYWHERE
from hangguard.facts import IdlePlace, Launch, Limits, Marker, Phase, QuietLine, StackMarker, Symptom, WaitSite

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
    quiet_lines: tuple[QuietLine, ...] = ()
    """Lines of the log between which it sleeps or is paused on purpose."""
    stack_markers: tuple[StackMarker, ...] = ()
    wait_sites: tuple[WaitSite, ...] = EVERYWHERE
    """Where threads wait, and for what: the engine's own, then those that all share."""
    symptoms: tuple[Symptom, ...] = ()
    front_end: tuple[str, ...] = ()
    workers: tuple[str, ...] = ()
    ranks: int = 1
    nodes: int = 1
    node_rank: int = 0
    answers: bool = True
    """False: it never answers requests of its own (a headless or higher-rank node)."""
    delegates_to: str | None = None
    idle_places: tuple[IdlePlace, ...] = ()
    """Where workers stand while they have nothing to do."""
    idle_spins: bool = False
    """Whether its workers burn CPU while they wait for requests."""
    has_counters: bool = False
    """Whether it is known by which names the engine counts requests and tokens."""
    learned: tuple[tuple[Phase, float], ...] = ()
    """Longest still stretch that good starts of the same kind were seen to have, seconds by phase."""
    attached: bool = False
    """Somebody else started it: neither its beginning nor, as a rule, its log is seen."""
    argv: tuple[str, ...] | None = None
    """Every option that the server was given, those of its config file first; ``None``: they are not known."""
    proxy: str = ""
    """The variable of a proxy that loopback is not exempt from; empty: there is none."""


def rules_for(
    engine: Engine,
    launch: Launch,
    limits: Limits | None = None,
    *,
    deadline: float = float("inf"),
    learned: tuple[tuple[Phase, float], ...] = (),
    attached: bool = False,
) -> Rules:
    """Return the rules for one launch of ``engine``; markers are those of the launch's version."""
    return Rules(
        limits=limits or Limits(),
        deadline=deadline,
        markers=markers_for(engine, launch.version),
        noise=engine.noise,
        quiet_lines=engine.quiet_lines,
        stack_markers=engine.stack_markers,
        wait_sites=(*engine.wait_sites, *EVERYWHERE),
        symptoms=engine.symptoms,
        front_end=engine.front_end,
        workers=engine.workers,
        ranks=launch.ranks,
        nodes=launch.nodes,
        node_rank=launch.node_rank,
        answers=launch.answers,
        delegates_to=launch.delegates_to,
        idle_places=engine.idle_places,
        idle_spins=engine.idle_spins,
        has_counters=bool(engine.metrics),
        learned=learned,
        attached=attached,
        argv=spelled_out((*launch.file_args, *launch.argv), launch.options) if engine.workers else None,
        proxy=_proxy(launch),
    )


def _proxy(launch: Launch) -> str:
    """Return the variable by which an HTTP client inside the server would send its own warm-up request away."""
    env = launch.environment()
    exempt = ",".join(env.get(name, "") for name in ("no_proxy", "NO_PROXY"))
    if any(word.strip() in {"*", "localhost", "127.0.0.1", launch.host} for word in exempt.split(",") if word.strip()):
        return ""
    return next((name for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY") if env.get(name)), "")


def matches(patterns: tuple[str, ...], text: str) -> bool:
    """Say whether any of the patterns occurs in ``text``."""
    return bool(patterns) and _any_of(patterns).search(text) is not None


@lru_cache(maxsize=256)
def _any_of(patterns: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(f"(?:{pattern})" for pattern in patterns))
