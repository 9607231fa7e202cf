"""What is asked of a supervision while it runs: a stop, a restart, quiet, and how long each may take."""

from __future__ import annotations

from dataclasses import dataclass, field

import anyio

from hangguard.supervision.quiet import QuietTimes
from hangguard.supervision.stop_within import StopWithin

NO_DRAIN = float("-inf")


@dataclass(slots=True)
class Wishes:
    """What the handle asks of the story; the story's own task reads it."""

    stop_because: str = ""
    restart: bool = False
    drain_until: float = NO_DRAIN
    """Until when requests in flight may finish before the stop, on the clock of the run."""
    within: StopWithin | None = None
    """The time that a stop may take in all; ``None``: each of its parts has a limit of its own, and no more."""
    grace: float | None = None
    quiet: QuietTimes = field(default_factory=QuietTimes)
    changed: anyio.Event = field(default_factory=anyio.Event)
    draining: anyio.CancelScope | None = None
    """What the wait for requests is in."""

    def wake(self) -> None:
        """Make the watch look at the wishes now; the drain even in the middle of a look."""
        self.changed.set()
        if self.draining is not None:
            self.draining.cancel()
