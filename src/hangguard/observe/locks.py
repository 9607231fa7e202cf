"""Lock files that members hold or wait for, and those of strangers in the folders of this launch.

Nothing is opened, taken or tried: only the kernel's own tables are read.
"""

from __future__ import annotations

import os
import re
import time
from dataclasses import dataclass, field, replace
from typing import ClassVar

from hangguard.facts import NOT_ASKED, Ask, LockFile, Process, Unseen
from hangguard.observe._kernel_locks import (
    FileId,
    Held,
    OpenFile,
    is_lock_name,
    lock_files_of,
    read_locks,
    waits_for_a_lock,
)
from hangguard.observe._presence_locks import build_folders, find_builders, find_presence_locks
from hangguard.observe.folders import TEMP, cache_folders, download_folders
from hangguard.observe.lane import Lane
from hangguard.observe.procfs import read_title
from hangguard.observe.target import Shared, Target, why_unseen

_MOST = 64
_INVISIBLE = "not visible from here: in another PID namespace, or on another machine"
_HIDDEN = "a process that may not be looked at"

# vLLM downloads a model under a lock in the temp folder: <sha256 of the name><name>.lock
# (vllm/model_executor/model_loader/weight_utils.py, get_lock).
_IN_TEMP = re.compile(r"/[0-9a-f]{64}[^/]*\.lock$")


