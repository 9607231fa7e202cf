"""The little server of ``hangguard.testing``, with some other work in its steps.

    python troubled_server.py WORK MARKS THING FLAGS-OF-THE-LITTLE-SERVER…

``WORK`` names one of ``WORKS`` below, or ``plain``. Whoever begins to hang writes the monotonic time into the folder
``MARKS`` first. ``THING`` is what the work needs: a lock file, or the port of a slow store of weights.
"""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from torch_names import distributed_c10d, file_baton, rendezvous

from hangguard.testing import _worker
from hangguard.testing._faults import commit, fault_for
from hangguard.testing._options import Fault, read_options
from hangguard.testing._process import Channel
from hangguard.testing._worker import Scheduler
from hangguard.testing.server import Main

WORK, MARKS, THING = sys.argv[1:4]
WORDS = sys.argv[4:]
BUSY_FOR = 75.0
PAUSED_FOR = 45.0


def mark(what: str) -> None:
    """Write down when the trouble began."""
    part = Path(MARKS) / f".{what}.{os.getpid()}"
    part.write_text(repr(time.monotonic()))
    part.rename(Path(MARKS) / f"{what}.{os.getpid()}")


def load_from_a_slow_store(scheduler: Scheduler) -> None:
    """Read weights that come in bursts, with long gaps."""
    scheduler._log("Load weight begin. avail mem=139.13 GB")
    with socket.create_connection(("127.0.0.1", int(THING))) as store:
        while store.recv(1 << 16):
            pass
    scheduler._log("Load weight end. elapsed=40.00 s, type=LlamaForCausalLM, avail mem=134.11 GB, mem usage=5.02 GB.")


def load_silently(scheduler: Scheduler) -> None:
    """Compute for a long time without a word, without a new page, without a byte read."""
    scheduler._log("Load weight begin. avail mem=139.13 GB")
    end = time.monotonic() + BUSY_FOR
    while time.monotonic() < end:
        sum(range(100_000))
    scheduler._log("Load weight end. elapsed=75.00 s, type=LlamaForCausalLM, avail mem=134.11 GB, mem usage=5.02 GB.")


def join_a_store(scheduler: Scheduler) -> None:
    """Wait for a second machine that is not there."""
    scheduler._log("Init torch distributed begin.")
    mark("hung")
    rendezvous._create_c10d_store(world_size=2)


def make_a_communicator(scheduler: Scheduler) -> None:
    """Rank 1 deadlocks before it joins; rank 0 spins in the making of the communicator."""
    scheduler._log("Init torch distributed begin.")
    mark("hung")
    if scheduler._options.rank == 1:
        commit(Fault(phase="dist-init", kind="deadlock"))
    distributed_c10d._new_process_group_helper()


def wait_for_a_stale_lock(scheduler: Scheduler) -> None:
    """Wait for a lock file whose owner is long dead."""
    scheduler._log("Running FlashInfer autotune with cache: autotune.json")
    mark("hung")
    file_baton.FileBaton(THING).wait()


def wait_for_a_living_owner(scheduler: Scheduler) -> None:
    """Wait for a lock that another program holds while it builds."""
    scheduler._log("Running FlashInfer autotune with cache: autotune.json")
    with Path(THING).open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
    scheduler._log("FlashInfer autotune completed.")


def run_a_batch(plain: Callable[[Scheduler, dict[str, object]], dict[str, object]]) -> Callable[..., object]:
    """Answer; but a prompt may ask for trouble."""

    def run_batch(scheduler: Scheduler, request: dict[str, object]) -> dict[str, object]:
        if request["prompt"] == "stall":
            mark("hung")
            commit(Fault(phase="serving", kind="deadlock"))
        if request["prompt"] == "pause":
            time.sleep(PAUSED_FOR)
        if request["prompt"] == "die" and scheduler._options.rank == 0:
            mark("hung")
            os.kill(os.getppid(), signal.SIGKILL)
        return plain(scheduler, request)

    return run_batch


WORKS: dict[str, tuple[str, Callable[..., object]]] = {
    "slow-store": ("load_model", load_from_a_slow_store),
    "silent-load": ("load_model", load_silently),
    "no-peer": ("init_torch_distributed", join_a_store),
    "communicator": ("init_torch_distributed", make_a_communicator),
    "stale-lock": ("run_autotune", wait_for_a_stale_lock),
    "living-lock": ("run_autotune", wait_for_a_living_owner),
    "asked-for": ("run_batch", run_a_batch(Scheduler.run_batch)),
}


class TroubledMain(Main):
    """Starts its children as this program, not as the little server."""

    def _start_child(self, name: str, role: str, rank: int) -> Channel:
        ours, theirs = socket.socketpair()
        fds = (theirs.fileno(), self._read_lifeline)
        given = [f"--role={role}", f"--rank={rank}", f"--channel={fds[0]}", f"--lifeline={fds[1]}"]
        command = [sys.executable, *sys.argv[:4], *self._words, *given]
        child = subprocess.Popen(command, pass_fds=fds, stdin=subprocess.DEVNULL)
        theirs.close()
        self._children[name] = child
        threading.Thread(target=self._watch, args=(name, child), name=f"watch {name}", daemon=True).start()
        return Channel(ours)


def fault_with_a_mark(scheduler: Scheduler, phase: str) -> None:
    """Commit the fault of this phase, after its mark."""
    fault = fault_for(scheduler._options, phase)
    if fault is not None:
        mark("hung")
        commit(fault)


def main() -> int:
    """Run the server, or one of its children."""
    options = read_options(WORDS)
    if options.role == "main":
        return TroubledMain(options, WORDS).run()
    Scheduler._fault = fault_with_a_mark  # type: ignore[method-assign]
    if WORK in WORKS:
        step, work = WORKS[WORK]
        setattr(Scheduler, step, work)
    return _worker.run_child(options)


if __name__ == "__main__":
    sys.exit(main())
