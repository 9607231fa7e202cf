"""Power against utilisation: what each board's counters say of our work, and when they say nothing.

Utilisation says that a kernel is resident, not that it works; power does. A spinning kernel draws the floor of an
idle context (H200: 122 W, spinning 124 to 140), work draws far more (146 to 630). Both levels are learned for each
board during the run, and compared as ratios: boards differ too much for a constant (A2 25 W, GB10 16 to 27 W,
RTX PRO 6000 135 W, all reported of hung ones).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from hangguard.facts import Gpu, Measure, Tree, Unseen

WINDOW = 5.0
"""Seconds over which a board is judged; the same as for the processes."""

LOOKS = 4
"""Fewer readings than this within the window say nothing of power."""

SPINNING_PERCENT = 95.0
WORKING_PERCENT = 50.0
BUSY_PERCENT = 5.0

NEAR_FLOOR = 1.2
"""Watts over the floor, as a ratio: a kernel that spins on all multiprocessors of an H200 draws 1.15 of it."""

NEAR_FLOOR_SPAN = 0.12
FLOOR_AT_MOST = 1.75
"""The same as a share of the way from the floor to the working level, where that was learned, within a bound."""

STEADY = 1.15
"""Highest by lowest watts of a window: a kernel that spins draws the same all the time."""

CLEARLY_ABOVE = 1.5
"""Watts over the floor, as a ratio, that only work draws, where they vary as work does."""

VARIES = 1.03
"""Highest by lowest watts of a window at work; a kernel that spins stays within 1 % (H200)."""

CLEARLY_ABOVE_SPAN = 0.35
"""As a share of the way to the working level, where that was learned: then steady watts are work too."""

HELD_BYTES = 64 * 1024**2
"""A board whose memory grew by this much since the first look holds a context of ours, where NVML names nobody."""

SETTLED = 1.5
"""Seconds for which a board must have been at rest before its watts count as the floor: the figure lags."""


@dataclass(frozen=True, slots=True)
class Look:
    """One reading of one board."""

    t: float
    percent: float | None
    watts: float | None


@dataclass(frozen=True, slots=True)
class Board:
    """What was learned of one GPU, and its last readings."""

    uuid: str
    index: int
    floor: float | None = None
    """Watts with a context and no work; ``None``: not learned."""
    working: float | None = None
    """The highest watts at which something was produced; ``None``: not learned."""
    unseen: str = ""
    """Why its counters say nothing of our work; empty: they do."""
    memory: int | None = None
    looks: tuple[Look, ...] = ()
    first_memory: int | None = None
    rests_since: float | None = None
    """Since when it has been held by a member, at 0 %."""
    candidate: float = 0.0
    """The highest watts at work that nothing was yet produced after."""
    latched: bool = True
    """Whether utilisation has been at its top since the first look."""

    @property
    def name(self) -> str:
        """Return how it is named to people."""
        return f"GPU {self.index}"

    @property
    def percent(self) -> float | None:
        """Utilisation in the last reading, where it can be ours."""
        return self.looks[-1].percent if self.looks else None

    @property
    def watts(self) -> float | None:
        """Power in the last reading, where it can be ours."""
        return self.looks[-1].watts if self.looks else None

    @property
    def is_busy(self) -> bool | None:
        """Whether a kernel of ours is resident; ``None``: cannot be told."""
        return None if self.percent is None else self.percent >= BUSY_PERCENT

    @property
    def works(self) -> bool | None:
        """Whether it draws clearly more than its floor, with kernels resident; ``None``: cannot be told."""
        if self.is_busy is None:
            return None
        busy = [k.watts for k in self.looks if k.percent is not None and k.percent >= BUSY_PERCENT]
        if not busy:
            return False
        drawn = [w for w in busy if w is not None]
        if self.floor is None or len(drawn) < len(busy):
            return None
        if self.working is not None:
            return max(drawn) >= self.floor + CLEARLY_ABOVE_SPAN * (self.working - self.floor) or self._not_at_floor()
        varies = len(drawn) >= LOOKS and max(drawn) > VARIES * min(drawn)
        return (max(drawn) >= CLEARLY_ABOVE * self.floor and varies) or self._not_at_floor()

    def _not_at_floor(self) -> bool | None:
        return False if self.is_at_floor else None

    @property
    def spins(self) -> bool | None:
        """Whether a kernel has been resident over the whole window; ``None``: cannot be told."""
        if any(k.percent is None for k in self.looks) or not self.looks:
            return None
        full = len(self.looks) >= LOOKS and self.looks[-1].t - self.looks[0].t >= WINDOW - 1.5
        return full and all(k.percent is not None and k.percent >= SPINNING_PERCENT for k in self.looks)

    @property
    def is_at_floor(self) -> bool | None:
        """Whether it spins and draws no more than an idle context; ``None``: cannot be told."""
        if not self.spins:
            return self.spins
        drawn = [k.watts for k in self.looks if k.watts is not None]
        if self.floor is None or len(drawn) < len(self.looks):
            return None
        near = NEAR_FLOOR * self.floor
        if self.working is not None:
            share = self.floor + NEAR_FLOOR_SPAN * (self.working - self.floor)
            near = max(near, min(share, FLOOR_AT_MOST * self.floor))
        return max(drawn) <= near and max(drawn) <= STEADY * min(drawn)


@dataclass(frozen=True, slots=True)
class Boards:
    """All GPUs of the launch."""

    boards: tuple[Board, ...] = ()
    seen: bool = False
    """Whether the last sample showed them; no board and seen: this machine has none."""

    @property
    def unseen(self) -> tuple[str, ...]:
        """Return which boards' counters say nothing of our work, each with its reason."""
        return tuple(f"{b.name}: {b.unseen}" for b in self.boards if b.unseen)

    @property
    def is_busy(self) -> bool | None:
        """Whether a kernel of ours is resident on any; ``None``: cannot be told of all of them."""
        return _any(b.is_busy for b in self.boards) if self.seen else None

    @property
    def working(self) -> tuple[Board, ...]:
        """Return the boards that work."""
        return tuple(b for b in self.boards if b.works)

    @property
    def spinning(self) -> tuple[Board, ...]:
        """Return the boards on which a kernel has been resident over the whole window."""
        return tuple(b for b in self.boards if b.spins)

    @property
    def at_floor(self) -> tuple[Board, ...]:
        """Return the boards that spin and draw no more than an idle context."""
        return tuple(b for b in self.boards if b.is_at_floor)


