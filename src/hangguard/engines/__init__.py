"""What we know of each server, as data.

Add an engine: one ``Engine`` (``base.py`` tells what each field is for) and its line in :data:`ENGINES`. A name,
``recognise``, ``flags``, ``default_port`` and ``ready`` make a useful one, in one module; the more of the rest is
known, the sooner and the surer a hang is told. One of which much is known is a folder, laid out as the others are:

- ``command.py``: how it is started, and the options that must be read
- ``log.py``: lines that tell the phase, lines that are no news, lines that tell what is wrong
- ``stacks.py``: functions that tell the phase, the wait, or that there is nothing to do
- ``answers.py``: the requests that prove it, its counters, the routes that tell that it rests
- ``timers.py``: its own limits of time
- ``fallbacks.py``: changes to a launch that hangs
- ``releases.py``: what was read and run; every row names its source

What several engines have in common stands beside the folders. Tests: lines of real logs, by version, in
``tests/engines/test_markers.py``; command lines in ``test_recognise.py``; argv before and after a fallback in
``test_fallbacks.py``.
"""

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
