"""Where a model lies: as a path, or in a hub's cache on this disk. Nobody is asked over a network. Blocks."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from pathlib import Path

from hangguard.facts import ModelFiles
from hangguard.observe.rooms import filesystem_of

_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?", re.ASCII)
_READ_FIRST = ("config.json", "params.json")
"""What both engines read first of a folder; the second is Mistral's own form. A GGUF model is one file."""


def find_model(name: str, folder: str, hubs: Iterable[str]) -> ModelFiles:
    """Look for a model as an engine does: a path that exists wins over a name in a hub.

    ``folder`` is the working directory, ``hubs`` are folders of ``models--ORGANISATION--NAME``.
    """
    path = Path(folder, name)  # a leading ~ is nobody's but a shell's
    is_url = "://" in name
    if not is_url and os.path.lexists(path) and path.exists():
        whole = not path.is_dir() or any((path / file).exists() for file in _READ_FIRST)
        return ModelFiles(name=name, is_path=True, exists=True, has_config=whole, filesystem=filesystem_of(str(path)))
    if is_url or not _HUB_NAME.fullmatch(name) or name.startswith("."):
        return ModelFiles(name=name, is_path=not is_url, exists=False)
    cached = (Path(hub, f"models--{name.replace('/', '--')}") for hub in hubs)
    found = next((place for place in cached if _has_a_snapshot(place)), None)
    kind = filesystem_of(str(found)) if found is not None else ""
    return ModelFiles(name=name, is_path=False, exists=found is not None, filesystem=kind)


def _has_a_snapshot(place: Path) -> bool:
    """``snapshots/REVISION/config.json`` (huggingface_hub); a download that was broken off leaves none."""
    try:
        revisions = list((place / "snapshots").iterdir())
    except OSError:
        return False
    return any((revision / file).exists() for revision in revisions for file in _READ_FIRST)
