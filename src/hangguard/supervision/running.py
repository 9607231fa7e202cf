"""A launch that is being watched: one look after the other, judged and told, until there is a verdict to act on."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio

from hangguard.act.gpus import GpuHistory
from hangguard.elsewhere import Elsewhere
from hangguard.facts import (
    NOT_ASKED,
    AppliedChange,
    Attempt,
    Broken,
    Diagnosis,
    Drained,
    Exited,
    Expired,
    HeldFiles,
    Launch,
    Ready,
    Release,
    Sample,
    Stuck,
    Unseen,
    Verdict,
)
from hangguard.judge import Memory, diagnose_memory, next_ask, step
from hangguard.judge.assess import FAREWELL
from hangguard.observe.sysv import Segment
from hangguard.redact import redact
from hangguard.supervision.events import Event, Notice
from hangguard.supervision.evidence import without_bulk
from hangguard.supervision.first_of import first_of
from hangguard.supervision.log_cap import LogCap
from hangguard.supervision.run import Guard, Run, Watcher
from hangguard.supervision.turns import turns
from hangguard.supervision.wishes import Wishes

T = TypeVar("T")

PERIOD = 1.0
"""Seconds between samples."""

PERIOD_AT_END = 0.25
"""The same for ``FAREWELL`` seconds once the launched process has ended."""

KEPT_SAMPLES = 180


@dataclass(slots=True)
class RunningAttempt:
    """One launch that is being watched. Made by ``attempting()`` (``attempt.py``), owned by one task."""

    run: Run
    number: int
    launch: Launch
    changes: tuple[AppliedChange, ...]
    guarded: Guard
    watcher: Watcher
    memory: Memory
    wishes: Wishes
    started_at: float
    log_path: str | None
    log_cap: LogCap | None = None
    samples: deque[Sample] = field(default_factory=lambda: deque(maxlen=KEPT_SAMPLES))
    settled: Verdict | None = None
    settled_at: float = 0.0
    last_movement_at: float = 0.0
    was_ready: bool = False
    diagnosis: Diagnosis = Diagnosis()
    evidence_path: str | None = None
    release: Release | None = None
    stopped_because: str = ""
    log_tail: tuple[str, ...] = ()
    drained: Drained | None = None
    shm_before: frozenset[str] | None = None
    files_unseen: tuple[str, ...] = ()
    """What could not be seen of what members have in /dev/shm."""
    gpus: GpuHistory = field(default_factory=GpuHistory)
    segments_before: tuple[Segment, ...] | Unseen = Unseen("not looked at")
    elsewhere: Elsewhere = field(default_factory=Elsewhere)
    _told_guardian: bool = False

    async def until_settled(self) -> Verdict:
        """Watch until the server is ready, or the attempt is over; return that verdict."""
        while True:
            verdict = await self.look()
            if self._decides(verdict):
                return self.settle(verdict)
            if self.wishes.stop_because or self.wishes.restart:
                return self.settle(verdict)
            await self._pause()

    async def until_lost(self) -> Verdict:
        """Watch a ready server until it ends or hangs, or is asked to end."""
        while not (self.wishes.stop_because or self.wishes.restart):
            await self._pause()
            verdict = await self.look()
            if not isinstance(verdict, Ready) and self._decides(verdict):
                return self.settle(verdict)
        return self.memory.verdict

    async def look(self, *, draining: bool = False) -> Verdict:
        """Take one sample, judge it, and tell what changed. While draining, no request of our own is added."""
        before = self.memory
        ask = next_ask(before)
        ask = replace(ask, sockets=True, counters=True, canary=False) if draining else ask
        sample = await self.watcher.take_sample(ask)
        sample = replace(sample, quiet_until=self.wishes.quiet.until(sample.t))
        if before.last is None:
            before = await self._with_lessons(before, sample)
        self.samples.append(without_bulk(sample))
        self.memory = step(before, sample)
        if not isinstance(sample.tree, Unseen):
            self.guarded.remember(p.identity for p in sample.tree.members)
        self.note_files(sample)
        self.gpus.note(sample.gpus, {pid for pid, _ in self.guarded.members})
        self._tell_changes(before, sample.t)
        await self.note_state()
        return self.memory.verdict

    def settle(self, verdict: Verdict) -> Verdict:
        """Let this be the verdict with which the watch ended."""
        self.settled, self.settled_at = self.without_secrets(verdict), self.now()
        self.last_movement_at = self.memory.last_movement_at
        self.was_ready = self.was_ready or self.memory.ready_at is not None
        self.diagnosis = self.without_secrets(diagnose_memory(self.memory))
        return verdict

    def note_files(self, sample: Sample) -> None:
        """Have the guardian know what members have: it removes what of it is left at the end."""
        files = sample.files
        if isinstance(files, HeldFiles):
            proved = [file for file in files.files if (file.device, file.inode) not in files.unproved]
            self.guarded.remember_files(proved, files.others)
        unseen = files.left_out if isinstance(files, HeldFiles) else (files.reason,) if files != NOT_ASKED else ()
        self.files_unseen = tuple(dict.fromkeys((*self.files_unseen, *unseen)))[-8:]

    async def note_state(self, **changed: Any) -> None:
        """Have the state file say what is known now: all that somebody needs who comes after the end of everybody."""
        verdict, phases = self.memory.verdict, self.memory.phases
        before = self.gpus.before
        await self.run.notes.note(
            members=tuple(sorted(self.guarded.members)),
            files=self.guarded.files,
            shm_before=shm_before_of(self.guarded),
            gpus_before=()
            if isinstance(before, Unseen)
            else tuple((gpu.uuid, gpu.memory_used_bytes) for gpu in before if isinstance(gpu.memory_used_bytes, int)),
            verdict=verdict.verdict,
            kind=verdict.kind,
            phase=phases[-1][0] if phases else "",
            **changed,
        )

    async def note_ready(self) -> None:
        """Have the state file say that it has answered."""
        await self.note_state(stage="ready", url=self.launch.url)

    async def remember_good_start(self) -> None:
        """Note how long each phase stood still in this start, which became ready."""
        gpus = self.samples[-1].gpus if self.samples else Unseen("no sample was taken")
        await self.run.world.note_good_start(self.launch, gpus, self.memory.longest_still)

    def record(self) -> Attempt:
        """Return the attempt as a frozen record."""
        verdict = self.settled or self.memory.verdict
        return Attempt(
            number=self.number,
            launch=self.launch,
            changes=self.changes,
            verdict=verdict,
            started_at=self.started_at,
            last_movement_at=self.last_movement_at or self.memory.last_movement_at,
            settled_at=self.settled_at or self.memory.now,
            was_ready=self.was_ready,
            fallbacks=tuple(change.name for change in self.changes),
            diagnosis=self.diagnosis,
            release=self.release,
            exit_code=self.exit_code,
            log_path=self.log_path,
            log_cut_bytes=self.log_cap.cut_bytes if self.log_cap is not None else 0,
            evidence_path=self.evidence_path,
            log_tail=self.log_tail,
            stopped_because=self.stopped_because,
            drained=self.drained,
        )

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the launched process; ``None``: it lives, or its code cannot be known."""
        ended = self.guarded.exit
        return ended.code if ended is not None and isinstance(ended.code, int) else None

    def tell_log_news(self) -> None:
        """Tell what the bound of the log has done since the last time."""
        for text in self.log_cap.news() if self.log_cap is not None else ():
            self.tell(Notice(t=self.now(), attempt=self.number, text=text))

    def without_secrets(self, fact: T) -> T:
        """Return it as it goes into the record, and from there into texts of errors: titles and lines may hold any."""
        return redact(fact, self.run.folder.known_secrets)

    def now(self) -> float:
        """Return the time on the clock of the run."""
        return self.run.world.clock()

    def tell(self, event: Event) -> None:
        """Have an event told to the hooks and the subscriptions."""
        self.run.announcer.tell(event)

    # ------------------------------------------------------------------------------------ below

    def _decides(self, verdict: Verdict) -> bool:
        """Whether the watch is over with this verdict; a hang alone ends it only where we are to act on it."""
        if isinstance(verdict, (Ready, Exited)) or (isinstance(verdict, Expired) and verdict.kind == "ready_within"):
            return True
        return isinstance(verdict, (Stuck, Broken, Expired)) and self.run.on_hang == "act"

    async def _with_lessons(self, memory: Memory, first: Sample) -> Memory:
        """Lengthen the patience by what good starts of the same kind have taught; the GPUs are known only now."""
        learned = await self.run.world.patience_learned(self.launch, first.gpus)
        return replace(memory, rules=replace(memory.rules, learned=learned)) if learned else memory

    def _tell_changes(self, before: Memory, t: float) -> None:
        for event in turns(before, self.memory, t=t, attempt=self.number):
            self.tell(event)
        if not self.guarded.guardian_alive and not self._told_guardian:
            self._told_guardian = True
            text = "the guardian died; this program ends the server itself, but nobody does if it dies too"
            self.tell(Notice(t=t, attempt=self.number, text=text))
        self.tell_log_news()

    async def _pause(self) -> None:
        """Sleep until the next sample is due; an exit or a wish ends it."""
        now, ended = self.now(), self.guarded.exit
        if ended is not None:  # a launcher may have forked and gone: then its server is watched at the usual pace
            with anyio.move_on_after(PERIOD_AT_END if now - ended.at < FAREWELL else PERIOD):
                await self.wishes.changed.wait()
            return
        last = self.samples[-1].t if self.samples else now
        with anyio.move_on_after(max(0.05, last + PERIOD - now)):
            await first_of(self.guarded.wait_exit, self.wishes.changed.wait)


def shm_before_of(guarded: Guard) -> tuple[tuple[int, int], ...] | None:
    """Return what in /dev/shm is not the launch's, as the state file says it."""
    return None if guarded.shm_before is None else tuple(sorted(guarded.shm_before))
