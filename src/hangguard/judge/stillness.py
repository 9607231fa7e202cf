"""What stacks say while nothing moves: whether they agree, whom to suspect, and what could still end the wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from hangguard.facts import PHASES, Phase, Process, Stack, ThreadStack, Tree, Unseen
from hangguard.judge.phases import phase_of_stack
from hangguard.judge.rules import TRACKERS, Rules, matches
from hangguard.judge.sites import HUB_FILES, WITHIN, main_thread, wait_of

APART = 3.0
"""Two stack samples count as two only when they are at least this far apart, seconds."""

INSIDE_CHANNELS = (
    "futex", "do_wait", "pipe_read", "anon_pipe_read", "pipe_write", "anon_pipe_write", "pipe_wait", "unix_stream",
)  # fmt: skip
"""Kernel wait channels (their beginnings) that only another thread or process of this machine can end. All others
may end by themselves: a sleep (``hrtimer_nanosleep``; ``poll_schedule_timeout`` too, Python 3.10 sleeps in select),
a lock with a timeout (``timed futex_do_wait``), a socket, a file system in user space (``request_wait_answer``, in
state S)."""

WATCHING_CHANNELS = (
    "timed ", "perhaps timed ", "hrtimer_nanosleep", "do_nanosleep", "poll_schedule_timeout", "do_poll", "do_sys_poll",
    "do_select", "ep_poll", "do_epoll_wait", "wait_woken", "__skb_wait", "sk_wait_data", "inet_csk_accept",
    "do_sigtimedwait", "sigsuspend", "do_pause", "eventfd_read", "inotify_read", "do_signal_stop", "io_cqring_wait",
    "unix_accept", "unix_wait_for_peer",
)  # fmt: skip
"""Channels (their beginnings) in which the helper threads of a hung program wait too: heartbeats, watchdogs, servers
of statistics. In all others, those of file systems above all, a thread has work in hand that ends by itself."""

POOL_FILES = ("concurrent/futures/thread.py", "multiprocessing/pool.py")
"""Files of frames below those of a task that was given to a pool of threads: somebody waits for its end."""

BATON = "file_baton.py"
"""torch's lock by the presence of a file: who waits for it only looks whether the file is there."""

LOCK_CHANNELS = ("lock_inode_wait", "lock_file_wait")
"""Parts of the wait channels of a blocking ``flock`` or ``lockf``."""


LOOKS_KEPT = 64

KINDS_KEPT = 4096


@dataclass(frozen=True, slots=True)
class Agreement:
    """Stack samples within one stretch in which nothing was produced."""

    looks: tuple[float, ...]
    """When they were taken, oldest first (the last 64)."""
    signature: tuple[object, ...]
    stacks: tuple[Stack, ...]
    complete: bool
    """Whether every member could be seen."""
    first_at: float

    @property
    def last_at(self) -> float:
        """When the last one was taken."""
        return self.looks[-1]

    def holds_since(self, t: float) -> bool:
        """Say whether two samples after ``t``, far enough apart, were equal on all members."""
        after = [look for look in self.looks if look > t]
        return self.complete and bool(after) and after[-1] - after[0] >= APART


