"""On a real NVIDIA GPU: what NVML says, a hang with memory held, and its release. Run with ``-m gpu``."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from hangguard import Fallback, GaveUp, Limits, Observer, Unseen, read_command, supervise
from hangguard.changes import with_flag
from hangguard.observe.gpus import GpuProbe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

SERVER = [sys.executable, str(Path(__file__).parent / "programs" / "cuda_server.py"), "--port", "{port}"]
NO_CAPTURE = Fallback(
    name="no-capture",
    change=lambda launch: None if "--no-capture" in launch.argv else with_flag(launch, "--no-capture"),
    answers=("import", "weights-load", "graph-capture"),
    alters="speed",
    cost="No graphs.",
)


def smi(fields):
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [[part.strip() for part in line.split(",")] for line in out.splitlines()]


def record(**what):
    """What was seen goes to the folder that the caller names, so that it can be kept."""
    if folder := os.environ.get("HANGGUARD_RECORD"):
        with open(os.path.join(folder, "gpu-record.jsonl"), "a") as out:
            out.write(json.dumps(what) + "\n")


def test_nvml_facts_equal_those_of_nvidia_smi():
    """Name, uuid and total memory are the same; power and used memory agree within what changes meanwhile."""

    async def look():
        launch, _ = read_command([sys.executable, "-c", "pass"], url="http://127.0.0.1:1")
        probe = GpuProbe(launch)
        with anyio.fail_after(60):
            gpus = await probe.look(None)
            while isinstance(gpus, Unseen):
                gpus = await probe.look(None)
        began = time.monotonic()
        for _ in range(50):
            gpus = await probe.look(None)
        cost = (time.monotonic() - began) / 50
        await probe.aclose()
        return gpus, cost

    gpus, cost = anyio.run(look)
    rows = smi("uuid,name,memory.total,memory.used,power.draw")
    record(test="facts", cost_ms=cost * 1000, gpus=[repr(g) for g in gpus], smi=rows)
    assert [(g.uuid, g.name) for g in gpus] == [(row[0], row[1]) for row in rows]
    for gpu, row in zip(gpus, rows, strict=True):
        assert abs(gpu.memory_total_bytes / 2**20 - float(row[2])) < 2
        assert abs(gpu.memory_used_bytes / 2**20 - float(row[3])) < 1024
        assert abs(gpu.power_watts - float(row[4])) < 100


def test_a_deadlock_that_holds_gpu_memory_is_found_cured_and_released(tmp_path):
    """The story on one GPU: memory held, 0 % CPU and GPU; found, ended, memory back, started without capture."""
    before = float(smi("memory.used")[0][0])
    hold = "import torch, time; x = torch.ones(2**28, device='cuda'); print('up', flush=True); time.sleep(600)"
    bystander = subprocess.Popen(
        [sys.executable, "-c", hold],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert bystander.stdout.readline() == "up\n"
    seen = []
    try:
        with supervise(
            [*SERVER, "--fault", "deadlock"],
            url="http://127.0.0.1:{port}",
            fallbacks=[NO_CAPTURE],
            limits=Limits(ready_within=200, stop_grace=3),
            run_dir=tmp_path,
            hooks=[lambda event: seen.append(event.as_json())],
        ) as server:
            (stuck,) = server.history
            sample = server.sample()
            used = sample.gpus[0].memory_used_bytes / 2**20
            assert [c.name for c in server.changes] == ["no-capture"]
        evidence = json.loads(Path(stuck.evidence_path).read_text())
        record(test="deadlock", events=seen, last=evidence["samples"][-1], used_mib=used)
        assert (stuck.verdict.verdict, stuck.verdict.kind) == ("stuck", "idle")
        (shared,) = stuck.verdict.unseen
        assert shared.startswith("GPU 0: it is also held by pid"), "the neighbour's load is not ours, and that is said"
        assert stuck.settled_at - stuck.last_movement_at < 15
        gpu = next(item for item in stuck.release.items if item.resource == "gpu-memory")
        assert gpu.answer == "released"
        assert used - before > 8 * 1024
        assert bystander.poll() is None, "the neighbour on the GPU lives"
        after = float(smi("memory.used")[0][0])
        assert after - before < 3 * 1024, "only the neighbour's memory is still held"
    finally:
        bystander.kill()
        bystander.wait()
        bystander.stdout.close()


def test_a_healthy_start_that_works_on_the_gpu_is_never_called_stuck(tmp_path):
    """Loading, matrix products, a real graph capture, ready: every verdict on the way is moving or ready."""
    seen = []
    with supervise(
        SERVER,
        url="http://127.0.0.1:{port}",
        limits=Limits(ready_within=200),
        run_dir=tmp_path,
        hooks=[lambda event: seen.append(event.as_json())],
    ) as server:
        holders = server.sample().gpus[0].holders
        pid = server.pid
    record(test="healthy", events=seen, holders=repr(holders), pid=pid)
    assert {e["verdict"] for e in seen if e["event"] == "verdict"} <= {"moving", "ready"}


def test_a_gpu_hidden_from_the_launch_is_not_looked_at(tmp_path):
    """CUDA_VISIBLE_DEVICES empty: no GPU is this launch's, and torch fails: the reason is told."""
    with (
        pytest.raises(GaveUp) as gave_up,
        supervise(
            SERVER,
            url="http://127.0.0.1:{port}",
            env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            run_dir=tmp_path,
        ),
    ):
        pass
    record(test="hidden", text=str(gave_up.value))
    assert gave_up.value.history[-1].verdict.verdict == "exited"


def test_the_reader_of_the_driver_ends_with_the_observer():
    """No process of ours is left on the driver after the block."""
    assert Observer is not None
    readers = subprocess.run(["ps", "-eo", "args"], check=True, capture_output=True, text=True).stdout
    assert "_nvml_reader.py" not in readers
