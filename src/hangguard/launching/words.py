"""The words of a command, as the caller gave them: split as a shell would, and never given to one."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hangguard.errors import BadLaunch
from hangguard.wrappers import base_name, unwrap, variables_behind

_OPERATOR = re.compile(r"(?:\d*|&)[<>]+.*|[|&;()]+", re.ASCII)
_ASSIGNMENT = re.compile(r"[A-Za-z_][A-Za-z0-9_]*=.*", re.ASCII | re.DOTALL)
_SHELLS = frozenset(("sh", "bash", "dash", "ksh", "ash", "busybox", "zsh", "fish", "csh", "tcsh"))
_PLAIN_SHELLS = frozenset(("sh", "bash", "dash"))
"""Those that read no file before they run ``-c``; zsh reads .zshenv."""


class Words(NamedTuple):
    """What will be executed, and what is to be said of it."""

    argv: tuple[str, ...]
    notes: tuple[str, ...] = ()


def split(command: str | Sequence[str]) -> Words:
    """Return the words. Raises :class:`BadLaunch` for what no program could be given."""
    words = _split_text(command) if isinstance(command, str) else Words(_checked(command))
    if not words.argv or not words.argv[0]:
        raise BadLaunch("The command is empty", advice="Give the server's command line, as text or as words")
    if any("\0" in word for word in words.argv):
        raise BadLaunch("The command contains a NUL character")
    return words


def without_shell(argv: tuple[str, ...], env: Mapping[str, str]) -> Words | None:
    """Return the command of ``sh -c '…'`` where that is one simple command; ``None`` where a shell is needed.

    Such a command runs the same without the shell: nothing in it is expanded, and the shell reads no file first.
    """
    start = unwrap(argv).start
    if start + 2 >= len(argv) or base_name(argv[start]) not in _PLAIN_SHELLS:
        return None
    behind = variables_behind(argv, env)
    reads_first = any(name in {"BASH_ENV", "ENV"} or name.startswith("BASH_FUNC_") for name in behind)
    if not re.fullmatch(r"-[eux]*c", argv[start + 1]) or len(argv) != start + 3 or reads_first:
        return None
    inside = _simple_command(argv[start + 2])
    if inside is None:
        return None
    shell = f"{argv[start]} {argv[start + 1]}"
    return Words((*argv[:start], *inside), (f"{shell!r} holds one simple command, which is started without the shell",))


def is_shell(word: str) -> bool:
    """Tell whether it is a shell, which runs a text or a script that hides what it does."""
    return base_name(word) in _SHELLS


def _simple_command(text: str) -> tuple[str, ...] | None:
    """Return its words, where no character in it means anything to a shell but quotes do."""
    quote = ""
    for character in text:
        if character in "$`" and quote != "'":
            return None
        if not quote and character in ";&|<>()\n\r*?[]~{}#!":
            return None
        if character == "\\" and quote != "'":
            return None
        if character in "'\"" and quote in {"", character}:
            quote = "" if quote else character
    try:
        words = shlex.split(text)
    except ValueError:
        return None
    if words[:1] == ["exec"]:
        words = words[1:]
    if words[:1] == ["time"]:  # a word of the shell's own, and no program
        return None
    settings = next((n for n, word in enumerate(words) if not _ASSIGNMENT.fullmatch(word)), len(words))
    if settings:
        if words[settings : settings + 1] and words[settings].startswith("-"):  # env would take it for an option
            return None
        words = ["env", *words]
    return tuple(words) or None


def _checked(command: Sequence[str]) -> tuple[str, ...]:
    words: list[str] = []
    for word in command:
        given: object = os.fspath(word) if isinstance(word, os.PathLike) else word
        if not isinstance(given, str):
            raise BadLaunch(f"The command holds {given!r}, which is not text", advice="Every word must be a str")
        words.append(given)
    return tuple(words)


def _split_text(command: str) -> Words:
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise BadLaunch(
            f"The command cannot be split into words: {error}",
            advice="Check its quotes, or give a list of words",
        ) from None
    operator = _shell_operator(command)
    if operator is not None:
        raise BadLaunch(
            f"The command holds the shell operator {operator!r}, and no shell is asked to run it",
            advice="Give the server's command alone; quote the word if it belongs to the server. "
            "What the server prints is kept in the run folder",
        )
    settings = 0
    while settings < len(words) and _ASSIGNMENT.fullmatch(words[settings]):
        settings += 1
    if 0 < settings < len(words):  # A=B command: what a shell would do, env does
        words = ["env", *words]
    unexpanded = [word for word in words if re.search(r"\$[A-Za-z_{(]|`", word) or word.startswith("~")]
    notes = [f"{word!r} reaches the server as it stands: no shell expands it" for word in unexpanded]
    return Words(tuple(words), tuple(notes))


def _shell_operator(command: str) -> str | None:
    """Return the first unquoted shell operator that stands as a word of its own, or ends one (``cd x;``)."""
    lexer = shlex.shlex(command, posix=False)  # this mode keeps the quotes: '"|"' is not '|'
    lexer.whitespace_split = True
    lexer.commenters = ""
    try:
        for word in lexer:
            if _OPERATOR.fullmatch(word):
                return word
            if word.endswith(";") and not word.endswith("\\;"):
                return ";"
    except ValueError:
        return None  # an escaped quote, which this mode cannot read: the words were split well already
    return None
