"""What surrounds a program while it is watched: its client, its slow store, its locks; and who belongs to it."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
from scenarios import Scenario

GAPS = (0.5, 2.0, 6.0, 1.0, 10.0, 0.5, 14.0, 3.0, 4.0)
"""Seconds between two bursts of the slow store: some 41 in all."""
BURST = 2 << 20
HELD_FOR = 45.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def surroundings(scenario: Scenario, folder: Path) -> Iterator[str]:
    """Give the scenario the thing that it needs, and yield its name."""
    with contextlib.ExitStack() as stack:
        if scenario.thing == "slow store":
            yield str(stack.enter_context(_slow_store()))
        elif scenario.thing == "stale lock":
            yield str(_stale(extensions(folder) / "py311_cpu" / "fused_kernels" / "lock"))
        elif scenario.thing == "held lock":
            lock = folder / "build.lock"
            lock.touch()
            stack.enter_context(_held(lock))
            yield str(lock)
        else:
            yield ""


def extensions(folder: Path) -> Path:
    """Return where torch would build its extensions (``TORCH_EXTENSIONS_DIR``)."""
    return folder / "torch_extensions"


def _stale(lock: Path) -> Path:
    """Leave a lock behind, as a build that was killed an hour ago."""
    lock.parent.mkdir(parents=True)
    lock.touch()
    an_hour_ago = time.time() - 3600.0
    os.utime(lock, (an_hour_ago, an_hour_ago))
    return lock


@contextlib.contextmanager
def _slow_store() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    threading.Thread(target=_feed, args=(listener.accept()[0],), daemon=True).start()

        threading.Thread(target=serve, daemon=True).start()
        yield int(listener.getsockname()[1])


def _feed(client: socket.socket) -> None:
    with client, contextlib.suppress(OSError):
        for gap in GAPS:
            client.sendall(bytes(BURST))
            time.sleep(gap)


@contextlib.contextmanager
def _held(lock: Path) -> Iterator[None]:
    with lock.open() as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        release = threading.Timer(HELD_FOR, lambda: fcntl.flock(file, fcntl.LOCK_UN))
        release.start()
        try:
            yield
        finally:
            release.cancel()


# ------------------------------------------------------------------------------------------ the client


def ask(port: int, prompt: str, *, within: float) -> bool:
    """Send one completion request; say whether it was answered well."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within)
    try:
        body = json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": 4})
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def get(port: int, path: str, *, within: float) -> int | None:
    """Return the status of a GET, or ``None`` without an answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=within)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except (OSError, http.client.HTTPException):
        return None
    finally:
        connection.close()


def start_client(scenario: Scenario, port: int, over: threading.Event) -> None:
    """Ask what the scenario asks, from the first answer on; a request that gets none stays in flight."""
    if not scenario.asks:
        return

    def run() -> None:
        while not over.is_set() and not ask(port, "hello", within=10.0):
            over.wait(0.5)
        over.wait(5.0)
        for prompt in scenario.asks:
            if over.is_set():
                return
            threading.Thread(target=ask, args=(port, prompt), kwargs={"within": 200.0}, daemon=True).start()
            over.wait(1.0)

    threading.Thread(target=run, daemon=True).start()


# ------------------------------------------------------------------------------------- who belongs to it


class Family:
    """Everybody who ever descended from one process, looked at twice a second."""

    def __init__(self, root: int, command_part: str) -> None:
        self._root = psutil.Process(root)
        self._known: dict[tuple[int, float], psutil.Process] = {}
        self._part = command_part
        self.servers: list[tuple[float, int]] = []
        """When each server process was first seen, and its pid: more than one means that it was started anew."""
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(0.5):
            self.look()

    def look(self) -> None:
        for parent in (self._root, *self._known.values()):
            with contextlib.suppress(psutil.Error):
                for child in parent.children(recursive=True):
                    self._note(child)

    def _note(self, child: psutil.Process) -> None:
        identity = (child.pid, child.create_time())
        if identity in self._known:
            return
        self._known[identity] = child
        words = child.cmdline()
        if any(self._part in word for word in words) and not any(word.startswith("--role=") for word in words):
            self.servers.append((time.monotonic(), child.pid))

    def alive(self) -> list[psutil.Process]:
        """Return those who live, without zombies."""
        return [p for p in self._known.values() if _lives(p)]

    def end(self) -> None:
        """Stop looking, and end whoever is left."""
        self._over.set()
        self._thread.join()
        for process in (*self.alive(), self._root):
            with contextlib.suppress(psutil.Error):
                process.kill()  # psutil looks at the start time first


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
