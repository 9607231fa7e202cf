"""The form of an engine: what is known of one server program, as data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hangguard.facts import (
    Fallback,
    IdlePlace,
    Launch,
    LoadRoute,
    Marker,
    Metric,
    QuietLine,
    QuietRoute,
    Request,
    StackMarker,
    Symptom,
    Task,
    Timer,
    WaitSite,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """How the options that hangguard must read are spelled; every tuple lists aliases."""

    host: tuple[str, ...] = ("--host",)
    port: tuple[str, ...] = ("--port",)
    model: tuple[str, ...] = ("--model",)
    served_name: tuple[str, ...] = ("--served-model-name",)
    api_key: tuple[str, ...] = ("--api-key",)
    tensor_parallel: tuple[str, ...] = ()
    pipeline_parallel: tuple[str, ...] = ()
    data_parallel: tuple[str, ...] = ()
    shares_ranks: tuple[str, ...] = ()
    """With one of these the data-parallel groups share the tensor-parallel ranks."""
    data_parallel_here: tuple[str, ...] = ()
    """How many of the data-parallel groups are on this machine."""
    data_parallel_rank: tuple[str, ...] = ()
    """With one of these there is one group on this machine, which the value numbers."""
    nodes: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ("--node-rank",)
    headless: tuple[str, ...] = ()
    """Switches by which it serves no requests of its own."""
    socket: tuple[str, ...] = ("--uds",)
    """The unix socket on which it answers instead of a port."""
    certificate: tuple[str, ...] = ("--ssl-certfile",)
    """With one of these it speaks TLS."""
    config: str | None = None
    """The option that names a YAML file of options."""
    no_tokenizer: tuple[str, ...] = ("--skip-tokenizer-init",)
    executor: tuple[str, ...] = ()
    """Where the workers are started: the value ``ray`` leaves that to a cluster."""
    ray: tuple[str, ...] = ()
    """Switches that do the same."""
    api_key_variable: str | None = None
    """Environment variable that gives the key where no flag does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One server program.

    Engines are values: make a changed one with :func:`dataclasses.replace`, pass it as ``engine=``.
    """

    name: str
    recognise: Callable[[tuple[str, ...]], int | None]
    """Given argv, return the index of the first argument that belongs to the server, or ``None``."""
    distributions: tuple[str, ...] = ()
    """Distribution names whose metadata gives the version, best first."""
    option_sources: tuple[str, ...] = ()
    """Files of the installed package (relative to site-packages) that spell the accepted options."""
    flags: Flags = Flags()
    default_host: str = "127.0.0.1"
    default_port: int | None = None
    """``None``: the command does not tell where it answers; a URL must be given."""
    positional_model: bool = False
    """Whether the first bare word after the recognised command is the model."""
    task: Callable[[tuple[str, ...]], Task | None] | None = None
    """What the server's own arguments ask it to compute; ``None``: they do not tell."""
    followers_answer: bool = True
    """Whether nodes of a higher rank answer requests of their own."""
    markers: tuple[Marker, ...] = ()
    noise: tuple[str, ...] = ()
    """Patterns of lines that are never news: access lines, statistics without work, heartbeats."""
    stack_markers: tuple[StackMarker, ...] = ()
    symptoms: tuple[Symptom, ...] = ()
    front_end: tuple[str, ...] = ()
    """Titles (patterns) of members that only wait for others; trackers and the main process."""
    workers: tuple[str, ...] = ()
    """Titles (patterns) of members that do the work."""
    wait_sites: tuple[WaitSite, ...] = ()
    """Where its threads wait, and for what; read before those that all engines share."""
    timers: tuple[Timer, ...] = ()
    """Limits of its own, and of the libraries that it brings."""
    metrics_path: str | None = None
    """Route of its metrics in Prometheus' text form; it may be switched off."""
    metrics: tuple[Metric, ...] = ()
    metrics_on: str = ""
    """The flag without which it counts nothing; empty: it needs none."""
    metrics_off: str = ""
    """The flag with which it counts nothing."""
    metrics_hint: str = ""
    """What switches them on, for people."""
    load_routes: tuple[LoadRoute, ...] = ()
    """Where the numbers of requests stand too, fresher than in the metrics; the best first."""
    quiet_routes: tuple[QuietRoute, ...] = ()
    """Where it tells that it sleeps or is paused."""
    quiet_lines: tuple[QuietLine, ...] = ()
    """Lines of its log between which it sleeps or is paused."""
    idle_places: tuple[IdlePlace, ...] = ()
    """Where its workers stand while they have nothing to do."""
    idle_spins: bool = False
    """Whether its workers burn CPU while they wait for requests: then CPU time says nothing about work."""
    health_path: str | None = None
    ready: Callable[[Launch], Request | None] | None = None
    """The request whose answer means ready; its body may hold ``{model}``, filled once it is known.
    ``None``: nothing that this launch answers would prove anything."""
    canary: Callable[[Launch], Request | None] | None = None
    """The request that makes it really generate, asked when nothing else can tell whether it still works."""
    environment: tuple[tuple[str, str], ...] = ()
    """What hangguard adds to the environment for this engine (switched off by ``pristine``)."""
    fallbacks: tuple[Fallback, ...] = ()
    """In the order in which they are tried."""
