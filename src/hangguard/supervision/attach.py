"""The watch over a server that somebody else started: the same samples, judgement and events, for as long as it lives.

It is never started again, and by default never touched. Only where the caller names the process by pid *and* start
time and says ``on_hang="act"`` is a hung one stopped: the process, its descendants, and nobody else.
"""

from __future__ import annotations

import logging
import os
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType

import anyio

from hangguard.act import _membership
from hangguard.act.stop import prove_release
from hangguard.act.without_guardian import stop_members
from hangguard.engines.base import Engine
from hangguard.errors import BadLaunch, LeftBehind, WrongProcess
from hangguard.facts import (
    Ask,
    Attempt,
    Broken,
    Diagnosis,
    Exited,
    Expired,
    Gpu,
    Launch,
    Limits,
    Ready,
    Release,
    Sample,
    Stuck,
    Unseen,
    Verdict,
)
from hangguard.judge import Memory, diagnose_memory, next_ask, start, step
from hangguard.observe.held_files import names_in_shm
from hangguard.redact import redact, secrets_of
from hangguard.store import open_run_folder
from hangguard.supervision.announcer import Announcer, Hook, Subscription
from hangguard.supervision.events import (
    Attached,
    BecameReady,
    Ended,
    Event,
    Notice,
    Released,
    Stopping,
)
from hangguard.supervision.evidence import EVIDENCE_WITHIN, read_tail, without_bulk, write_evidence
from hangguard.supervision.found import FoundServer, choose
from hangguard.supervision.run import OnHang, look_who_listens
from hangguard.supervision.running import KEPT_SAMPLES, PERIOD
from hangguard.supervision.turns import turns
from hangguard.supervision.watch import Watch, watching

log = logging.getLogger("hangguard")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attaching:
    """What one call of ``attach`` was asked for."""

    pid: int | None = None
    url: str | None = None
    match: str | None = None
    started: int | None = None
    engine: str | Engine | None = None
    log: str | None = None
    limits: Limits = Limits()
    on_hang: OnHang = "report"
    run_dir: str | os.PathLike[str] | None = None
    hooks: Sequence[Hook] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be meant."""
        given = [name for name in ("pid", "url", "match") if getattr(self, name) is not None]
        if self.match is not None and len(given) > 1:
            raise BadLaunch(
                f"The server is named by {' and '.join(f'{name}=' for name in given)}", advice="Give one of them"
            )
        if not given:
            raise BadLaunch("There is no server to watch", advice="Give pid=, url= or match=")
        if self.match is not None and not self.match.strip():
            raise BadLaunch("match is empty, and would mean every process", advice="Give a part of the command line")
        if self.on_hang not in {"act", "report"}:
            raise BadLaunch(f"on_hang is {self.on_hang!r}", advice="It must be 'act' or 'report'")
        if self.on_hang == "act" and (self.pid is None or self.started is None):
            advice = (
                "A name or a number alone may mean another process by then. The start time is what diagnose() shows"
            )
            raise BadLaunch("on_hang='act' needs pid= and started= (its start time in clock ticks)", advice=advice)


class AsyncWatch:
    """A server that somebody else started, being watched. Leaving the block leaves it alone.

    Made by ``async with attach(…)``. The blocking twin is :class:`hangguard.Watch`.
    """

    def __init__(self, asked: Attaching, server: FoundServer) -> None:
        self._asked = asked
        self._server = server
        self._announcer = Announcer(asked.hooks, secrets_of(server.launch))
        self._memory: Memory | None = None
        self._samples: deque[Sample] = deque(maxlen=KEPT_SAMPLES)
        self._members: set[tuple[int, int]] = {server.identity}
        self._diagnosis = Diagnosis()
        self._release: Release | None = None
        self._failure: BaseException | None = None
        self._first = anyio.Event()
        self._over = anyio.Event()
        self._owner = os.getpid()

    @property
    def pid(self) -> int:
        """The topmost process of it; 0: it runs on another machine, or may not be seen."""
        return self._server.pid

    @property
    def started(self) -> int:
        """Its start time in clock ticks since boot."""
        return self._server.started

    @property
    def url(self) -> str:
        """The base URL; empty: it is not known where it answers."""
        return self._server.launch.url

    @property
    def launch(self) -> Launch:
        """What it was started with, as far as that can be read."""
        return self._server.launch

    @property
    def server(self) -> FoundServer:
        """What is known of it."""
        return self._server

    @property
    def verdict(self) -> Verdict:
        """The newest verdict."""
        assert self._memory is not None
        return redact(self._memory.verdict, secrets_of(self._server.launch))

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of the hang or end that was seen last; empty: there was none."""
        return self._diagnosis

    @property
    def release(self) -> Release | None:
        """What was left of it after we stopped it; ``None``: we did not."""
        return self._release

    async def sample(self) -> Sample:
        """Return the newest sample, at most about a second old while the watch goes on."""
        self._check()
        return self._samples[-1]

    def events(self) -> Subscription:
        """Return the events from now on, as an asynchronous iterator that ends with the watch."""
        self._check()
        return self._announcer.subscribe()

    async def wait(self, timeout: float | None = None) -> Verdict:  # noqa: ASYNC109 - as Popen.wait
        """Wait until the server has ended, or was stopped by us; return the last verdict.

        Raises :class:`TimeoutError` after ``timeout`` seconds.
        """
        self._check()
        with anyio.fail_after(timeout):
            await self._over.wait()
        self._check()
        return self.verdict

    # ------------------------------------------------------------------------------------ below

    def _check(self) -> None:
        if self._owner != os.getpid():
            raise WrongProcess(self._owner, os.getpid())
        if self._failure is not None:
            raise self._failure

    async def _follow(self) -> None:
        """Watch until the server has ended or was stopped. Owned by the one task of the attachment."""
        try:
            async with watching(self._server, log=self._asked.log, limits=self._asked.limits) as watch:
                await self._watch(watch)
        except Exception as failure:  # noqa: BLE001 - raised bare by the handle and on leaving
            self._failure = failure
        finally:
            self._first.set()
            self._over.set()
            with anyio.CancelScope(shield=True):
                await self._announcer.aclose()

    async def _watch(self, watch: Watch) -> None:
        self._memory = start(watch.rules)
        server = self._server
        self._tell(Attached(t=watch.clock(), attempt=1, pid=server.pid, started=server.started,
                            title=server.title))  # fmt: skip
        for note in server.notes:
            self._tell(Notice(t=watch.clock(), attempt=1, text=note))
        while True:
            verdict = await self._look(watch)
            if isinstance(verdict, Exited):
                break
            # Not on Expired: that a budget is over proves nothing about a server whose beginning we did not see.
            if isinstance(verdict, (Stuck, Broken)) and self._asked.on_hang == "act":
                await self._act(watch)
                break
            await anyio.sleep(max(0.05, self._samples[-1].t + PERIOD - watch.clock()))
        code = self._samples[-1].exit
        self._tell(
            Ended(
                t=watch.clock(),
                attempt=1,
                exit_code=code.code if code is not None and isinstance(code.code, int) else None,
                left_behind=self._release.left_behind if self._release is not None else (),
            )
        )

    async def _look(self, watch: Watch) -> Verdict:
        before = self._memory
        assert before is not None
        sample = await watch.observer.take_sample(next_ask(before))
        self._samples.append(without_bulk(sample))
        self._memory = step(before, sample)
        if not isinstance(sample.tree, Unseen):
            self._members |= {member.identity for member in sample.tree.members}
        if isinstance(self._memory.verdict, (Stuck, Broken, Expired, Exited)):
            self._diagnosis = redact(diagnose_memory(self._memory), secrets_of(self._server.launch))
        self._tell_changes(before, self._memory, sample.t)
        self._first.set()
        return self._memory.verdict

    def _tell_changes(self, before: Memory, after: Memory, t: float) -> None:
        for event in turns(before, after, t=t, attempt=1):
            self._tell(event)
        was_ready = before.last is not None and isinstance(before.verdict, Ready)
        if isinstance(after.verdict, Ready) and not was_ready:
            self._tell(BecameReady(t=t, attempt=1, url=self.url, changes=()))

    async def _act(self, watch: Watch) -> None:
        """Keep the evidence, stop it, prove the release: bounded, shielded."""
        with anyio.CancelScope(shield=True):
            verdict = self.verdict
            await self._keep_evidence(watch, verdict)
            self._tell(Stopping(t=watch.clock(), attempt=1, why=f"{verdict.verdict}: {verdict.why}"))
            shm_before = names_in_shm()
            launch = self._server.launch
            stopped = await stop_members(
                self._server.identity, self._members, grace=self._asked.limits.stop_grace, port=launch.port
            )
            self._release = redact(
                await prove_release(
                    port=launch.port,
                    members=frozenset(self._members),
                    stopped=stopped,
                    gpu_baseline=Unseen("what the GPUs held before its launch was not seen"),
                    look_at_gpus=lambda: _gpus(watch),
                    who_listens=lambda _port: look_who_listens(launch),
                    shm_before=shm_before,
                    within=self._asked.limits.release_within,
                    clock=watch.clock,
                ),
                secrets_of(launch),
            )
            self._tell(Released(t=watch.clock(), attempt=1, release=self._release))

    async def _keep_evidence(self, watch: Watch, verdict: Verdict) -> None:
        launch, t = self._server.launch, watch.clock()
        with anyio.move_on_after(EVIDENCE_WITHIN):
            self._samples.append(without_bulk(await watch.observer.take_sample(Ask(thread_states=True, stacks=True))))
            known = secrets_of(launch)
            folder = open_run_folder(self._asked.run_dir, known)
            tail = () if isinstance(watch.log, Unseen) else await read_tail(watch.log.path)
            first = self._samples[0].t
            record = Attempt(
                number=1, launch=launch, verdict=verdict, started_at=first, last_movement_at=t - verdict.still_for,
                settled_at=t, diagnosis=self._diagnosis, log_tail=redact(tail, known),
            )  # fmt: skip
            path = await write_evidence(folder, record, tuple(self._samples))
            if path is not None:
                self._tell(Notice(t=watch.clock(), attempt=1, text=f"evidence: {path}"))

    def _tell(self, event: Event) -> None:
        self._announcer.tell(event)


