"""What the guardian is told of a launch, and what its refusal means."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hangguard.elsewhere import Elsewhere
from hangguard.errors import CommandNotExecutable, CommandNotFound, GuardianFailed, HangguardError


def launch_message(
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    log_path: str | None,
    lock_path: str | None,
    death_grace: float,
    on_death: str,
    pristine: bool,
    port: int | None,
    elsewhere: Elsewhere,
) -> dict[str, Any]:
    """Return the message that starts ``argv``. The arguments are those of :func:`hangguard.act.spawn.guarded`."""
    return {
        "do": "launch",
        "argv": [_text(part) for part in argv],
        "env": {_text(name): _text(value) for name, value in env.items()},
        "cwd": _path_text(cwd),
        "log_path": None if log_path is None else _path_text(log_path),
        "lock_path": None if lock_path is None else _path_text(lock_path),
        "death_grace": death_grace,
        "on_death": on_death,
        "pristine": pristine,
        "port": port,
        "elsewhere": elsewhere.carried(),
    }


def _text(value: str) -> str:
    """Carry the bytes that the operating system would get: the guardian has no locale of ours."""
    return os.fsencode(value).decode("latin-1")


def _path_text(path: str) -> str:
    return _text(str(Path(path).absolute()))  # the guardian stands in /


def refusal(answer: Mapping[str, Any]) -> HangguardError:
    """Return what is raised for an answer that is no launch; empty: there was none."""
    if answer.get("say") != "failed":
        problem = answer.get("problem") or ("it ended at once" if not answer else f"it said {answer}")
        return GuardianFailed(problem)
    number, problem = answer["errno"], answer["problem"]
    path = os.fsdecode(answer["path"].encode("latin-1"))
    if answer["what"] in {"log", "lock"}:
        return GuardianFailed(f"the {answer['what']} {path!r} cannot be used: {problem}")
    if answer["what"] == "directory":
        if number == errno.EACCES:
            return CommandNotExecutable(path, problem="the working directory may not be entered")
        return CommandNotFound(path, what="directory")
    if number in {errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE}:  # nothing is wrong with the program
        return GuardianFailed(f"{path!r} could not be started: {problem} (a limit of processes, memory or files)")
    if number in {errno.ENOENT, errno.ENOTDIR}:
        if os.sep in path and Path(path).exists():
            return CommandNotExecutable(path, problem="the interpreter named in its first line does not exist")
        return CommandNotFound(path)
    return CommandNotExecutable(path, problem=problem.lower())
