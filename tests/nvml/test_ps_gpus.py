"""``hangguard ps`` beside GPUs: what the members of a run hold there, and when that cannot be told."""

import json
import os
import subprocess
import sys

from hangguard import supervise
from hangguard.testing import little_server_command
from standin import MIB

NOBODY = 1 << 22
"""A pid that the kernel never gives (PID_MAX_LIMIT)."""


def printed(runs, *words):
    command = [sys.executable, "-m", "hangguard", "ps", "--run-dir", str(runs), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout


def test_the_memory_of_a_run_is_that_of_its_members_and_what_is_not_told_is_not_nothing(gpus, tmp_path):
    def told():
        (row,) = json.loads(printed(tmp_path, "--json"))["runs"]
        return row["gpu_bytes"]

    with supervise(little_server_command(), url="http://127.0.0.1:{port}", run_dir=tmp_path) as server:
        assert told() == 0
        gpus.set(0, memory_used=9_000 * MIB, compute={server.pid: 2_000 * MIB, os.getpid(): 7_000 * MIB})
        gpus.set(1, memory_used=1_000 * MIB, compute={server.pid: 1_000 * MIB, NOBODY: 0})
        assert told() == 3_000 * MIB, "of both boards, without the neighbour's"
        assert "2.9 GiB" in printed(tmp_path)
        gpus.set(1, memory_used=1_000 * MIB, compute={server.pid: None})
        assert told() is None, "the driver gives no figure"
        assert " ? " in printed(tmp_path).splitlines()[1]
        gpus.set(0, compute={NOBODY: 2_000 * MIB})
        gpus.set(1, compute={})
        assert told() is None, "in a container the driver may give the host's numbers"
        gpus.set(0, memory_used=0, compute={})  # or the end of the server waits for it
        gpus.set(1, memory_used=0, compute={})
