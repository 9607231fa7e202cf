"""Waits for something outside the launch, each with its budget: the machine, peers, locks, downloads, disks."""

from __future__ import annotations

import shlex
from dataclasses import replace

from hangguard.facts import Broken, LockFile, Process, Sample, Stack, Stuck, Unclear, Unseen, Verdict, Waiting
from hangguard.judge.followers import cannot_be_seen_ready
from hangguard.judge.memory import Memory
from hangguard.judge.outside import STALLED_SHARE, THROTTLED_SHARE
from hangguard.judge.patience import STALE, UNPROVEN, short
from hangguard.judge.progress import DISK_WAIT, WINDOW, compiles
from hangguard.judge.ranks import suspects
from hangguard.judge.sites import WITHIN, wait_of
from hangguard.judge.stillness import all_wait_for_work, may_end_from_outside, movers
from hangguard.judge.telling import judged, numbers, phase_of

RUNNABLE = "runnable threads"

SLEEPS = ("hrtimer_nanosleep", "do_nanosleep", "poll_schedule_timeout", "do_select")
"""Beginnings of the wait channels of ``time.sleep``, which Python up to 3.10 makes of select(2)."""

VFORK = ("kernel_clone", "_do_fork", "do_fork")
"""Beginnings of the wait channel of a parent whose child of vfork has no program of its own yet (kernel/fork.c, by
version). It is in state D then, and waits for no disk."""


def waits(memory: Memory, sample: Sample) -> Waiting | Stuck | None:
    """Decide whether something outside is waited for."""
    if memory.tree is None:
        return None
    return (
        _wanted(memory, sample)
        or _frozen(memory, sample)
        or _peers(memory, sample, movers(memory.tree, memory.rules))
        or _unseen_follower(memory, sample)
        or _outside(memory, sample, movers(memory.tree, memory.rules))
        or _machine(memory, sample)
    )


def looked_at(memory: Memory) -> tuple[Stack, ...]:
    """Return the stacks of the last look since anything was produced."""
    return memory.agreement.stacks if memory.agreement else ()


def waits_for_ours(memory: Memory) -> frozenset[int]:
    """Return the members that wait for a lock which another member holds: nothing outside can end that."""
    return frozenset(pid for lock in memory.outside.locks if lock.owner_is_member for pid in lock.waiters)


def _wanted(memory: Memory, sample: Sample) -> Waiting | None:
    if not memory.outside.is_quiet(sample.t):
        return None
    left = (memory.outside.quiet_until or sample.t) - sample.t
    return judged(Waiting, memory, sample, f"quiet was asked for, {left:.0f} s of it are left", "quiet")


def _frozen(memory: Memory, sample: Sample) -> Waiting | None:
    if not memory.outside.is_frozen or memory.unproductive_for < WINDOW:
        return None  # with control groups of version 1 all its threads are in state D then, as if they read a disk
    why = "its control group is frozen (cgroup.freeze): nothing in it can run until it is thawed"
    return judged(Waiting, memory, sample, why, "host")


def _peers(memory: Memory, sample: Sample, able: tuple[Process, ...]) -> Waiting | None:
    """Other machines: nobody here can say what they do."""
    rules, phase = memory.rules, phase_of(memory)
    if rules.nodes == 1 and rules.answers:
        return None
    still = memory.idle_for >= short(rules, phase)
    if still and not rules.answers:
        why = "this node never answers by itself; it may be waiting for the one that does"
        return judged(Waiting, memory, sample, why, "peers")
    if still and (phase in {"import", "dist-init"} or _is_up(memory)):
        return judged(Waiting, memory, sample, "it may be waiting for the other machines of this launch", "peers")
    if rules.nodes == 1 or memory.unproductive_for < short(rules, phase):
        return None
    pids = {p.pid for p in able}
    for stack in looked_at(memory):
        found = wait_of(stack, rules) if stack.pid in pids else None
        if found is not None and found.waits_for in WITHIN:
            why = f"it may be waiting for the other machines of this launch: {stack.title} ({stack.pid}) is in {found}"
            return judged(Waiting, memory, sample, why, "peers", numbers=numbers(memory))
    if memory.boards.spinning:
        why = "kernels run all the time and nothing is produced: they may be waiting for the other machines"
        return judged(Waiting, memory, sample, why, "peers", numbers=numbers(memory))
    return None


