"""One launch: spawn, observe, judge until there is a verdict; always stopped, always released with proof."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import anyio

from hangguard import held
from hangguard.act.gpus import GpuHistory
from hangguard.changes import with_port
from hangguard.elsewhere import Elsewhere
from hangguard.engines.counters import canary_for, load_routes_for, metrics_for
from hangguard.errors import PortInUse
from hangguard.facts import (
    NOT_ASKED,
    AppliedChange,
    Ask,
    Attempt,
    Broken,
    Diagnosis,
    Drained,
    Exited,
    Expired,
    Gpu,
    HeldFiles,
    Launch,
    Listener,
    Ready,
    Release,
    ReleaseItem,
    Resource,
    Sample,
    SharedSegment,
    Stuck,
    Unseen,
    Verdict,
)
from hangguard.judge import Memory, diagnose_memory, next_ask, rules_for, start, step
from hangguard.judge.assess import FAREWELL
from hangguard.judge.ranks import by_nccl
from hangguard.judge.waits import with_left_locks
from hangguard.observe import Target
from hangguard.observe.port_left import TIME_WAIT_SECONDS, PortLeft
from hangguard.observe.ports import free_port
from hangguard.observe.sysv import Segment, left_by
from hangguard.redact import redact
from hangguard.supervision.events import Event, Launched, Notice, PhaseChanged, Released, Stopping, VerdictChanged
from hangguard.supervision.evidence import read_tail, without_bulk, write_evidence
from hangguard.supervision.last_words import hear_last_words
from hangguard.supervision.log_cap import LogCap
from hangguard.supervision.notes import FIRST_WITHIN
from hangguard.supervision.quiet import QuietTimes
from hangguard.supervision.run import Guard, Run, Watcher
from hangguard.supervision.stop_within import StopWithin

T = TypeVar("T")

log = logging.getLogger("hangguard")

PERIOD = 1.0
"""Seconds between samples."""

PERIOD_AT_END = 0.25
"""The same for ``FAREWELL`` seconds once the launched process has ended."""

KEPT_SAMPLES = 180

PORT_WITHIN = TIME_WAIT_SECONDS + 5.0
"""Seconds that a launch waits for a port that only the kernel still keeps."""

EVIDENCE_WITHIN = 8.0
"""Seconds that gathering evidence may take before the stop goes on without it."""

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


@dataclass(slots=True)
class RunningAttempt:
    """One launch that is being watched. Made by :func:`attempting`, owned by one task."""

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
        self._note_files(sample)
        self.gpus.note(sample.gpus, {pid for pid, _ in self.guarded.members})
        self._tell_changes(before, sample.t)
        await self._note_state()
        return self.memory.verdict

    def _note_files(self, sample: Sample) -> None:
        """Have the guardian know what members have: it removes what of it is left at the end."""
        files = sample.files
        if isinstance(files, HeldFiles):
            proved = [file for file in files.files if (file.device, file.inode) not in files.unproved]
            self.guarded.remember_files(proved, files.others)
        unseen = files.left_out if isinstance(files, HeldFiles) else (files.reason,) if files != NOT_ASKED else ()
        self.files_unseen = tuple(dict.fromkeys((*self.files_unseen, *unseen)))[-8:]

    async def _note_state(self, **changed: Any) -> None:
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
        await self._note_state(stage="ready", url=self.launch.url)

    async def _with_lessons(self, memory: Memory, first: Sample) -> Memory:
        """Lengthen the patience by what good starts of the same kind have taught; the GPUs are known only now."""
        learned = await self.run.world.patience_learned(self.launch, first.gpus)
        return replace(memory, rules=replace(memory.rules, learned=learned)) if learned else memory

    async def remember_good_start(self) -> None:
        """Note how long each phase stood still in this start, which became ready."""
        gpus = self.samples[-1].gpus if self.samples else Unseen("no sample was taken")
        await self.run.world.note_good_start(self.launch, gpus, self.memory.longest_still)

    def record(self) -> Attempt:
        """Return the attempt as a frozen record."""
        verdict = self.settled or self.memory.verdict
        exit_ = self.guarded.exit
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
            exit_code=exit_.code if exit_ is not None and isinstance(exit_.code, int) else None,
            log_path=self.log_path,
            log_cut_bytes=self.log_cap.cut_bytes if self.log_cap is not None else 0,
            evidence_path=self.evidence_path,
            log_tail=self.log_tail,
            stopped_because=self.stopped_because,
            drained=self.drained,
        )

    async def end(self) -> None:
        """Keep the evidence, stop everything, prove the release: bounded, shielded, whatever happens.

        ``asyncio.run`` cancels every task at its end, after a second Ctrl-C for example, and that passes every
        shield; or the Ctrl-C itself was raised in here. It ends the grace, not the proof.
        """
        with anyio.CancelScope(shield=True):
            try:
                await self._keep_evidence()
                self._announce_stop()
                await self._note_state(stage="stopping")
                await self._stop_with_proof()
            except (KeyboardInterrupt, anyio.get_cancelled_exc_class()):
                self.wishes.grace = 0.0
                await self._stop_with_proof()
                raise
            except Exception as fault:  # a named edge: a fault of ours must not hide that nothing was proved
                log.exception("attempt %d could not be ended as it should", self.number)
                self._tell_release(unproved(fault))
            finally:
                if self.log_cap is not None:
                    await self.log_cap.aclose()
                    self._tell_log_news()

    def _announce_stop(self) -> None:
        alive = self.guarded.exit is None or not isinstance(self.settled, Exited)
        self.stopped_because = self._why_stopped()
        if alive:
            why = self.stopped_because
            self._tell(Stopping(t=self._now(), attempt=self.number, why=why, drained=self.drained))

    async def _stop_with_proof(self) -> None:
        limits = self.run.limits
        within = self.wishes.within
        grace = limits.stop_grace if self.wishes.grace is None else self.wishes.grace
        if within is not None and (allowed := within.grace(self._now())) < grace:
            self._tell(Notice(t=self._now(), attempt=self.number, text=within.says("grace", allowed, grace)))
            grace = allowed
        stopped = await self.guarded.stop(grace=grace)
        release = await self.run.world.prove_release(
            port=self.launch.port,
            members=self.guarded.members,
            stopped=stopped,
            gpu_baseline=self.gpus.before,
            driver_names_us=self.gpus.driver_names_us,
            look_at_gpus=self._look_at_gpus,
            who_listens=lambda _port: self.run.world.who_listens(self.launch),
            look_at_port=lambda: self.run.world.look_at_port(self.launch),
            shm_before=self.shm_before,
            elsewhere=self.elsewhere,
            files_unseen=self.files_unseen,
            within=limits.release_within if within is None else within.proof(self._now(), limits.release_within),
            clock=self.run.world.clock,
        )
        release = replace(release, segments=await self._segments_left())
        self.log_tail = self._without_secrets(await read_tail(self.log_path))
        self._tell_release(release)
        exit_ = self.guarded.exit
        code = exit_.code if exit_ is not None and isinstance(exit_.code, int) else None
        await self._note_state(exit_code=code, left_behind=release.left_behind)

    async def _segments_left(self) -> tuple[SharedSegment, ...] | Unseen:
        now = await self.run.world.list_segments()
        if isinstance(now, Unseen) or isinstance(self.segments_before, Unseen):
            return now if isinstance(now, Unseen) else Unseen(f"before the launch: {self.segments_before}")
        return left_by(now, self.guarded.members, self.segments_before)

    def _tell_release(self, release: Release) -> None:
        self.release = self._without_secrets(release)
        self._tell(Released(t=self._now(), attempt=self.number, release=self.release))

    def _decides(self, verdict: Verdict) -> bool:
        """Whether the watch is over with this verdict; a hang alone ends it only where we are to act on it."""
        if isinstance(verdict, (Ready, Exited)) or (isinstance(verdict, Expired) and verdict.kind == "ready_within"):
            return True
        return isinstance(verdict, (Stuck, Broken, Expired)) and self.run.on_hang == "act"

    def settle(self, verdict: Verdict) -> Verdict:
        """Let this be the verdict with which the watch ended."""
        self.settled, self.settled_at = self._without_secrets(verdict), self._now()
        self.last_movement_at = self.memory.last_movement_at
        self.was_ready = self.was_ready or self.memory.ready_at is not None
        self.diagnosis = self._without_secrets(diagnose_memory(self.memory))
        return verdict

    def _why_stopped(self) -> str:
        if self.wishes.stop_because:
            return self.wishes.stop_because
        if self.wishes.restart:
            return "a restart was asked for"
        if isinstance(self.settled, Exited):
            return ""
        if self.settled is not None and not isinstance(self.settled, Ready):
            return f"{self.settled.verdict}: {self.settled.why}"
        return "asked"

    def _tell_changes(self, before: Memory, t: float) -> None:
        for i in range(max(len(before.phases), 1), len(self.memory.phases)):
            (previous, _), (phase, at) = self.memory.phases[i - 1 : i + 1]
            self._tell(PhaseChanged(t=at, attempt=self.number, phase=phase, previous=previous))
        old, new = before.verdict, self.memory.verdict
        if before.last is None or (type(old), old.kind) != (type(new), new.kind):
            self._tell(VerdictChanged(t=t, attempt=self.number, verdict=new))
        if not self.guarded.guardian_alive and not self._told_guardian:
            self._told_guardian = True
            text = "the guardian died; this program ends the server itself, but nobody does if it dies too"
            self._tell(Notice(t=t, attempt=self.number, text=text))
        self._tell_log_news()

    def _tell_log_news(self) -> None:
        for text in self.log_cap.news() if self.log_cap is not None else ():
            self._tell(Notice(t=self._now(), attempt=self.number, text=text))

    async def _pause(self) -> None:
        """Sleep until the next sample is due; an exit or a wish ends it."""
        now, ended = self._now(), self.guarded.exit
        if ended is not None:  # a launcher may have forked and gone: then its server is watched at the usual pace
            with anyio.move_on_after(PERIOD_AT_END if now - ended.at < FAREWELL else PERIOD):
                await self.wishes.changed.wait()
            return
        last = self.samples[-1].t if self.samples else now
        with anyio.move_on_after(max(0.05, last + PERIOD - now)):
            await first_of(self.guarded.wait_exit, self.wishes.changed.wait)

    async def _look_at_gpus(self) -> tuple[Gpu, ...] | Unseen:
        return (await self.watcher.take_sample()).gpus

    async def _keep_evidence(self) -> None:
        if self.settled is None or isinstance(self.settled, Ready):
            return
        within = self.wishes.within
        with anyio.move_on_after(EVIDENCE_WITHIN if within is None else within.evidence(self._now(), EVIDENCE_WITHIN)):
            if not isinstance(self.settled, Exited):
                await self._look_closely()
                await self._hear_last_words()
            self.log_tail = self._without_secrets(await read_tail(self.log_path))
            self.evidence_path = await write_evidence(self.run.folder, self.record(), tuple(self.samples))

    async def _look_closely(self) -> None:
        """Take the last look, with every dear source. NCCL comes after the stacks, and only before a stop.

        Asking it may end a server that hangs (NVIDIA/nccl#1762, before 2.29.2).
        """
        look = await self.watcher.take_sample(
            Ask(thread_states=True, stacks=True, sockets=True, growth=True, locks=True, files=True)
        )
        self._note_files(look)
        if self.run.on_hang == "act" and isinstance(self.settled, (Stuck, Broken, Expired)):
            told = await self.watcher.take_sample(Ask(communicators=True, last=True))
            look = replace(look, communicators=told.communicators)
        self.samples.append(without_bulk(look))
        memory = step(self.memory, look)
        if self.settled is not None:
            self.settled = with_left_locks(memory, look, by_nccl(self.settled, look.communicators))
            self.diagnosis = self._without_secrets(diagnose_memory(replace(memory, verdict=self.settled)))

    async def _hear_last_words(self) -> None:
        """Of members that are about to be killed for a hang, and whose stacks nobody could read.

        One that was only too slow may have something to bring in order at SIGTERM, so it is left to that.
        """
        if isinstance(self.settled, Expired) and self.settled.kind == "ready_within":
            return
        if self.run.on_hang != "act" or self.run.pristine or self.wishes.stop_because or self.wishes.restart:
            return
        if isinstance(self.settled, (Stuck, Broken, Expired)) and not isinstance(self.samples[-1].stacks, Unseen):
            stacks = await hear_last_words(self.guarded, self.samples[-1].stacks, self.log_path)
            self.samples[-1] = replace(self.samples[-1], stacks=stacks)

    def _without_secrets(self, fact: T) -> T:
        """What goes into the record, and from there into the texts of errors: titles and log lines may hold any."""
        return redact(fact, self.run.folder.known_secrets)

    def _now(self) -> float:
        return self.run.world.clock()

    def _tell(self, event: Event) -> None:
        self.run.announcer.tell(event)


@asynccontextmanager
async def attempting(
    run: Run,
    launch: Launch,
    changes: tuple[AppliedChange, ...],
    *,
    number: int,
    deadline: float,
    wishes: Wishes,
) -> AsyncIterator[RunningAttempt]:
    """Start one launch; on leaving, keep the evidence, stop it, and prove its release.

    Raises :class:`~hangguard.errors.PortInUse`, ``CommandNotFound``, ``CommandNotExecutable`` or
    ``GuardianFailed`` when nothing could be started.
    """
    world = run.world
    launch = await with_usable_port(run, launch, number=number, deadline=deadline, wishes=wishes)
    shm_before, segments_before = names_in_shm(), await world.list_segments()
    elsewhere = await world.look_elsewhere(launch)
    started_at = world.clock()
    log_path = run.folder.file(f"attempt-{number}.log")
    await run.notes.note(
        **(_NOTHING_LAUNCHED | _where(launch)),
        attempt=number,
        changes=tuple(change.change for change in changes),
        within=FIRST_WITHIN,
    )
    async with world.guarded(
        argv=launch.argv,
        env=run.environment(launch),
        cwd=launch.cwd,
        log_path=log_path,
        lock_path=run.folder.file("lock"),
        death_grace=run.limits.death_grace,
        on_death=run.on_death,
        pristine=run.pristine,
        port=launch.port or None,
        elsewhere=elsewhere,
        clock=world.clock,
    ) as guarded:
        await run.notes.note(
            guardian=(guarded.guardian_pid, guarded.guardian_started),
            root=(guarded.pid, guarded.started),
            members=((guarded.pid, guarded.started),),
            log_id=guarded.log_id,
            shm_before=shm_before_of(guarded),
            within=FIRST_WITHIN,
        )
        run.announcer.tell(Launched(t=world.clock(), attempt=number, pid=guarded.pid, argv=launch.argv))
        async with world.observe(target_of(run, launch, guarded, log_path, elsewhere)) as watcher:
            attempt = RunningAttempt(
                run=run,
                number=number,
                launch=launch,
                changes=changes,
                guarded=guarded,
                watcher=watcher,
                memory=start(rules_for(run.engine, launch, run.limits, deadline=deadline)),
                wishes=wishes,
                started_at=started_at,
                log_path=log_path,
                log_cap=cap_of(run, guarded, log_path),
                shm_before=shm_before,
                segments_before=segments_before,
                elsewhere=elsewhere,
            )
            try:
                yield attempt
            finally:
                await attempt.end()


_NOTHING_LAUNCHED: dict[str, Any] = {
    "stage": "starting",
    "guardian": None,
    "root": None,
    "log_id": None,
    "exit_code": None,
    "members": (),
    "shm_before": None,
    "files": (),
    "gpus_before": (),
    "left_behind": (),
    "verdict": "",
    "kind": "",
    "phase": "",
}
"""What the state file says before an attempt: nothing of the one before it."""


def shm_before_of(guarded: Guard) -> tuple[tuple[int, int], ...] | None:
    """Return what in /dev/shm is not the launch's, as the state file says it."""
    return None if guarded.shm_before is None else tuple(sorted(guarded.shm_before))


def _where(launch: Launch) -> dict[str, Any]:
    return {"url": launch.url, "host": launch.host, "port": launch.port, "socket_path": launch.socket_path}


def target_of(run: Run, launch: Launch, guarded: Guard, log_path: str | None, elsewhere: Elsewhere) -> Target:
    """Return what the probes must know of this attempt."""
    return Target(
        guardian_pid=guarded.guardian_pid,
        guardian_started=guarded.guardian_started,
        root=(guarded.pid, guarded.started),
        log_path=log_path,
        launch=launch,
        telling=(*(m.pattern for m in run.engine.markers), *(s.pattern for s in run.engine.symptoms)),
        health_path=run.engine.health_path,
        request=run.engine.ready(launch) if run.engine.ready else None,
        metrics_path=run.engine.metrics_path,
        metrics=metrics_for(run.engine, launch.version),
        metrics_hint=run.engine.metrics_hint,
        load_routes=load_routes_for(run.engine, launch.version),
        quiet_routes=run.engine.quiet_routes,
        canary=canary_for(run.engine, launch),
        ready=run.ready,
        ras_address=run.ras_address(launch),
        guardian_stacks=guarded.read_stacks,
        elsewhere=elsewhere,
        exit_of=lambda: guarded.exit,
        probe_within=run.limits.probe_within,
        clock=run.world.clock,
    )


def cap_of(run: Run, guarded: Guard, log_path: str | None) -> LogCap | None:
    """Return what bounds the log of this attempt; ``None``: there is none, or no bound was wanted."""
    if run.log_bytes is None or log_path is None or guarded.log_id is None:
        return None
    return LogCap(log_path, guarded.log_id, run.log_bytes)


def unproved(fault: Exception) -> Release:
    """Return what is known of a release that could not be looked at: nothing, and why."""
    detail = f"it was not looked at: {type(fault).__name__}: {fault}"
    resources: tuple[Resource, ...] = ("processes", "gpu-memory", "port", "files")
    return Release(items=tuple(ReleaseItem(resource=r, answer="unknown", detail=detail) for r in resources))


async def with_usable_port(run: Run, launch: Launch, *, number: int, deadline: float, wishes: Wishes) -> Launch:
    """Return the launch, with another port where it is ours to choose and the one that it has is not free any more.

    Refuse when somebody listens where the server would answer: his answers would pass for ours. Where nobody does and
    the kernel still keeps the port from servers, wait for it, until TIME_WAIT is over.
    """
    gives_up_at = min(deadline, run.world.clock() + PORT_WITHIN)
    asked_for = launch
    has_told = False
    while True:
        listener = await run.world.who_listens(launch)
        left = None if isinstance(listener, Listener) else await run.world.look_at_port(launch)
        is_kept = isinstance(left, PortLeft) and left.can_be_bound is False
        if not is_kept and not isinstance(listener, Listener):
            return launch
        if launch.chooses_port and launch is asked_for:
            launch = on_a_fresh_port(launch)
            continue
        if isinstance(listener, Listener):
            raise PortInUse(launch.port, redact(listener, run.folder.known_secrets), socket_path=launch.socket_path)
        if wishes.stop_because:
            return launch
        if run.world.clock() >= gives_up_at:
            raise PortInUse(launch.port, None, without_listener=str(left))
        if not has_told:
            has_told = True
            text = f"port {launch.port} cannot be bound yet: {left}; waiting for it"
            run.announcer.tell(Notice(t=run.world.clock(), attempt=number, text=text))
        await anyio.sleep(PERIOD)


def on_a_fresh_port(launch: Launch) -> Launch:
    """Return it on another port where the port is ours to choose: nobody may still come to the last attempt's.

    A restart of a server that was ready keeps its port: its clients know that one.
    """
    return with_port(launch, free_port()) if launch.chooses_port else launch


def names_in_shm() -> frozenset[str] | None:
    """Return what lies in /dev/shm now; ``None``: it may not be listed."""
    with suppress(OSError):
        return frozenset(Path(name).name for name in held.names_in().values())
    return None


async def first_of(*waits: Callable[[], Awaitable[object]]) -> None:
    """Return when the first of these waits has ended; the others are cancelled."""
    async with anyio.create_task_group() as group:

        async def one(wait: Callable[[], Awaitable[object]]) -> None:
            await wait()
            group.cancel_scope.cancel()

        for wait in waits:
            group.start_soon(one, wait)
