"""What goes wrong around the members, remembered: faults of boards, kills for want of memory, waits in the driver."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hangguard.facts import NOT_ASKED, Communicator, Gpu, GpuFault, Host, Log, Process, Sample, Stack, Tree, Unseen

# https://docs.nvidia.com/deploy/xid-errors/, the Xid catalogue.
BROKEN_XIDS = frozenset({48, 62, 64, 79, 95, 119, 120, 140, 143})
"""Xids after which the catalogue asks for a reset of the board, a reboot or support: uncorrectable memory (48, 64, 95,
140), the board's own processors (62, 119, 120), its start (143), its place on the bus (79)."""

WORN_XIDS = frozenset({61, 63, 74, 92, 94, 109, 110, 121, 122, 123, 149, 154})
"""Xids of the hardware that a program may outlive (a row was remapped, an error contained or corrected, a link came
back): they count only when nothing moves any more. The others are those of programs (13, 31, 32, 38, 43, 45, 68, 69 …):
45 follows every kill in the middle of work. They support a crash and prove nothing of the board."""

DRIVER_CHANNEL = re.compile(r"\b(?:nvidia|nvkms|uvm_|nv_|_nv\d|os_acquire_|rm_)")
"""Wait channels inside NVIDIA's kernel modules (nvidia.ko, nvidia-uvm.ko, nvidia-modeset.ko). A disk has nvme_, vfork
has kernel_clone: neither is one."""

COREDUMPS = re.compile(
    r"Waiting ([\d.]+) seconds for CUDA coredumps|Sleeping ([\d.]+) seconds before crash diagnostics"
)
"""What SGLang says between a crash and its end (0.5.13 and later): 5 s, py-spy of all, then 60 s."""

COREDUMPS_SLACK = 15.0
"""Seconds beyond those that SGLang names: it looks at every scheduler in between."""


@dataclass(frozen=True, slots=True)
class BoardFault:
    """A fault since the launch, and on which board."""

    uuid: str
    index: int
    fault: GpuFault

    @property
    def is_broken(self) -> bool:
        """Whether the board needs a reset or more, whatever the program does."""
        return self.fault.kind == "lost" or (self.fault.kind == "xid" and self.fault.code in BROKEN_XIDS)

    @property
    def is_of_the_board(self) -> bool:
        """Whether it is a fault of the hardware at all."""
        worn = self.fault.kind != "xid" or self.fault.code in WORN_XIDS
        return self.is_broken or (worn and not self.fault.by_program)

    def __str__(self) -> str:
        """Return one line."""
        code = f" {self.fault.code}" if self.fault.code is not None else ""
        detail = f": {self.fault.detail}" if self.fault.detail else ""
        return f"GPU {self.index}: {self.fault.kind}{code}{detail}"


@dataclass(frozen=True, slots=True)
class InDriver:
    """A member that waits inside the driver and cannot be ended."""

    pid: int
    started: int
    title: str
    channel: str
    since: float


@dataclass(frozen=True, slots=True)
class Trouble:
    """All of it, of one attempt."""

    since: float | None = None
    """When the attempt was first looked at, monotonic."""
    faults: tuple[BoardFault, ...] = ()
    """Those since then."""
    used_boards: frozenset[str] = frozenset()
    """Boards (UUIDs) on which a member was seen."""
    cgroup_oom_before: int | None = None
    cgroup_oom_kills: int | None = None
    """Since then, in the launch's own control group; ``None``: not seen."""
    shm_free_share: float | None = None
    """The lowest free share of /dev/shm."""
    in_driver: tuple[InDriver, ...] = ()
    communicators: tuple[Communicator, ...] = ()
    """What NCCL's own thread told last of each communicator."""
    communicators_unseen: str = "NCCL was not asked"
    members: frozenset[tuple[int, int]] = frozenset()
    """Identities of the last tree that was seen."""
    settled: frozenset[tuple[int, int]] = frozenset()
    """No children on their way from fork to exec: they were there in two trees in succession, or have a title of their
    own and not that of their parent."""
    dumping_until: float = 0.0
    """Until when the engine says that it gathers what its crash left, monotonic."""

    def of_the_board(self) -> str:
        """Return the fault of a board that members use after which no program goes on; "" if there is none."""
        return next((str(f) for f in self.faults if f.is_broken and self.may_be_ours(f) is not False), "")

    def may_be_ours(self, fault: BoardFault) -> bool | None:
        """Say whether members use the board of a fault; ``None``: it cannot be told (in a container, for example)."""
        if fault.uuid in self.used_boards:
            return True
        return False if self.used_boards else None


