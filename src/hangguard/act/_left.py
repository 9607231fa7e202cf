"""What the members of one launch had, and may have left: the guardian's book of it, and the end of it.

Standard library only, imported by the guardian. All that could block runs aside, because the guardian's own
thread watches for the supervisor's death; so nothing here waits, and everything has a time at which it is late.
"""

from __future__ import annotations

import os
import time

from hangguard import held
from hangguard.act import _lease

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    from hangguard.act._aside import Aside
    from hangguard.elsewhere import Elsewhere
    from hangguard.held import Look, Others

    Identity = tuple[int, int]
    Plain = dict[str, Any]

LOOK_WITHIN = 5.0
"""Seconds that the first signal waits for the last look at what members have: it takes milliseconds where no memory map
is locked, and the machine is not overloaded."""
ALONE_LOOK_WITHIN = 1.5
"""The same when the supervising program is dead: then nothing shall be left after five seconds."""
GLANCE_EVERY = 0.5
GLANCE_WITHIN, ALONE_GLANCE_WITHIN = 1.0, 0.5
"""Seconds for a look beside the stop, and between two of them. Nobody waits for one but the first SIGKILL, and the
removal of what it sees."""
CLEAR_WITHIN = 15.0
"""Seconds for the removal: the pages of a large file take a second per few GB."""


