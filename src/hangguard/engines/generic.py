"""A server of which nothing is known but where it answers."""

from __future__ import annotations

from hangguard.engines import common, symptoms
from hangguard.engines.base import Engine
from hangguard.facts import Request


def recognise(_argv: tuple[str, ...]) -> int | None:
    """Recognise nothing: this engine is what remains."""
    return None


GENERIC = Engine(
    name="generic",
    recognise=recognise,
    noise=(common.ACCESS_LINE,),
    symptoms=symptoms.SHARED,
    front_end=(common.TRACKER,),
    ready=lambda _launch: Request(method="GET", path=""),  # the URL that was given, as it is
)
