"""What a person sees: one live line of truth on a terminal, plain lines elsewhere, and the last line."""

from __future__ import annotations

import logging
import os
import sys
import textwrap
import time
from typing import IO, TYPE_CHECKING, cast

import anyio
from rich.console import Console, RenderableType
from rich.live import Live
from rich.text import Text

from hangguard.act._membership import is_alive
from hangguard.cli.exits import LEFT
from hangguard.cli.outlets import Outlet
from hangguard.cli.words import as_typed
from hangguard.errors import GaveUp, HangguardError
from hangguard.facts import AppliedChange, Attempt, Drained, Release, ToldBy, Tree, Unseen
from hangguard.redact import clean_text, redact
from hangguard.report.releases import file_notes
from hangguard.supervision import events as happened

if TYPE_CHECKING:
    from hangguard.cli.outlets import LogFollower
    from hangguard.supervision.running import RunningAttempt
    from hangguard.sync import Supervision

PER_SECOND = 4
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
PLAIN_FRAMES = "|/-\\"
INDENT = " " * 11
"""As wide as a time stamp."""


class Terminal:
    """The one place that prints for people. On a terminal to stdout, else to stderr."""

    def __init__(self, *, quiet: bool, events_on_stdout: bool, supervision: Supervision) -> None:
        self._quiet = quiet
        self.supervision = supervision
        self.is_live = not quiet and not events_on_stdout and sys.stdout is not None and sys.stdout.isatty()
        self._out = Outlet(sys.stdout if self.is_live else sys.stderr)
        self._console = Console(file=cast("IO[str]", self._out), highlight=False, soft_wrap=True)
        self._frames = FRAMES if "utf" in self._out.encoding.lower() else PLAIN_FRAMES
        self._started = time.monotonic()
        self._stopping: tuple[float, str] | None = None
        self._draining: tuple[float, happened.Draining] | None = None
        self.follower: LogFollower | None = None
        logging.getLogger("hangguard").addHandler(_Notes(self))

    def tell(self, event: happened.Event) -> None:
        """Print what happened, where it is worth a line."""
        if isinstance(event, happened.Launched):
            self._begin(event.attempt)
        if isinstance(event, happened.Draining):
            self._draining = (time.monotonic() + event.at_most, event)
        if isinstance(event, happened.Stopping):
            self._stopping = (time.monotonic(), _short_why(event))
        if self.is_live and (
            isinstance(event, happened.Draining) or (isinstance(event, happened.Stopping) and event.drained is None)
        ):
            return  # the live line says so
        line, style = _line_for(event)
        if line:
            self.say(line, style)

    def say(self, line: str, style: str = "") -> None:
        """Print one line with its time, unless quiet."""
        if not self._quiet:
            stamp = f"{time.monotonic() - self._started:7.1f} s  "
            self._console.print(Text.assemble((stamp, "dim"), (self._wrapped(clean_text(as_typed(line))), style)))

    def print(self, text: RenderableType = "") -> None:
        """Print as it is, unless quiet."""
        if not self._quiet:
            self._console.print(text)

    async def show(self) -> None:
        """Keep the live line current, until cancelled."""
        if not self.is_live:
            return
        with Live(console=self._console, auto_refresh=False, transient=True) as live:
            while True:
                live.update(self._live_line(), refresh=True)
                await anyio.sleep(1 / PER_SECOND)

    def last_line(self, failure: BaseException | None, last: Attempt | None, code: int) -> None:
        """Print how it ended, in one line that is loud where the server ran changed; the story goes before it."""
        headline, *story = map(
            as_typed, map(redact, ending(failure, last, code))
        )  # a stranger's title may hold his secrets
        for line in story:
            self.print(Text(f"  {clean_text(line)}", "red"))
        text = Text(f"hangguard: {clean_text(headline)}", "bold green" if code == 0 else "bold red")
        if last is not None and last.drained is not None and last.drained.left != 0:
            text.append(f" Not drained: {clean_text(_drained(last.drained))}.", "bold yellow")
        if last is not None and last.was_ready and last.changes:
            text.append(f" IT RAN CHANGED: {clean_text(_changes(last.changes))}.", "bold yellow")
        text.append(f" [exit code {code}]", "dim")
        self._console.print(text)

    def finish(self) -> None:
        """Wait a moment for whoever reads."""
        self._out.finish()

    # ------------------------------------------------------------------------------------ below

    def _begin(self, attempt: int) -> None:
        self._stopping = self._draining = None
        path = self.supervision.log_path(attempt)
        if self.follower is not None:
            self.follower.follow(path)
        if attempt == 1 and path is not None:
            self.say(f"log and evidence: {from_home(os.path.dirname(path))}", "dim")  # noqa: PTH120 - a string

    def _wrapped(self, line: str) -> str:
        """Break at words on a terminal; elsewhere one event is one line, for grep."""
        if not self.is_live:
            return line
        width = max(20, self._console.width - len(INDENT))
        return f"\n{INDENT}".join(textwrap.wrap(line, width, break_on_hyphens=False)) or line

    def _live_line(self) -> Text:
        frame = self._frames[int(time.monotonic() * PER_SECOND) % len(self._frames)]
        parts = self._parts_of_truth()
        while len(parts) > 2 and len(" · ".join(parts)) > self._console.width - 4:
            parts.pop()  # the last is the least
        line = Text(f"{frame} {clean_text(' · '.join(parts))}", "cyan", no_wrap=True, overflow="ellipsis")
        line.truncate(self._console.width - 1, overflow="ellipsis")  # a full line would wrap on some terminals
        return line

    def _parts_of_truth(self) -> list[str]:
        """What is true now, the most important first."""
        now = self.supervision.now
        if now is None:
            tried = len(self.supervision.history)
            return [f"attempt {tried + 1} follows in a moment" if tried else "starting"]
        if self._stopping is not None:
            began, why = self._stopping
            left = sum(is_alive(member) for member in now.guarded.members)
            left_now = _count(left, "process", "processes")
            what = f"stopping ({why}): {left_now} left after {_duration(time.monotonic() - began)}"
            return [what, "Ctrl-C ends the grace"]
        if self._draining is not None:
            ends, event = self._draining
            still = _duration(max(0.0, ends - time.monotonic()))
            return [f"letting requests finish: {_in_flight(event.left, event.by)}, {still} left", "Ctrl-C ends that"]
        head = f"attempt {now.number}, {_duration(time.monotonic() - now.started_at)}"
        if now.memory.ready_at is not None:
            return [f"READY at {now.launch.url}", *_sizes_of(now), head]
        return [head, now.memory.verdict.phase, _what_moves(now), *_sizes_of(now)]


