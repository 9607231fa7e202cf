"""Whether there is room: what earlier runs left, locks, shared memory, memory, disk, limits."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from hangguard.facts import Check, EarlierRun, LockFile, Room, Unseen
from hangguard.judge.checks.ground import GIB, MIB, Ground, size, unseen
from hangguard.judge.patience import STALE

SHM_FOR_RANKS = GIB
"""Free bytes of /dev/shm that ranks want: NCCL's guide starts its containers with ``--shm-size=1g``, SGLang's with 32g,
vLLM's with the host's; Docker's own default of 64 MiB is what fails (vllm#1710, torchtitan#853)."""
SHM_FOR_ONE = 512 * MIB
"""The same for one rank: vLLM 0.32 maps 168 and 252 MB between its engine and one worker, measured."""
MEMORY_FOR_FRONT_END, MEMORY_FOR_RANK = 3 * GIB, 2 * GIB
"""Without weights: SGLang 0.5.23 with one rank held 1.26, 1.33 and 1.22 GB in its three processes, vLLM 0.32 alike."""
LOG_ROOM, CACHE_ROOM = GIB, 5 * GIB
"""A compiled model and its kernels take some GiB (torch.compile, FlashInfer, Triton)."""
FEW_FILES = 8192
"""Each client takes a descriptor, each process some hundreds. Both engines raise the soft limit as far as the hard
one, to 65,535 at most (``set_ulimit`` of vLLM and SGLang)."""
TASKS_FOR_START, TASKS_FOR_RANK = 256, 256
"""SGLang 0.5.23 with one rank ran 57 threads on two cores; with many cores torch starts one for each, in every rank."""


def earlier_runs(ground: Ground) -> Iterator[Check]:
    """Runs of ours that are not over."""
    runs = ground.seen.earlier
    if isinstance(runs, Unseen):
        yield unseen("earlier runs", runs, means="whether something of them is left is not known")
        return
    for run in runs:
        who = ", ".join(f"{title[:60] or 'process'} ({pid})" for pid, title in run.members[:3])
        more = f" and {len(run.members) - 3} more" if len(run.members) > 3 else ""
        if run.guardian is not None:
            yield Check(
                what="earlier runs", answer="good", found=f"run {run.run_id} goes on, guarded by process {run.guardian}"
            )
        elif run.members:
            yield Check(
                what="earlier runs",
                answer="poor",
                found=f"run {run.run_id} has no guardian any more, and left {who}{more}",
                means="they hold what they held: memory, GPUs, a port",
                helps=_clean(run),
            )
        else:
            yield Check(
                what="earlier runs",
                answer="poor",
                found=f"run {run.run_id} left {', '.join(run.files[:3])}"
                + (f" and {len(run.files) - 3} more" if len(run.files) > 3 else ""),
                means="it takes memory until somebody removes it",
                helps=_clean(run),
            )
    if not runs:
        yield Check(what="earlier runs", answer="good", found="none left anything")


def _clean(run: EarlierRun) -> str:
    """Return what shows what there is, and how to end it; by its path, for it may lie in another place than usual."""
    is_usual = run.path.endswith(f"/hangguard/runs/{run.run_id}")
    return f"hangguard clean {run.run_id if is_usual else shlex.quote(run.path)}"


def locks(ground: Ground) -> Iterator[Check]:
    """Lock files in the folders of this launch."""
    found = ground.seen.locks
    if isinstance(found, Unseen):
        yield unseen("lock files", found, means="a start may wait for one of them")
        return
    in_the_way = [lock for lock in found if _stands_in_the_way(lock)]
    for lock in in_the_way:
        yield _lock(lock)
    if not in_the_way:
        yield Check(what="lock files", answer="good", found="nobody holds one in the caches of this launch")


def _stands_in_the_way(lock: LockFile) -> bool:
    return lock.owner is not None or bool(lock.owner_title) or lock.kind == "presence"


def _lock(lock: LockFile) -> Check:
    if lock.owner is not None or lock.kind == "flock":
        who = f"process {lock.owner} ({lock.owner_title[:80]})" if lock.owner is not None else lock.owner_title
        return Check(
            what="lock files",
            answer="poor",
            found=f"{who} holds {lock.path}",
            means="a start that needs it waits until that one is done",
        )
    age = lock.age_seconds or 0.0
    is_stale = age >= STALE
    return Check(
        what="lock files",
        answer="poor",
        found=f"{lock.path}: nobody was seen to build behind it" + (f", for {age:.0f} s" if is_stale else ""),
        means="a start that builds this extension waits for ever while it is there (pytorch#189245); another machine "
        "that shares the folder may still be building",
        helps=f"rm {shlex.quote(lock.path)}" if is_stale else "",
    )


