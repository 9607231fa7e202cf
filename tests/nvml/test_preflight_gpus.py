"""A look before a launch at the GPUs: the real nvidia-ml-py on a stand-in driver."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hangguard import apreflight
from hangguard.facts import Driver, Unseen
from hangguard.observe.gpus import GpuProbe
from hangguard.observe.ports import free_port
from hangguard.report.preflight import as_json
from hangguard.testing import little_server_command
from standin import MIB

pytestmark = pytest.mark.anyio
NOBODY = 1 << 22
"""A pid that the kernel never gives (PID_MAX_LIMIT)."""


def words(tp=2):
    return little_server_command(tp=tp, port=free_port())


async def rows(command=None, **options):
    found = await apreflight(command or words(), **{"within": 60, **options})
    return found, {check.what: check for check in found.checks}


async def test_free_and_sound_boards_are_good(gpus):
    found, by_name = await rows()
    assert by_name["GPUs"].answer == "good"
    assert "4: Stand-in GPU" in by_name["GPUs"].found
    assert by_name["GPU memory"].answer == by_name["GPU health"].answer == by_name["driver"].answer == "good"
    assert "580.159.03, for CUDA up to 13.0" in by_name["driver"].found
    assert found.patience == found.best_patience
    assert [check.error for check in found.checks if check.error] == []


async def test_fewer_boards_than_ranks_and_unlike_ones(gpus):
    _, by_name = await rows(words(tp=8))
    assert by_name["GPUs"].answer == "missing"
    gpus.set(1, name="Another board")
    _, by_name = await rows()
    assert by_name["GPUs"].answer == "poor"


async def test_a_foreign_holder_is_named_costs_patience_and_lives_on(gpus, tmp_path):
    """A process with a device open, as far as a machine without one can have it: the pid and its title are real."""
    program = tmp_path / "train.py"
    program.write_text("import time\nprint('up', flush=True)\ntime.sleep(100)\n")
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE) as holder:
        assert holder.stdout.readline() == b"up\n"
        gpus.set(1, memory_used=70_000 * MIB, compute={holder.pid: 70_000 * MIB})
        found, by_name = await rows()
        row = by_name["GPU 1"]
        assert (row.answer, row.patience) == ("poor", 120.0)
        assert str(holder.pid) in row.found
        assert found.patience == 120.0
        assert found.refusals == ()
        assert "GPU 0" not in by_name
        assert holder.poll() is None
        holder.kill()


async def test_memory_of_nobody_and_a_latched_counter(gpus):
    gpus.set(0, memory_used=9_000 * MIB)
    gpus.set(1, utilization=100)
    _, by_name = await rows()
    assert "nobody who can be seen" in by_name["GPU 0"].found
    assert "latched" in by_name["GPU 1"].means


async def test_a_fabric_that_has_failed_and_a_board_with_a_fault(gpus):
    gpus.set(0, fabric=(3, 999, 0))
    gpus.set(2, rows=(0, 1, 0, 1))
    _, by_name = await rows()
    assert by_name["GPU 0 fabric"].answer == "poor"
    assert by_name["GPU 2 health"].answer == "poor"


async def test_a_driver_that_is_older_than_the_cuda_of_the_server(gpus, tmp_path):
    site = tmp_path / "site"
    for name, version in (("sglang", "0.5.16"), ("nvidia_cuda_runtime", "13.0.96")):
        folder = site / f"{name}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Name: {name}\nVersion: {version}\n")
    env = {**os.environ, "PYTHONPATH": str(site)}
    _, by_name = await rows(env=env)
    assert by_name["driver"].answer == "good"
    gpus.drive("550.54.15", 12040)
    _, by_name = await rows(env=env)
    assert by_name["driver"].answer == "poor"
    assert "nvidia-cuda-runtime 13.0.96" in by_name["driver"].found
    assert by_name["driver"].error is None


async def test_the_driver_is_told_once_the_boards_are(gpus):
    from test_gpus import launch, look_until_seen

    probe = GpuProbe(launch())
    try:
        assert isinstance(probe.driver, Unseen)
        await look_until_seen(probe)
        assert probe.driver == Driver(version="580.159.03", cuda=(13, 0))
    finally:
        await probe.aclose()


async def test_a_driver_that_never_answers_costs_its_deadline_and_is_unseen(gpus):
    gpus.hang("nvmlInitWithFlags")
    began = time.monotonic()
    found, by_name = await rows(within=3.0)
    assert time.monotonic() - began < 8
    assert (by_name["GPUs"].answer, by_name["GPUs"].patience) == ("unseen", 120.0)
    assert by_name["port"].answer == by_name["guardian"].answer == "good"
    assert found.refusals == ()
    assert all(not Path(f"/proc/{pid}").exists() or is_zombie(pid) for pid in gpus.opened_by)


def is_zombie(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_without_a_driver_there_is_none_which_is_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("LD_LIBRARY_PATH", str(tmp_path))
    (tmp_path / "libnvidia-ml.so.1").write_text("no library, and it hides the one that this machine may have")
    _, by_name = await rows(words(tp=1))
    assert by_name["GPUs"].answer in {"missing", "unseen"}  # unseen where this machine has device files
    assert "driver" not in by_name


async def test_the_document_bears_every_kind_of_row(gpus):
    gpus.set(0, fabric=(3, 999, 0), memory_used=9_000 * MIB)
    found, _ = await rows()
    document = json.loads(json.dumps(as_json(found)))
    assert {"what", "answer", "found", "means", "patience_seconds", "loses", "helps", "error"} == set(
        document["checks"][0]
    )
