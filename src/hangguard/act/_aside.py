# ruff: noqa: PTH123
"""What the guardian does beside its loop: reads that may block, and a member's last words.

Standard library only, imported by the guardian. All of it runs in a daemon thread that is left behind when
it does not come back, because the guardian's own thread watches for the supervisor's death.
"""

from __future__ import annotations

import signal
import threading
import time
from collections import deque

from hangguard.act import _membership, _signals
from hangguard.act._titles import TRACKER

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from typing import Any

    Identity = tuple[int, int]
    Answer = Mapping[str, Any]

MOST_LEFT_BEHIND = 4
LONGEST_ANSWER = 4 << 20
"""Characters of stacks in one answer: 50 threads with 20 frames are 100,000."""
APART = 0.03
"""Seconds between two last words. In the same instant they write into one another's lines; 0.3 s after a worker's
end its parent has noticed, and its own last words are those of a shutdown (measured with vLLM 0.11)."""
TO_FINISH = 0.3
"""Seconds that the last one of all gets to end."""


class Aside:
    """Does one task after another, each with a deadline, and rings when there is an answer."""

    def __init__(self, ring: Callable[[], object]) -> None:
        self._ring = ring
        self._lock = threading.Lock()
        self._todo: deque[tuple[Callable[[], Answer], float, Answer]] = deque()
        self._answers: deque[Answer] = deque()
        self._worker: threading.Thread | None = None
        self._late_at = 0.0
        self._left_behind = 0

    def do(self, task: Callable[[], Answer], *, within: float, label: Answer) -> None:
        """Have it done; its answer, with ``label`` added, is among the answers later. Never waits."""
        with self._lock:
            if self._worker is not None and time.monotonic() > self._late_at:
                self._left_behind += 1
                self._worker = None
            if self._worker is None and self._left_behind >= MOST_LEFT_BEHIND:
                self._answers.append({**label, "unseen": "earlier looks have not come back", "is_python": True})
                self._ring()
                return
            self._todo.append((task, within, label))
            if self._worker is None:
                self._late_at = time.monotonic() + within + 1.0
                worker = self._worker = threading.Thread(target=self._work, daemon=True)
                try:
                    worker.start()
                except RuntimeError as problem:  # no thread more is allowed here
                    self._worker = None
                    self._todo.pop()
                    self._answers.append({**label, "unseen": str(problem), "is_python": True})
                    self._ring()

    def answers(self) -> list[Answer]:
        """Return those that came since the last call."""
        with self._lock:
            found = list(self._answers)
            self._answers.clear()
        return found

    def _work(self) -> None:
        while True:
            with self._lock:
                if self._worker is not threading.current_thread():
                    self._left_behind -= 1  # it came back after all; another one has taken over
                    return
                if not self._todo:
                    self._worker = None
                    return
                task, within, label = self._todo.popleft()
                self._late_at = time.monotonic() + within + 1.0
            try:
                answer = task()
            except Exception as problem:  # noqa: BLE001 - the edge: the guardian goes on whatever happens here
                answer = {"unseen": f"{type(problem).__name__}: {problem}", "is_python": True}
            with self._lock:
                self._answers.append({**answer, **label})
            self._ring()


# -------------------------------------------------------------------------------------------- stacks


def read_stack(identity: Identity, is_member: Callable[[], bool], *, within: float) -> Answer:
    """Return the Python stacks of a member, as ``pystacks.read_threads`` does; a stranger is not read."""
    if not is_member():
        return {"unseen": "it is no member of this launch", "is_python": True}
    from hangguard import pystacks  # noqa: PLC0415 - when it is needed: the guardian starts in a dozen milliseconds

    found: Answer = pystacks.read_threads(*identity, within=within)
    size = sum(len(name) + len(file) + 16 for thread in found.get("threads", ()) for name, file, _ in thread["frames"])
    if size > LONGEST_ANSWER:
        return {"unseen": f"its stacks are larger than {LONGEST_ANSWER >> 20} MiB", "is_python": True}
    return found


# ---------------------------------------------------------------------------------------- last words


