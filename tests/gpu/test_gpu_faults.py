"""A real Xid, seen on a real board while its neighbour works on. Run with ``-m gpu``."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest

from hangguard import Ask, Unseen, read_command
from hangguard.observe.gpus import GpuProbe

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]
PROGRAMS = Path(__file__).parent / "programs"


def record(**what):
    """What was seen goes to the folder that the caller names, so that it can be kept."""
    if folder := os.environ.get("HANGGUARD_RECORD"):
        with open(os.path.join(folder, "gpu-record.jsonl"), "a") as out:
            out.write(json.dumps(what) + "\n")


def start(program, *argv):
    return subprocess.Popen(
        [sys.executable, str(PROGRAMS / program), *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def ask(process):
    process.stdin.write("\n")
    process.stdin.flush()
    return process.stdout.readline()


async def look_until(probe, condition, within):
    with anyio.fail_after(within):
        while True:
            gpus = await probe.look(Ask())
            if not isinstance(gpus, Unseen) and condition(gpus):
                return gpus
            await anyio.sleep(0.05)


def test_an_illegal_write_is_told_as_the_fault_of_a_program_and_the_neighbour_works_on():
    """Xid 31 (or 13, by the driver), within seconds; the board itself has no fault before and no other after."""
    bystander = start("bystander.py")
    try:
        assert bystander.stdout.readline() == "up\n"

        async def watch():
            probe = GpuProbe(read_command([sys.executable, "-c", "pass"], url="http://127.0.0.1:1")[0])
            try:
                before = await look_until(probe, lambda gpus: not isinstance(gpus[0].faults, Unseen), 60)
                assert before[0].faults == (), "this board had a fault before the test"
                at = time.monotonic()
                done = subprocess.run(
                    [sys.executable, str(PROGRAMS / "illegal_write.py")],
                    capture_output=True, text=True, timeout=60, check=False,
                )  # fmt: skip
                assert done.stdout == "700\n", done  # cudaErrorIllegalAddress
                after = await look_until(probe, lambda gpus: bool(gpus[0].faults), 10)
                took = time.monotonic() - at
                began = time.monotonic()
                for _ in range(50):
                    await probe.look(Ask())
                return at, took, after, (time.monotonic() - began) / 50
            finally:
                await probe.aclose()

        at, took, after, cost = anyio.run(watch)
        (named,) = [holder.known for holder in after[0].holders if holder.pid == bystander.pid] or [None]
        record(test="xid", took=took, cost_ms=cost * 1000, gpus=[repr(gpu) for gpu in after], bystander_known=named)
        assert {(fault.kind, fault.by_program) for fault in after[0].faults} == {("xid", True)}
        assert {fault.code for fault in after[0].faults} <= {13, 31, 43, 45}
        assert all(fault.at >= at for fault in after[0].faults)
        assert ask(bystander) == "worked\n"
        assert named is not False, "its pid is its own, and it has the device open"
    finally:
        bystander.kill()
        bystander.wait()
        bystander.stdin.close()
        bystander.stdout.close()
