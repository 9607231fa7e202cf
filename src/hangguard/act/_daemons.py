# ruff: noqa: PTH115, PTH119, PTH123, PTH208
"""Daemons of somebody else below a launch: what outlives by design those who start it, and holds nothing of ours.

A build of the server starts sccache, a script of it tmux or an MPS control daemon: each serves others too, and is
left alone. Two proofs are asked for together. The program that it executes is a known one: its real name
(``/proc/PID/exe``), never a title, which anybody may set. And it stands apart: in a session of its own, with its
output elsewhere, with none of our GPUs, ports or shared memory. What cannot be looked at is not proved, and then it is
a member by its descent, as every other descendant.

What was started from there belongs to it, also when those between have ended: a job that outlives its shell is handed
to the reaper of the launch, and from then on nothing shows whose it was. So whoever was spared is known by identity.

Synchronous and standard library only, imported by the guardian. ``exe``, ``fd`` and ``/proc/net/tcp`` never
wait for the process that they are about; ``maps`` takes the memory-map lock, so it is read in a thread of its own.
"""

from __future__ import annotations

import os
import re
import threading

from hangguard.act import _membership

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

    Identity = _membership.Identity

DEVICES = r"/dev/(?:nvidia\d+|dxg)"
"""The files of GPUs. Not nvidiactl and nvidia-uvm: whoever holds memory has the file of a board too (measured: a child
forked by a CUDA process had 29 of those). WSL has dxg in the place of all."""
SHARED_MEMORY = "/dev/shm/"  # noqa: S108 - compared, nothing is made there
MAPS_WITHIN = 0.2
"""Seconds for the memory map of one process; who keeps the lock longer is not proved to be apart."""
MOST_STUCK = 4
LISTENS = b"0A"
"""TCP_LISTEN, include/net/tcp_states.h."""


class Kind:
    """A daemon that serves whoever comes, until somebody ends it."""

    __slots__ = ("executable", "has_helpers", "own_memory", "what")

    def __init__(self, executable: str, what: str, *, own_memory: str = "", has_helpers: bool = False) -> None:
        self.executable = executable
        self.what = what
        self.own_memory = own_memory
        """How the names in /dev/shm begin that are its own by design."""
        self.has_helpers = has_helpers
        """Whether its session has programs of its own kind under the name of an interpreter."""


KINDS = (
    # https://docs.nvidia.com/deploy/mps/ "nvidia-cuda-mps-control -d": serves every client of the machine until "quit".
    # Its nvidia-cuda-mps-server and nvidia-persistenced are not here: what they are for is to hold the boards.
    Kind("nvidia-cuda-mps-control", "the control daemon of CUDA's MPS"),
    # ray/_private/services.py: "ray start" leaves them until "ray stop", with dashboard, monitor and log monitor in
    # Python; src/ray/object_manager/plasma/dlmalloc.cc: "/plasmaXXXXXX" below /dev/shm is the object store.
    Kind("raylet", "a node of a Ray cluster", own_memory="plasma", has_helpers=True),
    Kind("gcs_server", "the head of a Ray cluster", own_memory="plasma", has_helpers=True),
    # tmux(1): the server ends with its last session. Seen with 3.3: a session of its own, fd 0 to 2 on /dev/null.
    Kind("tmux", "a tmux server"),
    Kind("screen", "a screen session"),  # screen(1): detached, it goes on
    # github.com/mozilla/sccache README: "It will terminate after 10 minutes of inactivity", by default.
    Kind("sccache", "sccache's server"),
    # ssh-agent(1), gpg-agent(1), dbus-daemon(1) --fork: seen with OpenSSH 9.2 and D-Bus 1.14 as tmux is.
    Kind("ssh-agent", "an ssh agent"),
    Kind("gpg-agent", "a gpg agent"),
    Kind("dbus-daemon", "a message bus"),
)
BY_EXECUTABLE = {kind.executable: kind for kind in KINDS}