def shared_memory(ground: Ground) -> Iterator[Check]:
    """Whether ranks find room in /dev/shm."""
    room, host = ground.seen.shm, ground.seen.host
    what, ranks = "/dev/shm", ground.launch.ranks  # noqa: S108 - a name only
    if isinstance(room, Unseen):
        yield unseen(what, room, means="ranks exchange their data there")
        return
    total = host.shm_total_bytes if not isinstance(host, Unseen) else host
    found = f"{size(room.free_bytes)} free" + (f" of {size(total)}" if not isinstance(total, Unseen) else "")
    wanted = (SHM_FOR_RANKS if ranks > 1 else SHM_FOR_ONE) if ground.is_known else 0
    if not room.is_writable:
        yield Check(
            what=what,
            answer="missing",
            found=f"{room.path} cannot be written",
            means="an engine whose processes talk through it ends at its start",
            helps="--ipc=host, or --shm-size=16g, without --read-only for it",
        )
    elif room.free_bytes < wanted:
        yield Check(
            what=what,
            answer="poor",
            found=found,
            means=f"{ranks if ranks > 1 else 'one'} rank{'s' if ranks > 1 else ''} want about {size(wanted)}; where it "
            "is full a process dies by SIGBUS, or waits for another that has",
            helps="docker run --shm-size=16g (or --ipc=host); without a container: mount -o remount,size=16g /dev/shm",
        )
    else:
        yield Check(what=what, answer="good", found=found)


def memory(ground: Ground) -> Iterator[Check]:
    """Whether the machine, and the share of it that this launch has, holds the engine's processes."""
    host, group = ground.seen.host, ground.seen.memory_limit
    if isinstance(host, Unseen):
        yield unseen("memory", host, means="whether there is enough is not known")
        return
    free, limit = host.memory_available_bytes, ""
    if not isinstance(group, Unseen) and group.limit_bytes is not None:
        free = min(free, max(0, group.limit_bytes - group.used_bytes))
        limit = f"; the control group may use {size(group.limit_bytes)} of {size(host.memory_total_bytes)}"
    elif isinstance(group, Unseen):
        limit = f"; a limit of its control group is not seen ({group.reason})"
    wanted = MEMORY_FOR_FRONT_END + ground.launch.ranks * MEMORY_FOR_RANK if ground.is_known else 0
    if free < wanted:
        yield Check(
            what="memory",
            answer="poor",
            found=f"{size(free)} free{limit}",
            means=f"the processes alone want about {size(wanted)}, without weights; the kernel kills one when it ends",
            helps="docker run --memory, or the pod's limits.memory" if "may use" in limit else "",
        )
    else:
        yield Check(what="memory", answer="good", found=f"{size(free)} free{limit}")


def caches(ground: Ground) -> Iterator[Check]:
    """Whether compiled kernels find room, and can be kept."""
    rooms = ground.seen.caches
    if isinstance(rooms, Unseen):
        yield unseen("caches", rooms, means="a compile may stand still there")
    elif ground.is_known and rooms:
        closed = [room for room in rooms if not room.is_writable]
        fullest = min(rooms, key=lambda room: room.free_bytes)
        if closed:
            yield Check(
                what="caches",
                answer="poor",
                found=f"{closed[0].path} cannot be written" + (f", nor {len(closed) - 1} more" if closed[1:] else ""),
                means="every start compiles anew, in silence for a minute and more, or ends",
                helps="XDG_CACHE_HOME=/a/folder/that/stays",
            )
        elif fullest.free_bytes < CACHE_ROOM:
            yield _full("caches", fullest, CACHE_ROOM, "a compile ends with 'No space left on device'")
        else:
            yield Check(what="caches", answer="good", found=f"{size(fullest.free_bytes)} free at {fullest.path}")


def _full(what: str, room: Room, wanted: int, means: str) -> Check:
    return Check(
        what=what,
        answer="poor",
        found=f"{size(room.free_bytes)} free at {room.path}, and about {size(wanted)} are wanted",
        means=means,
        helps=f"df -h {shlex.quote(room.path)}",
    )


