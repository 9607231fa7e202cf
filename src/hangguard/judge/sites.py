"""Wait sites: which frame of a stack tells what a member waits for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

from hangguard.facts import Stack, StackFrame, ThreadStack, Unseen, WaitsFor, WaitSite
from hangguard.judge.idle import is_idle
from hangguard.judge.rules import Rules

HUB_FILES = ("huggingface_hub", "hf_transfer", "modelscope")
"""The only downloads that count in a front end: it has HTTP libraries on its stack while it serves."""

WITHIN = frozenset({"peers", "communicator", "collective"})
"""Waits that on one machine only another member can end. The clock that they have ends them in an error."""


@dataclass(frozen=True, slots=True)
class Found:
    """A frame that tells what its thread waits for."""

    site: WaitSite
    frame: StackFrame

    @property
    def waits_for(self) -> WaitsFor:
        """Return what it waits for."""
        return self.site.waits_for

    def __str__(self) -> str:
        """Return the frame as people write it."""
        return f"{self.frame.function} ({self.frame.file})"


def main_thread(threads: tuple[ThreadStack, ...]) -> ThreadStack | None:
    """Return the main thread, or the one with the deepest stack."""
    named = [t for t in threads if t.name == "MainThread"]
    return named[0] if named else max(threads, key=lambda t: len(t.frames), default=None)


def site_of_frames(frames: tuple[StackFrame, ...], sites: tuple[WaitSite, ...]) -> Found | None:
    """Return the first frame, from the innermost outwards, that a site names."""
    for frame in frames:
        site = _site_of(frame.function, frame.file, sites)
        if site is not None:
            return Found(site, frame)
    return None


WORK = WaitSite(function=".*", waits_for="work", source="the engine's own loop, in its wait for requests")


def wait_of(stack: Stack, rules: Rules) -> Found | None:
    """Return what the main thread of a member waits for: work, where its engine's loop asks for some, or a site's."""
    main = None if isinstance(stack.threads, Unseen) else main_thread(stack.threads)
    if main and main.frames and rules.idle_places and is_idle(main.frames, rules.idle_places):
        return Found(WORK, main.frames[0])
    return site_of_frames(main.frames, rules.wait_sites) if main else None


@lru_cache(maxsize=8192)
def _site_of(function: str, file: str, sites: tuple[WaitSite, ...]) -> WaitSite | None:
    for site in sites:
        if site.file in file and re.fullmatch(site.function, function):
            return site
    return None
