"""What a cleaning, or a stop, came to: one item for every thing that was found, with whose it is and the proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

What: TypeAlias = Literal[
    "run", "process", "daemon", "file", "socket", "lock", "rendezvous", "pool", "segment", "gpu-memory", "port"
]
Whose: TypeAlias = Literal["ours", "somebody else's", "unknown"]

FOLDER_REMOVED, FOLDER_WOULD_GO = "its folder removed", "its folder would be removed"
"""What is done with a run that never started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupItem:
    """One thing that a run has, or had."""

    what: What
    name: str
    """As a person knows it: a pid with its command line, a path, a port."""
    whose: Whose
    proof: str
    """Why it is whose it is said to be, or why that is not known."""
    answer: Literal["gone", "left", "alive", "unknown"]
    """gone: nothing of it is there any more; in a dry run: nothing of it would be. left: it is still there. alive: it
    is a run that goes on, which is not cleaned. unknown: that could not be seen."""
    done: str
    """What was done with it; in a dry run: what would be."""
    pid: int | None = None
    started: int = 0
    """Of a process: its start time in clock ticks since boot."""
    seconds: float = 0.0
    """How long its end took."""
    size_bytes: int = 0
    """Of a file: what it occupied."""
    run_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanupReport:
    """Everything that was found, and what was done with it, or would be."""

    items: tuple[CleanupItem, ...]
    dry_run: bool = False
    """Nothing was touched: ``done`` and ``answer`` say what would be."""
    seconds: float = 0.0

    @property
    def answer(self) -> Literal["released", "held", "unknown"]:
        """Return whether anything of ours is left: held; unknown: something could not be seen; released: no."""
        if self.left_behind:
            return "held"
        return "unknown" if any(item.answer == "unknown" for item in self.items) else "released"

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Return one line for every thing of ours that is still there, or would be."""
        ours = (item for item in self.items if item.answer == "left" and item.whose == "ours")
        return tuple(f"{item.what} {item.name}: {item.done}" for item in ours)

    @property
    def alive(self) -> tuple[str, ...]:
        """Return the ids of runs that go on, and were not touched."""
        return tuple(item.run_id for item in self.items if item.answer == "alive")
