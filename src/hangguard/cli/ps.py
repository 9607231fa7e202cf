"""``hangguard ps``: the runs that go on, or have left something."""

from __future__ import annotations

import json
import shutil
import sys
import time
from dataclasses import dataclass

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hangguard.act.cleanup import look_at
from hangguard.cli.diagnose import WIDEST, WIDEST_IN_A_FILE
from hangguard.cli.exits import ASKED, NO_SERVER
from hangguard.errors import NoSuchRun
from hangguard.facts import Ask, Launch, RunNow, RunState, Unseen
from hangguard.observe.gpus import GpuProbe
from hangguard.redact import clean_text, redact
from hangguard.report.runs import SCHEMA, command_for, memory_held, row_of, verdict_of, what_runs
from hangguard.report.text import duration
from hangguard.run_state import list_runs

GPUS_WITHIN = 3.0
LEAST_OF_WHAT = 12
"""Characters of the command that are shown whatever else the terminal has room for."""
STYLES = {"left behind": "bold red", "unreadable": "magenta", "ending": "yellow", "over": "dim", "elsewhere": "dim"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PsOptions:
    """The command line of ``hangguard ps``, checked by click."""

    run_dir: str | None = None
    as_json: bool = False
    all_runs: bool = False


def run_ps(options: PsOptions) -> int:
    """List them, return the exit code."""
    try:
        runs, memory = anyio.run(_look, options)
    except NoSuchRun as problem:
        print(f"hangguard: {clean_text(redact(str(problem)))}", file=sys.stderr)
        return NO_SERVER
    if options.as_json:
        rows = [row_of(now, memory.get(now.found.path)) for now in runs]
        print(json.dumps(redact({"schema": SCHEMA, "runs": rows}), indent=1, ensure_ascii=True))
        return ASKED
    if not runs:
        print("no run of hangguard goes on, and none has left anything", file=sys.stderr)
        return ASKED
    _print_table(runs, memory)
    _print_advice(runs)
    return ASKED


async def _look(options: PsOptions) -> tuple[tuple[RunNow, ...], dict[str, int | None]]:
    runs = sorted(await look_at(lambda: list_runs(options.run_dir)), key=_began, reverse=True)
    shown = tuple(now for now in runs if options.all_runs or _is_of_interest(now))
    return shown, await _gpu_memory(shown)


def _began(now: RunNow) -> float:
    """Return when it began, by the clock on the wall; of one that cannot be read its id says so, or nothing does."""
    if not isinstance(now.found.state, Unseen):
        return now.found.state.began
    try:
        return time.mktime(time.strptime(now.found.run_id[:15], "%Y%m%d-%H%M%S"))
    except (ValueError, OverflowError):
        return 0.0


def _is_of_interest(now: RunNow) -> bool:
    return now.is_alive or now.standing == "left behind" or bool(now.guardian or now.members)


async def _gpu_memory(runs: tuple[RunNow, ...]) -> dict[str, int | None]:
    """Return how many bytes of GPU memory the members of each run hold; ``None``: the driver does not tell."""
    if not any(now.members for now in runs):
        return {}
    probe = GpuProbe(Launch(argv=(), env=(), cwd="/", url="", host="", port=0), within=GPUS_WITHIN)
    try:
        boards = await probe.look(Ask())
    finally:
        await probe.aclose()
    return {now.found.path: memory_held(boards, {pid for pid, _ in now.members}) for now in runs if now.members}


# ------------------------------------------------------------------------------------------- showing


def _print_table(runs: tuple[RunNow, ...], memory: dict[str, int | None]) -> None:
    rows = [_row(now, memory) for now in runs]
    headings = [heading for heading in rows[0] if any(row[heading] for row in rows) or heading in {"run", "what"}]
    width = min(WIDEST, shutil.get_terminal_size().columns) if sys.stdout.isatty() else WIDEST_IN_A_FILE
    others = sum(2 + max(len(heading), *(len(row[heading]) for row in rows)) for heading in headings[:-1])
    room = max(LEAST_OF_WHAT, width - others)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for heading in headings:
        # An id or a pid that is cut short is another one's; of the command the beginning is enough.
        table.add_column(heading, no_wrap=heading in {"run", "stage", "pid", "what"}, overflow="fold")
    for now, row in zip(runs, rows, strict=True):
        words = [*(row[heading] for heading in headings[:-1]), _shortened(row["what"], room)]
        table.add_row(*(Text(word, style=STYLES.get(now.standing, "")) for word in words))
    Console(highlight=False, width=width).print(table)


def _shortened(text: str, room: int) -> str:
    return text if len(text) <= room else f"{text[: room - 4]} ..."


def _row(now: RunNow, memory: dict[str, int | None]) -> dict[str, str]:
    state = now.found.state
    row = {"run": now.found.run_id, "stage": now.standing, "up for": "", "pid": "", "at": "", "verdict": "", "GPUs": ""}
    if not isinstance(state, Unseen):
        living = {pid for pid, _ in now.members}
        root = state.root[0] if state.root is not None and state.root[0] in living else min(living, default=0)
        row |= {
            "up for": duration(max(0.0, time.time() - state.began)) if _is_up(now, state) else "",
            "pid": f"{root}" + (f" +{len(living) - 1}" if len(living) > 1 else "") if root else "",
            "at": _place(state),
            "verdict": "" if state.verdict in {"ready", "moving"} else verdict_of(state),
            "GPUs": _gib(memory.get(now.found.path, 0)),
        }
    row["what"] = what_runs(state)
    return {heading: clean_text(redact(word)) for heading, word in row.items()}


def _is_up(now: RunNow, state: RunState) -> bool:
    """Whether something of it runs, or may: of what is elsewhere its own last word is all there is."""
    return now.is_alive or bool(now.members) or (now.standing == "elsewhere" and not state.outcome)


def _place(state: RunState) -> str:
    """Return where it answers: of this machine only the port."""
    if state.socket_path or state.host not in {"127.0.0.1", "0.0.0.0", "localhost", "::", ""}:  # noqa: S104
        return state.socket_path or state.url
    return f":{state.port}" if state.port else state.url


def _gib(used: int | None) -> str:
    if used is None:
        return "?"
    return f"{used / (1 << 30):.1f} GiB" if used else ""


def _print_advice(runs: tuple[RunNow, ...]) -> None:
    """Say what to run next, of what is not as it should be."""
    left = [now for now in runs if now.standing == "left behind"]
    lines = [f"{_left(now)}; to see what: {command_for(now, 'clean')}" for now in left[:3]]
    lines += [
        f"run {now.found.run_id} cannot be read: {now.why}"
        + (f"; pid {_pids(now)} writes to its log" * bool(now.members))
        + (f"; its guardian, pid {now.guardian}, lives; to end it: {command_for(now, 'stop')}" * bool(now.guardian))
        for now in runs
        if now.standing == "unreadable"
    ][:3]
    for line in lines:
        print(clean_text(line), file=sys.stderr)


def _left(now: RunNow) -> str:
    things = [f"{len(now.members)} processes" if len(now.members) > 1 else f"pid {_pids(now)}"] if now.members else []
    things += [f"{len(now.files)} files" if len(now.files) > 1 else now.files[0].path] if now.files else []
    return f"run {now.found.run_id} has left {' and '.join(things)}"


def _pids(now: RunNow) -> str:
    return " ".join(str(pid) for pid, _ in now.members[:8])
