"""Real hangs of real ranks on several GPUs of one host: found, the rank named, every board released.

Run with ``-m gpu2``. ``HANGGUARD_RECORD`` names a folder for what is seen (``ranked.py``).
"""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import ranked
from ranked import FAULTS

pytestmark = [pytest.mark.gpu2, pytest.mark.timeout(200, func_only=True)]

BYSTANDER = Path(__file__).parent / "programs" / "bystander.py"
KEPT_MIB = 300.0
"""What the driver may keep of a board's memory after its last context is gone."""
FOUND_WITHIN = {"stuck": 20.0, "broken": 20.0}
"""Seconds from the last movement to the verdict."""


def smi(fields):
    """Return a row a board, numbers as nvidia-smi prints them."""
    out = subprocess.run(
        ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"],
        check=True, capture_output=True, text=True, timeout=60,
    ).stdout  # fmt: skip
    return [[part.strip() for part in line.split(",")] for line in out.splitlines()]


def used_mib():
    return [float(row[0]) for row in smi("memory.used")]


RANKS = int(os.environ.get("HANGGUARD_RANKS", "0"))
"""How many ranks; 0: one a board."""


def tell_of(name, folder, neighbour=None):
    """Run one fault and keep its row; return the story with what nvidia-smi said before and after."""
    ranks = RANKS or len(used_mib())
    assert ranks >= 2, "this needs two boards"
    in_shm = set(os.listdir("/dev/shm"))
    before = used_mib()
    story = ranked.tell(name, folder=folder, ranks=ranks)
    after = used_mib()
    held = max(
        (g.memory_used_bytes / 2**20 for s in story.samples if isinstance(s.gpus, tuple) for g in s.gpus), default=0.0
    )
    ranked.keep(
        story,
        ranks=ranks,
        rank=ranks - 1,
        beside_a_neighbour=neighbour is not None,
        memory_mib={"before": before, "most": held, "after": after},
        in_shm=sorted(set(os.listdir("/dev/shm")) - in_shm),
    )
    assert held - min(before) > KEPT_MIB, "the ranks held memory"
    assert all(a - b < KEPT_MIB for a, b in zip(after, before, strict=True)), (before, after)
    return story, ranks


def must_be_found(story, ranks):
    ranked.must_be_said(story, rank=ranks - 1, on_gpu=True)
    took = story.attempt.settled_at - story.attempt.last_movement_at
    if story.attempt.verdict.kind in {"idle", "survivors"}:  # a spinning kernel is movement of a kind
        assert took < FOUND_WITHIN[story.attempt.verdict.verdict]
    assert story.attempt.verdict.still_for < FOUND_WITHIN[story.attempt.verdict.verdict]


@pytest.fixture
def neighbour():
    process = subprocess.Popen(
        [sys.executable, str(BYSTANDER)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


class TestBesideANeighbour:
    """A program of somebody else's holds memory on the first board, and works on after each of our stops."""

    @staticmethod
    def works(process):
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline() == "worked\n"

    def test_a_healthy_start_with_a_captured_all_reduce_answers_with_all_ranks(self, neighbour, tmp_path):
        story, ranks = tell_of("healthy", tmp_path, neighbour)
        ranked.must_be_healthy(story, ranks=ranks)
        assert self.works(neighbour)

    @pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if fault.beside])
    def test_a_hang_is_found_and_ended_and_the_neighbour_works_on(self, neighbour, name, tmp_path):
        story, ranks = tell_of(name, tmp_path, neighbour)
        assert self.works(neighbour)
        must_be_found(story, ranks)


class TestAlone:
    """Here kernels spin: whose, the counters of a board tell only where nobody else is on it."""

    @pytest.mark.parametrize("name", [name for name, fault in FAULTS.items() if not fault.beside])
    def test_a_hang_with_a_kernel_that_spins_is_found_and_every_board_released(self, name, tmp_path):
        story, ranks = tell_of(name, tmp_path)
        must_be_found(story, ranks)
        deadline = time.monotonic() + 10
        while any(float(row[0]) > 0 for row in smi("utilization.gpu")) and time.monotonic() < deadline:
            time.sleep(0.5)
        assert [row[0] for row in smi("utilization.gpu")] == ["0"] * len(used_mib()), "no kernel spins on"
