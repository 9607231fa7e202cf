"""Another process's memory, as far as it is safe to read it."""

from __future__ import annotations

import os
import struct
import time
from bisect import bisect_right

TYPE_CHECKING = False
if TYPE_CHECKING:
    from types import TracebackType

MOST_MAPS = 16 << 20
"""Bytes of ``maps``: some 150,000 mappings. A process with eight GPUs has up to 20,000."""
MOST_BYTES = 256 << 20
"""Bytes that one look may read. A member with 100 threads takes less than 4 MB."""
BLOCK = 16 << 10
"""Frames lie side by side in chunks of this size (``DATA_STACK_CHUNK_SIZE``, Python 3.11 and later)."""

_WORD = struct.Struct("<Q")


class Unreadable(Exception):
    """It cannot be read, and another try would not help."""

    def __init__(self, reason: str, *, is_python: bool = True) -> None:
        super().__init__(reason)
        self.is_python = is_python


class Torn(Exception):
    """What was read does not fit together: it changed meanwhile. Another try may help."""


class Mapping:
    """One line of ``maps``: a range of addresses and the file behind it, if any."""

    __slots__ = ("end", "offset", "path", "start")

    def __init__(self, start: int, end: int, offset: int, path: str) -> None:
        self.start = start
        self.end = end
        self.offset = offset
        self.path = path


class Memory:
    """Reads addresses that hold ordinary memory, and refuses all others.

    Of files only the program and libpython: an interpreter has nothing of its own in others, and a file of FUSE's may
    never answer. Not mappings of devices, wherever their nodes lie: ``/proc/PID/mem`` reads those through the driver
    (``vm_operations_struct.access``), and a pointer that was torn could then touch a GPU's registers, or fetch a page
    of its managed memory.
    """

    def __init__(self, pid: int, *, ends_at: float) -> None:
        self.pid = pid
        self._ends_at = ends_at
        self._left = MOST_BYTES
        self._file = os.open(f"/proc/{pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.look_again()
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Memory:  # noqa: PYI034 - Self is of 3.11, and of typing
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        os.close(self._file)

    def look_again(self) -> None:
        """Learn the mappings: a new thread's frames may lie in one that was not there before."""
        self.mappings = _read_mappings(self.pid)
        try:
            self.program = os.readlink(f"/proc/{self.pid}/exe")  # noqa: PTH115 - nothing is opened
        except OSError:
            self.program = ""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for mapping in self.mappings:
            if not _is_ordinary(mapping.path, self.program):
                continue
            if self._ends and self._ends[-1] == mapping.start:
                self._ends[-1] = mapping.end
            else:
                self._starts.append(mapping.start)
                self._ends.append(mapping.end)
        self._blocks: dict[int, tuple[int, bytes]] = {}

    def read(self, address: int, size: int) -> bytes:
        """Return so many bytes as they are now. Raises :class:`Torn` for an address that holds no memory."""
        self._range_of(address, size)
        return self._fetch(address, size)

    def word(self, address: int) -> int:
        """Return a pointer or a number of eight bytes."""
        return int(_WORD.unpack(self.read(address, 8))[0])

    def forget(self) -> None:
        """Fetch again what :meth:`near` reads from now on."""
        self._blocks = {}

    def near(self, address: int, size: int) -> bytes:
        """Return bytes out of a block that is fetched in one go: what lies side by side is of one moment."""
        place = address & ~(BLOCK - 1)
        if address + size > place + BLOCK:
            return self.read(address, size)
        if place not in self._blocks:
            start, end = self._range_of(address, size)
            start, end = max(start, place), min(end, place + BLOCK)
            self._blocks[place] = (start, self._fetch(start, end - start))
        start, block = self._blocks[place]
        found = block[address - start : address - start + size] if address >= start else b""
        return found if len(found) == size else self.read(address, size)

    def _range_of(self, address: int, size: int) -> tuple[int, int]:
        place = bisect_right(self._starts, address) - 1
        if place < 0 or address + size > self._ends[place]:
            raise Torn(f"0x{address:x} is no memory of it")
        return self._starts[place], self._ends[place]

    def check_time(self) -> None:
        """Raise :class:`Unreadable` when the time is over."""
        if time.monotonic() >= self._ends_at:
            raise Unreadable("its memory could not be read in time")

    def _fetch(self, address: int, size: int) -> bytes:
        self._left -= size
        if self._left < 0:
            raise Unreadable("it has too much to read")
        self.check_time()
        try:
            found = os.pread(self._file, size, address)
        except OSError as problem:  # EIO: unmapped meanwhile
            raise Torn(f"0x{address:x} cannot be read: {problem.strerror}") from problem
        if not found:
            raise Unreadable("the process has ended")
        if len(found) < size:
            raise Torn(f"0x{address:x} cannot be read whole")
        return found


def has_interpreter(path: str, program: str) -> bool:
    """Tell whether a file may have the interpreter in it: the program that runs, and every libpython."""
    is_file = path.startswith("/") and not path.startswith(("/dev/", "/proc/", "/sys/"))
    return is_file and (path == program or path.rpartition("/")[2].startswith("libpython"))


def _is_ordinary(path: str, program: str) -> bool:
    """Whether a mapping is memory, by what stands behind it: nothing, the heap, a stack, the interpreter's files."""
    is_anonymous = not path or path == "[heap]" or path.startswith(("[stack", "[anon:"))
    return is_anonymous or has_interpreter(path, program)


def _read_mappings(pid: int) -> list[Mapping]:
    """Read those that may be read by their owner."""
    found = []
    with open(f"/proc/{pid}/maps", "rb") as file:  # noqa: PTH123
        text = file.read(MOST_MAPS + 1)
    if len(text) > MOST_MAPS:
        raise Unreadable(f"its list of mappings is larger than {MOST_MAPS >> 20} MiB")
    for line in text.splitlines():
        addresses, rights, offset, _device, _inode, *path = line.split(None, 5)
        if rights.startswith(b"r"):
            start, end = (int(part, 16) for part in addresses.split(b"-"))
            found.append(Mapping(start, end, int(offset, 16), os.fsdecode(path[0]) if path else ""))
    return found
