"""Faults of the board: what the driver tells is told, what it cannot tell is unseen, and no figure waits for it."""

import contextlib
import subprocess
import sys
import time

import anyio
import pytest

from hangguard.facts import Ask, Gpu, GpuFault, GpuHolder, Launch, Unseen
from hangguard.observe._visible import choose_visible
from hangguard.observe.gpus import READER, GpuProbe
from standin import MIB

pytestmark = pytest.mark.anyio
LOST, NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND = 15, 3, 4, 13


@contextlib.asynccontextmanager
async def probing(**env):
    launch = Launch(
        argv=("x",), env=tuple(sorted(env.items())), cwd="/", url="http://127.0.0.1:1", host="127.0.0.1", port=1
    )
    probe = GpuProbe(launch, devices="/dev/no-such-file*")
    try:
        yield probe
    finally:
        await probe.aclose()


async def look_until(probe, condition, within=20.0):
    """Look every 20 ms until the GPUs are as the condition wants them."""
    with anyio.fail_after(within):
        while True:
            seen = await probe.look(Ask())
            if not isinstance(seen, Unseen) and condition(seen):
                return seen
            await anyio.sleep(0.02)


def are_seen(gpus):
    return all(not isinstance(gpu.faults, Unseen) for gpu in gpus)


def kinds(gpu):
    return [(fault.kind, fault.code) for fault in gpu.faults]


async def test_an_xid_is_told_for_its_board_alone_while_the_others_have_none(gpus):
    async with probing() as probe:
        assert {gpu.faults for gpu in await look_until(probe, are_seen)} == {()}
        before = time.monotonic()
        gpus.xid(2, 119)
        seen = await look_until(probe, lambda gpus: gpus[2].faults)
        (fault,) = seen[2].faults
        assert (fault.kind, fault.code, fault.by_program) == ("xid", 119, False)
        assert fault.detail == "the GPU's system processor (GSP) does not answer"
        assert before <= fault.at <= time.monotonic()
        assert [gpu.faults for gpu in seen if gpu.index != 2] == [(), (), ()]
        assert not isinstance(seen[2].power_watts, Unseen)


async def test_what_happened_before_the_reader_was_opened_is_not_told(gpus):
    """An Xid of yesterday, and the errors counted since boot: the launch has nothing to do with them."""
    gpus.xid(0, 48)
    gpus.set(0, ecc=7)
    async with probing() as probe:
        assert (await look_until(probe, are_seen))[0].faults == ()
        gpus.xid(0, 31)
        seen = await look_until(probe, lambda gpus: gpus[0].faults)
        assert kinds(seen[0]) == [("xid", 31)]


async def test_an_xid_of_a_program_is_marked_and_a_flood_of_them_is_counted(gpus):
    async with probing() as probe:
        await look_until(probe, are_seen)
        for _ in range(40):
            gpus.xid(1, 13)
        gpus.xid(1, 31)
        seen = await look_until(probe, lambda gpus: ("xid", 31) in kinds(gpus[1]))
        assert kinds(seen[1]) == [("xid", 13), ("xid", 31)]  # oldest first
        assert all(fault.by_program for fault in seen[1].faults)
        assert seen[1].faults[0].detail == "graphics engine exception, 40 times"


async def test_rising_ecc_counters_are_a_fault(gpus):
    gpus.set(0, ecc=3)
    async with probing() as probe:
        await look_until(probe, are_seen)
        gpus.set(0, ecc=5)
        (fault,) = (await look_until(probe, lambda gpus: gpus[0].faults))[0].faults
        assert (fault.kind, fault.code, fault.detail) == ("ecc", None, "2 uncorrected memory errors")
        assert fault.at is not None


async def test_a_double_bit_error_is_told_at_once(gpus):
    async with probing() as probe:
        await look_until(probe, are_seen)
        gpus.double_bit_error(3)
        seen = await look_until(probe, lambda gpus: gpus[3].faults)
        assert kinds(seen[3]) == [("ecc", None)]


async def test_a_board_that_waits_for_its_reset_says_that_it_was_so_before(gpus):
    gpus.set(0, rows=(1, 0, 1, 0))
    gpus.set(1, rows=(4, 2, 0, 0))  # rows were replaced, and that is done
    gpus.set(2, rows=(0, 1, 0, 1))
    async with probing() as probe:
        seen = await look_until(probe, are_seen)
        assert seen[0].faults == (
            GpuFault(
                kind="remapped-rows", detail="a bad memory row is in use until the next reset, since before the launch"
            ),
        )
        assert seen[1].faults == ()
        assert seen[2].faults[0].detail.startswith("a memory row could not be remapped")


