"""The proof of release has three answers, and knows whose fault each is."""

import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import anyio
import psutil
import pytest

from hangguard.act import _membership, stop
from hangguard.act.gpus import GpuHistory
from hangguard.act.spawn import Stopped, guarded
from hangguard.act.stop import prove_release
from hangguard.facts import Gpu, GpuHolder, Listener, Survivor, Unseen
from hangguard.observe.devices import DeviceHolder, DeviceHolders, look_who_has_gpus_open
from hangguard.observe.port_left import PortLeft

pytestmark = pytest.mark.anyio

MIB = 1 << 20
NOBODY = 4_194_303  # the highest pid a kernel gives out, and it has none here
MEMBER = (NOBODY, 12345)
DONE = Stopped(survivors=(), ended=3, seconds=0.5, by="guardian")


def gpu(used=1000 * MIB, holders=(), **more):
    fields = {
        "index": 0,
        "uuid": "GPU-0",
        "name": "made up",
        "memory_used_bytes": used,
        "memory_total_bytes": 80_000 * MIB,
        "utilization_percent": 0.0,
        "power_watts": 60.0,
        "holders": holders,
    }
    return Gpu(**fields | more)


def script(*answers):
    """Return a look that gives these answers one after the other, and the last one for ever."""
    left = list(answers)

    async def look(*_):
        answer = left.pop(0) if len(left) > 1 else left[0]
        if answer == "hangs":
            await anyio.sleep_forever()
        return answer

    return look


async def prove(**changed):
    asked = {
        "port": 8000,
        "members": frozenset({MEMBER}),
        "stopped": DONE,
        "gpu_baseline": (gpu(),),
        "look_at_gpus": script((gpu(),)),
        "who_listens": script(None),
        "shm_before": frozenset(os.listdir("/dev/shm")),
        "within": 0.3,
        "look_at_devices": script(DeviceHolders((), 0)),
    }
    release = await prove_release(**asked | changed)
    return release, {item.resource: item for item in release.items}


async def test_released_at_the_first_look():
    release, items = await prove(within=60.0)
    assert release.answer == "released"
    assert set(items) == {"processes", "gpu-memory", "port"}
    assert release.left_behind == ()
    assert release.seconds < 5


async def test_a_machine_without_gpus_has_released_them():
    release, _ = await prove(gpu_baseline=(), look_at_gpus=script(()))
    assert release.answer == "released"


async def test_it_looks_again_until_the_driver_lets_go():
    busy = (gpu(used=9000 * MIB, holders=(GpuHolder(pid=NOBODY, used_bytes=8000 * MIB),)),)
    taken = Listener(pid=NOBODY, title="server", ours=True)
    release, _ = await prove(look_at_gpus=script(busy, busy, (gpu(),)), who_listens=script(taken, None), within=30.0)
    assert release.answer == "released"
    assert 0.1 < release.seconds < 20


# ----------------------------------------------------------------------------------------- processes


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["/bin/sleep", "100"])
    yield process
    process.kill()
    process.wait()


async def test_a_survivor_is_held_and_ours(sleeper):
    identity = _membership.read_entry(sleeper.pid).identity
    survivor = Survivor(pid=identity[0], started=identity[1], title="VLLM::Worker", state="D", wait_channel="uvm_x")
    stopped = Stopped(survivors=(survivor,), ended=2, seconds=9.0, by="guardian")
    release, items = await prove(stopped=stopped, members=frozenset({identity}))
    assert items["processes"].answer == "held"
    assert items["processes"].ours
    assert "uvm_x" in items["processes"].detail
    assert [left.pid for left in release.survivors] == [sleeper.pid]
    assert release.answer == "held"
    assert len(release.left_behind) == 1


async def test_a_member_that_nobody_reported_is_seen_to_live(sleeper):
    identity = _membership.read_entry(sleeper.pid).identity
    _, items = await prove(members=frozenset({identity}))
    assert items["processes"].answer == "held"


async def test_a_survivor_whose_pid_is_somebody_elses_now_is_gone(sleeper):
    pid, started = _membership.read_entry(sleeper.pid).identity
    survivor = Survivor(pid=pid, started=started - 1, title="", state="D", wait_channel="")
    stopped = Stopped(survivors=(survivor,), ended=2, seconds=9.0, by="guardian")
    release, _ = await prove(stopped=stopped, members=frozenset({(pid, started - 1)}))
    assert release.answer == "released"
    assert release.survivors == ()


# ---------------------------------------------------------------------------------------- GPU memory


