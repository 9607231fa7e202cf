"""``hangguard preflight``: what would stand in the way of a launch, and what would not be seen of it."""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from hangguard.cli.diagnose import print_lines
from hangguard.cli.exits import USAGE, exit_code_before_launch
from hangguard.cli.words import as_typed
from hangguard.errors import BadLaunch
from hangguard.facts import Preflight
from hangguard.looking import preflight
from hangguard.redact import clean_text, redact
from hangguard.report.preflight import as_json, lines_of


@dataclass(frozen=True, slots=True, kw_only=True)
class PreflightOptions:
    """The command line of ``hangguard preflight``, checked by click."""

    command: tuple[str, ...]
    engine: str | None = None
    url: str | None = None
    run_dir: str | None = None
    as_json: bool = False


def run_preflight(options: PreflightOptions) -> int:
    """Look, print the table, return the exit code."""
    try:
        found = _look(options)
    except BadLaunch as wrong:
        print(f"hangguard: {clean_text(redact(as_typed(str(wrong))))}", file=sys.stderr)
        print("Try 'hangguard preflight --help'.", file=sys.stderr)
        return USAGE
    code = exit_code_before_launch(found.refusals)
    if options.as_json:
        print(json.dumps(redact({**as_json(found), "exit_code": code}), indent=1, ensure_ascii=True, default=str))
    else:
        print_lines(lines_of(found))
    return code


def _look(options: PreflightOptions) -> Preflight:
    if not options.command:
        advice = "Write it after --, for example: hangguard preflight -- vllm serve M"
        raise BadLaunch("there is no command", advice=advice)
    with _waiting():
        return preflight(options.command, engine=options.engine, url=options.url, run_dir=options.run_dir)


def _waiting() -> Any:
    if sys.stderr is None or not sys.stderr.isatty():
        return nullcontext()
    return Console(stderr=True, highlight=False).status("looking around; nothing is started, nothing is changed")