def compare(
    before: Agreement | None,
    stacks: tuple[Stack, ...],
    t: float,
    kinds: frozenset[int],
    but: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[Agreement, frozenset[int], bool]:
    """Return the agreement after one more stack sample, the kinds of stacks seen, and whether that is progress.

    It is where a member stands as it never stood before. A loop that goes round through a few functions changes
    its stack for ever, and gets nowhere: as with lines of the log, only a new kind is news. ``but``: who does
    not count, as a front end that answers our own questions.
    """
    told = sorted((s for s in stacks if (s.pid, s.started) not in but), key=lambda s: (s.pid, s.started))
    signature = tuple(_signature(stack) for stack in told)
    complete = bool(stacks) and all(_is_seen(stack) for stack in stacks)
    now = frozenset(hash(part) for part in signature)
    fresh = not now <= kinds
    kinds = kinds | now if len(kinds) < KINDS_KEPT else now
    if before is None or before.signature != signature:
        changed = fresh and before is not None and before.complete and complete
        return Agreement((t,), signature, stacks, complete, t), kinds, changed
    looks = (*before.looks, t)[-LOOKS_KEPT:]
    return Agreement(looks, signature, stacks, complete and before.complete, before.first_at), kinds, False


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


def all_wait_for_work(stacks: tuple[Stack, ...], tree: Tree, rules: Rules) -> bool:
    """Say whether every member that should do the work was seen where it waits for work: then it is up."""
    found = {(stack.pid, stack.started): wait_of(stack, rules) for stack in stacks}
    sites = [found.get(p.identity) for p in working_members(tree, rules)]
    return bool(sites) and all(site is not None and site.waits_for == "work" for site in sites)


def _without_parents(processes: tuple[Process, ...]) -> tuple[Process, ...]:
    parents = {p.parent for p in processes}
    return tuple(p for p in processes if p.pid not in parents)


def phase_by_stacks(stacks: tuple[Stack, ...], workers: tuple[Process, ...], rules: Rules) -> Phase | None:
    """Return the earliest phase in which a working member stands."""
    pids = {p.pid for p in workers}
    phases = [phase_of_stack(stack, rules.stack_markers) for stack in stacks if stack.pid in pids]
    found = [phase for phase in phases if phase is not None]
    return min(found, key=PHASES.index) if found else None


def movers(tree: Tree, rules: Rules) -> tuple[Process, ...]:
    """Return the members whose own waking could move the launch.

    Where the engine names its workers they alone: its front end polls for ever. In a program of which nothing is
    known a parent may be the one that works, beside an idle helper.
    """
    able = tuple(p for p in tree.members if not matches(TRACKERS, p.title))
    if any(matches(rules.workers, p.title) for p in able):
        return working_members(tree, rules)
    return tuple(p for p in able if not matches(rules.front_end, p.title)) or able


def may_end_from_outside(
    stacks: tuple[Stack, ...], processes: tuple[Process, ...], rules: Rules
) -> tuple[Literal["lock", "presence", "download"], str] | None:
    """Return what could still end the wait of one of these members from outside the launch, and who waits for it.

    ``presence``: a lock that is held for as long as a file is there.
    """
    pids = {p.pid for p in processes}
    for stack in stacks:
        who = f"{stack.title} ({stack.pid})"
        channels = (stack.wait_channel, *stack.other_channels) if stack.pid in pids else ()
        if any(part in channel for channel in channels if isinstance(channel, str) for part in LOCK_CHANNELS):
            return "lock", f"{who} waits for a file lock"
        found = wait_of(stack, rules)
        if found is None:
            continue
        if stack.pid in pids and found.waits_for == "lock":
            return "presence" if found.site.file == BATON else "lock", f"{who} waits in {found}"
        if found.waits_for == "download" and (stack.pid in pids or found.site.file in HUB_FILES):
            return "download", f"{who} waits in {found}"
    return None


def may_wake_by_itself(
    stacks: tuple[Stack, ...], processes: tuple[Process, ...], rules: Rules, *, ours: frozenset[int] = frozenset()
) -> str:
    """Return which of these members sleeps for a time, or in a way that cannot be told from it; "" if none.

    A wait for a peer has a clock too (gloo, the store), which ends it in an error; on one machine only another
    member can end it well, and all of them are looked at here. The same goes for ``ours``: pids that wait for a lock
    which another member holds.
    """
    by_identity = {(stack.pid, stack.started): stack for stack in stacks}
    for process in processes:
        stack, who = by_identity.get(process.identity), f"{process.title} ({process.pid})"
        if stack is None:
            return f"there is no stack of {who}"
        found = wait_of(stack, rules) if rules.nodes == 1 else None
        for_a_peer = process.pid in ours or (found is not None and found.waits_for in WITHIN)
        if isinstance(stack.wait_channel, Unseen):
            return f"the wait channel of {who} cannot be seen ({stack.wait_channel.reason})"
        if not stack.wait_channel and not for_a_peer:
            return f"the kernel does not tell what {who} waits for"
        if not for_a_peer and not stack.wait_channel.startswith(INSIDE_CHANNELS):
            return f"{who} waits in {stack.wait_channel}, which may end by itself"
        if channel := _of_a_thread(stack, known=matches(rules.workers, process.title)):
            return f"a thread of {who} waits in {channel}, which may end by itself"
    return ""


def _of_a_thread(stack: Stack, *, known: bool) -> str:
    """Return the channel of another thread whose waking the main thread may wait for; "" if there is none.

    A worker that the engine names has heartbeats and watchdogs, which sleep beside every hang: there only those
    threads count that have work in hand. Of any other program nobody knows which thread does what.
    """
    native = [channel for channel in stack.other_channels if not channel.startswith(INSIDE_CHANNELS)]
    in_hand = [channel for channel in native if channel and not channel.startswith(WATCHING_CHANNELS)]
    if in_hand or (native and (not stack.is_python or isinstance(stack.threads, Unseen))):
        return (in_hand or native)[0] or "no channel"
    threads = () if isinstance(stack.threads, Unseen) else stack.threads
    main = main_thread(threads)
    for thread in threads:
        if thread is main or (known and not _is_task_of_a_pool(thread)):
            continue
        if thread.wait_channel is None and native:
            return native[0]
        if thread.wait_channel is not None and not thread.wait_channel.startswith(INSIDE_CHANNELS):
            return thread.wait_channel or "no channel"
    return ""


def _is_task_of_a_pool(thread: ThreadStack) -> bool:
    """Whether a thread of a pool is in a task: an idle one waits in the pool's own code."""
    files = [frame.file for frame in thread.frames]
    return any(part in file for file in files[1:] for part in POOL_FILES) and not any(
        part in files[0] for part in (*POOL_FILES, "/queue.py")
    )