class _Notes(logging.Handler):
    """Warnings of the library's own, without a detour that could block."""

    def __init__(self, terminal: Terminal) -> None:
        super().__init__(logging.WARNING)
        self._terminal = terminal

    def emit(self, record: logging.LogRecord) -> None:
        self._terminal.say(f"note: {record.getMessage()}", "yellow")


def ending(failure: BaseException | None, last: Attempt | None, code: int) -> list[str]:
    """Return how it ended: the headline, and the lines of the story that goes before it."""
    left = last.release if last is not None else None
    if isinstance(failure, GaveUp):
        attempts = _count(len(failure.history), "attempt", "attempts")
        evidence = f" Evidence: {failure.report_path}" if failure.report_path else ""
        return [f"gave up after {attempts}: {failure.why}.{evidence}", *map(str.strip, str(failure).splitlines()[1:])]
    if isinstance(failure, HangguardError):
        return [" ".join(str(failure).split())]
    if failure is not None:
        return [f"this is a fault of hangguard's own ({type(failure).__name__}: {failure})."]
    if code == LEFT and left is not None:
        return [f"ended as asked, but LEFT BEHIND: {'; '.join(left.left_behind)}."]
    return [f"ended as asked; {_what_is_left(left)}."]


def _what_is_left(release: Release | None) -> str:
    unknown = [] if release is None else [f"{i.resource} ({i.detail})" for i in release.items if i.answer == "unknown"]
    return f"could not be seen whether it was released: {', '.join(unknown)}" if unknown else "nothing is left behind"


def _what_moves(now: RunningAttempt) -> str:
    memory = now.memory
    if memory.idle_for >= 2.0:
        return f"nothing moved for {_duration(memory.idle_for)}"
    if memory.unproductive_for >= 2.0:
        return f"busy ({memory.activity_by}), nothing produced for {_duration(memory.unproductive_for)}"
    return f"moving ({memory.progress_by})"


def _sizes_of(now: RunningAttempt) -> list[str]:
    tree = now.samples[-1].tree if now.samples else None
    if not isinstance(tree, Tree):
        return ["processes unseen"] if now.samples else []
    mib = sum(process.rss_bytes for process in tree.members) / 1024**2
    size = f"{mib / 1024:.1f} GiB" if mib >= 1024 else f"{mib:.0f} MiB"
    return [f"{_count(len(tree.members), 'process', 'processes')}, {size}"]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s" if minutes else f"{rest} s"


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"


def _changes(changes: tuple[AppliedChange, ...]) -> str:
    return ", ".join(f"{change.name} ({change.change}; alters {change.alters})" for change in changes)


def _short_why(event: happened.Stopping) -> str:
    """The verdict itself was told a moment ago."""
    return event.why.partition(":")[0]


_WHY_DRAIN_ENDED = {
    "time": "all its time",
    "cut": "cut short",
    "hung": "the server hangs",
    "exited": "the server ended",
}


def _drained(drained: Drained) -> str:
    what, after = _in_flight(drained.left, drained.by), _duration(drained.seconds)
    if drained.ending == "done":
        return f"nobody is in flight after {after}"
    return f"{what} after {after} ({_WHY_DRAIN_ENDED[drained.ending]})"


def _in_flight(left: int | Unseen, by: ToldBy) -> str:
    if isinstance(left, Unseen):
        return f"whoever is in flight is unseen ({left.reason})"
    if by == "clients":
        return f"{_count(left, 'client', 'clients')} connected (requests are not counted)"
    return f"{_count(left, 'request', 'requests')} in flight"


def from_home(path: str) -> str:
    """Return a path as people write it."""
    home = os.path.expanduser("~")  # noqa: PTH111 - Path.home() raises where there is none
    return f"~{path[len(home) :]}" if path.startswith(f"{home}/") and home != "/" else path


def _line_for(event: happened.Event) -> tuple[str, str]:
    """Return the line of an event, and its style; an empty line is not worth printing."""
    match event:
        case happened.Launched():
            return f"attempt {event.attempt}: launched, pid {event.pid}", "bold"
        case happened.Attached():
            return f"watching {f'pid {event.pid}' if event.pid else 'its answers'} {event.title[:120]}".rstrip(), "bold"
        case happened.PhaseChanged(phase="serving"):
            return "", ""  # it says READY in a moment
        case happened.PhaseChanged():
            return f"phase {event.phase}", ""
        case happened.VerdictChanged():
            return _line_for_verdict(event)
        case happened.FallbackChosen():
            why = f": {event.cost}" if event.cost else ""
            return f"trying again with {event.name} ({event.change}), which alters {event.alters}{why}", "bold yellow"
        case happened.Draining():
            what = _in_flight(event.left, event.by)
            return f"letting requests finish: {what}, {event.at_most:.0f} s more at most", ""
        case happened.Stopping(drained=Drained() as drained):
            return f"stopping it ({_short_why(event)}); {_drained(drained)}", "" if drained.left == 0 else "yellow"
        case happened.Stopping():
            return f"stopping it ({_short_why(event)})", ""
        case happened.Released():
            return _line_for_release(event.release)
        case happened.BecameReady() if event.changes:
            changes = ", ".join(f"{change.change} (alters {change.alters})" for change in event.changes)
            return f"READY at {event.url}, CHANGED: {changes}", "bold green"
        case happened.BecameReady():
            return f"READY at {event.url}, as asked for", "bold green"
        case happened.GivenUp():
            return f"giving up: {event.why}", "red"
        case happened.Notice():
            return f"note: {event.text}", "yellow"
        case happened.Ended():
            return "", ""


def _line_for_verdict(event: happened.VerdictChanged) -> tuple[str, str]:
    verdict = event.verdict
    if verdict.verdict in {"moving", "ready"}:  # the phases and the event of its own tell that
        return "", ""
    kind = f" ({verdict.kind})" if verdict.kind else ""
    still = f"nothing moved for {_duration(verdict.still_for)}; " if verdict.still_for >= 1.0 else ""
    unseen = f"; unseen: {'; '.join(verdict.unseen)}" if verdict.unseen else ""
    line = f"{verdict.verdict.upper()}{kind} in {verdict.phase}: {still}{verdict.why}{unseen}"
    return line, "yellow" if verdict.verdict in {"waiting", "unclear"} else "bold red"


def _line_for_release(release: Release) -> tuple[str, str]:
    more = "".join(f"; {note}" for note in file_notes(release))
    if not isinstance(release.segments, Unseen) and release.segments:
        more += f"; shared memory that nobody has attached: {'; '.join(one.command for one in release.segments)}"
    if release.daemons:
        left = ", ".join(f"pid {daemon.pid} ({daemon.title[:60]})" for daemon in release.daemons)
        more += f"; left running, for it is no part of the server: {left}"
    if release.answer == "released":
        return f"released: nothing of it is left{more}", ""
    if release.answer == "unknown":
        unknown = [f"{item.resource}: {item.detail}" for item in release.items if item.answer == "unknown"]
        return f"RELEASE NOT PROVED: {'; '.join(unknown)}{more}", "yellow"
    open_ = [f"{item.resource} {item.answer}: {item.detail}" for item in release.items if item.answer != "released"]
    return f"NOT RELEASED: {'; '.join(open_)}{more}", "bold red" if release.left_behind else "yellow"
