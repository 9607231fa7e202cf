"""What is remembered of one attempt, and how one more sample is noted in it.

A memory holds what later judgement needs, so a day of watching costs no more per sample than a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hangguard.facts import (
    NOT_ASKED,
    Departed,
    Moving,
    Phase,
    Reply,
    Sample,
    Tree,
    Unseen,
    Verdict,
)
from hangguard.judge.endings import Told, told_by
from hangguard.judge.phases import Place, advance
from hangguard.judge.progress import (
    GAP,
    LogMemory,
    Reading,
    progressed_within,
    read_log,
    reading_of,
    slide,
    what_was_active,
)
from hangguard.judge.rules import Rules
from hangguard.judge.stillness import (
    Agreement,
    compare,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All that is remembered of one attempt. Make it with :func:`start`, change it with :func:`step`."""

    rules: Rules
    started_at: float | None = None
    now: float = 0.0
    place: Place = Place()
    phases: tuple[tuple[Phase, float], ...] = ()
    log: LogMemory = LogMemory()
    window: tuple[Reading, ...] = field(default=(), repr=False)
    progress_at: float = 0.0
    progress_by: str = "launch"
    activity_at: float = 0.0
    activity_by: str = ""
    agreement: Agreement | None = field(default=None, repr=False)
    stacks_at: float | None = None
    stacks_unseen: str = ""
    last_words: str = ""
    """The last line of the log that was news."""
    told: tuple[Told, ...] = ()
    root: tuple[int, int] | None = None
    tree: Tree | None = field(default=None, repr=False)
    departed: tuple[Departed, ...] = ()
    oom_kills_before: int | None = None
    oom_kills: int = 0
    ready_at: float | None = None
    last: Sample | None = field(default=None, repr=False)
    undecided_since: float | None = None
    """Since when the verdict has been waiting or unclear and nothing was produced."""
    verdict: Verdict = Moving(phase="import")

    @property
    def idle_for(self) -> float:
        """Seconds since anything progressed or was active."""
        return self.now - max(self.progress_at, self.activity_at)

    @property
    def unproductive_for(self) -> float:
        """Seconds since anything progressed."""
        return self.now - self.progress_at

    @property
    def last_movement_at(self) -> float:
        """When anything progressed or was active last, monotonic."""
        return max(self.progress_at, self.activity_at)


def note(memory: Memory, sample: Sample) -> Memory:
    """Return the memory with everything noted that this sample shows; its verdict is still the old one."""
    memory = _note_time(memory, sample)
    memory = _note_tree(memory, sample)
    memory = _note_log(memory, sample)
    memory = _note_stacks(memory, sample)
    memory = _note_host(memory, sample)
    return _note_answer(memory, sample)


def _note_time(memory: Memory, sample: Sample) -> Memory:
    if memory.started_at is None:
        return replace(
            memory,
            started_at=sample.t,
            now=sample.t,
            place=Place(since=sample.t),
            phases=(("import", sample.t),),
            progress_at=sample.t,
            activity_at=sample.t,
        )
    if sample.t - memory.now > GAP:
        memory = _moved(memory, sample.t, activity="a gap of the watcher itself")
    return replace(memory, now=sample.t)


def _note_tree(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.tree, Unseen):
        # Nothing can be said about a stretch in which the members were not seen.
        return _moved(replace(memory, window=()), sample.t, activity="unseen processes")
    tree = sample.tree
    now = reading_of(sample, tree)
    if memory.window:
        memory = _moved(
            memory,
            sample.t,
            progress=progressed_within(memory.window, now),
            activity=what_was_active(memory.window, now),
        )
    root = memory.root or _root_of(tree)
    return replace(
        memory,
        tree=tree,
        root=root,
        departed=tree.departed,
        window=slide(memory.window, now),
    )


def _root_of(tree: Tree) -> tuple[int, int] | None:
    pids = {p.pid for p in tree.members}
    return next((p.identity for p in tree.members if p.parent not in pids), None)


def _note_log(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.log, Unseen):
        return memory
    place = memory.place
    if memory.ready_at is None:
        place = advance(place, sample.log.lines, memory.rules.markers, sample.t)
    memory = _place(memory, place)
    log, news = read_log(memory.log, sample.log, memory.rules.noise)
    told = told_by(sample.log.lines, memory.rules)
    memory = replace(memory, log=log, told=(*memory.told, *told)[-64:], last_words=news or memory.last_words)
    return _moved(memory, sample.t, progress="log" if news else "")


def _place(memory: Memory, place: Place) -> Memory:
    """Enter a phase; kinds of lines are news again in a new one."""
    if place.phase == memory.place.phase:
        return replace(memory, place=place)
    return replace(memory, place=place, log=LogMemory(), phases=(*memory.phases, (place.phase, place.since))[-64:])


def _note_stacks(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.stacks, Unseen):
        asked = sample.stacks != NOT_ASKED
        return replace(memory, stacks_unseen=sample.stacks.reason, stacks_at=sample.t) if asked else memory
    agreement, changed = compare(memory.agreement, sample.stacks, sample.t)
    missing = [f"{s.title}: {s.threads.reason}" for s in sample.stacks if s.is_python and isinstance(s.threads, Unseen)]
    if changed:
        memory = _moved(memory, sample.t, progress="stacks")
    return replace(memory, agreement=agreement, stacks_at=sample.t, stacks_unseen="; ".join(missing[:3]))


def _note_host(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.host, Unseen) or isinstance(sample.host.oom_kills, Unseen):
        return memory
    kills = sample.host.oom_kills
    before = kills if memory.oom_kills_before is None else memory.oom_kills_before
    return replace(memory, oom_kills_before=before, oom_kills=kills - before)


def _note_answer(memory: Memory, sample: Sample) -> Memory:
    if memory.ready_at is None and isinstance(sample.answer, Reply) and sample.answer.state == "good":
        memory = _place(replace(memory, ready_at=sample.t), Place("serving", sample.t))
    return memory


def _moved(memory: Memory, t: float, *, progress: str = "", activity: str = "") -> Memory:
    """Any movement ends the still stretch: looks and stacks taken in it no longer count."""
    if not progress and not activity:
        return memory
    memory = replace(memory, window=memory.window[-1:], agreement=None, stacks_at=None)
    if progress:
        memory = replace(memory, progress_at=t, progress_by=progress)
    if activity:
        memory = replace(memory, activity_at=t, activity_by=activity)
    return memory
