"""What watching costs: CPU and memory of hangguard beside the little server, for a minute of a ready, idle server.

    python benchmarks/overhead.py [SECONDS]

Prints a table. The supervising program is measured from its first second after ready; the guardian is the parent of
the server.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

import psutil

from hangguard import supervise
from hangguard.testing import little_server_command


def cost_of(process: psutil.Process) -> tuple[float, float]:
    """Return CPU seconds used so far and resident MiB."""
    times = process.cpu_times()
    return times.user + times.system, process.memory_info().rss / 2**20


def helpers(me: psutil.Process, server: int) -> dict[str, psutil.Process]:
    """Return who works for hangguard: this program, the guardian, and readers that it started."""
    guardian = psutil.Process(server).parent()
    theirs = {child.pid for child in psutil.Process(server).children(recursive=True)} | {server}
    found = {"this program": me}
    for child in me.children(recursive=True):
        if child.pid not in theirs:
            found["guardian" if guardian is not None and child == guardian else f"reader {child.pid}"] = child
    return found


def main(seconds: float) -> None:
    before = cost_of(psutil.Process(os.getpid()))[1]
    with (
        tempfile.TemporaryDirectory() as folder,
        supervise(little_server_command(tp=2), engine="sglang", run_dir=folder) as server,
    ):
        time.sleep(5.0)
        assert server.pid is not None
        who = helpers(psutil.Process(os.getpid()), server.pid)
        began, first = time.monotonic(), {name: cost_of(process) for name, process in who.items()}
        time.sleep(seconds)
        passed, last = time.monotonic() - began, {name: cost_of(process) for name, process in who.items()}
    print(f"| watching 5 processes for {passed:.0f} s, once a second | CPU, % of a core | RSS, MiB |")
    print("| --- | --- | --- |")
    for name, (cpu, rss) in last.items():
        note = f" ({before:.0f} before)" if name == "this program" else ""
        print(f"| {name} | {100 * (cpu - first[name][0]) / passed:.2f} | {rss:.0f}{note} |")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 60.0)
