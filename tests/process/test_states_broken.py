"""Real launches that broke or ended, told apart by what they left; and deaths that mean nothing."""

import os
import socket
from contextlib import contextmanager

import pytest
from commands import run
from faces import little
from states import FAILURES
from test_cgroups import hierarchy, remove
from watched import USUAL, program, send, signal, watching_all

pytestmark = pytest.mark.timeout(400)

ON_ASYNCIO = pytest.mark.parametrize("anyio_backend", ["asyncio"])
ON_TRIO = pytest.mark.parametrize("anyio_backend", ["trio"])


@pytest.mark.anyio
@ON_TRIO
async def test_who_hangs_on_after_a_death_is_broken_and_a_helper_may_fail(tmp_path):
    """A dead worker that its parent never asked about, a zombie, is as dead as one that was reaped."""
    rank = little(tp=2, faults=(("graph-capture", "kill-self"),), fault_rank=1, ignore_crash=True, phase_seconds=1.0)
    async with watching_all(
        tmp_path,
        limits=USUAL,
        reaps=program("family", "reaps"),
        leaves=program("family", "leaves"),
        helper=program("family", "helper"),
        rank=(rank, {"engine": "sglang"}),
    ) as seen:
        workers = {name: (await seen[name].workers())[0] for name in ("reaps", "leaves")}
        for name, worker in workers.items():
            await seen[name].says(f"worker {worker}")
            send(worker, signal.SIGKILL)
        for name, worker in workers.items():
            broken = await seen[name].until("broken", "survivors")
            first, *others = broken.suspects
            assert (first.pid, first.note) == (worker, "died first: signal 9 (SIGKILL)")
            assert [other.pid for other in others] == [seen[name].root]
            assert broken.confidence == "high"
        broken = await seen["rank"].until("broken", "survivors")
        assert (broken.suspects[0].title, broken.suspects[0].note) == (
            "sglang::scheduler_TP1",
            "died first: signal 9 (SIGKILL)",
        )
        assert "sglang::scheduler_TP0" in {suspect.title for suspect in broken.suspects[1:]}
        await seen["helper"].goes_on_for(20.0)
        assert not seen["helper"].classes & FAILURES


@contextmanager
def memory_group(name):
    folder = hierarchy("memory") / f"hangguard-test-states-{name}-{os.getpid()}"
    folder.mkdir()
    try:
        (folder / "memory.limit_in_bytes").write_text(str(64 << 20))
        yield folder / "cgroup.procs"
    finally:
        remove(folder)


@pytest.mark.anyio
@ON_ASYNCIO
async def test_every_end_is_told_by_its_own_evidence(tmp_path):
    """Two are killed by signal 9 inside a group with little memory: one by the kernel for want of it, one by itself."""
    go = tmp_path / "go"
    with memory_group("a") as grows, memory_group("b") as kills, socket.create_server(("127.0.0.1", 0)) as taken:
        async with watching_all(
            tmp_path,
            limits=USUAL,
            grows=program("end", "grows", grows, go),
            kills=program("end", "kills-itself", kills, go),
            descriptors=program("end", "descriptors"),
            port=program("end", "port", taken.getsockname()[1]),
            finishes=program("end", "finishes"),
            waits=program("end", "waits"),
        ) as seen:
            for name in ("grows", "kills"):
                await seen[name].says("is in its group")
                await seen[name].goes_on_for(seen[name].age + 2.0)  # its group is looked at while it lives
            go.touch()
            await seen["waits"].says("begins")
            send(seen["waits"].root, signal.SIGTERM)
            told = {
                "grows": ("oom-kill", "1 in its own control group since the launch", -signal.SIGKILL),
                "kills": ("signal", "signal 9 (SIGKILL), which hangguard did not send", -signal.SIGKILL),
                "descriptors": ("limits", "Too many open files", 1),
                "port": ("port", "Address already in use", 1),
                "finishes": ("finished", "ended with code 0 before it was ever ready, unasked", 0),
                "waits": ("signal", "signal 15 (SIGTERM), which hangguard did not send", -signal.SIGTERM),
            }
            for name, (kind, why, code) in told.items():
                ended = await seen[name].ended()
                assert (name, ended.verdict, ended.kind, ended.exit_code) == (name, "exited", kind, code)
                assert why in ended.why


@pytest.mark.parametrize(("megabytes", "kind"), [(8, "shm-full"), (0, "crash")], ids=["full", "cut short"])
def test_a_bus_error_is_put_down_to_shared_memory_only_where_it_is_full(tmp_path, megabytes, kind):
    """A container's /dev/shm of 8 MB (Docker's has 64): a mount of our own, seen by nobody else, gone with its users.

    The other program maps a file that is cut short while it uses it.
    """
    size = megabytes or 1024
    words = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs -o size={size}m none /dev/shm && exec "$@"', "sh"]
    how = "shm" if megabytes else "cut-short"
    options = ("--url", "http://127.0.0.1:1", "--attempts", "1", "--fallbacks", "none")
    with run(tmp_path, *options, command=program("end", how), inside=words) as hangguard:
        hangguard.wait(120.0)
        ended = hangguard.named("verdict")[-1]
        assert (ended["verdict"], ended["kind"]) == ("exited", kind)
        assert "Bus error" in ended["why"]
        assert "of /dev/shm was free" in ended["why"]
