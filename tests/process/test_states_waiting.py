"""Real starts that wait for something outside: a lock, peers, a disk, a control group, a server elsewhere."""

import os

import pytest
from seen import until
from states import FAILURES, disk, end, ending, freezer, outsider, thawing
from watched import USUAL, program, watching_all

from hangguard import GaveUp, Limits, supervise

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]

ON_ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])
ON_TRIO = pytest.mark.parametrize("anyio_backend", ["trio"])
LONG_AGO = (1_700_000_000, 1_700_000_000)


@pytest.fixture
def homes(tmp_path):
    """Two homes, with the caches that engines have in them."""
    made = []
    for name in ("one", "two", "three"):
        home = tmp_path / f"home-{name}"
        (home / ".cache" / "huggingface" / "hub").mkdir(parents=True)
        (home / ".cache" / "torch_extensions" / "py311").mkdir(parents=True)
        made.append(home)
    return made


def at_home(home, **options):
    return {"env": {**os.environ, "HOME": str(home)}, **options}


def extension(home, name, *, old):
    lock = home / ".cache" / "torch_extensions" / "py311" / name / "lock"
    lock.parent.mkdir()
    lock.touch()
    if old:
        os.utime(lock, LONG_AGO)
    return lock


@ON_ASYNCIO
async def test_a_lock_that_somebody_holds_is_waited_for_by_name_and_then_the_start_goes_on(tmp_path, homes):
    """One by the kernel's own wait, one by the polling of the real filelock, one by the presence of torch's file."""
    polled = homes[0] / ".cache" / "huggingface" / "hub" / "0123.lock"
    built = homes[0] / ".cache" / "torch_extensions" / "py311" / "kernels" / "lock"
    built.parent.mkdir()
    with (
        outsider("lock_user", "flock", tmp_path / "w.lock") as owner,
        outsider("lock_user", "flock", polled) as stranger,
        outsider("lock_user", "baton", built) as builder,
    ):
        for process in (owner, stranger, builder):
            assert [process.stdout.readline() for _ in range(2)] == ["began\n", "held\n"]
        async with watching_all(
            tmp_path,
            flock=program("lock", "flock", tmp_path / "w.lock"),
            filelock=(program("lock", "filelock", polled), at_home(homes[0])),
            baton=(program("file_baton", built), at_home(homes[0])),
        ) as seen:
            holders = {"flock": (owner, tmp_path / "w.lock"), "filelock": (stranger, polled), "baton": (builder, built)}
            for name, (holder, path) in holders.items():
                waiting = await seen[name].until("waiting", "lock")
                assert f"{path}" in waiting.why
                assert f"(pid {holder.pid}), which is no member" in waiting.why
                end(holder)
            built.unlink()
            for name in ("flock", "filelock"):
                await seen[name].says("has the lock, loads the first shard")
                await seen[name].until("moving")
            await seen["baton"].says("has found it built")
            assert not any(s.classes & FAILURES for s in seen.values())


@ON_TRIO
async def test_a_lock_left_behind_is_told_with_its_cure_and_ends_as_a_hang(tmp_path, homes, monkeypatch):
    """A young one is nobody's to remove yet; of several nobody knows which one it is, so no command is given."""
    monkeypatch.setattr("hangguard.judge.waits.STALE", 6.0)
    left = extension(homes[0], "kernels", old=True)
    several = extension(homes[1], "kernels", old=True), extension(homes[1], "others", old=True)
    young = extension(homes[2], "kernels", old=False)
    async with watching_all(
        tmp_path,
        left=(program("file_baton", left), at_home(homes[0])),
        several=(program("file_baton", several[0]), at_home(homes[1])),
        young=(program("file_baton", young), at_home(homes[2])),
    ) as seen:
        os.utime(young, (2_000_000_000, 2_000_000_000))  # as of a clock that is ahead: never old
        waiting = await seen["left"].until("waiting", "stale-lock")
        assert waiting.why.endswith(f"remove it: rm {left}")
        waiting = await seen["several"].until("waiting", "stale-lock")
        assert "rm " not in waiting.why
        assert all(str(path) in waiting.why for path in several)
        stuck = await seen["left"].until("stuck", "idle")
        assert stuck.why.endswith(f"remove it: rm {left}")
        assert (stuck.confidence, stuck.suspects[0].pid) == ("medium", seen["left"].root)
        assert await seen["several"].until("stuck", "idle")
        await seen["young"].goes_on_for(seen["left"].age)
        assert not seen["young"].others("moving", ("waiting", "lock"))
        left.unlink()
        await seen["left"].says("has found it built")
        await seen["left"].until("moving")


@ON_ASYNCIO
async def test_a_start_that_waits_for_a_lock_left_by_somebody_is_given_up_and_no_option_is_blamed(
    tmp_path, homes, monkeypatch
):
    """Every fallback of the engine is allowed, and the lock is there for the next one as well: it is not ours."""
    monkeypatch.setattr("hangguard.judge.waits.STALE", 6.0)
    left = extension(homes[0], "kernels", old=True)
    command = [*program("file_baton", left), "--model-path", "m", "--port", "{port}"]
    options = {"engine": "sglang", "fallbacks": "any", "limits": Limits(stop_grace=1.0), "run_dir": tmp_path / "runs"}
    with pytest.raises(GaveUp) as raised:
        async with supervise(command, **options, **at_home(homes[0])):
            pass
    (attempt,) = raised.value.history
    assert (attempt.verdict.verdict, attempt.verdict.left_locks) == ("stuck", (str(left),))
    assert attempt.diagnosis.findings[0].standing == "confirmed"
    assert f"rm -- {left}" in attempt.diagnosis.findings[0].evidence[0]
    assert f"rm {left}" in str(raised.value)
    assert attempt.release.files == ()
    assert left.exists()


