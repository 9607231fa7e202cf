# ruff: noqa: PTH115, PTH208 - numbers in /proc
"""Who is there, seen without a line of hangguard's: the soak must not believe what it examines.

A process is (pid, start time in clock ticks), read from ``/proc/PID/stat``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

Identity = tuple[int, int]
EVERY = 0.025
"""Seconds between two looks at the tree: a process that lives shorter and has no child is nobody's trouble."""


def stat_of(pid: int) -> tuple[int, str] | None:
    """Return (start time, state), or ``None`` if there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rfind(b")") + 2 :].split()
    return int(fields[19]), chr(fields[0][0])


def identity_of(pid: int) -> Identity | None:
    found = stat_of(pid)
    return None if found is None else (pid, found[0])


def lives(who: Identity) -> bool:
    """Whether exactly this process is there, and no zombie."""
    found = stat_of(who[0])
    return found is not None and found[0] == who[1] and found[1] not in "ZXx"


def is_well(who: Identity) -> bool:
    """Whether it lives and was not stopped either."""
    found = stat_of(who[0])
    return found is not None and found[0] == who[1] and found[1] not in "ZXxT"


def signal_exactly(who: Identity, number: int = signal.SIGKILL) -> bool:
    """Signal this process and no later one of its pid."""
    try:
        pidfd = os.pidfd_open(who[0])
    except ProcessLookupError:
        return False
    try:
        if not lives(who):
            return False
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    finally:
        os.close(pidfd)
    return True


def children_of(pid: int) -> list[int]:
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
    except OSError:
        return ""


def with_token(token: str) -> set[Identity]:
    """Return all whose environment or command line has this text, over the whole machine."""
    wanted, found = token.encode(), set()
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        for part in ("environ", "cmdline"):
            with contextlib.suppress(OSError):
                if wanted in Path(f"/proc/{name}/{part}").read_bytes() and (who := identity_of(int(name))):
                    found.add(who)
    return {who for who in found if lives(who)}


def with_output_below(folder: Path, among: Iterable[Identity]) -> set[Identity]:
    """Return those of them whose output goes to a file below the folder: who can be found by the log of its run."""
    found = set()
    for who in among:
        for fd in (1, 2):
            with contextlib.suppress(OSError):
                if os.readlink(f"/proc/{who[0]}/fd/{fd}").startswith(f"{folder}/"):
                    found.add(who)
    return found


def describe(who: Identity) -> str:
    found = stat_of(who[0])
    return f"pid {who[0]} ({command_of(who[0])[:80] or '?'}), state {found[1] if found else 'gone'}"


class Tree:
    """Everybody who ever descended from one process, looked at all the time; orphans stay known, and their children."""

    def __init__(self, top: int) -> None:
        self.seen: dict[Identity, float] = {}
        """When each was last seen alive, as ``time.time()`` has it."""
        self.parent: dict[Identity, int] = {}
        self._top = top
        self._before = set(children_of(top))
        self._looking = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="eyes", daemon=True)
        self._thread.start()

    def _watch(self) -> None:
        while not self._over.wait(EVERY):
            self.look()

    def look(self) -> None:
        with self._looking:
            asked = set(self._before)
            todo = [self._top, *(who[0] for who in list(self.seen) if lives(who))]
            while todo:
                pid = todo.pop()
                if pid in asked:
                    continue
                asked.add(pid)
                for child in children_of(pid):
                    who = identity_of(child)
                    if who is not None and child not in self._before:
                        self.parent.setdefault(who, pid)
                        todo.append(child)
                        if lives(who):
                            self.seen[who] = time.time()
            for who in list(self.seen):
                if who[0] in asked and lives(who):
                    self.seen[who] = time.time()

    def living(self) -> set[Identity]:
        return {who for who in list(self.seen) if lives(who)}

    def add(self, who: Identity) -> None:
        self.seen.setdefault(who, time.time())

    def close(self) -> None:
        self._over.set()
        self._thread.join()
