"""Why a server ended: the reason, told apart by evidence.

Exit codes lie: vLLM ends with 0 when its engine core was killed, SGLang kills itself with SIGKILL when its own
start fails. What members ended with, and what they said, goes before the code of the front end.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from hangguard.facts import Departed, Exit, Unseen
from hangguard.judge.ranks import rank_of
from hangguard.judge.rules import TRACKERS, Rules, matches

CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGQUIT,
                 signal.SIGTRAP, signal.SIGSYS)  # fmt: skip

OUTSIDE_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGKILL, signal.SIGHUP)
"""Signals by which people, shells, service managers and schedulers stop a program."""

FOLLOWS = ("download", "dist-timeout", "crash")
"""Reasons that often only follow from another one that was told as well: they are named last, in this order."""

RECENT = 300.0
"""Of a server that was ready, words older than this, seconds, no longer explain its end. SGLang waits for 65 s
before it leaves, and NCCL's watchdog for some 60 s after it has spoken."""

SHM_FULL_SHARE = 0.01
"""Free share of /dev/shm below which a SIGBUS is put down to it."""

_ONLY_A_BUS_ERROR = re.compile(r"\bSIGBUS\b|(?i:\bbus error\b)|exit ?code:? -7\b")
_OF_SHARED_MEMORY = re.compile(r"(?i:shared memory|/dev/shm|no space left)|ncclShmOpen")

TELLING = 3
"""Lines kept from the beginning of what was told: the cause stands there, what follows from it comes after."""

ONE_LOOK = 1.5
"""Seconds within which nobody knows which of two deaths was the first."""

YOUNG = 30.0
"""Seconds before the end of a named worker in which a nameless child of multiprocessing that failed was its cause."""

_SPAWNED = re.compile(r"\bfrom multiprocessing\.spawn import spawn_main\b")
_TRACEBACK = "Traceback (most recent call last):"
_BARE_EXCEPTION = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)(?:: |$)")
_DEATH = re.compile(r"(?:died|exited) unexpectedly|died during initialization|crashed with exit code")
"""A front end that found one of its processes dead; of those that it kills itself it says so in no such words."""
_POINTS = re.compile(
    r"\broot cause\b|\b(?:EngineCore|WorkerProc) failed to start\.|\b(?:BrokenPipe|ConnectionReset|EOF)Error\b"
)
"""Another line says why (vllm/v1/engine/utils.py, core.py, executor/multiproc_executor.py), or another one is gone:
then none does, where that one was killed while it started."""
_EXCEPTION = re.compile(r"\b\w*(?:Error|Exception): ")

_SIGKILLED = re.compile(r"(?:crashed with exit code|exit ?code:?) -9\b")


SENT_AWAY = "sent-away"
"""Reason of a line in which the launched process says that it kills a child itself; its pid is the pattern's group."""
ASKED_TO_STOP = "asked-to-stop"
"""Reason of a line in which it says that it was asked to stop."""