async def test_a_dead_member_that_the_driver_still_names_is_held_and_ours():
    busy = (gpu(used=9000 * MIB, holders=(GpuHolder(pid=NOBODY, used_bytes=8000 * MIB),)),)
    _, items = await prove(look_at_gpus=script(busy))
    assert items["gpu-memory"].answer == "held"
    assert items["gpu-memory"].ours
    assert str(NOBODY) in items["gpu-memory"].detail


async def test_a_neighbours_growth_is_not_ours(sleeper):
    before = (gpu(used=2000 * MIB, holders=(GpuHolder(pid=sleeper.pid, used_bytes=1000 * MIB),)),)
    now = (gpu(used=7000 * MIB, holders=(GpuHolder(pid=sleeper.pid, used_bytes=6000 * MIB),)),)
    release, _ = await prove(gpu_baseline=before, look_at_gpus=script(now))
    assert release.answer == "released"


async def test_a_neighbour_that_grows_by_20_gb_is_named_and_blocks_nothing(sleeper):
    """Its own memory, or what it imported from a server that is dead now: the driver books both on it."""
    now = (gpu(used=21_000 * MIB, holders=(GpuHolder(pid=sleeper.pid, used_bytes=20_000 * MIB, known=True),)),)
    holder = DeviceHolder(sleeper.pid, 1, "trainer", ("/dev/nvidia0",))
    release, items = await prove(look_at_gpus=script(now), look_at_devices=script(DeviceHolders((holder,), 0)))
    assert release.answer == "released"
    assert f"pid {sleeper.pid} (trainer), no member, holds 20000 MiB more" in items["gpu-memory"].detail
    assert sleeper.poll() is None


async def test_a_foreign_process_that_keeps_a_dead_members_memory_is_named_and_lives(sleeper, tmp_path):
    """The driver names the dead owner; only the descriptors show who it is. A stand-in for the file of the board."""
    (tmp_path / "nvidia0").touch()
    with (tmp_path / "nvidia0").open() as board:
        keeper = subprocess.Popen(["/bin/sleep", "100"], stdin=board)
    try:
        busy = (gpu(used=9000 * MIB, holders=(GpuHolder(pid=NOBODY, used_bytes=8000 * MIB, known=False),)),)
        _, items = await prove(
            look_at_gpus=script(busy),
            look_at_devices=lambda: look_who_has_gpus_open(f"{tmp_path}/nvidia\\d+"),
            driver_names_us=True,
        )
        item = items["gpu-memory"]
        assert (item.answer, item.ours) == ("held", True)
        assert f"pid {NOBODY} (8000 MiB)" in item.detail
        assert f"perhaps kept by pid {keeper.pid} (sleep), no member, which has {tmp_path}/nvidia0 open" in item.detail
        assert keeper.poll() is None
    finally:
        keeper.kill()
        keeper.wait()


async def test_a_member_with_a_board_open_is_held_whatever_the_driver_says(sleeper):
    identity = _membership.read_entry(sleeper.pid).identity
    holder = DeviceHolder(*identity, "VLLM::Worker", ("/dev/nvidia3",))
    for gpus in ((gpu(),), Unseen("no driver answered")):
        _, items = await prove(
            members=frozenset({identity}),
            look_at_gpus=script(gpus),
            look_at_devices=script(DeviceHolders((holder,), 0)),
        )
        assert (items["gpu-memory"].answer, items["gpu-memory"].ours) == ("held", True)
        assert "/dev/nvidia3" in items["gpu-memory"].detail


async def test_a_stranger_with_a_board_open_holds_nothing_up(sleeper):
    holder = DeviceHolder(sleeper.pid, 1, "dcgm", ("/dev/nvidia0",))
    release, _ = await prove(look_at_devices=script(DeviceHolders((holder,), 0)))
    assert release.answer == "released"


@pytest.mark.parametrize("devices", [DeviceHolders((), 0), DeviceHolders((), 3), Unseen("not permitted")])
async def test_without_the_driver_the_descriptors_are_told_and_prove_nothing(devices):
    _, items = await prove(look_at_gpus=script(Unseen("no driver answered")), look_at_devices=script(devices))
    item = items["gpu-memory"]
    assert item.answer == "unknown"
    assert ("no member has a GPU open" in item.detail) == isinstance(devices, DeviceHolders)
    assert ("3 processes hide theirs" in item.detail) == (devices == DeviceHolders((), 3))


HOSTS_PID = GpuHolder(pid=NOBODY, used_bytes=8000 * MIB, known=False)


