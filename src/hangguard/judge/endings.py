"""Why a server ended: the reason, told apart by evidence.

Exit codes lie: vLLM ends with 0 when its engine core was killed, SGLang kills itself with SIGKILL when its own
start fails. What members ended with, and what they said, goes before the code of the front end.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass

from hangguard.facts import Departed, Exit, Unseen
from hangguard.judge.rules import TRACKERS, Rules, matches

CRASH_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL, signal.SIGQUIT,
                 signal.SIGTRAP, signal.SIGSYS)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Told:
    """A line of the log that names a reason."""

    reason: str
    line: str
    permanent: bool


@dataclass(frozen=True, slots=True)
class Ending:
    """The reason of an exit."""

    reason: str
    why: str
    permanent: bool = False
    evidence: tuple[str, ...] = ()


def told_by(lines: tuple[str, ...], rules: Rules) -> tuple[Told, ...]:
    """Return the reasons that these log lines name."""
    return tuple(
        Told(symptom.reason, line.strip()[:300], symptom.permanent)
        for line in lines
        for symptom in rules.symptoms
        if re.search(symptom.pattern, line)
    )


def reason_of(
    end: Exit | None,
    told: tuple[Told, ...],
    departed: tuple[Departed, ...],
    *,
    root: tuple[int, int] | None,
    oom_kills: int,
    was_ready: bool,
    rules: Rules,
) -> Ending:
    """Return why it ended, from all that was seen; ``oom_kills`` are those since the launch, machine-wide."""
    evidence = tuple(f"{t.reason}: {t.line}" for t in told[-5:])
    killed = _first_killed(departed, root, rules)
    code = end.code if end is not None else Unseen("its parent never told")
    # SGLang kills itself with SIGKILL after it has said why; then the counter is somebody else's.
    root_killed = code == -signal.SIGKILL and not told
    if oom_kills and (root_killed or (killed is not None and killed.exit_code == -signal.SIGKILL)):
        who = name_of(killed) if killed is not None else "the launched process"
        return Ending("oom-kill", f"{who} was killed while the kernel's OOM killer was at work "
                      f"({oom_kills} kills on this machine since the launch)", evidence=evidence)  # fmt: skip
    for t in sorted(told, key=lambda t: (t.reason == "crash", not t.permanent)):
        if t.reason != "crash":
            return Ending(t.reason, t.line, t.permanent, evidence)
    if killed is not None:
        return Ending("crash", f"{name_of(killed)} ended by {_how(killed.exit_code)}", evidence=evidence)
    if isinstance(code, Unseen):
        return Ending("unknown", f"the exit code could not be seen: {code.reason}", evidence=evidence)
    # vLLM says such words when it is sent away too, and ends with 0 both then and when its engine core was killed.
    asked = code in {0, -signal.SIGTERM, -signal.SIGINT}
    if told and (not asked or _worker_end_unseen(departed, rules)):
        return Ending("crash", told[0].line, evidence=evidence)
    return _by_code(code, evidence, was_ready=was_ready)


def _by_code(code: int, evidence: tuple[str, ...], *, was_ready: bool) -> Ending:
    if code < 0:
        by_fault = -code in CRASH_SIGNALS
        return Ending("crash" if by_fault else "signal", f"ended by {_how(code)}", evidence=evidence)
    if code == 0:
        when = "after it was ready" if was_ready else "before it was ever ready"
        return Ending("finished", f"ended with code 0 {when}, unasked", evidence=evidence)
    return Ending("crash", f"ended with exit code {code}", evidence=evidence)


def _first_killed(departed: tuple[Departed, ...], root: tuple[int, int] | None, rules: Rules) -> Departed | None:
    """The member whose end began it: the first by a signal, or a named worker with a bad code.

    Small helpers (compilers, probes) may fail in a healthy start.
    """
    for member in departed:
        if (member.pid, member.started) == root or matches(TRACKERS, member.title):
            continue
        if isinstance(member.exit_code, Unseen) or member.exit_code in {0, -signal.SIGTERM}:
            continue  # SIGTERM is how the others are sent away
        named = matches(rules.workers, member.title)
        if named or (member.exit_code < 0 and not rules.workers):
            return member
    return None


def _worker_end_unseen(departed: tuple[Departed, ...], rules: Rules) -> bool:
    return any(isinstance(d.exit_code, Unseen) and matches(rules.workers, d.title) for d in departed)


def name_of(member: Departed) -> str:
    """Return how a member is named to people."""
    return f"{member.title[:80]} (pid {member.pid})"


def _how(code: int | Unseen) -> str:
    if isinstance(code, Unseen):
        return f"an exit that could not be seen ({code.reason})"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"signal {-code}"
