# ruff: noqa: PTH208
"""Who else writes to the shared memory that members have."""

from __future__ import annotations

import os
import threading
import time

from hangguard.held.files import MEMORY, SHARED_MEMORY, may_be_left
from hangguard.held.look import Look
from hangguard.held.process_folder import fields_of, started_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    from hangguard.elsewhere import Elsewhere
    from hangguard.held.files import FileId, Identity, Plain


_STUCK_AFTER = 1.0
"""Seconds after which a process is skipped in the look at everybody; reading one takes a millisecond."""
_MOST_STUCK = 4


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
        self.problem = ""
        """Why nobody could be looked at; empty: it was looked, or is being."""
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
            try:
                reader.start()
            except RuntimeError as problem:  # no thread more is allowed here: RLIMIT_NPROC, pids.max
                self.problem = str(problem)
                break
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
                found.add((int(name), started_of(folder)))
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
            pid = int(fields_of(folder)[1])
        except (OSError, IndexError):
            return False
        finally:
            os.close(folder)
    return True
