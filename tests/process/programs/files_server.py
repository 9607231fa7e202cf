"""A program that has files. Arguments: a folder for what it says, then KIND or KIND=PATH …

When it has everything it writes {kind: path} to FOLDER/made. ``later`` and ``later_listens`` are made on SIGUSR1, and
``last`` on SIGTERM, which then ends nothing.
"""

import ctypes
import fcntl
import json
import mmap
import os
import secrets
import signal
import socket
import subprocess
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


def last(path=None):
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


def baton(path):
    """Build an extension as torch does: FileBaton.try_acquire, and killed before its release."""
    KEPT.append(os.open(path, os.O_CREAT | os.O_EXCL))
    return path


def reads(path):
    KEPT.append(os.open(path, os.O_RDONLY))
    return path


def flock(path):
    KEPT.append(os.open(path, os.O_RDWR | os.O_CREAT))
    fcntl.flock(KEPT[-1], fcntl.LOCK_EX)
    return path


def unlocked(path):
    """What a lock of the kernel's is when it is free again: a file that somebody has open."""
    flock(path)
    fcntl.flock(KEPT[-1], fcntl.LOCK_UN)
    return path


def store(path):
    """Meet in a file as torch's FileStore does: every operation opens, locks, writes and closes it."""
    for number in range(3):
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.write(b"rank %d" % number)
    return path


def operation(path):
    """Be in the middle of an operation on it."""
    KEPT.append(store(path).open("ab"))
    return path


def inherited(path=None):
    """As vLLM's worker on a CPU: its children inherit the name."""
    path = path or Path(tempfile.gettempdir(), f"vllm_dist_{secrets.token_hex(16)}")
    env = {**os.environ, "VLLM_DIST_IDENT": store(path).name}
    KEPT.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], env=env))
    return path


def named(path):
    """As vLLM's worker on a CPU: the shared memory of its ranks has the name."""
    MADE["memory"] = str(shared(create(SHM / f"{store(path).name}-tp:0-[0-1]-cpushm_0")))
    return path


def pool(path):
    return shared(create(path))


def make(word):
    kind, _, path = word.partition("=")
    MADE[kind] = str(globals()[kind](*([Path(path)] if path else [])))


def say():
    (FOLDER / ".made").write_text(json.dumps(MADE))
    (FOLDER / ".made").rename(FOLDER / "made")


def main():
    words = sys.argv[2:]
    for word in words:
        if not word.startswith(("later", "last")):
            make(word)

    def on_signal(number, _):
        kind = "later" if number == signal.SIGUSR1 else "last"
        for word in [word for word in words if word.startswith(kind)] or [kind]:
            make(word)
        say()

    signal.signal(signal.SIGUSR1, on_signal)
    if "last" in words:
        signal.signal(signal.SIGTERM, on_signal)
    say()
    ends = time.monotonic() + 120
    while time.monotonic() < ends:
        time.sleep(1)


main()
