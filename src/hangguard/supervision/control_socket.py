"""The socket in a run's folder: made, removed, and connected to. Plain functions that block, for a thread of their own.

A socket path ends at 107 bytes, so all of them go through ``/proc/self/fd``. A folder that others may enter is refused,
and so is anything in the place of the socket that is none, a link to one too.
"""

from __future__ import annotations

import os
import socket
import stat
import struct

from hangguard.run_state import opened_privately
from hangguard.store import CONTROL

_CREDENTIALS = struct.Struct("3i")
"""``struct ucred``: pid, uid, gid; unix(7)."""
QUEUE = 32
"""Connections that wait to be accepted; a connect() to a full queue is refused with EAGAIN, unix(7)."""


def listen_in(folder: str) -> tuple[socket.socket, tuple[int, int]]:
    """Return a socket that listens in the folder of a run, and (device, inode) of its file. Raises :class:`OSError`."""
    with opened_privately(folder) as opened:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            os.fchmod(listener.fileno(), 0o600)  # bind() gives the file the mode of the socket, net/unix/af_unix.c
            listener.bind(f"/proc/self/fd/{opened}/{CONTROL}")  # a path ends at 107 bytes
            status = os.stat(CONTROL, dir_fd=opened, follow_symlinks=False)
            listener.listen(QUEUE)
            listener.settimeout(0.0)
        except BaseException:
            listener.close()
            raise
    return listener, (status.st_dev, status.st_ino)


def unlink_in(folder: str, identity: tuple[int, int]) -> None:
    """Remove the socket that we made there, and no other file of its name. Raises :class:`OSError`."""
    with opened_privately(folder) as opened:
        status = os.stat(CONTROL, dir_fd=opened, follow_symlinks=False)
        if stat.S_ISSOCK(status.st_mode) and (status.st_dev, status.st_ino) == identity:
            os.unlink(CONTROL, dir_fd=opened)


def connect_in(folder: str, supervisor: int) -> socket.socket:
    """Return a connection to the socket in the folder of a run, at which this supervisor listens.

    Raises :class:`BlockingIOError` where its queue is full, :class:`FileNotFoundError` where there is none (yet),
    :class:`ConnectionRefusedError` where nobody listens (yet), :class:`PermissionError` for somebody else's, and any
    :class:`OSError`.
    """
    connection = _connected_in(folder)
    try:
        pid, user = peer_of(connection)
        if user not in {os.geteuid(), 0} or pid != supervisor:
            raise PermissionError(0, f"process {pid} of user {user} listens at its {CONTROL}, not its supervisor")  # noqa: TRY301
    except BaseException:
        connection.close()
        raise
    return connection


def listener_in(folder: str) -> int:
    """Return the pid of who listens at the socket in the folder of a run, whatever its state file says.

    The folder is this user's and closed to others, the socket and who listens are this user's. Raises as
    :func:`connect_in` does.
    """
    with _connected_in(folder) as connection:
        pid, user = peer_of(connection)
    if user not in {os.geteuid(), 0} or pid <= 0:  # 0: of another pid namespace
        raise PermissionError(0, f"process {pid} of user {user} listens at its {CONTROL}")
    return pid


def _connected_in(folder: str) -> socket.socket:
    with opened_privately(folder) as opened:
        # The file itself is held, and connected to through that: nothing can be put in its place in between.
        file = os.open(CONTROL, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=opened)
    try:
        status = os.fstat(file)
        if not stat.S_ISSOCK(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(0, f"its {CONTROL} is not a socket of this user")
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(0.0)
            connection.connect(f"/proc/self/fd/{file}")
        except BaseException:
            connection.close()
            raise
    finally:
        os.close(file)
    return connection


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Return (pid, uid) of who is at the other end: who connected, or who called listen(). Raises :class:`OSError`."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid
