"""``hangguard attach``: watch a server that somebody else started, and leave it alone."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import anyio
from rich.console import Console
from rich.text import Text

from hangguard.cli.exits import ASKED, HANGS, INTERNAL, LEFT, LOST, NO_SERVER, USAGE
from hangguard.cli.live import _line_for as line_for
from hangguard.cli.outlets import EventWriter, is_stdout
from hangguard.cli.words import as_typed
from hangguard.errors import BadLaunch, HangguardError, LeftBehind, NoSuchServer
from hangguard.facts import Exited, Verdict
from hangguard.looking import Attachment, attach
from hangguard.redact import clean_text, redact
from hangguard.supervision.attach import AsyncWatch
from hangguard.supervision.events import Event
from hangguard.supervision.run import OnHang


@dataclass(frozen=True, slots=True, kw_only=True)
class AttachOptions:
    """The command line of ``hangguard attach``, checked by click."""

    target: str | None = None
    match: str | None = None
    started: int | None = None
    url: str | None = None
    engine: str | None = None
    log: str | None = None
    on_hang: OnHang = "report"
    run_dir: str | None = None
    events: str | None = None
    quiet: bool = False


def run_attach(options: AttachOptions) -> int:
    """Watch until the server ends, is stopped, or a signal asks us to go; return the exit code."""
    hooks: list[Callable[[Event], object]] = []
    with ExitStack() as outlets:
        try:
            attachment = _attachment(options, hooks)
            writer = EventWriter(options.events) if options.events is not None else None
        except BadLaunch as wrong:
            print(f"hangguard: {clean_text(redact(as_typed(str(wrong))))}", file=sys.stderr)
            print("Try 'hangguard attach --help'.", file=sys.stderr)
            return USAGE
        printer = _Printer(quiet=options.quiet, events_on_stdout=is_stdout(options.events))
        hooks.append(printer)
        if writer is not None:
            hooks.append(writer)
            outlets.callback(lambda: print(lost, file=sys.stderr) if (lost := writer.close()) else None)
        ended = anyio.run(_until_over, attachment)
    code = ended.code
    printer.last(ended.text, code)
    return code


def _attachment(options: AttachOptions, hooks: list[Callable[[Event], object]]) -> Attachment:
    target = options.target
    pid = int(target) if target is not None and target.isdecimal() else None
    url = options.url if pid is not None or target is None else target
    if pid is None and target is not None and options.url is not None:
        raise BadLaunch("The server is named twice", advice="Give a pid or a URL once")
    return attach(
        pid,
        url=url,
        match=options.match,
        started=options.started,
        engine=options.engine,
        log=options.log,
        on_hang=options.on_hang,
        run_dir=options.run_dir,
        hooks=[lambda event: [hook(event) for hook in hooks]],
    )


@dataclass(frozen=True, slots=True)
class _End:
    text: str
    code: int


async def _until_over(attachment: Attachment) -> _End:
    """Wait for the server's end or for a signal, whichever comes first."""
    ends: list[_End] = []
    async with anyio.create_task_group() as group:
        group.start_soon(_listen_to_signals, group.cancel_scope, ends)
        try:
            async with attachment as watch:
                ends.append(_end_of(await watch.wait(), watch))
        except NoSuchServer as none:
            ends.append(_End(str(none), NO_SERVER))
        except LeftBehind as left:
            ends.insert(0, _End(str(left), LEFT))
        except BadLaunch as wrong:
            ends.append(_End(str(wrong), USAGE))
        except HangguardError as failure:
            ends.append(_End(str(failure), INTERNAL))
        group.cancel_scope.cancel()
    return ends[0]


async def _listen_to_signals(scope: anyio.CancelScope, ends: list[_End]) -> None:
    hears = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored, and means it
        hears.append(signal.SIGHUP)
    with anyio.open_signal_receiver(*hears) as signals:
        async for number in signals:
            ends.append(_End(f"{number.name}: stopped watching; the server was left alone", ASKED))
            scope.cancel()


def _end_of(verdict: Verdict, watch: AsyncWatch) -> _End:
    if watch.release is not None:
        return _End(f"the server was stopped ({verdict.verdict}: {verdict.why}); it is not started again", HANGS)
    if isinstance(verdict, Exited):
        return _End(f"the server has ended by itself ({verdict.kind}): {verdict.why}", LOST)
    return _End(f"nothing is watched any more: {verdict.why}", LOST)


class _Printer:
    """Prints events as lines; to standard error where the events themselves go to standard output."""

    def __init__(self, *, quiet: bool, events_on_stdout: bool) -> None:
        self._quiet = quiet
        self._console = Console(stderr=events_on_stdout, highlight=False, soft_wrap=True)
        self._began = time.monotonic()

    def __call__(self, event: Event) -> None:
        line, style = line_for(event)
        if line and not self._quiet:
            stamp = f"{time.monotonic() - self._began:7.1f} s  "
            self._console.print(Text.assemble((stamp, "dim"), (clean_text(redact(as_typed(line))), style)))

    def last(self, text: str, code: int) -> None:
        """Print how it ended; to standard error where nothing was watched, with what could be meant one a line."""
        style = "bold" if code == ASKED else "bold red"
        if code in {NO_SERVER, USAGE, INTERNAL}:
            first, *others = redact(as_typed(text)).splitlines()
            lines = [f"hangguard: {clean_text(first)} [exit code {code}]", *map(clean_text, others)]
            Console(stderr=True, highlight=False, soft_wrap=True).print(Text("\n".join(lines), style))
            return
        line = clean_text(redact(as_typed(text)).replace("\n", " | "))
        self._console.print(Text(f"hangguard: {line} [exit code {code}]", style))
