# ruff: noqa: PTH115, PTH116, PTH123, PTH208
"""Who belongs to a launch, and how all of it is ended: shared by the guardian and the supervisor.

Synchronous and standard library only, because the guardian loads this file by its path (``python -I -S``
knows no packages; pathlib and typing would double its start). A process is (pid, start time); whatever no
longer matches is somebody else.

The reads used here (``stat``, ``fdinfo``, ``wchan``) never wait for the process they ask about. ``cmdline``
does: it takes the memory-map lock, which a process stuck in a driver may hold for ever. See :class:`Titles`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import threading
import time
from collections import deque

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hangguard.act import _daemons

    Identity = tuple[int, int]
    LogId = tuple[int, int]
    Entries = Mapping[int, "Entry"]

AFTER_ROOT = 1.0
"""Seconds that members get to end by themselves after the root did."""
TRACKER_GRACE = 2.0
"""Seconds for resource trackers: left alone they unlink what the others left within 1.5 s (measured)."""
SETTLE = 5.0
"""Seconds after SIGKILL; what is still there then waits in the kernel."""
LONGEST_TITLE = 200
"""Characters of the command line of somebody who is gone."""
TRACKER = "resource_tracker import main"
"""In the command line of ``multiprocessing``'s and loky's tracker: ``python -c 'from … import main;main(4)'``."""

PIDFD_GET_INFO = 0xC040FF0B
PIDFD_INFO_EXIT = 1 << 3
"""Linux 6.15, include/uapi/linux/pidfd.h: the exit code of a process that was not our child."""


# ------------------------------------------------------------------------------------------ looking


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
    """Return the pids of this process's own children, zombies too; empty where the kernel does not tell.

    Raises :class:`OSError` where that could not be asked (no descriptors are left): nobody is then seen to be gone.
    """
    found: list[int] = []
    for task in os.listdir("/proc/self/task"):
        missing = (FileNotFoundError, ProcessLookupError)  # without CONFIG_PROC_CHILDREN; a thread that has ended
        with contextlib.suppress(*missing), open(f"/proc/self/task/{task}/children", "rb") as file:
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


# ---------------------------------------------------------------------------------------- signalling


def open_pidfd(identity: Identity) -> int | None:
    """Return a descriptor that means exactly this process; ``None``: it is gone, or there are no pidfds."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        pidfd = os.pidfd_open(identity[0])
    except OSError:
        return None
    entry = read_entry(identity[0])
    if entry is None or entry.identity != identity:
        os.close(pidfd)
        return None
    return pidfd


def send(identity: Identity, number: int, members: Iterable[Identity]) -> bool:
    """Signal a member; return whether the kernel took it.

    Refused (``False``) for whatever is not in ``members``, for pid 1 and below, for this process and for its
    ancestors.
    """
    pid = identity[0]
    if identity not in members or pid <= 1 or pid == os.getpid() or pid in ancestors(os.getpid()):
        return False
    pidfd = open_pidfd(identity)
    try:
        if pidfd is not None:
            signal.pidfd_send_signal(pidfd, number)
            return True
        entry = read_entry(pid)
        if entry is None or entry.identity != identity:
            return False
        os.kill(pid, number)  # no pidfds here: between the look above and this line lies as little as can be
    except OSError:
        return False
    else:
        return True
    finally:
        if pidfd is not None:
            os.close(pidfd)


def takes_sigterm(pid: int) -> str:
    """Return what SIGTERM would do to a process: ends, calls (a handler of its own), nothing; empty: not known.

    ``status`` does not wait for the process either.
    """
    try:
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            lines = dict(line.split(b":", 1) for line in file.read(8192).splitlines() if b":" in line)
        ignored, caught = int(lines[b"SigIgn"], 16), int(lines[b"SigCgt"], 16)
    except (OSError, ValueError, KeyError):
        return ""
    bit = 1 << (signal.SIGTERM - 1)
    return "nothing" if ignored & bit else "calls" if caught & bit else "ends"


def exit_code_of(pidfd: int) -> int | None:
    """Return how a process that was not our child ended, as ``Popen.returncode``; ``None``: not known.

    The kernel (6.15 and later) knows it once its parent has waited for it.
    """
    buffer = bytearray(64)
    struct.pack_into("Q", buffer, 0, PIDFD_INFO_EXIT)
    try:
        fcntl.ioctl(pidfd, PIDFD_GET_INFO, buffer)
    except OSError:
        return None
    if not struct.unpack_from("Q", buffer, 0)[0] & PIDFD_INFO_EXIT:
        return None
    return os.waitstatus_to_exitcode(struct.unpack_from("i", buffer, 60)[0])