def _is_up(memory: Memory) -> bool:
    """Whether all workers here wait for work: the front end listens once those of the other machines do so too.

    vLLM with data parallel ranks on several machines: the API server waits in ``wait_for_engine_startup`` for them all.
    """
    return memory.tree is not None and all_wait_for_work(looked_at(memory), memory.tree, memory.rules)


def _unseen_follower(memory: Memory, sample: Sample) -> Waiting | None:
    """A node that never answers and burns CPU: so SGLang's do that wait for work, and nobody can see where."""
    if memory.unproductive_for < UNPROVEN or not cannot_be_seen_ready(memory):
        return None
    why = "this node never answers by itself; it may have started, and wait for the one that does"
    return judged(Waiting, memory, sample, why, "peers", numbers=numbers(memory))


def _outside(memory: Memory, sample: Sample, able: tuple[Process, ...]) -> Waiting | Stuck | None:
    """Locks and downloads, by the stacks and channels of those who wait."""
    if memory.idle_for < short(memory.rules, phase_of(memory)):
        return None
    found = may_end_from_outside(looked_at(memory), able, memory.rules)
    if found is None:
        return None
    kind, where = found
    if kind != "download":
        return _lock(memory, sample, where, by_presence=kind == "presence")
    return judged(Waiting, memory, sample, f"something outside may still end the wait: {where}", "download")


def _lock(memory: Memory, sample: Sample, where: str, *, by_presence: bool) -> Waiting | Stuck | None:
    pids = {p.pid for p in memory.tree.members} if memory.tree else set()
    known = [lock for lock in memory.outside.locks if pids & set(lock.waiters)]
    locks = known or _may_be_waited_for(memory.outside.locks, by_presence=by_presence)
    others = [lock for lock in locks if lock.owner is not None and not lock.owner_is_member]
    if others:
        return judged(Waiting, memory, sample, f"{where}: {_held(others, known=bool(known))}", "lock")
    stale = [lock for lock in locks if _is_stale(memory, sample, lock)]
    if stale and (known or len(stale) == len(locks)):
        return _stale(memory, sample, stale[:1] if known else stale, where)
    if any(lock.owner_is_member for lock in locks) and (not known or all(lock.owner_is_member for lock in locks)):
        return None  # a member that hangs itself: nothing outside
    return judged(Waiting, memory, sample, f"something outside may still end the wait: {where}", "lock")


def _may_be_waited_for(locks: tuple[LockFile, ...], *, by_presence: bool) -> list[LockFile]:
    """Return the locks of which nobody is seen to wait, one of which it may be.

    Who polls a lock of the kernel has its file open for moments only, and who waits for a file to go never has.
    """
    if by_presence:
        return [lock for lock in locks if lock.kind == "presence"]
    return [lock for lock in locks if lock.kind == "flock" and lock.owner is not None and not lock.owner_is_member]


def _held(locks: list[LockFile], *, known: bool) -> str:
    lock = locks[0]
    owner = f"{lock.owner_title[:80] or 'a process'} (pid {lock.owner})"
    if known:
        return f"{lock.path} is held by {owner}, which is no member"
    more = f", or for one of {len(locks) - 1} more" if len(locks) > 1 else ""
    return f"perhaps for {lock.path}, which is held by {owner}, which is no member{more}"


def _is_stale(memory: Memory, sample: Sample, lock: LockFile) -> bool:
    """A file whose presence is the lock, that nobody has open, and that did not change for long."""
    since = dict(memory.outside.locks_since).get(lock.path, sample.t)
    age = lock.age_seconds if lock.age_seconds is not None else sample.t - since
    compilers = memory.tree is not None and any(compiles(p) for p in memory.tree.members)
    return lock.kind == "presence" and lock.owner is None and age >= STALE and not compilers


def _stale(memory: Memory, sample: Sample, locks: list[LockFile], where: str) -> Waiting | Stuck:
    lock = locks[0]
    age = "" if lock.age_seconds is None else f", {lock.age_seconds:.0f} s old"
    why = (
        f"{where}: {lock.path} was left behind (nobody has it open, no compiler runs{age}); "
        f"if no other build uses that folder, remove it: rm {shlex.quote(lock.path)}"
    )
    if len(locks) > 1:
        paths = ", ".join(one.path for one in locks[:8])
        why = (
            f"{where}: of these files one was left behind (nobody has them open, no compiler runs): {paths}; "
            "find out which extension is built, and whether another build uses its folder, before any is removed"
        )
    before, paths_left = memory.verdict, tuple(one.path for one in locks)
    since = before.since if before.kind == "stale-lock" else sample.t
    if sample.t - since < STALE:
        waiting = judged(Waiting, memory, sample, why, "stale-lock", confidence="medium")
        return replace(waiting, left_locks=paths_left)
    assert memory.tree is not None
    found = suspects(memory.tree, memory.rules, looked_at(memory), said=memory.said)
    stuck = judged(Stuck, memory, sample, why, "idle", confidence="medium", numbers=numbers(memory))
    return replace(stuck, still_for=memory.idle_for, suspects=found, left_locks=paths_left)


