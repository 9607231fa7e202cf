"""One look as lines for people, and as one JSON document. Nothing is printed here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from hangguard.changes import as_shell
from hangguard.facts import Finding, Stack, Suspect, ThreadStack, Tree, Unseen, Verdict
from hangguard.redact import clean_text
from hangguard.report.share import without_prompts
from hangguard.supervision.evidence import as_plain
from hangguard.supervision.found import FoundServer
from hangguard.supervision.look import Look

SCHEMA = 1
FRAMES = 8
"""Innermost frames of a stack that a person reads."""
GROUPS = 12
TITLE = 60

STYLES = {
    "stuck": "bold red", "broken": "bold red", "expired": "bold red", "exited": "bold red", "waiting": "bold yellow",
    "unclear": "bold yellow", "moving": "bold green", "ready": "bold green",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Line:
    """One line: how deep it is indented, what it says, and how it looks on a terminal."""

    text: str
    indent: int = 0
    style: str = ""
    hang: int = 2
    """How much deeper it goes on where it is broken."""


def lines_of(look: Look) -> list[Line]:
    """Return a look as people read it: the verdict first, what to do last."""
    lines = [*_head(look), *_server(look), *_suspects(look.verdict), *_stacks(look), *_findings(look)]
    lines += _section("Could not be seen", [_missing(m.source, m.reason, m.helps) for m in look.missing])
    lines += _section("Next", [f"{number}. {advice}" for number, advice in enumerate(look.advice, start=1)])
    return [Line(clean_text(line.text), line.indent, line.style) for line in lines]


def as_json(look: Look) -> dict[str, Any]:
    """Return a look as plain values; within one schema keys may come, and none goes."""
    server = look.server
    return {
        "schema": SCHEMA,
        "verdict": as_plain(look.verdict),
        "seconds": round(look.seconds, 2),
        "server": server_as_json(server),
        "log": {
            "path": look.log_path,
            "silent_for": None if look.log_silent_for is None else round(look.log_silent_for, 1),
            "tail": [without_prompts(line) for line in look.log_tail],
        },
        "findings": as_plain(look.diagnosis.findings),
        "ranks": list(look.diagnosis.ranks),
        "missing": as_plain(look.missing),
        "advice": list(look.advice),
        "stacks": as_plain(look.stacks),
        "members": _members(look),
    }


def server_as_json(server: FoundServer) -> dict[str, Any]:
    """Return who a server is, as plain values."""
    return {
        "pid": server.pid or None,
        "started": server.started or None,
        "user": server.user,
        "title": server.title,
        "processes": server.processes,
        "age_seconds": round(server.age_seconds, 1),
        "versions": dict(server.versions),
        "launch": as_plain(server.launch),
    }


def duration(seconds: float) -> str:
    """Return a time as people say it."""
    if seconds < 120:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    if minutes < 120:
        return f"{minutes:.0f} min"
    return f"{minutes / 60:.0f} h" if minutes < 2880 else f"{minutes / 1440:.0f} days"


def headline(look: Look) -> str:
    """Return the verdict in a few words."""
    verdict = look.verdict
    kind = f" ({verdict.kind})" if verdict.kind else ""
    where = "" if verdict.verdict in {"ready", "exited"} else f" in {verdict.phase}"
    return f"{verdict.verdict.upper()}{kind}{where}"


def how_long(look: Look) -> str:
    """Return for how long nothing moved: what was seen, and what the log's last change tells of the time before."""
    verdict, silent = look.verdict, look.log_silent_for
    parts = [f"looked at for {duration(look.seconds)}"]
    if verdict.verdict == "moving":
        parts.append(f"{verdict.moved} moved last")
    elif verdict.verdict != "ready" and verdict.still_for >= 1.0:
        parts.append(f"nothing moved for at least {duration(verdict.still_for)}")
    if silent is not None and silent >= 2.0:
        parts.append(f"its log has been silent for {duration(silent)}")
    return "; ".join(parts)


# ----------------------------------------------------------------------------------------- sections


def _head(look: Look) -> Iterator[Line]:
    verdict = look.verdict
    who = f"pid {look.server.pid}" if look.server.pid else look.server.launch.url
    engine = look.server.launch.engine
    names = [headline(look), *([engine] if engine != "generic" else []), who]
    yield Line(", ".join(names), style=STYLES.get(verdict.verdict, "bold"))
    yield Line(how_long(look), 2)
    if verdict.why:
        sure = "" if verdict.confidence == "high" else f" (confidence: {verdict.confidence})"
        yield Line(f"{verdict.why}{sure}", 2)
    if verdict.numbers:
        yield Line("; ".join(map(str, verdict.numbers[:6])), 2, "dim")


def _server(look: Look) -> list[Line]:
    server = look.server
    launch = server.launch
    engine = f"{launch.engine} {launch.version or '(version not found)'}" if launch.engine != "generic" else "a server"
    facts = [engine]
    if server.pid:
        facts += [f"{server.processes} processes", f"up for {duration(server.age_seconds)}", f"user {server.user}"]
    facts += [launch.url] if launch.url else []
    lines = [", ".join(facts)]
    lines += [as_shell(launch)] if launch.argv else []
    lines += [f"log: {look.log_path}"] if look.log_path else []
    last = next((line for line in reversed(look.log_tail) if line.strip()), "")
    lines += [f"its last line: {without_prompts(last)[:200]}"] if last else []
    return _section("Server", lines)