@pytest.mark.parametrize(("used", "answer"), [(1000, "released"), (9000, "unknown")])
async def test_where_the_driver_has_the_hosts_pids_memory_and_descriptors_decide(used, answer):
    """The number may be that of a member of ours by chance: it was never named while it lived."""
    now = (gpu(used=used * MIB, holders=(HOSTS_PID,)),)
    release, items = await prove(look_at_gpus=script(now), driver_names_us=False)
    assert items["gpu-memory"].answer == answer
    assert release.left_behind == ()
    if answer == "unknown":
        assert "pids of nobody here" in items["gpu-memory"].detail
        assert str(NOBODY) in items["gpu-memory"].detail


async def test_a_counter_that_stands_at_its_top_is_told_with_its_cure_and_holds_nothing_up():
    release, items = await prove(look_at_gpus=script((gpu(utilization_percent=100.0),)), within=30.0)
    assert release.answer == "released"
    assert "GPU 0 shows 100 % though nobody is on it" in items["gpu-memory"].detail
    assert "nvidia-smi --gpu-reset -i 0" in items["gpu-memory"].detail
    assert 2.0 <= release.seconds < 10


@pytest.mark.parametrize(
    "later",
    [
        gpu(utilization_percent=3.0),
        gpu(utilization_percent=100.0, holders=(GpuHolder(pid=1, used_bytes=0),)),
        gpu(utilization_percent=100.0, holders=Unseen("not permitted")),
        gpu(utilization_percent=Unseen("MIG has no utilisation")),
    ],
)
async def test_a_counter_that_falls_or_that_somebody_can_explain_is_not_told(later):
    first = gpu(utilization_percent=100.0)
    _, items = await prove(look_at_gpus=script((first,), (later,)), within=30.0)
    assert items["gpu-memory"].answer == "released"
    assert items["gpu-memory"].detail == ""


def test_what_the_gpus_held_before_is_their_first_sight_also_after_an_hour():
    history = GpuHistory()
    free, loaded = (gpu(),), (gpu(used=70_000 * MIB, holders=(GpuHolder(pid=7, used_bytes=69_000 * MIB, known=True),)),)
    history.note(free, {7})
    assert history.driver_names_us is None
    for _ in range(500):
        history.note(loaded, {7})
    assert history.before == free
    assert history.driver_names_us


OURS, STRANGER, NOBODY_HERE = (
    GpuHolder(pid=7, used_bytes=300 * MIB, known=True),
    GpuHolder(pid=8, used_bytes=300 * MIB, known=True),
    GpuHolder(pid=900, used_bytes=300 * MIB, known=False),
)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize(
    ("holder", "before"), [(OURS, 700), (STRANGER, 1000), (NOBODY_HERE, 1000), (replace(OURS, used_bytes=None), None)]
)
def test_what_was_before_is_without_us_also_where_the_driver_opens_late(holder, before, is_late):
    history = GpuHistory()
    if is_late:
        history.note(Unseen("still opening"), {7})
    history.note((gpu(holders=(holder,)),), {7})
    if holder == NOBODY_HERE and is_late:  # it may stand for one of us
        assert history.before == Unseen("still opening")
    elif before is None:
        assert history.before[0].memory_used_bytes == Unseen("the server was on it at the first look")
    else:
        assert history.before[0].memory_used_bytes == before * MIB


async def test_a_pid_that_is_a_strangers_now_is_a_stranger(sleeper):
    pid, started = _membership.read_entry(sleeper.pid).identity
    now = (gpu(used=3000 * MIB, holders=(GpuHolder(pid=pid, used_bytes=2000 * MIB),)),)
    release, _ = await prove(members=frozenset({(pid, started - 1)}), look_at_gpus=script(now))
    assert release.answer == "released"


@pytest.mark.parametrize(("growth", "answer"), [(63, "released"), (64, "held")])
async def test_growth_that_nobody_explains_is_held_but_not_by_us(growth, answer):
    release, items = await prove(look_at_gpus=script((gpu(used=(1000 + growth) * MIB),)))
    assert items["gpu-memory"].answer == answer
    assert release.left_behind == ()


@pytest.mark.parametrize(
    ("baseline", "now", "word"),
    [
        ((gpu(),), Unseen("no driver answered"), "no driver answered"),
        (Unseen("not looked"), (gpu(),), "before the launch"),
        ((gpu(),), (gpu(used=Unseen("MIG")),), "MIG"),
        ((gpu(),), (), "no longer reported"),
        ((gpu(),), (gpu(used=9000 * MIB, holders=(GpuHolder(pid=1, used_bytes=None),)),), "does not tell"),
    ],
)
async def test_what_cannot_be_seen_is_unknown_and_says_why(baseline, now, word):
    release, items = await prove(gpu_baseline=baseline, look_at_gpus=script(now))
    assert items["gpu-memory"].answer == "unknown"
    assert word in items["gpu-memory"].detail
    assert release.answer == "unknown"
    assert release.left_behind == ()


