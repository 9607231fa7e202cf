"""Who lives through it all and must not be touched: everybody and everything that could be taken for ours.

Two kinds: those of the whole soak (:class:`Residents`) and those of one cycle (:class:`Visitors`), which are made when
its server has been launched, because what is new is what a careless cleaner takes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from soaking import eyes

SHARED_MEMORY = Path("/dev/shm")
SERVER = str(Path(__file__).parents[1] / "programs" / "soaked_server.py")
MAPPER = (
    "import mmap, sys, time; f = open(sys.argv[1], 'r+b'); m = mmap.mmap(f.fileno(), 0); f.close(); time.sleep(1e6)"
)
LISTENER = (
    "import socket, sys; s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(('127.0.0.1', int(sys.argv[1])));"
    "s.listen(); exec('while 1: s.accept()[0].close()')"
)
DAEMON = "import os, sys, time; os.setsid(); os.fork() and os._exit(0); print(os.getpid(), flush=True); "
DAEMON += "os.close(1); time.sleep(1e6)"


@dataclass(frozen=True)
class File:
    """A stranger's file, as it was made."""

    path: Path
    inode: int
    content: bytes | None
    """``None``: of the name of a socket."""

    @classmethod
    def of(cls, path: Path) -> File:
        return cls(path, path.lstat().st_ino, path.read_bytes() if path.is_file() else None)

    @classmethod
    def make(cls, name: str) -> File:
        path, content = SHARED_MEMORY / name, secrets.token_bytes(4096)
        with path.open("xb") as out:
            out.write(content)
        return cls(path, path.stat().st_ino, content)

    def trouble(self) -> str:
        try:
            is_same = self.path.lstat().st_ino == self.inode
            if is_same and (self.content is None or self.path.read_bytes() == self.content):
                return ""
        except FileNotFoundError:
            return f"{self.path} (inode {self.inode}) is gone; the folder has {self._now()}"
        return f"{self.path} (inode {self.inode}) is another, or was changed: {self._now()}"

    def _now(self) -> str:
        """Return what has its inode now, and what a removal calls a file for a moment."""
        entries = list(os.scandir(self.path.parent))
        found = [f"{e.name} ({e.inode()})" for e in entries if e.inode() == self.inode or e.name.startswith(".")]
        return ", ".join(found) or "nothing like it"

    def remove(self) -> None:
        with contextlib.suppress(FileNotFoundError):
            if self.path.lstat().st_ino == self.inode:
                self.path.unlink()


def names_like_ours() -> list[str]:
    pid, random = os.getpid(), secrets.token_hex(4)
    return [
        f"psm_{random}",
        f"sem.mp-{random}",
        f"torch_{pid}_{pid}_{secrets.randbelow(1 << 30)}",
        f"nccl-{random}",
        f"vllm_offload_{random}{random}.mmap",
    ]


class Strangers:
    """Processes and files, and the question whether all of them are still as they were."""

    def __init__(self) -> None:
        self.processes: dict[eyes.Identity, str] = {}
        self.files: list[File] = []
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, what: str, command: list[str], *, log: str = os.devnull, **env: str) -> subprocess.Popen[bytes]:
        with Path(log).open("wb") as out:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                env={**os.environ, **env},
                start_new_session=True,
            )
        self._started.append(process)
        self.note(what, process.pid)
        return process

    def note(self, what: str, pid: int) -> None:
        who = eyes.identity_of(pid)
        assert who is not None, what
        self.processes[who] = what

    def troubles(self) -> list[str]:
        """Return what was done to them: empty, if nobody was touched."""
        found = [f"{what} ({eyes.describe(who)})" for who, what in self.processes.items() if not eyes.is_well(who)]
        return found + [trouble for file in self.files if (trouble := file.trouble())]

    def end(self) -> None:
        for who in self.processes:
            eyes.signal_exactly(who)
        for process in self._started:
            process.wait()
        for file in self.files:
            file.remove()


