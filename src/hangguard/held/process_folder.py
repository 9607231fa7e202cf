# ruff: noqa: PTH115, PTH123, PTH208
"""Reading one process through a descriptor of its folder in ``/proc``: that process, and no later one of its pid."""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator


def read(folder: int, name: str, limit: int = 256 << 20) -> bytes:
    """Return what a file of the process says, as far as ``limit``."""
    opened = os.open(name, os.O_RDONLY | os.O_CLOEXEC, dir_fd=folder)
    with open(opened, "rb") as file:
        return file.read(limit)


def started_of(folder: int) -> int:
    """Return when it started, in ticks since boot."""
    return int(fields_of(folder)[19])


def state_of(folder: int) -> str:
    """Return its state, one letter."""
    return fields_of(folder)[0].decode()


@contextlib.contextmanager
def thread_that_shows_it(folder: int) -> Iterator[int]:
    """Give the folder in which the descriptors and maps are: a leader that ended shows none, another thread does."""
    if state_of(folder) != "Z" or int(fields_of(folder)[17]) <= 1:
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


def fields_of(folder: int) -> list[bytes]:
    """Return the fields of ``stat`` from the state on, which is the third: proc_pid_stat(5)."""
    text = read(folder, "stat", 1024)
    return text[text.rfind(b")") + 2 :].split()  # the name may hold parentheses


def sees_what_we_see(folder: int, proc: str) -> bool:
    """Whether a path means the same to that process as to us."""
    ours = os.readlink(f"{proc}/self/ns/mnt")
    return os.readlink("ns/mnt", dir_fd=folder) == ours and os.readlink("root", dir_fd=folder) == "/"
