"""The time that a stop may take in all, and how it is shared out: somebody else kills us when it is over.

Kubernetes does after ``terminationGracePeriodSeconds`` (30 by default), ``docker stop`` after 10 s.
"""

from __future__ import annotations

from dataclasses import dataclass

KEPT = 5.0
"""Seconds kept for the kill and the proof. Measured: the kill takes 0.2 s, memory of a GPU is back 0.16 s later, and
Python's resource trackers get 2 s to tidy up."""

LEAST_GRACE = 2.0
"""Seconds of grace that a drain leaves: both engines end within 2 s of SIGTERM when nobody is in flight."""

TO_TELL = 1.0
"""Seconds between the end of the proof and our own end: the log's last lines, the last event."""


def kept_of(seconds: float) -> float:
    """Return the seconds that kill and proof keep of so many."""
    return min(KEPT, seconds / 2)


@dataclass(frozen=True, slots=True)
class StopWithin:
    """``seconds`` in all, which end at ``ends`` on the clock of the run. Each part leaves enough for those after it."""

    seconds: float
    ends: float

    def drain_until(self, wanted: float) -> float:
        """Return until when requests in flight may finish."""
        return min(wanted, self.ends - kept_of(self.seconds) - min(LEAST_GRACE, self.seconds / 4))

    def evidence(self, now: float, at_most: float) -> float:
        """Return the seconds for looking closely before the stop."""
        return min(at_most, self._left(now) / 4)

    def grace(self, now: float) -> float:
        """Return the seconds from SIGTERM to SIGKILL that there is time for."""
        return max(0.0, self.ends - kept_of(self.seconds) - now)

    def proof(self, now: float, at_most: float) -> float:
        """Return the seconds for looking whether everything is gone."""
        return min(at_most, max(0.0, self._left(now) - min(TO_TELL, self.seconds / 4)))

    def says(self, what: str, seconds: float, wanted: float) -> str:
        """Return what is told of a part that gets less than it wants."""
        return f"{what}: {seconds:.1f} s instead of {wanted:g} s, for all has to be over within {self.seconds:g} s"

    def _left(self, now: float) -> float:
        return max(0.0, self.ends - now)
