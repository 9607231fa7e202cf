"""What was done: the release of what an attempt held, and the attempt itself."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Literal, TypeAlias

from hangguard.facts.asked import AppliedChange, Launch
from hangguard.facts.cleaned import CleanupItem, CleanupReport, What, Whose
from hangguard.facts.decided import Diagnosis, Verdict
from hangguard.facts.known import Unseen
from hangguard.facts.seen_files import FileKind


def _as_named(pid: int, title: str) -> str:
    return f"pid {pid} ({title or '?'})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Survivor:
    """A member that is still there after SIGKILL."""

    pid: int
    started: int
    title: str
    state: str
    wait_channel: str

    def as_item(self, proof: str = "it is a member") -> CleanupItem:
        """Return it as an item of a cleaning: ours, and left."""
        where = f", in {self.wait_channel}" if self.wait_channel else ""
        return CleanupItem(
            what="process",
            name=_as_named(self.pid, self.title),
            whose="ours",
            proof=proof,
            answer="left",
            done=f"left: SIGKILL does not end it (state {self.state or '?'}{where})",
            pid=self.pid,
            started=self.started,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EndedProcess:
    """A member that lived when the stop began, or was born since, and is gone."""

    pid: int
    started: int
    title: str
    signal: str
    """The last signal that it got from us: SIGTERM, SIGKILL; empty: it ended by itself, after others did."""
    proof: str
    """Why it was a member."""
    seconds: float
    """From the beginning of the stop until it was seen to be gone."""

    def as_item(self, *, really: bool = True) -> CleanupItem:
        """Return it as an item of a cleaning; without ``really`` it lives, and would be ended."""
        if really:
            done = f"ended by {self.signal}" if self.signal else "ended by itself, after others did"
        else:
            done = "would be ended: SIGTERM, then SIGKILL"
        return CleanupItem(
            what="process",
            name=_as_named(self.pid, self.title),
            whose="ours",
            proof=self.proof,
            answer="gone",
            done=done,
            pid=self.pid,
            started=self.started,
            seconds=self.seconds,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Daemon:
    """A daemon of somebody else below the launch (tmux, an MPS control daemon, a Ray node …), which was left running.

    It executes a known program, in a session of its own, with its output elsewhere and none of this launch's GPUs,
    ports or shared memory; or it belongs to one that does, or was seen to before those between have ended.
    """

    pid: int
    started: int
    title: str
    why: str
    """What it is, and why it is no member."""

    def as_item(self) -> CleanupItem:
        """Return it as an item of a cleaning: somebody else's, and left running."""
        return CleanupItem(
            what="daemon",
            name=_as_named(self.pid, self.title),
            whose="somebody else's",
            proof=self.why,
            answer="left",
            done="left running",
            pid=self.pid,
            started=self.started,
        )


