"""What we know of each server, as data. A new engine is one module with one ``Engine`` and its line here."""

from __future__ import annotations

from hangguard.engines.base import Engine
from hangguard.engines.generic import GENERIC
from hangguard.engines.sglang import SGLANG
from hangguard.engines.vllm import VLLM
from hangguard.errors import BadLaunch

ENGINES: tuple[Engine, ...] = (SGLANG, VLLM, GENERIC)
"""In the order in which a command is recognised; the generic one recognises nothing."""


def engine_named(name: str) -> Engine:
    """Return the engine of this name. Raises :class:`BadLaunch` that lists the known ones."""
    for engine in ENGINES:
        if engine.name == name:
            return engine
    known = ", ".join(engine.name for engine in ENGINES)
    raise BadLaunch(f"There is no engine named {name!r}", advice=f"Known are: {known}")
