"""What belongs to one launch, as far as this process has seen: by it, all can be ended where the guardian is dead."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, KeysView, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, TypeAlias

from hangguard import held
from hangguard.act import _daemons, _lease, _membership
from hangguard.act.files import as_removed
from hangguard.elsewhere import Elsewhere
from hangguard.facts import HeldFile, RemovedFile
from hangguard.observe import procfs

Identity: TypeAlias = tuple[int, int]
FileId: TypeAlias = tuple[int, int]


class Belongings:
    """Members of one launch, each with the proof that it is one, and what they could leave behind."""

    def __init__(self, elsewhere: Elsewhere | None) -> None:
        self.root: Identity = (0, 0)
        self.log_id: FileId | None = None
        """(device, inode) of the log."""
        self.members: set[Identity] = set()
        """Every member that was ever seen, living or dead."""
        self.proofs: dict[Identity, str] = {}
        self.daemons: _daemons.Daemons | None = None
        self.shm_before: frozenset[FileId] | None = None
        """(device, inode) of what lay in /dev/shm before the launch, or is somebody else's too; ``None``: unseen."""
        self.elsewhere = elsewhere
        self._log_path: bytes | None = None
        self._files: dict[tuple[Any, ...], held.Plain] = {}
        self._files_as_facts: tuple[HeldFile, ...] | None = ()
        """The same; ``None``: to be made again. The state file asks for it every second, and there may be thousands."""

    def begin(self, message: Mapping[str, Any], answer: Mapping[str, Any]) -> None:
        """Note the launched process and what there was before it: what the guardian was told, and has answered."""
        self.root = root = (answer["pid"], answer["started"])
        self.log_id = tuple(answer["log"]) if answer["log"] is not None else None
        self._log_path = None if message["log_path"] is None else message["log_path"].encode("latin-1")
        if answer["before"] is not None:
            self.shm_before = frozenset((device, inode) for device, inode in answer["before"])
        self.members.add(root)
        self.proofs[root] = _membership.LAUNCHED
        self.daemons = _daemons.Daemons(root_pid=self.root[0], log_id=self.log_id, port=message.get("port"))

    # ------------------------------------------------------------------------------------ processes

    def add_members(self, identities: Iterable[Identity]) -> set[Identity]:
        """Note members; return those that are new."""
        new = set(identities) - self.members
        self.members |= new
        return new

    def find_members(self, entries: Mapping[int, _membership.Entry]) -> set[Identity]:
        """Return the members that live, in one scan of all processes. Blocks."""
        spare = None if self.daemons is None else self.daemons.spare
        return _membership.find_members(
            entries, remembered=tuple(self.members), log_id=self._named_log(), spare=spare, proofs=self.proofs
        )

    def look_below(self, guardian: Identity) -> Callable[[], tuple[set[Identity], dict[Identity, str]]]:
        """Return a look for all that live now, below a guardian too: what it returns is members with their proofs.

        The look blocks, and may run in a thread beside others: it changes nothing here.
        """
        spare = None if self.daemons is None else self.daemons.copy().spare

        def find() -> tuple[set[Identity], dict[Identity, str]]:
            proofs: dict[Identity, str] = {}
            entries = _membership.read_entries()
            entry = entries.get(guardian[0])
            below = [guardian[0]] if entry is not None and entry.identity == guardian else []
            remembered, log_id = tuple(self.members), self._named_log()
            found = _membership.find_members(
                entries, below=below, remembered=remembered, log_id=log_id, spare=spare, proofs=proofs
            )
            return found, proofs

        return find

    def add_proofs(self, proofs: Mapping[Identity, str]) -> None:
        """Note why somebody is a member; what was noted first stays."""
        self.proofs.update((who, proof) for who, proof in proofs.items() if who not in self.proofs)

    def _named_log(self) -> FileId | None:
        """Return the log if it still has its name. Blocks.

        The guardian had it open as long as it lived. Without that, and without a name, the kernel may have given its
        inode to another file: to the log of another run, for example, with members of its own.
        """
        with suppress(OSError, ValueError):
            if self._log_path is not None and held.file_id(os.lstat(self._log_path)) == self.log_id:
                return self.log_id
        return None

    def hidden_members(self) -> list[dict[str, Any]]:
        """Return the members that /proc does not show: only the guardian, their parent, could tell that they ended."""
        hidden = [who for who in sorted(self.members) if procfs.is_hidden(who[0])]
        unknown = {"title": "hidden by /proc", "state": "?", "wait_channel": ""}
        return [{"pid": pid, "started": started, **unknown} for pid, started in hidden]

    # ------------------------------------------------------------------------------------ files

    @property
    def files(self) -> tuple[HeldFile, ...]:
        """Return what members were seen to have, and could leave."""
        if self._files_as_facts is None:
            self._files_as_facts = tuple(HeldFile(**file) for file in self._files.values())
        return self._files_as_facts

    @property
    def plain_files(self) -> Iterable[held.Plain]:
        """Return the same as the guardian and the removal take them."""
        return self._files.values()

    @property
    def file_keys(self) -> KeysView[tuple[Any, ...]]:
        """Return what each of them is known by, see :func:`hangguard.held.key_of`."""
        return self._files.keys()

    def set_files(
        self, files: Iterable[HeldFile], others: Iterable[FileId]
    ) -> tuple[list[held.Plain], list[held.Plain], set[FileId]]:
        """Let these be the files; return what is new, what is gone, and who of ``others`` was not known.

        Left out is what cannot be the members' alone, see :func:`hangguard.held.may_be_left`.
        """
        not_ours = set(others) - (self.shm_before or frozenset())
        self.add_others(not_ours)
        plain = {held.key_of(file): file for file in map(asdict, files) if held.may_be_left(file, self.shm_before)}
        new = [file for key, file in plain.items() if key not in self._files]
        gone = [file for key, file in self._files.items() if key not in plain]
        if plain != self._files:
            self._files, self._files_as_facts = plain, None
        return new, gone, not_ours

    def add_others(self, others: Iterable[FileId]) -> None:
        """Note what is somebody else's too."""
        if self.shm_before is not None:
            self.shm_before |= set(others)

    def add_files(self, files: Iterable[held.Plain]) -> None:
        """Note more of them: what a last look has found."""
        for file in files:
            if held.may_be_left(file, self.shm_before):
                self._files[held.key_of(file)] = file
        self._files_as_facts = None

    def unknown_of(self, files: Iterable[held.Plain]) -> list[held.Plain]:
        """Return those that were not noted before."""
        return [file for file in files if held.key_of(file) not in self._files]

    def kept_files(self, why: str) -> tuple[RemovedFile, ...]:
        """Return all of them as not removed, and why."""
        return as_removed(_lease.answer_of(file, None, why) for file in self._files.values())
