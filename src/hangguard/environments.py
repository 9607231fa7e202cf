"""Where ``uv run``, ``conda run`` and their like find the interpreter, read from files; none of them is asked."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

from hangguard.wrappers import Layer, option_of

_LARGEST_LIST = 1024 * 1024


def folder_behind(argv: tuple[str, ...], layer: Layer, cwd: str) -> str:
    """Return the working directory behind this wrapper."""
    options = {
        "env": ("-C", "--chdir"),
        "uv": ("--directory",),
        "poetry": ("-C", "--directory"),
        "conda": ("--cwd",),
        "mamba": ("--cwd",),
        "micromamba": ("--cwd",),
        "systemd-run": ("--working-directory",),
        "sudo": ("-D", "--chdir"),
    }.get(layer.wrapper.name, ())
    return os.path.join(cwd, option_of(argv, layer, *options) or "")  # noqa: PTH118 - may be relative


def programs_of(argv: tuple[str, ...], layer: Layer, env: Mapping[str, str], cwd: str) -> Path | None:
    """Return the folder of programs that the wrapper puts first; ``None``: it was not found."""
    match layer.wrapper.python:
        case "uv":
            candidates = _of_uv(argv, layer, env, cwd)
        case "venv":
            candidates = _of_project(option_of(argv, layer, "-C", "--directory", "-p", "-P", "--project"), env, cwd)
        case "pixi":
            candidates = _of_pixi(argv, layer, cwd)
        case "conda":
            candidates = _of_conda(argv, layer, env, cwd)
        case _:
            return None
    found = (candidate / "bin" for candidate in candidates)
    return next((folder for folder in found if folder.is_dir()), None)


def _of_uv(argv: tuple[str, ...], layer: Layer, env: Mapping[str, str], cwd: str) -> Iterator[Path]:
    """Yield the project's environment, else the active one, else the nearest ``.venv`` (docs.astral.sh/uv)."""
    own = argv[layer.start : layer.stop]
    active = env.get("VIRTUAL_ENV")
    if "--active" in own and active:
        yield Path(cwd, active)
    project = None
    if "--no-project" not in own:
        project = _above(Path(cwd, option_of(argv, layer, "--project") or ""), "pyproject.toml")
    if project is not None:
        yield Path(project, env.get("UV_PROJECT_ENVIRONMENT") or ".venv")
        return
    if active:
        yield Path(cwd, active)
    nearest = _above(Path(cwd), ".venv")
    if nearest is not None:
        yield nearest / ".venv"


def _of_project(project: str | None, env: Mapping[str, str], cwd: str) -> Iterator[Path]:
    """Yield the active environment, else the project's own ``.venv`` (poetry, pdm and pipenv alike).

    One that such a tool keeps elsewhere, under a name made of a hash, is not looked for.
    """
    active = env.get("VIRTUAL_ENV")
    if active:
        yield Path(cwd, active)
    folder = _above(Path(cwd, project or ""), ".venv")
    if folder is not None:
        yield folder / ".venv"


def _of_pixi(argv: tuple[str, ...], layer: Layer, cwd: str) -> Iterator[Path]:
    name = option_of(argv, layer, "-e", "--environment") or "default"
    manifest = option_of(argv, layer, "-m", "--manifest-path")
    start = Path(cwd, manifest) if manifest else Path(cwd)
    folder = _above(start if start.is_dir() else start.parent, ".pixi")
    if folder is not None and _is_a_name(name):
        yield folder / ".pixi" / "envs" / name


def _of_conda(argv: tuple[str, ...], layer: Layer, env: Mapping[str, str], cwd: str) -> Iterator[Path]:
    """Yield where conda, mamba and micromamba keep an environment of this name, or the prefix that was given."""
    prefix = option_of(argv, layer, "-p", "--prefix")
    name = option_of(argv, layer, "-n", "--name")
    if prefix is not None:
        yield Path(cwd, prefix)
        return
    if name is not None and "/" in name:
        yield Path(cwd, name)
        return
    roots = list(_roots_of_conda(argv, layer, env, cwd))
    if name is None:
        active = env.get("CONDA_PREFIX")
        yield from [Path(active)] if active else roots
        return
    if name == "base":
        yield from roots
    if not _is_a_name(name):
        return
    for folder in filter(None, env.get("CONDA_ENVS_PATH", env.get("CONDA_ENVS_DIRS", "")).split(os.pathsep)):
        yield Path(folder, name)
    for root in roots:
        yield root / "envs" / name
    home = Path(env.get("HOME", "/nonexistent"))
    yield home / ".conda" / "envs" / name
    for line in _lines(home / ".conda" / "environments.txt"):  # every environment that conda made, one a line
        if line.rsplit("/", 1)[-1] == name:
            yield Path(line)


def _roots_of_conda(argv: tuple[str, ...], layer: Layer, env: Mapping[str, str], cwd: str) -> Iterator[Path]:
    given = option_of(argv, layer, "-r", "--root-prefix") or env.get("MAMBA_ROOT_PREFIX")
    if given:
        yield Path(cwd, given)
    word = argv[layer.start]
    program = word if "/" in word else shutil.which(word, path=env.get("PATH", os.defpath))
    for path in (program, env.get("CONDA_EXE"), env.get("MAMBA_EXE")):
        if path:
            yield Path(cwd, path).parent.parent  # bin/conda, condabin/conda
    home = Path(env.get("HOME", "/nonexistent"))
    yield from (home / "micromamba", home / ".local/share/mamba")


def _is_a_name(name: str) -> bool:
    return "/" not in name and name not in {"", ".", ".."}


def _above(start: Path, name: str) -> Path | None:
    """Return the nearest folder, from here upwards, that has an entry of this name."""
    start = Path(os.path.normpath(start))
    return next((folder for folder in (start, *start.parents) if (folder / name).exists()), None)


def _lines(file: Path) -> list[str]:
    try:
        if not file.is_file() or file.stat().st_size > _LARGEST_LIST:
            return []
        return file.read_text("utf-8", "replace").split("\n")
    except OSError:
        return []
