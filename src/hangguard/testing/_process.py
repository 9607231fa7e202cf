"""What every process of the little server needs: a title, a channel, a lifeline, a log line."""

from __future__ import annotations

import ctypes
import json
import os
import socket
import sys
import threading
import time
from pathlib import Path

PR_SET_NAME = 15  # linux/prctl.h


class Channel:
    """Messages between the main process and one child: JSON lines over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self._file = end.makefile("rwb")

    def send(self, message: dict[str, object]) -> None:
        """Send one message; raise :class:`OSError` when nobody is there."""
        self._file.write(json.dumps(message).encode() + b"\n")
        self._file.flush()

    def receive(self) -> dict[str, object] | None:
        """Wait for the next message, without an end; ``None`` when the other side is gone."""
        try:
            line = self._file.readline()
        except ConnectionError:
            return None
        return dict(json.loads(line)) if line else None


def set_title(title: str) -> None:
    """Show ``title`` instead of the command line, and its beginning as the kernel's name."""
    try:
        from setproctitle import setproctitle  # noqa: PLC0415 (only the children have a title)
    except ImportError:  # the extra "cli" brings it
        _set_title_by_hand(title.encode())
    else:
        setproctitle(title)


def _set_title_by_hand(title: bytes) -> None:
    ctypes.CDLL(None).prctl(PR_SET_NAME, title[:15], 0, 0, 0)
    # The kernel reads /proc/PID/cmdline from this memory; fields 48 and 49 of /proc/PID/stat, proc(5).
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(fields[45]), int(fields[46])
    if start:
        ctypes.memmove(start, title[: end - start - 1].ljust(end - start, b"\0"), end - start)


def end_with(lifeline: int) -> None:
    """End this process when the other side of the pipe is closed: when the main process is gone."""

    def watch() -> None:
        os.read(lifeline, 1)
        os._exit(0)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def log(text: str, *, prefix: str = "") -> None:
    """Write a line in SGLang's form: time, rank, no level; to stderr."""
    stamp = time.strftime("%Y-%m-%d %H:%M:%S")
    sys.stderr.write(f"[{stamp}{prefix}] {text}\n")
    sys.stderr.flush()
