"""The YAML file of options that both engines take with ``--config``, read as they read it.

Its options stand before those of the command line, which win (vLLM: utils/argparse_utils.py
_pull_args_from_config, 0.32.0; SGLang: srt/utils/server_args_config_parser.py, 0.5.23). YAML is read by PyYAML's
safe loader, which makes plain values only; every engine brings PyYAML, hangguard does not require it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hangguard.errors import BadLaunch

_LARGEST = 1024 * 1024
_MOST_VALUES = 20_000
"""Values in a whole file, aliases written out: some lines of them can stand for billions."""
_MOST_ALIASES = 200
_MOST_PAIRS = 1000
"""Pairs in one mapping after merges (``<<``), which PyYAML before 6.0.4 multiplies while it reads."""


def config_of(args: tuple[str, ...], option: str | None, folder: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return what the file of ``--config FILE`` says as options, and notes. Without the option: nothing.

    Raises :class:`BadLaunch` for a file that cannot be read, or that the server would refuse.
    """
    if option is None or option not in args:
        ignored = option is not None and any(word.startswith(f"{option}=") for word in args)
        return (), (f"the server reads '{option} FILE' only: it ignores '{option}=FILE'",) if ignored else ()
    if args.count(option) > 1:
        raise BadLaunch(f"The command holds {option} more than once, which the server refuses", advice="Give one file")
    index = args.index(option)
    if index + 1 == len(args):
        raise BadLaunch(f"The command ends with {option}", advice="Name the file after it")
    return tuple(_options_in(Path(folder, args[index + 1]), option)), ()


def without_config(args: tuple[str, ...], option: str | None) -> tuple[str, ...]:
    """Return the arguments without ``--config FILE``."""
    if option is None or option not in args:
        return args
    index = args.index(option)
    return (*args[:index], *args[index + 2 :])


def _options_in(file: Path, option: str) -> Iterator[str]:
    for key, value in _mapping_in(file, option).items():
        if not isinstance(key, str) or not key:
            raise BadLaunch(
                f"{option} {file}: {key!r} is no name of an option",
                advice="Its keys are the server's long options without the dashes",
            )
        if isinstance(value, bool):
            # False is left out: what an engine makes of it (--no-KEY, or nothing) takes an option away.
            yield from (f"--{key}",) if value else ()
        elif isinstance(value, list):
            yield from (f"--{key}", *(_text(one, file, option) for one in value)) if value else ()
        else:
            yield from (f"--{key}", _text(value, file, option))


def _mapping_in(file: Path, option: str) -> dict[object, object]:
    if file.suffix.lower() not in {".yaml", ".yml"}:
        raise BadLaunch(f"{option} {file} is refused by the server", advice="Its name must end in .yaml or .yml")
    try:
        if not file.is_file():
            raise BadLaunch(f"{option} {file}: there is no such file", advice="Check its path, and cwd=")
        if file.stat().st_size > _LARGEST:
            raise BadLaunch(
                f"{option} {file} is larger than {_LARGEST} bytes", advice="Check that it is the right file"
            )
        text = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        raise BadLaunch(f"{option} {file} cannot be read: {problem}", advice="Check its permissions") from None
    read = _parsed(text, file, option)
    if read is None:
        return {}
    if not isinstance(read, dict):
        raise BadLaunch(
            f"{option} {file} holds no mapping at its top",
            advice="Write 'option: value', one a line, the options without their dashes",
        )
    _count(read, file, option)
    return read


def _parsed(text: str, file: Path, option: str) -> object:
    try:
        import yaml  # noqa: PLC0415 - an extra, and only those pay for it who use such a file
    except ImportError:
        raise BadLaunch(
            f"{option} {file} cannot be read: PyYAML is not installed beside hangguard",
            advice="pip install 'hangguard[config]', or give host, port, model and key as options instead",
        ) from None

    class Loader(yaml.SafeLoader):
        """Stops before a few lines take all memory: what a running server names may be anything."""

        aliases = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.aliases += self.check_event(yaml.AliasEvent)
            if self.aliases > _MOST_ALIASES:
                raise yaml.YAMLError("it has too many aliases")
            return super().compose_node(parent, index)

        def flatten_mapping(self, node: Any) -> None:
            super().flatten_mapping(node)
            if len(node.value) > _MOST_PAIRS:
                raise yaml.YAMLError("it stands for too many values")

    try:
        read: object = yaml.load(text, Loader=Loader)  # noqa: S506 - a safe loader
    except (yaml.YAMLError, ValueError, RecursionError) as problem:
        raise BadLaunch(f"{option} {file} is no YAML: {_said(problem)}", advice="Correct the file") from None
    return read


def _said(problem: Exception) -> str:
    """Return what is wrong and where, without the words of the file that PyYAML cites: one may be a key."""
    mark = getattr(problem, "problem_mark", None)
    if isinstance(problem, (ValueError, RecursionError)):
        return "a value in it cannot be read" if isinstance(problem, ValueError) else "it is nested too deep"
    if mark is None:
        return " ".join(str(problem).split())
    said = re.sub(r"'[^']*'|\"[^\"]*\"", "a word", str(getattr(problem, "problem", "") or "it cannot be read"))
    return f"line {mark.line + 1}, column {mark.column + 1}: {said}"


def _count(read: object, file: Path, option: str) -> None:
    """Refuse what grows without bound when its aliases are written out, or goes round in a circle."""
    waiting, seen = [read], 0
    while waiting:
        seen += 1
        value = waiting.pop()
        if seen > _MOST_VALUES:
            raise BadLaunch(f"{option} {file} stands for too many values", advice="Write its aliases out")
        if isinstance(value, dict):
            waiting += value.values()
        elif isinstance(value, list):
            waiting += value


def _text(value: object, file: Path, option: str) -> str:
    try:
        return json.dumps(value, default=str) if isinstance(value, (dict, list)) else str(value)
    except (ValueError, TypeError):  # more digits than Python writes; a mapping whose keys are no text
        raise BadLaunch(f"{option} {file} holds a value that cannot be written", advice="Correct the file") from None