@pytest.mark.parametrize(
    ("fabric", "detail"),
    [
        ((0, 0, 0), None),  # a board without NVSwitch
        ((2, 0, 0), None),  # joining
        ((3, 0, 0x222), None),  # joined, every part healthy
        ((3, 999, 0), "the board could not join the NVSwitch fabric: Unknown Error"),
        ((3, 0, 0x010), "a route through the NVSwitch fabric is unhealthy"),
    ],
)
async def test_only_a_fabric_that_failed_is_a_fault(gpus, fabric, detail):
    gpus.set(0, fabric=fabric)
    async with probing() as probe:
        seen = await look_until(probe, are_seen)
        wanted = [] if detail is None else [("fabric", f"{detail}, since before the launch")]
        assert [(fault.kind, fault.detail) for fault in seen[0].faults] == wanted


async def test_a_lost_board_keeps_its_name_and_loses_its_figures(gpus):
    """Also where only one call says so, and where the launch names its board by UUID."""
    async with probing(CUDA_VISIBLE_DEVICES=gpus.uuid(1)) as probe:
        await look_until(probe, are_seen)
        gpus.fail("nvmlDeviceGetPowerUsage", LOST, gpu=1)
        (seen,) = await probe.look(Ask())
        assert (seen.uuid, seen.name) == (gpus.uuid(1), "Stand-in GPU")
        assert [(fault.kind, fault.detail) for fault in seen.faults] == [("lost", "GPU is lost")]
        assert all(isinstance(figure, Unseen) for figure in figures(seen))
        gpus.fail("nvmlDeviceGetHandleByIndex_v2", LOST, gpu=1)
        (seen,) = await probe.look(Ask())
        assert seen.uuid == gpus.uuid(1)
        assert kinds(seen) == [("lost", None)]


async def test_a_board_lost_while_the_watch_for_faults_hangs_is_lost_since_then(gpus):
    gpus.hang("nvmlDeviceGetTotalEccErrors")
    async with probing() as probe:
        await look_until(probe, lambda gpus: not isinstance(gpus[3].power_watts, Unseen))
        gpus.fail("nvmlDeviceGetHandleByIndex_v2", LOST, gpu=3)
        seen = await look_until(probe, lambda gpus: not isinstance(gpus[3].faults, Unseen))
        assert kinds(seen[3]) == [("lost", None)]
        assert seen[3].faults[0].at is not None


async def test_a_board_lost_before_the_launch_is_lost_and_no_other(gpus):
    gpus.fail("nvmlDeviceGetHandleByIndex_v2", LOST, gpu=2)
    async with probing() as probe:
        seen = await look_until(probe, are_seen)
        assert [kinds(gpu) for gpu in seen] == [[], [], [("lost", None)], []]
        assert all(isinstance(figure, Unseen) for figure in figures(seen[2]))


async def test_fallen_off_the_bus_is_lost(gpus):
    async with probing() as probe:
        await look_until(probe, are_seen)
        gpus.xid(0, 79)
        seen = await look_until(probe, lambda gpus: gpus[0].faults)
        assert kinds(seen[0]) == [("lost", 79)]
        assert seen[0].faults[0].detail == "the GPU has fallen off the bus"


@pytest.mark.parametrize("code", [NOT_SUPPORTED, FUNCTION_NOT_FOUND])
async def test_a_source_that_a_board_lacks_is_simply_not_there(gpus, code):
    for function in ("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceGetGpuFabricInfoV"):
        gpus.fail(function, code, gpu=0)
    async with probing() as probe:
        assert (await look_until(probe, are_seen))[0].faults == ()
        gpus.xid(0, 62)
        assert kinds((await look_until(probe, lambda gpus: gpus[0].faults))[0]) == [("xid", 62)]


@pytest.mark.parametrize(
    "function",
    ["nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows", "nvmlDeviceRegisterEvents", "nvmlEventSetWait_v2"],
)
async def test_a_source_that_cannot_be_read_makes_the_faults_unseen_and_no_figure(gpus, function):
    gpus.fail(function, NO_PERMISSION)
    async with probing() as probe:
        seen = await look_until(probe, lambda gpus: "Permissions" in getattr(gpus[1].faults, "reason", ""), within=30.0)
        assert isinstance(seen[1].faults, Unseen)
        assert not any(isinstance(figure, Unseen) for figure in figures(seen[1]))


async def test_a_fault_is_told_although_another_source_cannot_be_read(gpus):
    gpus.fail("nvmlDeviceGetTotalEccErrors", NO_PERMISSION)
    async with probing() as probe:
        await look_until(probe, lambda gpus: "Permissions" in getattr(gpus[0].faults, "reason", ""))
        gpus.xid(0, 95)
        seen = await look_until(probe, lambda gpus: not isinstance(gpus[0].faults, Unseen))
        assert kinds(seen[0]) == [("xid", 95)]


async def test_a_board_without_any_source_is_unseen_not_healthy(gpus):
    gpus.set(0, events=None, ecc=None, rows=None)
    async with probing() as probe:
        seen = await look_until(probe, lambda gpus: gpus[1].faults == ())
        assert seen[0].faults == Unseen("this board and its driver tell of no faults")


