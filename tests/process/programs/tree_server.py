"""A server whose members try to get away. Arguments: a folder, then the kinds of members.

Every member writes ``pid`` into FOLDER/KIND when it stands.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

FOLDER = Path(sys.argv[1])
KEPT = []
ENDS = time.monotonic() + 120  # nothing of a failed test may run for ever


def stand(kind):
    written = FOLDER / f".{kind}.{os.getpid()}"
    written.write_text(str(os.getpid()))
    written.rename(FOLDER / kind)


def wait():
    while time.monotonic() < ENDS:
        time.sleep(1)
    os._exit(0)


def child(work):
    if os.fork() == 0:
        work()
        os._exit(0)


def ignore_term():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def plain():
    stand("plain")
    wait()


def setsid():
    os.setsid()
    ignore_term()
    stand("setsid")
    wait()


def double():
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        ignore_term()
        stand("double")
        wait()


def retitled():
    import setproctitle

    os.setsid()
    if os.fork() == 0:
        setproctitle.setproctitle("VLLM::Worker_TP0")
        ignore_term()
        stand("retitled")
        wait()


def empty():
    os.setsid()
    if os.fork() == 0:
        stand("empty")
        os.execve("/bin/sleep", ["sleep", "119.5"], {})


def stopped():
    stand("stopped")
    os.kill(os.getpid(), signal.SIGSTOP)
    wait()


def headless():
    """End the first thread and live on in another: /proc calls the process a zombie, and shows nothing of it."""
    import ctypes
    import mmap
    import secrets
    import threading

    os.setsid()
    if os.fork() == 0:
        ignore_term()
        path = Path("/dev/shm", f"psm_{secrets.token_hex(6)}")
        with path.open("w+b") as file:
            file.truncate(4096)
            KEPT.append(mmap.mmap(file.fileno(), 0))
        (FOLDER / "headless-shm").write_text(path.name)
        threading.Thread(target=wait).start()
        stand("headless")
        ctypes.CDLL(None).pthread_exit(0)


def unreaped():
    """Never wait for the child that has ended."""
    if os.fork() == 0:
        os._exit(0)
    stand("unreaped")
    wait()


def asked():
    """Say that SIGTERM came, take a moment, and end."""

    def end(*_):
        stand("asked-heard")
        time.sleep(0.6)
        stand("asked-done")
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    stand("asked")
    wait()


def elsewhere():
    """Leave the tree and the log."""
    os.setsid()
    if os.fork() == 0:
        null = os.open("/dev/null", os.O_RDWR)
        os.dup2(null, 1)
        os.dup2(null, 2)
        ignore_term()
        stand("elsewhere")
        wait()


def forker():
    """Fork as fast as it can from SIGTERM on, so that it is killed in the middle of it."""
    signals = []
    signal.signal(signal.SIGTERM, lambda *_: signals.append(1))
    stand("forker")
    while not signals and time.monotonic() < ENDS:
        time.sleep(0.01)
    for _ in range(400):
        if os.fork() == 0:
            ignore_term()
            os.setsid()
            wait()


def runner():
    """Never be the same process for long: fork, and leave the rest to the child."""
    ignore_term()
    stand("runner")
    while time.monotonic() < ENDS:
        if os.fork() != 0:
            os._exit(0)
        time.sleep(0.002)


def shm():
    ignore_term()
    memory = shared_memory.SharedMemory(create=True, size=4096)
    (FOLDER / "shm-name").write_text(memory.name)
    stand("shm")
    wait()


def spawned():
    subprocess.Popen(["/bin/sleep", "118.5"])
    stand("spawned")
    wait()


def main():
    kinds = sys.argv[2:]
    if "stubborn" in kinds:
        ignore_term()
    for kind in kinds:
        if kind not in {"stubborn", "leaves"}:
            child(globals()[kind])
    stand("root")
    if "leaves" in kinds:
        while not all((FOLDER / kind).exists() for kind in kinds if kind != "leaves"):
            time.sleep(0.01)
        sys.exit(3)
    print("standing", flush=True)
    with contextlib.suppress(KeyboardInterrupt):
        wait()


main()