class Visitors(Strangers):
    """Those of one cycle."""

    def arrive(self, run: Path, command: list[str] | None) -> None:
        """Come when the run has its folder: with its marker as a prefix of theirs, reading its log, looking like it."""
        self.files += [File.make(name) for name in names_like_ours()]
        sleep = shutil.which("sleep") or "/bin/sleep"
        self.start("whose marker begins with ours", [sleep, "1000000"], HANGGUARD_RUN_ID=f"{run.name}0")
        self.start("tail -f on the log", ["tail", "-f", *map(str, run.glob("attempt-*.log"))])
        if command is not None:
            self.start("with the same command line", command, SOAK_SLEEPS="1")
        mapped = File.make(f"psm_{secrets.token_hex(4)}")
        self.files.append(mapped)
        self.start(
            "who has a file mapped that is named like ours", [sys.executable, "-S", "-c", MAPPER, str(mapped.path)]
        )


class Residents(Strangers):
    """Those of the whole soak."""

    def __init__(self, folder: Path, ports: list[int]) -> None:
        super().__init__()
        self._folder = folder
        self._url = ""
        self._ports = ports
        for port in ports:
            self.start("listener on the next port", [sys.executable, "-S", "-c", LISTENER, str(port)])
        self._start_a_server()
        self._start_a_daemon()
        self._tmux()
        self.files += [File.make(name) for name in names_like_ours()]

    def _start_a_server(self) -> None:
        """Start the same program: its workers have the titles of ours, its files are mapped, its socket listens."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        log = self._folder / "resident.log"
        words = [f"--port={port}", "--tp=2", "--phase-seconds=0.02", "--hold-mb=2"]
        words += ["--leave=mapped", "--leave=semaphore", "--leave=socket", "--leave=worker"]
        root = self.start("little server of somebody's", [sys.executable, SERVER, *words], log=str(log))
        deadline = time.monotonic() + 60.0
        while not self._answers():
            assert time.monotonic() < deadline, "the little server of somebody's does not answer"
            time.sleep(0.1)
        for pid in eyes.children_of(root.pid):
            self.note("worker of somebody's little server", pid)
        self.files += [File.of(path) for path in left_in(log)]

    def _start_a_daemon(self) -> None:
        made = subprocess.run([sys.executable, "-S", "-c", DAEMON], stdout=subprocess.PIPE, check=True)
        self.note("daemon of its own session", int(made.stdout))

    def _tmux(self) -> None:
        if shutil.which("tmux") is None:
            return
        tmux = ["tmux", "-S", str(self._folder / "tmux"), "-f", "/dev/null"]
        environment = {name: value for name, value in os.environ.items() if name != "TMUX"}
        subprocess.run([*tmux, "new-session", "-d", "sleep 1000000"], env=environment, check=True)
        told = subprocess.run(
            [*tmux, "display-message", "-p", "#{pid} #{pane_pid}"], env=environment, stdout=subprocess.PIPE, check=True
        )
        for pid in told.stdout.split():
            self.note("tmux, or what runs in it", int(pid))

    def troubles(self) -> list[str]:
        found = super().troubles()
        if not self._answers():
            found.append("the little server of somebody's does not answer")
        for port in self._ports:
            try:
                socket.create_connection(("127.0.0.1", port), timeout=20.0).close()
            except OSError as problem:
                found.append(f"listener on port {port}: {problem}")
        return found

    def _answers(self) -> bool:
        body = json.dumps({"model": "tiny", "prompt": "hello", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{self._url}/v1/completions", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=20.0) as answer:
                return answer.status == 200
        except OSError:
            return False


def left_in(log: Path) -> list[Path]:
    """Return what the little server says that it has, and never tidies up."""
    lines = log.read_text("utf-8", "replace").splitlines()
    return [Path(line.partition("left: ")[2]) for line in lines if "] left: " in line]
