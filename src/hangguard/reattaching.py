"""The blocking face of :func:`reattach`: ``with`` gives a :class:`ReattachedRun`; every method is one portal call."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from anyio.from_thread import BlockingPortal

from hangguard.facts import ReachedState, RunStatus, RunStopped
from hangguard.supervision.blocking import BlockingHandle, Entered
from hangguard.supervision.interrupts import call
from hangguard.supervision.reattach import AsyncReattachedRun, AsyncReattachment

T = TypeVar("T")


def reattach(run: str | None = None, *, run_dir: str | os.PathLike[str] | None = None) -> Reattachment:
    """Ask and tell a run that another program has started; leaving the block leaves it alone.

    ``run`` is its id, the beginning of its id, or the path of its folder; of several with that beginning, and with
    ``None`` of all, the only one that lives is meant. ``run_dir`` is where its folder was made, if not in the user's
    state folder. Only a run of this user is reached, and only in the place where it runs.
    """
    return Reattachment(run, run_dir)


class ReattachedRun(BlockingHandle):
    """A run of another program; the blocking twin of :class:`AsyncReattachedRun`, name by name."""

    _once_left = "the block was left: nobody asks this run any more"

    def __init__(self, run: AsyncReattachedRun, portal: BlockingPortal) -> None:
        super().__init__(portal)
        self._run = run

    @property
    def run_id(self) -> str:
        """The id of the run."""
        return self._run.run_id

    @property
    def url(self) -> str:
        """Where the server answers, or would, when it was asked last; empty: its command does not tell."""
        return self._run.url

    @property
    def pid(self) -> int | None:
        """The pid of the launched process when it was asked last; ``None``: nothing was launched yet."""
        return self._run.pid

    def status(self) -> RunStatus:
        """Return how it stands. Raises :class:`NoAnswer` after 5 seconds without an answer."""
        return self._call(self._run.status)

    def events(self) -> Iterator[dict[str, Any]]:
        """Return its events from now on as plain values, as an iterator that ends with the run."""
        self._check()
        stream = call(self._portal, self._run.events)
        self._call(stream.begin)
        return iter(lambda: self._call(stream.next_or_none), None)

    def wait(self, for_: ReachedState = "exit", timeout: float | None = None) -> ReachedState:
        """Wait until it is ready, stuck, or over, whichever is asked for; return what was reached.

        See :meth:`AsyncReattachedRun.wait`.
        """
        return self._call(partial(self._run.wait, for_, timeout))

    def stop(
        self, *, drain: float | None = None, grace: float | None = None, within: float | None = None
    ) -> RunStopped:
        """Stop the server and everything of it, and end the run; return what that came to.

        See :meth:`AsyncReattachedRun.stop`.
        """
        return self._call(partial(self._run.stop, drain=drain, grace=grace, within=within))

    def restart(self) -> None:
        """Have the server stopped and the same launch started again; return when it has answered."""
        return self._call(self._run.restart)


class Reattachment(AsyncReattachment):
    """A handle to be: ``with`` gives a :class:`ReattachedRun`, ``async with`` an :class:`AsyncReattachedRun`."""

    _entered: Entered[ReattachedRun] | None = None

    def __enter__(self) -> ReattachedRun:
        """Find the run and ask how it stands. See :func:`reattach`."""
        self._entered = Entered(self, ReattachedRun)
        return self._entered.handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Let go of it; nothing of the run is touched. Nothing in a forked child."""
        assert self._entered is not None
        self._entered.leave(kind, error, trace)