@dataclass(frozen=True, slots=True)
class Told:
    """A line of the log that names a reason."""

    reason: str
    line: str
    permanent: bool
    at: float = 0.0
    """When it was read, monotonic."""
    pid: int | None = None
    """Of whom it tells."""
    final: bool = False
    """Whether the start has failed for good by it."""
    worker: tuple[str, int] | None = None
    """The same, where it names a role and a rank instead: ``("Worker", 1)`` of ``Worker proc VllmWorker-1``."""


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason of an exit."""

    reason: str
    why: str
    permanent: bool = False
    evidence: tuple[str, ...] = ()


def told_by(lines: tuple[str, ...], rules: Rules, t: float = 0.0) -> tuple[Told, ...]:
    """Return the reasons that these log lines, read at ``t``, name."""
    return tuple(
        Told(
            reason=symptom.reason,
            line=_with_its_exception(line, lines[n + 1 :])[:300],
            permanent=symptom.permanent,
            at=t,
            pid=_pid_in(match),
            final=symptom.final,
            worker=_worker_in(match),
        )
        for n, line in enumerate(lines)
        for symptom in rules.symptoms
        if (match := re.search(symptom.pattern, line))
    )


def _pid_in(match: re.Match[str]) -> int | None:
    return int(match["pid"]) if "pid" in match.re.groupindex and match["pid"] else None


def _worker_in(match: re.Match[str]) -> tuple[str, int] | None:
    return (match["role"], int(match["rank"])) if "rank" in match.re.groupindex and match["rank"] else None


def _sent_away(told: tuple[Told, ...]) -> set[int]:
    """Return whom the launched process has ended itself: their end began nothing."""
    return {t.pid for t in told if t.reason == SENT_AWAY and t.pid is not None}


def _fault_before_all(told: tuple[Told, ...]) -> Told | None:
    """Return the line that tells of a dead member or an error, where nobody was sent away or asked to stop before it.

    vLLM says that it kills each process of its list, and one that was killed before is on it.
    """
    said = (SENT_AWAY, ASKED_TO_STOP)
    found = next((t for t in told if t.reason in said or _tells_a_death(t) or _names_an_error(t)), None)
    return found if found is not None and found.reason not in said else None


def _named_by_rank(fault: Told | None, departed: tuple[Departed, ...]) -> Departed | None:
    """Return the member of which a death line gives role and rank, where its title gives both too."""
    if fault is None or fault.worker is None:
        return None
    role, rank = fault.worker
    of_role = [d for d in departed if f"::{role}" in d.title and d.exit_code not in {0, -signal.SIGTERM}]
    named = [d for d in of_role if rank_of(d.title).partition(" ")[0] == f"TP{rank}"]
    named = named or [d for d in of_role if rank == 0 and not rank_of(d.title)]
    return named[0] if len(named) == 1 else None


def _with_its_exception(line: str, rest: tuple[str, ...]) -> str:
    """A line that begins a traceback says little without the exception at its end: the first one, if there are more."""
    said, begins, _ = line.strip().partition(_TRACEBACK)
    return said + next((after for after in rest if _BARE_EXCEPTION.match(after)), begins) if begins else said


def reason_of(
    end: Exit | None,
    told: tuple[Told, ...],
    departed: tuple[Departed, ...],
    *,
    root: tuple[int, int] | None,
    oom_kills: int,
    was_ready: bool,
    rules: Rules,
    cgroup_oom_kills: int | None = None,
    shm_free_share: float | None = None,
    hardware: str = "",
) -> Ending:
    """Return why it ended, from all that was seen.

    ``oom_kills`` are those since the launch on the whole machine, ``cgroup_oom_kills`` those in its own control
    group (``None``: not seen); ``shm_free_share`` is the lowest free share of /dev/shm that was seen; ``hardware``
    names a fault of a board after which no program goes on.
    """
    if was_ready and end is not None:
        told = tuple(t for t in told if t.at >= end.at - RECENT)
    asked_to_stop = next((t for t in told if t.reason == ASKED_TO_STOP), None)
    fault = _fault_before_all(told)
    missed = _named_by_rank(fault, departed)
    departed = tuple(d for d in departed if d is missed or d.pid not in _sent_away(told))
    told = tuple(t for t in told if t.reason not in {ASKED_TO_STOP, SENT_AWAY})
    evidence = tuple(f"{t.reason}: {t.line}" for t in _first_and_last(told))
    killed = missed or _told_dead(told, departed) or first_killed(departed, root, rules) or _untitled(told, departed)
    code = _through_a_shell(end.code) if end is not None else Unseen("its parent never told")
    if killed is not None and _began_it(killed, departed, end, rules):
        told = tuple(t for t in told if t.reason not in FOLLOWS or t.at < killed.noticed_at - ONE_LOOK)
    if kills := _oom_kills(code, told, killed, oom_kills, cgroup_oom_kills):
        who = name_of(killed) if killed is not None else "the launched process"
        return Ending("oom-kill", f"{who} was killed while the kernel's OOM killer was at work ({kills})",
                      evidence=evidence)  # fmt: skip
    if hardware:
        return Ending("hardware", f"{hardware}: the board needs a reset, a reboot or a repair",
                      permanent=True, evidence=evidence)  # fmt: skip
    if cause := _cause(told):
        if _is_only_a_bus_error(cause):
            return _by_sigbus(cause.line, shm_free_share, evidence, unseen="shm-full")
        return Ending(cause.reason, cause.line, cause.permanent, evidence)
    own = bool(told) and not any(map(_tells_a_death, told)) and not all(map(_only_points, told))
    if killed is not None and killed.exit_code == -signal.SIGKILL and own:
        return Ending(
            "crash", _root_cause(told) or told[0].line, evidence=evidence
        )  # it was killed for that, by its own
    if killed is not None and not _followed(killed, end, code, told):
        return _of_a_member(killed, shm_free_share, evidence, _root_cause(told))
    if isinstance(code, Unseen):
        return Ending("unknown", f"the exit code could not be seen: {code.reason}", evidence=evidence)
    # vLLM says such words when it is sent away too, and ends with 0 both then and when its engine core was killed.
    asked = code in {0, -signal.SIGTERM, -signal.SIGINT}
    if told and -code in OUTSIDE_SIGNALS and all(map(_only_points, told)):
        return _by_code(code, evidence, was_ready=was_ready, shm_free_share=shm_free_share)  # they only missed it
    if told and (not asked or _worker_end_unseen(departed, rules)):
        return Ending("crash", told[0].line, evidence=evidence)
    if asked and fault is not None:
        return Ending("crash", fault.line, evidence=evidence)
    if asked and asked_to_stop is not None:
        why = f"it was asked to stop, not by hangguard, and ended with {how(code)}: {asked_to_stop.line}"
        return Ending("signal", why, evidence=evidence)
    return _by_code(code, evidence, was_ready=was_ready, shm_free_share=shm_free_share)


def failure_told(told: tuple[Told, ...]) -> Ending:
    """Return why a start has failed, by nothing else than what was said: of one that has not ended."""
    cause = _cause(told)
    evidence = tuple(f"{t.reason}: {t.line}" for t in _first_and_last(told))
    if cause is None:
        return Ending("crash", _root_cause(told) or told[0].line, evidence=evidence)
    return Ending(cause.reason, cause.line, cause.permanent, evidence)


def _began_it(killed: Departed, departed: tuple[Departed, ...], end: Exit | None, rules: Rules) -> bool:
    """Say whether a member died by a signal while all others lived on: what they say then follows from its death.

    A rank that is gone is an error in every collective of the others, and the one who complains is not at fault. An
    engine that ends its processes for an error of its own ends them together.
    """
    if not isinstance(killed.exit_code, int) or killed.exit_code >= 0:
        return False
    others = [d.noticed_at for d in departed if d is not killed and matches(rules.workers, d.title)]
    others += [end.at] if end is not None else []
    return all(at - killed.noticed_at > ONE_LOOK for at in others)


def _followed(killed: Departed, end: Exit | None, code: int | Unseen, told: tuple[Told, ...]) -> bool:
    """Say whether a member died only because the launched process was killed.

    SGLang's children die by SIGKILL with their parent (PR_SET_PDEATHSIG, utils/common.py kill_itself_when_parent_died).
    Where it was the other way round there is time between the two, and the front end says why it kills itself.
    """
    if end is None or told or not isinstance(code, int) or -code not in OUTSIDE_SIGNALS:
        return False
    return killed.exit_code == -signal.SIGKILL and killed.noticed_at >= end.at


def first_killed(departed: tuple[Departed, ...], root: tuple[int, int] | None, rules: Rules) -> Departed | None:
    """Return the member whose end began it: the first by a signal, or a named worker with a bad code.

    Small helpers (compilers, probes) may fail in a healthy start. A worker that ends before it has given itself its
    title is seen as a child of multiprocessing: it counts where a named worker gave up soon after.
    """
    young: Departed | None = None
    for member in departed:
        if (member.pid, member.started) == root or matches(TRACKERS, member.title):
            continue
        if isinstance(member.exit_code, Unseen) or member.exit_code in {0, -signal.SIGTERM}:
            continue  # SIGTERM is how the others are sent away
        if not rules.workers and member.exit_code < 0:
            return member
        if matches(rules.workers, member.title):
            return young if young is not None and member.noticed_at - young.noticed_at <= YOUNG else member
        if _SPAWNED.search(member.title):
            young = member
    return None


def _told_dead(told: tuple[Told, ...], departed: tuple[Departed, ...]) -> Departed | None:
    """Return whom the launched process says that it found dead. The others are killed by itself after that."""
    named = {t.pid for t in told if t.pid is not None}
    return next((member for member in departed if member.pid in named and member.exit_code != 0), None)


def _untitled(told: tuple[Told, ...], departed: tuple[Departed, ...]) -> Departed | None:
    """Return the first that was killed before it had a title, where the launched process says that one of them died."""
    if not any(map(_tells_a_death, told)):
        return None
    killed = (
        d for d in departed if isinstance(d.exit_code, int) and d.exit_code < 0 and d.exit_code != -signal.SIGTERM
    )
    return next((member for member in killed if _SPAWNED.search(member.title)), None)


def name_of(member: Departed) -> str:
    """Return how a member is named to people."""
    return f"{member.title[:80]} (pid {member.pid})"


def how(code: int | Unseen) -> str:
    """Return what an exit code says, for people."""
    if isinstance(code, Unseen):
        return f"an exit that could not be seen ({code.reason})"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"


def _through_a_shell(code: int | Unseen) -> int | Unseen:
    """A shell in front of the server tells the end by a signal as 128 and its number."""
    known = (*OUTSIDE_SIGNALS, *CRASH_SIGNALS)
    return -(code - 128) if isinstance(code, int) and code - 128 in known else code


def _oom_kills(
    code: int | Unseen, told: tuple[Told, ...], killed: Departed | None, machine: int, own: int | None
) -> str:
    """Return how many kills by the OOM killer explain the end, and where they were counted; "" if none does.

    The count of the launch's own control group decides where it is seen: it takes in kills for want of memory on
    the whole machine too, and none of anybody else's. SGLang kills itself with SIGKILL after it has said why: then
    a count of the whole machine is somebody else's.
    """
    member = killed is not None and killed.exit_code == -signal.SIGKILL
    if own is not None:
        root = code == -signal.SIGKILL and _cause(told) is None
        said = any(_SIGKILLED.search(t.line) for t in told)
        return f"{own} in its own control group since the launch" if own and (member or root or said) else ""
    root = code == -signal.SIGKILL and not told
    return f"{machine} kills on this machine since the launch" if machine and (member or root) else ""


def _first_and_last(told: tuple[Told, ...]) -> tuple[Told, ...]:
    return told if len(told) <= TELLING + 2 else (*told[:TELLING], *told[-2:])


def _tells_a_death(told: Told) -> bool:
    return _DEATH.search(told.line) is not None


def _only_points(told: Told) -> bool:
    return _POINTS.search(told.line) is not None


def _root_cause(told: tuple[Told, ...]) -> str:
    """Return the first exception that does not only point at another one; "" if none was told."""
    return next((t.line for t in told if _names_an_error(t)), "")


def _names_an_error(told: Told) -> bool:
    return _EXCEPTION.search(told.line) is not None and not _only_points(told)


def _cause(told: tuple[Told, ...]) -> Told | None:
    """Return what names a reason best: what would happen again, then what follows from nothing else, then the first."""
    named = [t for t in told if t.reason != "crash"]
    order = {reason: rank for rank, reason in enumerate(FOLLOWS, 1)}
    return min(named, key=lambda t: (order.get(t.reason, 0), not t.permanent), default=None)


def _is_only_a_bus_error(told: Told) -> bool:
    """Whether the line names a SIGBUS and not what it came from; CPython's fault handler writes such a line."""
    says = _ONLY_A_BUS_ERROR.search(told.line) is not None and _OF_SHARED_MEMORY.search(told.line) is None
    return told.reason == "shm-full" and says


