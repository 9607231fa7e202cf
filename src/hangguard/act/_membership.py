# ruff: noqa: PTH115, PTH116, PTH123, PTH208
"""Who belongs to a launch: shared by the guardian and the supervisor.

Synchronous and standard library only, because the guardian imports it (``python -I -S`` knows no packages; pathlib and
typing would double its start). A process is (pid, start time); whatever no longer matches is somebody else.

The reads used here (``stat``, ``fdinfo``) never wait for the process they ask about.
"""

from __future__ import annotations

import contextlib
import os

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    Identity = tuple[int, int]
    LogId = tuple[int, int]
    Entries = Mapping[int, "Entry"]


class Entry:
    """One line of ``/proc/PID/stat``: what a decision about a process needs."""

    __slots__ = ("parent", "pid", "session", "started", "state", "threads")

    def __init__(self, pid: int, parent: int, session: int, started: int, state: str, threads: int) -> None:
        self.pid = pid
        self.parent = parent
        self.session = session
        self.started = started
        self.state = state
        self.threads = threads

    @property
    def identity(self) -> Identity:
        """Return (pid, start time in clock ticks since boot)."""
        return (self.pid, self.started)

    @property
    def dead(self) -> bool:
        """Whether it has ended. A leader that ended while other threads live is a zombie too, and is not dead."""
        return self.state in "ZXx" and self.threads <= 1


def read_entry(pid: int) -> Entry | None:
    """Return what ``/proc`` says of a process; ``None``: there is none, or it is hidden from us."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            text = file.read(1024)
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return None
    # The name in parentheses may hold blanks and parentheses of its own: proc_pid_stat(5).
    fields = text[text.rfind(b")") + 2 :].split()
    if len(fields) < 20:
        return None
    return Entry(pid, int(fields[1]), int(fields[3]), int(fields[19]), chr(fields[0][0]), int(fields[17]))


def read_entries() -> dict[int, Entry]:
    """Scan ``/proc`` once."""
    found = (read_entry(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {entry.pid: entry for entry in found if entry is not None}


def why_proc_misleads() -> str:
    """Return why ``/proc`` cannot be believed; empty: it shows the processes that our own pids mean.

    After ``unshare --pid`` without ``--mount-proc``, for example, its numbers are those of another namespace:
    what it says of "our" children is then said of strangers.
    """
    try:
        shown = os.readlink("/proc/self")
    except OSError as problem:
        return f"/proc cannot be read ({problem.strerror})"
    if shown != str(os.getpid()):
        return f"/proc is that of another pid namespace (this process is {os.getpid()} here and {shown} there)"
    return ""


def is_alive(identity: Identity) -> bool:
    """Whether exactly this process still lives; a zombie does not."""
    entry = read_entry(identity[0])
    return entry is not None and entry.identity == identity and not entry.dead


def descendants(of_pids: Iterable[int], entries: Entries) -> set[int]:
    """Return the pids of all children, grandchildren …, without ``of_pids`` themselves."""
    children: dict[int, list[int]] = {}
    for entry in entries.values():
        children.setdefault(entry.parent, []).append(entry.pid)
    found: set[int] = set()
    todo = list(of_pids)
    while todo:
        for child in children.get(todo.pop(), ()):
            if child not in found:
                found.add(child)
                todo.append(child)
    return found


def own_children() -> list[int]:
    """Return the pids of this process's own children, see :func:`children_of`."""
    return children_of("self")


def children_of(process: int | str) -> list[int]:
    """Return the pids of a process's own children, zombies too; empty where the kernel does not tell.

    Raises :class:`OSError` where that could not be asked (no descriptors are left): nobody is then seen to be gone.
    """
    found: list[int] = []
    for task in os.listdir(f"/proc/{process}/task"):
        missing = (FileNotFoundError, ProcessLookupError)  # without CONFIG_PROC_CHILDREN; a thread that has ended
        with contextlib.suppress(*missing), open(f"/proc/{process}/task/{task}/children", "rb") as file:
            found += [int(pid) for pid in file.read().split()]
    return found