class Daemons:
    """Finds them among the descendants of one launch. What once held something of ours is never spared again."""

    def __init__(
        self,
        *,
        root_pid: int,
        log_id: tuple[int, int] | None,
        port: int | None = None,
        devices: str = DEVICES,
    ) -> None:
        """``root_pid`` led the session of the launch; ``port`` is where it should answer."""
        self.left: dict[Identity, str] = {}
        """Who was spared so far, and why. Some may have ended since."""
        self._whose: dict[Identity, tuple[Kind, Identity]] = {}
        """Whose each of those in ``left`` is: the kind of the daemon and its identity."""
        self._told: set[Identity] = set()
        self._seen: set[Identity] = set()
        """Who may be, or may become, the program of a daemon."""
        self._root_pid = root_pid
        self._log_id = log_id
        self._port = port
        self._devices = re.compile(devices)
        self._ours: set[Identity] = set()
        self._readers: list[threading.Thread] = []
        self._listening: set[str] | None = None

    def copy(self) -> Daemons:
        """Return one that knows the same, for another thread."""
        copy = Daemons(root_pid=self._root_pid, log_id=self._log_id, port=self._port, devices=self._devices.pattern)
        copy.left, copy._whose, copy._ours = dict(self.left), dict(self._whose), set(self._ours)
        return copy

    def may_be_among(self, new: Iterable[Identity]) -> bool:
        """Whether one of these, or of those that were named before, may be a daemon now, or was spared, and lives.

        For who would have to scan ``/proc`` to learn more: this reads one link of each, and nobody else's.
        """
        self._seen.update(new)
        return self._sees_an_executable() or any(map(_membership.is_alive, self.left))

    def _sees_an_executable(self) -> bool:
        is_there = False
        for identity in tuple(self._seen):
            try:
                is_there = _executable(identity[0]) in BY_EXECUTABLE or is_there
            except (FileNotFoundError, ProcessLookupError):  # it has ended
                self._seen.discard(identity)
            except OSError:  # it hides its program; spare() would not know it either
                continue
        return is_there

    def news(self) -> list[list[int | str]] | None:
        """Return all who are known to be spared, as :meth:`hear` takes it; ``None``: the same as the last time."""
        if self._told == self._whose.keys():
            return None
        self._told = set(self._whose)
        return [[*who, kind.executable, *daemon] for who, (kind, daemon) in self._whose.items()]

    def hear(self, news: Iterable[Iterable[int | str]]) -> None:
        """Know those and nobody else: told by somebody who could see them below their daemon."""
        self._forget(set(self._whose))
        for pid, started, executable, *daemon in news:
            identity, kind = (int(pid), int(started)), BY_EXECUTABLE.get(str(executable))
            if kind is not None and identity not in self._ours:
                self._know(identity, kind, (int(daemon[0]), int(daemon[1])))

    def spare(self, pids: Iterable[int], entries: _membership.Entries) -> set[int]:
        """Return which of these descendants of the launch are no members: daemons, and what belongs to those."""
        pids = {pid for pid in pids if pid in entries and not entries[pid].dead}
        candidates = {pid: kind for pid in pids if (kind := self._kind_of(pid, entries)) is not None}
        if not candidates and not self._whose:
            return set()
        self._forget_the_gone(entries)
        self._listening = None
        with_them = set(candidates) | _membership.descendants(candidates, entries)
        orphans = {pid: whose for pid in pids - with_them if (whose := self._whose.get(entries[pid].identity))}
        spared: set[int] = set()
        for pid, (kind, daemon) in orphans.items():
            spared |= self._with_its_own(pid, kind, daemon, entries)
        for pid, kind in candidates.items():
            session = entries[pid].session
            others = {other for other in pids - with_them - spared if entries[other].session == session}
            if others and not (kind.has_helpers and all(self._is_apart(other, entries, kind) for other in others)):
                continue
            for leader in (pid, *others):
                spared |= self._with_its_own(leader, kind, entries[leader].identity, entries)
        # Whoever turns out to be ours takes with it what is below. Whoever cannot be seen now may be seen again.
        ours = {pid for pid in pids if entries[pid].identity in self._ours}
        self._forget(entries[pid].identity for pid in _membership.descendants(ours, entries) - spared)
        return spared

    def _kind_of(self, pid: int, entries: _membership.Entries) -> Kind | None:
        """Return which daemon this is, if it stands outside of the session of the launch."""
        entry = entries.get(pid)
        if entry is None or entry.dead or pid == self._root_pid:
            return None
        root = entries.get(self._root_pid)
        if entry.session in {0, self._root_pid, root.session if root is not None else self._root_pid}:
            return None
        try:
            return BY_EXECUTABLE.get(_executable(pid))
        except OSError:
            return None

    def _with_its_own(self, pid: int, kind: Kind, daemon: Identity, entries: _membership.Entries) -> set[int]:
        """Return a process and those below it, down to whoever holds something of ours."""
        spared: set[int] = set()
        todo = [pid]
        while todo:
            this = todo.pop()
            if this in spared or not self._is_apart(this, entries, kind):
                continue
            spared.add(this)
            self._know(entries[this].identity, kind, daemon)
            todo += [child.pid for child in entries.values() if child.parent == this]
        return spared

    def _know(self, identity: Identity, kind: Kind, daemon: Identity) -> None:
        self._whose[identity] = kind, daemon
        whose = f"{kind.what} ({kind.executable})" if identity == daemon else f"belongs to pid {daemon[0]}, {kind.what}"
        self.left[identity] = f"{whose}; it has no GPU, port, shared memory or output of this launch"

    def _forget(self, identities: Iterable[Identity]) -> None:
        for identity in identities:
            self.left.pop(identity, None)
            self._whose.pop(identity, None)

    def _forget_the_gone(self, entries: _membership.Entries) -> None:
        """Keep what is known as small as what lives: a busy terminal starts thousands an hour."""
        known = self._whose.keys() | self._ours
        gone = {who for who in known if who[0] not in entries or entries[who[0]].identity != who}
        self._forget(gone)
        self._ours -= gone

    def _is_apart(self, pid: int, entries: _membership.Entries, kind: Kind) -> bool:
        identity = entries[pid].identity
        if identity in self._ours:
            return False
        try:
            holds = self._holds(pid, kind)
        except OSError:
            holds = False if entries[pid].dead else None
        if holds:
            self._ours.add(identity)
            self._forget([identity])
        return holds is False

    def _holds(self, pid: int, kind: Kind) -> bool | None:
        """Whether a process has something of ours; ``None`` or OSError: that cannot be seen now."""
        if self._log_id is not None and any(_membership.writes_to(pid, fd, self._log_id) for fd in (1, 2)):
            return True
        listeners = self._listeners()
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                path = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue  # closed meanwhile
            if self._devices.fullmatch(path) or path in listeners or _is_foreign_memory(path, kind):
                return True
        paths = self._mapped(pid)
        return None if paths is None else any(_is_foreign_memory(path, kind) for path in paths)

    def _listeners(self) -> set[str]:
        """Return the sockets that listen on our port, as /proc/PID/fd shows them. Read once a look."""
        if self._listening is not None:
            return self._listening
        found: set[str] = set()
        for name in ("tcp", "tcp6") if self._port else ():
            try:
                with open(f"/proc/net/{name}", "rb") as table:
                    rows = [line.split() for line in table][1:]
            except FileNotFoundError:
                continue  # a kernel without IPv6
            found |= {
                f"socket:[{row[9].decode()}]"
                for row in rows
                if row[3] == LISTENS and int(row[1].rpartition(b":")[2], 16) == self._port
            }
        self._listening = found
        return found

    def _mapped(self, pid: int) -> list[str] | None:
        """Return what it has mapped of /dev/shm; ``None``: that cannot be seen, or not in time."""
        self._readers = [reader for reader in self._readers if reader.is_alive()]
        if len(self._readers) >= MOST_STUCK:
            return None
        answer: list[list[str]] = []
        reader = threading.Thread(target=_read_maps, args=(pid, answer), daemon=True)
        try:
            reader.start()
        except RuntimeError:  # no thread more is allowed here
            return None
        reader.join(MAPS_WITHIN)
        self._readers.append(reader)
        return answer[0] if answer else None


def _executable(pid: int) -> str:
    """Return the name of the program that a process executes. Raises OSError where that is not shown, or it is gone."""
    return os.path.basename(os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)"))


def _read_maps(pid: int, answer: list[list[str]]) -> None:
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            lines = [line for line in file if f" {SHARED_MEMORY}" in line]
    except OSError:
        return
    answer.append([line[line.index(SHARED_MEMORY) :].rstrip("\n") for line in lines])


def _is_foreign_memory(path: str, kind: Kind) -> bool:
    """Whether it is shared memory that this kind of daemon does not have by design."""
    if not path.startswith(SHARED_MEMORY):
        return False
    return not kind.own_memory or not path.removeprefix(SHARED_MEMORY).startswith(kind.own_memory)