def _of_a_member(killed: Departed, shm_free_share: float | None, evidence: tuple[str, ...], words: str) -> Ending:
    why = f"{name_of(killed)} ended by {how(killed.exit_code)}"
    if isinstance(killed.exit_code, int) and killed.exit_code > 0 and words:
        why += f": {words}"  # it gave up, and somebody said why
    if killed.exit_code == -signal.SIGBUS:
        return _by_sigbus(why, shm_free_share, evidence)
    if killed.exit_code == -signal.SIGKILL:
        why += "; no kill by the OOM killer was counted, and it said nothing: somebody may have sent it"
    return Ending("crash", why, evidence=evidence)


def _by_sigbus(why: str, shm_free_share: float | None, evidence: tuple[str, ...], *, unseen: str = "crash") -> Ending:
    """A page of a mapped file could not be had: /dev/shm is full, or a file became shorter while it was mapped.

    ``unseen``: the reason where nobody saw how full it was.
    """
    if shm_free_share is None:
        return Ending(unseen, f"{why}: /dev/shm was full, or a mapped file was cut short", evidence=evidence)
    if shm_free_share < SHM_FULL_SHARE:
        return Ending("shm-full", f"{why}, and {shm_free_share:.1%} of /dev/shm was free", evidence=evidence)
    return Ending(
        "crash",
        f"{why}: a mapped file was cut short, or could not be read ({shm_free_share:.0%} of /dev/shm was free)",
        evidence=evidence,
    )


def _by_code(code: int, evidence: tuple[str, ...], *, was_ready: bool, shm_free_share: float | None) -> Ending:
    if code == -signal.SIGBUS:
        return _by_sigbus(f"ended by {how(code)}", shm_free_share, evidence)
    if code < 0:
        if -code in CRASH_SIGNALS:
            return Ending("crash", f"ended by {how(code)}", evidence=evidence)
        return Ending("signal", f"ended by {how(code)}, which hangguard did not send: somebody else stopped it",
                      evidence=evidence)  # fmt: skip
    if code == 0:
        when = "after it was ready" if was_ready else "before it was ever ready"
        return Ending("finished", f"ended with code 0 {when}, unasked", evidence=evidence)
    return Ending("crash", f"ended with exit code {code}", evidence=evidence)


def _worker_end_unseen(departed: tuple[Departed, ...], rules: Rules) -> bool:
    return any(isinstance(d.exit_code, Unseen) and matches(rules.workers, d.title) for d in departed)
