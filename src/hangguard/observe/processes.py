"""Every process of one launch, with its counters, and how each of them ended."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import ClassVar

from hangguard.facts import Ask, Process, Tree, Unseen
from hangguard.observe import connections, procfs
from hangguard.observe.exits import Exits
from hangguard.observe.lane import Lane
from hangguard.observe.permissions import hiding_option
from hangguard.observe.procfs import TICK, Stat
from hangguard.observe.target import Target, why_unseen

Identity = tuple[int, int]

_THREADS_ALWAYS = 400
"""Up to so many threads their states are read in every sample: 12 µs each (measured: 24 ms for 2,000)."""
_TITLES_WITHIN = 0.5
"""A sample does not wait longer for command lines: who holds a memory-map lock may hold it for ever."""


class ProcessProbe:
    """Looks at the guardian's descendants, and at members that have lost their way to it.

    Membership is descent: from the guardian, which as a subreaper gets every orphan back, or from a member
    seen before that still lives under the same (pid, start time), which matters once the guardian is dead.
    Names, sessions and environments prove nothing and are not looked at.
    """

    field: ClassVar[str] = "tree"
    after: ClassVar[tuple[str, ...]] = ()

    def __init__(self, target: Target, *, proc: str = "/proc") -> None:
        self._within = target.probe_within
        self._clock = target.clock
        self._lane = Lane("processes")
        self._titles = _Titles(proc)
        self._sockets = _Sockets(target.launch.port, self._within / 2)
        self._members = _Members(target, proc)

    async def look(self, ask: Ask) -> Tree | Unseen:
        """Return the tree; without members once all have ended."""
        members, now = self._members, self._clock()
        try:
            living = await self._lane.ask(lambda: members.find(now), within=self._within)
            if isinstance(living, Unseen):
                return living
            await self._titles.read(living, within=min(_TITLES_WITHIN, self._within / 2))
            titles = {stat.identity: self._titles.title_of(stat) for stat in living}
            states = ask.thread_states or sum(stat.number(20) for stat in living) < _THREADS_ALWAYS
            tree = await self._lane.ask(lambda: members.tree(titles, states=states), within=self._within)
        except OSError as problem:
            return why_unseen(problem)
        return await self._sockets.add_to(tree) if ask.sockets and isinstance(tree, Tree) else tree

    async def aclose(self) -> None:
        """Let the threads go, and the descriptors from which exit codes are read."""
        await self._lane.ask(self._members.close, within=self._within)
        self._lane.close()
        self._titles.close()
        self._sockets.close()


class _Members:
    """The members so far. Everything here blocks and runs in the probe's lane."""

    def __init__(self, target: Target, proc: str) -> None:
        self._proc = proc
        self._guardian_pid = target.guardian_pid
        self._guardian_started = target.guardian_started
        self._guardian: Stat | None = None
        self._living: dict[Identity, Stat | None] = {target.root: None}
        self._zombies: dict[Identity, Stat] = {}
        self._titles: dict[Identity, str] = {target.root: " ".join(target.launch.argv)}
        self._exits = Exits(target.root, target.exit_of)
        self._births = 1
        self._deaths = 0
        self._orphans = 0
        self._hides: str | None = None  # the option of the mount; "": none
        self._cpu, self._faults = _Total(), _Total()
        self._read, self._written, self._disk = _Total(), _Total(), _Total()

    def find(self, now: float) -> list[Stat]:
        """Return the living members, oldest first, and enter births and deaths."""
        scan = procfs.scan(self._proc)
        self._guardian = self._find_guardian(scan)
        self._refuse_hidden(scan)
        found = {stat.identity: stat for stat in self._descendants(scan)}
        born = [who for who in found if who not in self._living and who not in self._zombies]
        dead = {who: stat for who, stat in found.items() if _is_dead(stat)}
        self._exits.watch(found[who] for who in found if who in born or who in self._living)
        for who in [*self._living, *(who for who in born if who in dead)]:
            if who in dead or who not in found:
                last = found.get(who) or self._living.get(who)
                title = self._titles.pop(who, last.name if last is not None else "")
                self._exits.enter(who, title, dead.get(who), now)
                self._deaths += 1
        self._births += len(born)
        self._zombies = dead
        self._living = {who: stat for who, stat in found.items() if who not in dead}
        return sorted((found[who] for who in self._living), key=lambda stat: (stat.started, stat.pid))

    def tree(self, titles: dict[Identity, str], *, states: bool) -> Tree:
        """Read what costs more than one file a process, and add everything up."""
        self._titles = titles
        living = [stat for stat in self._living.values() if stat is not None]
        counters = {who: procfs.read_io(self._proc, who[0]) for who in (*self._living, *self._zombies)}
        self._add_up((*living, *self._zombies.values()), counters.values())
        members = tuple(
            _process(
                stat,
                titles.get(stat.identity, stat.name),
                counters[stat.identity],
                procfs.thread_states(self._proc, stat.pid) if states else None,
            )
            for stat in sorted(living, key=lambda stat: (stat.started, stat.pid))
        )
        return Tree(
            members=members,
            departed=self._exits.departed(),
            births=self._births,
            deaths=self._deaths,
            orphan_cpu_seconds=self._orphans * TICK,
            cpu_seconds=self._cpu.value * TICK,
            minor_faults=self._faults.value,
            read_chars=self._read.value,
            written_chars=self._written.value,
            disk_read_bytes=self._disk.value,
        )

    def close(self) -> None:
        self._exits.close()

    def _refuse_hidden(self, scan: dict[int, Stat]) -> None:
        """Raise where /proc hides a member: what is not shown must not count as still, or as ended."""
        if self._hides is None:
            self._hides = hiding_option(self._proc)
        if not self._hides:
            return
        parents = [stat.pid for stat in (*self._descendants(scan), self._guardian) if stat is not None]
        hidden = procfs.hidden_children(parents, scan, self._proc)
        if self._guardian is None:  # else a member that nobody lists has ended, and somebody hidden may have its pid
            hidden += [pid for pid, _ in self._living if pid not in scan and procfs.is_hidden(pid, self._proc)]
        if hidden:
            pids = ", ".join(map(str, hidden[:4])) + (" …" if len(hidden) > 4 else "")
            raise PermissionError(1, f"/proc hides members from this user ({self._hides}): pid {pids}")

    def _find_guardian(self, scan: dict[int, Stat]) -> Stat | None:
        """Return the guardian while it lives; another process with its pid is nobody's guardian."""
        stat = scan.get(self._guardian_pid)
        if stat is None or self._guardian_started not in {0, stat.started}:
            self._guardian_pid = 0
            return None
        self._guardian_started = stat.started
        return stat

    def _descendants(self, scan: dict[int, Stat]) -> list[Stat]:
        children: dict[int, list[Stat]] = {}
        for stat in scan.values():
            children.setdefault(stat.parent, []).append(stat)
        seen_before = (*self._living, *self._zombies)
        found = {pid: scan[pid] for pid, started in seen_before if pid in scan and scan[pid].started == started}
        waiting = [*found, *([self._guardian.pid] if self._guardian is not None else [])]
        while waiting:
            for child in children.get(waiting.pop(), ()):
                if child.pid not in found:
                    found[child.pid] = child
                    waiting.append(child.pid)
        return list(found.values())

    def _add_up(self, stats: Iterable[Stat], counters: Iterable[dict[bytes, int]]) -> None:
        """Add up what the living and their reaped children have used, and the guardian's reaped orphans.

        Whoever waits for a process takes over its time, faults and bytes; so the sum over the living is the
        whole tree. The guardian's own bytes are left out: it reads ``/proc`` itself.
        """
        cpu = faults = 0
        for stat in stats:
            cpu += stat.number(14) + stat.number(15) + stat.number(16) + stat.number(17)
            faults += stat.number(10) + stat.number(11)
        if self._guardian is not None:
            orphans = self._guardian.number(16) + self._guardian.number(17)
            self._orphans = max(self._orphans, orphans)
            faults += self._guardian.number(11)
        self._cpu.grow_to(cpu + self._orphans)
        self._faults.grow_to(faults)
        counters = tuple(counters)
        self._read.grow_to(sum(io.get(b"rchar", 0) for io in counters))
        self._written.grow_to(sum(io.get(b"wchar", 0) for io in counters))
        self._disk.grow_to(sum(io.get(b"read_bytes", 0) for io in counters))