def ancestors(of_pid: int) -> set[int]:
    """Return the pids of parent, grandparent … up to and with 1."""
    found: set[int] = {1}
    entry = read_entry(of_pid)
    while entry is not None and entry.parent not in found and entry.parent > 0:
        found.add(entry.parent)
        entry = read_entry(entry.parent)
    return found


def log_writers(log_id: LogId, entries: Entries, *, inherited: bool = False) -> set[int]:
    """Return the pids of all whose fd 1 or 2 is open for writing on the log (device, inode).

    This finds members that left the tree, changed their title and emptied their environment. ``tail -f``
    has it open for reading, on another descriptor, and does not count. With ``inherited`` only a descriptor
    counts that came from the guardian: whoever opened the file himself (``date >> log``) is a stranger.
    """
    return {
        pid
        for pid, entry in entries.items()
        if not entry.dead and any(writes_to(_shown_at(entry), fd, log_id, inherited=inherited) for fd in (1, 2))
    }


def _shown_at(entry: Entry) -> int | str:
    """Return where below ``/proc`` the descriptors are: a leader that ended shows none, another thread has them."""
    if entry.state == "Z":
        with contextlib.suppress(OSError):
            threads = [name for name in os.listdir(f"/proc/{entry.pid}/task") if name != str(entry.pid)]
            return f"{entry.pid}/task/{threads[0]}" if threads else entry.pid
    return entry.pid


def writes_to(pid: int | str, fd: int, log_id: LogId, *, inherited: bool = False) -> bool:
    """Whether a process (or ``PID/task/TID``) has the log open for writing there; ``inherited`` as above."""
    try:
        with open(f"/proc/{pid}/fdinfo/{fd}", "rb", buffering=0) as file:
            text = file.read(1024)
        lines = dict(line.split(b":", 1) for line in text.splitlines() if b":" in line)
        if int(lines.get(b"flags", b"0"), 8) & os.O_ACCMODE == os.O_RDONLY:
            return False
        # The guardian's flock belongs to what it opened, and is shown wherever that went by fork (proc_pid_fdinfo(5),
        # Linux 4.1); another open of the same file does not show it.
        if inherited and b"FLOCK" not in text:
            return False
        # Linux 5.14 prints the inode. A stat of a stranger's file could wait for a dead network disk, so it
        # is asked only where the number matches already.
        inode = lines.get(b"ino")
        if inode is not None and int(inode) != log_id[1]:
            return False
        status = os.stat(f"/proc/{pid}/fd/{fd}")
    except (OSError, ValueError):
        return False
    return (status.st_dev, status.st_ino) == log_id


LAUNCHED = "the run launched it"
SEEN = "it was seen as a member, and its start time agrees"
WRITES = "it writes to the run's log, through what its guardian opened"
DESCENDS = "it descends from a member"
"""Why somebody is a member: in words that follow a "because"."""


def find_members(
    entries: Entries,
    *,
    below: Iterable[int] = (),
    remembered: Iterable[Identity] = (),
    log_id: LogId | None,
    spare: Callable[[Iterable[int], Entries], set[int]] | None = None,
    proved: Mapping[int, str] | None = None,
    proofs: dict[Identity, str] | None = None,
) -> set[Identity]:
    """Return all living members: below a process, remembered, writing to the log, or a descendant of those.

    ``spare`` tells which of them are daemons of somebody else, as ``_daemons`` does. ``proved``: pids that the caller
    has proved to be members in another way, each with its proof. ``proofs`` takes the proof of each one found.
    """
    found = {pid: SEEN for pid, started in remembered if pid in entries and entries[pid].started == started}
    if log_id is not None:
        found.update((pid, WRITES) for pid in log_writers(log_id, entries, inherited=True) if pid not in found)
    found = {**(proved or {}), **found}
    # Whoever started us is no member, whatever it writes to, and so are its other children.
    never = ancestors(os.getpid()) | {os.getpid()}
    roots = set(found) - never
    pids = (roots | descendants([*below, *roots], entries)) - never
    if spare is not None:
        pids -= spare(pids, entries)
    members = {entries[pid].identity for pid in pids if pid in entries and not entries[pid].dead}
    if proofs is not None:
        for member in members:
            proofs.setdefault(member, found.get(member[0], DESCENDS))
    return members
