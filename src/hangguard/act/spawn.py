# ruff: noqa: SLF001  guarded() and Guarded are one thing in two forms
"""Start a server under a guardian, and stop it: the supervisor's side of ``guardian.py``.

Start reading here. :func:`guarded` starts the guardian (``_link.py``), tells it what to launch
(``launch_message.py``), and gives a :class:`Guarded` (``guarded.py``): that notes what belongs to the launch
(``belongings.py``), talks with the guardian (``conversation.py``), and ends everything itself where the guardian is
dead (``without_guardian.py``). What a stop came to is a :class:`Stopped` (``stopped.py``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import anyio

from hangguard.act._link import Link, start_guardian
from hangguard.act.guarded import Guarded, LastWords
from hangguard.act.launch_message import launch_message
from hangguard.act.stopped import Stopped, StopProgress
from hangguard.elsewhere import Elsewhere

__all__ = ["Guarded", "LastWords", "StopProgress", "Stopped", "guarded"]

log = logging.getLogger("hangguard")


@asynccontextmanager
async def guarded(
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    log_path: str | None,
    lock_path: str | None,
    death_grace: float,
    on_death: str,
    pristine: bool,
    port: int | None = None,
    elsewhere: Elsewhere | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Guarded]:
    """Start ``argv`` under a guardian of its own; on leaving, whatever of it still lives is stopped.

    ``env`` is the whole environment. The server's output goes to ``log_path``, a file of this launch alone
    (``None``: nowhere); the guardian holds a lock on ``lock_path`` until it ends; whoever listens on ``port`` is no
    daemon of somebody else; what members leave ``elsewhere`` than in /dev/shm goes too, where it is told. What the body
    raises arrives as it is, never in a group.

    Raises :class:`~hangguard.errors.CommandNotFound`, :class:`~hangguard.errors.CommandNotExecutable`, or
    :class:`~hangguard.errors.GuardianFailed` (also for a log or a lock that somebody else has).
    """
    elsewhere = elsewhere or Elsewhere()
    launch = launch_message(
        argv=argv,
        env=env,
        cwd=cwd,
        log_path=log_path,
        lock_path=lock_path,
        death_grace=death_grace,
        on_death=on_death,
        pristine=pristine,
        port=port,
        elsewhere=elsewhere,
    )
    link = await start_guardian()
    leash = _Leash(link)
    guard = Guarded(link, death_grace=death_grace, clock=clock, elsewhere=elsewhere)
    try:
        await guard._launch(launch)
        # Not `async with`: a task group around the body would wrap what it raises, KeyboardInterrupt too.
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        raised = True
        try:
            guard._follow_in(tasks)
            yield guard
            raised = False
        finally:
            try:
                with anyio.CancelScope(shield=True):
                    await guard._leave()
            except Exception:
                if not raised:
                    raise
                log.warning("a stop failed", exc_info=True)  # what the body has raised is what arrives
            finally:
                tasks.cancel_scope.cancel()
                await tasks.__aexit__(None, None, None)
    finally:
        try:
            with anyio.CancelScope(shield=True):
                await guard._see_guardian_end()
        finally:
            guard._close()
            del leash


class _Leash:
    """Hangs up when the frame of ``guarded()`` is thrown away with its event loop, without being left.

    The object that it hangs up for may live on then: its tasks are kept by the backend (anyio 4 on asyncio).
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._owner = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._owner:
            self._link.hang_up()
