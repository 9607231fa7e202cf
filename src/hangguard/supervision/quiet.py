"""Stillness that is wanted: the server sleeps, is paused, or takes new weights, and that is no hang."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType


@dataclass(slots=True)
class QuietTimes:
    """Every stretch in which stillness is wanted now. Written by handles from any thread, read by the watch."""

    _ends: dict[int, float] = field(default_factory=dict)
    """By the identity of the block that asked; single operations, which need no lock."""

    def begin(self, block: object, until: float) -> None:
        """Want stillness until then at the latest."""
        self._ends[id(block)] = until

    def end(self, block: object) -> None:
        """Want it no longer."""
        self._ends.pop(id(block), None)

    def until(self, now: float) -> float | None:
        """Return until when stillness is wanted, monotonic; ``None``: it is not."""
        wanted = max(tuple(self._ends.values()), default=-math.inf)
        return wanted if wanted > now else None


class Quiet:
    """A bounded time in which stillness is wanted: ``with server.quiet(at_most=600): …``, or ``async with``.

    It ends with the block, or after ``at_most`` seconds, whichever comes first; from then on the patience starts anew.
    """

    def __init__(self, times: QuietTimes, at_most: float, clock: Callable[[], float]) -> None:
        is_number = isinstance(at_most, (int, float)) and not isinstance(at_most, bool)
        if not is_number or not 0.0 < at_most < math.inf:
            msg = f"quiet(at_most=) must be a number of seconds above zero, and finite, not {at_most!r}"
            raise ValueError(msg)
        self._times = times
        self._at_most = at_most
        self._clock = clock

    def __enter__(self) -> Quiet:  # noqa: PYI034 - Self is of 3.11
        """Begin."""
        self._times.begin(self, self._clock() + self._at_most)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._times.end(self)

    async def __aenter__(self) -> Quiet:  # noqa: PYI034
        """Begin."""
        return self.__enter__()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End."""
        self._times.end(self)
