"""Pure edits of a launch: flags and variables in, a changed launch out.

Flags are read as the engines' own parsers read them: ``--x v`` and ``--x=v`` mean the same, underscores and
dashes mean the same, of repeated flags the last one wins, and a long one may be abbreviated as far as it stays the
only one (argparse's ``allow_abbrev``, which vLLM's and SGLang's servers leave on, 0.32.0 and 0.5.23). Which ones there
are the launch knows (``Launch.options``). Every edit, applied twice, changes nothing more.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from hangguard.facts import Launch
from hangguard.redact import redact_argv
from hangguard.wrappers import unwrap, with_assignment

_NOT = "--no-"


class _Use(NamedTuple):
    """One place where a flag stands: ``argv[start:stop]``."""

    flag: str
    start: int
    stop: int
    value: str | None


def has_flag(argv: Sequence[str], *names: str) -> bool:
    """Tell whether one of the flags is there, with or without a value."""
    return next(_uses(argv, names), None) is not None


def value_of(argv: Sequence[str], *names: str) -> str | None:
    """Return the value that counts (the last), or ``None``: not there, or there without a value."""
    values = [use.value for use in _uses(argv, names)]
    return values[-1] if values else None


def with_flag(launch: Launch, name: str, value: str | None = None, *, replacing: Iterable[str] = ()) -> Launch:
    """Return the launch with the flag set, once. ``replacing``: other spellings, and flags that contradict it.

    Where it stood already it is changed in place; otherwise it goes to the end (before a bare ``--``). Only the
    server's own words are looked at: options of what stands in front of it (``timeout -k 5``) stay as they are.
    """
    names = (name, *replacing)
    word = name if value is None else f"{name}={value}"
    before, argv = _parts(launch)
    uses = list(_uses(argv, names, switch=value is None, options=launch.options))
    if len(uses) == 1 and uses[0].value == value and _plain(uses[0].flag) == name:
        return launch
    if not uses:
        end = _end_of_flags(argv)
        return replace(launch, argv=(*before, *argv[:end], word, *argv[end:]))
    argv = _cut(argv, uses[1:])
    first = uses[0]
    return replace(launch, argv=(*before, *argv[: first.start], word, *argv[first.stop :]))


def with_port(launch: Launch, port: int) -> Launch:
    """Return the launch on another port, wherever in its command and its URL the number of the old one stands.

    For a port that filled ``{port}``: ``launching`` chooses one whose number occurs nowhere else in the command.
    """
    old = re.compile(rf"(?<!\d){launch.port}(?!\d)")
    argv = tuple(old.sub(str(port), word) for word in launch.argv)
    return replace(launch, argv=argv, url=old.sub(str(port), launch.url), port=port)


def without_flag(launch: Launch, *names: str, switch: bool = False) -> Launch:
    """Return the launch without the flags and their values. ``switch``: they take no value."""
    before, argv = _parts(launch)
    uses = list(_uses(argv, names, switch=switch, options=launch.options))
    return replace(launch, argv=(*before, *_cut(argv, uses))) if uses else launch


def with_variable(launch: Launch, name: str, value: str) -> Launch:
    """Return the launch with the environment variable set, also where ``env NAME=…`` in argv would hide it."""
    env = {**launch.environment(), name: value}
    return replace(launch, argv=with_assignment(launch.argv, name, value), env=tuple(sorted(env.items())))


def words_of(launch: Launch) -> tuple[str, ...]:
    """Return the words that count for the server, last ones first in force: its ``--config`` file's, then its own.

    Options that were abbreviated are spelled out, where it is known which ones the server has.
    """
    return spelled_out((*launch.file_args, *_parts(launch)[1]), launch.options)


def spelled_out(argv: Sequence[str], options: Collection[str] | None) -> tuple[str, ...]:
    """Return the words with every abbreviated long option written out; ``options``: all that the server has.

    What could be several of them stays as it is: the server ends with a usage error over it.
    """
    end = _end_of_flags(argv)
    return (*(_spelled_out(word, options) for word in argv[:end]), *argv[end:]) if options else tuple(argv)


def describe(before: Launch, after: Launch) -> str:
    """Return the difference as one line: ``+ --enforce-eager``, ``- --x 1``, ``+ NCCL_DEBUG=INFO``.

    Values of flags and variables that hold secrets are never in it.
    """
    left, right = _pieces(before), _pieces(after)
    gone = [piece for piece in left if piece not in right]
    new = [piece for piece in right if piece not in left]
    return ", ".join([f"- {piece}" for piece in gone] + [f"+ {piece}" for piece in new])


def as_shell(launch: Launch) -> str:
    """Return argv as one line that a shell reads back, secrets left out."""
    return shlex.join(redact_argv(launch.argv))


def _parts(launch: Launch) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what stands in front of the server's own words, and those."""
    start = unwrap(launch.argv).start
    return launch.argv[:start], launch.argv[start:]


def _pieces(launch: Launch) -> list[str]:
    argv = redact_argv(launch.argv)
    pieces = []
    index = 0
    while index < len(argv):
        piece = argv[index]
        takes = _is_flag(piece) and "=" not in piece and index + 1 < len(argv) and not _is_flag(argv[index + 1])
        pieces.append(shlex.join(argv[index : index + 2]) if takes else shlex.quote(piece))
        index += 2 if takes else 1
    variables = redact_argv([f"{name}={value}" for name, value in launch.env])
    return pieces + [variable for variable in variables if variable not in pieces]


def _uses(
    argv: Sequence[str], names: Iterable[str], *, switch: bool = False, options: Collection[str] | None = None
) -> Iterator[_Use]:
    wanted = {_plain(name) for name in names}
    end = _end_of_flags(argv)
    for index in range(end):
        flag, equals, value = _spelled_out(argv[index], options).partition("=")
        if not _is_flag(flag) or _plain(flag) not in wanted:
            continue
        following = argv[index + 1] if index + 1 < end else None
        if equals:
            yield _Use(flag, index, index + 1, value)
        elif switch or following is None or _is_flag(following):
            yield _Use(flag, index, index + 1, None)
        else:
            yield _Use(flag, index, index + 2, following)


def _spelled_out(word: str, options: Collection[str] | None) -> str:
    """Return the word with its option written out, where it begins exactly one of these."""
    flag, equals, value = word.partition("=")
    named, dot, field = flag.partition(".")  # --compilation-config.mode=0 sets one field of a JSON
    named = _plain(named)
    if not options or not named.startswith("--") or len(named) == len("--") or named in options:
        return word
    found = [option for option in options if option.startswith(named)]
    if named.startswith(_NOT):  # argparse.BooleanOptionalAction; the source spells the positive form only
        positive = "--" + named[len(_NOT) :]
        if positive in options:
            return word
        found += [_NOT + option[2:] for option in options if option.startswith(positive)]
    return f"{found[0]}{dot}{field}{equals}{value}" if len(set(found)) == 1 else word


def _plain(flag: str) -> str:
    return flag.replace("_", "-") if flag.startswith("--") else flag


def _is_flag(word: str) -> bool:
    # "-1" and "-0.5" are values, as argparse reads them; "{…}" and paths never begin with a dash.
    return len(word) > 1 and word.startswith("-") and not re.match(r"-\.?\d", word)


def _end_of_flags(argv: Sequence[str]) -> int:
    return list(argv).index("--") if "--" in argv else len(argv)


def _cut(argv: Sequence[str], uses: Iterable[_Use]) -> tuple[str, ...]:
    gone = {index for use in uses for index in range(use.start, use.stop)}
    return tuple(word for index, word in enumerate(argv) if index not in gone)
