"""Broken: a member died and others hang on, the hardware is at fault, or the driver does not let a member go."""

from __future__ import annotations

import re
from dataclasses import replace

from hangguard.facts import Broken, Confidence, Departed, Measure, Process, Sample, Suspect, Tree, Unseen
from hangguard.judge.endings import ONE_LOOK, how
from hangguard.judge.memory import Memory
from hangguard.judge.ranks import rank_of
from hangguard.judge.rules import TRACKERS, matches
from hangguard.judge.silence import silent_for
from hangguard.judge.telling import judged, phase_at
from hangguard.judge.trouble import BoardFault, InDriver

HANGS_ON = 10.0
"""Seconds that members may outlive a dead one before they count as hanging on. The longest healthy farewell that was
measured is the 5 s of SGLang before its crash diagnostics; a vLLM tree was gone 3 to 6 s after a death."""

ON_ITS_WAY = 5.0
"""Seconds after a fault of a board for which answers may still come that it had computed before."""

SIGABRT = 6

WEDGED_FOR = 30.0
"""Seconds in one wait inside the driver. Memory registration and the freeing of large pools last for seconds."""

COMPILERS = re.compile(r"(?:^|[/ ])(?:nvcc|cicc|ptxas|cudafe\+\+|fatbinary|cc1(?:plus)?|gcc|g\+\+|c\+\+|clang(?:\+\+)?"
                       r"|ninja|as|ld|collect2)(?:$| )")  # fmt: skip
"""Titles of compilers: they may fail in a healthy start, and somebody else tries another way."""


_TITLED_ITSELF = re.compile(r"\w+::")
"""How vLLM and SGLang title their processes (setproctitle)."""


def judge_broken(memory: Memory, sample: Sample) -> Broken | None:
    """Return the verdict where something is broken, ``None`` where nothing is seen to be."""
    return _hardware(memory, sample) or _wedged(memory, sample) or _survivors(memory, sample)


# --------------------------------------------------------------------------------------------- hardware


def _hardware(memory: Memory, sample: Sample) -> Broken | None:
    trouble = memory.trouble
    still = stalled_for(memory)
    for fault in trouble.faults:
        ours = trouble.may_be_ours(fault)
        if ours is False or not fault.is_of_the_board or _has_outlived(memory, fault):
            continue
        if (fault.is_broken and ours) or still >= HANGS_ON:
            return judged(
                Broken,
                memory,
                sample,
                f"{fault}; no flag helps: the board needs a reset, a reboot or a repair",
                "hardware",
                numbers=_codes(fault),
                confidence="high" if ours else "medium",
            )
    return None


def _has_outlived(memory: Memory, fault: BoardFault) -> bool:
    """Whether the server has answered since a fault that a program may outlive: a row is remapped once, for good."""
    if fault.is_broken or memory.ready_at is None or fault.fault.at is None:
        return False
    return memory.serving.produced_at > fault.fault.at + ON_ITS_WAY


def _codes(fault: BoardFault) -> tuple[Measure, ...]:
    return (Measure(f"GPU {fault.index} Xid", fault.fault.code),) if fault.fault.code is not None else ()


# ----------------------------------------------------------------------------------------------- wedged


def _wedged(memory: Memory, sample: Sample) -> Broken | None:
    """A member that sleeps uninterruptibly inside the driver: no signal ends it, and no relaunch gets the board."""
    still = stalled_for(memory)
    stuck = [w for w in memory.trouble.in_driver if sample.t - w.since >= WEDGED_FOR]
    if not stuck or still < WEDGED_FOR:
        return None
    first = stuck[0]
    verdict = judged(
        Broken,
        memory,
        sample,
        f"{first.title[:80]} ({first.pid}) has been in the driver ({first.channel}) for {sample.t - first.since:.0f} s "
        "and cannot be ended: reboot, or reset the board",
        "wedged",
        numbers=(Measure("in the driver for", sample.t - first.since, "s"),),
    )
    return replace(verdict, suspects=tuple(_in_driver(w, sample.t) for w in stuck[:16]))


def _in_driver(wait: InDriver, t: float) -> Suspect:
    return Suspect(pid=wait.pid, title=wait.title, note=f"state D in {wait.channel} for {t - wait.since:.0f} s")


# -------------------------------------------------------------------------------------------- survivors


