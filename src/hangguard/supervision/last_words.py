"""The last act before a kill: members whose stacks nobody could read write them into the log themselves."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from hangguard.act.guarded import LastWords
from hangguard.facts import Stack, Unseen
from hangguard.observe._last_words import parse_last_words
from hangguard.observe.lane import Lane
from hangguard.supervision.run import Guard

WITHIN = 2.0
"""Seconds for all of them; the guardian gives each 0.03, and the last one 0.3 to end."""
LONGEST = 1 << 20
"""Bytes of the log that are read for one member: a dump has 100 threads of 100 frames at most."""


async def hear_last_words(guarded: Guard, stacks: tuple[Stack, ...], log_path: str | None) -> tuple[Stack, ...]:
    """Return the stacks, with those that were unseen as their processes dumped them on SIGABRT, or why they did not.

    Only for members that are about to be killed because they hang: whoever is asked ends.
    """
    unseen = [stack for stack in stacks if stack.is_python and isinstance(stack.threads, Unseen)]
    if not unseen or log_path is None:
        return stacks
    heard = await guarded.last_words([(stack.pid, stack.started) for stack in unseen], within=WITHIN)
    words = {(said.pid, said.started): said for said in heard}
    texts = await _read(log_path, heard)
    return tuple(
        _with_words(stack, words[identity], texts.get(identity, "")) if identity in words else stack
        for stack in stacks
        for identity in [(stack.pid, stack.started)]
    )


def _with_words(stack: Stack, said: LastWords, text: str) -> Stack:
    assert isinstance(stack.threads, Unseen)
    if threads := parse_last_words(text):
        return replace(stack, threads=threads, seen_by="last words")
    why = "none came" if said.begins is not None else said.why_not
    return replace(stack, threads=Unseen(f"{stack.threads.reason}; last words: {why}"))


async def _read(log_path: str, heard: tuple[LastWords, ...]) -> dict[tuple[int, int], str]:
    """Return what each of them wrote."""
    parts = [(said, said.begins) for said in heard if said.begins is not None]
    if not parts:
        return {}

    def read() -> dict[tuple[int, int], str]:
        with Path(log_path).open("rb") as log:
            return {
                (said.pid, said.started): os.pread(
                    log.fileno(), max(0, min(LONGEST, said.ends - begins)), begins
                ).decode(errors="replace")
                for said, begins in parts
            }

    lane = Lane("hangguard-last-words")
    try:
        texts = await lane.ask(read, within=WITHIN)
    except OSError:
        return {}
    finally:
        lane.close()
    return {} if isinstance(texts, Unseen) else texts
