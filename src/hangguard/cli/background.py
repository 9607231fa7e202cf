"""The background's side of ``run --detach``: leave the terminal, and tell whoever waits there how it goes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import anyio

from hangguard.store import SUPERVISOR_LOG
from hangguard.supervision.events import BecameReady, Event
from hangguard.sync import Supervision


class Background:
    """A hook that tells at this descriptor where the run's files are, and when it is ready; then nobody listens."""

    def __init__(self, told_at: int) -> None:
        self._told_at = told_at
        os.set_inheritable(told_at, False)  # noqa: FBT003 - positional only

    def begin(self, supervision: Supervision) -> str:
        """Write to the run's folder from now on instead of to the terminal; return why that cannot be, if so."""
        anyio.run(supervision.make_folder)
        folder = supervision.folder
        if folder is None or Path(folder).name != supervision.run_id:
            return "a run in the background needs a folder of its own, and none could be made: give --run-dir."
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            log = os.open(os.path.join(folder, SUPERVISOR_LOG), flags, 0o600)  # noqa: PTH118 - a string
        except OSError as problem:
            return f"{SUPERVISOR_LOG} cannot be written in {folder}: {problem.strerror}."
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        self._tell(run=supervision.run_id, folder=folder)
        return ""

    def __call__(self, event: Event) -> None:
        """Tell when it is ready, once."""
        if isinstance(event, BecameReady) and self._told_at >= 0:
            self._tell(url=event.url, changes=[change.change for change in event.changes])
            told_at, self._told_at = self._told_at, -1
            os.close(told_at)

    def _tell(self, **fields: object) -> None:
        try:
            os.write(self._told_at, json.dumps(fields).encode() + b"\n")  # fits into the pipe: it never blocks
        except OSError:  # whoever waited has gone; the run goes on
            return
