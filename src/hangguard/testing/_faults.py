"""What can go wrong, for real."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable

from hangguard.testing._options import Fault, Options


def fault_for(options: Options, phase: str) -> Fault | None:
    """Return the fault that this process has to commit in this phase, if any."""
    if options.fault_rank is not None and options.rank != options.fault_rank:
        return None
    if options.cured_by is not None and _is_given(options.cured_by):
        return None
    return next((fault for fault in options.faults if fault.phase == phase), None)


def commit(fault: Fault) -> None:
    """Do what the fault says. Returns after a sleep; the others do not come back."""
    _KINDS[fault.kind](fault.amount)


def first_launch(path: str) -> bool:
    """Return whether this is the first call with this path, over all processes."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600))
    except FileExistsError:
        return False
    return True


def _is_given(cure: str) -> bool:
    if cure.startswith("-"):
        return cure in sys.argv
    name, _, value = cure.partition("=")
    return os.environ.get(name) == value


def _deadlock(_: float) -> None:
    """Take two locks in opposite order in two threads."""
    first, second, both_hold_one = threading.Lock(), threading.Lock(), threading.Barrier(2)

    def take(mine: threading.Lock, theirs: threading.Lock) -> None:
        with mine:
            both_hold_one.wait()
            with theirs:
                pass

    threading.Thread(target=take, args=(second, first), name="capture-stream", daemon=True).start()
    take(first, second)


def _spin(_: float) -> None:
    while True:
        pass


def _raise(_: float) -> None:
    msg = "little server: injected failure"
    raise RuntimeError(msg)


def _segv(_: float) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.memset(0, 0, 1)


def _oom(_: float) -> None:
    # the words of torch 2.11
    sys.stderr.write(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of "
        "79.25 GiB of which 10.41 GiB is free.\n"
    )
    sys.stderr.flush()
    os._exit(1)


_KINDS: dict[str, Callable[[float], None]] = {
    "deadlock": _deadlock,
    "spin": _spin,
    "sleep": time.sleep,
    "exit": lambda code: os._exit(int(code)),
    "raise": _raise,
    "segv": _segv,
    "oom": _oom,
    "kill-self": lambda _: os.kill(os.getpid(), signal.SIGKILL),
    "stop-self": lambda _: os.kill(os.getpid(), signal.SIGSTOP),
}
