"""The end of an attempt: keep the evidence, stop everything, prove the release."""

from __future__ import annotations

import logging
from dataclasses import replace

import anyio

from hangguard.facts import (
    Ask,
    Broken,
    Exited,
    Expired,
    Gpu,
    Ready,
    Release,
    ReleaseItem,
    Resource,
    SharedSegment,
    Stuck,
    Unseen,
)
from hangguard.judge import diagnose_memory, step
from hangguard.judge.ranks import by_nccl
from hangguard.judge.waits import with_left_locks
from hangguard.observe.sysv import left_by
from hangguard.supervision.events import Notice, Released, Stopping
from hangguard.supervision.evidence import EVIDENCE_WITHIN, read_tail, without_bulk, write_evidence
from hangguard.supervision.last_words import hear_last_words
from hangguard.supervision.running import RunningAttempt

log = logging.getLogger("hangguard")


async def end(attempt: RunningAttempt) -> None:
    """Keep the evidence, stop everything, prove the release: bounded, shielded, whatever happens.

    ``asyncio.run`` cancels every task at its end, after a second Ctrl-C for example, and that passes every
    shield; or the Ctrl-C itself was raised in here. It ends the grace, not the proof.
    """
    with anyio.CancelScope(shield=True):
        try:
            await _keep_evidence(attempt)
            _announce_stop(attempt)
            await attempt.note_state(stage="stopping")
            await _stop_with_proof(attempt)
        except (KeyboardInterrupt, anyio.get_cancelled_exc_class()):
            attempt.wishes.grace = 0.0
            await _stop_with_proof(attempt)
            raise
        except Exception as fault:  # a named edge: a fault of ours must not hide that nothing was proved
            log.exception("attempt %d could not be ended as it should", attempt.number)
            _tell_release(attempt, unproved(fault))
        finally:
            if attempt.log_cap is not None:
                await attempt.log_cap.aclose()
                attempt.tell_log_news()


# ----------------------------------------------------------------------------------------- the evidence


async def _keep_evidence(attempt: RunningAttempt) -> None:
    if attempt.settled is None or isinstance(attempt.settled, Ready):
        return
    within = attempt.wishes.within
    with anyio.move_on_after(EVIDENCE_WITHIN if within is None else within.evidence(attempt.now(), EVIDENCE_WITHIN)):
        if not isinstance(attempt.settled, Exited):
            await _look_closely(attempt)
            await _hear_last_words(attempt)
        attempt.log_tail = attempt.without_secrets(await read_tail(attempt.log_path))
        attempt.evidence_path = await write_evidence(attempt.run.folder, attempt.record(), tuple(attempt.samples))


async def _look_closely(attempt: RunningAttempt) -> None:
    """Take the last look, with every dear source. NCCL comes after the stacks, and only before a stop.

    Asking it may end a server that hangs (NVIDIA/nccl#1762, before 2.29.2).
    """
    look = await attempt.watcher.take_sample(
        Ask(thread_states=True, stacks=True, sockets=True, growth=True, locks=True, files=True)
    )
    attempt.note_files(look)
    if attempt.run.on_hang == "act" and isinstance(attempt.settled, (Stuck, Broken, Expired)):
        told = await attempt.watcher.take_sample(Ask(communicators=True, last=True))
        look = replace(look, communicators=told.communicators)
    attempt.samples.append(without_bulk(look))
    memory = step(attempt.memory, look)
    if attempt.settled is not None:
        attempt.settled = with_left_locks(memory, look, by_nccl(attempt.settled, look.communicators))
        attempt.diagnosis = attempt.without_secrets(diagnose_memory(replace(memory, verdict=attempt.settled)))


async def _hear_last_words(attempt: RunningAttempt) -> None:
    """Of members that are about to be killed for a hang, and whose stacks nobody could read.

    One that was only too slow may have something to bring in order at SIGTERM, so it is left to that.
    """
    settled, wishes = attempt.settled, attempt.wishes
    if isinstance(settled, Expired) and settled.kind == "ready_within":
        return
    if attempt.run.on_hang != "act" or attempt.run.pristine or wishes.stop_because or wishes.restart:
        return
    if isinstance(settled, (Stuck, Broken, Expired)) and not isinstance(attempt.samples[-1].stacks, Unseen):
        stacks = await hear_last_words(attempt.guarded, attempt.samples[-1].stacks, attempt.log_path)
        attempt.samples[-1] = replace(attempt.samples[-1], stacks=stacks)


