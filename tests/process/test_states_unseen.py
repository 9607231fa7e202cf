"""Sources that block for ever: the watch goes on, says what it cannot see, and is no surer for it."""

import subprocess
from pathlib import Path

import pytest
from seen import until
from states import FAILURES, disk, ending
from watched import USUAL, program, watching, watching_all

from hangguard import Limits
from standin import StandInGpus, build_standin

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(400)]


@pytest.mark.parametrize("anyio_backend", ["trio"])
async def test_with_a_driver_that_never_answers_a_deadlock_is_found_later_and_a_start_goes_on(tmp_path, monkeypatch):
    """GPUs that are unseen may be at work: the long patience counts, here capped, and the verdict is not sure."""
    gpus = StandInGpus(build_standin(tmp_path), count=2)
    gpus.hang("nvmlDeviceGetUtilizationRates")
    for name, value in gpus.environment().items():
        monkeypatch.setenv(name, value)
    async with watching_all(
        tmp_path,
        deadlock=(program("deadlock", "threads"), {"limits": Limits(patience=12.0, probe_within=2.0, stop_grace=1.0)}),
        usual=(program("deadlock", "threads"), {"limits": Limits(probe_within=2.0, stop_grace=1.0)}),
        slow=(program("family", "ticks"), {"limits": Limits(probe_within=2.0, stop_grace=1.0)}),
    ) as seen:
        stuck = await seen["deadlock"].until("stuck", "idle")
        assert (stuck.confidence, stuck.still_for >= 12.0) == ("medium", True)
        await until(lambda: "the GPUs cannot be seen" in seen["deadlock"].why, within=120.0)
        assert any(source.startswith("GPUs: ") for source in stuck.unseen)
        await seen["usual"].until("unclear")
        await until(lambda: "the GPUs cannot be seen" in seen["usual"].why, within=120.0)
        assert not seen["usual"].others("moving", "unclear")
        assert not seen["slow"].classes & FAILURES


@pytest.mark.parametrize("anyio_backend", ["asyncio"])
async def test_a_command_line_that_nobody_can_read_blocks_no_look(tmp_path, monkeypatch):
    """Whoever reads it waits in the kernel, until the disk is gone; as ps and top do then."""
    monkeypatch.setattr("hangguard.judge.waits.UNPROVEN", 8.0)
    with disk(tmp_path / "disk", 0) as slow:
        async with watching(tmp_path / "it", program("wedged", tmp_path / "disk" / "weights"), limits=USUAL) as seen:
            with ending(slow):
                await seen.says("maps the weights")
                await until(Stays("D", seen.root), within=60.0)
                cat = ["cat", f"/proc/{seen.root}/cmdline"]
                with subprocess.Popen(cat, stdout=subprocess.DEVNULL) as reader, ending(slow):
                    await until(Stays("D", reader.pid), within=60.0)
                    waiting = await seen.until("waiting", "disk")
                    assert "wait for the disk" in waiting.why
                    before = seen.looks
                    await seen.goes_on_for(seen.age + 8.0)
                    assert seen.looks >= before + 3
                    assert not seen.others("moving", ("waiting", "disk"))


class Stays:
    """Whether a process was in this state in fifty looks in a row: any may be in D for a moment."""

    def __init__(self, state, pid):
        self.state, self.path, self.looks = state, Path(f"/proc/{pid}/stat"), 0

    def __call__(self):
        state = self.path.read_text().rpartition(")")[2].split()[0]
        self.looks = self.looks + 1 if state == self.state else 0
        return self.looks >= 50