def _suspects(verdict: Verdict) -> list[Line]:
    suspects: tuple[Suspect, ...] = getattr(verdict, "suspects", ())
    lines = []
    for suspect in suspects[:GROUPS]:
        rank = f", {suspect.rank}" if suspect.rank else ""
        note = f": {suspect.note}" if suspect.note else ""
        lines.append(f"{suspect.title[:TITLE]} (pid {suspect.pid}{rank}){note}")
        lines += [f"    at {' < '.join(suspect.at[:3])}"] if suspect.at else []
    lines += [f"and {len(suspects) - GROUPS} more"] if len(suspects) > GROUPS else []
    return _section("Suspects", lines)


def _stacks(look: Look) -> list[Line]:
    stacks = look.stacks
    suspects: tuple[Suspect, ...] = getattr(look.verdict, "suspects", ())
    pids = frozenset(suspect.pid for suspect in suspects)
    if not pids and not isinstance(stacks, Unseen) and len(stacks) > 1:  # the first process waits for the others
        pids = frozenset(stack.pid for stack in stacks if stack.pid != look.server.pid)
    ranks = _section("Where the ranks part", list(look.diagnosis.ranks))
    return ranks + _section("Where they stand", list(stack_lines(stacks, frames=FRAMES, first=pids)))


def stack_lines(
    stacks: tuple[Stack, ...] | Unseen, *, frames: int, first: frozenset[int] = frozenset(), whole: bool = False
) -> Iterator[str]:
    """Yield the stacks, members at the same place together, innermost frame first.

    ``first``: members that come first, and with more of their frames than others. ``whole``: all frames of all.
    """
    if isinstance(stacks, Unseen):
        return
    groups = sorted(_grouped(stacks), key=lambda group: group[0].pid not in first)
    for group in groups:
        stack = group[0]
        names = ", ".join(f"{member.title[:TITLE]} ({member.pid})" for member in group[:4])
        yield names + (f" and {len(group) - 4} more" if len(group) > 4 else "")
        if isinstance(stack.threads, Unseen):
            channel = stack.wait_channel if isinstance(stack.wait_channel, str) else ""
            yield f"    [{stack.threads.reason}{f'; waits in {channel}' if channel else ''}]"
            continue
        main = _main(stack.threads)
        for thread in sorted(stack.threads, key=lambda thread: thread is not main):
            if whole or (thread is main and (not first or stack.pid in first)):
                yield from _thread_lines(thread, frames=frames)
            else:
                yield f"    {_thread_name(thread)}: {_in_one_line(thread)}"


def _thread_lines(thread: ThreadStack, *, frames: int) -> Iterator[str]:
    yield f"    {_thread_name(thread)}:"
    for frame in thread.frames[:frames]:
        yield f"        {frame.function} ({_short(frame.file)}:{frame.line})"
    if len(thread.frames) > frames:
        yield f"        ... and {len(thread.frames) - frames} more"


def _thread_name(thread: ThreadStack) -> str:
    state = " [running]" if thread.active else f" [{thread.wait_channel}]" if thread.wait_channel else ""
    return f"{thread.name or f'thread {thread.thread_id}'}{state}"


def _in_one_line(thread: ThreadStack) -> str:
    """Return the innermost frames; those of the standard library tell least and are left out where others are."""
    frames = [frame for frame in thread.frames if not _is_of_python(frame.file)] or list(thread.frames)
    shown = [f"{frame.function} ({_short(frame.file)}:{frame.line})" for frame in frames[:2]]
    return " < ".join(shown) + (" < ..." if len(frames) > len(shown) else "")


def _is_of_python(file: str) -> bool:
    inside = "/lib/python3" in file and "-packages/" not in file
    return inside or file.startswith("<frozen ")


def _short(file: str) -> str:
    """Return the part of a path that tells: the package and what is in it, or the last two names."""
    for mark in ("site-packages/", "dist-packages/"):
        if mark in file:
            return file.rpartition(mark)[2]
    return "/".join(file.split("/")[-2:])


def _main(threads: tuple[ThreadStack, ...]) -> ThreadStack | None:
    return next((thread for thread in threads if thread.name == "MainThread"), threads[0] if threads else None)


def _grouped(stacks: tuple[Stack, ...]) -> list[list[Stack]]:
    """Members whose main threads stand at the same place, the smallest group first: the odd one is the suspect."""
    groups: dict[object, list[Stack]] = {}
    for stack in stacks:
        main = None if isinstance(stack.threads, Unseen) else _main(stack.threads)
        seen = tuple((f.function, f.file) for f in main.frames) if main is not None else ()
        key = (seen, len(seen) or str(stack.threads))
        groups.setdefault(key, []).append(stack)
    return sorted(groups.values(), key=lambda group: isinstance(group[0].threads, Unseen))


def _findings(look: Look) -> list[Line]:
    lines: list[Line] = []
    for heading, standings in (
        ("Supported", ("confirmed", "supported")),
        ("Ruled out", ("ruled out",)),
        ("Open", ("open",)),
    ):
        found = [finding for finding in look.diagnosis.findings if finding.standing in standings]
        lines += _section(heading, [_finding(finding) for finding in found])
    return lines


def _finding(finding: Finding) -> str:
    return finding.hypothesis + (f": {'; '.join(finding.evidence)}" if finding.evidence else "")


def _missing(source: str, reason: str, helps: str) -> str:
    return (reason if source == "server" else f"{source}: {reason}") + (f"  ->  {helps}" if helps else "")


def _section(heading: str, lines: Iterable[str]) -> list[Line]:
    body = [
        Line(line.lstrip(" "), 2 + len(line) - len(line.lstrip(" ")), "dim" if line.startswith("    ") else "")
        for line in lines
    ]
    return [Line(""), Line(heading, style="bold"), *body] if body else []


def _members(look: Look) -> list[dict[str, Any]]:
    trees = [sample.tree for sample in look.samples if isinstance(sample.tree, Tree)]
    return [as_plain(process) for process in trees[-1].members] if trees else []
