"""Which processes began and ended, and whether that is news: a shell that polls tells nothing.

Entrypoints wait for the health of what they started (``until curl -sf …; do sleep 2; done``), and monitors ask
nvidia-smi for ever. Beside those no hang was ever found while every birth and death counted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from hangguard.facts import Tree
from hangguard.judge.progress import compiles

BEGAN, ENDED = "a process began", "a process ended"


class Relative(NamedTuple):
    """One process: the kind of it that its parent starts, and whether it compiles."""

    identity: tuple[int, int]
    parent: int
    name: str
    """``comm``: that of its parent until it executes a program."""
    compiles: bool


@dataclass(frozen=True, slots=True)
class Kin:
    """The members of the last look, and what kinds of them began and ended so far."""

    living: tuple[Relative, ...] | None = None
    """``None``: no look yet."""
    began: frozenset[tuple[int, str]] = frozenset()
    """(pid of the parent, name) of those that began in this phase."""
    ended: frozenset[tuple[int, str]] = frozenset()
    """The same of those that ended in it, and in any phase:"""
    gone: frozenset[tuple[int, str]] = frozenset()

    @property
    def passing(self) -> frozenset[tuple[int, int]]:
        """Who is of a kind that comes and goes: where such a one stands says nothing about the launch."""
        return frozenset(p.identity for p in self.living or () if not p.compiles and (p.parent, p.name) in self.gone)

    def forget(self) -> Kin:
        """Return the same where every kind is news again."""
        return Kin(self.living, gone=self.gone)


def read_kin(kin: Kin, tree: Tree) -> tuple[Kin, str]:
    """Return the memory after this look, and what is news in it: a kind that is new, or any compiler; "" if nothing."""
    living = tuple(Relative(p.identity, p.parent, p.name, compiles(p)) for p in tree.members)
    if kin.living is None:
        return Kin(living, frozenset((p.parent, p.name) for p in living)), ""
    before, now = {p.identity for p in kin.living}, {p.identity for p in living}
    born = [p for p in living if p.identity not in before]
    gone = [p for p in kin.living if p.identity not in now]
    news = ""
    if any(p.compiles or (p.parent, p.name) not in kin.began for p in born):
        news = BEGAN
    elif any(p.compiles or (p.parent, p.name) not in kin.ended for p in gone):
        news = ENDED
    ended = frozenset((p.parent, p.name) for p in gone)
    return Kin(living, kin.began.union((p.parent, p.name) for p in born), kin.ended | ended, kin.gone | ended), news
