"""``hangguard run``: the public face on a terminal, in a pipe, or as JSON events."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

import anyio
import tenacity

from hangguard.cli.background import Background
from hangguard.cli.deadline import Deadline
from hangguard.cli.exits import REFUSED, exit_code_of
from hangguard.cli.live import Terminal
from hangguard.cli.outlets import EventWriter, LogFollower, is_stdout
from hangguard.cli.words import as_typed
from hangguard.errors import BadLaunch, HangguardError, StoppedEarly
from hangguard.facts import Attempt, Limits, Permission
from hangguard.redact import clean_text, redact, secrets_of
from hangguard.supervision.events import Event
from hangguard.supervision.handle import AsyncServer
from hangguard.supervision.log_cap import DEFAULT as LOG_BYTES
from hangguard.supervision.retry import Retry
from hangguard.supervision.run import OnDeath, OnHang
from hangguard.supervision.stop_within import kept_of
from hangguard.sync import Supervision, supervise

ONE_REQUEST = 0.1
"""Seconds in which a second signal is the first one: timeout(1) signals its child and then the whole group."""

LEAST_WITHIN = 1.0
"""Seconds below which ``--stop-within`` leaves no time for a kill and its proof."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The command line of ``hangguard run``, checked by click."""

    command: tuple[str, ...]
    engine: str | None = None
    url: str | None = None
    ready_path: str | None = None
    on_hang: OnHang = "act"
    fallbacks: str = "auto"
    attempts: int = 4
    ready_within: float = 3600.0
    patience: float | None = None
    drain: float | None = None
    stop_within: float | None = None
    run_dir: str | None = None
    log_mib: int = LOG_BYTES >> 20
    events: str | None = None
    quiet: bool = False
    on_death: OnDeath = "stop"
    detach: bool = False
    as_json: bool = False
    told_at: int | None = None
    """The descriptor at which whoever has started this in the background hears of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """What a signal asks for: how long requests may finish, and within how many seconds all has to be over."""

    drain: float = 0.0
    within: float | None = None
    deadline: Deadline = field(default_factory=lambda: Deadline(None))


def run_command(options: Options) -> int:
    """Run the server until it ends or is asked to; return the exit code."""
    hooks: list[Callable[[Event], object]] = []
    background = None if options.told_at is None else Background(options.told_at)
    try:
        leaving = Leaving(drain=_drain(options), deadline=Deadline(_stop_within(options)), within=options.stop_within)
        supervision = _supervision(options, hooks)
        writer = EventWriter(options.events) if options.events is not None else None
    except HangguardError as refused:
        print(f"hangguard: {clean_text(redact(as_typed(str(refused))))}", file=sys.stderr)
        if isinstance(refused, BadLaunch):
            print("Try 'hangguard run --help'.", file=sys.stderr)
        return exit_code_of(refused, None, pass_through=False)
    if background is not None and (problem := background.begin(supervision)):
        print(f"hangguard: {problem}", file=sys.stderr)
        return REFUSED
    with ExitStack() as last_words:
        last_words.callback(leaving.deadline.cancel)
        terminal = Terminal(quiet=options.quiet, events_on_stdout=is_stdout(options.events), supervision=supervision)
        last_words.callback(terminal.finish)
        with ExitStack() as outlets:
            _open_outlets(options, terminal, writer, hooks, outlets)
            if background is not None:
                hooks.append(background)  # the last: what it tells of is printed by then
            failure, last = anyio.run(until_the_end, supervision, terminal, AsyncServer.wait, leaving)
            code = exit_code_of(failure, last, pass_through=options.attempts == 1 and options.fallbacks == "none")
            leaving.deadline.settle(code)
        terminal.last_line(failure, last, code)
    if failure is not None and not isinstance(failure, HangguardError):
        raise failure
    return code


def _supervision(options: Options, hooks: list[Callable[[Event], object]]) -> Supervision:
    if not options.command:
        raise BadLaunch("there is no command", advice="Write it after --, for example: hangguard run -- vllm serve M")
    fallbacks: Permission | None = None if options.fallbacks == "none" else options.fallbacks  # type: ignore[assignment]
    return supervise(
        options.command,
        engine=options.engine,
        url=options.url,
        ready=options.ready_path,
        fallbacks=fallbacks,
        limits=_limits(options),
        retry=Retry(stop=tenacity.stop_after_attempt(options.attempts)),
        on_hang=options.on_hang,
        on_death=options.on_death,
        run_dir=options.run_dir,
        log_bytes=(options.log_mib << 20) or None,
        hooks=[lambda event: [hook(event) for hook in hooks]],
    )


def _limits(options: Options) -> Limits:
    try:
        return Limits(ready_within=options.ready_within, patience=options.patience)
    except ValueError as wrong:
        raise BadLaunch(str(wrong)) from wrong


def _drain(options: Options) -> float:
    seconds = options.drain or 0.0
    if not 0.0 <= seconds < math.inf:
        raise BadLaunch(f"--drain is {seconds}", advice="It must be a number of seconds, and finite")
    return seconds


def _stop_within(options: Options) -> float | None:
    seconds = options.stop_within
    if seconds is not None and not LEAST_WITHIN <= seconds < math.inf:
        raise BadLaunch(f"--stop-within is {seconds}", advice=f"It must be {LEAST_WITHIN:g} second or more, and finite")
    return seconds


def _open_outlets(
    options: Options,
    terminal: Terminal,
    writer: EventWriter | None,
    hooks: list[Callable[[Event], object]],
    outlets: ExitStack,
) -> None:
    """Who gets to read what: the events where asked, else a live line on a terminal, else the server's log."""
    hooks.append(terminal.tell)
    if writer is not None:
        hooks.append(writer)
        outlets.callback(lambda: terminal.say(lost) if (lost := writer.close()) else None)
    if not options.quiet and not terminal.is_live and options.told_at is None:
        out = sys.stderr if is_stdout(options.events) else sys.stdout
        terminal.follower = LogFollower(out, secrets_of(terminal.supervision.launch))
        outlets.callback(terminal.follower.close)