# ----------------------------------------------------------------------------------------- the stop


def _announce_stop(attempt: RunningAttempt) -> None:
    alive = attempt.guarded.exit is None or not isinstance(attempt.settled, Exited)
    attempt.stopped_because = why = _why_stopped(attempt)
    if alive:
        attempt.tell(Stopping(t=attempt.now(), attempt=attempt.number, why=why, drained=attempt.drained))


def _why_stopped(attempt: RunningAttempt) -> str:
    if attempt.wishes.stop_because:
        return attempt.wishes.stop_because
    if attempt.wishes.restart:
        return "a restart was asked for"
    if isinstance(attempt.settled, Exited):
        return ""
    if attempt.settled is not None and not isinstance(attempt.settled, Ready):
        return f"{attempt.settled.verdict}: {attempt.settled.why}"
    return "asked"


async def _stop_with_proof(attempt: RunningAttempt) -> None:
    stopped = await attempt.guarded.stop(grace=_grace_of(attempt))
    world, launch = attempt.run.world, attempt.launch
    within, limit = attempt.wishes.within, attempt.run.limits.release_within
    release = await world.prove_release(
        port=launch.port,
        members=attempt.guarded.members,
        stopped=stopped,
        gpu_baseline=attempt.gpus.before,
        driver_names_us=attempt.gpus.driver_names_us,
        look_at_gpus=lambda: _look_at_gpus(attempt),
        who_listens=lambda _port: world.who_listens(launch),
        look_at_port=lambda: world.look_at_port(launch),
        shm_before=attempt.shm_before,
        elsewhere=attempt.elsewhere,
        files_unseen=attempt.files_unseen,
        within=limit if within is None else within.proof(attempt.now(), limit),
        clock=world.clock,
    )
    release = replace(release, segments=await _segments_left(attempt))
    attempt.log_tail = attempt.without_secrets(await read_tail(attempt.log_path))
    _tell_release(attempt, release)
    await attempt.note_state(exit_code=attempt.exit_code, left_behind=release.left_behind)


def _grace_of(attempt: RunningAttempt) -> float:
    """Return the seconds of grace, of what the whole stop may take; tell where those cut it."""
    wishes = attempt.wishes
    grace = attempt.run.limits.stop_grace if wishes.grace is None else wishes.grace
    if wishes.within is None or (allowed := wishes.within.grace(attempt.now())) >= grace:
        return grace
    text = wishes.within.says("grace", allowed, grace)
    attempt.tell(Notice(t=attempt.now(), attempt=attempt.number, text=text))
    return allowed


async def _look_at_gpus(attempt: RunningAttempt) -> tuple[Gpu, ...] | Unseen:
    return (await attempt.watcher.take_sample()).gpus


async def _segments_left(attempt: RunningAttempt) -> tuple[SharedSegment, ...] | Unseen:
    before, now = attempt.segments_before, await attempt.run.world.list_segments()
    if isinstance(now, Unseen) or isinstance(before, Unseen):
        return now if isinstance(now, Unseen) else Unseen(f"before the launch: {before}")
    return left_by(now, attempt.guarded.members, before)


def _tell_release(attempt: RunningAttempt, release: Release) -> None:
    attempt.release = attempt.without_secrets(release)
    attempt.tell(Released(t=attempt.now(), attempt=attempt.number, release=attempt.release))


def unproved(fault: Exception) -> Release:
    """Return what is known of a release that could not be looked at: nothing, and why."""
    detail = f"it was not looked at: {type(fault).__name__}: {fault}"
    resources: tuple[Resource, ...] = ("processes", "gpu-memory", "port", "files")
    return Release(items=tuple(ReleaseItem(resource=r, answer="unknown", detail=detail) for r in resources))
