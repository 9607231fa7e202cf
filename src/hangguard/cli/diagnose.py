"""``hangguard diagnose``: one look at a server that somebody else started."""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import anyio
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hangguard.cli.exits import NO_SERVER, USAGE, exit_code_of_look
from hangguard.cli.words import as_typed
from hangguard.errors import BadLaunch, NoSuchServer
from hangguard.looking import diagnose
from hangguard.redact import clean_text, redact
from hangguard.report.issue import issue_for
from hangguard.report.share import Placeholders
from hangguard.report.text import Line, as_json, duration, lines_of
from hangguard.supervision.diagnose import WITHIN
from hangguard.supervision.found import FoundServer, find_servers
from hangguard.supervision.look import Look

WIDEST = 120
WIDEST_IN_A_FILE = 4000
"""Of a line that a program reads: nothing of a table is cut for want of room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiagnoseOptions:
    """The command line of ``hangguard diagnose``, checked by click."""

    target: str | None = None
    url: str | None = None
    engine: str | None = None
    log: str | None = None
    canary: bool = False
    within: float = WITHIN
    as_json: bool = False
    issue: str | None = None
    share: bool = False


def run_diagnose(options: DiagnoseOptions) -> int:
    """Look, print what was seen, return the exit code."""
    try:
        with _waiting(options):
            look = diagnose(
                options.target,
                url=options.url,
                engine=options.engine,
                log=options.log,
                canary=options.canary,
                within=options.within,
            )
    except NoSuchServer as none:
        return _choose(none, options)
    except BadLaunch as wrong:
        print(f"hangguard: {clean_text(redact(as_typed(str(wrong))))}", file=sys.stderr)
        print("Try 'hangguard diagnose --help'.", file=sys.stderr)
        return USAGE
    code = exit_code_of_look(look.verdict)
    _print(look, options, code)
    return code


def _waiting(options: DiagnoseOptions) -> Any:
    """Say on a terminal that it takes a moment; the report itself may go into a file meanwhile."""
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()
    console = Console(stderr=True, highlight=False)
    return console.status(f"looking, for {options.within:.0f} s at most; nothing of the server is touched")


def _print(look: Look, options: DiagnoseOptions, code: int) -> None:
    places = Placeholders(look.server) if options.share else None
    if options.issue is not None:
        text = issue_for(look, options.issue)
        sys.stdout.write(places.text(text) if places else text)
    elif options.as_json:
        document = redact({**as_json(look), "exit_code": code})
        _print_json(places.value(document) if places else document)
    else:
        lines = lines_of(look)
        print_lines([Line(places.text(line.text), line.indent, line.style) for line in lines] if places else lines)
    if options.share and not options.as_json and options.issue is None:
        print_lines(
            [Line(""), Line("Names, paths, addresses and prompts were taken out; read it before you share it.")]
        )


def print_lines(lines: Iterable[Line]) -> None:
    """Print a report: wrapped and coloured on a terminal, one fact a line elsewhere, for grep."""
    console = Console(highlight=False, soft_wrap=True)
    width = min(WIDEST, shutil.get_terminal_size().columns) if console.is_terminal else None
    for line in lines:
        for piece in _wrapped(replace(line, text=as_typed(line.text)), width):
            console.print(Text(" " * line.indent + piece, line.style))


def _wrapped(line: Line, width: int | None) -> list[str]:
    room = None if width is None else max(30 + line.hang, width - line.indent)
    if room is None or len(line.text) <= room:
        return [line.text]
    deeper = " " * line.hang
    return textwrap.wrap(line.text, room, subsequent_indent=deeper, break_on_hyphens=False, break_long_words=False)


# ------------------------------------------------------------------------------------------ which one


def _choose(none: NoSuchServer, options: DiagnoseOptions) -> int:
    """Say which servers there are, and what to say to choose one."""
    servers = anyio.run(find_servers) if none.candidates else ()
    places = Placeholders() if options.share else None
    problem = clean_text(redact(as_typed(none.problem)))
    if options.as_json:
        document = {
            "schema": 1,
            "problem": problem,
            "candidates": [_candidate(server) for server in servers],
            "exit_code": NO_SERVER,
        }
        _print_json(places.value(document) if places else document)
        return NO_SERVER
    advice = f" {as_typed(none.advice).rstrip('. ')}." if none.advice and not servers else ""
    print(f"hangguard: {problem}.{advice}", file=sys.stderr)
    if servers:
        _print_table(servers, places)
        print(f"Which one?  hangguard diagnose {servers[0].pid}", file=sys.stderr)
    return NO_SERVER


def _candidate(server: FoundServer) -> dict[str, Any]:
    launch = server.launch
    return {
        "pid": server.pid,
        "started": server.started,
        "user": server.user,
        "engine": launch.engine,
        "version": launch.version,
        "model": launch.model,
        "url": launch.url,
        "processes": server.processes,
        "age_seconds": round(server.age_seconds, 1),
        "title": server.title,
    }


def _print_table(servers: tuple[FoundServer, ...], places: Placeholders | None) -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="dim")
    for heading in ("pid", "user", "engine", "model", "answers at", "up for", "processes"):
        # A pid that is cut short is another process's: only what stands beside it is broken over lines.
        is_number = heading in {"pid", "processes"}
        table.add_column(heading, no_wrap=is_number, overflow="fold", justify="right" if is_number else "left")
    for server in servers:
        launch = server.launch
        engine = f"{launch.engine} {launch.version or ''}".strip()
        words = [server.user, engine, launch.model or "-", launch.url or "not known", duration(server.age_seconds)]
        shown = [places.text(word) if places else clean_text(redact(word)) for word in words]
        table.add_row(str(server.pid), *shown, str(server.processes))
    Console(highlight=False, width=None if sys.stdout.isatty() else WIDEST_IN_A_FILE).print(table)


def _print_json(document: Any) -> None:
    print(json.dumps(document, indent=1, ensure_ascii=True, default=str))
