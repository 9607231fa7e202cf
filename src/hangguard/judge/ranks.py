"""The ranks beside one another: who stands where, who is the odd one, and whom to suspect first."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from hangguard.facts import Broken, Communicator, Process, Stack, Stuck, Suspect, Tree, Unseen, Verdict
from hangguard.judge.rules import Rules, matches
from hangguard.judge.sites import WITHIN, main_thread, wait_of
from hangguard.judge.stillness import working_members

AT_MOST = 16
"""Suspects in one verdict."""

_ANOTHER_PLACE = "another place than"
"""What is noted of every one, where each stands somewhere else: it tells nobody from the others."""

NAMED_BY_NCCL = (
    ("missing_ranks", "does not answer, or has left"),
    ("failed_ranks", "reports an error, or was told to abort"),
    ("uninitialised_ranks", "is not initialised"),
    ("behind_ranks", "has launched fewer collectives than the others"),
)

_NO_CULPRITS = frozenset({*WITHIN, "kernel", "message", "work", "start-up"})
"""Waits in which a rank is that waits for another itself, or that has nothing to do."""

_RANK = re.compile(r"(?<![A-Za-z])(?:DCP|PCP|DP|PP|TP|EP|CP)\d+(?![A-Za-z0-9])")
_SAID_BY = re.compile(
    # vLLM: "(Worker_TP1 pid=812) INFO ...", "(EngineCore_DP0 pid=700) ..."; SGLang: "[2025-11-02 10:11:12 DP0 TP1] ..."
    r"^\((?:Vllm)?(?:Worker|EngineCore)\w* pid=\d+\)|^\[[\d\-:., ]+(?: [A-Z]+\d+)+\]"
)
_NCCL_INIT = re.compile(r"^\S+?:(\d+):\d+ .*NCCL INFO .*Init (START|COMPLETE)")
"""``host:812:812 [0] NCCL INFO ncclCommInitRank comm 0x… rank 0 nranks 2 … - Init START`` (init.cc, NCCL 2.19 on)."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the log tells of single ranks."""

    last: tuple[tuple[str, str], ...] = ()
    """(rank, its last line) of every rank that the log names."""
    nccl: tuple[tuple[int, int, int], ...] = ()
    """(pid, communicators whose init began, and ended) of every process that NCCL_DEBUG=INFO names."""


def note_said(said: Said, lines: Iterable[str], noise: tuple[str, ...]) -> Said:
    """Return what is known of single ranks after these lines."""
    last, nccl = dict(said.last), {pid: (begun, ended) for pid, begun, ended in said.nccl}
    for line in lines:
        if init := _NCCL_INIT.match(line):
            begun, ended = nccl.get(int(init[1]), (0, 0))
            nccl[int(init[1])] = (begun + 1, ended) if init[2] == "START" else (begun, ended + 1)
        elif (by := _SAID_BY.match(line)) and (rank := _rank_in(by[0])) and not matches(noise, line):
            last[rank] = line[by.end() :].strip()[:200]
    return Said(tuple(last.items())[-256:], tuple((pid, *counts) for pid, counts in nccl.items())[-256:])


def ranks_seen(tree: Tree | None) -> frozenset[str]:
    """Return the ranks that members call themselves."""
    return frozenset(rank_of(p.title) for p in tree.members) - {""} if tree is not None else frozenset()


def rank_of(title: str) -> str:
    """Return the rank that a title names, as ``DP0 TP1``; "" if it names none."""
    return _rank_in(title.split(" ", 1)[0])


def _rank_in(text: str) -> str:
    return " ".join(_RANK.findall(text))


@dataclass(frozen=True, slots=True)
class Standing:
    """One working member, and what tells it from the others."""

    process: Process
    stack: Stack | None
    where: tuple[str, ...]
    """Its main thread's frames, outermost first: ``function (file)``; empty: not seen."""
    waits_for: str = ""

    @property
    def rank(self) -> str:
        """Return its rank."""
        return rank_of(self.process.title)

    @property
    def name(self) -> str:
        """Return its rank, or its title with its pid."""
        return self.rank or f"{self.process.title[:40]} ({self.process.pid})"


