"""What it means: verdicts, findings, the diagnosis."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from hangguard.facts.known import Phase

Confidence: TypeAlias = Literal["high", "medium", "low"]
"""high: everything that the verdict needs was seen and agrees; medium: something that would confirm it was unseen,
and time decided; low: it is the best guess, and says so."""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number that a verdict goes by."""

    name: str
    value: float
    unit: str = ""

    def __str__(self) -> str:
        """Return it as people write it: ``GPU 3 power 122 W``."""
        return f"{self.name} {self.value:.4g} {self.unit}".rstrip()


@dataclass(frozen=True, slots=True, kw_only=True)
class Suspect:
    """A member that should do the work and does not."""

    pid: int
    title: str
    rank: str = ""
    """``TP3``, ``DP0 TP1`` …; empty: not known."""
    at: tuple[str, ...] = ()
    """Where its main thread stands, innermost first: ``acquire (lock.py:7)``."""
    note: str = ""
    """Why it and not the others: ``alone here; 7 others wait in all_reduce``."""

    def __str__(self) -> str:
        """Return one line: who, where, why."""
        who = f"{self.title[:80]} (pid {self.pid})"
        return who + "".join(f" < {frame}" for frame in self.at[:4]) + (f" [{self.note}]" if self.note else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """What every verdict carries."""

    verdict: ClassVar[str] = ""
    phase: Phase
    kind: str = ""
    still_for: float = 0.0
    """Seconds without progress."""
    since: float = 0.0
    """When this verdict began, monotonic."""
    moved: str = ""
    """What moved last, for people: ``log``, ``minor faults`` …"""
    unseen: tuple[str, ...] = ()
    """Sources that could not be seen, each with its reason."""
    why: str = ""
    """One sentence."""
    numbers: tuple[Measure, ...] = ()
    """What it goes by."""
    confidence: Confidence = "high"
    left_locks: tuple[str, ...] = ()
    """Lock files that nobody holds any more, for the end of one of which it waits, or may wait: no change of the
    server's options ends that, and a relaunch would wait as well."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moving(Judged):
    """Something is produced: go on."""

    verdict: ClassVar[str] = "moving"


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Judged):
    """It waits for something outside that may come: go on until the budget of waiting ends."""

    verdict: ClassVar[str] = "waiting"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Judged):
    """It has answered."""

    verdict: ClassVar[str] = "ready"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stuck(Judged):
    """Nothing moves and nothing outside can end it."""

    verdict: ClassVar[str] = "stuck"
    suspects: tuple[Suspect, ...] = ()
    """Members that should do the work, the likeliest culprit first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken(Judged):
    """A member died and others hang on, it has failed and does not end, or the hardware or driver is at fault."""

    verdict: ClassVar[str] = "broken"
    suspects: tuple[Suspect, ...] = ()
    reason: str = ""
    """Why it failed, where the engine has said so: one of the reasons of :class:`Exited`."""
    permanent: bool = False
    """Whether the same launch would fail the same way again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exited(Judged):
    """The server ended. ``kind`` is the reason."""

    verdict: ClassVar[str] = "exited"
    exit_code: int | None = None
    permanent: bool = False
    """Whether the same launch would end the same way again."""
    evidence: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expired(Judged):
    """A budget is over: ``kind`` is ``ready_within``, ``waiting`` or ``unclear``."""

    verdict: ClassVar[str] = "expired"


@dataclass(frozen=True, slots=True, kw_only=True)
class Unclear(Judged):
    """Nothing is produced, and nothing can be proved: ``why`` says what it would take."""

    verdict: ClassVar[str] = "unclear"


Verdict: TypeAlias = Moving | Waiting | Ready | Stuck | Broken | Exited | Expired | Unclear

Standing: TypeAlias = Literal["ruled out", "open", "supported", "confirmed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One possible cause, and where the evidence leaves it."""

    hypothesis: str
    standing: Standing
    evidence: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """Every hypothesis, each with its evidence, where the ranks stand, and what to try."""

    findings: tuple[Finding, ...] = ()
    ranks: tuple[str, ...] = ()
    """The main threads of several workers as one tree, outermost frame first; a branch is where they part."""
    advice: tuple[str, ...] = ()
