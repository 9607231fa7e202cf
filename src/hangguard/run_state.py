"""The state file of a run: written whole at every change, read with distrust.

Whoever reads it may be root, and whoever wrote it may be anybody: so the folder must be the reader's own and closed to
others, the file regular, the reader's own and without a second name, and every field of the type that it should have.
What it says is a hint all the same. The kernel is asked again before anything is signalled or removed.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import stat
import types
import typing
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from hangguard.facts import FoundRun, Place, RunState, RunStatus, Unseen
from hangguard.observe.procfs import read_started
from hangguard.store import RUN_ID, TEMPORARY, RunFolder, places_of_runs, write_private

STATE = "state.json"
SCHEMA = 1
MOST_BYTES = 16 << 20
"""Of a state file: ten thousand files of members are a tenth of that."""
MOST_RUNS = 500
"""The newest folders of one place; their names begin with the time of their start."""

_NUMBERS = range(-(1 << 63), 1 << 64)
"""What the kernel counts in: with a larger one for a pid there is not even a path in ``/proc`` to ask about."""

T = TypeVar("T")


def this_place() -> Place:
    """Return where this process runs. Raises :class:`OSError` where ``/proc`` does not tell."""
    return Place(
        host=os.uname().nodename,
        boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
        pid_namespace=str(Path("/proc/self/ns/pid").readlink()),
        user=os.geteuid(),
        first_started=_first_started(),
        shared_memory=_shared_memory(),
    )


def _first_started() -> int | None:
    try:
        return read_started(1)
    except (OSError, ValueError, IndexError):
        return None


def _shared_memory() -> str | None:
    """Return which file system /dev/shm is, through whatever mount it is seen.

    A new tmpfs gets the device number and the mount id of one that is gone, and numbers its files from 2 again; its
    ``f_fsid`` is made of a random UUID (mm/shmem.c, Linux 5.13). Before 5.9 inodes were numbered for all of the kernel,
    also that of the root, which is 1 since. In between nothing tells.
    """
    try:
        found, system = os.stat("/dev/shm"), os.statvfs("/dev/shm")  # noqa: PTH116, S108 - nothing is made there
    except OSError:
        return None
    if system.f_fsid == 0 and found.st_ino == 1:
        return None
    return f"{found.st_dev}:{system.f_fsid:x}" if system.f_fsid else f"{found.st_dev}:root {found.st_ino}"


def write_state(folder: RunFolder, state: RunState) -> None:
    """Write it in place of the last one. Blocks. Raises :class:`OSError`; the last one is whole then."""
    path = folder.file(STATE)
    if path is not None:
        text = json.dumps({"schema": SCHEMA, **asdict(state)}, ensure_ascii=True)
        write_private(path, text.encode())


def list_runs(run_dir: str | os.PathLike[str] | None = None) -> tuple[FoundRun, ...]:
    """Return the runs below ``run_dir``, else those of this user's state folder; the newest first.

    Blocks. Raises :class:`OSError` for a folder that is there and cannot be listed.
    """
    return tuple(map(read_run, run_folders(run_dir)))


def run_folders(run_dir: str | os.PathLike[str] | None = None) -> tuple[str, ...]:
    """Return the folders of those runs. Blocks; raises as :func:`list_runs`."""
    return tuple(_folders(run_dir)[:MOST_RUNS])


def find_run(name: str, run_dir: str | os.PathLike[str] | None = None) -> FoundRun | tuple[FoundRun, ...] | Unseen:
    """Return the run of this name: its id, the beginning of its id, or the path of its folder.

    Several, newest first, where a beginning is that of several; unseen where there is none. Blocks; never raises.
    """
    try:
        if os.sep not in name:
            folders = [folder for folder in _folders(run_dir) if name and Path(folder).name.startswith(name)]
            whole = [folder for folder in folders if Path(folder).name == name]
            found = tuple(map(read_run, (whole or folders)[:MOST_RUNS]))
            if found:
                return found[0] if len(found) == 1 else found
        if name and Path(name).is_dir():
            path = Path(name).absolute()
            if not RUN_ID.fullmatch(path.name) and not os.path.lexists(path / STATE):
                return Unseen(f"{name} is no run folder: no {STATE} is seen in it")
            return read_run(str(path))
    except (OSError, ValueError) as problem:
        return Unseen(f"{getattr(problem, 'filename', None) or name}: {getattr(problem, 'strerror', None) or problem}")
    where = f" in {places_of_runs(run_dir)[0]}" if os.sep not in name else ""
    return Unseen(f"there is no run {name!r}{where}")


def name_for(path: str) -> str:
    """Return how a run is called on a command line: by its id where it lies in the user's state folder."""
    folder = Path(path)
    return folder.name if str(folder.parent) == places_of_runs()[0] else shlex.quote(path)


def _folders(run_dir: str | os.PathLike[str] | None) -> list[str]:
    """Return the folders with the names of runs, newest first; then those that had to be made in a temporary place."""
    base, *others = places_of_runs(run_dir)
    names = sorted(filter(RUN_ID.fullmatch, os.listdir(base)), reverse=True) if Path(base).is_dir() else []  # noqa: PTH208
    found = [str(Path(base) / name) for name in names]
    if run_dir is None:
        temporary = next((Path(place) for place in others if Path(place).is_dir()), None)
        found += map(str, temporary.glob(f"{TEMPORARY}*/{STATE}") if temporary is not None else ())
    return [folder.removesuffix(f"/{STATE}") for folder in found]