def standings(tree: Tree, rules: Rules, stacks: tuple[Stack, ...]) -> tuple[Standing, ...]:
    """Return every working member with where it stands."""
    by_identity = {(stack.pid, stack.started): stack for stack in stacks}
    return tuple(_standing(p, by_identity.get(p.identity), rules) for p in working_members(tree, rules))


def _standing(process: Process, stack: Stack | None, rules: Rules) -> Standing:
    if stack is None or isinstance(stack.threads, Unseen):
        return Standing(process, stack, ())
    main, found = main_thread(stack.threads), wait_of(stack, rules)
    where = tuple(f"{f.function} ({f.file.rsplit('/', 1)[-1]})" for f in reversed(main.frames if main else ()))
    return Standing(process, stack, where, found.waits_for if found else "")


def groups(members: tuple[Standing, ...]) -> tuple[tuple[Standing, ...], ...]:
    """Return the members that stand at the same place together, the largest group first."""
    found: dict[tuple[str, ...], list[Standing]] = {}
    for member in members:
        found.setdefault(member.where, []).append(member)
    return tuple(tuple(group) for group in sorted(found.values(), key=len, reverse=True))


def suspects(
    tree: Tree,
    rules: Rules,
    stacks: tuple[Stack, ...],
    *,
    said: Said | None = None,
    stopped: tuple[tuple[int, int], ...] = (),
    hot: frozenset[tuple[int, int]] = frozenset(),
) -> tuple[Suspect, ...]:
    """Return the working members, the likeliest culprit first, each with where its main thread stands.

    ``stopped`` and ``hot`` are identities: members that a signal keeps from running, and those that burn CPU.
    """
    members = standings(tree, rules, stacks)
    first = tuple(_standing(p, None, rules) for p in tree.members if p.identity in stopped)
    members = (*first, *(m for m in members if m.process.identity not in stopped))
    noted = [(_why_odd(m, members, said or Said(), stopped, hot), m) for m in members]
    # Of an engine that nobody has described, those that call themselves ranks come before its other helpers.
    ordered = sorted(noted, key=lambda pair: (pair[0][0], not pair[1].rank))
    return tuple(replace(_suspect(m.process, m.stack), note=note) for (_, note), m in ordered[:AT_MOST])


def by_nccl(verdict: Verdict, communicators: tuple[Communicator, ...] | Unseen) -> Verdict:
    """Return the verdict with the ranks first that NCCL names, where nothing else told one from the others.

    Hosts that all wait for the GPU look alike, whoever's kernel does not end; NCCL counts what each has launched.
    """
    if isinstance(communicators, Unseen) or not isinstance(verdict, (Stuck, Broken)) or not verdict.suspects:
        return verdict
    note = verdict.suspects[0].note
    named = _named(communicators)
    ours = [s for s in verdict.suspects if s.pid in named]
    if not ours or len(ours) == len(verdict.suspects) or (note and not note.startswith(_ANOTHER_PLACE)):
        return verdict
    others = tuple(s for s in verdict.suspects if s.pid not in named)
    return replace(verdict, suspects=(*(replace(s, note=f"NCCL: it {named[s.pid]}") for s in ours), *others))


def _named(communicators: tuple[Communicator, ...]) -> dict[int, str]:
    """Return what NCCL says of single members, by pid."""
    named: dict[int, str] = {}
    for communicator in communicators:
        pids = dict(communicator.pids)
        for which, what in NAMED_BY_NCCL:
            for rank in getattr(communicator, which):
                if rank in pids:
                    named.setdefault(pids[rank], what)
    return named


def _why_odd(
    member: Standing,
    members: tuple[Standing, ...],
    said: Said,
    stopped: tuple[tuple[int, int], ...],
    hot: frozenset[tuple[int, int]],
) -> tuple[int, str]:
    """How likely it is the culprit (0: most), and why."""
    identity = member.process.identity
    if identity in stopped:
        return 0, "stopped"
    others = tuple(m for m in members if m is not member)
    waiting = [m for m in others if m.waits_for in WITHIN]
    if waiting and member.where and member.waits_for not in WITHIN:
        return 1, f"not where the others are: {_names(waiting)} wait for a peer in {_innermost(waiting[0])}"
    if hot and identity not in hot and len(hot) > len(members) // 2:
        return 1, "idle, while the others spin"
    at_kernels = [m for m in others if m.waits_for == "kernel"]
    if member.rank and member.where and at_kernels == list(others) != [] and member.waits_for not in _NO_CULPRITS:
        # Of a collective that was launched a rank's host waits for the kernel: the call itself returns at once.
        return 1, f"not where the others are: {_names(others)} wait for the GPU in {_innermost(others[0])}"
    largest = groups(members)[0]
    is_helper = not member.rank and bool(largest[0].rank)
    if member not in largest and len(largest) > 1 and not is_helper:
        return 2, f"alone here; {_names(largest)} stand in {_innermost(largest[0])}"
    if late := _late_in_nccl(member, members, said):
        return 3, late
    if late := _late_in_log(member, members, said):
        return 3, late
    if others and member.where and all(m.where and m.where != member.where for m in others):
        return 4, f"{_ANOTHER_PLACE} {_names(others)}"
    return 4, ""


