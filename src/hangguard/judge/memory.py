"""What is remembered of one attempt, and how one more sample is noted in it.

A memory holds what later judgement needs, so a day of watching costs no more per sample than a minute.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from hangguard.facts import (
    NOT_ASKED,
    Broken,
    Departed,
    Moving,
    Phase,
    Reply,
    Sample,
    Stuck,
    Tree,
    Unseen,
    Verdict,
    Waiting,
)
from hangguard.judge.boards import Boards, is_busy_for_nothing, note_boards, note_product, works
from hangguard.judge.endings import Told, told_by
from hangguard.judge.followers import has_started, ready_as_far_as_told, resting_since
from hangguard.judge.kin import Kin, read_kin
from hangguard.judge.outside import Outside, note_outside
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
from hangguard.judge.ranks import Said, note_said
from hangguard.judge.rules import Rules, matches
from hangguard.judge.served import ServingMemory, note_serving
from hangguard.judge.stillness import Agreement, compare
from hangguard.judge.trouble import Trouble, note_trouble

STRETCH = 2.0
"""Still stretches shorter than this, seconds, are not worth remembering."""

WATCHER, UNSEEN_PROCESSES = "a gap of the watcher itself", "unseen processes"
QUIET, GPU_WORK = "quiet that was asked for", "GPU at work"
"""What moved, where it was none of the counters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """All that is remembered of one attempt. Make it with :func:`start`, change it with :func:`step`."""

    rules: Rules
    started_at: float | None = None
    now: float = 0.0
    place: Place = Place()
    phases: tuple[tuple[Phase, float], ...] = ()
    log: LogMemory = LogMemory()
    kin: Kin = field(default=Kin(), repr=False)
    """Who lives, and what kinds of processes began and ended in this phase."""
    window: tuple[Reading, ...] = field(default=(), repr=False)
    """The last seconds since anything moved: what activity is told by."""
    wide: tuple[Reading, ...] = field(default=(), repr=False)
    """The last seconds since anything was produced: what progress is told by."""
    recent: tuple[Reading, ...] = field(default=(), repr=False)
    """The last seconds: what rates are told by."""
    progress_at: float = 0.0
    progress_by: str = "launch"
    watched_since: float = float("-inf")
    """When the last hole in the watch ended, monotonic."""
    activity_at: float = 0.0
    activity_by: str = ""
    agreement: Agreement | None = field(default=None, repr=False)
    """Stack samples since anything was produced."""
    kinds_of_stacks: frozenset[int] = field(default=frozenset(), repr=False)
    stacks_at: float | None = None
    stacks_unseen: str = ""
    resting_since: float | None = None
    """Of a node that never answers: since which look all its workers have waited for work, in every look."""
    said: Said = field(default=Said(), repr=False)
    """What the log tells of single ranks."""
    outside: Outside = field(default=Outside(), repr=False)
    """What could end a wait, or keeps a member from running."""
    written_before: int | None = None
    """Bytes that the whole tree had written when the present still stretch began."""
    last_words: str = ""
    """The last line of the log that was news."""
    told: tuple[Told, ...] = ()
    root: tuple[int, int] | None = None
    answering: frozenset[tuple[int, int]] = frozenset()
    """Front ends that have listened on the port: what they read and write, and where they stand, may be answers to our
    own questions."""
    tree: Tree | None = field(default=None, repr=False)
    departed: tuple[Departed, ...] = ()
    oom_kills_before: int | None = None
    oom_kills: int = 0
    ready_at: float | None = None
    ready_by_guess: str = ""
    """Why it counts as ready although nobody could see it."""
    boards: Boards = field(default=Boards(), repr=False)
    """What was learned of each GPU, and what the last window says of them."""
    serving: ServingMemory = field(default=ServingMemory(), repr=False)
    """What came out, and who waits, since it has answered."""
    trouble: Trouble = field(default=Trouble(), repr=False)
    """Faults of boards, kills for want of memory, waits in the driver."""
    longest_still: tuple[tuple[Phase, float], ...] = ()
    """Longest idle stretch that ended in movement, seconds by phase."""
    last: Sample | None = field(default=None, repr=False)
    undecided_since: float | None = None
    """Since when the verdict has been waiting or unclear and nothing was produced."""
    verdict: Verdict = Moving(phase="import")
    hang: Stuck | Broken | None = None
    """The newest verdict that it hangs or is broken: a start that only had to be told of one goes on until its end."""

    @property
    def idle_for(self) -> float:
        """Seconds since anything progressed or was active."""
        return self.now - max(self.progress_at, self.activity_at)

    @property
    def unproductive_for(self) -> float:
        """Seconds since anything progressed, as far as it was watched."""
        return self.now - max(self.progress_at, self.watched_since)

    @property
    def last_movement_at(self) -> float:
        """When anything progressed or was active last, monotonic."""
        return max(self.progress_at, self.activity_at)


