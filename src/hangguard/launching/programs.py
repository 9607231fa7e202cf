"""Where the command will be started: its folder, its environment, and whether its programs are there."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from hangguard.errors import BadLaunch, CommandNotExecutable, CommandNotFound
from hangguard.wrappers import unwrap, variables_behind


def folder_of(cwd: str | os.PathLike[str] | None) -> str:
    """Return the folder as an absolute path. Raises :class:`CommandNotFound` where there is none."""
    given = os.curdir if cwd is None else os.fspath(cwd)
    try:
        folder = os.path.abspath(given)  # noqa: PTH100
    except FileNotFoundError:  # this program's own directory was deleted
        raise CommandNotFound(given, what="directory") from None
    if not Path(folder).is_dir():
        raise CommandNotFound(folder, what="directory")
    return folder


def environment_of(given: Mapping[str, str], argv: tuple[str, ...]) -> dict[str, str]:
    """Return the whole environment, with what ``env A=B`` in front of the server adds to it."""
    for name, value in given.items():
        if not isinstance(name, str) or not isinstance(value, str):
            raise BadLaunch(f"The environment holds {name!r}, whose value is not text")
        if not name or "=" in name or "\0" in name or "\0" in value:
            raise BadLaunch(f"The environment holds {name!r}, which no program can be given")
    return {**given, **variables_behind(argv, {})}


def check_exists(argv: tuple[str, ...], given: Mapping[str, str], folder: str) -> None:
    """Raise where a wrapper or the server's program is not there, or cannot be executed.

    What stands behind a wrapper that brings an environment of its own (``conda run``) is looked up there, by it.
    """
    _check(argv[0], given, folder)
    behind = variables_behind(argv, given)
    unwrapped = unwrap(argv)
    for layer in unwrapped.layers:
        if layer.start:
            _check(argv[layer.start], behind, folder)
        if layer.wrapper.python != "path" or layer.wrapper.other_user:
            return
    if unwrapped.start < len(argv):
        _check(argv[unwrapped.start], behind, folder)


def _check(word: str, variables: Mapping[str, str], folder: str) -> None:
    if _find_program(word, variables, folder) is None:
        raise CommandNotFound(word)


def _find_program(word: str, variables: Mapping[str, str], folder: str) -> Path | None:
    """Return the file that the word will run, ``None`` where there is none.

    Raises :class:`CommandNotExecutable` for one that is there and cannot be run.
    """
    path = variables.get("PATH", os.defpath)
    if "/" in word:
        candidates = [Path(folder, word)]
    else:
        found = shutil.which(word, path=path)
        if found is not None:
            return Path(folder, found)
        candidates = [Path(folder, part or ".", word) for part in path.split(os.pathsep)]
        candidates = [candidate for candidate in candidates if candidate.is_file()]
    for candidate in candidates:
        if candidate.is_dir():
            raise CommandNotExecutable(word, problem="it is a directory")
        if candidate.exists():
            if not os.access(candidate, os.X_OK):
                raise CommandNotExecutable(word)
            return candidate
    return None