def _late_in_nccl(member: Standing, members: tuple[Standing, ...], said: Said) -> str:
    """Name a rank whose communicator init is open where another's is done, or that never began one."""
    counts = {pid: (begun, ended) for pid, begun, ended in said.nccl}
    begun, ended = counts.get(member.process.pid, (0, 0))
    ours = [counts[m.process.pid] for m in members if m.process.pid in counts]
    if not ours:
        return ""
    if begun < max(b for b, _ in ours):
        return "NCCL: has not begun an init that others have (no Init START)"
    if ended < max(e for _, e in ours):
        return "NCCL: Init START without Init COMPLETE, which others have"
    return ""


def _late_in_log(member: Standing, members: tuple[Standing, ...], said: Said) -> str:
    """Name a rank whose last line is one that all others have left behind."""
    last = dict(said.last)
    ranks = [m.rank for m in members if m.rank in last]
    mine = [r for r in ranks if _kind(last[r]) == _kind(last.get(member.rank, ""))]
    if member.rank not in last or len(ranks) < 3 or len(mine) != 1:
        return ""
    rest = {_kind(last[r]) for r in ranks if r != member.rank}
    return f"its last line is not that of the others: {last[member.rank][:100]}" if len(rest) == 1 else ""


def _kind(line: str) -> str:
    return re.sub(r"\d+(?:[.:]\d+)*", "#", line)


def _innermost(member: Standing) -> str:
    return member.where[-1] if member.where else "a place that could not be seen"


def _names(members: Iterable[Standing]) -> str:
    names = [m.name for m in members]
    return ", ".join(names) if len(names) <= 4 else f"{names[0]} … {names[-1]} ({len(names)})"


def _suspect(process: Process, stack: Stack | None) -> Suspect:
    main = None if stack is None or isinstance(stack.threads, Unseen) else main_thread(stack.threads)
    at = tuple(f"{f.function} ({f.file.rsplit('/', 1)[-1]}:{f.line})" for f in (main.frames[:8] if main else ()))
    return Suspect(pid=process.pid, title=process.title, rank=rank_of(process.title), at=at)


# ------------------------------------------------------------------------------------------- the prefix tree


@dataclass(slots=True)
class _Node:
    here: list[Standing] = field(default_factory=list)
    below: dict[str, _Node] = field(default_factory=dict)


def prefix_tree(members: tuple[Standing, ...]) -> tuple[str, ...]:
    """Return the stacks of the members as one tree, outermost frame first: lines of text for a report.

    Frames that a group shares stand once; a line ends with the ranks that stand there.
    """
    top = _Node()
    for member in members:
        node = top
        for frame in member.where:
            node = node.below.setdefault(frame, _Node())
        node.here.append(member)
    lines = tuple(line for frame, node in top.below.items() for line in _lines(frame, node, 0))
    return (*lines, f"not seen: {_names(top.here)}") if top.here else lines


def _lines(frame: str, node: _Node, depth: int) -> Iterable[str]:
    chain = [frame]
    while not node.here and len(node.below) == 1:
        (frame, node), *_ = node.below.items()
        chain.append(frame)
    shown = chain if len(chain) <= 6 else [*chain[:2], f"… {len(chain) - 5} more", *chain[-3:]]
    stands = f"  <- {_names(node.here)}" if node.here else ""
    yield f"{'  ' * depth}{' > '.join(shown)}{stands}"
    for frame_below, below in node.below.items():
        yield from _lines(frame_below, below, depth + 1)
