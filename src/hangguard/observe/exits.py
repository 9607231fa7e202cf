"""How members ended: one pidfd each, from which the kernel tells the exit code of any process."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace

from hangguard.facts import Departed, Exit, Unseen
from hangguard.observe import procfs
from hangguard.observe.procfs import Stat

Identity = tuple[int, int]

_WATCHED = 512
"""Descriptors spent on exit codes; what is born beyond that ends without a known code."""
_REMEMBERED = 256
_GOOD = 32
"""Ends with code 0 that are kept in mind, of the first and again of the last: a cold start has hundreds of compilers,
and every sample tells of all ends that are kept."""
_NOT_REAPED = Unseen("nobody has waited for it yet, and the kernel shows no code to us")


class Exits:
    """The members that ended, oldest first. Everything here blocks and runs in the probe's lane."""

    def __init__(self, root: Identity, exit_of: Callable[[], Exit | None]) -> None:
        self._root = root
        self._exit_of = exit_of
        self._pidfds: dict[Identity, int] = {}
        self._unwatched: dict[Identity, Unseen] = {}
        self._departed: dict[Identity, Departed] = {}

    def watch(self, members: Iterable[Stat]) -> None:
        """Hold on to members, so that their end can be read later, whoever reaps them."""
        for stat in members:
            who = stat.identity
            if who in self._pidfds or who in self._unwatched:
                continue
            if len(self._pidfds) >= _WATCHED:
                self._unwatched[who] = Unseen(f"only {_WATCHED} processes are watched for their exit code")
                continue
            try:
                self._pidfds[who] = _open(stat)
            except AttributeError:  # a Python built for Linux before 5.3
                self._unwatched[who] = Unseen("this Python has no pidfds")
            except OSError as problem:
                self._unwatched[who] = Unseen(f"it could not be watched ({problem.strerror})")

    def enter(self, who: Identity, title: str, zombie: Stat | None, noticed_at: float) -> None:
        """Enter a member that ended, with the code that can be known now."""
        code: int | Unseen | None = procfs.exit_code_of_zombie(zombie) if zombie is not None else None
        if code is None and who not in self._pidfds:
            code = self._unwatched.get(who, Unseen("it ended before it was seen"))
        self._departed[who] = Departed(
            pid=who[0],
            started=who[1],
            title=title,
            exit_code=_NOT_REAPED if code is None else code,
            noticed_at=noticed_at,
        )
        self._unwatched.pop(who, None)
        if code is not None:
            self._let_go(who)

    def departed(self) -> tuple[Departed, ...]:
        """Return all that ended; a code that could not be known before is looked for again."""
        for who, gone in self._departed.items():
            if who in self._pidfds:
                code = procfs.exit_code_of_pidfd(self._pidfds[who])
                if code is not None:
                    self._departed[who] = replace(gone, exit_code=code)
                    self._let_go(who)
        self._ask_its_parent()
        self._forget()
        return tuple(self._departed.values())

    def close(self) -> None:
        """Let every descriptor go."""
        for who in list(self._pidfds):
            self._let_go(who)

    def _ask_its_parent(self) -> None:
        """Take the launched process's code from the guardian, where the kernel does not tell it."""
        root = self._departed.get(self._root)
        if root is not None and isinstance(root.exit_code, Unseen):
            told = self._exit_of()
            if told is not None and not isinstance(told.code, Unseen):
                self._departed[self._root] = replace(root, exit_code=told.code)

    def _forget(self) -> None:
        good = [who for who, gone in self._departed.items() if gone.exit_code == 0]
        for who in good[_GOOD:-_GOOD]:
            del self._departed[who]
        for who in list(self._departed)[:-_REMEMBERED]:
            del self._departed[who]
            self._let_go(who)

    def _let_go(self, who: Identity) -> None:
        descriptor = self._pidfds.pop(who, None)
        if descriptor is not None:
            os.close(descriptor)


def _open(stat: Stat) -> int:
    """Open a pidfd that is provably of this process: its pid could have been given away since the scan."""
    descriptor = os.pidfd_open(stat.pid)
    try:
        is_it = procfs.read_started(stat.pid) == stat.started
    except OSError:
        is_it = False
    if not is_it:
        os.close(descriptor)
        raise ProcessLookupError(3, "it ended before it could be watched")
    return descriptor
