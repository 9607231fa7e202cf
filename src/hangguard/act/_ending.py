# ruff: noqa: PTH123
"""How all of a launch is ended: shared by the guardian and the supervisor.

Standard library only, as everything that the guardian imports. Nothing here waits for the process it asks about:
``stat`` and ``wchan`` do not, and the one that does, ``cmdline``, is read in threads of its own (``_titles``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import time

from hangguard.act import _membership, _signals
from hangguard.act._titles import TRACKER, Titles

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from hangguard.act import _daemons
    from hangguard.act._membership import Entries, Entry, Identity

AFTER_ROOT = 1.0
"""Seconds that members get to end by themselves after the root did."""
TRACKER_GRACE = 2.0
"""Seconds for resource trackers: left alone they unlink what the others left within 1.5 s (measured)."""
SETTLE = 5.0
"""Seconds after SIGKILL; what is still there then waits in the kernel."""
LONGEST_TITLE = 200
"""Characters of the command line of somebody who is gone."""


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
            self._root_tells_nobody = _signals.takes_sigterm(self._root[0]) == "ends"
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
            answer = _signals.takes_sigterm(worker[0])
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
            entry = _membership.read_entry(pid)
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
        return {pid for pid in children if _membership.read_entry(pid) is None}

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
        self._entries = _membership.read_entries()
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
        if _signals.send(member, number, self._members) and number in {signal.SIGTERM, signal.SIGKILL}:
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
            "proof": self._proofs.get(member, _membership.DESCENDS),
            "seconds": round(self._gone_after.get(member, 0.0), 3),
        }

    def _left_alone(self) -> list[dict[str, int | str]]:
        if self._daemons is None:
            return []
        left = {
            who: why
            for who, why in self._daemons.left.items()
            if who not in self._members and _membership.is_alive(who)
        }
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
