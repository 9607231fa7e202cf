"""A model of an engine with its queue, one second at a time. What a watcher sees of it: ``served_hours.py``.

Everything in it is healthy, however it looks: idle nights, bursts, long prefills, overload, the compile behind a
first request, sleep and pause that somebody wanted, metrics that cannot be read, canaries that wait in the queue
like everybody else. :meth:`Engine.hangs` makes it one that does hang, for the other side of the score.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from hangguard.facts import Reply

TOKENS_PER_SECOND = 30
BATCH = 16
CANARY = 128
"""Tokens of a canary."""

Work = Callable[[random.Random], "Piece"]


@dataclass(frozen=True)
class Piece:
    """A stretch of an hour: what is asked of the server, and what it is busy with."""

    what: str
    seconds: float
    requests_per_second: float = 0.0
    prefill: tuple[float, float] = (0.05, 0.3)
    """Seconds between which a prefill lies: nothing is generated meanwhile, for nobody."""
    tokens: tuple[int, int] = (20, 300)
    compiles: float = 0.0
    """Seconds for which the first request compiles."""
    in_children: bool = True
    asleep: bool = False
    wanted: bool = False
    """Whether the handle was told that this stillness is wanted."""


PIECES: tuple[Work, ...] = (
    lambda r: Piece("idle", r.uniform(60, 900)),
    lambda r: Piece("bursts", r.uniform(60, 600), r.uniform(0.1, 3.0)),
    lambda r: Piece("long prefills", r.uniform(120, 600), r.uniform(0.005, 0.03), (20.0, 150.0), (1, 50)),
    lambda r: Piece("long answers", r.uniform(120, 600), r.uniform(0.01, 0.1), tokens=(3000, 8000)),
    lambda r: Piece("overload", r.uniform(120, 600), r.uniform(5.0, 20.0), (0.1, 1.0)),
    lambda r: Piece("compile behind a request", r.uniform(150, 300), 0.05, compiles=r.uniform(15, 110)),
    lambda r: Piece("compile in the worker", r.uniform(150, 300), 0.05, compiles=r.uniform(15, 60), in_children=False),
    lambda r: Piece("asleep", r.uniform(60, 900), r.choice((0.0, 0.01)), asleep=True),
    lambda r: Piece("paused, as told", r.uniform(30, 300), r.choice((0.0, 0.5)), asleep=True, wanted=True),
)


@dataclass
class Request:
    prefill_left: float
    tokens_left: int
    tokens: int = 0
    canary: bool = False
    stays: bool = True
    """Whether its client waits for the answer, and is not one that gives up."""


@dataclass
class Engine:
    """One server: its queue, its batch, its compiler, and whether it sleeps or hangs."""

    rng: random.Random
    engine: str = field(init=False)
    t: float = 5000.0
    piece: Piece = Piece("start", 0.0)
    running: list[Request] = field(default_factory=list)
    queue: list[Request] = field(default_factory=list)
    compile_left: float = 0.0
    hung: str = ""
    """How it hangs: ``""``, ``idle`` or ``hot``."""
    hung_at: float | None = None
    canary: Reply = Reply(state="not-asked", since=0.0)
    canaries: int = 0
    canaries_to_sleepers: int = 0
    generated: int = 0
    prompt: int = 0
    finished: int = 0
    cpu: dict[int, float] = field(default_factory=dict)
    log_bytes: int = 0
    births: int = 5
    deaths: int = 2
    compiler: int | None = None
    """The pid of the compiler that runs."""
    worked: bool = False
    """Whether the last second brought a step of the engine."""

    def __post_init__(self) -> None:
        rng = self.rng
        self.engine = rng.choice(("vllm", "sglang"))
        self.gpus = rng.choice((0, 1, 1, 8))
        self.neighbour = self.gpus > 0 and rng.random() < 0.2
        self.metrics = rng.choice(("read", "read", "read", "flaky", "off"))
        self.counts_when_finished = self.engine == "sglang" and rng.random() < 0.5
        self.clients_seen = rng.random() < 0.8
        self.idle_connections = rng.choice((0, 0, 1, 20))
        self.prints = rng.random() < 0.8
        self.floor = rng.uniform(20.0, 130.0)
        self.working = self.floor * rng.uniform(1.8, 5.0)

    def comes(self, piece: Piece) -> Piece:
        """Return the piece as this server may have it: where its own routes tell of no sleep, the handle is told."""
        return replace(piece, wanted=True) if piece.asleep and self.metrics != "read" else piece

    def second(self) -> None:
        """Let a second pass."""
        self.t += 1.0
        self.worked = False
        self._ask_more()
        if not self.hung and not self.piece.asleep:
            self._admit()
            if self.compiles:
                self.compile_left -= 1.0
            else:
                self._work()
        self._mind_the_compiler()
        for pid, rate in self._rates().items():
            self.cpu[pid] = self.cpu.get(pid, 0.0) + rate

    @property
    def compiles(self) -> bool:
        """Whether the first request waits for a compile."""
        return self.compile_left > 0 and bool(self.running) and not self.hung and not self.piece.asleep

    def hangs(self, how: str) -> None:
        """From now on nothing is generated any more; there is at least one request that waits."""
        self.hung, self.hung_at = how, self.t
        if not self.running:
            self.running.append(Request(0.1, 200))

    def _ask_more(self) -> None:
        piece, rng = self.piece, self.rng
        expected = piece.requests_per_second
        for _ in range(int(expected) + (rng.random() < expected % 1)):
            if len(self.queue) < 400:
                self.queue.append(Request(rng.uniform(*piece.prefill), rng.randint(*piece.tokens)))

    def _mind_the_compiler(self) -> None:
        if self.compiles and self.piece.in_children and self.compiler is None:
            self.births += 1
            self.compiler = 200 + self.births
        elif self.compiler is not None and not self.compiles:
            self.deaths += 1
            self.cpu.pop(self.compiler, None)
            self.compiler = None

    def _rates(self) -> dict[int, float]:
        """CPU seconds a second, by process."""
        busy = self.worked or (self.compiles and self.compiler is None) or self.hung == "hot"
        spins = self.engine == "sglang" and self.hung != "idle"
        front = 0.02 + 0.01 * min(50, len(self.running)) if self.worked else 0.003
        rates = {100: front, 102: 1.0 if busy or spins else 0.007}
        return rates if self.compiler is None else {**rates, self.compiler: 0.98}

    def _admit(self) -> None:
        while self.queue and len(self.running) < BATCH:
            self.running.append(self.queue.pop(0))

    def _work(self) -> None:
        budget = 1.0
        for request in self.running:
            if request.prefill_left > 0 and budget > 0:
                self.worked = True
                spent = min(budget, request.prefill_left)
                request.prefill_left -= spent
                budget -= spent
                if request.prefill_left <= 0:
                    self.prompt += self.rng.randint(100, 8000)
        if budget <= 0:
            return
        for request in self.running:
            if request.prefill_left > 0:
                continue
            self.worked = True
            made = min(request.tokens_left, max(1, round(TOKENS_PER_SECOND * budget)))
            request.tokens_left -= made
            request.tokens += made
            if not self.counts_when_finished:
                self.generated += made
        for request in [r for r in self.running if r.tokens_left <= 0 and r.prefill_left <= 0]:
            self.running.remove(request)
            self.finished += 1
            if self.counts_when_finished:
                self.generated += request.tokens
            if request.canary:
                self.canary = Reply(state="good", since=self.t, status=200)
