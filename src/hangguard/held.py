# ruff: noqa: PTH115, PTH116, PTH123, PTH208
"""Which files of shared memory, and which named sockets, processes have: the provenance of what may be left.

Synchronous and standard library only: the guardian loads this file by its path, as it does ``_tree``, and looks a last
time before its first signal. Everything of a process is read through one descriptor of its folder in ``/proc``, which
means that process and no later one of its pid.

``maps`` takes the memory-map lock, which a process stuck in a driver may hold for ever: run a :class:`Look` in a thread
that may be left behind. What it has found by then is in ``found``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import struct
import threading
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from typing import Any, TypeAlias

    from hangguard.elsewhere import Elsewhere

    Identity: TypeAlias = tuple[int, int]
    FileId: TypeAlias = tuple[int, int]
    Plain: TypeAlias = dict[str, Any]

SHARED_MEMORY = "/dev/shm"  # noqa: S108 - looked at, never written to
_STUCK_AFTER = 1.0
"""Seconds after which a process is skipped in the look at everybody; reading one takes a millisecond."""
_MOST_STUCK = 4
ORDER = ("named", "open", "mapped", "shared", "bound")
"""How closely a process has something. ``shared``: mapped so that what it writes is seen by others."""
MEMORY = ("file", "pool")
"""Kinds that several processes may write to."""
DATED = ("socket", "lock")
"""Kinds to whose identity the time belongs at which they were made: a disk gives an inode again."""


def file_id(found: os.stat_result) -> FileId:
    """Return (device, inode)."""
    return (found.st_dev, found.st_ino)


def names_in(folder: str = SHARED_MEMORY) -> dict[FileId, str]:
    """Return what lies directly in the folder of shared memory, where shm_open(3) and sem_open(3) put everything.

    Costs no look at the files themselves. Empty where there is no such folder; raises :class:`OSError` where it cannot
    be listed: a folder that may be entered and not read is not an empty one.
    """
    try:
        device = os.stat(folder).st_dev
        with os.scandir(folder) as entries:
            return {(device, entry.inode()): entry.path for entry in entries}
    except FileNotFoundError:
        return {}


def may_be_left(file: Plain, before: Iterable[FileId] | None = (), *, folder: str = SHARED_MEMORY) -> bool:
    """Whether something that a member was seen to have may be removed once nobody has it.

    The name of a socket was made by whoever bound it. A file in /dev/shm is taken for shared memory if it was not there
    ``before`` the launch, lies in no folder of its own, and was mapped to be shared and written. Weights that somebody
    copied there, a cache or a log that the server keeps there are none of that: they are somebody's files. ``before``
    is ``None`` where it could not be seen: then nothing is known to be new.

    What lies elsewhere is looked at only under the names and in the places that engines use, see ``elsewhere``, and
    only if it is new: a build lock that was open, a rendezvous file that was open or whose name a member carries, a
    pool that was mapped to be shared and written.
    """
    if file["kind"] == "socket":
        return bool(file["held"] == "bound")
    if file["kind"] in {"lock", "rendezvous"}:
        return True
    if file["kind"] == "pool":
        return bool(file["held"] == "shared") and (file["device"], file["inode"]) not in (before or ())
    is_alone = os.path.dirname(file["path"]) == folder  # noqa: PTH120
    is_new = before is not None and (file["device"], file["inode"]) not in before
    return is_alone and file["held"] == "shared" and is_new


def key_of(file: Plain) -> tuple[Any, ...]:
    """Return what tells one from another: a file of shared memory by its inode, whatever it is called by now."""
    return (file["device"], file["inode"], *((file["path"],) if file["kind"] == "socket" else ()))


class Look:
    """One look at what these processes have. ``run`` may be left behind, and after ``skip`` be called again."""

    def __init__(
        self,
        identities: Iterable[Identity],
        *,
        proc: str = "/proc",
        folder: str = SHARED_MEMORY,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        self.left_out: list[str] = []
        """What could not be looked at, each with the reason."""
        self.unread: set[Identity] = set()
        """Whose descriptors or memory map could not be read, though they live."""
        self.at: Identity | None = None
        """Whose turn it is; ``None``: nobody's."""
        self.since = 0.0
        """Since when it is his turn, by the monotonic clock."""
        self._proc = proc
        self._folder = folder
        self._todo = deque(identities)
        self._turn = 0
        self._found: dict[tuple[Any, ...], Plain] = {}
        self._device = ""
        self._names: dict[FileId, str] | None = None
        self._sockets: dict[int, _Bound] = {}
        self._elsewhere = elsewhere
        self._locked: set[int] | None = None

    @property
    def found(self) -> list[Plain]:
        """Return what was found so far, once a process and file: mappings with the fields of ``facts.HeldFile``."""
        return list(self._found.values())

    @property
    def is_done(self) -> bool:
        """Whether everybody was looked at."""
        return not self._todo and self.at is None

    def add(self, identities: Iterable[Identity]) -> None:
        """Look at these too."""
        self._todo.extend(identities)

    def run(self) -> list[Plain]:
        """Look at all of them that are still to be looked at."""
        turn = self._turn
        if self._names is None:
            self._prepare()
        while self._todo and turn == self._turn:
            self.since = time.monotonic()
            self.at = identity = self._todo.popleft()
            self._read(identity)
            if turn == self._turn:
                self.at = None
        return self.found

    def skip(self, reason: str) -> bool:
        """Leave the reader behind, with the one that holds it up; return whether there is such a one."""
        self._turn += 1
        held_up, self.at = self.at, None
        if held_up is not None:
            self.left_out.append(f"pid {held_up[0]}: {reason}")
            self.unread.add(held_up)
        return held_up is not None

    # ---------------------------------------------------------------------------------- once a look

    def _prepare(self) -> None:
        self._names = {}
        try:
            device = os.stat(self._folder).st_dev
            if file_system_of(device, self._proc) == "tmpfs":
                self._device = f"{os.major(device):02x}:{os.minor(device):02x}"
                self._names = names_in(self._folder)
            else:  # elsewhere the inode of a file that is gone is given to the next one that is made
                self.left_out.append(f"{self._folder} is no tmpfs, so what lies there cannot be told apart for sure")
        except FileNotFoundError:
            pass
        except OSError as problem:
            self.left_out.append(f"{self._folder}: {_reason(problem)}")
        try:
            self._sockets = _bound_sockets()
        except OSError as problem:
            self.left_out.append(f"which sockets have a name: the kernel does not tell ({_reason(problem)})")

    # ------------------------------------------------------------------------------- one process

    def _read(self, identity: Identity) -> None:
        try:
            folder = os.open(f"{self._proc}/{identity[0]}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as problem:
            self._leave_out(identity, problem)
            return
        try:
            if _started(folder) == identity[1]:
                with _thread_that_shows_it(folder) as shown:
                    self._read_all(shown, identity)
        except OSError as problem:
            self._leave_out(identity, problem)
        finally:
            os.close(folder)

    def _read_all(self, folder: int, identity: Identity) -> None:
        try:
            self._read_descriptors(folder, identity)
            self._read_maps(folder, identity)
            self._read_environment(folder, identity)
            is_near = os.readlink("ns/net", dir_fd=folder) == os.readlink(f"{self._proc}/self/ns/net")
        except PermissionError:
            if _state(folder) not in "ZX":  # who has ended belongs to root
                raise
        else:
            if not is_near:
                self.left_out.append(f"pid {identity[0]}: its sockets are in another network namespace")

    def _leave_out(self, identity: Identity, problem: OSError) -> None:
        if not isinstance(problem, (FileNotFoundError, ProcessLookupError)):  # these mean that it has ended
            self.left_out.append(f"pid {identity[0]}: {_reason(problem)}")
            self.unread.add(identity)

    def _read_descriptors(self, folder: int, identity: Identity) -> None:
        opened = os.open("fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
        try:
            for name in os.listdir(opened):
                try:
                    self._read_descriptor(opened, name, folder, identity)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # closed meanwhile
        finally:
            os.close(opened)

    def _read_descriptor(self, opened: int, name: str, folder: int, identity: Identity) -> None:
        # A stat of any other file could wait for a dead network disk.
        link = os.readlink(name, dir_fd=opened)
        if self._device and link.startswith(f"{self._folder}/"):
            found = os.stat(name, dir_fd=opened)
            if stat.S_ISREG(found.st_mode):
                self._add_file(file_id(found), link, "open", identity)
        elif link.startswith("socket:[") and (bound := self._sockets.get(int(link[8:-1]))) is not None:
            self._add_socket(bound, folder, identity)
        elif self._elsewhere is not None and (kind := self._elsewhere.kind_of(link)):
            found = os.stat(name, dir_fd=opened)
            if kind != "lock" or self._is_presence_lock(found, folder, name):
                self._add_elsewhere(identity, link, kind, "open", file_id(found))

    def _is_presence_lock(self, found: os.stat_result, folder: int, descriptor: str) -> bool:
        assert self._elsewhere is not None
        if self._locked is None:
            self._locked = _locked_inodes(self._proc)
        lines = dict(line.split(b":\t", 1) for line in _read(folder, f"fdinfo/{descriptor}", 4096).splitlines()[:3])
        return self._elsewhere.is_presence_lock(found, int(lines[b"flags"], 8), self._locked)

    def _read_maps(self, folder: int, identity: Identity) -> None:
        wanted = f" {self._device} ".encode() if self._device else b"\n"
        for line in _read(folder, "maps").splitlines():
            if wanted in line or line.endswith(b".mmap"):
                self._read_mapping(line, identity, is_shared_memory=wanted in line)

    def _read_mapping(self, line: bytes, identity: Identity, *, is_shared_memory: bool) -> None:
        _, flags, _, device, inode, *rest = line.split(None, 5)  # proc_pid_maps(5)
        file = (os.makedev(*(int(part, 16) for part in device.split(b":"))), int(inode))
        how = "shared" if b"w" in flags and b"s" in flags else "mapped"
        path = os.fsdecode(b"".join(rest))
        if is_shared_memory:
            self._add_file(file, path, how, identity)
            self._add_named(b"".join(rest), identity)
        elif self._elsewhere is not None and self._elsewhere.kind_of(path) == "pool":
            self._add_elsewhere(identity, path, "pool", how, file)

    def _read_environment(self, folder: int, identity: Identity) -> None:
        if self._elsewhere is not None and self._elsewhere.temp:
            self._add_named(_read(folder, "environ", 4 << 20), identity)

    # --------------------------------------------------------------------------------- what it has

    def _add_file(self, file: FileId, path: str, how: str, identity: Identity) -> None:
        # The C library gives a semaphore its name after it has mapped it, so the path here may be of no use.
        for name in (path, (self._names or {}).get(file, "")):
            found = _look(name)
            if found is not None and file_id(found) == file and stat.S_ISREG(found.st_mode):
                self._add(identity, name, found, "file", how)
                return

    def _add_socket(self, bound: _Bound, folder: int, identity: Identity) -> None:
        path = os.path.join(os.readlink("cwd", dir_fd=folder), bound.path)  # noqa: PTH118
        found = _look(path)
        if found is None or not stat.S_ISSOCK(found.st_mode) or found.st_ino & 0xFFFFFFFF != bound.inode:
            return
        # On overlayfs stat tells another device than the socket; there the same name must mean the same file to us.
        same_device = (os.major(found.st_dev), os.minor(found.st_dev)) == bound.device
        if same_device or _sees_what_we_see(folder, self._proc):
            self._add(identity, path, found, "socket", "bound")

    def _add_named(self, text: bytes, identity: Identity) -> None:
        """Add the rendezvous files whose names, which nobody can guess, are in an environment or in a path."""
        for path in self._elsewhere.rendezvous_in(text) if self._elsewhere is not None else ():
            self._add_elsewhere(identity, path, "rendezvous", "named", None)

    def _add_elsewhere(self, identity: Identity, path: str, kind: str, how: str, file: FileId | None) -> None:
        assert self._elsewhere is not None
        found = _look(path)
        if found is None or not stat.S_ISREG(found.st_mode) or file not in {None, file_id(found)}:
            return
        if kind != "lock" or self._elsewhere.is_new(found):
            self._add(identity, path, found, kind, how)

    def _add(self, identity: Identity, path: str, found: os.stat_result, kind: str, held: str) -> None:
        file: Plain = {"path": path, "device": found.st_dev, "inode": found.st_ino, "kind": kind, "held": held}
        file |= {"pid": identity[0], "started": identity[1]}
        file["made_ns"] = found.st_mtime_ns if kind in DATED else 0
        key = (identity, *key_of(file))
        known = self._found.get(key)
        if known is None or ORDER.index(held) > ORDER.index(known["held"]):
            self._found[key] = file


class Others:
    """Who else writes to shared memory that members have: a trainer, another server, a client that shares it.

    Then it is not the launch's alone, whoever made it, and stays when all of the launch have ended. Only who has it
    mapped to be shared and written counts, so that a person who looks into a file in passing keeps nothing. Below the
    ``guardian``, or below a member, nobody is a stranger: a member may have forked a moment ago.
    """

    def __init__(
        self,
        *,
        guardian: int = 0,
        but: Iterable[Identity] = (),
        proc: str = "/proc",
        folder: str = SHARED_MEMORY,
        elsewhere: Elsewhere | None = None,
    ) -> None:
        """``but``: who is not looked at, because he held up an earlier look."""
        self.stuck: set[Identity] = set()
        """Who held up this one, and was skipped."""
        self._guardian = guardian
        self._but = frozenset(but)
        self._proc = proc
        self._folder = folder
        self._files: frozenset[FileId] = frozenset()
        self._members: frozenset[Identity] = frozenset()
        self.look = Look((), proc=proc, folder=folder, elsewhere=elsewhere)
        self.is_done = False
        """Whether everybody was looked at who let himself be. Until then no file is known to be the launch's alone."""

    def run(self, found: Iterable[Plain], members: Iterable[Identity], before: Iterable[FileId] | None) -> None:
        """Look at everybody, if something of what members were found to have may be left. Who holds it up is skipped.

        Of processes that may not be looked at nothing is known.
        """
        mapped = (file for file in found if file["kind"] in MEMORY)
        left = [file for file in mapped if may_be_left(file, before, folder=self._folder)]
        self._files, self._members = frozenset((file["device"], file["inode"]) for file in left), frozenset(members)
        if self._files:
            self.look.add(_everybody(self._proc) - self._members - self._but)
        while len(self.stuck) <= _MOST_STUCK and not self.look.is_done:
            reader = threading.Thread(target=self.look.run, daemon=True)
            reader.start()
            while reader.is_alive() and (self.look.at is None or time.monotonic() - self.look.since < _STUCK_AFTER):
                reader.join(0.02)
            at = self.look.at
            if reader.is_alive() and at is not None and self.look.skip("its memory map is locked"):
                self.stuck.add(at)
        self.is_done = self.look.is_done

    def settled(self, found: Iterable[Plain]) -> list[Plain]:
        """Return what was found, without shared memory of which it is not known whether somebody else writes to it."""
        return [file for file in found if self.is_done or file["kind"] not in MEMORY]

    def files(self) -> set[FileId]:
        """Return to which of the files somebody else writes, as far as it was looked."""
        ours = {pid for pid, _ in self._members} | {self._guardian}
        found: set[FileId] = set()
        for file in self.look.found:
            which = (file["device"], file["inode"])
            if file["held"] == "shared" and which in self._files and _is_no_child(file["pid"], ours, self._proc):
                found.add(which)
        return found


def _everybody(proc: str) -> set[Identity]:
    found: set[Identity] = set()
    for name in os.listdir(proc):
        if name.isdigit():
            try:
                folder = os.open(f"{proc}/{name}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            except (FileNotFoundError, ProcessLookupError):
                continue
            try:
                found.add((int(name), _started(folder)))
            except (OSError, IndexError):
                continue  # it has ended, or is hidden
            finally:
                os.close(folder)
    return found


def _is_no_child(pid: int, of: set[int], proc: str) -> bool:
    """Whether a process descends from none of these. One that has ended meanwhile might: it is not known."""
    while pid > 1:
        if pid in of:
            return False
        try:
            folder = os.open(f"{proc}/{pid}", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            pid = int(_fields(folder)[1])
        except (OSError, IndexError):
            return False
        finally:
            os.close(folder)
    return True


# ---------------------------------------------------------------------------------------------- reading


def _read(folder: int, name: str, limit: int = 256 << 20) -> bytes:
    opened = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    with open(opened, "rb") as file:
        return file.read(limit)


def _started(folder: int) -> int:
    return int(_fields(folder)[19])


def _state(folder: int) -> str:
    return _fields(folder)[0].decode()


@contextlib.contextmanager
def _thread_that_shows_it(folder: int) -> Iterator[int]:
    """Give the folder in which the descriptors and maps are: a leader that ended shows none, another thread does."""
    if _state(folder) != "Z" or int(_fields(folder)[17]) <= 1:
        yield folder
        return
    tasks = os.open("task", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        newest = max(os.listdir(tasks), key=int)
        thread = os.open(newest, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tasks)
    finally:
        os.close(tasks)
    try:
        yield thread
    finally:
        os.close(thread)


def _fields(folder: int) -> list[bytes]:
    text = _read(folder, "stat", 1024)
    return text[text.rfind(b")") + 2 :].split()  # proc_pid_stat(5): the name may hold parentheses


def _look(path: str) -> os.stat_result | None:
    try:
        return os.stat(path, follow_symlinks=False) if path else None
    except (OSError, ValueError):
        return None


def _reason(problem: OSError) -> str:
    return problem.strerror or str(problem)


def _locked_inodes(proc: str) -> set[int]:
    """Return the inodes on which the kernel knows a lock, of whatever device: proc_locks(5)."""
    with open(f"{proc}/locks", encoding="ascii", errors="replace") as lines:
        places = [part for line in lines for part in line.split() if part.count(":") == 2]
    return {int(inode) for place in places if (inode := place.rpartition(":")[2]).isdecimal()}


def file_system_of(device: int, proc: str = "/proc") -> str:
    """Return the kind of file system that has this device: proc_pid_mountinfo(5)."""
    wanted = f"{os.major(device)}:{os.minor(device)}"
    with open(f"{proc}/self/mountinfo", encoding="utf-8", errors="replace") as lines:
        for line in lines:
            columns = line.split(" ")
            if columns[2] == wanted and "-" in columns:
                return columns[columns.index("-") + 1]
    return ""


def _sees_what_we_see(folder: int, proc: str) -> bool:
    """Whether a path means the same to that process as to us."""
    ours = os.readlink(f"{proc}/self/ns/mnt")
    return os.readlink("ns/mnt", dir_fd=folder) == ours and os.readlink("root", dir_fd=folder) == "/"


# ---------------------------------------------------------------------------------------------- sockets

# include/uapi/linux/{netlink,sock_diag,unix_diag}.h
_NETLINK_SOCK_DIAG = 4
_HEADER = struct.Struct("=IHHII")
_REQUEST = struct.Struct("=BBHIIIII")
_MESSAGE = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_VFS = struct.Struct("=II")
_REQUEST_DUMP, _SOCK_DIAG_BY_FAMILY, _ERROR, _DONE = 0x301, 20, 2, 3
_SHOW_NAME, _SHOW_VFS, _NAME_OF, _VFS_OF = 1, 2, 0, 1
_ALL_STATES, _NO_COOKIE = 0xFFFFFFFF, 0xFFFFFFFF
_ESTABLISHED = 1
"""Of a connection that was accepted the kernel tells its listener's name."""


class _Bound:
    """A socket with a name in a folder: the name as it was bound, and the file behind it as the kernel knows it."""

    __slots__ = ("device", "inode", "path")

    def __init__(self, path: str, inode: int, device: int) -> None:
        self.path = path
        self.inode = inode
        self.device = (device >> 20, device & 0xFFFFF)  # the kernel's own form: include/linux/kdev_t.h


def _bound_sockets() -> dict[int, _Bound]:
    """Return the named Unix sockets of our network namespace by the number that ``/proc/PID/fd`` shows.

    ``/proc/net/unix`` has the names, and not which file is behind each: another socket may have the name by now.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_CLOEXEC, _NETLINK_SOCK_DIAG) as diag:
        diag.settimeout(2.0)
        request = _REQUEST.pack(socket.AF_UNIX, 0, 0, _ALL_STATES, 0, _SHOW_NAME | _SHOW_VFS, _NO_COOKIE, _NO_COOKIE)
        header = _HEADER.pack(_HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, socket.AF_UNIX, 0)
        diag.send(header + request)
        return dict(_answers(diag))


def _answers(diag: socket.socket) -> Iterator[tuple[int, _Bound]]:
    while True:
        data = diag.recv(1 << 18)
        start = 0
        while start + _HEADER.size <= len(data):
            length, kind, *_ = _HEADER.unpack_from(data, start)
            if kind == _DONE:
                return
            if kind == _ERROR:
                number = -int(struct.unpack_from("=i", data, start + _HEADER.size)[0])
                raise OSError(number, os.strerror(number))
            yield from _socket_in(data[start + _HEADER.size : start + length])
            start += max(_HEADER.size, length + 3 & ~3)


def _socket_in(message: bytes) -> Iterator[tuple[int, _Bound]]:
    _, kind, state, _, number, *_ = _MESSAGE.unpack_from(message)
    parts: dict[int, bytes] = {}
    start = _MESSAGE.size
    while start + _ATTRIBUTE.size <= len(message):
        length, what = _ATTRIBUTE.unpack_from(message, start)
        parts[what] = message[start + _ATTRIBUTE.size : start + length]
        start += max(_ATTRIBUTE.size, length + 3 & ~3)
    name = parts.get(_NAME_OF, b"").rstrip(b"\0")
    is_accepted = state == _ESTABLISHED and kind != socket.SOCK_DGRAM
    if name and not name.startswith(b"\0") and _VFS_OF in parts and not is_accepted:
        yield number, _Bound(os.fsdecode(name), *_VFS.unpack_from(parts[_VFS_OF]))