async def until_the_end(
    supervision: Supervision,
    terminal: Terminal,
    body: Callable[[AsyncServer], Awaitable[object]],
    leaving: Leaving = Leaving(),
) -> tuple[BaseException | None, Attempt | None]:
    """Start the server and run the body, until it ends or a signal asks; return the failure and the last attempt.

    A second signal ends the drain and the grace, not the proof.
    """
    failure: BaseException | None = None
    async with anyio.create_task_group() as group:
        asked = anyio.CancelScope()
        group.start_soon(_Signals(asked, supervision, terminal, leaving).listen)
        group.start_soon(terminal.show)
        with asked:
            try:
                async with supervision as server:
                    await body(server)
            except StoppedEarly:
                failure = None  # asked for, like a signal
            except Exception as error:  # noqa: BLE001 - told and turned into an exit code by the caller
                failure = error
        group.cancel_scope.cancel()
    history = supervision.history
    return failure, history[-1] if history else None


class _Signals:
    """The first asks for the stop, a second one hurries it."""

    def __init__(
        self, asked: anyio.CancelScope, supervision: Supervision, terminal: Terminal, leaving: Leaving
    ) -> None:
        self._asked = asked
        self._supervision = supervision
        self._terminal = terminal
        self._leaving = leaving

    async def listen(self) -> None:
        """Listen until cancelled."""
        hears = [signal.SIGINT, signal.SIGTERM, signal.SIGQUIT]
        if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # nohup has it ignored, and means it
            hears.append(signal.SIGHUP)
        asked_at: float | None = None
        with anyio.open_signal_receiver(*hears) as signals:
            async with anyio.create_task_group() as group:
                async for number in signals:
                    if asked_at is None:
                        asked_at = anyio.current_time()
                        self._ask(number)
                        group.start_soon(self._hurry_in_time)
                    elif anyio.current_time() - asked_at > ONE_REQUEST:
                        text = f"{number.name} again: no more grace; still proving that everything is gone"
                        self._terminal.say(text)
                        self._hurry()

    def _ask(self, number: signal.Signals) -> None:
        drain, within = self._leaving.drain, self._leaving.within
        self._leaving.deadline.begin()
        if within is not None:
            self._supervision.end_within(within)
        if drain and self._supervision.ask_to_drain(drain):
            text = f"letting requests finish, {drain:g} s at most, then stopping; once more ends that and the grace"
            self._terminal.say(f"{number.name}: {text}")
        else:
            self._terminal.say(f"{number.name}: stopping the server; once more ends its grace")
            self._asked.cancel()

    async def _hurry_in_time(self) -> None:
        """End the grace of a stop that had begun before anybody asked for one, so that its proof is in time too."""
        within = self._leaving.within
        if within is not None:
            await anyio.sleep(within - kept_of(within))
            self._hurry()

    def _hurry(self) -> None:
        self._supervision.hurry()
        self._asked.cancel()  # a drain that is under way ends in the middle of its look
