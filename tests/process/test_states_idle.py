"""Real starts in which nothing moves, and such as only look like it."""

import sys

import pytest
from faces import little
from states import FAILURES
from watched import USUAL, program, send, signal, watching_all

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


async def test_locks_that_nobody_lets_go_are_a_hang_and_long_gaps_between_steps_are_none(tmp_path):
    async with watching_all(
        tmp_path,
        limits=USUAL,
        threads=program("deadlock", "threads"),
        processes=program("deadlock", "processes"),
        files=program("deadlock", "files"),
        trickle=program("slow", "trickle"),
        steps=program("slow", "steps"),
    ) as seen:
        for name in ("threads", "processes", "files"):
            stuck = await seen[name].until("stuck", "idle")
            assert stuck.confidence == "high"
            assert stuck.still_for >= 10.0
            suspect = stuck.suspects[0]
            assert suspect.pid == seen[name].members[-1]  # the worker, where there is one
            assert any("states_deadlock.py" in frame for frame in suspect.at)
        for name in ("trickle", "steps"):
            await seen[name].goes_on_for(20.0)
            assert not seen[name].classes & FAILURES


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_stopped_worker_is_named_and_a_short_stop_is_none(tmp_path):
    stopped_rank = little(tp=2, faults=(("dist-init", "stop-self"),), fault_rank=1)
    async with watching_all(
        tmp_path,
        limits=USUAL,
        long=program("family", "ticks"),
        short=program("family", "ticks"),
        rank=(stopped_rank, {"engine": "sglang"}),
    ) as seen:
        workers = {name: (await seen[name].workers())[0] for name in ("long", "short")}
        for name in workers:
            await seen[name].says("layer b")
        send(workers["short"], signal.SIGSTOP)
        try:
            send(workers["long"], signal.SIGSTOP)
            await seen["short"].goes_on_for(seen["short"].age + 3.0)
        finally:
            send(workers["short"], signal.SIGCONT)

        stuck = await seen["long"].until("stuck", "stopped")
        assert [suspect.pid for suspect in stuck.suspects] == [workers["long"]]
        assert "SIGCONT may cure it" in stuck.why
        send(workers["long"], signal.SIGCONT)
        await seen["long"].until("moving")

        stuck = await seen["rank"].until("stuck", "stopped")
        assert (stuck.phase, stuck.suspects[0].title) in {
            ("dist-init", "sglang::scheduler_TP1"),
            ("weights-load", "sglang::scheduler_TP1"),  # where the other rank has got to meanwhile
        }
        assert not seen["short"].classes & FAILURES


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_a_first_thread_that_ended_is_no_death_and_a_parent_in_vfork_waits_for_no_disk(tmp_path, monkeypatch):
    """Both look worse than they are: state Z with living threads, state D without a disk."""
    monkeypatch.setattr("hangguard.judge.waits.UNPROVEN", 8.0)
    monkeypatch.setattr("hangguard.judge.patience.UNPROVEN", 8.0)
    tree = [sys.executable, str(program("x")[2]).replace("states_x", "seen_tree")]
    async with watching_all(tmp_path, limits=USUAL, leader=[*tree, "leader-exits"], vfork=[*tree, "vfork"]) as seen:
        unclear = await seen["vfork"].until("unclear")
        assert "a wait in vfork for a child" in unclear.why
        await seen["leader"].goes_on_for(16.0)
        assert not seen["vfork"].others("moving", "unclear")
        assert not seen["leader"].others("moving", "unclear")