def read_run(path: str) -> FoundRun:
    """Return the run whose folder this is, with its state or the reason why that is not to be had. Never raises."""
    run_id = Path(path).name
    try:
        with opened_privately(path) as folder:
            state = _parse(_read(folder))
        # A temporary folder has a name of its own; another run's state was copied, and what it says of locks is wrong.
        if state.run_id != run_id and RUN_ID.fullmatch(run_id):
            raise ValueError(f"it is that of {state.run_id[:60]!r}")  # noqa: TRY301
    except OSError as problem:
        return FoundRun(run_id=run_id, path=path, state=Unseen(problem.strerror or str(problem)))
    except (ValueError, RecursionError) as problem:
        return FoundRun(run_id=run_id, path=path, state=Unseen(f"its state file is damaged: {problem}"))
    return FoundRun(run_id=state.run_id, path=path, state=state)


def why_elsewhere(state: RunState, here: Place) -> str:
    """Return why the numbers in a state mean nothing in this place; empty: they do."""
    there = state.place
    if there.user != here.user:
        return f"it is a run of user {there.user}, and this is user {here.user}"
    if there.host != here.host and there.boot_id != here.boot_id:
        return f"it ran on {there.host}, and this is {here.host}"
    if there.boot_id != here.boot_id:
        return "the machine was started again since"
    firsts = {there.first_started, here.first_started} - {None}
    if there.pid_namespace != here.pid_namespace or len(firsts) > 1:
        return "it ran in another pid namespace (another container), where its pids mean other processes"
    return ""


def is_same_memory(state: RunState, here: Place) -> bool | None:
    """Return whether /dev/shm is here the file system that the run had; ``None``: nobody can tell.

    In a container that was started again, or has a /dev/shm of its own, a noted (device, inode) is another file.
    """
    there = state.place
    if there.shared_memory is None or here.shared_memory is None:
        return None
    return there.shared_memory == here.shared_memory


def read_status(document: object) -> RunStatus:
    """Return the status that a supervisor has told. Raises :class:`ValueError` for anything else."""
    return _made(RunStatus, document, "status")


# ----------------------------------------------------------------------------------------- reading


@contextmanager
def opened_privately(path: str) -> Iterator[int]:
    """Open the folder of a run. Raises :class:`OSError` where it is not this user's, or others may enter it."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    folder = os.open(path, flags)
    try:
        status = os.fstat(folder)
        if status.st_uid != os.geteuid():
            raise PermissionError(0, f"its folder belongs to user {status.st_uid}")
        if stat.S_IMODE(status.st_mode) & 0o077:
            raise PermissionError(0, "its folder is open to others, who could have planted anything in it")
        yield folder
    finally:
        os.close(folder)


def _read(folder: int) -> bytes:
    try:
        # O_NONBLOCK: a pipe in its place would wait for a writer.
        file = os.open(STATE, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=folder)
    except FileNotFoundError:
        raise FileNotFoundError(0, "it has no state file") from None
    with os.fdopen(file, "rb") as opened:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_uid != os.geteuid():
            raise PermissionError(0, "its state file is not a regular file of this user")
        # None: it was replaced since it was opened, by its run, and is whole.
        if status.st_nlink > 1 or status.st_mode & 0o022:
            raise PermissionError(0, "its state file has another name, or others may write to it")
        if status.st_size > MOST_BYTES:
            raise ValueError(f"it is {status.st_size >> 20} MiB large")
        return opened.read(MOST_BYTES)


def _parse(content: bytes) -> RunState:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):  # where in it the parser gave up helps nobody
        raise ValueError("it is no JSON") from None
    if not isinstance(document, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - all damage is one error
    if document.pop("schema", None) != SCHEMA:
        raise ValueError("another version of hangguard wrote it, whose format is not known here")
    return _made(RunState, document, "state")


def _made(kind: type[T], document: object, where: str) -> T:
    """Return the dataclass of these values: each of the type that it should have, and none that is not known."""
    if not isinstance(document, Mapping):
        raise ValueError(f"{where} is no object")  # noqa: TRY004
    hints = _hints(typing.cast("Any", kind))
    if unknown := sorted(set(document) - hints.keys()):
        raise ValueError(f"{where} has a field {unknown[0][:60]!r} that is not known here")
    values = {name: _value(hints[name], value, f"{where}.{name}") for name, value in document.items()}
    try:
        return kind(**values)
    except TypeError:
        raise ValueError(f"{where} is not whole") from None


@cache
def _hints(kind: type[Any]) -> dict[str, Any]:
    """Return the types of a dataclass's fields. They are compiled from text: 0.1 ms, for each of thousands of files."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(kind)}


def _value(kind: Any, value: object, where: str) -> object:
    """Return a value of JSON as the type that it should have. Raises :class:`ValueError`."""
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        if value in parts:
            return value
    elif origin in {types.UnionType, typing.Union}:
        if value is None and type(None) in parts:
            return None
        return _value(next(part for part in parts if part is not type(None)), value, where)
    elif origin is tuple and isinstance(value, list):
        kinds = [parts[0]] * len(value) if parts[1:] == (Ellipsis,) else list(parts)
        if len(kinds) == len(value):
            return tuple(_value(one, each, where) for one, each in zip(kinds, value, strict=True))
    elif is_dataclass(kind):
        return _made(typing.cast("type[object]", kind), value, where)
    elif kind is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        with suppress(OverflowError):
            if math.isfinite(value):  # JSON as Python reads it has NaN, Infinity and 1e999
                return float(value)
    elif kind is int and type(value) is int:
        if value in _NUMBERS:
            return value
    elif kind in {str, bool} and type(value) is kind:
        return value
    raise ValueError(f"{where} is {str(value)[:60]!r}")