class _Total:
    """A sum over processes that must not fall when one of them takes its share away with it.

    That happens where a parent ignores SIGCHLD, where a member is reaped outside the tree, or between the
    reading of a child and of its parent. Only rises are added, so the next growth shows at once.
    """

    def __init__(self) -> None:
        self.value = 0
        self._last = 0

    def grow_to(self, total: int) -> None:
        self.value += max(0, total - self._last)
        self._last = total


class _Titles:
    """Command lines, read once a process and again when it was renamed or has executed another program.

    In a lane of their own: ``cmdline`` needs the memory-map lock, so one process can hold up all. Its
    neighbours then go by the kernel's short name until that one comes back.
    """

    def __init__(self, proc: str) -> None:
        self._proc = proc
        self._lane = Lane("command lines")
        self._known: dict[Identity, tuple[tuple[object, ...], str]] = {}

    async def read(self, members: list[Stat], *, within: float) -> None:
        """Read those that are not known, as far as they come in that time."""
        current = {stat.identity for stat in members}
        self._known = {who: known for who, known in dict(self._known).items() if who in current}
        missing = [stat for stat in members if self._known.get(stat.identity, ("",))[0] != _version(stat)]
        if missing:
            await self._lane.ask(lambda: self._read_each(missing), within=within)

    def title_of(self, stat: Stat) -> str:
        """Return the title, or the kernel's name where it is not known."""
        known = self._known.get(stat.identity)
        return known[1] if known is not None and known[1] else stat.name

    def close(self) -> None:
        self._lane.close()

    def _read_each(self, members: list[Stat]) -> None:
        for stat in members:
            known = self._known.get(stat.identity)
            title = procfs.read_title(stat.pid, self._proc) or (known[1] if known is not None else "")
            self._known[stat.identity] = (_version(stat), title)


