"""What good starts have taught: how long each phase stood still in a start that became ready.

A small file in the user's state folder. It only ever lengthens patience, and losing it loses nothing but that. An
entry is kept by everything that makes two starts comparable: engine, version, model, flags, GPUs, driver, host.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hangguard.changes import without_flag
from hangguard.facts import PHASES, Gpu, Launch, Phase, Unseen
from hangguard.store import state_folder, why_not_for_root, write_private

log = logging.getLogger("hangguard")

SCHEMA = 1

GOOD_STARTS = 3
"""Fewer starts than this teach nothing yet: one slow start may have had a slow disk."""

MOST_ENTRIES = 200
MOST_BYTES = 1 << 20

_OF_ONE_RUN = ("--host", "--port", "--api-key", "--uds", "--served-model-name")
_STEERING = ("CUDA_", "NCCL_", "VLLM_", "SGLANG_", "SGL_", "TORCH_", "PYTORCH_", "GLOO_", "HF_", "TRITON_")
"""Flags that change nothing of how a start goes, and variables that do."""

Stretches = tuple[tuple[Phase, float], ...]
"""(phase, longest seconds without movement that ended by itself)."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """What is known of the good starts of one kind."""

    starts: int = 0
    still: Stretches = ()

    def after(self, start: Stretches) -> Lesson:
        """Return the lesson after one more good start.

        A longer stretch counts whole, a shorter one brings the old value half-way down: caches get warm, and one
        hour with a slow disk should not be paid for for ever.
        """
        known, seen = dict(self.still), dict(start)
        still = {phase: _merged(known.get(phase, 0.0), seen.get(phase, 0.0)) for phase in PHASES}
        return Lesson(self.starts + 1, tuple((phase, seconds) for phase, seconds in still.items() if seconds > 0.0))

    @property
    def patience(self) -> Stretches:
        """Return the stretches by which patience is lengthened: none before there were enough starts."""
        return self.still if self.starts >= GOOD_STARTS else ()


def _merged(known: float, seen: float) -> float:
    return seen if seen >= known else (known + seen) / 2


def key_of(launch: Launch, gpus: tuple[Gpu, ...] | Unseen, driver: str = "") -> str:
    """Return the name under which starts like this one are remembered; nothing can be read back from it."""
    boards = ("unseen",) if isinstance(gpus, Unseen) else tuple(gpu.name for gpu in gpus)
    argv = without_flag(launch, *_OF_ONE_RUN).argv
    steering = tuple(f"{name}={value}" for name, value in launch.env if name.startswith(_STEERING))
    parts = (launch.engine, launch.version, launch.model, argv, steering, boards, driver, platform.node())
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def driver_version() -> str:
    """Return what the NVIDIA kernel module says of itself; "" where there is none. Raises :class:`OSError`."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="ascii", errors="replace").partition("\n")[0]
    except FileNotFoundError:
        return ""


def default_path() -> str | None:
    """Return where the lessons are kept; ``None``: this user has no home, or root has somebody else's."""
    folder = state_folder()
    if folder is None or why_not_for_root(Path(folder)):
        return None
    return str(Path(folder) / "learned.json")


def read_lesson(path: str, key: str) -> Lesson:
    """Return what is known; nothing where the file is not there, is not ours, or cannot be understood."""
    entry = _read(path).get(key)
    return _lesson_of(entry) if entry is not None else Lesson()


def note_start(path: str, key: str, start: Stretches) -> Lesson:
    """Add one good start, and return what is known now.

    A file that cannot be understood is kept beside the new one. Two programs that write in the same instant lose one
    of the two starts. Raises :class:`OSError` where the file cannot be written.
    """
    entries = _read(path, keep_broken=True)
    lesson = _lesson_of(entries.get(key, {})).after(start)
    entries[key] = {"starts": lesson.starts, "still": dict(lesson.still), "at": time.time()}
    newest = sorted(entries.items(), key=lambda item: _number(item[1].get("at")), reverse=True)[:MOST_ENTRIES]
    folder = Path(path).parent
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_private(path, json.dumps({"schema": SCHEMA, "starts": dict(newest)}, indent=1).encode())
    return lesson


def _read(path: str, *, keep_broken: bool = False) -> dict[str, dict[str, Any]]:
    try:
        with open(path, "rb", opener=_open_safely) as file:
            if os.fstat(file.fileno()).st_uid != os.geteuid():
                return {}
            text = file.read(MOST_BYTES)
    except OSError:
        return {}
    try:
        document = json.loads(text)
        entries = document["starts"] if document["schema"] == SCHEMA else None
    except (ValueError, LookupError, TypeError, RecursionError):
        entries = None
    if isinstance(entries, dict):
        return {key: entry for key, entry in entries.items() if isinstance(entry, dict)}
    if keep_broken:
        log.warning("%s cannot be understood: it is kept as %s.broken, and learning begins anew", path, path)
        os.replace(path, f"{path}.broken")  # noqa: PTH105
    return {}


def _open_safely(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)


def _lesson_of(entry: Mapping[str, Any]) -> Lesson:
    still = entry.get("still")
    known = still if isinstance(still, dict) else {}
    stretches: Stretches = tuple((phase, _number(known.get(phase))) for phase in PHASES)
    return Lesson(int(_number(entry.get("starts"))), tuple(s for s in stretches if s[1] > 0.0))


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return 0.0
    try:
        return float(value) if math.isfinite(value) and value > 0.0 else 0.0
    except OverflowError:  # an integer of more than 308 digits
        return 0.0