def run_folder(ground: Ground) -> Iterator[Check]:
    """Whether log and evidence can be kept: without a log nothing may be called a hang."""
    what, rooms = "log and evidence", ground.seen.run_folders
    usable = () if isinstance(rooms, Unseen) else tuple(room for room in rooms if room.is_writable)
    if isinstance(rooms, Unseen) or not usable:
        tried = "" if isinstance(rooms, Unseen) else ", ".join(room.path for room in rooms)
        yield Check(
            what=what,
            answer="unseen" if isinstance(rooms, Unseen) else "missing",
            found=rooms.reason if isinstance(rooms, Unseen) else f"none of these can be written: {tried}",
            patience=ground.without_sight,
            loses="a log, without which nothing is called a hang, and the evidence of a failed attempt",
            helps="--run-dir /a/folder/that/can/be/written",
        )
    elif usable[0] is not rooms[0]:
        yield Check(
            what=what,
            answer="poor",
            found=f"{rooms[0].path} cannot be written: they go to {usable[0].path}",
            loses="the evidence, at the machine's or the container's next start",
            helps="--run-dir /a/folder/that/stays",
        )
    elif usable[0].free_bytes < LOG_ROOM:
        yield _full(what, usable[0], LOG_ROOM, "a log that cannot grow stands still like a hang")
    else:
        yield Check(what=what, answer="good", found=f"{size(usable[0].free_bytes)} free at {usable[0].path}")


# ------------------------------------------------------------------------------------------------ limits


def open_files(ground: Ground) -> Iterator[Check]:
    """The limit of open files."""
    limits = ground.seen.limits
    if isinstance(limits, Unseen):
        yield unseen("limits", limits)
        return
    hard, soft = limits.open_files.hard, limits.open_files.soft
    found = f"{_count(soft)}, and may be raised to {_count(hard)}" if soft != hard else _count(soft)
    if hard is not None and hard < FEW_FILES:
        yield Check(
            what="open files",
            answer="poor",
            found=found,
            means="every client takes one, and a server that has none left accepts nobody and looks hung",
            helps="ulimit -n 65535; docker run --ulimit nofile=65535; LimitNOFILE= of a unit",
        )
    else:
        yield Check(what="open files", answer="good", found=found)


def locked_memory(ground: Ground) -> Iterator[Check]:
    """The limit of locked memory, which RDMA between machines needs; memory that CUDA pins does not count."""
    limits = ground.seen.limits
    if isinstance(limits, Unseen):
        return
    soft = limits.locked_bytes.soft
    if ground.launch.nodes > 1 and soft is not None:
        yield Check(
            what="locked memory",
            answer="poor",
            found=size(soft),
            means="NCCL registers its buffers for InfiniBand as locked memory, and fails or falls back without",
            helps="ulimit -l unlimited; docker run --ulimit memlock=-1",
        )
    else:
        yield Check(what="locked memory", answer="good", found="unlimited" if soft is None else size(soft))


def tasks(ground: Ground) -> Iterator[Check]:
    """How many processes and threads there may be."""
    limits = ground.seen.limits
    if isinstance(limits, Unseen):
        return
    left, by = limits.tasks_left, limits.tasks_limited_by
    wanted = TASKS_FOR_START + ground.launch.ranks * TASKS_FOR_RANK if ground.is_known else 0
    if left is not None and left < wanted:
        yield Check(
            what="threads",
            answer="poor",
            found=f"{left} more may be started ({by})",
            means=f"this launch may want {wanted}: what cannot start a thread ends, or waits for ever for its answer",
            helps="ulimit -u unlimited; docker run --pids-limit -1; podPidsLimit of the kubelet",
        )
    else:
        found = "no limit" if left is None else f"{left} more may be started ({by})"
        yield Check(what="threads", answer="good", found=found)


def core_dumps(ground: Ground) -> Iterator[Check]:
    """Core dumps: hangguard switches them off, and only then asks a dying process for its last words."""
    limits = ground.seen.limits
    if not isinstance(limits, Unseen):
        yield Check(what="core dumps", answer="good", found="hangguard switches them off for the server")


def _count(limit: int | None) -> str:
    return "unlimited" if limit is None else f"{limit}"
