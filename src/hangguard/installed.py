"""What is installed, read from files: the version of the engine that a command will run, and its options.

Nothing is executed: an engine's ``--version`` imports for a minute and may touch the GPU.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from hangguard.engines.base import Engine
from hangguard.engines.common import PYTHON
from hangguard.environments import folder_behind, programs_of
from hangguard.wrappers import unwrap, variables_behind

_LARGEST_SOURCE = 4 * 1024 * 1024
_MOST_SOURCES = 200

# A whole quoted literal, as in add_argument("--enforce-eager"); mentions inside help texts do not count.
_LITERAL = re.compile(r"""["'](--[a-z0-9][a-z0-9-]*)["']""")
# SGLang since 0.5.1x: `disable_custom_all_reduce: A[bool, Arg(…)] = False`, made into --disable-custom-all-reduce
# unless Arg says no_cli (arg_groups/arg_utils.py); vLLM's front end likewise from plain fields in cli_args.py.
_ARG_FIELD = re.compile(
    r"^    ([a-z][a-z0-9_]*): A\[(.*?)(?=^    [a-z_][a-z0-9_]*: |^\S|^    def |\Z)", re.MULTILINE | re.DOTALL
)
_PLAIN_FIELD = re.compile(r"^    ([a-z][a-z0-9_]*): [^=\n]+=", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Installed:
    """What was found; ``None`` with a note where it was not."""

    version: str | None = None
    options: frozenset[str] | None = None
    notes: tuple[str, ...] = ()


def find_installed(engine: Engine, argv: tuple[str, ...], env: Mapping[str, str], cwd: str) -> Installed:
    """Look for the engine where the interpreter that will run it looks."""
    if not engine.distributions or engine.recognise(argv) is None:
        return Installed()
    behind = _behind_wrappers(argv, env, cwd)
    if isinstance(behind, Installed):
        return behind
    env, cwd = behind
    for site in _site_folders(argv[unwrap(argv).start], env, cwd):
        version = _version_in(site, engine.distributions)
        if version is not None:
            options = _options_in(site, engine.option_sources)
            notes = () if options else (f"the options of {engine.name} {version} were not found in its source",)
            return Installed(version, options, notes)
    return Installed(notes=(f"the version of {engine.name} was not found beside the Python that will run it",))


def versions_beside(
    engine: Engine, argv: tuple[str, ...], env: Mapping[str, str], cwd: str, names: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    """Return the versions of these distributions, found where the engine itself is."""
    behind = _behind_wrappers(argv, env, cwd)
    if isinstance(behind, Installed):
        return ()
    env, cwd = behind
    for site in _site_folders(argv[unwrap(argv).start], env, cwd):
        if _version_in(site, engine.distributions) is not None:
            found = ((name, _version_in(site, (name,))) for name in (*engine.distributions, *names))
            return tuple((name, version) for name, version in found if version is not None)
    return ()


# ----------------------------------------------------------------------------------------- interpreters


def _behind_wrappers(
    argv: tuple[str, ...], env: Mapping[str, str], cwd: str
) -> tuple[Mapping[str, str], str] | Installed:
    """Return environment and directory of the server behind its wrappers; nothing found where one of them hides it."""
    env = variables_behind(argv, env)
    for layer in unwrap(argv).layers:
        cwd = folder_behind(argv, layer, cwd)
        if layer.wrapper.python == "hidden":
            return Installed()  # the wrapper's own note says so
        if layer.wrapper.python != "path":
            programs = programs_of(argv, layer, env, cwd)
            if programs is None:
                shown = layer.wrapper.shown
                return Installed(notes=(f"the environment of {shown} was not found: the version is not known",))
            env = {**env, "PATH": f"{programs}{os.pathsep}{env.get('PATH', os.defpath)}"}
    return env, cwd


def _site_folders(word: str, env: Mapping[str, str], cwd: str) -> Iterator[Path]:
    """Yield the folders in which that interpreter looks for packages, first one first."""
    for part in env.get("PYTHONPATH", "").split(os.pathsep):
        if part:
            yield Path(cwd, part)
    python = _interpreter(word, env, cwd)
    if python is not None:
        yield from _sites_of(python, env)


def _interpreter(word: str, env: Mapping[str, str], cwd: str) -> Path | None:
    found = _which(word, env, cwd)
    if found is None:
        return None
    if "shims" in found.parts:  # pyenv's: a shell script that looks for the version in force
        found = _behind_shim(found, env, cwd)
        if found is None:
            return None
    if PYTHON.fullmatch(found.name):
        return found
    return _of_shebang(found, env, cwd)


def _which(word: str, env: Mapping[str, str], cwd: str) -> Path | None:
    if "/" in word:
        return Path(cwd, word)
    found = shutil.which(word, path=env.get("PATH", os.defpath))
    return Path(cwd, found) if found else None


def _of_shebang(script: Path, env: Mapping[str, str], cwd: str) -> Path | None:
    """Return the interpreter of a console script.

    Its first line is ``#!/venv/bin/python`` or ``#!/usr/bin/env python3``; where the path is too long for that,
    pip writes ``#!/bin/sh`` and ``'''exec' "/a long path/python"`` in the second.
    """
    lines = (_read(script, 2048, only_start=True) or "").splitlines()[:2]
    if not lines or not lines[0].startswith("#!"):
        return None
    words = lines[0][2:].split()
    if words and words[0].endswith("/env"):
        words = [word for word in words[1:] if not word.startswith("-")]
        return _which(words[0], env, cwd) if words and PYTHON.fullmatch(words[0]) else None
    long_path = re.match(r"""'''exec' ["']?([^"']+?)["']? "\$0\"""", lines[1]) if len(lines) > 1 else None
    path = long_path[1] if long_path else words[0] if words else ""
    return Path(path) if PYTHON.fullmatch(Path(path).name) else None


def _behind_shim(shim: Path, env: Mapping[str, str], cwd: str) -> Path | None:
    root = shim.parent.parent
    version = env.get("PYENV_VERSION", "").split(":")[0]
    files = [*(folder / ".python-version" for folder in (Path(cwd), *Path(cwd).parents)), root / "version"]
    for file in files:
        if version:
            break
        version = (_read(file, 4096) or "").strip().split("\n")[0].strip()
    found = root / "versions" / version / "bin" / shim.name
    return found if version and found.exists() else None


def _sites_of(python: Path, env: Mapping[str, str]) -> Iterator[Path]:
    prefix = python.parent.parent
    config = _read(prefix / "pyvenv.cfg", 64 * 1024)
    if config is None:
        try:
            prefix = python.resolve().parent.parent
        except (OSError, RuntimeError):  # RuntimeError: a symlink loop, before Python 3.13
            return
        if "PYTHONNOUSERSITE" not in env:
            yield from _libraries(Path(env.get("HOME", "/nonexistent"), ".local"), python.name)
    yield from _libraries(prefix, python.name)
    if config is not None and re.search(r"(?mi)^include-system-site-packages\s*=\s*true", config):
        home = re.search(r"(?mi)^home\s*=\s*(.+?)\s*$", config)
        if home:
            yield from _libraries(Path(home[1]).parent, python.name)


def _libraries(prefix: Path, python: str) -> Iterator[Path]:
    exact = re.search(r"\d+\.\d+", python)
    name = f"python{exact[0]}" if exact else "python3*"
    for lib in ("lib", "lib64", "local/lib"):
        for folder in sorted(prefix.glob(f"{lib}/{name}")):
            yield from (folder / "site-packages", folder / "dist-packages")
    yield prefix / "lib/python3/dist-packages"  # Debian's own


# ---------------------------------------------------------------------------------- versions and options


def _version_in(site: Path, distributions: tuple[str, ...]) -> str | None:
    try:
        names = [name for name in os.listdir(site) if name.endswith(".dist-info")]  # noqa: PTH208
    except OSError:
        return None
    for wanted in distributions:
        for name in sorted(names):
            project, _, version = name.removesuffix(".dist-info").partition("-")
            if _normal(project) == _normal(wanted):
                said = re.search(r"(?mi)^Version:\s*(\S+)", _read(site / name / "METADATA", 64 * 1024) or "")
                return said[1] if said else version or None
    return None


def _normal(project: str) -> str:
    return re.sub(r"[-_.]+", "-", project).lower()


def _options_in(site: Path, sources: tuple[str, ...]) -> frozenset[str] | None:
    found: set[str] = set()
    files = [file for source in sources for file in sorted(site.glob(source))]
    for file in files[:_MOST_SOURCES]:
        text = _read(file, _LARGEST_SOURCE)
        if text is None:
            continue
        found.update(_LITERAL.findall(text))
        fields = [name for name, rest in _ARG_FIELD.findall(text) if "no_cli=True" not in rest]
        if file.name == "cli_args.py":
            fields += _PLAIN_FIELD.findall(text)
        found.update("--" + name.replace("_", "-") for name in fields)
    return frozenset(found) or None


def _read(file: Path, most: int, *, only_start: bool = False) -> str | None:
    """Return the text of a regular file; ``None``: it is none, or larger than this and not only its start is wanted."""
    try:
        if not file.is_file():  # before it is opened: that of a device may do something
            return None
        with open(file, "rb", opener=_without_waiting) as opened:
            status = os.fstat(opened.fileno())
            if not stat.S_ISREG(status.st_mode) or (status.st_size > most and not only_start):
                return None
            return opened.read(most).decode("utf-8", "replace")
    except OSError:
        return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)
