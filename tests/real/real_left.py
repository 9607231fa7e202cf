"""What a server has, and what lies beside it that it must not take along: seen from outside, without hangguard.

Each launch has a temporary folder of its own, so that whatever appears there is its own or a bystander's.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psutil

SHARED_MEMORY = Path("/dev/shm")
TITLES = {"vllm": "VLLM::EngineCore", "sglang": "sglang::scheduler"}
"""What the bystander calls itself: a kinsman by title, directory and environment, and no member."""
AT_REST = {
    "vllm": ("psm_{hex:.8}", "sem.mp-{hex:.8}", "vllm_dist_{hex}-tp:0-[0-1]-cpushm_0", "vllm_offload_{hex:.16}.mmap"),
    "sglang": ("psm_{hex:.8}", "sem.mp-{hex:.8}", "sglang_loads_{hex:.12}_{hex:.8}.shm", "sglang_host_pool_{hex}.mmap"),
}
"""Names in /dev/shm that the engines give: files of somebody's that nobody has open."""
IN_TEMP = {"vllm": "vllm_dist_{hex}", "sglang": "tmp{hex:.8}"}
SAYS = b"somebody's"
SEEN_AFTER = 5.0
"""Seconds after which hangguard has seen what a member has; it looks every other second where something is new. What is
younger when its owner is killed may be left: nobody knows whose it was."""


def temporary_folder():
    """Return a new folder for one launch: short, because sockets are made in it, and 107 bytes is their end."""
    return Path(tempfile.mkdtemp(prefix="t"))


class Bystander:
    """A program, files in /dev/shm and in the temporary folder, and sockets: all that one who is no member may have.

    Made after the launch, so that all of it is new as well.
    """

    def __init__(self, engine, *, env, folder, temp):
        command = [TITLES[engine], "3600"]
        self.process = subprocess.Popen(command, executable=shutil.which("sleep"), cwd=folder, env=env)
        self._files = {}
        for pattern in AT_REST[engine]:
            self._leave(SHARED_MEMORY / _named(pattern))
        self._leave(temp / _named(IN_TEMP[engine]))
        self._bound = _listening(temp / str(uuid.uuid4()))
        self._at_rest = _listening(temp / str(uuid.uuid4()))
        self._at_rest.close()
        self.sockets = sorted(path for path in temp.iterdir() if path.is_socket())

    @property
    def names(self):
        """Everything of it that has a name."""
        return {*self._files, *self.sockets}

    def must_be_whole(self):
        assert self.process.poll() is None
        assert psutil.Process(self.process.pid).status() == psutil.STATUS_SLEEPING
        for path, inode in self._files.items():
            assert (path.read_bytes(), path.stat().st_ino) == (SAYS, inode), path
        assert all(path.is_socket() for path in self.sockets), self.sockets
        with contextlib.closing(socket.socket(socket.AF_UNIX)) as client:
            client.connect(self._bound.getsockname())

    def end(self):
        self.process.kill()
        self.process.wait()
        self._bound.close()
        for path in self._files:
            path.unlink(missing_ok=True)

    def _leave(self, path):
        with path.open("xb") as file:
            file.write(SAYS)
        self._files[path] = path.stat().st_ino


class Belongings:
    """What the members of one launch were seen to have."""

    def __init__(self, temp, *, log):
        self.temp = temp
        self._since = {}
        """Names that members had in /dev/shm, and whatever appeared in the temporary folder: when it was first seen."""
        self._log = Path(log)

    def note(self, processes):
        """Remember what these have in /dev/shm now, and what lies in the temporary folder."""
        now = time.monotonic()
        for path in self.temp.iterdir():
            self._since.setdefault(path, now)
        for process in processes:
            with contextlib.suppress(OSError):
                proc = Path(f"/proc/{process.pid}")
                words = (proc / "maps").read_text().split()
                words += [os.readlink(link) for link in (proc / "fd").iterdir()]
                for word in words:
                    if word.startswith(f"{SHARED_MEMORY}/"):
                        self._since.setdefault(Path(word), now)

    def in_shm_left(self):
        return sorted(path for path in self._since if path.parent == SHARED_MEMORY and path.exists())

    def sockets_left(self, bystander):
        return sorted(path for path in self.temp.iterdir() if path.is_socket() and path not in bystander.names)

    def of_before(self, paths, moment):
        """Return those that had been there for so long, at that moment, that they were seen."""
        return [path for path in paths if self._since.get(path, moment) < moment - SEEN_AFTER]

    def files_left(self, bystander):
        """Return files in the temporary folder: whatever compiles keeps its caches in folders there."""
        return sorted(p.name for p in self.temp.iterdir() if p.is_file() and p not in bystander.names)

    def processes_left(self, root, bystander):
        """Return everybody who is of it by what the kernel tells: session, environment, or the log to write to."""
        return [
            f"{process.pid} {' '.join(process.cmdline())[:80]}"
            for process in psutil.process_iter()
            if process.pid not in {bystander.process.pid, os.getpid()} and self._is_of_it(process, root)
        ]

    def _is_of_it(self, process, root):
        with contextlib.suppress(psutil.Error, OSError):
            if process.status() == psutil.STATUS_ZOMBIE:
                return False
            has_log = any(file.path == str(self._log) and file.mode != "r" for file in process.open_files())
            is_marked = process.environ().get("TMPDIR") == str(self.temp)
            return os.getsid(process.pid) == root or has_log or is_marked
        return False


def port_is_free(port):
    """Whether a server could have it: nobody listens, and it can be bound as servers bind."""
    with contextlib.closing(socket.socket()) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        with contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return not any(
                c.status == psutil.CONN_LISTEN and c.laddr.port == port for c in psutil.net_connections("tcp")
            )
    return False


def _named(pattern):
    return pattern.format(hex=uuid.uuid4().hex)


def _listening(path):
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made
