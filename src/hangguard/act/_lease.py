# ruff: noqa: PTH119, PTH120
"""Delete a file that nobody has: question and deletion in one function, on one descriptor.

A write lease (fcntl(2), ``F_SETLEASE``) is granted only while nobody else has the file open or mapped: in another
pid namespace, as another user, with its descriptor closed long ago. So it tells what a scan of ``/proc`` cannot: glibc
renames a semaphore after mapping it, and other namespaces are in no ``/proc`` of ours. A lease says nothing about whose
a file was: whoever calls this has seen a member of the launch with exactly this file, by device and inode.

Synchronous and standard library only: the guardian imports this file. Call it in a
process that does not fork meanwhile: a child would keep the lease. Where the guardian is dead, this file is run by
itself (``python -I -S _lease.py``), because the program that started the server may fork whenever it likes.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import signal
import socket
import stat
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    FileId = tuple[int, int]

PRIVATE = ".hangguard-"
"""How the name begins that a file has for the moment between its renaming and its end."""
BUSY_FOR = 0.5
"""Seconds in which a file that somebody has is asked for again: whoever reads it in passing is soon done."""
OTHER = "another file has this name now"
LEASED = "somebody has a lease on it"
UNASKED = "there was no time to ask"


class Removal:
    """What became of one file.

    ``answer`` is one of: removed; free (it could be removed, and only that was asked); gone (it was not there); busy
    (somebody has it); refused (it is not the file that was meant, or not ours); unknown (the question cannot be asked
    here).
    """

    __slots__ = ("answer", "used_bytes", "why")

    def __init__(self) -> None:
        self.answer = "unknown"
        self.why = ""
        self.used_bytes = 0
        """What the file occupied, as far as it was looked at."""


class _Stop(Exception):
    """The answer is known before the last step."""

    def __init__(self, answer: str, why: str = "") -> None:
        super().__init__(why)
        self.answer = answer


def remove_file(path: str, meant: FileId, *, made_ns: int = 0, really: bool = True) -> Removal:
    """Remove a regular file of ours if it is the one that is meant and nobody has it. Never waits, never raises.

    ``meant`` is (device, inode). A disk gives the inode of a file that is gone to the next one: ``made_ns`` (its
    ``st_mtime_ns``, of a file that nobody writes) tells them apart; 0: any. Without ``really`` everything is done but
    the last step.
    """

    def step(folder: int, name: str, removal: Removal) -> None:
        if made_ns not in {0, _look(folder, name).st_mtime_ns}:
            raise _Stop("refused", OTHER)
        _remove_file(folder, name, meant, removal, really=really)

    return _carry_out(path, step)


def remove_socket(path: str, meant: FileId, *, made_ns: int = 0, really: bool = True) -> Removal:
    """Remove the name of a Unix socket of ours if it is the one that is meant and nobody is bound to it.

    Nobody is where a connection is refused, and the kernel's list of this network namespace does not name it. A disk
    gives the inode of a file that is gone to the next one: ``made_ns`` (its ``st_mtime_ns``) tells them apart; 0: any.
    """

    def step(folder: int, name: str, removal: Removal) -> None:
        found = _look(folder, name)
        _check(found, meant, stat.S_ISSOCK)
        if made_ns not in {0, found.st_mtime_ns}:
            raise _Stop("refused", OTHER)
        _see_refused(path, f"/proc/self/fd/{folder}/{name}")
        removal.answer = "free"
        if really:
            _take_away(folder, name, meant, lambda: True)
            removal.answer = "removed"

    return _carry_out(path, step)


class Clearing:
    """The removal of all that a launch left, one after the other. ``files``: mappings with the fields of ``HeldFile``.

    ``run`` may be left behind in its thread; what was answered by then is in ``answers``.
    """

    def __init__(self, files: Iterable[Mapping[str, Any]], *, really: bool = True, busy_for: float = BUSY_FOR) -> None:
        self._busy_for = busy_for
        self._files = [dict(file) for file in files]
        self._removals: dict[int, Removal] = {}
        self._really = really

    def run(self) -> list[dict[str, Any]]:
        """Remove them; those that somebody has are asked for again for a moment. Returns the answers."""
        ends_at, todo = time.monotonic() + self._busy_for, list(range(len(self._files)))
        while todo:
            for number in todo:
                self._removals[number] = self._remove(self._files[number])
            todo = [number for number in todo if self._removals[number].answer == "busy"]
            if time.monotonic() >= ends_at:
                break
            time.sleep(0.05 if todo else 0.0)
        return self.answers()

    def answers(self) -> list[dict[str, Any]]:
        """Return for each file what became of it: mappings with the fields of ``facts.RemovedFile``."""
        return [answer_of(file, self._removals.get(number)) for number, file in enumerate(self._files)]

    def _remove(self, file: dict[str, Any]) -> Removal:
        meant = (file["device"], file["inode"])
        if file["kind"] == "socket":
            removal = remove_socket(file["path"], meant, made_ns=file["made_ns"], really=self._really)
        else:
            made_ns = file["made_ns"] if file["kind"] == "lock" else 0
            removal = remove_file(file["path"], meant, made_ns=made_ns, really=self._really)
            if file["kind"] == "file" and (removal.why == OTHER or removal.answer == "gone"):
                # It may have another name now, and that is what counts: a semaphore gets its name last of all.
                name = _name_of(meant, os.path.dirname(file["path"]))
                if name:
                    file["path"] = name
                    return remove_file(name, meant, really=self._really)
        if removal.why == OTHER:
            removal.answer = "gone"
        return removal


def answer_of(file: Mapping[str, Any], removal: Removal | None, why: str = UNASKED) -> dict[str, Any]:
    """Return what became of a file; without a removal it was not even asked for, and ``why`` says why."""
    if removal is None:
        removal = Removal()
        removal.why = why
    return {
        **{name: file[name] for name in ("path", "kind", "device", "inode", "pid", "started")},
        "answer": removal.answer,
        "why": removal.why,
        "used_bytes": removal.used_bytes,
    }


def _name_of(meant: FileId, folder: str) -> str:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.inode() == meant[1]:
                return entry.path
    return ""


def main() -> None:
    """Read ``{"files": […], "really": …, "busy_for": …}`` from standard input, write the answers to standard output."""
    asked = json.load(sys.stdin)
    clearing = Clearing(received(asked["files"]), really=asked["really"], busy_for=asked["busy_for"])
    json.dump(carried(clearing.run()), sys.stdout)


def carried(files: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return them as JSON can carry them: bytes of paths as latin-1 text, for the other end may have another locale."""
    return [{**file, "path": os.fsencode(file["path"]).decode("latin-1")} for file in files]