async def test_memory_that_is_back_is_released_though_the_holders_cannot_be_seen():
    release, _ = await prove(look_at_gpus=script((gpu(holders=Unseen("not permitted")),)))
    assert release.answer == "released"


async def test_a_look_that_hangs_is_unknown(monkeypatch):
    monkeypatch.setattr(stop, "LOOKS_WITHIN", 0.05)
    _, items = await prove(look_at_gpus=script("hangs"), who_listens=script("hangs"))
    assert {items[name].answer for name in ("gpu-memory", "port")} == {"unknown"}
    assert "no answer within" in items["port"].detail


# ----------------------------------------------------------------------------------------- port, files


@pytest.mark.parametrize(
    ("listener", "answer", "ours"),
    [
        (Listener(pid=NOBODY, title="server", ours=True), "held", True),
        (Listener(pid=1, title="init", ours=False), "held", False),
        (Listener(pid=None, title="", ours=False), "held", False),
        (Listener(pid=None, title="", ours=None), "unknown", True),
        (Unseen("not readable"), "unknown", True),
    ],
)
async def test_whoever_listens_is_named(listener, answer, ours):
    release, items = await prove(who_listens=script(listener))
    assert items["port"].answer == answer
    assert items["port"].ours == ours
    assert len(release.left_behind) == (answer == "held" and ours)


async def test_a_stranger_on_the_port_is_not_waited_for_as_long_as_one_of_ours(monkeypatch):
    monkeypatch.setattr(stop, "NOT_OURS_FOR", 0.3)
    release, _ = await prove(who_listens=script(Listener(pid=1, title="init", ours=False)), within=60.0)
    assert release.answer == "held"
    assert release.seconds < 10


@pytest.mark.parametrize(
    ("left", "answer", "words"),
    [
        (PortLeft(port=8000, can_be_bound=True), "released", ""),
        (PortLeft(port=8000, can_be_bound=True, time_wait=2), "released", "2 in TIME_WAIT"),
        (PortLeft(port=8000, can_be_bound=False, time_wait=2), "held", "without listener: 2 in TIME_WAIT"),
        (PortLeft(port=8000, can_be_bound=False, held_by=((7, "keeper"),)), "held", "held by pid 7 (keeper)"),
        (Unseen("not readable"), "released", ""),
        (None, "released", ""),
    ],
)
async def test_a_port_without_listener_is_told_apart_from_one_that_somebody_has(left, answer, words):
    release, items = await prove(look_at_port=script(left))
    assert items["port"].answer == answer
    assert words in items["port"].detail
    assert release.left_behind == ()


async def test_new_names_in_shared_memory_are_listed_and_stay():
    before = frozenset(os.listdir("/dev/shm"))
    path = Path("/dev/shm") / f"psm_hangguard_test_new_{os.getpid()}"
    path.touch()
    try:
        release, _ = await prove(shm_before=before)
        assert str(path) in release.unattributed_files
        assert path.exists()
        assert release.answer == "released"
    finally:
        path.unlink()


# ---------------------------------------------------------------------------------------- all of it


async def test_a_real_server_on_a_port_is_proved_gone(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]

    async def who_listens(port):
        for connection in psutil.net_connections("tcp"):
            if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port:
                return Listener(pid=connection.pid, title="", ours=None)
        return None

    async def proof(server, stopped, within):
        members = server.members | {(server.pid, server.started)}
        return await prove_release(
            port=port, members=members, stopped=stopped, gpu_baseline=(), look_at_gpus=script(()),
            who_listens=who_listens, shm_before=frozenset(), within=within,
        )  # fmt: skip

    async with guarded(
        argv=[sys.executable, "-m", "http.server", "--bind", "127.0.0.1", str(port)],
        env=dict(os.environ),
        cwd=str(tmp_path),
        log_path=str(tmp_path / "log"),
        lock_path=None,
        death_grace=0.5,
        on_death="stop",
        pristine=False,
    ) as server:
        with anyio.fail_after(20):
            while await who_listens(port) is None:
                await anyio.sleep(0.02)
        release = await proof(server, DONE, within=0.0)
        assert {item.answer for item in release.items if item.resource != "gpu-memory"} == {"held"}
        assert len(release.left_behind) == 2
        stopped = await server.stop(grace=5.0)
        release = await proof(server, stopped, within=20.0)
        assert release.answer == "released"
        assert server.exit.code == -signal.SIGTERM