async def _gpus(watch: Watch) -> tuple[Gpu, ...] | Unseen:
    return (await watch.observer.take_sample()).gpus


class AsyncAttachment:
    """A watch to be, entered once with ``async with``."""

    def __init__(self, asked: Attaching) -> None:
        self._asked = asked
        self._watch: AsyncWatch | None = None

    async def __aenter__(self) -> AsyncWatch:
        """Find the server and begin to watch; return after the first sample.

        Raises :class:`~hangguard.errors.NoSuchServer` where it is none, or not exactly one.
        """
        if self._watch is not None:
            raise RuntimeError("this attachment was entered before: call attach() again")
        asked = self._asked
        server = await choose(
            pid=asked.pid, url=asked.url, match=asked.match, started=asked.started, engine=asked.engine
        )
        if asked.on_hang == "act":
            _refuse_to_act_on(server)
        self._watch = watch = AsyncWatch(asked, server)
        self._group = anyio.create_task_group()
        await self._group.__aenter__()
        self._group.start_soon(watch._follow)  # noqa: SLF001 - the two are one
        try:
            await watch._first.wait()  # noqa: SLF001
        except BaseException:
            await self._leave()
            raise
        if watch._failure is not None:  # noqa: SLF001
            await self._leave()
            raise watch._failure  # noqa: SLF001
        return watch

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; the server is left alone. A stop that is under way is brought to its end.

        Raises :class:`~hangguard.errors.LeftBehind` when something of it could not be ended.
        """
        watch = self._watch
        assert watch is not None
        if watch._owner != os.getpid():  # noqa: SLF001
            return
        await self._leave()
        if watch._failure is not None and error is None:  # noqa: SLF001
            raise watch._failure  # noqa: SLF001
        if watch.release is not None and watch.release.left_behind and error is None:
            raise LeftBehind(watch.release)

    async def _leave(self) -> None:
        self._group.cancel_scope.cancel()
        await self._group.__aexit__(None, None, None)


def _refuse_to_act_on(server: FoundServer) -> None:
    """Refuse what could end somebody else: ourselves, whoever started us, or what /proc only seems to show."""
    if problem := _membership.why_proc_misleads():
        raise BadLaunch(f"Nothing can be stopped safely: {problem}")
    if server.pid == os.getpid() or server.pid in _membership.ancestors(os.getpid()):
        raise BadLaunch(f"Process {server.pid} is this program, or one that started it", advice="It is not stopped")
    if not hasattr(os, "pidfd_open"):
        raise BadLaunch("This Python has no pidfds, so that a process could be another one when it is signalled")