def received(files: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return what was carried here."""
    return [{**file, "path": os.fsdecode(file["path"].encode("latin-1"))} for file in files]


def _carry_out(path: str, step: Callable[[int, str, Removal], None]) -> Removal:
    removal, folder = Removal(), -1
    try:
        # So that all that follows is in the same folder, whatever its own name comes to mean.
        folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        step(folder, os.path.basename(path), removal)
    except _Stop as stop:
        removal.answer, removal.why = stop.answer, str(stop)
    except FileNotFoundError:
        removal.answer = "gone"
    except OSError as problem:
        removal.answer, removal.why = "unknown", problem.strerror or str(problem)
    finally:
        if folder >= 0:
            os.close(folder)
    return removal


def _remove_file(folder: int, name: str, meant: FileId, removal: Removal, *, really: bool) -> None:
    _check(_look(folder, name), meant, stat.S_ISREG)  # before it is opened: a device may act on that alone
    file = _open(folder, name, meant[1])
    try:
        found = os.fstat(file)
        _check(found, meant, stat.S_ISREG)
        removal.used_bytes = found.st_blocks * 512
        _take_lease(file)
        removal.answer = "free"
        if really:
            _take_away(folder, name, meant, lambda: _has_lease(file))
            removal.answer = "removed"
    finally:
        os.close(file)  # and with it the lease


# ------------------------------------------------------------------------------------------ looking


def _look(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _check(found: os.stat_result, meant: FileId, is_of_kind: Callable[[int], bool]) -> None:
    if (found.st_dev, found.st_ino) != meant:
        raise _Stop("refused", OTHER)
    if not is_of_kind(found.st_mode):
        raise _Stop("refused", f"it is of another kind ({stat.filemode(found.st_mode)})")
    if found.st_uid != os.geteuid():
        raise _Stop("refused", f"it belongs to user {found.st_uid}")
    if found.st_nlink != 1:
        raise _Stop("refused", f"it has {found.st_nlink} names")


def _open(folder: int, name: str, inode: int) -> int:
    # An open breaks the lease that somebody has, also one that fails because of it (fs/open.c, do_dentry_open), and the
    # signal of that, SIGIO, ends a holder who did not choose another: so it is looked for first.
    if _has_leaseholder(inode):
        raise _Stop("busy", LEASED)
    # O_NONBLOCK: where somebody took one at this moment, an open would wait for up to 45 s (lease-break-time).
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=folder)
    except BlockingIOError:
        raise _Stop("busy", LEASED) from None


def _has_leaseholder(inode: int) -> bool:
    """Whether the kernel lists a lease on a file of this number; on which device is not asked, to err on the safe side.

    A line is ``1: LEASE  ACTIVE    READ  3361 00:1f:12345 0 EOF`` (proc_locks(5)). Those of other pid namespaces are
    not listed.
    """
    with open("/proc/locks", encoding="ascii", errors="replace") as file:  # noqa: PTH123
        for line in file:
            kind, _, place = line.partition(":")[2].partition("LEASE")
            if not kind.strip(" ->") and f":{inode} " in place:
                return True
    return False


# ------------------------------------------------------------------------------------------- leases


def _take_lease(file: int) -> None:
    # Whoever opens the file now makes the kernel send a signal, and the default one, SIGIO, would end this process.
    fcntl.fcntl(file, fcntl.F_SETSIG, signal.SIGURG)
    try:
        fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    except BlockingIOError:
        raise _Stop("busy", "somebody has it open or mapped") from None
    except OSError as problem:
        raise _Stop("unknown", f"its file system does not tell who has it ({problem.strerror})") from None


def _has_lease(file: int) -> bool:
    """Whether nobody waits to open it: then the kernel has begun to take the lease away."""
    return fcntl.fcntl(file, fcntl.F_GETLEASE) == fcntl.F_WRLCK


def _see_refused(path: str, within_folder: str) -> None:
    """Raise unless nobody is bound. The second path is as good, and short enough for connect(2): 107 bytes."""
    if _is_bound(path):
        raise _Stop("busy", "somebody is bound to it")
    # A datagram socket: whoever listens gets no connection by that, only we get EPROTOTYPE (net/unix/af_unix.c,
    # unix_find_bsd, which looks in all network namespaces).
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as caller:
        try:
            caller.connect(within_folder)
        except ConnectionRefusedError:
            return
        except FileNotFoundError:
            raise
        except OSError as problem:
            if problem.errno != errno.EPROTOTYPE:
                raise _Stop("busy", f"somebody is bound to it ({problem.strerror})") from None
    raise _Stop("busy", "somebody answers on it")


def _is_bound(path: str) -> bool:
    """Whether the kernel lists a socket of this name; one that is bound and does not listen refuses connections."""
    wanted = b" " + os.fsencode(path)
    with open("/proc/net/unix", "rb") as file:  # noqa: PTH123
        return any(line.rstrip(b"\n").endswith(wanted) for line in file)


# ----------------------------------------------------------------------------------------- removing


def _take_away(folder: int, name: str, meant: FileId, is_still_free: Callable[[], bool]) -> None:
    """Rename it to a name that nobody knows, see that nobody was faster, and only then unlink it.

    Without the renaming, a process that waits in ``open()`` gets a file without a name.
    """
    _see_the_same(folder, name, meant)
    private = f"{PRIVATE}{os.urandom(12).hex()}"
    os.rename(name, private, src_dir_fd=folder, dst_dir_fd=folder)
    try:
        _see_the_same(folder, private, meant)
        _see_free(is_still_free)
        os.unlink(private, dir_fd=folder)
    except BaseException:
        _put_back(folder, private, name)
        raise


def _see_free(is_still_free: Callable[[], bool]) -> None:
    if not is_still_free():
        raise _Stop("busy", "somebody opened it at this moment")


def _see_the_same(folder: int, name: str, meant: FileId) -> None:
    found = _look(folder, name)
    if (found.st_dev, found.st_ino) != meant:
        raise _Stop("refused", OTHER)


def _kept(private: str) -> _Stop:
    return _Stop("busy", f"another file took its name meanwhile; it is kept as {private}")


def _put_back(folder: int, private: str, name: str) -> None:
    # link(2) replaces nothing: where a new file has the name already, the old one keeps the private name.
    with contextlib.suppress(FileNotFoundError):
        try:
            os.link(private, name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=False)
        except FileExistsError:
            raise _kept(private) from None
        except PermissionError:  # a file of somebody else's, which may not be linked (fs.protected_hardlinks)
            with contextlib.suppress(FileNotFoundError):
                _look(folder, name)
                raise _kept(private) from None
            os.rename(private, name, src_dir_fd=folder, dst_dir_fd=folder)
        else:
            os.unlink(private, dir_fd=folder)


if __name__ == "__main__":
    main()
