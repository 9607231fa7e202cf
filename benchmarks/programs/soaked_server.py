"""The server of a soak: the little one, whose members try to get away and which leaves things behind.

Arguments: those of the little server. The environment says the rest: SOAK_SAID (a file to which every member writes
``pid started kind``, and every thing ``file PID PATH``), SOAK_ESCAPES (kinds, with commas), SOAK_SLEEPS (only sleep:
a stranger with the same command line).
"""

from __future__ import annotations

import os
import secrets
import signal
import sys
import time

if "SOAK_SLEEPS" in os.environ:
    while True:
        time.sleep(3600)

from multiprocessing import get_context
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from hangguard.testing.server import main

SAID = os.environ.get("SOAK_SAID", os.devnull)
LASTS = 200.0
"""Seconds; nothing of a soak that was killed itself may run for ever."""
KEPT: list[object] = []


def say(text: str) -> None:
    out = os.open(SAID, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(out, f"{text}\n".encode())
    os.close(out)


def say_who(kind: str) -> None:
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    say(f"{os.getpid()} {fields[19]} {kind}")


def sleep() -> None:
    ends = time.monotonic() + LASTS
    while time.monotonic() < ends:
        time.sleep(1.0)
    os._exit(0)


def stay(kind: str) -> None:
    say_who(kind)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sleep()


def setsid() -> None:
    os.setsid()
    stay("setsid")


def double() -> None:
    os.setsid()
    if os.fork() == 0:
        os.setsid()
        stay("double")


def retitled() -> None:
    from setproctitle import setproctitle  # noqa: PLC0415 - slow, and seldom needed

    os.setsid()
    if os.fork() == 0:
        setproctitle("VLLM::Worker_TP0")
        stay("retitled")


def empty() -> None:
    os.setsid()
    if os.fork() == 0:
        say_who("empty")
        os.execve("/bin/sleep", ["sleep", str(LASTS)], {})


def stubborn() -> None:
    stay("stubborn")


def shm() -> None:
    """Shared memory and a semaphore, with Python's resource tracker beside them."""
    name = f"psm_{secrets.token_hex(4)}"
    say(f"file {os.getpid()} /dev/shm/{name}")
    memory = SharedMemory(name=name, create=True, size=1 << 16)
    semaphore = get_context("spawn").Semaphore()
    say(f"file {os.getpid()} /dev/shm/sem.{semaphore._semlock.name.lstrip('/')}")  # type: ignore[attr-defined]
    KEPT.extend((memory, semaphore))


def escape(kind: str) -> None:
    if kind == "shm":
        shm()
        return
    child = os.fork()
    if child == 0:
        globals()[kind]()
        os._exit(0)
    if kind in {"double", "retitled", "empty"}:
        os.waitpid(child, 0)


if __name__ == "__main__":
    say_who("root")
    for wanted in filter(None, os.environ.get("SOAK_ESCAPES", "").split(",")):
        escape(wanted)
    sys.exit(main())