class LocksProbe:
    """Looks, when asked, which lock files stand in the way.

    A lock of the kernel (flock, lockf) has an owner that the kernel knows. A waiter that polls, as Python's
    ``filelock`` does, has the file open for moments only and is not always caught: so the locks that strangers hold
    in the cache folders of the launch are told as well. Of a lock by presence nobody knows the owner for sure; that
    nobody could be found does not prove it stale where other machines share the folder.
    """

    field: ClassVar[str] = "locks"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared, *, proc: str = "/proc") -> None:
        self._launch = target.launch
        self._within = target.probe_within
        self._shared = shared
        self._proc = proc
        self._lane = Lane("locks", target.rights)

    async def look(self, ask: Ask) -> tuple[LockFile, ...] | Unseen:
        """Return the lock files, those with waiters first; at most 64."""
        if not ask.locks:
            return NOT_ASKED
        tree = self._shared.tree
        if isinstance(tree, Unseen):
            return Unseen(f"the members are unseen: {tree.reason}")
        members = tree.members
        try:
            return await self._lane.ask(lambda: self._read(members), within=self._within)
        except OSError as problem:
            return why_unseen(problem)

    async def aclose(self) -> None:
        """Let the thread go."""
        self._lane.close()

    def _read(self, members: tuple[Process, ...]) -> tuple[LockFile, ...]:
        table = read_locks(self._proc)
        pids = frozenset(member.pid for member in members)
        files = self._open_by(pids)
        self._add_strangers(files, table, pids)
        locks = [self._tell(file, table.get(file.id), pids) for file in files.values()]
        locks = [*self._present({file.path for file in files.values() if file.id in table}, pids), *locks]
        told = {lock.path: lock for lock in reversed(locks)}  # of a builder's lock its presence counts
        return tuple(sorted(told.values(), key=lambda lock: (not lock.waiters, lock.path)))[:_MOST]

    def _open_by(self, pids: frozenset[int]) -> dict[FileId, _File]:
        files: dict[FileId, _File] = {}
        for pid in pids:
            try:
                for opened in lock_files_of(self._proc, pid):
                    files.setdefault(opened.file, _File(opened.file, opened.path)).add(opened)
            except PermissionError:
                continue
        return files

    def _add_strangers(self, files: dict[FileId, _File], table: dict[FileId, Held], pids: frozenset[int]) -> None:
        """Add what strangers hold in the folders of this launch."""
        folders, temp = self._folders()
        for owner in {held.owners[0] for file, held in table.items() if file not in files and held.owners} - pids:
            if owner <= 0:
                continue
            try:
                for opened in lock_files_of(self._proc, owner, lambda path: _is_of_launch(path, folders, temp)):
                    if opened.holds:
                        files.setdefault(opened.file, _File(opened.file, opened.path)).add(opened)
            except PermissionError:
                continue

    def _folders(self) -> tuple[tuple[str, ...], str]:
        home, temp = os.path.expanduser("~"), TEMP  # noqa: PTH111
        folders = [*cache_folders(self._launch, home=home, user="", temp=temp)]
        folders += download_folders(self._launch, home=home)
        wanted = self._launch.environment().get("TMPDIR") or temp
        return tuple(f"{os.path.realpath(folder.path)}/" for folder in folders), f"{os.path.realpath(wanted)}/"

    def _tell(self, file: _File, held: Held | None, pids: frozenset[int]) -> LockFile:
        told = LockFile(path=file.path, kind="flock", age_seconds=file.age())
        openers, holders = file.openers & pids, file.holders
        if held is None or not held.owners:
            # Locks of other PID namespaces are in no table of ours; who waits for one still does.
            waiters = tuple(sorted(pid for pid in openers if waits_for_a_lock(self._proc, pid)))
            return replace(told, waiters=waiters, owner_title=_INVISIBLE if waiters else "")
        owner = self._owner(file, held)
        blocked = set(held.blocked) & pids
        return replace(
            told,
            waiters=tuple(sorted((openers - holders - {owner}) | blocked)),
            owner=owner,
            owner_title=_HIDDEN if owner is None else read_title(owner, self._proc),
            owner_is_member=owner in pids,
        )

    def _owner(self, file: _File, held: Held) -> int | None:
        """Return who holds it: who took it, or, when that one has ended, whoever inherited its descriptor."""
        for pid in held.owners:
            if pid > 0 and (pid in file.holders or self._holds(pid, file) is not False):
                return pid
        if file.holders:
            return min(file.holders)
        others = (int(name) for name in os.listdir(self._proc) if name.isdigit())  # noqa: PTH208
        return next((pid for pid in others if pid not in file.openers and self._holds(pid, file)), None)

    def _holds(self, pid: int, file: _File) -> bool | None:
        """Tell whether a process holds the lock; ``None``: its descriptors may not be read."""
        try:
            opened = lock_files_of(self._proc, pid, lambda path: path == file.path)
            return any(one.holds and one.file == file.id for one in opened)
        except PermissionError:
            return None

    def _present(self, known: set[str], pids: frozenset[int]) -> list[LockFile]:
        folders = build_folders(self._launch, home=os.path.expanduser("~"))  # noqa: PTH111
        folders = tuple(os.path.realpath(folder) for folder in folders)  # as descriptors and the release name them
        found = [path for path in find_presence_locks(folders) if path not in known]
        builders = find_builders(self._proc, found) if found else {}
        return [self._tell_present(path, builders.get(path), pids) for path in found]

    def _tell_present(self, path: str, owner: int | None, pids: frozenset[int]) -> LockFile:
        try:
            changed: float | None = os.stat(path, follow_symlinks=False).st_mtime  # noqa: PTH116
        except OSError:
            changed = None
        return LockFile(
            path=path,
            kind="presence",
            owner=owner,
            owner_title="" if owner is None else read_title(owner, self._proc),
            owner_is_member=owner in pids,
            age_seconds=_age(changed),
        )


@dataclass(slots=True)
class _File:
    """One lock file, with everybody who was seen to have it open."""

    id: FileId
    path: str
    openers: set[int] = field(default_factory=set)
    holders: set[int] = field(default_factory=set)
    changed: float | None = None

    def add(self, opened: OpenFile) -> None:
        self.openers.add(opened.pid)
        self.changed = opened.changed
        if opened.holds:
            self.holders.add(opened.pid)

    def age(self) -> float | None:
        return _age(self.changed)


def _is_of_launch(path: str, folders: tuple[str, ...], temp: str) -> bool:
    is_ours = path.startswith(folders) or (path.startswith(temp) and _IN_TEMP.search(path) is not None)
    return is_ours and is_lock_name(path)


def _age(changed: float | None) -> float | None:
    return None if changed is None else max(0.0, time.time() - changed)
