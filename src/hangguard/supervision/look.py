"""What one look at a running server came to."""

from __future__ import annotations

from dataclasses import dataclass

from hangguard.facts import Broken, Diagnosis, Expired, Sample, Stack, Stuck, Unseen, Verdict
from hangguard.supervision.found import FoundServer


@dataclass(frozen=True, slots=True, kw_only=True)
class Missing:
    """A source that could not be seen, and what would give it."""

    source: str
    reason: str
    helps: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """What one look at a server came to. Secrets are out of it."""

    server: FoundServer
    verdict: Verdict
    diagnosis: Diagnosis
    stacks: tuple[Stack, ...] | Unseen
    """The newest stacks of all members."""
    samples: tuple[Sample, ...]
    """What was seen, oldest first."""
    missing: tuple[Missing, ...]
    log_path: str | None
    log_tail: tuple[str, ...]
    log_silent_for: float | None
    """Seconds since the log last changed: what was before this look is known from nothing else."""
    advice: tuple[str, ...]
    """What to do next."""
    seconds: float
    """How long it was looked at."""

    @property
    def is_stuck(self) -> bool:
        """Whether it hangs or is broken, as far as could be proved."""
        return isinstance(self.verdict, (Stuck, Broken, Expired))