class Titles:
    """Command lines, read in daemon threads of our own that may never come back."""

    def __init__(self) -> None:
        self._known: dict[Identity, str] = {}
        self._stuck = 0

    def __getitem__(self, identity: Identity) -> str:
        return self._known.get(identity, "")

    def forget(self) -> None:
        """Read again what comes next: a process may have executed another program since."""
        self._known = {}

    def learn(self, identities: Iterable[Identity], *, within: float = 0.2) -> None:
        """Read those that are not known, at most ``within`` seconds a process that blocks, and eight of those."""
        todo = deque(identity for identity in identities if identity not in self._known)
        while todo and self._stuck < 8:
            reader = threading.Thread(target=self._read, args=(todo, self._known), daemon=True)
            try:
                reader.start()
            except RuntimeError:  # no thread more is allowed here: they stay unknown
                return
            reader.join(within)
            if not reader.is_alive():
                return
            self._stuck += 1

    @staticmethod
    def _read(todo: deque[Identity], known: dict[Identity, str]) -> None:
        with contextlib.suppress(IndexError):
            while True:
                identity = todo.popleft()
                with contextlib.suppress(OSError), open(f"/proc/{identity[0]}/cmdline", "rb") as file:
                    known[identity] = file.read(4096).replace(b"\0", b" ").decode("utf-8", "replace").strip()


# -------------------------------------------------------------------------------------------- ending


class Ended:
    """What an :class:`Ending` came to.

    ``survivors``, ``daemons`` and ``processes`` (those that are gone) are mappings with the fields of
    ``facts.Survivor``, ``facts.Daemon`` and ``facts.EndedProcess``.
    """

    def __init__(
        self,
        members: frozenset[Identity],
        survivors: list[dict[str, int | str]],
        daemons: list[dict[str, int | str]],
        processes: list[dict[str, int | str | float]],
    ) -> None:
        self.members = members
        self.survivors = survivors
        self.daemons = daemons
        self.processes = processes

    @property
    def ended(self) -> int:
        """Return how many members are gone."""
        return len(self.members) - len(self.survivors)


