"""What stacks say while nothing moves: whether they agree, whom to suspect, and what could still end the wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hangguard.facts import PHASES, Phase, Process, Stack, ThreadStack, Tree, Unseen
from hangguard.judge.phases import phase_of_stack
from hangguard.judge.rules import TRACKERS, Rules, matches

APART = 3.0
"""Two stack samples count as two only when they are at least this far apart, seconds."""

DOWNLOAD_FILES = (
    "huggingface_hub", "hf_transfer", "requests/", "urllib3", "httpx", "httpcore", "aiohttp", "http/client.py",
    "ssl.py", "boto", "modelscope",
)  # fmt: skip
LOCK_FILES = ("filelock", "file_baton.py")
"""Files of frames that wait for something outside the launch: a download, or a lock that somebody may hold."""

INSIDE_CHANNELS = ("futex", "do_wait", "pipe_read", "anon_pipe_read", "pipe_wait", "unix_stream")
"""Kernel wait channels (their beginnings) that only another thread or process of this machine can end. All others
may end by themselves: a sleep (``hrtimer_nanosleep``; ``poll_schedule_timeout`` too, Python 3.10 sleeps in select),
a socket, a file system in user space (``request_wait_answer``, in state S)."""

LOCK_CHANNELS = ("lock_inode_wait", "lock_file_wait")
"""Parts of the wait channels of a blocking ``flock`` or ``lockf``."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """Stack samples within one still stretch."""

    first_at: float
    last_at: float
    signature: tuple[object, ...]
    stacks: tuple[Stack, ...]
    complete: bool
    """Whether every member could be seen."""

    @property
    def holds(self) -> bool:
        """Two samples far enough apart were equal, on all members."""
        return self.complete and self.last_at - self.first_at >= APART


def compare(before: Agreement | None, stacks: tuple[Stack, ...], t: float) -> tuple[Agreement, bool]:
    """Return the agreement after one more stack sample, and whether the stacks changed (which is progress)."""
    signature = tuple(_signature(stack) for stack in sorted(stacks, key=lambda s: (s.pid, s.started)))
    complete = bool(stacks) and all(_is_seen(stack) for stack in stacks)
    if before is None or before.signature != signature:
        changed = before is not None and before.complete and complete
        return Agreement(t, t, signature, stacks, complete), changed
    return Agreement(before.first_at, t, signature, stacks, complete and before.complete), False


def _signature(stack: Stack) -> object:
    """Functions and files, without line numbers: a poll loop changes its line and gets nowhere."""
    if isinstance(stack.threads, Unseen):
        return (stack.pid, stack.started, stack.wait_channel)
    return (
        stack.pid,
        stack.started,
        tuple(
            (t.thread_id, tuple((f.function, f.file) for f in t.frames))
            for t in sorted(stack.threads, key=lambda t: t.thread_id)
        ),
    )


def _is_seen(stack: Stack) -> bool:
    if matches(TRACKERS, stack.title):
        return True
    if stack.is_python:
        return not isinstance(stack.threads, Unseen)
    return isinstance(stack.wait_channel, str)


def working_members(tree: Tree, rules: Rules) -> tuple[Process, ...]:
    """Return the members that should do the work: by title, else those without children of their own.

    The front end's wait for its workers carries no weight: it looks the same in a healthy start.
    """
    able = tuple(p for p in tree.members if not matches(TRACKERS, p.title))
    named = tuple(p for p in able if matches(rules.workers, p.title))
    if named:
        return _without_parents(named)  # an engine core waits for its workers as the front end does
    leaves = tuple(p for p in _without_parents(able) if not matches(rules.front_end, p.title))
    return leaves or able


def _without_parents(processes: tuple[Process, ...]) -> tuple[Process, ...]:
    parents = {p.parent for p in processes}
    return tuple(p for p in processes if p.pid not in parents)


def phase_by_stacks(stacks: tuple[Stack, ...], workers: tuple[Process, ...], rules: Rules) -> Phase | None:
    """Return the earliest phase in which a working member stands."""
    pids = {p.pid for p in workers}
    phases = [phase_of_stack(stack, rules.stack_markers) for stack in stacks if stack.pid in pids]
    found = [phase for phase in phases if phase is not None]
    return min(found, key=PHASES.index) if found else None


def may_end_from_outside(
    stacks: tuple[Stack, ...], workers: tuple[Process, ...]
) -> tuple[Literal["lock", "download"], str] | None:
    """Return what could still end the wait of a working member from outside the launch, and who waits for it."""
    pids = {p.pid for p in workers}
    for stack in stacks:
        if stack.pid not in pids:
            continue
        if isinstance(stack.wait_channel, str) and any(part in stack.wait_channel for part in LOCK_CHANNELS):
            return "lock", f"{stack.title} ({stack.pid}) waits for a file lock"
        main = None if isinstance(stack.threads, Unseen) else main_thread(stack.threads)
        for frame in main.frames if main else ():
            where = f"{stack.title} ({stack.pid}) waits in {frame.function} ({frame.file})"
            if any(part in frame.file for part in LOCK_FILES):
                return "lock", where
            if any(part in frame.file for part in DOWNLOAD_FILES):
                return "download", where
    return None


def may_wake_by_itself(stacks: tuple[Stack, ...], workers: tuple[Process, ...]) -> str:
    """Return which working member sleeps for a time, or in a way that cannot be told from it; "" if none."""
    by_identity = {(stack.pid, stack.started): stack for stack in stacks}
    for process in workers:
        stack, who = by_identity.get(process.identity), f"{process.title} ({process.pid})"
        if stack is None:
            return f"there is no stack of {who}"
        if isinstance(stack.wait_channel, Unseen):
            return f"the wait channel of {who} cannot be seen ({stack.wait_channel.reason})"
        if not stack.wait_channel:
            return f"the kernel does not tell what {who} waits for"
        if not stack.wait_channel.startswith(INSIDE_CHANNELS):
            return f"{who} waits in {stack.wait_channel}, which may end by itself"
    return ""


def main_thread(threads: tuple[ThreadStack, ...]) -> ThreadStack | None:
    """Return the main thread, or the one with the deepest stack."""
    named = [t for t in threads if t.name == "MainThread"]
    return named[0] if named else max(threads, key=lambda t: len(t.frames), default=None)


def suspects(tree: Tree, rules: Rules, stacks: tuple[Stack, ...]) -> tuple[str, ...]:
    """Return the working members, each with the innermost frames of its main thread."""
    by_pid = {stack.pid: stack for stack in stacks}
    return tuple(_suspect(p, by_pid.get(p.pid)) for p in working_members(tree, rules)[:16])


def _suspect(process: Process, stack: Stack | None) -> str:
    text = f"{process.title[:80]} (pid {process.pid})"
    if stack is None or isinstance(stack.threads, Unseen):
        return text
    main = main_thread(stack.threads)
    frames = main.frames[:4] if main else ()
    return text + "".join(f" < {f.function} ({f.file.rsplit('/', 1)[-1]}:{f.line})" for f in frames)
