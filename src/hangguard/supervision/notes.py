"""Keeps the state file of a run current, so that whoever comes after this program knows what there was."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

from hangguard.act import _membership
from hangguard.facts import RunState, Unseen
from hangguard.observe.lane import Lane
from hangguard.run_state import this_place, write_state
from hangguard.store import RunFolder

FIRST_WITHIN = 2.0
"""Seconds that a launch waits for the disk: only what is noted before it can be found after any death."""
LATER_WITHIN = 0.3
"""Seconds that a look waits for it; what is not written by then is written with the next change."""


class Notes:
    """What a run notes of itself. Belongs to the task that tells the story; a run without a folder notes nothing."""

    def __init__(self, folder: RunFolder | None = None) -> None:
        self.state: RunState | None = None
        """What was noted last; ``None``: nothing, for want of a folder, or of a ``/proc`` that tells where we are."""
        self.lost = ""
        """Why the file is not current; empty: it is."""
        self._folder = folder
        self._written: RunState | None = None
        self._lane: Lane | None = None

    async def begin(self, **first: Any) -> None:
        """Write the state for the first time. The fields are those of :class:`RunState`."""
        folder = self._folder
        if folder is None or folder.path is None:
            return
        try:
            entry = _membership.read_entry(os.getpid())
            self.state = RunState(
                run_id=folder.run_id,
                place=this_place(),
                began=time.time(),
                supervisor=entry.identity if entry is not None else (os.getpid(), 0),
                **first,
            )
        except OSError as problem:
            self.lost = f"where this run is cannot be told: {problem.strerror or problem}"
            return
        self._lane = Lane("state file")
        await self._write(FIRST_WITHIN)

    async def note(self, *, within: float = LATER_WITHIN, **changed: Any) -> None:
        """Change fields of the state, and write it if that makes a difference. Never raises, and waits for no disk."""
        if self.state is None:
            return
        self.state = replace(self.state, **changed)
        if self.state != self._written:
            await self._write(within)

    def write_again(self) -> None:
        """Write the state at the next look, changed or not: somebody from outside could not read the file."""
        self._written = None

    async def end(self, outcome: str) -> None:
        """Note how it ended, and let the thread go. The file stays."""
        await self.note(within=FIRST_WITHIN, stage="over", outcome=outcome)
        if self._lane is not None:
            self._lane.close()

    async def _write(self, within: float) -> None:
        folder, state, lane = self._folder, self.state, self._lane
        if folder is None or state is None or lane is None:
            return
        try:
            done = await lane.ask(lambda: write_state(folder, state), within=within)
        except OSError as problem:
            done = Unseen(problem.strerror or str(problem))
        if isinstance(done, Unseen):
            self.lost = f"the state of this run could not be noted: {done.reason}"
        else:
            self._written, self.lost = state, ""
