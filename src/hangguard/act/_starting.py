"""How a server is started: its lock, its log, its limits, its process; and why it could not be.

Standard library only, imported by the guardian.
"""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import stat
import subprocess

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any


class Refusal(Exception):
    """The launch cannot be started: which errno, and what it is about."""

    def __init__(self, number: int, what: str, path: str, problem: str) -> None:
        super().__init__(problem)
        self.fields = {"errno": number, "what": what, "path": path, "problem": problem}


def limit_cores() -> None:
    """Let the server leave no core: one is as large as its weights.

    One byte is too little for a file, and the only limit that also keeps the kernel from handing the core to a program
    (fs/coredump.c). The hard limit stays.
    """
    hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
    resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))


def open_lock(path: str) -> int:
    """Open the file and lock it, for as long as the descriptor is open."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(in_bytes(path), flags, 0o600)
    except OSError as error:
        raise Refusal(error.errno or errno.EIO, "lock", path, error.strerror or str(error)) from error
    _lock(fd, "lock", path)
    return fd


def open_log(path: str) -> tuple[int, tuple[int, int]]:
    """Open and lock the log of one launch, which nobody else has; return it and its (device, inode)."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        log = os.open(in_bytes(path), flags, 0o600)
    except OSError as error:
        raise Refusal(error.errno or errno.EIO, "log", path, error.strerror or str(error)) from error
    os.set_blocking(log, True)
    status = os.fstat(log)
    if not stat.S_ISREG(status.st_mode):
        raise Refusal(errno.EINVAL, "log", path, "it is not a regular file")
    if status.st_nlink > 1:
        raise Refusal(errno.EMLINK, "log", path, "it has another name, so it may be somebody's file")
    # Writing to the log is what makes a process a member, so it must be this launch's own. The lock goes
    # with the descriptor: it is free again when the last member that has the log is gone.
    _lock(log, "log", path)
    return log, (status.st_dev, status.st_ino)


def start(message: Mapping[str, Any], log: int) -> int:
    """Start the server in a session of its own, its output to ``log``, which is closed here; return its pid."""
    cwd = in_bytes(message["cwd"])
    try:
        process = subprocess.Popen(
            [in_bytes(part) for part in message["argv"]],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=cwd,
            env={in_bytes(name): in_bytes(value) for name, value in message["env"].items()},
            start_new_session=True,
            close_fds=True,
        )
    except (OSError, ValueError, IndexError) as error:
        raise _refusal(error, message, cwd) from error
    finally:
        if log >= 0:
            os.close(log)
    process.returncode = 0  # reaped by the guardian, by waitpid(-1): Popen must not try
    return process.pid


def _lock(fd: int, what: str, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refusal(errno.EBUSY, what, path, "another launch has it") from error
    except OSError as error:
        raise Refusal(error.errno or errno.EIO, what, path, error.strerror or str(error)) from error


def _refusal(error: Exception, message: Mapping[str, Any], cwd: bytes) -> Refusal:
    number = getattr(error, "errno", None) or errno.EINVAL
    problem = getattr(error, "strerror", None) or str(error)
    if getattr(error, "filename", None) == cwd:  # Popen tells by the name whether chdir failed, or exec
        return Refusal(number, "directory", message["cwd"], problem)
    return Refusal(number, "command", "".join(message["argv"][:1]), problem)


def in_bytes(text: str) -> bytes:
    """Return the bytes of argv, environment and paths, which travel as latin-1 text."""
    return text.encode("latin-1")
