"""The release of GPU memory through the real NVML binding, on stand-in GPUs: whose it is decides about a relaunch."""

import os
import subprocess
import sys

import pytest
import tenacity

from hangguard import Limits, Retry, supervise
from standin import MIB

GB = 1000 * MIB
NOBODY = 1 << 22
"""A pid that the kernel never gives (PID_MAX_LIMIT)."""
LIMITS = Limits(ready_within=60, stop_grace=2, release_within=4)
FIRST_SAYS = "OSError: [Errno 98] Address already in use"
"""Worth an unchanged retry."""


@pytest.fixture
def bystander():
    process = subprocess.Popen(["/bin/sleep", "1000"])
    yield process
    assert process.poll() is None
    process.kill()
    process.wait()


@pytest.fixture
def start(tmp_path):
    """Return a function that supervises a server whose first start fails, once it was seen."""
    script = (
        f'[ -e {tmp_path}/again ] || {{ touch {tmp_path}/again; sleep 1.5; echo "{FIRST_SAYS}"; exit 1; }}; exec "$@"'
    )
    server = [sys.executable, "-m", "http.server", "{port}", "--bind", "127.0.0.1"]

    def start(*hooks):
        return supervise(
            ["sh", "-c", script, str(tmp_path / "again"), *server],
            url="http://127.0.0.1:{port}",
            cwd=tmp_path,
            run_dir=tmp_path / "runs",
            env=dict(os.environ),
            limits=LIMITS,
            retry=Retry(wait=tenacity.wait_none()),
            hooks=hooks,
        )

    return start


def item(attempt):
    return next(item for item in attempt.release.items if item.resource == "gpu-memory")


def test_a_bystander_that_grows_by_20_gb_is_named_and_the_relaunch_goes_on(gpus, start, bystander):
    gpus.set(0, memory_used=1 * GB, compute={bystander.pid: 1 * GB})

    def grow(event):
        if event.event == "verdict":  # the first look is over, and told
            gpus.set(0, memory_used=22 * GB, compute={bystander.pid: 22 * GB})

    with start(grow) as server:
        first = server.history[0]
        assert server.attempt.number == 2
    assert item(first).answer == "released"
    assert f"pid {bystander.pid}" in item(first).detail
    assert "MiB more than before the launch: its own, or imported from here" in item(first).detail
    assert item(server.attempt).answer == "released"


@pytest.mark.long
def test_growth_under_a_pid_of_nobody_here_is_unknown_and_named_and_the_relaunch_goes_on(gpus, start, bystander):
    """In a container the driver may give the host's pids: it cannot be told whether that is ours."""
    gpus.set(0, memory_used=1 * GB, compute={bystander.pid: 1 * GB})

    def appear(event):
        if event.event == "verdict":  # the first look is over, and told
            gpus.set(0, memory_used=9 * GB, compute={bystander.pid: 1 * GB, NOBODY: 8 * GB})

    with start(appear) as server:
        assert server.attempt.number == 2
        released = item(server.history[0])
    assert (released.answer, released.ours) == ("unknown", False)
    assert f"pid {NOBODY} (8000 MiB): pids of nobody here" in released.detail
