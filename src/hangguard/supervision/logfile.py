"""The log of a running server: found by its descriptors, opened with its own user's rights."""

from __future__ import annotations

import errno
import os
import stat as modes
import time
from contextlib import suppress
from dataclasses import dataclass

from hangguard.facts import Unseen
from hangguard.observe.lane import in_time
from hangguard.supervision.found import FoundServer
from hangguard.supervision.machine import READ_WITHIN


@dataclass(slots=True)
class OpenLog:
    """The log of a server, opened for reading. Close it."""

    descriptor: int
    name: str

    @property
    def path(self) -> str:
        """Return a path to exactly the file that was opened, whatever has its name now."""
        return f"/proc/self/fd/{self.descriptor}"

    def silent_for(self) -> float | None:
        """Return the seconds since its last change, by the file system's clock; ``None``: it cannot be told."""
        with suppress(OSError):
            return max(0.0, time.time() - os.fstat(self.descriptor).st_mtime)
        return None

    def close(self) -> None:
        """Let the file go."""
        os.close(self.descriptor)


async def open_log(server: FoundServer, named: str | None) -> OpenLog | Unseen:
    """Open the file that standard output and error of the server go to, or the one that was named."""
    if named is None and not server.pid:
        return Unseen("its log is not on this machine: copy it here, and give --log FILE")
    question = (lambda: _open_named(named)) if named is not None else (lambda: _open_output(server.pid))
    try:
        return await in_time("log", question, within=READ_WITHIN, rights=server.rights)
    except OSError as problem:
        if named is not None and server.rights is not None and isinstance(problem, PermissionError):
            return Unseen(f"{named}: the user of the server may not read it, so it is not read for him: copy it")
        return Unseen(f"{named or 'its output'}: {problem.strerror}")


def _open_named(path: str) -> OpenLog:
    return OpenLog(open_regular(path), path)


def _open_output(pid: int) -> OpenLog | Unseen:
    """Open what descriptor 1 or 2 goes to; of two files the one that was written to last."""
    logs: list[OpenLog] = []
    others: list[str] = []
    for number in (2, 1):
        link = f"/proc/{pid}/fd/{number}"
        try:
            target = os.readlink(link)  # noqa: PTH115 - a link of the kernel's, which only it can follow
        except FileNotFoundError:
            others.append("nowhere (it is closed)")
            continue
        except PermissionError:
            return Unseen(
                "where the output of another user's server goes may not be seen: try sudo, or give --log FILE"
            )
        try:
            logs.append(OpenLog(open_regular(link), target))
        except OSError as problem:
            if problem.errno != errno.ENODEV:
                others.append(f"to {target}, which cannot be read ({problem.strerror})")
            else:
                others.append(_kind_of(target))
    if logs:
        best = min(logs, key=lambda log: log.silent_for() or 0.0)
        for log in logs:
            if log is not best:
                log.close()
        return best
    return Unseen(f"its output goes {others[0]}: give --log FILE if it is kept somewhere")


def _kind_of(target: str) -> str:
    if target.startswith("pipe:"):
        return "into a pipe (a container's log, a terminal multiplexer, tee)"
    if target.startswith("socket:"):
        return "into a socket (journald)"
    return {"/dev/null": "to /dev/null, and is lost"}.get(target, f"to {target} (a terminal)")


def open_regular(path: str) -> int:
    """Open a regular file for reading. Raises :class:`OSError`, ENODEV for whatever is none: that is never opened.

    Opening a FIFO would wait, and opening a device may do something.
    """
    handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not modes.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.ENODEV, "it is no regular file", path)
        return os.open(f"/proc/self/fd/{handle}", os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    finally:
        os.close(handle)
