"""Locks that are held by the mere presence of a file, and who may be building behind them. Functions that block.

torch's builder of extensions (``torch/utils/file_baton.py``) makes a file ``lock`` in the folder of the extension,
keeps it open while it builds, and removes it. Killed meanwhile it leaves the file, and everybody who needs that
extension later waits for ever (https://github.com/pytorch/pytorch/issues/189245).
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable, Iterator

from hangguard.facts import Launch

COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "nvlink", "cc1plus", "c++", "g++", "gcc", "cc", "clang",
     "clang++", "ninja", "ld", "as", "collect2"}
)  # fmt: skip
_NAME = "lock"
DEEPEST = 4
"""torch_extensions/py311_cu130/NAME/lock; flashinfer/VERSION/ARCHITECTURE/cached_ops/NAME/lock."""
_MOST_ENTRIES = 4000


def build_folders(launch: Launch, *, home: str) -> tuple[str, ...]:
    """Return below which folders this launch builds extensions in torch's way.

    torch/utils/cpp_extension.py, ``_get_build_directory``; flashinfer/jit/env.py (before 0.2.6 it built with torch,
    now it has locks that the kernel knows).
    """
    env = launch.environment()
    home = env.get("HOME") or home
    cache = env.get("XDG_CACHE_HOME") or f"{home}/.cache"
    folders = (
        env.get("TORCH_EXTENSIONS_DIR") or f"{cache}/torch_extensions",
        f"{env.get('FLASHINFER_WORKSPACE_BASE') or home}/.cache/flashinfer",
    )
    return tuple(posixpath.normpath(posixpath.join(launch.cwd, folder)) for folder in folders)


def find_presence_locks(folders: tuple[str, ...]) -> list[str]:
    """Return the lock files below these folders; nearest folders first, up to a bound, and no link is followed."""
    found = []
    left = _MOST_ENTRIES
    level = [(folder, 0) for folder in folders]
    while level and left > 0:
        folder, depth = level.pop(0)
        try:
            with os.scandir(folder) as entries:
                for entry in entries:
                    left -= 1
                    if left <= 0:
                        break
                    if entry.is_dir(follow_symlinks=False):
                        level += [(entry.path, depth + 1)] if depth < DEEPEST else []
                    elif entry.name == _NAME and entry.is_file(follow_symlinks=False):
                        found.append(entry.path)
        except OSError:
            continue
    return found


def find_builders(proc: str, locks: list[str]) -> dict[str, int]:
    """Return the pid that builds behind each lock.

    It has the lock open, else another file beside it, else it is a compiler that works in that folder.
    """
    folders = {posixpath.dirname(lock): lock for lock in locks}
    best: dict[str, tuple[int, int]] = {}
    for pid in _pids(proc):
        for folder, weight in _busy_folders(proc, pid, lambda path: folders.get(posixpath.dirname(path)) == path):
            lock = folders.get(folder)
            if lock is not None and (lock not in best or weight > best[lock][0]):
                best[lock] = (weight, pid)
    return {lock: pid for lock, (_weight, pid) in best.items()}


def _busy_folders(proc: str, pid: int, is_lock: Callable[[str], bool]) -> Iterator[tuple[str, int]]:
    try:
        descriptors = os.listdir(f"{proc}/{pid}/fd")  # noqa: PTH208 - many are read
    except OSError:
        return
    for descriptor in descriptors:
        path = _link(f"{proc}/{pid}/fd/{descriptor}")
        if path.startswith("/"):
            yield posixpath.dirname(path), 3 if is_lock(path) else 2
    if _name(proc, pid) in COMPILERS:
        yield _link(f"{proc}/{pid}/cwd"), 1


def _pids(proc: str) -> list[int]:
    own = os.getpid()
    return [int(name) for name in os.listdir(proc) if name.isdigit() and int(name) != own]  # noqa: PTH208


def _link(path: str) -> str:
    try:
        return os.readlink(path)  # noqa: PTH115
    except OSError:
        return ""


def _name(proc: str, pid: int) -> str:
    try:
        with open(f"{proc}/{pid}/comm", encoding="utf-8", errors="replace") as name:  # noqa: PTH123
            return name.read().strip()
    except OSError:
        return ""
