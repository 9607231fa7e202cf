"""What happened, as frozen values: to hooks, to subscribers, and as JSON lines.

Every event says when (monotonic seconds) and in which attempt (from 1). ``as_json`` gives the form that
``hangguard run --events`` writes; new keys and new events may come, none of these goes within one schema.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, ClassVar, TypeAlias

from hangguard.facts import (
    Alters,
    AppliedChange,
    Broken,
    Drained,
    Phase,
    Release,
    Stuck,
    ToldBy,
    Unseen,
    Verdict,
)
from hangguard.redact import redact, redact_argv

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """What every event carries."""

    event: ClassVar[str] = ""
    t: float
    attempt: int

    def details(self) -> dict[str, Any]:
        """Return the event's own keys, as plain values."""
        return {key: value for key, value in asdict(self).items() if key not in {"t", "attempt"}}

    def as_json(self) -> dict[str, Any]:
        """Return the event as plain values, secrets out."""
        head = {"schema": SCHEMA, "event": self.event, "t": round(self.t, 3), "attempt": self.attempt}
        return {**head, **redact(self.details())}


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched(Happened):
    """A server process was started."""

    event: ClassVar[str] = "launched"
    pid: int
    argv: tuple[str, ...]

    def details(self) -> dict[str, Any]:
        """Return pid and argv."""
        return {"pid": self.pid, "argv": list(redact_argv(self.argv))}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attached(Happened):
    """The watch over a server begins that somebody else started."""

    event: ClassVar[str] = "attached"
    pid: int
    """0: only its answers can be seen."""
    started: int
    """Its start time in clock ticks since boot: with the pid, its identity."""
    title: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseChanged(Happened):
    """Start-up has come to another phase."""

    event: ClassVar[str] = "phase"
    phase: Phase
    previous: Phase


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictChanged(Happened):
    """The class or kind of the verdict changed."""

    event: ClassVar[str] = "verdict"
    verdict: Verdict

    def details(self) -> dict[str, Any]:
        """Return the verdict's name and numbers."""
        v = self.verdict
        return {
            "verdict": v.verdict,
            "kind": v.kind,
            "phase": v.phase,
            "still_for": round(v.still_for, 2),
            "unseen": list(v.unseen),
            "why": v.why,
            "confidence": v.confidence,
            "numbers": [asdict(number) for number in v.numbers],
            "suspects": [asdict(suspect) for suspect in v.suspects] if isinstance(v, (Stuck, Broken)) else [],
            "left_locks": list(v.left_locks),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackChosen(Happened):
    """The next launch differs by this change."""

    event: ClassVar[str] = "fallback"
    name: str
    change: str
    alters: Alters
    cost: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draining(Happened):
    """Requests that are in flight may finish before the stop; told again whenever their number changes."""

    event: ClassVar[str] = "draining"
    left: int | Unseen
    by: ToldBy
    """What is counted: see :class:`~hangguard.Drained`."""
    at_most: float
    """Seconds that are left for it."""

    def details(self) -> dict[str, Any]:
        """Return the number, or why it is unseen; what is counted; and the seconds."""
        return {**_in_flight(self.left, self.by), "at_most": round(self.at_most, 2)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping(Happened):
    """The server is being stopped."""

    event: ClassVar[str] = "stopping"
    why: str = ""
    drained: Drained | None = None
    """How the requests in flight ended; ``None``: they were not waited for."""

    def details(self) -> dict[str, Any]:
        """Return why, and how the drain went."""
        drained = self.drained
        if drained is None:
            return {"why": self.why, "drained": None}
        how = {"seconds": round(drained.seconds, 2), "ending": drained.ending}
        return {"why": self.why, "drained": {**how, **_in_flight(drained.left, drained.by)}}


def _in_flight(left: int | Unseen, by: ToldBy) -> dict[str, Any]:
    if isinstance(left, Unseen):
        return {"left": None, "by": by, "unseen": left.reason}
    return {"left": left, "by": by, "unseen": ""}


@dataclass(frozen=True, slots=True, kw_only=True)
class Released(Happened):
    """What is left of the attempt."""

    event: ClassVar[str] = "released"
    release: Release

    def details(self) -> dict[str, Any]:
        """Return the answer, what is left, the files that appeared meanwhile, and those that members had."""
        return {
            "released": self.release.answer,
            "left_behind": list(self.release.left_behind),
            "items": [asdict(item) for item in self.release.items],
            "processes": [asdict(process) for process in self.release.processes],
            "files": list(self.release.unattributed_files),
            "new_names": [{**asdict(name), "command": name.command} for name in self.release.new_names],
            "files_unseen": list(self.release.unattributed_unseen),
            "had": [asdict(file) for file in self.release.files],
            "segments": _segments(self.release),
        }


def _segments(release: Release) -> list[dict[str, Any]] | dict[str, str]:
    if isinstance(release.segments, Unseen):
        return {"unseen": release.segments.reason}
    return [{**asdict(segment), "command": segment.command} for segment in release.segments]


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameReady(Happened):
    """The server has answered."""

    event: ClassVar[str] = "ready"
    url: str
    changes: tuple[AppliedChange, ...]

    def details(self) -> dict[str, Any]:
        """Return the URL and how what runs differs from what was asked for."""
        return {"url": self.url, "changes": [asdict(change) for change in self.changes]}


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenUp(Happened):
    """No further attempt is made."""

    event: ClassVar[str] = "gave_up"
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended(Happened):
    """The supervision is over."""

    event: ClassVar[str] = "ended"
    exit_code: int | None
    left_behind: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Notice(Happened):
    """Something a person should know: what could not be done, and what is lost by it."""

    event: ClassVar[str] = "notice"
    text: str


Event: TypeAlias = (
    Launched
    | Attached
    | PhaseChanged
    | VerdictChanged
    | FallbackChosen
    | Draining
    | Stopping
    | Released
    | BecameReady
    | GivenUp
    | Ended
    | Notice
)
