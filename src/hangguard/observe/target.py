"""What is observed, and the form of a probe."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from anyio.abc import TaskGroup

from hangguard.elsewhere import Elsewhere
from hangguard.facts import (
    NOT_ASKED,
    Ask,
    Exit,
    Launch,
    LoadRoute,
    Metric,
    Port,
    QuietRoute,
    Request,
    Serving,
    Tree,
    Unseen,
)
from hangguard.observe.memory_stacks import PythonThreads
from hangguard.observe.rights import Rights


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One attempt, as far as the probes must know it."""

    guardian_pid: int
    root: tuple[int, int]
    """The launched process: (pid, start time in clock ticks since boot)."""
    log_path: str | None
    launch: Launch
    guardian_started: int = 0
    """The start time of the guardian; 0: not known."""
    telling: tuple[str, ...] = ()
    """Patterns of log lines that must be passed on even out of a flood."""
    health_path: str | None = None
    request: Request | None = None
    """Readiness in the engine's own way."""
    ready: Callable[[str], object] | str | None = None
    """The caller's own readiness, asked instead: a path (GET, any 2xx), or a callable that is given the URL
    and returns something true once the server is ready. A plain function may block, a coroutine is awaited."""
    metrics_path: str | None = None
    metrics: tuple[Metric, ...] = ()
    """Counters of this version of the engine."""
    metrics_hint: str = ""
    """What switches them on, for people."""
    load_routes: tuple[LoadRoute, ...] = ()
    quiet_routes: tuple[QuietRoute, ...] = ()
    canary: Request | None = None
    """A request that makes it really work."""
    ras_address: tuple[str, int] | None = None
    """Host and port of ``NCCL_RAS_ADDR`` in the environment of this launch; ``None``: it was given none."""
    rights: Rights | None = None
    """With whose rights the files are opened that the launch names; ``None``: with our own."""
    guardian_stacks: Callable[..., Awaitable[PythonThreads]] | None = None
    """Reads the Python stacks of (pid, start time) ``within=`` seconds, for members that py-spy does not show: the
    guardian, which is an ancestor of them all; ``None``: there is none, so this program reads itself."""
    elsewhere: Elsewhere | None = None
    """Where else than in /dev/shm files may be left; ``None``: nothing is removed at the end."""
    exit_of: Callable[[], Exit | None] = lambda: None
    probe_within: float = 5.0
    clock: Callable[[], float] = time.monotonic


@dataclass(slots=True)
class Shared:
    """What the probes of one observer share: the newest facts that others build on, and long-lived tasks."""

    tasks: TaskGroup
    """For requests that stay open from one sample to the next. Ended by the observer."""
    tree: Tree | Unseen = NOT_ASKED
    port: Port | Unseen = NOT_ASKED
    serving: Serving | Unseen = NOT_ASKED


class Probe(Protocol):
    """One source. Add one: a class of this form, its field in ``Sample``, its line in ``PROBES``.

    A probe that builds on others has a tuple ``after`` too: fields that must be there first. Its deadline
    begins then.
    """

    @property
    def field(self) -> str:
        """The field of ``Sample`` that it fills; a plain class variable will do."""

    async def look(self, ask: Ask) -> object:
        """Return the fact, or :class:`Unseen` with the reason. Foreign errors are translated in here."""

    async def aclose(self) -> None:
        """End what it started, soon and without errors."""


def why_unseen(problem: OSError) -> Unseen:
    """Return what an unreadable file means, with its name where the kernel gave one."""
    reason = problem.strerror or str(problem) or type(problem).__name__
    return Unseen(f"{problem.filename}: {reason}" if problem.filename else reason)