Resource: TypeAlias = Literal["processes", "gpu-memory", "port", "files"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RemovedFile:
    """Something that a member was seen to have, and what became of it at the end."""

    path: str
    kind: FileKind
    answer: Literal["removed", "free", "gone", "busy", "refused", "unknown"]
    """free: it could be removed, and only that was asked; gone: it was not there any more; busy: somebody has it;
    refused: it is not ours; unknown: that could not be asked."""
    why: str = ""
    used_bytes: int = 0
    """What it occupied, as far as it was looked at."""
    device: int
    inode: int
    pid: int
    """The member that was seen to have it."""
    started: int
    holders: tuple[str, ...] = ()
    """Who has it, of a busy one, as far as could be seen."""

    def as_item(self) -> CleanupItem:
        """Return it as an item of a cleaning."""
        words = {
            "had": f"pid {self.pid}, a member, was seen to have it",
            "free": "nobody is bound to it" if self.kind == "socket" else "nobody has it (write lease granted)",
            "who": ", ".join(self.holders) or "somebody",
            "why": self.why,
        }
        whose, proof, answer, done = _FILE[self.answer]
        return CleanupItem(
            what=self.kind,
            name=self.path,
            whose=whose,
            proof=proof.format_map(words),
            answer=answer,
            done=done.format_map(words),
            size_bytes=self.used_bytes,
        )


_FILE: dict[str, tuple[Whose, str, Literal["gone", "left", "unknown"], str]] = {
    "removed": ("ours", "{had}; {free}", "gone", "removed"),
    "free": ("ours", "{had}; {free}", "gone", "would be removed"),
    "gone": ("ours", "{had}", "gone", "nothing: it is gone already"),
    "busy": ("somebody else's", "{had}, and {who} has it now", "left", "left: it is in use"),
    "refused": ("somebody else's", "{why}", "left", "left: it is not what the member had"),
    "unknown": ("ours", "{had}", "unknown", "left: {why}"),
}
"""Whose it is, the proof, the answer, and what was done, by the answer of the removal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseItem:
    """Whether one resource of an attempt is free again: released, held (by whom), or unknown (why)."""

    resource: Resource
    answer: Literal["released", "held", "unknown"]
    detail: str = ""
    ours: bool = True
    """Whether what is held is held by a member; a stranger on the port is held too, but not left behind."""

    def as_item(self, what: What) -> CleanupItem:
        """Return it as an item of a cleaning."""
        whose: Whose = "unknown" if self.answer == "unknown" else "ours" if self.ours else "somebody else's"
        return CleanupItem(
            what=what,
            name=what,
            whose=whose,
            proof=self.detail,
            answer="gone" if self.answer == "released" else "left" if self.answer == "held" else "unknown",
            done={"released": "free", "held": "left", "unknown": "could not be seen"}[self.answer],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSegment:
    """Shared memory of the System V kind that a member made and nobody has attached."""

    id: int
    size_bytes: int
    creator: int

    @property
    def command(self) -> str:
        """Return what removes it, where you know that nobody wants it."""
        return f"ipcrm -m {self.id}"

    def as_item(self) -> CleanupItem:
        """Return it as an item of a cleaning: listed, never removed."""
        return CleanupItem(
            what="segment",
            name=f"System V segment {self.id}",
            whose="unknown",
            proof=f"pid {self.creator}, a member, made it, and nobody has it attached; somebody may still want it",
            answer="left",
            done=f"left; if nobody's: {self.command}",
            size_bytes=self.size_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class NewName:
    """A name that is new since the launch, and that no member was seen to have: listed, never removed."""

    path: str
    use: Literal["at rest", "in use", "unknown"]
    """at rest: at the moment of the look nobody had it open or mapped, or was bound to it, in whatever container and as
    whatever user (the kernel granted a write lease). in use: somebody has it. unknown: that could not be asked."""
    why: str = ""
    """Who has it, as far as could be seen; or why it is not known."""

    @property
    def command(self) -> str:
        """Return what removes it, where you know that nobody wants it; empty: somebody has it, or may have it."""
        return shlex.join(["rm", "--", self.path]) if self.use == "at rest" else ""

    def as_item(self) -> CleanupItem:
        """Return it as an item of a cleaning: left, whatever it is."""
        new = "it is new since the launch, and no member was seen to have it"
        whose, proof, done = {
            "at rest": ("unknown", f"{new}; nobody has it at this moment", f"{IF_NOBODYS}{self.command}"),
            "in use": ("somebody else's", f"{new}; {self.why or 'somebody'} has it now", "left alone: it is in use"),
            "unknown": ("unknown", new, f"left: it could not be seen whether somebody has it ({self.why})"),
        }[self.use]
        return CleanupItem(what="file", name=self.path, whose=whose, proof=proof, answer="left", done=done)  # type: ignore[arg-type]


IF_NOBODYS = "left; if nobody's: "
"""How that begins which is said of a new name at rest."""


def unproved_item(path: str, why: str, *, is_other: bool) -> CleanupItem:
    """Return a file by the number of one that a member had, as an item of a cleaning; ``is_other``: it is not that."""
    if is_other:
        return CleanupItem(what="file", name=path, whose="somebody else's", proof=why, answer="left", done="left")
    proof = f"{why}; if it is nobody's: {shlex.join(['rm', '--', path])}"
    return CleanupItem(what="file", name=path, whose="unknown", proof=proof, answer="unknown", done="left")


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """What is left of an attempt, looked at after its end."""

    items: tuple[ReleaseItem, ...]
    survivors: tuple[Survivor, ...] = ()
    files: tuple[RemovedFile, ...] = ()
    """What members were seen to have that may be left behind (see ``FileKind``), and what became of each."""
    daemons: tuple[Daemon, ...] = ()
    """Daemons of somebody else that the launch has started: left running, and no part of the answer."""
    new_names: tuple[NewName, ...] = ()
    """All other names that appeared in /dev/shm meanwhile, and those that engines use and that appeared in the temp
    folder and where extensions are built, each with whether somebody has it: listed, never deleted."""
    unattributed_unseen: tuple[str, ...] = ()
    """Where it could not be seen what appeared, each with the reason."""
    segments: tuple[SharedSegment, ...] | Unseen = Unseen("not looked for")
    """Of System V, left by members: listed, never removed. Not even their maker's end says that nobody wants them."""
    seconds: float = 0.0
    processes: tuple[EndedProcess, ...] = ()
    """Members that lived when the stop began, or were born since, and are gone."""

    @property
    def cleanup(self) -> CleanupReport:
        """Return every item by itself: whose it was, the proof, and what was done with it."""
        kinds: dict[str, What] = {"gpu-memory": "gpu-memory", "port": "port"}
        looked = [item.as_item(kinds[item.resource]) for item in self.items if item.resource in kinds]
        blind = [item for item in self.items if item.resource not in kinds and item.answer == "unknown"]
        known: dict[str, What] = {"processes": "process", "files": "file"}
        return CleanupReport(
            items=(
                *(process.as_item() for process in self.processes),
                *(survivor.as_item() for survivor in self.survivors),
                *(daemon.as_item() for daemon in self.daemons),
                *(file.as_item() for file in self.files),
                *(segment.as_item() for segment in (() if isinstance(self.segments, Unseen) else self.segments)),
                *(name.as_item() for name in self.new_names),
                *(item.as_item(known[item.resource]) for item in blind),
                *looked,
            ),
            seconds=self.seconds,
        )

    @property
    def unattributed_files(self) -> tuple[str, ...]:
        """Return the paths of all ``new_names``, in use or not: somebody else's, perhaps."""
        return tuple(name.path for name in self.new_names)

    @property
    def answer(self) -> Literal["released", "held", "unknown"]:
        """Return the worst of the three answers over all resources."""
        answers = [item.answer for item in self.items]
        return "held" if "held" in answers else "unknown" if "unknown" in answers else "released"

    @property
    def left_behind(self) -> tuple[str, ...]:
        """Return one line for every thing of ours that is still there."""
        return tuple(f"{item.resource}: {item.detail}" for item in self.items if item.answer == "held" and item.ours)


ToldBy: TypeAlias = Literal["counters", "clients", ""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """How the wait for requests in flight went, before a stop that was asked for with ``drain=``."""

    seconds: float
    left: int | Unseen
    """Requests, or clients, that were still there when the wait ended; unseen: it could not be told, and why."""
    by: ToldBy
    """What ``left`` counts: requests, as the server's own counters have them, or connected clients where it has none
    that could be seen; empty: neither was seen."""
    ending: Literal["done", "time", "cut", "hung", "exited"]
    """done: nobody was in flight any more; time: the seconds were over; cut: a stop without ``drain``, a hurry, a
    cancellation, or the end of the block came before; hung: the server stood still, or was broken; exited: it ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """One launch, from spawn to proof of release. Frozen: a record, also of one that still runs."""

    number: int
    launch: Launch
    changes: tuple[AppliedChange, ...] = ()
    verdict: Verdict
    started_at: float
    last_movement_at: float
    """When anything moved last before the verdict, monotonic; ``verdict.since`` minus this is the delay."""
    settled_at: float
    """When the verdict fell, monotonic."""
    was_ready: bool = False
    fallbacks: tuple[str, ...] = ()
    """Names of the fallbacks in force."""
    diagnosis: Diagnosis = Diagnosis()
    release: Release | None = None
    """``None``: it still runs."""
    exit_code: int | None = None
    log_path: str | None = None
    log_cut_bytes: int = 0
    """Bytes of the middle of the log that were given back to the disk (``log_bytes=``)."""
    evidence_path: str | None = None
    log_tail: tuple[str, ...] = ()
    stopped_because: str = ""
    """Why we ended it; empty: it ended by itself, or it still runs."""
    drained: Drained | None = None
    """How the requests in flight ended before the stop; ``None``: a drain was not asked for, or there was no server
    that had answered."""