def works(boards: Boards) -> bool | None:
    """Say whether any board works for us: power clearly above its floor; ``None``: cannot be told of all of them."""
    return _any(b.works for b in boards.boards) if boards.seen else None


def is_busy_for_nothing(boards: Boards) -> bool | None:
    """Say whether kernels are resident all the time at floor power, and nothing else runs on any board.

    ``None``: some board is busy, and its power or its neighbours keep us from telling for what.
    """
    if not boards.seen:
        return None
    busy = [b for b in boards.boards if b.is_busy is not False]
    answers = [b.is_at_floor if b.is_busy else None for b in busy]
    return False if not busy or False in answers else None if None in answers else True


def measures(boards: Boards) -> tuple[Measure, ...]:
    """Return utilisation and power of every board that can be seen, as numbers for a verdict."""
    found = []
    for board in boards.boards[:8]:
        if board.percent is not None:
            found.append(Measure(f"{board.name} utilisation", board.percent, "%"))
        if board.watts is not None:
            found.append(Measure(f"{board.name} power", board.watts, "W"))
        if board.floor is not None and board.watts is not None:
            found.append(Measure(f"{board.name} floor", board.floor, "W"))
    return tuple(found)


def note_boards(boards: Boards, gpus: tuple[Gpu, ...] | Unseen, tree: Tree | Unseen, t: float) -> Boards:
    """Return what is known after one more look; what is unseen leaves what was learned, and no readings."""
    if isinstance(gpus, Unseen):
        return Boards(tuple(replace(b, looks=(), rests_since=None, memory=None) for b in boards.boards), seen=False)
    known = {b.uuid: b for b in boards.boards}
    pids = None if isinstance(tree, Unseen) else frozenset(p.pid for p in tree.members)
    return Boards(tuple(_note_board(known.get(g.uuid, Board(g.uuid, g.index)), g, pids, t) for g in gpus), seen=True)


