"""Runs and what a cleaning came to, as lines for people and as plain values. Nothing is printed here."""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from hangguard.facts import IF_NOBODYS, CleanupItem, CleanupReport, Gpu, RunNow, RunState, Unseen
from hangguard.facts.cleaned import FOLDER_REMOVED, FOLDER_WOULD_GO
from hangguard.report.releases import LONGEST, removal_command
from hangguard.report.text import Line
from hangguard.run_state import name_for

SCHEMA = 1
STYLES = {"left": "bold red", "unknown": "magenta", "alive": "green", "gone": ""}
_GIB, _MIB = 1 << 30, 1 << 20


def what_runs(state: RunState | Unseen) -> str:
    """Return the engine and its model, or the command."""
    if isinstance(state, Unseen):
        return "?"
    words = list(state.command)
    model = next((words[i + 1] for i, word in enumerate(words[:-1]) if word in {"--model", "--model-path"}), "")
    if not model and words[1:3] and words[1] == "serve":
        model = words[2]
    if state.engine in {"", "generic"} or not model:
        return shlex.join(words)
    return f"{state.engine} {model}"


def row_of(now: RunNow, gpu_bytes: int | None = None) -> dict[str, Any]:
    """Return one run as plain values; within one schema keys may come, and none goes."""
    state = now.found.state
    row: dict[str, Any] = {"run_id": now.found.run_id, "path": now.found.path, "standing": now.standing}
    row |= {"why": now.why, "guardian": now.guardian, "supervisor": now.supervisor}
    row |= {"members": [pid for pid, _ in now.members], "files": [file.path for file in now.files]}
    row |= {"gpu_bytes": gpu_bytes}
    if isinstance(state, Unseen):
        return row
    root = state.root[0] if state.root is not None and state.root in now.members else None
    return row | {
        "engine": state.engine,
        "command": list(state.command),
        "pid": root,
        "url": state.url,
        "began": state.began,
        "attempt": state.attempt,
        "stage": state.stage,
        "phase": state.phase,
        "verdict": state.verdict,
        "kind": state.kind,
        "on_death": state.on_death,
        "outcome": state.outcome,
        "left_behind": list(state.left_behind),
    }


def memory_held(boards: tuple[Gpu, ...] | Unseen, pids: set[int]) -> int | None:
    """Return the bytes that these processes hold on all boards; ``None``: that cannot be told."""
    if isinstance(boards, Unseen) or any(isinstance(board.holders, Unseen) for board in boards):
        return None
    holders = [holder for board in boards if not isinstance(board.holders, Unseen) for holder in board.holders]
    theirs = [holder for holder in holders if holder.pid in pids]
    if not theirs and any(holder.known is False for holder in holders):
        return None  # in a container the driver may tell the host's numbers, and then one of those may be theirs
    if any(holder.used_bytes is None for holder in theirs):
        return None
    return sum(holder.used_bytes or 0 for holder in theirs)


def verdict_of(state: RunState | Unseen) -> str:
    """Return the verdict as it was noted."""
    if isinstance(state, Unseen):
        return ""
    return f"{state.verdict} ({state.kind})" if state.kind else state.verdict


def command_for(run: RunNow, verb: str) -> str:
    """Return what to run next for this run: with its id where that is enough, else with its path."""
    return f"hangguard {verb} {name_for(run.found.path)}"


# ----------------------------------------------------------------------------------------- cleaning


def report_as_json(report: CleanupReport) -> dict[str, Any]:
    """Return a cleaning as plain values; within one schema keys may come, and none goes."""
    return {
        "schema": SCHEMA,
        "answer": report.answer,
        "dry_run": report.dry_run,
        "left_behind": list(report.left_behind),
        "alive": list(report.alive),
        "seconds": round(report.seconds, 2),
        "items": [asdict(item) for item in report.items],
    }


def cleanup_lines(report: CleanupReport, again: str) -> list[Line]:
    """Return it as a person reads it: what is to be known first, then run by run; ``again`` is the command for it."""
    lines = [Line(_headline(report), style=_style(report))]
    for run_id in dict.fromkeys(item.run_id for item in report.items):
        items = [item for item in report.items if item.run_id == run_id]
        lines += [Line(""), Line(f"run {run_id}", style="bold")]
        lines += [line for item in _sorted(filter(_is_shown_alone, items)) for line in _lines(item)]
        lines += _at_rest([item.name for item in items if not _is_shown_alone(item)])
    advice = _advice(report, again)
    return [*lines, Line(""), *advice] if advice else lines


