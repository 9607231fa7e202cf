"""What happens in a cycle: thrown by dice from the seed and the number, so that one cycle can be done again."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

ESCAPES = ("setsid", "double", "retitled", "empty", "stubborn", "shm")
LEAVES = ("mapped", "semaphore", "socket", "worker")
HERE = ("stop", "terminate", "kill", "restart", "leave", "raise", "cancel")
"""What a supervising program does of itself."""
CHILD = (*HERE, "sigint", "sigint", "sigint", "sigterm")
"""What else can be done to one that is a process of its own."""
VICTIMS = ("worker", "root", "guardian", "escaped")
BOTH_EVERY = 50
"""Supervisor and guardian are killed in the same instant in one of so many cycles: 2 %."""
DEATH_EVERY = 4
"""The supervising program is killed in one of so many: in 50 of 200."""
MID_STOP = 0.5
"""Seconds from the beginning of a stop in which most of what happens in it does."""
BLIND_FOR = 2.0
"""What was made so shortly before we killed its maker may have been seen by nobody: the watch looks once a second."""


@dataclass(frozen=True)
class Moment:
    """So many seconds after the supervising program began, launched its server, or had an answer from it."""

    after: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    number: int
    where: str
    """``here``: in the process of the soak; ``child``: the supervising program is a process of its own."""
    face: str
    escapes: tuple[str, ...]
    leaves: tuple[str, ...]
    tp: int
    fixed_port: bool
    attempts: int
    forks: bool
    """The supervising program forks a child of its own when its server has been launched: that lives on."""
    victim: str
    """Whom we kill; empty: nobody."""
    victim_at: Moment
    ending: str
    ending_at: Moment

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def kills(self) -> tuple[str, ...]:
        of_supervisor = {"sigkill": ("supervisor",), "sigterm": ("supervisor",), "both": ("supervisor and guardian",)}
        return (*((self.victim,) if self.victim else ()), *of_supervisor.get(self.ending, ()))


def plan_of(seed: int, number: int, *, guardians: bool = False) -> Plan:
    """Throw the dice for one cycle; ``guardians``: and kill the guardian in the middle of its stop, and nobody else."""
    plan = _plan_of(random.Random(f"{seed}-{number}"), number)
    if not guardians or plan.ending in {"both", "sigkill", "sigterm"}:
        return plan
    dice = random.Random(f"{seed}-{number}-guardian")
    return replace(plan, victim="guardian", victim_at=Moment("stopping", dice.uniform(0.0, MID_STOP)))


def _plan_of(dice: random.Random, number: int) -> Plan:
    is_both, is_death = number % BOTH_EVERY == BOTH_EVERY - 1, number % DEATH_EVERY == 0
    where = "child" if is_both or is_death else dice.choice(("here", "child"))
    ending = dice.choice(CHILD if where == "child" else HERE)
    if is_both or is_death:
        ending = "both" if is_both else "sigkill"
    # With the guardian killed a moment before its supervisor there are more of "both" than BOTH_EVERY allows.
    victims = tuple(v for v in VICTIMS if v != "guardian" or ending not in {"sigkill", "sigterm"})
    face = dice.choice(("asyncio", "trio") if ending == "cancel" else ("sync", "asyncio", "trio"))
    return Plan(
        number=number,
        where=where,
        face=face,
        escapes=tuple(kind for kind in ESCAPES if dice.random() < 0.4),
        leaves=tuple(kind for kind in LEAVES if dice.random() < 0.5),
        tp=dice.choice((1, 1, 2)),
        fixed_port=dice.random() < 0.5,
        attempts=dice.choice((1, 1, 1, 2)),
        forks=is_death and dice.random() < 0.5,
        victim="" if is_both or dice.random() < 0.5 else dice.choice(victims),
        victim_at=Moment(dice.choice(("launched", "ready")), dice.uniform(0.0, 1.0)),
        ending=ending,
        ending_at=Moment(_when(dice, ending), dice.uniform(0.0, 1.0)),
    )


def _when(dice: random.Random, ending: str) -> str:
    """The handle is there once the server has answered; what comes from outside comes whenever it likes."""
    from_outside = {"sigint", "sigterm", "sigkill", "both", "cancel"}
    return dice.choice(("began", "launched", "launched", "ready")) if ending in from_outside else "ready"