def note_product(boards: Boards) -> Boards:
    """Return what is known once something was produced: the watts just drawn at work were those of work."""
    return replace(
        boards,
        boards=tuple(
            replace(b, working=max(b.working or 0.0, b.candidate), candidate=0.0)
            if b.floor is not None and b.candidate > CLEARLY_ABOVE * b.floor
            else replace(b, candidate=0.0)
            for b in boards.boards
        ),
    )


def _note_board(board: Board, gpu: Gpu, pids: frozenset[int] | None, t: float) -> Board:
    percent = None if isinstance(gpu.utilization_percent, Unseen) else gpu.utilization_percent
    watts = None if isinstance(gpu.power_watts, Unseen) else gpu.power_watts
    used = None if isinstance(gpu.memory_used_bytes, Unseen) else gpu.memory_used_bytes
    first = board.first_memory if board.first_memory is not None else used
    held = _is_held(gpu, pids, used, first)
    began_held = held and not board.looks
    latched = board.latched and (percent is None or percent >= SPINNING_PERCENT) and not began_held
    why = _why_unseen(gpu, pids, latched=latched)
    if why:
        # Nobody works on a board at 0 %, us included: that much is seen whoever holds it.
        rest = percent == 0.0 and not latched
        looks = (*board.looks, Look(t, 0.0, None)) if rest else (*board.looks, Look(t, None, None))
        seen = replace(board, unseen=why, memory=None, rests_since=None, latched=latched, first_memory=first)
        return replace(seen, looks=_recent(looks, t))
    looks = _recent((*board.looks, Look(t, percent, watts)), t)
    board = replace(board, unseen="", memory=used, looks=looks, latched=latched, first_memory=first)
    return _learn(board, percent, watts, held=held, t=t)


def _recent(looks: tuple[Look, ...], t: float) -> tuple[Look, ...]:
    recent = tuple(k for k in looks if k.t > t - WINDOW - 0.5)
    return max(recent, looks[-LOOKS:], key=len)


def _is_held(gpu: Gpu, pids: frozenset[int] | None, used: int | None, first: int | None) -> bool:
    """Whether a member has memory on it: a context exists."""
    if isinstance(gpu.holders, Unseen) or pids is None:
        return False
    if gpu.holders:
        return any(h.pid in pids for h in gpu.holders)
    return used is not None and first is not None and used - first >= HELD_BYTES


def _why_unseen(gpu: Gpu, pids: frozenset[int] | None, *, latched: bool) -> str:
    if isinstance(gpu.utilization_percent, Unseen):
        return gpu.utilization_percent.reason
    if isinstance(gpu.holders, Unseen):
        return f"who works on it cannot be seen ({gpu.holders.reason})"
    if pids is None:
        return "the members cannot be seen"
    strangers = [str(h.pid) for h in gpu.holders if h.pid not in pids]
    if strangers:
        return f"it is also held by pid {', '.join(strangers[:4])}, which is no member that could be seen"
    if latched:
        return "its utilisation has been at 100 % since before this launch had it, and says nothing"
    return ""


def _learn(board: Board, percent: float | None, watts: float | None, *, held: bool, t: float) -> Board:
    if percent is None or watts is None:
        return replace(board, rests_since=None)
    if percent >= WORKING_PERCENT:
        return replace(board, rests_since=None, candidate=max(board.candidate, watts))
    if percent > 0.0 or not held:
        return replace(board, rests_since=None)
    since = t if board.rests_since is None else board.rests_since
    if t - since < SETTLED:
        return replace(board, rests_since=since)
    lately = [k.watts for k in board.looks if k.t >= max(since, t - SETTLED - 1.0) and k.watts is not None]
    return replace(board, rests_since=since, floor=min(board.floor or max(lately), max(lately)))


def _any(answers: Iterable[bool | None]) -> bool | None:
    found = tuple(answers)
    return True if True in found else None if None in found else False
