"""A verdict in the words of one line, for those who read no other."""

from __future__ import annotations

from hangguard.facts import Broken, Stuck, Verdict


def named(verdict: Verdict) -> str:
    """Return what it is and where it stands: ``stuck (idle) in graph-capture``."""
    kind = f" ({verdict.kind})" if verdict.kind else ""
    return f"{verdict.verdict}{kind} in {verdict.phase}"


def in_one_line(verdict: Verdict) -> str:
    """Return what it is, where, why, and who is the first suspect."""
    why = reasons(verdict)
    return f"{named(verdict)}: {why}" if why else named(verdict)


def reasons(verdict: Verdict) -> str:
    """Return why, and who is the first suspect; empty: nothing is known."""
    parts = [verdict.why] if verdict.why else []
    if isinstance(verdict, (Stuck, Broken)):
        if verdict.still_for >= 1.0:
            parts.insert(0, f"nothing moved for {verdict.still_for:.0f} s")
        if verdict.suspects:
            who = verdict.suspects[0]
            at = f" at {who.at[0]}" if who.at else ""
            parts.append(f"look at {who.title[:80]} (pid {who.pid}){at}")
    return "; ".join(parts)