def last_words(
    wanted: Iterable[Identity],
    *,
    find: Callable[[Mapping[int, _membership.Entry]], set[Identity]],
    log_size: Callable[[], int],
    is_over: Callable[[], bool],
    within: float,
) -> Answer:
    """Have members say where they stand, as the last thing that they do: SIGABRT, which faulthandler answers.

    Workers first, then their parents. Only who is a member now, whose own handler answers the signal, and who
    would leave no core: see :func:`why_not`. ``is_over`` ends it between two members. Returns for each
    where in the log its words begin, or why it was not asked, and where the log ends.
    """
    ends_at = time.monotonic() + within
    entries = _membership.read_entries()
    members = find(entries)
    heard: list[dict[str, Any]] = []
    asked: Identity | None = None
    for identity in sorted(set(wanted), key=lambda who: (-_depth(who[0], entries), who)):
        said: dict[str, Any] = {"pid": identity[0], "started": identity[1], "begins": None, "why_not": ""}
        heard.append(said)
        if is_over() or time.monotonic() >= ends_at:
            said["why_not"] = "the stop began" if is_over() else "there was no time left"
        elif identity not in members:
            said["why_not"] = "it is no member of this launch, or has ended"
        else:
            said["why_not"] = why_not(identity[0]) or ("the stop began" if is_over() else "")
        if said["why_not"]:
            continue
        begins = log_size()
        if not _signals.send(identity, signal.SIGABRT, members):
            said["why_not"] = "it has ended"
            continue
        said["begins"], asked = begins, identity
        # Afterwards: a stopped one takes the signal as the first thing when it goes on.
        _signals.send(identity, signal.SIGCONT, members)
        _wait_for_end(identity, APART)
    if asked is not None:
        _wait_for_end(asked, TO_FINISH)
    return {"heard": heard, "log_ends": log_size()}


def why_not(pid: int) -> str:
    """Return why a process is not to be aborted; empty: it dumps its Python stacks and ends, and leaves no core."""
    try:
        if TRACKER.encode() in _read(f"/proc/{pid}/cmdline").replace(b"\0", b" "):
            return "it unlinks what the others leave"
        if problem := _core_of(_read(f"/proc/{pid}/limits"), _read("/proc/sys/kernel/core_pattern")):
            return problem
        status = dict(line.split(b":\t", 1) for line in _read(f"/proc/{pid}/status").splitlines() if b":\t" in line)
        if int(status.get(b"TracerPid", b"0")):
            return "a debugger has it"
        if not int(status.get(b"SigCgt", b"0"), 16) >> (signal.SIGABRT - 1) & 1:
            return "nothing in it answers SIGABRT"
        started_with = _read(f"/proc/{pid}/environ").split(b"\0")
    except (OSError, ValueError) as problem:
        return f"it cannot be looked at: {getattr(problem, 'strerror', None) or problem}"
    if not any(part.startswith(b"PYTHONFAULTHANDLER=") and part != b"PYTHONFAULTHANDLER=" for part in started_with):
        return "it was started without PYTHONFAULTHANDLER"
    return ""


def _core_of(limits: bytes, pattern: bytes) -> str:
    """Return why it would leave a core: core(5). A core of a server is as large as its weights.

    A pattern that begins with "|" is a program that is given the core whatever the limit is, unless that is 1
    (fs/coredump.c: a limit of 1 marks a dump by that program itself).
    """
    lines = (line for line in limits.splitlines() if line.startswith(b"Max core file size"))
    soft = next(lines, b"").removeprefix(b"Max core file size").split()[:1]
    if pattern.startswith(b"@"):  # Linux 6.16: Documentation/admin-guide/sysctl/kernel.rst, core_pattern
        return "cores are sent to a socket here"
    if not soft:  # of a process that has ended the kernel tells no limits (fs/proc/base.c)
        return "it has ended, or its core limit is not told"
    if soft[0] == b"1":
        return ""
    if soft[0] != b"0":
        return f"its core limit is {soft[0].decode()}"
    if pattern.startswith(b"|"):
        return "cores are piped to a program here, whatever the limit is"
    return ""


def _depth(pid: int, entries: Mapping[int, _membership.Entry]) -> int:
    depth = 0
    while pid in entries and depth < 64:
        pid, depth = entries[pid].parent, depth + 1
    return depth


def _wait_for_end(identity: Identity, within: float) -> None:
    ends_at = time.monotonic() + within
    while _membership.is_alive(identity) and time.monotonic() < ends_at:
        time.sleep(0.002)


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(1 << 20)
