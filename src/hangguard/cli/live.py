"""What a person sees: one live line of truth on a terminal, plain lines elsewhere, and the last line."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import anyio
from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from hangguard.errors import HangguardError
from hangguard.facts import Attempt, Sample, Tree
from hangguard.redact import clean_text
from hangguard.supervision import events as happened

if TYPE_CHECKING:
    from hangguard.cli.outlets import LogFollower
    from hangguard.supervision.attempt import RunningAttempt
    from hangguard.sync import Supervision

PER_SECOND = 4


class Terminal:
    """The one place that prints for people. On a terminal to stdout, else to stderr."""

    def __init__(self, *, quiet: bool, events_on_stdout: bool, supervision: Supervision) -> None:
        self._quiet = quiet
        self._supervision = supervision
        self.is_live = sys.stdout.isatty() and not quiet and not events_on_stdout
        self._console = Console(file=sys.stdout if self.is_live else sys.stderr, highlight=False, soft_wrap=True)
        self._started = time.monotonic()
        self.follower: LogFollower | None = None

    def tell(self, event: happened.Event) -> None:
        """Print what happened, where it is worth a line."""
        if isinstance(event, happened.Launched) and self.follower is not None:
            self.follower.follow(self._supervision.log_path(event.attempt))
        if line := _line_for(event):
            self.say(line)

    def say(self, line: str) -> None:
        """Print one line, unless quiet."""
        if not self._quiet:
            stamp = f"{time.monotonic() - self._started:7.1f} s"
            self._console.print(Text.assemble((stamp, "dim"), "  ", clean_text(line)))

    async def show(self) -> None:
        """Keep the live line current, until cancelled."""
        if not self.is_live:
            return
        spinner = Spinner("dots", text="starting")
        with Live(spinner, console=self._console, refresh_per_second=PER_SECOND, transient=True):
            while True:
                spinner.update(text=Text(self._line_of_truth(), no_wrap=True, overflow="ellipsis"))
                await anyio.sleep(1 / PER_SECOND)

    def last_line(self, failure: BaseException | None, last: Attempt | None, code: int) -> None:
        """Print how it ended, loudly where the server ran changed."""
        if isinstance(failure, HangguardError):
            text = Text(clean_text(f"hangguard: {failure}"), "bold red")
        else:
            text = Text("hangguard: ended as asked; nothing is left behind", "bold green")
        if last is not None and last.was_ready and last.changes:
            changes = ", ".join(f"{c.name} ({c.change}; alters {c.alters})" for c in last.changes)
            text.append(f"\nIT RAN CHANGED: {clean_text(changes)}", "bold yellow")
        text.append(f"  [exit code {code}]", "dim")
        self._console.print(text)

    def _line_of_truth(self) -> str:
        now = self._supervision.now
        if now is None:
            return "nothing runs"
        verdict = now.memory.verdict
        parts = [f"attempt {now.number}", verdict.phase, _what_moves(now)]
        if now.samples:
            parts.append(_sizes(now.samples[-1]))
        parts.append(f"{time.monotonic() - now.started_at:.0f} s")
        return clean_text(" · ".join(part for part in parts if part))


def _what_moves(now: RunningAttempt) -> str:
    memory = now.memory
    if memory.ready_at is not None:
        return f"ready at {now.launch.url}"
    still = memory.now - memory.progress_at
    if memory.idle_for >= 2.0:
        return f"nothing moved for {memory.idle_for:.0f} s ({memory.verdict.verdict})"
    if still >= 2.0:
        return f"busy ({memory.activity_by}), nothing produced for {still:.0f} s"
    return f"{memory.verdict.verdict}: {memory.progress_by}"


def _sizes(sample: Sample) -> str:
    if not isinstance(sample.tree, Tree):
        return "processes unseen"
    rss = sum(p.rss_bytes for p in sample.tree.members) / 1024**3
    return f"{len(sample.tree.members)} processes, {rss:.1f} GiB"


def _line_for(event: happened.Event) -> str:
    match event:
        case happened.Launched():
            return f"attempt {event.attempt}: launched, pid {event.pid}"
        case happened.PhaseChanged():
            return f"phase {event.phase}"
        case happened.VerdictChanged():
            v = event.verdict
            if v.verdict == "moving":
                return ""
            kind = f" ({v.kind})" if v.kind else ""
            unseen = f"; unseen: {'; '.join(v.unseen)}" if v.unseen else ""
            return f"{v.verdict}{kind} in {v.phase}, nothing moved for {v.still_for:.0f} s: {v.why}{unseen}"
        case happened.FallbackChosen():
            return f"trying again with {event.name}: {event.change} (alters {event.alters}; {event.cost})"
        case happened.Stopping():
            return f"stopping: {event.why}"
        case happened.Released():
            left = f"; LEFT: {'; '.join(event.release.left_behind)}" if event.release.left_behind else ""
            files = len(event.release.unattributed_files)
            more = f"; {files} new files in /dev/shm, not attributed" if files else ""
            return f"{event.release.answer} after {event.release.seconds:.1f} s{left}{more}"
        case happened.BecameReady():
            changes = ", ".join(change.change for change in event.changes)
            return f"READY at {event.url}" + (f", CHANGED: {changes}" if changes else ", as asked for")
        case happened.GivenUp():
            return f"giving up: {event.why}"
        case happened.Notice():
            return f"note: {event.text}"
        case happened.Ended():
            return ""