class Left:
    """Files and sockets that members were seen to have: looked for before any signal, removed when all are gone."""

    def __init__(self, aside: Aside) -> None:
        self.elsewhere: Elsewhere | None = None
        """Where else this launch may leave files, and what lay there before it."""
        self.before: frozenset[tuple[int, int]] | None = None
        """What lay in /dev/shm before the launch, or is somebody else's too: (device, inode). ``None``: unseen."""
        self.unseen: list[str] = []
        """What the last look could not see."""
        self._aside = aside
        self._files: dict[tuple[Any, ...], Plain] = {}
        self._removed: list[Plain] = []
        self._news: list[Plain] = []
        self._news_of_others: set[tuple[int, int]] = set()
        self._why_unseen = ""
        self._look: Look | None = None
        self._others: Others | None = None
        self._look_began = 0.0
        self._glance: Look | None = None
        self._glance_others: Others | None = None
        self._glance_began = float("-inf")
        self._is_blind = False
        """Whether a look did not come back: then there is no other until the next stop."""
        self._clearing: _lease.Clearing | None = None
        self._cleared: list[tuple[Any, ...]] = []

    def note_before(self) -> None:
        """Note what is there already: nothing of it is ours. Where it cannot be seen nothing there ever is."""
        try:
            self.before = frozenset(held.names_in())
        except OSError as problem:
            self._why_unseen = f"what lay in /dev/shm before the launch: {problem.strerror or problem}"

    def remember(self, files: Iterable[Plain]) -> None:
        """Note what members were seen to have, as far as it could be left."""
        new = [file for file in files if held.may_be_left(file, self.before)]
        self._files.update((held.key_of(file), file) for file in new)

    def forget(self, files: Iterable[Plain]) -> None:
        """Drop what is gone: a server that makes a file a request would fill the book."""
        for file in files:
            self._files.pop(held.key_of(file), None)

    def leave_to_others(self, files: Iterable[Iterable[int]]) -> None:
        """Drop what is not the launch's alone, (device, inode), and never take it again."""
        if self.before is not None:
            self.before |= {(device, inode) for device, inode in files}
            self._files = {k: file for k, file in self._files.items() if held.may_be_left(file, self.before)}

    # ------------------------------------------------------------------------------------- looking

    def look(self, find: Callable[[], Iterable[Identity]]) -> None:
        """Begin to look at what the members have now; :meth:`looks_until` says for how long to hold back signals."""
        self._look_began = time.monotonic()
        self._is_blind = False
        self._look, self._others = self._begin(find, within=LOOK_WITHIN)

    def _begin(self, find: Callable[[], Iterable[Identity]], *, within: float) -> tuple[Look, Others]:
        look = held.Look((), elsewhere=self.elsewhere)
        others = held.Others(guardian=os.getpid(), elsewhere=self.elsewhere)

        def run() -> Plain:
            members = set(find())
            look.add(members)
            new = [file for file in look.run() if held.key_of(file) not in self._files]
            others.run(new, members, self.before)
            return {}

        self._aside.do(run, within=within, label={"say": "looked", "of": look})
        return look, others

    def looks_until(self, *, alone: bool) -> float:
        """Return until when the look may take; 0: it is over."""
        within = ALONE_LOOK_WITHIN if alone else LOOK_WITHIN
        if self._look is not None and time.monotonic() >= self._look_began + within:
            self._end_look(f"no answer within {within:g} s")
        return self._look_began + within if self._look is not None else 0.0

    def _end_look(self, problem: str) -> None:
        look, self._look = self._look, None
        others, self._others = self._others, None
        assert look is not None
        assert others is not None
        self._is_blind = bool(problem)
        if problem and not look.skip(problem):
            look.left_out.append(problem)
        found = others.settled(look.found)
        late = f"who else writes to shared memory that was new: {others.problem or 'no answer yet'}"
        if len(found) == len(look.found):
            late = ""
        self.unseen = [*filter(None, [self._why_unseen, late]), *look.left_out][:16]
        self._note(found, others.files())

    def glance(self, find: Callable[[], Iterable[Identity]], *, at_once: bool = False) -> None:
        """Look again while members end, if it is time: a server that is stopped in its start makes files meanwhile."""
        now = time.monotonic()
        is_due = at_once or now >= self._glance_began + GLANCE_EVERY
        if is_due and self._look is None and self._glance is None and not self._is_blind:
            self._glance_began = now
            self._glance, self._glance_others = self._begin(find, within=GLANCE_WITHIN)

    def glances_until(self, *, alone: bool) -> float:
        """Return until when such a look may take; 0: there is none."""
        until = self._glance_began + (ALONE_GLANCE_WITHIN if alone else GLANCE_WITHIN)
        if self._glance is not None and time.monotonic() >= until:
            self._is_blind = True
            self._end_glance()
        return until if self._glance is not None else 0.0

    def _end_glance(self) -> None:
        glance, self._glance = self._glance, None
        others, self._glance_others = self._glance_others, None
        assert glance is not None
        assert others is not None
        self._note(others.settled(glance.found), others.files())

    def _note(self, found: Iterable[Plain], others: set[tuple[int, int]]) -> None:
        known = set(self._files)
        self._news_of_others |= others - (self.before or others)
        self.remember(found)
        self.leave_to_others(others)
        self._news += [file for key, file in self._files.items() if key not in known]

    def news(self) -> tuple[list[Plain], set[tuple[int, int]]]:
        """Return what the looks have added since the last call: files that may be left, and what is others' too."""
        news, self._news = self._news, []
        others, self._news_of_others = self._news_of_others, set()
        return news, others

    # ------------------------------------------------------------------------------------ clearing

    def clear(self) -> float:
        """Begin to remove what is left, now that nobody lives; return until when to wait, 0: there is nothing."""
        if not self._files:
            return 0.0
        self._cleared = list(self._files)
        clearing = self._clearing = _lease.Clearing(self._files.values())

        def run() -> Plain:
            clearing.run()
            return {}

        self._aside.do(run, within=CLEAR_WITHIN, label={"say": "cleared", "of": clearing})
        return time.monotonic() + CLEAR_WITHIN

    def hear(self, answer: Mapping[str, Any]) -> bool:
        """Take an answer from aside; return whether it was for us, and is what was waited for."""
        if answer.get("say") == "looked" and answer["of"] is self._look:
            self._end_look(str(answer.get("unseen", "")))
            return True
        if answer.get("say") == "looked" and answer["of"] is self._glance:
            self._end_glance()
            return True
        return answer.get("say") == "cleared" and answer["of"] is self._clearing

    def outcome(self, why_not: str) -> list[Plain]:
        """Return what became of each; ``why_not``: why those were not asked for whose removal was not begun."""
        clearing, self._clearing = self._clearing, None
        if clearing is None:
            answers = [_lease.answer_of(file, None, why_not) for file in self._files.values()]
        else:
            answers = clearing.answers()
            for key, answer in zip(self._cleared, answers, strict=True):
                if answer["answer"] == "removed":
                    self._removed.append(answer)
                    self._files.pop(key, None)
        return [*self._removed, *(answer for answer in answers if answer["answer"] != "removed")]
