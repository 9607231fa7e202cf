"""What to start, and within which limits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hangguard.facts.known import Alters, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What to start, and where it will answer. Made by ``launching.read_command``; changed by ``changes``.

    ``env`` is the whole environment of the server as sorted pairs, before hangguard's own additions.
    """

    argv: tuple[str, ...]
    env: tuple[tuple[str, str], ...] = field(repr=False)
    cwd: str
    engine: str = "generic"
    version: str | None = None
    """Version of the engine, read from the files of the interpreter that will run it; ``None``: not found."""
    options: frozenset[str] | None = field(default=None, repr=False)
    """Option strings found in the installed engine's own source; ``None``: not found, the tables decide."""
    url: str
    """Base URL without a trailing slash, for example ``http://127.0.0.1:8000``."""
    host: str
    port: int
    chooses_port: bool = False
    """Whether the port was ours to choose (``{port}`` in the command): then a relaunch gets a fresh one."""
    model: str | None = None
    """The name under which the server will know its model; ``None``: it must be asked."""
    file_args: tuple[str, ...] = field(default=(), repr=False)
    """What its ``--config`` file says, as the options that the server makes of it; those in argv come after them."""
    task: Task = "generate"
    """What it computes; with which request "answered" is proved depends on it."""
    tokenizes: bool = True
    """False: it has no tokenizer and takes token ids only (``--skip-tokenizer-init``)."""
    answers: bool = True
    """False: it never answers requests of its own (a headless or higher-rank node of a launch over machines)."""
    socket_path: str | None = None
    """The unix socket on which it answers instead of a port."""
    api_key: str | None = field(default=None, repr=False)
    ranks: int = 1
    """Worker ranks on this machine, as far as the flags tell (tensor x pipeline x data parallel)."""
    nodes: int = 1
    """Machines that take part; above 1 a silent start may be waiting for peers."""
    node_rank: int = 0
    """Which of them this is."""
    wrapped_by: tuple[str, ...] = ()
    """Programs in front of the server that end up as it, or as its parent (``nohup``, ``numactl``, ``uv run``)."""
    delegates_to: str | None = None
    """The program that starts the server elsewhere (``docker``, ``srun`` …): its workers cannot be seen."""
    notes: tuple[str, ...] = ()
    """What could not be understood of the command, in sentences for people."""

    def environment(self) -> dict[str, str]:
        """Return the environment as a new mapping."""
        return dict(self.env)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """How long each thing may take. Float seconds; ``float("inf")`` is allowed for the budgets.

    Raises :class:`ValueError` for a negative number or NaN.
    """

    ready_within: float = 3600.0
    """From the first spawn until an answer, over all attempts."""
    patience: float | None = None
    """A cap on the patience of every phase; ``None``: what each phase has."""
    waiting: float = 1800.0
    """Budget of one uninterrupted wait for something outside (a lock, a peer, a disk)."""
    unclear: float = 600.0
    """Budget of one uninterrupted stretch in which nothing is produced and nothing can be proved."""
    stop_grace: float = 15.0
    """Between SIGTERM and SIGKILL when the supervisor asks for a stop."""
    death_grace: float = 1.5
    """The same when the supervising program has died."""
    release_within: float = 60.0
    """How long to look whether everything of an attempt is gone."""
    probe_within: float = 5.0
    """How long one look at one source may take before it counts as unseen."""

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        for name in self.__slots__:
            value = getattr(self, name)
            if value is None and name == "patience":
                continue
            if not isinstance(value, (int, float)) or isinstance(value, bool) or not value >= 0.0:
                msg = f"Limits.{name} must be a number of seconds, zero or more, not {value!r}"
                raise ValueError(msg)


@dataclass(frozen=True, slots=True, kw_only=True)
class Fallback:
    """One change to a launch, tried when an attempt went wrong in a way that it may answer.

    ``change`` is pure: it returns the changed launch, or ``None`` where it does not apply (already there, not
    accepted by this version, without effect on one GPU). Applying it twice changes nothing more.
    """

    name: str
    change: Callable[[Launch], Launch | None]
    answers: tuple[str, ...]
    """Phases in which a hang may be cured by it (``"graph-capture"``), or reasons of an exit (``"gpu-oom"``)."""
    alters: Alters
    cost: str
    """One sentence for the person who will run the changed server."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AppliedChange:
    """A difference between what was asked for and what runs."""

    name: str
    change: str
    alters: Alters
