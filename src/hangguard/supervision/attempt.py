"""One launch: spawn, observe, judge until there is a verdict; always stopped, always released with proof.

:func:`attempting` is the whole of it. What happens in between is a :class:`RunningAttempt` (``running.py``), how it
ends stands in ``ending.py``, and what it waits for before it begins in ``usable_port.py``.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from hangguard.elsewhere import Elsewhere
from hangguard.engines.common import telling_of
from hangguard.engines.counters import canary_for, load_routes_for, metrics_for
from hangguard.facts import AppliedChange, Launch
from hangguard.judge import rules_for, start
from hangguard.observe import Target
from hangguard.observe.held_files import names_in_shm
from hangguard.supervision.ending import end
from hangguard.supervision.events import Launched
from hangguard.supervision.log_cap import LogCap
from hangguard.supervision.notes import FIRST_WITHIN
from hangguard.supervision.run import Guard, Run
from hangguard.supervision.running import RunningAttempt, shm_before_of
from hangguard.supervision.usable_port import with_usable_port
from hangguard.supervision.wishes import Wishes


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
                await end(attempt)


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
        telling=telling_of(run.engine),
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