class _Sockets:
    """The bytes that came in over TCP. In a lane of its own: to look into another namespace its thread goes there."""

    def __init__(self, port: int, within: float) -> None:
        self._port = port
        self._within = within
        self._lane = Lane("sockets")

    async def add_to(self, tree: Tree) -> Tree:
        pids = [member.pid for member in tree.members]
        seen = await self._lane.ask(lambda: connections.received_by(pids, port=self._port), within=self._within)
        if isinstance(seen, Unseen):
            return replace(tree, sockets_unseen=seen.reason)
        problems = {why_unseen(answer).reason for answer in seen.values() if isinstance(answer, OSError)}
        received = {pid: answer for pid, answer in seen.items() if isinstance(answer, int)}
        members = tuple(replace(member, socket_bytes=received.get(member.pid)) for member in tree.members)
        return replace(tree, members=members, sockets_unseen="; ".join(sorted(problems)))

    def close(self) -> None:
        self._lane.close()


def _version(stat: Stat) -> tuple[object, ...]:
    """Return what changes with the title: the name (setproctitle sets both), or where the arguments lie."""
    arguments = stat.fields[45:47]  # arg_start, arg_end: 0 where we may not look, new after execve
    return (stat.name, *arguments)


def _is_dead(stat: Stat) -> bool:
    """Tell whether nothing of it runs any more: state Z alone means only that the first thread ended."""
    return stat.state in "ZXx" and stat.number(20) <= 1


def _process(stat: Stat, title: str, io: dict[bytes, int], states: str | None) -> Process:
    return Process(
        pid=stat.pid,
        started=stat.started,
        parent=stat.parent,
        title=title,
        name=stat.name,
        state=stat.state,
        threads=stat.number(20),
        cpu_seconds=(stat.number(14) + stat.number(15)) * TICK,
        reaped_cpu_seconds=(stat.number(16) + stat.number(17)) * TICK,
        minor_faults=stat.number(10),
        major_faults=stat.number(12),
        rss_bytes=max(0, stat.number(24)) * procfs.PAGE,
        read_chars=io.get(b"rchar"),
        written_chars=io.get(b"wchar"),
        disk_read_bytes=io.get(b"read_bytes"),
        thread_states=states,
    )