def note_trouble(trouble: Trouble, sample: Sample) -> Trouble:
    """Return the memory after one more sample."""
    if trouble.since is None:
        trouble = replace(trouble, since=sample.t)
    members = () if isinstance(sample.tree, Unseen) else sample.tree.members
    if not isinstance(sample.tree, Unseen):
        trouble = _note_members(trouble, sample.tree)
    if not isinstance(sample.gpus, Unseen):
        trouble = _note_boards(trouble, sample.gpus, {p.pid for p in members})
    if not isinstance(sample.host, Unseen):
        trouble = _note_host(trouble, sample.host)
    if not isinstance(sample.log, Unseen):
        trouble = _note_log(trouble, sample.log, sample.t)
    if not isinstance(sample.communicators, Unseen):
        trouble = replace(trouble, communicators=sample.communicators, communicators_unseen="")
    elif sample.communicators != NOT_ASKED:
        trouble = replace(trouble, communicators_unseen=sample.communicators.reason)
    stacks = () if isinstance(sample.stacks, Unseen) else sample.stacks
    return replace(trouble, in_driver=_in_driver(trouble.in_driver, members, stacks, sample.t))


def _note_members(trouble: Trouble, tree: Tree) -> Trouble:
    now = frozenset(p.identity for p in tree.members)
    gone = frozenset((d.pid, d.started) for d in tree.departed)
    kept = trouble.settled & (now | gone)
    titles = {p.pid: p.title for p in tree.members}
    own = frozenset(p.identity for p in tree.members if titles.get(p.parent, p.title) != p.title)
    return replace(trouble, members=now, settled=kept | own | (trouble.members & now))


def _note_boards(trouble: Trouble, gpus: tuple[Gpu, ...], pids: set[int]) -> Trouble:
    since = trouble.since or 0.0
    used = {g.uuid for g in gpus if not isinstance(g.holders, Unseen) and any(h.pid in pids for h in g.holders)}
    found = tuple(
        BoardFault(gpu.uuid, gpu.index, fault)
        for gpu in gpus
        if not isinstance(gpu.faults, Unseen)
        for fault in gpu.faults
        if fault.at is not None and fault.at >= since
    )
    # A reader that was replaced forgets what its predecessor saw.
    kept = tuple(old for old in trouble.faults if all(_key(old) != _key(new) for new in found))
    return replace(trouble, faults=(*kept, *found)[-64:], used_boards=trouble.used_boards | used)


def _key(fault: BoardFault) -> tuple[object, ...]:
    return (fault.uuid, fault.fault.kind, fault.fault.code, fault.fault.at)


def _note_host(trouble: Trouble, host: Host) -> Trouble:
    kills = host.cgroup_oom_kills
    if not isinstance(kills, Unseen):
        before = kills if trouble.cgroup_oom_before is None else trouble.cgroup_oom_before
        trouble = replace(trouble, cgroup_oom_before=before, cgroup_oom_kills=kills - before)
    if isinstance(host.shm_total_bytes, Unseen) or isinstance(host.shm_free_bytes, Unseen) or not host.shm_total_bytes:
        return trouble
    share = host.shm_free_bytes / host.shm_total_bytes
    lowest = share if trouble.shm_free_share is None else min(share, trouble.shm_free_share)
    return replace(trouble, shm_free_share=lowest)


def _note_log(trouble: Trouble, log: Log, t: float) -> Trouble:
    for line in log.lines:
        if found := COREDUMPS.search(line):
            seconds = float(found[1] or found[2])
            trouble = replace(trouble, dumping_until=max(trouble.dumping_until, t + seconds + COREDUMPS_SLACK))
    return trouble


def _in_driver(
    before: tuple[InDriver, ...], members: tuple[Process, ...], stacks: tuple[Stack, ...], t: float
) -> tuple[InDriver, ...]:
    """Who waits in the driver, uninterruptibly: seen in a stack, and in state D in every sample since."""
    channels = {(s.pid, s.started): _driver_channel(s) for s in stacks}
    known = {(w.pid, w.started): w for w in before}
    found = []
    for process in members:
        if not _may_be_uninterruptible(process):
            continue
        old = known.get(process.identity)
        channel = channels.get(process.identity, old.channel if old else "")
        if channel and (old is not None or _is_uninterruptible(process)):
            since = old.since if old is not None else t
            found.append(InDriver(process.pid, process.started, process.title, channel, since))
    return tuple(found)


def _driver_channel(stack: Stack) -> str:
    channels = (stack.wait_channel, *stack.other_channels)
    return next((c for c in channels if isinstance(c, str) and DRIVER_CHANNEL.search(c)), "")


def _is_uninterruptible(process: Process) -> bool:
    return process.state == "D" or "D" in (process.thread_states or "")


def _may_be_uninterruptible(process: Process) -> bool:
    return _is_uninterruptible(process) or (process.thread_states is None and process.state not in "RTtZ")
