"""The machine's figures are those of other tools, and what cannot be read says why."""

import os
import shutil
import time
from pathlib import Path

import psutil
import pytest

from hangguard.facts import Ask, Host, Unseen
from hangguard.observe.host import HostProbe

pytestmark = pytest.mark.anyio


async def look(**more):
    probe = HostProbe(within=more.pop("within", 5), **more)
    try:
        return await probe.look(Ask())
    finally:
        await probe.aclose()


async def test_the_figures_are_those_of_the_kernel():
    seen = await look()
    assert isinstance(seen, Host)
    meminfo = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    assert seen.memory_total_bytes == int(meminfo["MemTotal"].split()[0]) * 1024
    available = int(meminfo["MemAvailable"].split()[0]) * 1024
    assert seen.memory_available_bytes == pytest.approx(available, rel=0.2)
    shm = shutil.disk_usage("/dev/shm")
    assert seen.shm_total_bytes == shm.total
    assert seen.shm_free_bytes == pytest.approx(shm.free, abs=64 * 1024 * 1024)
    counters = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    assert seen.oom_kills == int(counters["oom_kill"])


async def test_host_missing_says_why(tmp_path):
    seen = await look(shm=str(tmp_path / "no-shm"), vmstat=str(tmp_path / "no-vmstat"))
    assert seen.memory_total_bytes > 0
    assert seen.shm_total_bytes == Unseen(f"{tmp_path}/no-shm: No such file or directory")
    assert seen.shm_free_bytes == seen.shm_total_bytes
    assert seen.oom_kills == Unseen(f"{tmp_path}/no-vmstat: No such file or directory")


async def test_an_old_kernel_says_why(tmp_path):
    (tmp_path / "vmstat").write_text("nr_free_pages 1\n")
    seen = await look(vmstat=str(tmp_path / "vmstat"))
    assert "older than 4.13" in seen.oom_kills.reason


async def test_pressure_is_that_of_the_kernel_and_only_rises():
    first = await look()
    totals = {
        name: [int(line.split("total=")[1]) for line in Path(f"/proc/pressure/{name}").read_text().splitlines()]
        for name in ("cpu", "io")
    }
    then = await look()
    for name, microseconds in (("cpu", totals["cpu"][0]), ("io", totals["io"][1])):
        before, after = (round(getattr(seen, f"{name}_stall_seconds") * 1e6) for seen in (first, then))
        assert before <= microseconds <= after


async def test_pressure_missing_says_why(tmp_path):
    seen = await look(pressure=str(tmp_path))
    assert seen.cpu_stall_seconds == Unseen(
        f"{tmp_path}/cpu: no such file; the kernel is older than 4.20 or made without CONFIG_PSI"
    )
    (tmp_path / "cpu").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=7000000\n")
    (tmp_path / "io").mkdir()
    seen = await look(pressure=str(tmp_path))
    assert seen.cpu_stall_seconds == 7.0
    assert seen.io_stall_seconds == Unseen(f"{tmp_path}/io: Is a directory")
    (tmp_path / "io").rmdir()
    (tmp_path / "io").write_text("some avg10=0.00 avg60=0.00 avg300=0.00 total=7\n")
    assert (await look(pressure=str(tmp_path))).io_stall_seconds == Unseen(f"{tmp_path}/io has no line full")


async def test_without_proc_the_whole_says_why(tmp_path, monkeypatch):
    monkeypatch.setattr(psutil, "PROCFS_PATH", str(tmp_path))
    assert await look() == Unseen(f"{tmp_path}/meminfo: No such file or directory")


async def test_host_hanging_is_unseen_within_its_deadline(tmp_path):
    gate = tmp_path / "vmstat"
    os.mkfifo(gate)
    began = time.monotonic()
    assert await look(vmstat=str(gate), within=0.2) == Unseen("no answer within 0.2 s")
    assert time.monotonic() - began < 2
    with gate.open("w"):
        pass
