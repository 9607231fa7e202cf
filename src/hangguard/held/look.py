# ruff: noqa: PTH115, PTH116, PTH123, PTH208
"""One look at what some processes have."""

from __future__ import annotations

import os
import stat
import time
from collections import deque

from hangguard.held.bound_sockets import bound_sockets
from hangguard.held.files import DATED, ORDER, SHARED_MEMORY, file_id, key_of, names_in
from hangguard.held.process_folder import read, sees_what_we_see, started_of, state_of, thread_that_shows_it

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable
    from typing import Any

    from hangguard.elsewhere import Elsewhere
    from hangguard.held.bound_sockets import Bound
    from hangguard.held.files import FileId, Identity, Plain


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
        self._sockets: dict[int, Bound] = {}
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
            self._sockets = bound_sockets()
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
            if started_of(folder) == identity[1]:
                with thread_that_shows_it(folder) as shown:
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
            if state_of(folder) not in "ZX":  # who has ended belongs to root
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
        lines = dict(line.split(b":\t", 1) for line in read(folder, f"fdinfo/{descriptor}", 4096).splitlines()[:3])
        return self._elsewhere.is_presence_lock(found, int(lines[b"flags"], 8), self._locked)

    def _read_maps(self, folder: int, identity: Identity) -> None:
        wanted = f" {self._device} ".encode() if self._device else b"\n"
        for line in read(folder, "maps").splitlines():
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
            self._add_named(read(folder, "environ", 4 << 20), identity)

    # --------------------------------------------------------------------------------- what it has

    def _add_file(self, file: FileId, path: str, how: str, identity: Identity) -> None:
        # The C library gives a semaphore its name after it has mapped it, so the path here may be of no use.
        for name in (path, (self._names or {}).get(file, "")):
            found = _look(name)
            if found is not None and file_id(found) == file and stat.S_ISREG(found.st_mode):
                self._add(identity, name, found, "file", how)
                return

    def _add_socket(self, bound: Bound, folder: int, identity: Identity) -> None:
        path = os.path.join(os.readlink("cwd", dir_fd=folder), bound.path)  # noqa: PTH118
        found = _look(path)
        if found is None or not stat.S_ISSOCK(found.st_mode) or found.st_ino & 0xFFFFFFFF != bound.inode:
            return
        # On overlayfs stat tells another device than the socket; there the same name must mean the same file to us.
        same_device = (os.major(found.st_dev), os.minor(found.st_dev)) == bound.device
        if same_device or sees_what_we_see(folder, self._proc):
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