def with_left_locks(memory: Memory, sample: Sample, verdict: Verdict) -> Verdict:
    """Add the lock files that it may wait for, where the verdict itself goes by something else.

    Who waits for torch's lock sleeps and looks, again and again; who waits for another thread does not. So where no
    stack could be read, a worker that sleeps in that way, beside a lock that was left, is reason enough to look at the
    lock before at any option. And where a builder was killed in its middle, its lock is what the others hang on by.
    """
    if verdict.left_locks or memory.tree is None or memory.ready_at is not None:
        return verdict
    able = movers(memory.tree, memory.rules)
    if isinstance(verdict, Broken) and verdict.kind == "survivors":
        left = [lock for lock in memory.outside.locks if lock.kind == "presence" and lock.owner is None]
        is_waited_for = waits_by_presence(memory)
    elif isinstance(verdict, Unclear) or (isinstance(verdict, Stuck) and verdict.kind == "idle"):
        left = [lock for lock in memory.outside.locks if _is_stale(memory, sample, lock)]
        is_waited_for = memory.idle_for > 0.0 and _may_poll(memory, able)
    else:
        return verdict
    return replace(verdict, left_locks=tuple(lock.path for lock in left)) if left and is_waited_for else verdict


def waits_by_presence(memory: Memory) -> bool:
    """Whether somebody is seen to wait for a lock that is held for as long as a file is there."""
    if memory.tree is None:
        return False
    found = may_end_from_outside(looked_at(memory), movers(memory.tree, memory.rules), memory.rules)
    return found is not None and found[0] == "presence"


def _may_poll(memory: Memory, able: tuple[Process, ...]) -> bool:
    """Whether one of them sleeps for a time, and nobody could see where."""
    stacks = {(stack.pid, stack.started): stack for stack in looked_at(memory)}
    for process in able:
        stack = stacks.get(process.identity)
        if stack is None:
            return True
        channel = stack.wait_channel
        is_asleep = isinstance(channel, Unseen) or not channel or channel.startswith(SLEEPS)
        if isinstance(stack.threads, Unseen) and stack.is_python and is_asleep:
            return True
    return False


def is_in_vfork(memory: Memory) -> bool:
    """Say whether all that is in state D only waits for a child of vfork."""
    members = memory.tree.members if memory.tree is not None else ()
    asleep = [p for p in members if "D" in (p.thread_states or p.state)]
    channels = {(s.pid, s.started): (s.wait_channel, *s.other_channels) for s in looked_at(memory)}
    return bool(asleep) and all(
        (p.thread_states or p.state).count("D") == 1
        and any(isinstance(channel, str) and channel.startswith(VFORK) for channel in channels.get(p.identity, ()))
        for p in asleep
    )


def _machine(memory: Memory, sample: Sample) -> Waiting | None:
    """A starved start: its threads wait for the disk, or for a core."""
    if memory.unproductive_for < UNPROVEN or memory.idle_for >= short(memory.rules, phase_of(memory)):
        return None
    throttled, cpu = memory.outside.share("throttled"), memory.outside.share("cpu")
    if memory.activity_by == DISK_WAIT and not is_in_vfork(memory):
        why = "threads wait for the disk, and nothing was produced"
        return judged(Waiting, memory, sample, why, "disk", numbers=numbers(memory))
    if throttled is not None and throttled >= THROTTLED_SHARE:
        why = f"the CPU quota of its control group kept it from running for {100 * throttled:.0f} % of the time"
        return judged(Waiting, memory, sample, why, "host", numbers=numbers(memory))
    if memory.activity_by == RUNNABLE and cpu is not None and cpu >= STALLED_SHARE:
        why = f"its threads want to run, and this machine's cores are taken ({100 * cpu:.0f} % of the time)"
        return judged(Waiting, memory, sample, why, "host", numbers=numbers(memory))
    return None