def note(memory: Memory, sample: Sample) -> Memory:
    """Return the memory with everything noted that this sample shows; its verdict is still the old one."""
    before = memory
    memory = _note_time(memory, sample)
    memory = _note_boards(memory, sample)
    memory = _note_tree(memory, sample)
    memory = _note_outside(memory, sample, gap=before.started_at is not None and sample.t - before.now > GAP)
    memory = _note_log(memory, sample)
    memory = _note_stacks(memory, sample)
    memory = _note_stretch(memory, before, sample)
    memory = _note_host(memory, sample)
    memory = _note_answer(memory, sample)
    memory = replace(memory, trouble=note_trouble(memory.trouble, sample))
    return _note_serving(memory, sample)


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
        memory = replace(memory, agreement=None, watched_since=sample.t)
        memory = _moved(memory, sample.t, activity=WATCHER)
    return replace(memory, now=sample.t)


def _note_tree(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.tree, Unseen):
        # Nothing can be said about a stretch in which the members were not seen.
        unseen = replace(memory, window=(), wide=(), recent=(), agreement=None)
        return _moved(unseen, sample.t, activity=UNSEEN_PROCESSES)
    tree = sample.tree
    answering = memory.answering | _answering(sample, tree, memory.rules)
    now = reading_of(sample.t, tree, memory.boards, answering)
    kin, news = read_kin(memory.kin, tree)
    if memory.window:
        active = what_was_active(memory.window, now)
        memory = _moved(memory, sample.t, progress=progressed_within(memory.wide, now) or news, activity=active)
    root = memory.root or _root_of(tree)
    return replace(
        memory,
        tree=tree,
        kin=kin,
        root=root,
        answering=answering,
        departed=tree.departed,
        window=slide(memory.window, now),
        wide=slide(memory.wide, now),
        recent=slide(memory.recent, now),
    )


def _answering(sample: Sample, tree: Tree, rules: Rules) -> frozenset[tuple[int, int]]:
    """The member that listens on the port, where others do the work: it may move by what we ask of it."""
    listener = None if isinstance(sample.port, Unseen) else sample.port.listener
    if listener is None or not any(matches(rules.workers, p.title) for p in tree.members):
        return frozenset()
    return frozenset(p.identity for p in tree.members if p.pid == listener.pid and not matches(rules.workers, p.title))


def _root_of(tree: Tree) -> tuple[int, int] | None:
    """Return the launched process: a launcher that forks and goes may be gone before the first look."""
    pids = {p.pid for p in tree.members}
    living = next((p.identity for p in tree.members if p.parent not in pids), None)
    gone = min(((d.pid, d.started) for d in tree.departed), key=_by_age, default=None)
    return gone if gone is not None and (living is None or _by_age(gone) < _by_age(living)) else living


def _by_age(identity: tuple[int, int]) -> tuple[int, int]:
    pid, started = identity
    return (started, pid)


def _note_log(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.log, Unseen):
        return memory
    place = memory.place
    if memory.ready_at is None:
        place = advance(place, sample.log.lines, memory.rules.markers, sample.t)
    memory = _place(memory, place)
    log, news = read_log(memory.log, sample.log, memory.rules.noise)
    told = told_by(sample.log.lines, memory.rules, sample.t)
    said = note_said(memory.said, sample.log.lines, memory.rules.noise)
    memory = replace(memory, log=log, said=said, told=(*memory.told, *told)[-64:], last_words=news or memory.last_words)
    return _moved(memory, sample.t, progress="log" if news else "")


def _place(memory: Memory, place: Place) -> Memory:
    """Enter a phase; kinds of lines and of processes are news again in a new one."""
    if place.phase == memory.place.phase:
        return replace(memory, place=place)
    fresh = replace(memory, place=place, log=LogMemory(), kin=memory.kin.forget())
    return replace(fresh, phases=(*memory.phases, (place.phase, place.since))[-64:])


def _note_stacks(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.stacks, Unseen):
        asked = sample.stacks != NOT_ASKED
        unseen = replace(memory, stacks_unseen=sample.stacks.reason, stacks_at=sample.t, resting_since=None)
        return unseen if asked else memory
    workers = {(s.pid, s.started) for s in sample.stacks if matches(memory.rules.workers, s.title)}
    but = memory.answering | (memory.kin.passing - workers)
    agreement, kinds, changed = compare(memory.agreement, sample.stacks, sample.t, memory.kinds_of_stacks, but)
    missing = [f"{s.title}: {s.threads.reason}" for s in sample.stacks if s.is_python and isinstance(s.threads, Unseen)]
    if changed:
        memory = _moved(memory, sample.t, progress="stacks")
    return replace(
        memory,
        agreement=agreement,
        kinds_of_stacks=kinds,
        stacks_at=sample.t,
        stacks_unseen="; ".join(missing[:3]),
        resting_since=resting_since(memory, sample.stacks, sample.t),
    )


