"""The port on which a launch will answer: free, or another one, or the refusal to start."""

from __future__ import annotations

import anyio

from hangguard.changes import with_port
from hangguard.errors import PortInUse
from hangguard.facts import Launch, Listener
from hangguard.observe.port_left import TIME_WAIT_SECONDS, PortLeft
from hangguard.observe.ports import free_port
from hangguard.redact import redact
from hangguard.supervision.events import Notice
from hangguard.supervision.run import Run
from hangguard.supervision.wishes import Wishes

PORT_WITHIN = TIME_WAIT_SECONDS + 5.0
"""Seconds that a launch waits for a port that only the kernel still keeps."""
AGAIN_AFTER = 1.0
"""Seconds between two looks at it."""


async def with_usable_port(run: Run, launch: Launch, *, number: int, deadline: float, wishes: Wishes) -> Launch:
    """Return the launch, with another port where it is ours to choose and the one that it has is not free any more.

    Refuse when somebody listens where the server would answer: his answers would pass for ours. Where nobody does and
    the kernel still keeps the port from servers, wait for it, until TIME_WAIT is over.
    """
    gives_up_at = min(deadline, run.world.clock() + PORT_WITHIN)
    asked_for = launch
    has_told = False
    while True:
        listener = await run.world.who_listens(launch)
        left = None if isinstance(listener, Listener) else await run.world.look_at_port(launch)
        is_kept = isinstance(left, PortLeft) and left.can_be_bound is False
        if not is_kept and not isinstance(listener, Listener):
            return launch
        if launch.chooses_port and launch is asked_for:
            launch = on_a_fresh_port(launch)
            continue
        if isinstance(listener, Listener):
            raise PortInUse(launch.port, redact(listener, run.folder.known_secrets), socket_path=launch.socket_path)
        if wishes.stop_because:
            return launch
        if run.world.clock() >= gives_up_at:
            raise PortInUse(launch.port, None, without_listener=str(left))
        if not has_told:
            has_told = True
            text = f"port {launch.port} cannot be bound yet: {left}; waiting for it"
            run.announcer.tell(Notice(t=run.world.clock(), attempt=number, text=text))
        await anyio.sleep(AGAIN_AFTER)


def on_a_fresh_port(launch: Launch) -> Launch:
    """Return it on another port where the port is ours to choose: nobody may still come to the last attempt's.

    A restart of a server that was ready keeps its port: its clients know that one.
    """
    return with_port(launch, free_port()) if launch.chooses_port else launch
