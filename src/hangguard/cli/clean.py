"""``hangguard clean``: end and remove what dead runs have left, after it was shown."""

from __future__ import annotations

import json
import shlex
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hangguard.cli.diagnose import print_lines
from hangguard.cli.exits import ASKED, LEFT, NO_SERVER, REFUSED, UNPROVED
from hangguard.errors import NoSuchRun
from hangguard.facts import CleanupReport
from hangguard.looking import clean_up
from hangguard.redact import clean_text, redact
from hangguard.report.runs import cleanup_lines, report_as_json
from hangguard.report.text import Line


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanOptions:
    """The command line of ``hangguard clean``, checked by click."""

    run: str | None = None
    yes: bool = False
    as_json: bool = False
    run_dir: str | None = None


def run_clean(options: CleanOptions) -> int:
    """Clean, or say what would be; return the exit code."""
    try:
        with _waiting(options):
            report = clean_up(options.run, really=options.yes, run_dir=options.run_dir)
    except NoSuchRun as none:
        problem = clean_text(redact(none.problem))
        if options.as_json:
            document = {"schema": 1, "problem": problem, "candidates": list(none.candidates), "exit_code": NO_SERVER}
            print(json.dumps(document, indent=1))
        else:
            found = "".join(f"\n  {clean_text(redact(line))}" for line in none.described[:20])
            print(f"hangguard: {problem}.{found or ' To see the runs: hangguard ps --all'}", file=sys.stderr)
        return NO_SERVER
    code = exit_code_of(report, chosen=options.run is not None)
    if options.as_json:
        print(json.dumps({**report_as_json(report), "exit_code": code}, indent=1, ensure_ascii=True))
    else:
        lines = cleanup_lines(report, _again(options))
        print_lines(Line(clean_text(line.text), line.indent, line.style, line.hang) for line in lines)
    return code


def exit_code_of(report: CleanupReport, *, chosen: bool) -> int:
    """Return the exit code; ``chosen``: one run was named, and if it goes on that is a refusal."""
    if report.left_behind:
        return LEFT
    if report.answer == "unknown":
        return UNPROVED
    return REFUSED if report.alive and chosen else ASKED


def _again(options: CleanOptions) -> str:
    words = ["hangguard", "clean", *(["--run-dir", options.run_dir] if options.run_dir else [])]
    return shlex.join([*words, *([options.run] if options.run else []), "--yes"])


def _waiting(options: CleanOptions) -> Any:
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()
    what = "ending and removing what is left" if options.yes else "looking; nothing is touched"
    return Console(stderr=True, highlight=False).status(what)
