"""What a release came to, as lines for people."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable

from hangguard.facts import NewName, Release

MOST_NAMED = 4
LONGEST = 1500
"""Characters of one command that a person is shown; the events have it whole."""


def removal_command(paths: Iterable[str]) -> str:
    """Return the command that removes these files; empty: there are none."""
    words = list(paths)
    return shlex.join(["rm", "--", *words]) if words else ""


def file_notes(release: Release) -> tuple[str, ...]:
    """Return what was removed, and what else appeared, with the command for it: whose it is, a person must know."""
    notes = []
    removed = [file for file in release.files if file.answer == "removed"]
    if removed:
        size = sum(file.used_bytes for file in removed) >> 20
        notes.append(f"{_count(len(removed), 'file')} that it left removed ({size} MiB)")
    used, at_rest, unknown = (
        [name for name in release.new_names if name.use == use] for use in ("in use", "at rest", "unknown")
    )
    if used:
        notes.append(f"{_new(used)}, in use, left alone: {_named(used)}")
    if at_rest:
        command = removal_command(name.path for name in at_rest)
        shown = command if len(command) <= LONGEST else f"{command[:LONGEST].rpartition(' ')[0]} ..."
        that = f"{_new(at_rest)}, perhaps somebody else's, though nobody has {_it(at_rest)} at this moment"
        notes.append(f"{that}; if nobody's: {shown}")
    if unknown:
        that = f"{_new(unknown)}, perhaps somebody else's, and it could not be seen whether somebody has {_it(unknown)}"
        notes.append(f"{that}: {_named(unknown)}")
    notes += [f"not all new names are known: {reason}" for reason in release.unattributed_unseen]
    return tuple(notes)


def _new(names: list[NewName]) -> str:
    folders = sorted({posixpath.dirname(name.path) for name in names})
    where = " and ".join(folders) if len(folders) <= 2 else f"{len(folders)} folders"
    return f"{_count(len(names), 'new name')} in {where} meanwhile"


def _it(names: list[NewName]) -> str:
    return "it" if len(names) == 1 else "them"


def _named(names: list[NewName]) -> str:
    more = f"; and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return "; ".join(f"{name.path} ({name.why or 'by somebody'})" for name in names[:MOST_NAMED]) + more


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
