"""What needs no launch of ours: looks at a server of somebody else, or before a launch; the cleaning after dead runs.

:func:`diagnose`, :func:`preflight` and :func:`clean_up` block; :func:`adiagnose`, :func:`apreflight` and
:func:`aclean_up` are awaited. :func:`attach` returns what ``with`` and ``async with`` enter. The blocking faces go
through a portal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import TypeVar

from anyio.from_thread import BlockingPortal

from hangguard.act.cleaners import Cleaner
from hangguard.act.cleanup import WITHIN as CLEAN_WITHIN
from hangguard.act.cleanup import aclean_up
from hangguard.engines.base import Engine
from hangguard.facts import CleanupReport, Diagnosis, Launch, Limits, Preflight, Release, Sample, Verdict
from hangguard.supervision.announcer import Hook, Subscription
from hangguard.supervision.attach import AsyncAttachment, AsyncWatch, Attaching
from hangguard.supervision.blocking import BlockingHandle, Entered
from hangguard.supervision.diagnose import WITHIN, adiagnose
from hangguard.supervision.events import Event
from hangguard.supervision.found import FoundServer
from hangguard.supervision.interrupts import blocking_portal, call
from hangguard.supervision.look import Look
from hangguard.supervision.preflight import WITHIN as PREFLIGHT_WITHIN
from hangguard.supervision.preflight import apreflight
from hangguard.supervision.run import OnHang

T = TypeVar("T")


def diagnose(
    target: int | str | None = None,
    *,
    url: str | None = None,
    pid: int | None = None,
    engine: str | Engine | None = None,
    log: str | None = None,
    canary: bool = False,
    within: float = WITHIN,
) -> Look:
    """Look once at a server that runs already, and say whether it hangs, where, and what to do next.

    Nothing of it is changed: no signal is sent, nothing is stopped, no file is written, and nothing that its process
    names is executed. ``target`` is a pid or a URL; without any, the one server of this machine.

    :param url: where it answers, for a process whose command line does not tell.
    :param engine: ``"sglang"``, ``"vllm"``, ``"generic"``, or an :class:`Engine`; ``None``: read from its command.
    :param log: the file with its output; ``None``: the file that its standard output goes to.
    :param canary: ask it for a few tokens too. That is work for the server, and with ``within=40`` a proof where
        nothing else can tell whether it still works.
    :param within: seconds for all of it. Less than 13 proves no hang where everything stands still.

    Raises :class:`NoSuchServer` where no server is meant by that, or several are; :class:`BadLaunch` for what cannot
    be meant at all.
    """
    question = partial(adiagnose, target, url=url, pid=pid, engine=engine, log=log, canary=canary, within=within)
    with blocking_portal() as portal:  # in a thread of its own: it works inside a running loop too
        return call(portal, question)


def preflight(
    command: str | Sequence[str] | Launch,
    *,
    engine: str | Engine | None = None,
    url: str | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    within: float = PREFLIGHT_WITHIN,
) -> Preflight:
    """Look around before a launch: what can be seen here, what cannot, what that costs, and the line that gives it.

    Nothing is changed, no file is written, and nothing that the command names is executed. The parameters are those of
    :func:`supervise`; ``command`` may be a :class:`Launch` as well, which has its own URL, environment and directory.

    :param limits: with which the server will be watched: time limits of the engine are compared with them.
    :param within: seconds for all of it. What has not answered by then is unseen.

    What ``supervise`` would raise for certain stands in :attr:`Preflight.refusals`, and nothing else is refused. Raises
    :class:`BadLaunch` for a command that cannot be understood.
    """
    question = partial(
        apreflight, command, engine=engine, url=url, env=env, cwd=cwd, limits=limits, run_dir=run_dir, within=within
    )
    with blocking_portal() as portal:
        return call(portal, question)


def clean_up(
    run: str | os.PathLike[str] | None = None,
    *,
    really: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    within: float = CLEAN_WITHIN,
    cleaners: tuple[Cleaner, ...] | None = None,
) -> CleanupReport:
    """Find what is left of runs whose supervisor and guardian are both dead; end and remove it, if ``really``.

    Without ``really`` the same is done but for the last step: nothing is signalled and nothing is removed, and the
    report says what would be. A run that somebody still cares for is not touched in either case, nor is anything that
    is not proved to be the run's: see :class:`CleanupReport`. The folder of the run stays, with its logs.

    :param run: the id of a run, the beginning of one, or the path of its folder; ``None``: all that left something.
    :param run_dir: where the runs have their folders; ``None``: in the user's state folder.
    :param within: seconds for all of it.
    :param cleaners: what cleans, in order; ``None``: ``hangguard.act.cleaners.CLEANERS``.

    Raises :class:`NoSuchRun` where no run, or more than one, has this name, or none can be looked at.
    """
    question = partial(aclean_up, run, really=really, run_dir=run_dir, within=within, cleaners=cleaners)
    with blocking_portal() as portal:
        return call(portal, question)


def attach(
    pid: int | None = None,
    *,
    url: str | None = None,
    match: str | None = None,
    started: int | None = None,
    engine: str | Engine | None = None,
    log: str | None = None,
    limits: Limits | None = None,
    on_hang: OnHang = "report",
    run_dir: str | os.PathLike[str] | None = None,
    hooks: Sequence[Hook] = (),
) -> Attachment:
    """Watch a server that somebody else started, for as long as it lives; leaving the block leaves it alone.

    :param pid: its first process, or any process of it.
    :param url: where it answers; alone, whoever listens there is watched.
    :param match: a text that occurs in the command line of exactly one process tree. Such a watch only reports.
    :param started: the start time of ``pid`` in clock ticks since boot: then it is exactly that process.
    :param log: the file with its output; ``None``: the file that its standard output goes to.
    :param on_hang: ``"report"`` (tell, touch nothing), or ``"act"`` (evidence, then stop it and its descendants),
        which needs ``pid`` and ``started``. It is never started again.
    :param run_dir: where evidence is kept before an act; ``None``: the user's state folder.
    :param hooks: callables that take one :class:`Event`; called in order, in a thread of their own.

    Raises :class:`BadLaunch` at once; entering the block raises :class:`NoSuchServer`.
    """
    return Attachment(
        Attaching(
            pid=pid, url=url, match=match, started=started, engine=engine, log=log, limits=limits or Limits(),
            on_hang=on_hang, run_dir=run_dir, hooks=hooks,
        )
    )  # fmt: skip


class Watch(BlockingHandle):
    """A server that somebody else started, being watched; the blocking twin of :class:`AsyncWatch`, name by name."""

    _once_left = "the block was left: nothing is watched any more"

    def __init__(self, watch: AsyncWatch, portal: BlockingPortal) -> None:
        super().__init__(portal)
        self._watch = watch

    @property
    def pid(self) -> int:
        """The topmost process of it; 0: it runs on another machine, or may not be seen."""
        return self._watch.pid

    @property
    def started(self) -> int:
        """Its start time in clock ticks since boot."""
        return self._watch.started

    @property
    def url(self) -> str:
        """The base URL; empty: it is not known where it answers."""
        return self._watch.url

    @property
    def launch(self) -> Launch:
        """What it was started with, as far as that can be read."""
        return self._watch.launch

    @property
    def server(self) -> FoundServer:
        """What is known of it."""
        return self._watch.server

    @property
    def verdict(self) -> Verdict:
        """The newest verdict."""
        return self._watch.verdict

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of the hang or end that was seen last; empty: there was none."""
        return self._watch.diagnosis

    @property
    def release(self) -> Release | None:
        """What was left of it after we stopped it; ``None``: we did not."""
        return self._watch.release

    def sample(self) -> Sample:
        """Return the newest sample, at most about a second old while the watch goes on."""
        return self._call(self._watch.sample)

    def events(self) -> Iterator[Event]:
        """Return the events from now on, as an iterator that ends with the watch."""
        self._check()
        subscription = call(self._portal, self._watch.events)
        return iter(lambda: self._next_event(subscription), None)

    def wait(self, timeout: float | None = None) -> Verdict:
        """Wait until the server has ended, or was stopped by us; return the last verdict.

        Raises :class:`TimeoutError` after ``timeout`` seconds.
        """
        return self._call(self._watch.wait, timeout)

    def _next_event(self, subscription: Subscription) -> Event | None:
        return subscription.take() if self._over else self._call(subscription.next_or_none)


class Attachment(AsyncAttachment):
    """A watch to be: ``with`` gives a :class:`Watch`, ``async with`` an :class:`AsyncWatch`; entered once."""

    _entered: Entered[Watch] | None = None

    def __enter__(self) -> Watch:
        """Find the server and begin to watch; return after the first sample. See :func:`attach`."""
        self._entered = Entered(self, Watch)
        return self._entered.handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop watching; the server is left alone. Nothing in a forked child."""
        assert self._entered is not None
        self._entered.leave(kind, error, trace)
