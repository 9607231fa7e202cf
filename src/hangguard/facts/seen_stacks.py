"""Where threads were seen to stand, and the ranks of a communicator."""

from __future__ import annotations

from dataclasses import dataclass

from hangguard.facts.known import Unseen


@dataclass(frozen=True, slots=True, kw_only=True)
class Communicator:
    """One NCCL communicator, as NCCL's own RAS thread tells from inside the members."""

    name: str
    """Its hash, as NCCL prints it."""
    size: int
    """Ranks that it should have."""
    missing_ranks: tuple[int, ...] = ()
    """Ranks that did not answer, or answered that they have left it."""
    uninitialised_ranks: tuple[int, ...] = ()
    failed_ranks: tuple[int, ...] = ()
    """Ranks that report an error, or were told to abort."""
    behind_ranks: tuple[int, ...] = ()
    """Ranks whose counts of collective operations are lower than those of others."""
    counts: tuple[tuple[int, int], ...] = ()
    """(rank, collective operations launched so far)."""
    pids: tuple[tuple[int, int], ...] = ()
    """(rank, pid)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFrame:
    """One frame."""

    function: str
    file: str
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ThreadStack:
    """One Python thread, innermost frame first."""

    name: str
    thread_id: int
    active: bool
    frames: tuple[StackFrame, ...]
    wait_channel: str | None = None
    """As :attr:`Stack.wait_channel`, for this thread; ``None``: not known (before Python 3.11 as a rule)."""
    system_call: str = ""
    """The system call that it is in, by name or number; empty: in none, or not seen (``/proc/PID/task/TID/syscall``
    needs the right to trace)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stack:
    """The stacks of one member."""

    pid: int
    started: int
    title: str
    threads: tuple[ThreadStack, ...] | Unseen
    is_python: bool = True
    """False: no Python interpreter in it, so only the wait channel can be seen."""
    wait_channel: str | Unseen = Unseen("not looked at")
    """The kernel function that the main thread sleeps in (``/proc/PID/wchan``); empty: running. ``timed`` before
    it: the wait for a lock ends by itself after a time."""
    other_channels: tuple[str, ...] = ()
    """The same for its other threads, native ones too: every channel once, sorted."""
    system_call: str = ""
    """As :attr:`ThreadStack.system_call`, for the main thread: also of a program whose stacks cannot be read."""
    seen_by: str = ""
    """Who read the threads: py-spy, the guardian, this program, or the process itself (last words). Empty: nobody."""