def _survivors(memory: Memory, sample: Sample) -> Broken | None:
    """A worker ended badly, nobody replaced it, and the others stay: they wait for it, and will for ever."""
    dead, others = dead_and_others(memory, sample)
    if dead is None or not others or isinstance(sample.tree, Unseen):
        return None
    last = max(d.noticed_at for d in sample.tree.departed)
    patient_until = max(last + HANGS_ON, memory.trouble.dumping_until)
    if sample.t < patient_until or quiet_for(memory) < HANGS_ON:
        return None
    seen: Confidence = "medium" if isinstance(dead.exit_code, Unseen) else "high"
    verdict = judged(
        Broken,
        memory,
        sample,
        f"{dead.title[:80]} (pid {dead.pid}) ended by {how(dead.exit_code)} "
        f"{sample.t - dead.noticed_at:.0f} s ago, and "
        f"{len(others)} other{'s hang' if len(others) > 1 else ' hangs'} on",
        "survivors",
        numbers=(Measure("dead for", sample.t - dead.noticed_at, "s"), Measure("survivors", len(others))),
        confidence=seen,
    )
    note = f"died first: {how(dead.exit_code)}"
    first = Suspect(pid=dead.pid, title=dead.title, rank=rank_of(dead.title), note=note)
    found = (first, *(_survivor(memory, p) for p in others[:15]))
    return replace(verdict, phase=phase_at(memory, dead.noticed_at) or verdict.phase, suspects=found)


def dead_and_others(memory: Memory, sample: Sample) -> tuple[Departed | None, tuple[Process, ...]]:
    """Return the member that is missed, and those that live on; the end of the launched process is an exit."""
    if sample.exit is not None or isinstance(sample.tree, Unseen):
        return None, ()
    others = tuple(p for p in sample.tree.members if not matches(TRACKERS, p.title) and not _is_dead(p))
    return first_dead(memory, sample.tree), others


def first_dead(memory: Memory, tree: Tree) -> Departed | None:
    """Return the member whose death nobody made good: one that the engine names and that did not end with 0.

    Of those that ended within one look, the one that a signal ended: the others may have ended because of it (a peer
    that is gone is an error in every collective). SIGABRT is sent by a program to itself.
    """
    missed = [member for member in tree.departed if _is_missed(memory, tree, member)]
    if not missed:
        return None
    first = min(member.noticed_at for member in missed)
    together = [member for member in missed if member.noticed_at - first <= ONE_LOOK]
    return next((member for member in together if _was_killed(member)), together[0])


def _was_killed(member: Departed) -> bool:
    return isinstance(member.exit_code, int) and member.exit_code < 0 and member.exit_code != -SIGABRT


def _is_missed(memory: Memory, tree: Tree, member: Departed) -> bool:
    """Whether the engine names it, it did not end with 0, and nobody took its place.

    Those are its workers, and what else gave itself a title (SGLang's detokenizer: a server without one answers
    nobody, sglang#21471). Children between fork and exec bear the title of their parent: one that was seen only once,
    under that, is none of them. Where the engine names no workers, a program that has answered may have lost a helper
    that it can do without: there only a death by a signal before it was ready counts.
    """
    if member.exit_code == 0 or member.title == "" or matches(TRACKERS, member.title):
        return False
    if (member.pid, member.started) == memory.root or COMPILERS.search(member.title):
        return False
    titled = _TITLED_ITSELF.match(member.title) and matches(memory.rules.front_end, member.title)
    named = bool(titled) or matches(memory.rules.workers, member.title)
    if named and (member.pid, member.started) not in memory.trouble.settled:
        return False
    by_signal = isinstance(member.exit_code, int) and member.exit_code < 0
    nameless = not memory.rules.workers and by_signal and memory.ready_at is None
    return (named or nameless) and not _is_replaced(member, tree)


def _is_replaced(dead: Departed, tree: Tree) -> bool:
    return any(p.title == dead.title and p.started > dead.started and not _is_dead(p) for p in tree.members)


def _is_dead(process: Process) -> bool:
    """State Z alone means only that the first thread ended."""
    return process.state in "ZX" and process.threads <= 1


def _survivor(memory: Memory, process: Process) -> Suspect:
    works = matches(memory.rules.workers, process.title)
    note = "hangs on" if works else "still there"
    return Suspect(pid=process.pid, title=process.title, rank=rank_of(process.title), note=note)


def stalled_for(memory: Memory) -> float:
    """Seconds for which nothing came out that should: of a start, or of a server while somebody waits for an answer.

    0.0: nobody waits. An idle server is as silent as a broken one.
    """
    if memory.ready_at is None:
        return memory.unproductive_for
    return silent_for(memory) if memory.serving.demand == "strong" else 0.0


def quiet_for(memory: Memory) -> float:
    """Seconds since anything was produced: by the whole start, or, once it serves, for those who asked."""
    if memory.ready_at is None:
        return memory.unproductive_for
    return memory.now - max(memory.serving.produced_at, memory.ready_at)
