"""A server with a tree of the kinds that inference engines have. Arguments: a port, a file.

Every member writes ``pid started kind`` into the file when it stands, and everything in /dev/shm ``file PATH``. The
root answers GET on the port when all stand, and leaves on SIGTERM, as does everybody but ``ignores SIGTERM``.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing import get_context, resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

from setproctitle import setproctitle

LASTS = 300.0
"""Seconds; nothing of a benchmark that was killed itself may run for ever."""
KINDS = (
    "root", "worker", "own session", "double fork", "retitled", "retitled double fork", "ignores SIGTERM",
    "resource tracker",
)  # fmt: skip


def say(text: str) -> None:
    out = os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(out, f"{text}\n".encode())
    os.close(out)


def say_who(kind: str, pid: int) -> None:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    say(f"{pid} {fields[19]} {kind}")


def stay(kind: str) -> None:
    if kind != "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say_who(kind, os.getpid())
    time.sleep(LASTS)
    os._exit(0)


def child(kind: str) -> None:
    forks_twice = kind.endswith("double fork")
    pid = os.fork()
    if pid:
        if forks_twice:
            os.waitpid(pid, 0)
        return
    if forks_twice or kind == "own session":
        os.setsid()
    if forks_twice and os.fork():
        os._exit(0)
    if "retitled" in kind:
        setproctitle("VLLM::Worker_TP0")
    if kind == "ignores SIGTERM":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    stay(kind)


def shared_memory() -> list[object]:
    """Memory and a semaphore that Python's resource tracker unlinks, if it is let."""
    memory, semaphore = SharedMemory(create=True, size=1 << 20), get_context("spawn").Semaphore()
    say(f"file /dev/shm/{memory.name.lstrip('/')}")
    say(f"file /dev/shm/sem.{semaphore._semlock.name.lstrip('/')}")  # type: ignore[attr-defined]
    say_who("resource tracker", int(resource_tracker._resource_tracker._pid or 0))  # type: ignore[attr-defined]
    return [memory, semaphore]


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *words: object) -> None:
        del words


def leave(number: int, frame: object) -> None:
    del number, frame
    os._exit(0)  # as an engine that was told to end: it does not wait for whom it does not know


def main() -> None:
    signal.signal(signal.SIGTERM, leave)
    for kind in KINDS[1:-1]:
        child(kind)
    kept = shared_memory()
    say_who("root", os.getpid())
    server = HTTPServer(("127.0.0.1", int(sys.argv[1])), Answer)
    signal.alarm(int(LASTS))
    server.serve_forever()
    del kept


if __name__ == "__main__":
    main()