class Ending:
    """The stop of one launch, as a state machine that never waits: call :meth:`tick` when it is due.

    ``find`` returns the living members in one scan; it is asked again at every tick, and whatever it ever
    returned stays a member. The root gets SIGTERM and ``grace`` seconds, and whoever it could not tell of it
    in its turn (a shell that waits for the server has no handler); then every member gets SIGKILL, and again
    until two scans find nobody new (a process may fork while it is killed); resource trackers come last.
    ``step`` says where it is: asking, grace, killing, trackers, done.
    """

    def __init__(
        self,
        find: Callable[[Entries], Iterable[Identity]],
        *,
        root: Identity | None,
        grace: float,
        children: Callable[[], Iterable[int]] | None = None,
        daemons: _daemons.Daemons | None = None,
        proofs: Mapping[Identity, str] | None = None,
        hold: Callable[[], bool] | None = None,
    ) -> None:
        """``children``: for the subreaper of the launch alone, its own children, after it has reaped.

        ``daemons``: who decides what is left alone; ``find`` must ask the same. ``proofs``: where ``find`` puts why
        somebody is a member. ``hold`` is asked when the grace is over and somebody still lives: while it says so,
        nobody is killed yet.
        """
        self.step = "asking"
        self.left = 0
        self.result: Ended | None = None
        self._find = find
        self._children = children
        self._daemons = daemons
        self._proofs = {} if proofs is None else proofs
        self._hold = hold
        self._root = root
        self._root_tells_nobody = False
        self._grace = grace
        self._began: float | None = None
        self._sent: dict[Identity, str] = {}
        self._gone_after: dict[Identity, float] = {}
        self._grace_ends = float("inf")
        self._root_seen_dead = False
        self._hurried = False
        self._members: set[Identity] = set()
        self._killed: set[Identity] = set()
        self._hidden: set[Identity] = set()
        self._quiet = 0
        self._is_quiet = False
        self._settle_ends: float | None = None
        self._trackers_end: float | None = None
        self._titles = Titles()
        self._names: dict[Identity, str] = {}  # as they were called last
        self._entries: Entries = {}
        self._pause = 0.01
        self._now = 0.0

    def hurry(self) -> None:
        """End the grace at the next tick. May be called from any thread or signal handler."""
        self._hurried = True

    def shorten(self, until: float) -> None:
        """Let the grace end at ``until`` at the latest."""
        self._grace_ends = min(self._grace_ends, until)

    def tick(self, now: float) -> float | None:
        """Do what is due and return when to be called again; ``None``: done, see ``result``."""
        if self.result is not None:
            return None
        if self._began is None:
            self._began = now
        self._now = now
        if self.step == "asking":
            self._ask(now)
        if self.step == "grace":
            if not self._grace_is_over(now) or (self.left and self._hold is not None and self._hold()):
                return self._later(now)
            self.step = "killing"
            self._titles.forget()
        return self._kill(now)

    def run(self) -> Ended:
        """Tick until done: for a thread that has nothing else to do."""
        while (due := self.tick(time.monotonic())) is not None:
            time.sleep(min(0.1, max(0.0, due - time.monotonic())))
        assert self.result is not None
        return self.result

    def _ask(self, now: float) -> None:
        living = self._look()
        if self._root is not None and self._root[0] in self._hidden_children():
            self._ask_hidden(self._root)
        elif self._root not in living:
            # The launcher is gone and its workers are not: the oldest of them leads now.
            workers = sorted(self._workers(living), key=lambda member: member[1])
            self._root = workers[0] if workers else None
        if self._root is not None and self._root in living:
            self._root_tells_nobody = takes_sigterm(self._root[0]) == "ends"
            self._send(self._root, signal.SIGTERM)
        # A stopped process does not even take SIGTERM. Those under a debugger ("t") are left to it.
        for member in living:
            if self._entries[member[0]].state == "T" or member == self._root:
                self._send(member, signal.SIGCONT)
        self.shorten(now + self._grace)
        self.step = "grace"

    def _grace_is_over(self, now: float) -> bool:
        living, hidden = self._look(), self._hidden_children()
        if self._hurried or now >= self._grace_ends or not (self._workers(living) or hidden):
            return True
        is_there = self._root in living or (self._root is not None and self._root[0] in hidden)
        if not self._root_seen_dead and not is_there and not self._ask_next(living):
            self._root_seen_dead = True
            self.shorten(now + AFTER_ROOT)
        return False

    def _ask_next(self, living: set[Identity]) -> bool:
        """Let the oldest that hears SIGTERM lead where the leader died of it and told nobody; say whether one does.

        A shell that started the server and waits has no handler: it ends at once, and the server behind it has not
        been asked yet.
        """
        if not self._root_tells_nobody:
            return False
        for worker in sorted(self._workers(living), key=lambda member: (member[1], member[0])):
            answer = takes_sigterm(worker[0])
            if answer in ("ends", "calls"):
                self._root, self._root_tells_nobody = worker, answer == "ends"
                self._send(worker, signal.SIGTERM)
                return True
        return False

    def _kill(self, now: float) -> float | None:
        if self._settle_ends is None:
            self._settle_ends = now + SETTLE
        living = self._kill_until_quiet(sparing_trackers=True)
        if (self._workers(living) or not self._is_quiet) and now < self._settle_ends:
            return self._later(now)
        trackers = living - self._workers(living) - self._killed
        if trackers:
            # They end when the last process that could register something is gone, and clean up after all.
            self.step = "trackers"
            if self._trackers_end is None:
                self._trackers_end = now + TRACKER_GRACE
                for tracker in trackers:
                    self._send(tracker, signal.SIGCONT)
            if now < self._trackers_end:
                return self._later(now)
            self._settle_ends = max(self._settle_ends, now + 1.0)
            living = self._kill_until_quiet(sparing_trackers=False)
        if (living or self._hidden or not self._is_quiet) and now < self._settle_ends:
            return self._later(now)
        self._finish(living | self._hidden)
        return None

    def _kill_until_quiet(self, *, sparing_trackers: bool) -> set[Identity]:
        living: set[Identity] = set()
        self._quiet, self._is_quiet = 0, False
        for _ in range(64):
            living = self._look()
            due = (self._workers(living) if sparing_trackers else living) - self._killed
            for member in due:
                self._send(member, signal.SIGKILL)
            self._killed |= due
            relays = self._kill_relays(sparing_trackers=sparing_trackers)
            if not due and not relays and self._quiet >= 2:
                self._is_quiet = True
                break
        return living

    def _kill_relays(self, *, sparing_trackers: bool) -> bool:
        """Kill children of our own that no scan has seen; say whether one was there, or had just ended.

        A process that forks and exits at once hops from pid to pid, and a scan of /proc takes milliseconds: it
        may miss every hop. But whoever loses his parent becomes a child of the subreaper, at the end of its
        list. So a list of its children that holds nobody, after all that had ended were reaped, is the proof that
        nothing of the launch is left. Their pids cannot be reused before we reap them.
        """
        found, self._hidden = False, set()
        for pid in self._children() if self._children is not None else ():
            entry = read_entry(pid)
            if entry is None:
                found = self._kill_hidden((pid, 0)) or found
                continue
            if not entry.dead and self._is_spared(entry):
                continue
            self._members.add(entry.identity)
            if not entry.dead and entry.identity not in self._killed:
                self._titles.learn([entry.identity])
                if sparing_trackers and TRACKER in self._titles[entry.identity]:
                    continue
                self._send(entry.identity, signal.SIGKILL)
                self._killed.add(entry.identity)
                found = True
            found = found or entry.dead
        return found

    def _is_spared(self, entry: Entry) -> bool:
        """Whether a child is a daemon of somebody else; one may have become a child of ours since the scan."""
        if self._daemons is None or entry.identity in self._members:
            return False
        if entry.identity in self._daemons.left:
            return True
        return bool(self._daemons.spare([entry.pid], {**self._entries, entry.pid: entry}))

    def _hidden_children(self) -> set[int]:
        children = self._children() if self._children is not None else ()
        return {pid for pid in children if read_entry(pid) is None}

    def _ask_hidden(self, child: Identity) -> None:
        """Ask a child of our own to end that /proc does not show: nobody else can have its pid before we reap it."""
        self._members.add(child)
        for number in (signal.SIGTERM, signal.SIGCONT):
            with contextlib.suppress(OSError):
                os.kill(child[0], number)

    def _kill_hidden(self, child: Identity) -> bool:
        """Kill a child of our own that /proc does not show: under hidepid what we may not trace, say another user's."""
        self._hidden.add(child)
        if child in self._killed:
            return False
        self._members.add(child)
        self._killed.add(child)
        with contextlib.suppress(OSError):
            os.kill(child[0], signal.SIGKILL)  # nobody else can have its pid before we reap it
            self._sent[child] = "SIGKILL"
        return True

    def _look(self) -> set[Identity]:
        self._entries = read_entries()
        found = set(self._find(self._entries))
        new = found - self._members
        self._members |= new
        self._quiet = 0 if new else self._quiet + 1
        living = {
            member
            for member in self._members
            if (entry := self._entries.get(member[0])) and entry.identity == member and not entry.dead
        }
        self._titles.learn(living)
        self._names.update((member, title) for member in living if (title := self._titles[member]))
        self.left = len(living)
        for member in self._members - living - self._gone_after.keys():
            self._gone_after[member] = self._now - (self._began or self._now)
        return living

    def _workers(self, living: set[Identity]) -> set[Identity]:
        return {member for member in living if TRACKER not in self._titles[member]}

    def _send(self, member: Identity, number: int) -> None:
        if send(member, number, self._members) and number in {signal.SIGTERM, signal.SIGKILL}:
            self._sent[member] = signal.Signals(number).name

    def _later(self, now: float) -> float:
        self._pause = min(0.1, self._pause * 1.3)
        return now + self._pause

    def _finish(self, living: set[Identity]) -> None:
        self.step = "done"
        survivors = [self._survivor(member) for member in sorted(living)]
        ended = [self._gone(member) for member in sorted(self._members - living)]
        self.result = Ended(frozenset(self._members), survivors, self._left_alone(), ended)

    def _gone(self, member: Identity) -> dict[str, int | str | float]:
        return {
            "pid": member[0],
            "started": member[1],
            "title": self._names.get(member, "")[:LONGEST_TITLE],
            "signal": self._sent.get(member, ""),
            "proof": self._proofs.get(member, DESCENDS),
            "seconds": round(self._gone_after.get(member, 0.0), 3),
        }

    def _left_alone(self) -> list[dict[str, int | str]]:
        if self._daemons is None:
            return []
        left = {who: why for who, why in self._daemons.left.items() if who not in self._members and is_alive(who)}
        self._titles.learn(left)
        return [
            {"pid": who[0], "started": who[1], "title": self._titles[who], "why": why}
            for who, why in sorted(left.items())
        ]

    def _survivor(self, member: Identity) -> dict[str, int | str]:
        channel = ""
        with contextlib.suppress(OSError), open(f"/proc/{member[0]}/wchan", encoding="ascii") as file:
            channel = file.read(64)
        return {
            "pid": member[0],
            "started": member[1],
            "title": self._titles[member],
            "state": "?" if member in self._hidden else self._entries[member[0]].state,
            "wait_channel": "" if channel == "0" else channel,
        }