def _note_host(memory: Memory, sample: Sample) -> Memory:
    if isinstance(sample.host, Unseen) or isinstance(sample.host.oom_kills, Unseen):
        return memory
    kills = sample.host.oom_kills
    before = kills if memory.oom_kills_before is None else memory.oom_kills_before
    return replace(memory, oom_kills_before=before, oom_kills=kills - before)


def _note_boards(memory: Memory, sample: Sample) -> Memory:
    boards = note_boards(memory.boards, sample.gpus, sample.tree, sample.t)
    memory = replace(memory, boards=boards)
    if memory.ready_at is not None or not works(boards):
        return memory
    return _moved(memory, sample.t, progress=GPU_WORK)


def _note_outside(memory: Memory, sample: Sample, *, gap: bool) -> Memory:
    outside, grown = note_outside(memory.outside, sample, gap=gap, produced_at=memory.progress_at)
    memory = replace(memory, outside=outside)
    if outside.is_quiet(sample.t):
        # Stillness that is wanted says nothing, and is no beginning of a still stretch either.
        return replace(_moved(memory, sample.t, activity=QUIET), progress_at=sample.t, agreement=None)
    return _moved(memory, sample.t, progress=grown)


def _note_stretch(memory: Memory, before: Memory, sample: Sample) -> Memory:
    """Note what a still stretch began with, and how long one was that ended in movement."""
    at, produced = memory.last_movement_at, memory.progress_at == sample.t
    if produced and memory.progress_by != GPU_WORK:
        memory = replace(memory, boards=note_product(memory.boards))
    if at != sample.t or isinstance(sample.tree, Unseen):
        return memory
    memory = replace(memory, written_before=sample.tree.written_chars)
    still = sample.t - before.last_movement_at
    wanted = isinstance(before.verdict, Waiting) or (
        memory.activity_at == at and memory.activity_by in {QUIET, WATCHER}
    )
    if before.started_at is None or memory.ready_at is not None or wanted or still < STRETCH:
        return memory
    longest = {**dict(memory.longest_still)}
    phase = before.place.phase
    longest[phase] = max(longest.get(phase, 0.0), still)
    return replace(memory, longest_still=tuple(longest.items()))


def _note_answer(memory: Memory, sample: Sample) -> Memory:
    if memory.ready_at is None and not memory.rules.answers:
        started = has_started(memory, sample)
        guess = "" if started else ready_as_far_as_told(memory)
        if started or guess:
            return _place(replace(memory, ready_at=sample.t, ready_by_guess=guess), Place("serving", sample.t))
    good = isinstance(sample.answer, Reply) and sample.answer.state == "good"
    if memory.ready_at is None and (good or _was_ready_before(memory, sample)):
        memory = _place(replace(memory, ready_at=sample.t), Place("serving", sample.t))
    return memory


def _was_ready_before(memory: Memory, sample: Sample) -> bool:
    """Whether a server that somebody else started is past its start: a member listens, and any route answers.

    Or its log says so: the health route of a SGLang whose scheduler hangs waits for 20 s, and then says 503.
    """
    port = sample.port
    if not memory.rules.attached or isinstance(port, Unseen) or port.listener is None or port.listener.ours is False:
        return False
    good = any(isinstance(reply, Reply) and reply.state == "good" for reply in (sample.health, sample.canary))
    return good or memory.place.phase == "serving"


def _note_serving(memory: Memory, sample: Sample) -> Memory:
    if memory.ready_at is None:
        return memory
    at_work = memory.boards.working[:1]
    works_at = "".join(f"{b.name} at {b.watts:.0f} W" if b.watts is not None else f"{b.name} at work" for b in at_work)
    news = memory.progress_by == "log" and memory.progress_at == sample.t
    serving = note_serving(
        memory.serving,
        sample,
        memory.rules,
        ready_at=memory.ready_at,
        works=works_at,
        may_work=works(memory.boards) is not False and is_busy_for_nothing(memory.boards) is not True,
        news=news,
    )
    tokens = serving.produced_by == "tokens" and serving.produced_at > memory.serving.produced_at
    return replace(memory, serving=serving, boards=note_product(memory.boards) if tokens else memory.boards)


def _moved(memory: Memory, t: float, *, progress: str = "", activity: str = "") -> Memory:
    """Any movement ends the still stretch; what was produced ends the stretch of looks and stacks as well."""
    if not progress and not activity:
        return memory
    memory = replace(memory, window=memory.window[-1:])
    if progress:
        memory = replace(
            memory, progress_at=t, progress_by=progress, wide=memory.wide[-1:], agreement=None, stacks_at=None
        )
    if activity:
        memory = replace(memory, activity_at=t, activity_by=activity)
    return memory
