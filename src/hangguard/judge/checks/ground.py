"""What every check of a launch goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from hangguard.changes import words_of
from hangguard.engines.base import Engine
from hangguard.facts import Check, Launch, Surroundings, Unseen
from hangguard.judge import patience
from hangguard.judge.rules import Rules

GIB = 1 << 30
MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Ground:
    """The launch, what is known of its engine, and what was seen around it."""

    launch: Launch
    engine: Engine
    rules: Rules
    seen: Surroundings

    @property
    def words(self) -> tuple[str, ...]:
        """Return the words that count for the server, its configuration file's first."""
        return words_of(self.launch)

    @property
    def is_known(self) -> bool:
        """Whether it is known what this engine needs."""
        return bool(self.engine.distributions)

    @property
    def at_best(self) -> float:
        """Return the seconds after which idleness is called a hang where everything is seen."""
        return patience.short(self.rules, "weights-load")

    @property
    def without_proof(self) -> float:
        """Return the same where stacks, wait channels or GPUs are missing."""
        return patience.long(self.rules, "weights-load")

    @property
    def without_sight(self) -> float:
        """Return the seconds after which an attempt is given up in which nothing may be called a hang."""
        return max(self.rules.limits.unclear, self.at_best)


CheckOf: TypeAlias = Callable[[Ground], Iterator[Check]]
"""One row, several, or none where the question does not come up."""


def unseen(
    what: str, fact: Unseen, *, means: str = "", loses: str = "", helps: str = "", patience: float | None = None
) -> Check:
    """Return the row of what could not be looked at."""
    return Check(
        what=what, answer="unseen", found=fact.reason, means=means, loses=loses, helps=helps, patience=patience
    )


def size(count: float) -> str:
    """Return bytes as people say them."""
    if count >= 10 * GIB:
        return f"{count / GIB:.0f} GiB"
    return f"{count / GIB:.1f} GiB" if count >= GIB else f"{count / MIB:.0f} MiB"
