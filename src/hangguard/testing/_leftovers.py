"""What a server leaves behind when it is killed: shared memory, a semaphore, the name of a socket. Nobody tidies up."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import secrets
import socket
import tempfile
from pathlib import Path

from hangguard.testing._process import log

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - what engines use
SIZE = 1 << 20
KINDS = ("mapped", "semaphore", "socket", "worker")


def leave(kind: str) -> object:
    """Make a thing of this kind, write its path to the log, and return what keeps it in use.

    Named as the real ones: vLLM's offloading, Python's semaphores, a ZMQ socket, a tensor that torch shares.
    """
    if kind == "socket":
        return _socket()
    if kind == "semaphore":
        return _semaphore()
    name = f"vllm_offload_{secrets.token_hex(8)}.mmap" if kind == "mapped" else f"torch_{os.getpid()}_{os.getpid()}_0"
    return _mapped(SHARED_MEMORY / name)


def _mapped(path: Path) -> object:
    """Map it and close the descriptor, as NCCL, CUDA and torch do."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    os.ftruncate(file, SIZE)
    memory = mmap.mmap(file, SIZE)
    os.close(file)
    memory[:] = b"\x01" * SIZE
    close_all(path)
    log(f"left: {path}")
    return memory


def close_all(path: Path) -> None:
    """Close every descriptor of this file: Python's mmap keeps one of its own, which no engine's memory has."""
    for number in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{number}") == str(path):  # noqa: PTH115
                os.close(int(number))


def _semaphore() -> object:
    name = f"mp-{secrets.token_hex(4)}"
    opened = ctypes.CDLL(None, use_errno=True).sem_open
    opened.restype = ctypes.c_void_p
    semaphore = opened(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    if not semaphore:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), name)
    log(f"left: {SHARED_MEMORY / f'sem.{name}'}")
    return semaphore


def _socket() -> object:
    path = Path(tempfile.gettempdir(), secrets.token_hex(16))
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    log(f"left: {path}")
    return made
