"""The GPU probe: facts as the driver gives them, a reason where it does not, and never a hang."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from hangguard.facts import Ask, Gpu, GpuHolder, Launch, Unseen
from hangguard.observe._visible import choose_visible, read_gpu
from hangguard.observe.gpus import MOST_READERS, READER, GpuProbe
from standin import MIB

pytestmark = pytest.mark.anyio
NOBODY = 1 << 22
"""A pid that the kernel never gives (PID_MAX_LIMIT)."""
SUPERVISOR = Path(__file__).parent / "programs" / "gpus_supervisor.py"


def launch(**env):
    pairs = tuple(sorted(env.items()))
    return Launch(argv=("x",), env=pairs, cwd="/", url="http://127.0.0.1:1", host="127.0.0.1", port=1)


@contextlib.asynccontextmanager
async def probing(*, env=None, devices="/dev/no-such-file*", **options):
    probe = GpuProbe(launch(**(env or {})), devices=devices, **options)
    try:
        yield probe
    finally:
        await probe.aclose()


def is_gone(pid):
    """Ended, whether or not its parent has noticed (inside a container nobody may reap an orphan)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def wait_until(condition, within=10.0):
    give_up_at = time.monotonic() + within
    while not condition():
        assert time.monotonic() < give_up_at, "it did not happen in time"
        time.sleep(0.01)


async def test_gpus_are_what_the_driver_says(gpus):
    gpus.set(0, utilization=37, memory_used=76_017 * MIB, memory_total=97_887 * MIB, power=88_500)
    gpus.set(0, compute={NOBODY + 2: 70_000 * MIB, NOBODY: None}, graphics={NOBODY + 1: 5 * MIB})
    gpus.set(0, name="NVIDIA RTX PRO 6000")
    async with probing() as probe:
        seen = await look_until_faults_are_seen(probe)
        assert seen[0] == Gpu(
            index=0,
            uuid=gpus.uuid(0),
            name="NVIDIA RTX PRO 6000",
            memory_used_bytes=76_017 * MIB,
            memory_total_bytes=97_887 * MIB,
            utilization_percent=37.0,
            power_watts=88.5,
            holders=(
                GpuHolder(pid=NOBODY, used_bytes=None, known=False),
                GpuHolder(pid=NOBODY + 1, used_bytes=5 * MIB, known=False),
                GpuHolder(pid=NOBODY + 2, used_bytes=70_000 * MIB, known=False),
            ),
            faults=(),
        )
        assert [gpu.index for gpu in seen] == [0, 1, 2, 3]
        assert seen[3].holders == ()
        gpus.set(3, memory_used=1 * MIB)
        assert (await probe.look(Ask()))[3].memory_used_bytes == MIB
        assert len(gpus.opened_by) == 1  # one reader for all looks


