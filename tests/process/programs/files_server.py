"""A program that has files. Arguments: a folder for what it says, then KIND or KIND=PATH …

When it has everything it writes {kind: path} to FOLDER/made. ``later`` and ``later_listens`` are made on SIGUSR1.
"""

import ctypes
import json
import mmap
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

from hangguard.testing._leftovers import close_all

SHM = Path("/dev/shm")
FOLDER = Path(sys.argv[1])
KEPT = []
MADE = {}


def create(path, size=100_000):
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"x" * size)
    return path


def new(begins):
    return SHM / f"{begins}{secrets.token_hex(6)}"


def mapped_as(path, access):
    flags = os.O_RDWR if access == mmap.ACCESS_WRITE else os.O_RDONLY
    file = os.open(path, flags)
    KEPT.append(mmap.mmap(file, 0, access=access))
    os.close(file)
    close_all(path)
    return path


def shared(path=None):
    return mapped_as(path or create(new("psm_")), mmap.ACCESS_WRITE)


def later(path=None):
    return shared(path)


def readonly(path=None):
    return mapped_as(path or create(new("weights-")), mmap.ACCESS_READ)


def private(path=None):
    return mapped_as(path or create(new("library-")), mmap.ACCESS_COPY)


def nested(path=None):
    return shared(path or create(new("cache-") / "kernel.so"))


def log(path=None):
    path = path or new("log-")
    KEPT.append(path.open("w"))
    return path


def semaphore():
    name = f"mp-{secrets.token_hex(6)}"
    libc = ctypes.CDLL(None)
    libc.sem_open.restype = ctypes.c_void_p
    assert libc.sem_open(f"/{name}".encode(), os.O_CREAT | os.O_EXCL, 0o600, 1)
    return SHM / f"sem.{name}"


def unlinked():
    path = shared()
    path.unlink()
    return path


def bind(path, kind=socket.SOCK_STREAM):
    made = socket.socket(socket.AF_UNIX, kind)
    made.bind(str(path))
    if kind == socket.SOCK_STREAM:
        made.listen()
    KEPT.append(made)


def listens(path=None):
    path = path or Path(tempfile.mkdtemp(), "s")
    bind(path)
    return path


def later_listens():
    return listens()


def relative():
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    bind("relative")
    return Path(folder, "relative")


def datagram():
    path = Path(tempfile.mkdtemp(), "d")
    bind(path, socket.SOCK_DGRAM)
    return path


def make(word):
    kind, _, path = word.partition("=")
    MADE[kind] = str(globals()[kind](*([Path(path)] if path else [])))


def say():
    (FOLDER / ".made").write_text(json.dumps(MADE))
    (FOLDER / ".made").rename(FOLDER / "made")


def main():
    words = sys.argv[2:]
    for word in words:
        if not word.startswith("later"):
            make(word)

    def on_signal(*_):
        for word in words:
            if word.startswith("later"):
                make(word)
        say()

    signal.signal(signal.SIGUSR1, on_signal)
    say()
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        time.sleep(1)


main()
