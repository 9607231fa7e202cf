"""A launch before it is made: what can be seen here, what cannot, and what that costs. Pure.

Add a check: one function that yields its rows, and its line in :data:`CHECKS`.
"""

from __future__ import annotations

from hangguard.facts import Check
from hangguard.judge.checks import boards, room, sight, starting
from hangguard.judge.checks.ground import CheckOf, Ground

__all__ = ["CHECKS", "CheckOf", "Ground", "check_all", "patience_over"]

CHECKS: tuple[CheckOf, ...] = (
    starting.command,
    starting.port,
    starting.guardian,
    starting.model,
    starting.flags,
    starting.timers,
    starting.variables,
    starting.proxy,
    room.earlier_runs,
    room.locks,
    room.shared_memory,
    room.memory,
    room.caches,
    room.open_files,
    room.locked_memory,
    room.tasks,
    room.core_dumps,
    boards.gpus,
    boards.neighbours,
    boards.faults,
    boards.driver,
    boards.peer_to_peer,
    sight.workers,
    sight.processes,
    room.run_folder,
    sight.stacks,
    sight.wait_channels,
    sight.counters,
    sight.pidfds,
    sight.pressure,
)
"""In the order of the table: can it start, is there room, the GPUs, what will be seen."""


def check_all(ground: Ground, checks: tuple[CheckOf, ...] = CHECKS) -> tuple[Check, ...]:
    """Return the whole table."""
    return tuple(row for check in checks for row in check(ground))


def patience_over(ground: Ground, table: tuple[Check, ...]) -> float:
    """Return after how many seconds a start that stands idle is called a hang, or given up without a proof."""
    return max((row.patience for row in table if row.patience is not None), default=ground.at_best)