@ON_TRIO
async def test_the_lock_of_a_builder_of_ours_that_was_killed_goes_and_the_same_launch_then_comes_up(tmp_path, homes):
    folder = homes[0] / ".cache" / "torch_extensions" / "py311" / "kernels"
    folder.mkdir()
    bystander = extension(homes[0], "others", old=True)
    command = [*program("builds", folder), "{port}"]
    options = {"url": "http://127.0.0.1:{port}", "fallbacks": "any", "limits": Limits(stop_grace=1.0)}
    async with supervise(command, **options, run_dir=tmp_path / "runs", **at_home(homes[0])) as server:
        first = server.history[0]
        assert (first.verdict.verdict, first.verdict.kind) == ("broken", "survivors")
        assert str(folder / "lock") in first.verdict.left_locks
        assert [(file.path, file.answer) for file in first.release.files] == [(str(folder / "lock"), "removed")]
        assert (server.attempt.number, server.changes) == (2, ())
    assert bystander.exists()


@ON_ASYNCIO
async def test_a_peer_of_one_machine_is_a_hang_peers_elsewhere_are_waited_for_and_delegates_are_unseen(tmp_path):
    """With a launcher that delegates, what we own is an idle client, for as long as the server may run."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("docker", "srun"):
        (folder / name).write_text("#!/bin/sh\nexec sleep 1000\n")
        (folder / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    options = {"env": env, "limits": Limits(patience=5.0, unclear=6.0)}
    several = [*program("rendezvous"), "--nnodes", "2", "--node-rank", "0", "--port", "{port}", "--model-path", "m"]
    async with watching_all(
        tmp_path,
        alone=(program("rendezvous"), {"limits": USUAL}),
        several=(several, {"engine": "sglang", "limits": USUAL}),
        docker=(["docker", "run", "vllm/vllm-openai", "--model", "M"], options),
        srun=(["srun", "-N", "2", "serve"], options),
    ) as seen:
        stuck = await seen["alone"].until("stuck", "idle")
        assert (stuck.phase, stuck.suspects[0].pid) == ("dist-init", seen["alone"].root)
        assert "_create_c10d_store (states_rendezvous.py" in stuck.suspects[0].at[1]
        await seen["several"].until("waiting", "peers")
        await until(lambda: seen["several"].verdict.phase == "dist-init", within=60.0)
        for name, advice in (("docker", "Run hangguard inside it"), ("srun", "Run hangguard there")):
            expired = await seen[name].until("expired", "unclear")
            assert f"started by {name} elsewhere" in expired.why
            assert advice in expired.why
            assert not seen[name].others("moving", "unclear", "expired")
        assert not seen["several"].others("moving", ("waiting", "peers"))


@ON_TRIO
async def test_a_disk_that_stalls_is_waited_for_and_no_hang(tmp_path, monkeypatch):
    """Through the page cache the reader is in state D, past it in state S: neither of them hangs."""
    monkeypatch.setattr("hangguard.judge.waits.UNPROVEN", 8.0)
    with disk(tmp_path / "disk", 2) as slow, disk(tmp_path / "other", 2) as other:
        async with watching_all(
            tmp_path,
            limits=USUAL,
            cached=program("reader", "mapped", tmp_path / "disk" / "weights"),
            direct=program("reader", "read", tmp_path / "other" / "direct"),
        ) as seen:
            with ending(slow, other):
                waiting = await seen["cached"].until("waiting", "disk")
                assert "wait for the disk" in waiting.why
                unclear = await seen["direct"].until("unclear")
                assert "may end by itself" in unclear.why
                slow.answers()
                other.answers()
                for name in seen:
                    await seen[name].says("has loaded them")
                assert not seen["cached"].others("moving", ("waiting", "disk"), ("exited", "finished"))
                assert not seen["direct"].others("moving", "unclear", ("exited", "finished"))


@ON_ASYNCIO
async def test_a_frozen_group_is_waited_for_until_it_is_thawed(tmp_path):
    """By the freezer of version 1, in which all threads look as if they read a disk, and by that of version 2."""
    with freezer("freezer") as first, freezer("") as second:
        async with watching_all(
            tmp_path, limits=USUAL, first=program("family", "ticks"), second=program("family", "ticks")
        ) as seen:
            with thawing(first, second):
                for name, group in (("first", first), ("second", second)):
                    await seen[name].says("layer a")
                    await seen[name].workers()
                    group.freeze(*seen[name].members)
                for name in seen:
                    waiting = await seen[name].until("waiting", "host")
                    assert "its control group is frozen" in waiting.why
                await seen["second"].goes_on_for(seen["second"].age + 8.0)
                for name in seen:
                    assert not seen[name].others("moving", ("waiting", "host"))
                first.thaw()
                second.thaw()
                for name in seen:
                    await until(lambda name=name: seen[name].verdict.verdict == "moving", within=30.0)
