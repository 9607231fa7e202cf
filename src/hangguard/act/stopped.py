"""What a stop comes to, and where it is meanwhile."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from hangguard.facts import Daemon, EndedProcess, RemovedFile, Survivor

By: TypeAlias = Literal["guardian", "supervisor"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What a stop came to."""

    survivors: tuple[Survivor, ...]
    """Members that SIGKILL did not end."""
    ended: int
    """How many members are gone, over the whole stop."""
    seconds: float
    by: By
    """Who signalled: the supervisor does only when the guardian is dead."""
    files: tuple[RemovedFile, ...] = ()
    """What members were seen to have in /dev/shm and as named sockets, and what became of it after their end."""
    files_unseen: tuple[str, ...] = ()
    """What the last look before the first signal could not see of that."""
    unproved_files: tuple[str, ...] = ()
    """What the guardian alone, which is dead, has seen members have: nobody can prove it any more, so it stays."""
    daemons: tuple[Daemon, ...] = ()
    """Daemons of somebody else that the launch has started: left alone."""
    processes: tuple[EndedProcess, ...] = ()
    """Members that lived when the stop began, or began since, and are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProgress:
    """Where a stop is: asking, grace, killing, trackers, done; and how many members live."""

    step: str
    left: int


def as_stopped(
    *,
    members: Collection[object],
    survivors: Sequence[dict[str, Any]],
    seconds: float,
    by: By,
    daemons: Sequence[dict[str, Any]] = (),
    processes: Sequence[dict[str, Any]] = (),
    files: tuple[RemovedFile, ...] = (),
    files_unseen: tuple[str, ...] = (),
    unproved_files: tuple[str, ...] = (),
) -> Stopped:
    """Return an ending as a fact. ``act/_ending.py`` tells its parts, here or over the guardian's socket."""
    return Stopped(
        survivors=tuple(Survivor(**survivor) for survivor in survivors),
        ended=len(members) - len(survivors),
        seconds=seconds,
        by=by,
        daemons=tuple(Daemon(**daemon) for daemon in daemons),
        processes=tuple(EndedProcess(**process) for process in processes),
        files=files,
        files_unseen=files_unseen,
        unproved_files=unproved_files,
    )
