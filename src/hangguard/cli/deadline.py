"""The last resort of ``--stop-within``: this program ends, whatever holds it up, before somebody kills it."""

from __future__ import annotations

import os
import select
import threading

from hangguard.cli.exits import LEFT

STDERR = 2


class Deadline:
    """Ends this program so many seconds after :meth:`begin`. What it started is the guardian's then, who goes on."""

    def __init__(self, seconds: float | None) -> None:
        self._seconds = seconds
        self._timer: threading.Timer | None = None
        self._code: int | None = None

    def begin(self) -> None:
        """Let the time run from now on; from then on called in vain."""
        if self._seconds is None or self._timer is not None:
            return
        self._timer = threading.Timer(self._seconds, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def settle(self, code: int) -> None:
        """Note how the run ended: what is late now is only a reader."""
        self._code = code

    def cancel(self) -> None:
        """Let the program end by itself."""
        if self._timer is not None:
            self._timer.cancel()

    def _give_up(self) -> None:
        if self._code is not None:
            os._exit(self._code)
        text = (
            f"hangguard: the {self._seconds:g} s of --stop-within are over, and it is not proved that everything is "
            f"gone; the guardian goes on ending it. [exit code {LEFT}]\n"
        )
        if select.select([], [STDERR], [], 0)[1]:  # a reader who does not read must not hold this up
            os.write(STDERR, text.encode())
        os._exit(LEFT)
