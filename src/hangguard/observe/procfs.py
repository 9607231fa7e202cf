"""How ``/proc/PID`` is read: plain functions that block, and raise OSError where there is nothing to read.

psutil would take several times as long for a hundred processes, and shows neither reaped children's time
nor the exit code of a zombie. Field numbers are those of proc_pid_stat(5), counted from 1.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import suppress
from typing import NamedTuple

from hangguard.facts import Unseen
from hangguard.redact import redact_argv

TICK = 1.0 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")

_PIDFD_GET_INFO = 0xC040FF0B
"""_IOWR(0xFF, 11, struct pidfd_info) with its first published size, 64 bytes; include/uapi/linux/pidfd.h."""
_PIDFD_INFO_EXIT = 1 << 3
_TITLE_BYTES = 8192


class Stat(NamedTuple):
    """``/proc/PID/stat``: everything of a process that can be read without taking a lock of its own."""

    pid: int
    name: str
    state: str
    parent: int
    fields: tuple[bytes, ...]
    """All fields from the third on."""

    def number(self, field: int) -> int:
        """Return field ``field`` of proc_pid_stat(5)."""
        return int(self.fields[field - 3])

    @property
    def started(self) -> int:
        """Return the start time in clock ticks since boot."""
        return int(self.fields[19])

    @property
    def identity(self) -> tuple[int, int]:
        """Return (pid, start time)."""
        return (self.pid, int(self.fields[19]))


def read_bytes(path: str, limit: int = 4096) -> bytes:
    """Read the start of a small file. Half the cost of ``open()``, which counts at 100 processes a second."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(descriptor, limit)
    finally:
        os.close(descriptor)


def read_stat(path: str) -> Stat:
    """Read one ``stat`` file, of a process or of a thread. The name in it may hold spaces and brackets."""
    text = read_bytes(path)
    opening, closing = text.find(b"("), text.rfind(b")")
    if opening < 0 or closing < 0:
        raise ProcessLookupError(3, "no process", path)
    fields = tuple(text[closing + 2 :].split())
    name = text[opening + 1 : closing].decode(errors="replace")
    return Stat(int(text[:opening]), name, fields[0].decode(), int(fields[1]), fields)


def read_started(pid: int, proc: str = "/proc") -> int:
    """Return the start time of a process in clock ticks since boot: with the pid, its identity."""
    return read_stat(f"{proc}/{pid}/stat").started


def scan(proc: str) -> dict[int, Stat]:
    """Read every process of the machine once. Those that end meanwhile are left out.

    Any other error is raised: without descriptors, for example, nobody has ended.
    """
    found: dict[int, Stat] = {}
    for name in os.listdir(proc):  # noqa: PTH208 - Path objects cost more than the reading
        if name.isdigit():
            try:
                stat = read_stat(f"{proc}/{name}/stat")
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            found[stat.pid] = stat
    return found


def is_hidden(pid: int, proc: str = "/proc") -> bool:
    """Tell whether there is such a process and ``/proc`` does not show it: under hidepid what we may not trace."""
    for _ in range(2):  # one that has ended in between is not shown either
        try:
            read_started(pid, proc)
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            pass
        else:
            return False
        try:
            os.kill(pid, 0)  # sends nothing
        except ProcessLookupError:
            return False
        except PermissionError:
            pass
    return True


def hidden_children(parents: Iterable[int], shown: Container[int], proc: str = "/proc") -> list[int]:
    """Return the children of these that ``/proc`` does not show: their parents have a list of them all the same."""
    found: list[int] = []
    for parent in parents:
        with suppress(OSError):
            for task in os.listdir(f"{proc}/{parent}/task"):  # noqa: PTH208
                with suppress(OSError):
                    listed = read_bytes(f"{proc}/{parent}/task/{task}/children", 1 << 16)
                    found += [pid for pid in map(int, listed.split()) if pid not in shown and is_hidden(pid, proc)]
    return found


def thread_states(proc: str, pid: int) -> str | None:
    """Return one letter a thread, sorted; ``None``: it is gone, or cannot be read."""
    folder = f"{proc}/{pid}/task"
    states = []
    try:
        for task in os.listdir(folder):  # noqa: PTH208
            try:
                text = read_bytes(f"{folder}/{task}/stat", 512)
            except (FileNotFoundError, ProcessLookupError):
                continue
            closing = text.rfind(b")")
            states.append(text[closing + 2 : closing + 3].decode())
    except OSError:
        return None
    return "".join(sorted(states)) or None


def read_io(proc: str, pid: int) -> dict[bytes, int]:
    """Return the counters of ``/proc/PID/io``; empty where the kernel does not let us look."""
    try:
        text = read_bytes(f"{proc}/{pid}/io")
    except OSError:
        return {}
    pairs = (line.split(b": ") for line in text.splitlines())
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2}


def read_title(pid: int, proc: str = "/proc") -> str:
    """Return the command line, empty where there is none. Can block: it takes the memory-map lock.

    Secrets are out already: here it is still known where one word ends, and ``--api-key`` takes several.
    """
    try:
        text = read_bytes(f"{proc}/{pid}/cmdline", _TITLE_BYTES)
    except OSError:
        return ""
    return " ".join(redact_argv(text.rstrip(b"\0").decode(errors="replace").split("\0"))).strip()


def exit_code_of_zombie(stat: Stat) -> int | None:
    """Return the code of a process that nobody has waited for; ``None``: the kernel does not tell us.

    Field 52 is also 0 where we may not look, so a 0 is no answer.
    """
    status = stat.number(52) if len(stat.fields) >= 50 else 0
    return os.waitstatus_to_exitcode(status) if status else None


def exit_code_of_pidfd(descriptor: int) -> int | Unseen | None:
    """Return how a process ended that was reaped by whoever; ``None``: it is not reaped yet.

    The kernel keeps it as long as the descriptor is open (since 6.15), and asks for no parenthood.
    """
    info = bytearray(64)
    info[0:8] = _PIDFD_INFO_EXIT.to_bytes(8, "little")
    try:
        fcntl.ioctl(descriptor, _PIDFD_GET_INFO, info)
    except OSError as problem:
        if problem.errno == 3:  # ESRCH: reaped, by a kernel that does not keep the code
            return Unseen("this kernel keeps no exit codes (it needs 6.15)")
        return Unseen(f"this kernel does not tell exit codes ({problem.strerror})")
    if not int.from_bytes(info[0:8], "little") & _PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(int.from_bytes(info[60:64], "little", signed=True))


def tcp_tables(net: str = "/proc/net") -> Iterator[list[str]]:
    """Yield the lines of ``tcp`` and ``tcp6`` below it: Documentation/networking/proc_net_tcp.rst.

    One of them is enough (without IPv6 there is no ``tcp6``); without either we could not look, and the first
    :class:`OSError` is raised.
    """
    problem: OSError | None = None
    read = 0
    for name in ("tcp", "tcp6"):
        try:
            with open(f"{net}/{name}", encoding="ascii") as table:  # noqa: PTH123 - a kernel file
                lines = table.readlines()[1:]
        except OSError as missing:
            problem = problem or missing
            continue
        read += 1
        yield lines
    if not read and problem is not None:
        raise problem