async def test_gpus_missing_says_why(tmp_path, monkeypatch):
    """No driver and no device file: looked, nothing there. Device files without a library: could not look."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnvidia-ml.so.1").write_text("no library, and it hides the one that this machine may have")
    async with probing() as probe:
        assert await probe.look(Ask()) == ()
        reader = probe._children._living[0]
        assert await probe.look(Ask()) == ()
        wait_until(lambda: is_gone(reader.pid))
    (tmp_path / "nvidia0").touch()
    async with probing(devices=str(tmp_path / "nvidia*")) as probe:
        for _ in range(2):
            assert await probe.look(Ask()) == Unseen("nvmlInit: NVML Shared Library Not Found")


async def test_gpus_without_a_loaded_driver(gpus, tmp_path):
    """The library alone proves nothing: containers have it too. It is asked again, for the driver may come."""
    gpus.fail("nvmlInitWithFlags", 9)
    async with probing() as probe:
        assert await probe.look(Ask()) == ()
        gpus.heal()
        assert len(await probe.look(Ask())) == 4
    gpus.fail("nvmlInitWithFlags", 9)
    (tmp_path / "nvidiactl").touch()
    async with probing(devices=str(tmp_path / "nvidia*")) as probe:
        assert await probe.look(Ask()) == Unseen("nvmlInit: Driver Not Loaded")


async def test_gpus_hanging_is_unseen_within_its_deadline(gpus):
    """Every reader that hangs is killed and replaced, three times; then no more are started."""
    async with probing(within=0.5) as probe:
        assert len(await look_until_seen(probe)) == 4
        gpus.hang("nvmlDeviceGetUtilizationRates", gpu=2)
        looks = 0
        while not isinstance(seen := await timed_look(probe, 0.9), Unseen) or "not asked again" not in seen.reason:
            assert seen == Unseen("the NVIDIA driver did not answer within 0.5 s")
            looks += 1
            assert looks <= 2 * MOST_READERS  # a question to a fresh reader has its whole time, over two looks
        assert len(gpus.opened_by) == MOST_READERS
        for _ in range(3):
            settled = await probe.look(Ask())
            assert settled == Unseen(
                "the NVIDIA driver did not answer: its reader was replaced 3 times; not asked again"
            )
        assert len(gpus.opened_by) == MOST_READERS
    assert all(is_gone(pid) for pid in gpus.opened_by)


async def timed_look(probe, within):
    began = time.monotonic()
    seen = await probe.look(Ask())
    assert time.monotonic() - began < within
    return seen


async def look_until_seen(probe):
    """A busy machine may need several short looks until a reader has started."""
    with anyio.fail_after(20):
        while isinstance(seen := await probe.look(Ask()), Unseen):
            assert "not asked again" not in seen.reason
        return seen


async def look_until_faults_are_seen(probe):
    """Faults are read beside the figures, and come a moment after them."""
    with anyio.fail_after(20):
        while any(isinstance(gpu.faults, Unseen) for gpu in await look_until_seen(probe)):
            await anyio.sleep(0.01)
        return await probe.look(Ask())


async def test_the_look_after_a_hang_sees_again(gpus):
    async with probing(within=0.5) as probe:
        await look_until_seen(probe)
        gpus.hang("nvmlDeviceGetPowerUsage")
        assert isinstance(await probe.look(Ask()), Unseen)
        gpus.heal()
        assert len(await look_until_seen(probe)) == 4
        assert len(set(gpus.opened_by)) == 2


@pytest.mark.long
async def test_a_driver_that_opens_slowly_is_not_opened_again(gpus):
    """Without persistence mode opening takes seconds a board; a new reader would begin from the start."""
    gpus.hang("nvmlInitWithFlags")
    async with probing(within=0.3, start_within=3.0) as probe:
        began = time.monotonic()
        while time.monotonic() < began + 2.0:
            assert isinstance(await timed_look(probe, 0.7), Unseen)
        assert len(gpus.opened_by) == 1
        gpus.heal()
        assert len(await look_until_seen(probe)) == 4
        assert len(gpus.opened_by) == 2


async def test_a_cancelled_look_leaves_the_probe_usable(gpus):
    async with probing(within=5.0) as probe:
        await probe.look(Ask())
        os.kill(gpus.opened_by[0], signal.SIGSTOP)  # a reader that is only slow
        with anyio.move_on_after(0.1) as scope:
            await probe.look(Ask())
        assert scope.cancelled_caught
        os.kill(gpus.opened_by[0], signal.SIGCONT)
        gpus.set(1, utilization=64)
        seen = await probe.look(Ask())
        assert seen[1].utilization_percent == 64.0  # the answer to this question, not to the cancelled one
        assert len(gpus.opened_by) == 1


async def test_a_look_cancelled_at_any_moment_of_the_start_leaves_the_probe_usable(gpus):
    for moment in (0.0, 0.001, 0.01, 0.05):
        async with probing() as probe:
            with anyio.move_on_after(moment):
                await probe.look(Ask())
            assert len(await probe.look(Ask())) == 4


async def test_a_look_that_the_observer_cancels_counts_as_a_hang(gpus):
    async with probing(within=0.4) as probe:
        await look_until_seen(probe)
        gpus.hang("nvmlDeviceGetUtilizationRates")
        with anyio.move_on_after(0.39):
            await probe.look(Ask())
        gpus.heal()
        assert len(await look_until_seen(probe)) == 4
        assert len(gpus.opened_by) == 2


async def test_two_looks_at_once_ask_once(gpus):
    answers = []

    async def look(probe):
        answers.append(await probe.look(Ask()))

    async with probing() as probe, anyio.create_task_group() as group:
        group.start_soon(look, probe)
        group.start_soon(look, probe)
    assert Unseen("still busy with an earlier look") in answers
    assert [len(answer) for answer in answers if not isinstance(answer, Unseen)] == [4]


async def test_a_reader_that_ends_is_replaced(gpus):
    async with probing() as probe:
        await probe.look(Ask())
        os.kill(gpus.opened_by[0], signal.SIGKILL)
        assert isinstance(await probe.look(Ask()), Unseen)
        assert len(await probe.look(Ask())) == 4


@pytest.mark.parametrize(
    ("argv", "reason"),
    [
        (("/no/such/python",), "the NVIDIA reader cannot be started"),
        ((sys.executable, "-c", "pass"), "the NVIDIA reader ended"),
        ((sys.executable, "-c", "import time; print('nonsense\\n[]', flush=True); time.sleep(9)"), "ended: []"),
    ],
)
async def test_a_reader_that_cannot_work_says_why(argv, reason):
    async with probing(reader_argv=argv) as probe:
        seen = await probe.look(Ask())
        assert isinstance(seen, Unseen)
        assert reason in seen.reason


@pytest.mark.parametrize(
    ("function", "field"),
    [
        ("nvmlDeviceGetUtilizationRates", "utilization_percent"),
        ("nvmlDeviceGetPowerUsage", "power_watts"),
        ("nvmlDeviceGetMemoryInfo", "memory_used_bytes"),
        ("nvmlDeviceGetComputeRunningProcesses_v3", "holders"),
        ("nvmlDeviceGetGraphicsRunningProcesses_v3", "holders"),
    ],
)
async def test_a_failing_call_makes_its_field_unseen_and_no_other(gpus, function, field):
    gpus.fail("nvmlDeviceGetMemoryInfo_v2", 25)  # alone harmless: the older call is asked
    async with probing() as probe:
        assert not unseen_fields((await look_until_faults_are_seen(probe))[1])
        gpus.fail(function, 4, gpu=1)
        seen = await probe.look(Ask())
        fields = {field, "memory_total_bytes"} if field == "memory_used_bytes" else {field}
        assert unseen_fields(seen[1]) == dict.fromkeys(fields, "NVML: Insufficient Permissions")
        assert not unseen_fields(seen[0])


async def test_figures_that_a_board_does_not_have_are_unseen(gpus):
    """Boards with shared memory have no memory figures of their own, some have no power sensor."""
    gpus.set(0, memory_used=None, power=None)
    gpus.fail("nvmlDeviceGetGraphicsRunningProcesses_v3", 3)  # no graphics: nobody uses it for that
    async with probing() as probe:
        seen = (await look_until_faults_are_seen(probe))[0]
        assert set(unseen_fields(seen)) == {"memory_used_bytes", "memory_total_bytes", "power_watts"}
        assert seen.holders == ()


async def test_a_lost_gpu_is_there_with_its_reason(gpus):
    gpus.fail("nvmlDeviceGetHandleByIndex_v2", 15, gpu=2)
    async with probing() as probe:
        seen = await probe.look(Ask())
        assert [gpu.index for gpu in seen] == [0, 1, 2, 3]
        assert seen[2].utilization_percent == Unseen("NVML does not give the GPU: GPU is lost")
        assert len(unseen_fields(seen[2])) == 5
    async with probing(env={"CUDA_VISIBLE_DEVICES": gpus.uuid(2)}) as probe:
        assert await probe.look(Ask()) == Unseen(f"GPU 2 does not tell its UUID, and may be {gpus.uuid(2)}")


async def test_an_old_driver_is_unseen_where_it_is_too_old(use_gpus, old_standin_library):
    """nvidia-ml-py then raises an error that is not an NVMLError."""
    gpus = use_gpus(old_standin_library, 1)
    gpus.set(0, memory_used=5 * MIB, compute={1: MIB})
    async with probing() as probe:
        (seen,) = await look_until_faults_are_seen(probe)
        assert seen.memory_used_bytes == 5 * MIB
        assert set(unseen_fields(seen)) == {"holders"}
        assert "does not match the NVML lib version" in seen.holders.reason


async def test_visible_devices_choose_the_gpus(gpus):
    async with probing(env={"CUDA_VISIBLE_DEVICES": "3,1"}) as probe:
        assert [gpu.index for gpu in await probe.look(Ask())] == [3, 1]
    async with probing(env={"CUDA_VISIBLE_DEVICES": gpus.uuid(2)[:12]}) as probe:
        assert [gpu.index for gpu in await probe.look(Ask())] == [2]
    async with probing(env={"CUDA_VISIBLE_DEVICES": ""}) as probe:
        assert await probe.look(Ask()) == ()
    gpus.set(1, mig=("MIG-aaaa", "MIG-bbbb"), utilization=50, memory_used=7 * MIB)
    async with probing(env={"CUDA_VISIBLE_DEVICES": "MIG-bbbb"}) as probe:
        (seen,) = await probe.look(Ask())
        assert (seen.index, seen.memory_used_bytes) == (1, 7 * MIB)
        assert seen.utilization_percent == Unseen("MIG has no utilisation")


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2]),
        ("0", [0]),
        ("2,0", [2, 0]),
        (" 1 , 2", [1, 2]),
        ("1gpu,2", [1, 2]),  # strtoul
        ("1,-1,2", [1]),
        ("1,9,2", [1]),
        ("1,x,2", [1]),
        ("1,1", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("GPU-b", [1]),
        ("GPU-c,GPU-a", [2, 0]),
        ("GPU-a,1", [0]),
        ("GPU-", []),  # of several boards
        ("GPU-b,GPU-bb", [1]),
        ("GPU-zz,GPU-a", []),
        ("MIG-s2,MIG-s1", [2]),
        ("MIG-GPU-aa/1/0", [0]),
        ("MIG-zz", []),
    ],
)
def test_visible_devices_are_read_as_torch_reads_them(wanted, indices):
    env = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    seen = choose_visible([board(0, "aa"), board(1, "bb"), board(2, "cc", mig=[["MIG-s1", 1], ["MIG-s2", 2]])], env)
    assert [gpu.index for gpu in seen] == indices


@pytest.mark.parametrize(
    ("env", "seen"),
    [
        ({"CUDA_VISIBLE_DEVICES": "0"}, None),
        ({"CUDA_VISIBLE_DEVICES": "0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [0]),
        ({"CUDA_VISIBLE_DEVICES": "1,0"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-bb"}, [1]),
        ({}, [0, 1]),
    ],
)
def test_different_boards_have_two_orders(env, seen):
    boards = [board(0, "aa", name="slow"), board(1, "bb", name="fast")]
    chosen = choose_visible(boards, env)
    assert isinstance(chosen, Unseen) if seen is None else [gpu.index for gpu in chosen] == seen


def test_a_slice_on_a_board_that_does_not_tell_is_unseen():
    boards = [board(0, "aa"), board(1, "bb", mig={"unseen": "NVML: Timeout"})]
    assert choose_visible(boards, {"CUDA_VISIBLE_DEVICES": "MIG-s1"}) == Unseen(
        "the board of MIG-s1 cannot be found: NVML: Timeout"
    )


async def test_aclose_ends_the_reader_and_no_bystander(gpus):
    bystander = subprocess.Popen((*READER, str(os.getpid())), stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        bystander.stdout.readline()
        async with probing() as probe:
            await probe.look(Ask())
            gpus.hang("nvmlDeviceGetCount_v2")
            reader = gpus.opened_by[1]
            assert Path(f"/proc/{reader}/cmdline").read_bytes() == cmdline(bystander.pid)
        wait_until(lambda: not Path(f"/proc/{reader}").exists())  # reaped, not only dead
        assert bystander.poll() is None
        assert bystander.stdin.close() is None
        assert bystander.wait(timeout=10) == 0  # an idle reader ends with its stdin
    finally:
        bystander.kill()
        bystander.wait()
        bystander.stdout.close()


@pytest.mark.parametrize("fork", ["", "fork"])
@pytest.mark.parametrize("hang", [None, "nvmlDeviceGetCount_v2", "nvmlInitWithFlags"])
def test_the_reader_ends_with_the_supervising_program(gpus, hang, fork):
    """Even in the middle of a call, and even when a forked child still holds its stdin open."""
    if hang:
        gpus.hang(hang)
    supervisor = subprocess.Popen([sys.executable, str(SUPERVISOR), "1", fork], stdout=subprocess.PIPE, text=True)
    forked = 0
    try:
        forked = int(supervisor.stdout.readline())
        wait_until(lambda: len(gpus.opened_by) > 0)
        if hang != "nvmlDeviceGetCount_v2":  # that reader was dropped at the look's own deadline
            assert not is_gone(gpus.opened_by[-1])
        supervisor.kill()
        supervisor.wait()
        wait_until(lambda: all(is_gone(pid) for pid in gpus.opened_by))
        assert not forked or not is_gone(forked)
    finally:
        if forked:
            os.kill(forked, signal.SIGKILL)
        supervisor.kill()
        supervisor.wait()
        supervisor.stdout.close()


def cmdline(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def unseen_fields(gpu):
    values = {name: getattr(gpu, name) for name in Gpu.__dataclass_fields__}
    return {name: value.reason for name, value in values.items() if isinstance(value, Unseen)}


def board(index, uuid, *, name="board", mig=()):
    """What the reader says of one board."""
    return {
        "index": index,
        "uuid": f"GPU-{uuid}",
        "name": name,
        "memory": [0, MIB],
        "utilization": 0,
        "milliwatts": 0,
        "holders": [],
        "mig": mig if isinstance(mig, dict) else list(mig),
        "faults": [],
    }


def test_a_board_without_a_name_is_still_a_gpu():
    gpu = read_gpu({**board(0, "aa"), "name": {"unseen": "x"}, "uuid": {"unseen": "x"}})
    assert (gpu.name, gpu.uuid) == ("", "")
