"""What a release came to, as lines for people."""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Iterable

from hangguard.facts import Release

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
    if release.unattributed_files:
        command = removal_command(release.unattributed_files)
        shown = command if len(command) <= LONGEST else f"{command[:LONGEST].rpartition(' ')[0]} ..."
        names = _count(len(release.unattributed_files), "new name")
        folders = sorted({posixpath.dirname(path) for path in release.unattributed_files})
        where = " and ".join(folders) if len(folders) <= 2 else f"{len(folders)} folders"
        notes.append(f"{names} in {where} meanwhile, perhaps somebody else's; if nobody's: {shown}")
    notes += [f"not all new names are known: {reason}" for reason in release.unattributed_unseen]
    return tuple(notes)


def _count(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
