"""Real ranks of an NCCL communicator, and the probe that asks their RAS thread."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

from hangguard import Ask, Process, Tree, read_command
from hangguard.observe import Shared, Target
from hangguard.observe.nccl_ras import CommunicatorsProbe
from hangguard.observe.ports import free_port
from hangguard.observe.procfs import read_stat

PROGRAM = Path(__file__).parent / "programs" / "nccl_rank.py"
LAST = Ask(communicators=True, last=True)
"""In the first releases of the RAS thread a question may crash the rank; here that is the test's own program."""


class Ranks:
    def __init__(self, size, folder):
        self.address = ("127.0.0.1", free_port())
        env = {**os.environ, "NCCL_RAS_ADDR": f"127.0.0.1:{self.address[1]}", "NCCL_DEBUG": ""}  # it speaks on stdout
        self.processes = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(rank), str(size), str(folder / "store")],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env,
            )
            for rank in range(size)
        ]  # fmt: skip
        assert [process.stdout.readline() for process in self.processes] == ["began\n"] * size

    @property
    def pids(self):
        return [process.pid for process in self.processes]

    def go(self, *ranks):
        """Tell these ranks to go on."""
        for rank in ranks:
            self.processes[rank].stdin.write("\n")
            self.processes[rank].stdin.flush()

    def said(self, *ranks):
        return [self.processes[rank].stdout.readline() for rank in ranks]

    async def look(self, ask=LAST):
        launch, _ = read_command([sys.executable, "-c", "pass"], url="http://127.0.0.1:1")
        target = Target(guardian_pid=0, root=(0, 0), log_path=None, launch=launch, ras_address=self.address)
        shared = Shared(tasks=None)
        shared.tree = Tree(members=tuple(map(member, self.pids)))
        probe = CommunicatorsProbe(target, shared)
        try:
            return await probe.look(ask)
        finally:
            await probe.aclose()


def member(pid):
    stat = read_stat(f"/proc/{pid}/stat")
    return Process(
        pid=pid, started=stat.started, parent=stat.parent, title="rank", name="rank", state=stat.state, threads=1,
        cpu_seconds=0, reaped_cpu_seconds=0, minor_faults=0, major_faults=0, rss_bytes=0,
    )  # fmt: skip


@contextlib.contextmanager
def ranks(size, folder):
    started = Ranks(size, folder)
    try:
        yield started
    finally:
        for process in started.processes:
            process.kill()
            process.wait()
            process.stdin.close()
            process.stdout.close()