def _headline(report: CleanupReport) -> str:
    ours = [item for item in report.items if item.whose == "ours" and item.answer == "gone" and item.what != "run"]
    ended = sum(item.what == "process" for item in ours)
    files = [item for item in ours if item.what in {"file", "socket"} and "removed" in item.done]
    size = _size(sum(item.size_bytes for item in files))
    things = [_count(ended, "process", "processes")] if ended else []
    things += [_count(len(files), "file", "files") + (f" ({size})" if size else "")] if files else []
    folders = sum(item.done in {FOLDER_REMOVED, FOLDER_WOULD_GO} for item in report.items)
    things += [_count(folders, "folder of a run that never started", "folders of runs that never started")] * bool(
        folders
    )
    what = " and ".join(things)
    if report.left_behind:
        return f"LEFT BEHIND: {_count(len(report.left_behind), 'thing', 'things')} of ours cannot be ended"
    if report.answer == "unknown":
        return "Not all could be seen" + (f"; what could: {what}" if what else "")
    if report.alive and not what:
        return f"Nothing to clean: {_count(len(report.alive), 'run goes on', 'runs go on')}"
    if not what:
        return "Nothing is left to clean"
    return f"Would end and remove: {what}; nothing was touched" if report.dry_run else f"Ended and removed: {what}"


def _style(report: CleanupReport) -> str:
    if report.left_behind:
        return "bold red"
    return "magenta" if report.answer == "unknown" else "bold green" if not report.dry_run else "bold"


def _sorted(items: Iterable[CleanupItem]) -> list[CleanupItem]:
    """What is left of ours comes first, what is somebody else's last."""
    return sorted(items, key=lambda item: (item.answer == "gone" or item.whose != "ours", item.whose != "ours"))


def _is_shown_alone(item: CleanupItem) -> bool:
    return not item.done.startswith(IF_NOBODYS) or item.what != "file"


_COLUMN, _LONGEST_NAME = 14, 100


def _lines(item: CleanupItem) -> Iterable[Line]:
    style = STYLES[item.answer] if item.whose == "ours" else "dim" if item.whose == "somebody else's" else "yellow"
    if item.what != "run":
        whose = "" if item.whose == "ours" else f"  [{item.whose}]"
        what = "GPU memory" if item.what == "gpu-memory" else item.what
        name = "" if item.what == "gpu-memory" else item.name.removeprefix("port ")
        name = name if len(name) <= _LONGEST_NAME or item.pid is None else f"{name[: _LONGEST_NAME - 4]} ...)"
        size = f", {_size(item.size_bytes)}" if item.size_bytes >= _MIB else ""
        yield Line(f"{what:<{_COLUMN - 2}}{name}{size}{whose}".rstrip(), 2, style, _COLUMN - 2)
    took = f" after {item.seconds:.1f} s" if item.seconds >= 0.1 else ""
    word = ", because " if item.answer != "unknown" else ": "
    why = f"{word}{item.proof}" if item.proof else ""
    yield Line(f"{item.done}{took}{why}", 2 if item.what == "run" else _COLUMN, style or "dim", 2)


def _at_rest(paths: list[str]) -> Iterable[Line]:
    """Files of which nobody knows whose they are, with one command for all."""
    if paths:
        many = f"{_count(len(paths), 'name', 'names')} in /dev/shm {'is' if len(paths) == 1 else 'are'} new since then"
        yield Line(f"{many}, nobody has {'it' if len(paths) == 1 else 'them'} at this moment, and no member had:", 2)
        yield Line(f"left, for nobody knows whose; if nobody's: {_short(removal_command(paths))}", _COLUMN, "dim", 2)


def _short(command: str) -> str:
    return command if len(command) <= LONGEST else f"{command[:LONGEST].rpartition(' ')[0]} ..."


def _advice(report: CleanupReport, again: str) -> list[Line]:
    if report.left_behind:
        return [
            Line(
                "A process that SIGKILL does not end waits in the kernel, usually in the GPU driver: only a reboot ends"
            ),
            Line("that. One of another user needs that user, or root."),
        ]
    would = report.dry_run and any(
        item.whose == "ours"
        and item.answer == "gone"
        and (item.what in {"process", "file", "socket"} or item.done == FOLDER_WOULD_GO)
        for item in report.items
    )
    return [Line(f"To do it:  {again}", style="bold")] if would else []


def _size(size_bytes: int) -> str:
    if size_bytes >= _GIB:
        return f"{size_bytes / _GIB:.1f} GiB"
    return f"{size_bytes / _MIB:.0f} MiB" if size_bytes >= _MIB else ""


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