async def test_an_old_driver_tells_what_it_can(use_gpus, old_standin_library):
    gpus = use_gpus(old_standin_library, 1)
    async with probing() as probe:
        assert (await look_until(probe, are_seen))[0].faults == ()
        gpus.set(0, ecc=1)
        assert kinds((await look_until(probe, lambda gpus: gpus[0].faults))[0]) == [("ecc", None)]


@pytest.mark.parametrize("function", ["nvmlEventSetWait_v2", "nvmlDeviceGetRemappedRows"])
async def test_a_call_for_faults_that_never_returns_holds_up_no_figure(gpus, function):
    """The wait for events first of all: it is made to wait. Its faults are unseen once it is overdue."""
    gpus.hang(function)
    async with probing() as probe:
        with anyio.fail_after(40):
            while True:
                began = time.monotonic()
                seen = await probe.look(Ask())
                assert not isinstance(seen, Unseen)
                assert not any(isinstance(figure, Unseen) for figure in figures(seen[0]))
                if "hangs in the driver" in getattr(seen[0].faults, "reason", ""):
                    break
                await anyio.sleep(0.5)
        assert time.monotonic() - began < 5.0
        assert len(gpus.opened_by) == 1  # no reader was given up for it


async def test_the_xid_of_another_slice_is_not_told(gpus):
    """MIG: the driver names the GPU instance; what it cannot attribute concerns everybody on the board."""
    gpus.set(0, mig=("MIG-aaaa", "MIG-bbbb"))
    async with probing(CUDA_VISIBLE_DEVICES="MIG-bbbb") as slice_probe, probing() as board_probe:
        await look_until(slice_probe, are_seen)
        await look_until(board_probe, are_seen)
        gpus.xid(0, 31, instance=1)
        assert kinds((await look_until(board_probe, lambda gpus: gpus[0].faults))[0]) == [("xid", 31)]
        gpus.xid(0, 43, instance=2)
        gpus.xid(0, 48)
        seen = await look_until(slice_probe, lambda gpus: len(gpus[0].faults) > 1)
        assert kinds(seen[0]) == [("xid", 43), ("xid", 48)]


async def test_a_holder_without_a_device_is_not_known(gpus):
    """A pid that is a living process here, and has no NVIDIA device open, is another process's number."""
    bystander = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        gpus.set(0, compute={bystander.pid: 5 * MIB, 1 << 22: None})
        async with probing() as probe:
            seen = await look_until(probe, lambda gpus: gpus[0].holders)
            assert seen[0].holders == (
                GpuHolder(pid=bystander.pid, used_bytes=5 * MIB, known=False),
                GpuHolder(pid=1 << 22, used_bytes=None, known=False),
            )
    finally:
        bystander.stdin.close()
        bystander.wait()


@pytest.mark.parametrize(("target", "known"), [("/dev/nvidia3", True), ("/dev/dxg", True), ("/home/nvidia0", False)])
def test_the_device_of_a_holder_is_looked_up_in_its_descriptors(tmp_path, target, known):
    from hangguard.observe._nvml_reader import _Holding

    holding = _Holding(str(tmp_path))
    (tmp_path / "77" / "fd").mkdir(parents=True)
    (tmp_path / "77" / "stat").write_text("77 (a (b) c) S " + " ".join(map(str, range(40))))
    (tmp_path / "77" / "fd" / "3").symlink_to(target)
    assert holding.is_known(77) is known
    assert holding.is_known(78) is False
    (tmp_path / "77" / "fd" / "3").unlink()
    assert holding.is_known(77) is known  # once seen it is not looked up again
    (tmp_path / "77" / "stat").write_text("77 (a) S " + " ".join(map(str, range(1, 41))))
    assert holding.is_known(77) is False  # the same number, another process


def test_faults_of_a_slice_stay_where_its_instance_is_not_known():
    told = [{"kind": "xid", "code": 31, "instance": 4, "count": 1, "at": 1.0}]
    board = {
        "index": 0, "uuid": "GPU-a", "name": "b", "memory": [0, 1], "utilization": 0, "milliwatts": 0, "holders": [],
        "mig": [["MIG-a", None]], "faults": told,
    }  # fmt: skip
    (gpu,) = choose_visible([board], {"CUDA_VISIBLE_DEVICES": "MIG-a"})
    assert kinds(gpu) == [("xid", 31)]


def figures(gpu: Gpu):
    return (gpu.memory_used_bytes, gpu.memory_total_bytes, gpu.utilization_percent, gpu.power_watts, gpu.holders)


def test_the_reader_imports_nothing_of_the_package():
    """It is started for every launch: the package costs half a second, and may be shadowed."""
    code = f"import runpy, sys; runpy.run_path({READER[1]!r}); assert not [m for m in sys.modules if 'hangguard' in m]"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True)
