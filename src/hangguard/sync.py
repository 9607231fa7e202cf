"""The blocking face: ``with`` gives a :class:`Server`; every method is one call through a portal.

The event loop runs in a thread of its own, so the blocking face also works inside a running loop, nested, and
from several threads. A forked child of the program has no such thread: it gets a clear error instead of a
hang, and leaving the block does nothing there.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar, overload

import anyio
from anyio.from_thread import BlockingPortal

from hangguard.engines.base import Engine
from hangguard.errors import WrongProcess
from hangguard.facts import (
    AppliedChange,
    Attempt,
    Diagnosis,
    Fallback,
    Launch,
    Limits,
    LogLine,
    Permission,
    Release,
    Sample,
)
from hangguard.judge import permitted, why_none
from hangguard.launching import read_command
from hangguard.observe.ports import free_port
from hangguard.redact import secrets_of
from hangguard.store import RunFolder, new_run_id, open_run_folder
from hangguard.supervision.announcer import Announcer, Hook, Subscription
from hangguard.supervision.asked import check_asked
from hangguard.supervision.block import AsyncSupervision, entered_before
from hangguard.supervision.events import Event
from hangguard.supervision.followed_log import LogLines
from hangguard.supervision.handle import AsyncServer
from hangguard.supervision.interrupts import HEAR_EVERY, blocking_portal, call, holding_interrupts, result_of
from hangguard.supervision.log_cap import DEFAULT as LOG_BYTES
from hangguard.supervision.quiet import Quiet
from hangguard.supervision.retry import Retry
from hangguard.supervision.run import OnDeath, OnHang, ReadyCheck, Run

T = TypeVar("T")


def supervise(
    command: str | Sequence[str],
    *,
    engine: str | Engine | None = None,
    url: str | None = None,
    ready: ReadyCheck = None,
    fallbacks: Permission | Sequence[Fallback] | None = None,
    env: Mapping[str, str] | None = None,
    cwd: str | os.PathLike[str] | None = None,
    limits: Limits | None = None,
    retry: Retry | None = None,
    on_hang: OnHang = "act",
    on_death: OnDeath = "stop",
    pristine: bool = False,
    run_dir: str | os.PathLike[str] | None = None,
    log_bytes: int | None = LOG_BYTES,
    hooks: Sequence[Hook] = (),
) -> Supervision:
    """Start a server and get back one that answers, or the reason why it does not.

    ``command`` is a list of words, or a string that is split as a shell would and never given to one;
    ``{port}`` in it is filled with a free port. Nothing is started before the block is entered.

    :param engine: ``"sglang"``, ``"vllm"``, ``"generic"``, or an :class:`Engine`; ``None``: read from the command.
    :param url: where it will answer, for a command that does not tell (``generic``).
    :param ready: a path (GET, any 2xx) or a callable that is given the URL; ``None``: a real request in the
        engine's own way.
    :param fallbacks: ``None``: relaunch nothing changed; ``"auto"``: changes that alter speed at most; ``"any"``:
        also those that may alter results; or your own.
    :param env: the whole environment of the server, as for :class:`subprocess.Popen`; ``None``: this one.
    :param on_hang: ``"act"`` (evidence, stop, perhaps relaunch) or ``"report"`` (say so and leave it running;
        ``ready_within`` still ends a start).
    :param on_death: what becomes of the server when this program dies: ``"stop"`` or ``"keep"``.
    :param pristine: add nothing to the server's environment.
    :param run_dir: where the run's folder is made; ``None``: the user's state folder, in which old runs are deleted.
    :param log_bytes: what the log of one attempt may take of the disk, at least 1 MiB: of more, the first sixteenth and
        the newest part stay, and the middle is given back. ``None``: no bound.
    :param hooks: callables that take one :class:`Event`; called in order, in a thread of their own.

    Raises :class:`BadLaunch`, :class:`CommandNotFound` or :class:`CommandNotExecutable` at once. Entering the
    block raises :class:`GaveUp` when no attempt became ready, and :class:`Refused` when nothing could start.
    """
    check_asked(command=command, url=url, ready=ready, fallbacks=fallbacks, env=env, limits=limits, retry=retry,
                on_hang=on_hang, on_death=on_death, log_bytes=log_bytes, hooks=hooks)  # fmt: skip
    launch, known_engine = read_command(command, engine=engine, url=url, env=env, cwd=cwd)
    known = secrets_of(launch)
    run_id, place = new_run_id(), None if run_dir is None else Path(run_dir).absolute()
    run = Run(
        launch=launch,
        engine=known_engine,
        limits=limits or Limits(),
        retry=retry or Retry(),
        fallbacks=permitted(fallbacks, known_engine.fallbacks),
        no_fallbacks=why_none(fallbacks, known_engine),
        retry_hangs=isinstance(fallbacks, str),
        ready=ready,
        on_hang=on_hang,
        on_death=on_death,
        pristine=pristine,
        log_bytes=log_bytes,
        folder=RunFolder(run_id=run_id, path=None, known_secrets=known),
        announcer=Announcer(hooks, known),
        ras_port=free_port(),
    )
    return Supervision(run, partial(open_run_folder, place, known, run_id))


class Server:
    """A server that has answered; the blocking twin of :class:`AsyncServer`, name by name.

    When the server is lost while your code runs, the next call here raises, and leaving the block raises
    unless your code already did.
    """

    def __init__(self, server: AsyncServer, portal: BlockingPortal) -> None:
        self._server = server
        self._portal = portal
        self._owner = os.getpid()
        self._over = False

    @property
    def url(self) -> str:
        """The base URL, without a trailing slash."""
        return self._server.url

    @property
    def launch(self) -> Launch:
        """What really runs, or ran last."""
        return self._server.launch

    @property
    def changes(self) -> tuple[AppliedChange, ...]:
        """How what runs differs from what was asked for; empty: it does not."""
        return self._server.changes

    @property
    def attempt(self) -> Attempt:
        """A record of the attempt that runs, or ran last."""
        return self._server.attempt

    @property
    def history(self) -> tuple[Attempt, ...]:
        """The attempts before this one, oldest first; after the end, all of them."""
        return self._server.history

    @property
    def diagnosis(self) -> Diagnosis:
        """The diagnosis of the last attempt that did not go well."""
        return self._server.diagnosis

    @property
    def pid(self) -> int | None:
        """The pid of the launched process; ``None`` between two attempts."""
        return self._server.pid

    @property
    def returncode(self) -> int | None:
        """The exit code as :class:`subprocess.Popen` gives it; ``None`` while it runs, or if it cannot be known."""
        return self._server.returncode

    def poll(self) -> int | None:
        """Return :attr:`returncode`."""
        return self._server.poll()

    def terminate(self) -> None:
        """Ask for the stop, with the usual grace, and do not wait for it."""
        self._call_plain(self._server.terminate)

    def kill(self) -> None:
        """Ask for the stop without grace, and do not wait for it."""
        self._call_plain(self._server.kill)

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the server has ended and was released; return its exit code.

        Raises :class:`TimeoutError` after ``timeout`` seconds.
        """
        return self._call(self._server.wait, timeout)

    def stop(self, *, drain: float | None = None) -> Release | None:
        """Stop the server and everything of it; return the proof.

        ``drain``: seconds for which requests that are in flight may finish before. Nobody is signalled meanwhile, and
        new requests are still taken: send them elsewhere first. It ends at once when nobody is in flight, when the
        server hangs or ends, and with another stop without it, or the end of the block. How it ended stands in
        ``attempt.drained``.

        Raises :class:`ValueError` for seconds that are negative or not finite, and :class:`LeftBehind` when something
        of it cannot be ended.
        """
        return self._call(partial(self._server.stop, drain=drain))

    def restart(self) -> None:
        """Stop the server and start the same launch again; return when it has answered."""
        return self._call(self._server.restart)

    def quiet(self, *, at_most: float) -> Quiet:
        """Return a block in which stillness is wanted: sleep, pause, new weights. For ``with`` and ``async with``.

        Nothing is called a hang in it, for ``at_most`` seconds at the longest. Raises :class:`ValueError` for a time
        that is not above zero and finite.
        """
        self._check()
        return self._server.quiet(at_most=at_most)

    def sample(self) -> Sample:
        """Return the newest sample, at most about a second old. Raises what ended the server, if it is lost."""
        return self._call(self._server.sample)

    def events(self) -> Iterator[Event]:
        """Return the events from now on, as an iterator that ends with the supervision."""
        subscription = self._call_plain(self._server.events)
        return iter(lambda: self._next_of(subscription), None)

    def log(self, *, follow: bool = True) -> Iterator[LogLine]:
        """Return what the server of the present attempt has written, line by line, as an iterator.

        ``follow``: it goes on as the log grows and into the next attempt, and ends with the supervision; without, it
        ends where the log ends now. Raises :class:`RuntimeError` where this run has no log.
        """
        lines = self._call_plain(lambda: self._server.log(follow=follow))
        return iter(lambda: self._next_of(lines), None)

    @overload
    def _next_of(self, stream: Subscription) -> Event | None: ...
    @overload
    def _next_of(self, stream: LogLines) -> LogLine | None: ...
    def _next_of(self, stream: Subscription | LogLines) -> Event | LogLine | None:
        """What is left is still handed out when another thread has left the block; then the iterator ends."""
        if not self._over:
            try:
                return self._call(stream.next_or_none)
            except RuntimeError:
                if not self._over:
                    raise
        return stream.take()

    def _call(self, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        self._check()
        try:
            outcome: T = call(self._portal, method, *args)
        except RuntimeError:
            self._check()  # left by another thread meanwhile: say that, not that some portal does not run
            raise
        return outcome

    def _call_plain(self, method: Callable[[], T]) -> T:
        self._check()
        return call(self._portal, method)

    def _check(self) -> None:
        if self._owner != os.getpid():
            raise WrongProcess(self._owner, os.getpid())
        if self._over:
            msg = "the block was left and the server is stopped; what stays are its attempt, history and returncode"
            raise RuntimeError(msg)


class Supervision(AsyncSupervision):
    """A server to be: ``with`` gives a :class:`Server`, ``async with`` an :class:`AsyncServer`; entered once.

    In a notebook, where no block spans two cells, use :meth:`start` and :meth:`close`.
    """

    _owner: int | None = None
    _portal_context: AbstractContextManager[BlockingPortal]
    _portal: BlockingPortal
    _leave_now: anyio.Event | None = None
    _handle: Server | None = None
    _closed = False
    _portal_is_over = False

    def __enter__(self) -> Server:
        """Start the server; return when it has answered. See :func:`supervise` for what it raises."""
        if self._owner is not None or self._is_entered:
            raise entered_before()
        self._owner = os.getpid()
        self._ending_portal = threading.Lock()
        self._portal_context = blocking_portal()
        self._portal = self._portal_context.__enter__()
        entered: Future[AsyncServer] = Future()
        try:
            with holding_interrupts():  # so that nothing runs of which nobody knows
                self._block = self._portal.start_task_soon(self._hold, entered)
            server = result_of(entered)
        except BaseException as error:
            self._close_portal(error)
            raise
        self._handle = Server(server, self._portal)
        return self._handle

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the server, with proof. The body's exception goes on as it is. Nothing in a forked child."""
        if self._owner != os.getpid():
            return
        self._close_portal(error)

    def start(self) -> Server:
        """Enter the block; :meth:`close` leaves it."""
        return self.__enter__()

    def close(self) -> None:
        """Leave the block that :meth:`start` entered. Closing twice does nothing."""
        if self._owner is not None and not self._closed:
            self.__exit__(None, None, None)

    # ------------------------------------------------------------------------------------ below

    async def _hold(self, entered: Future[AsyncServer]) -> None:
        """Enter and leave the asynchronous block in one task: its cancel scopes demand it."""
        try:
            with anyio.CancelScope() as self._scope:
                async with self as server:
                    self._leave_now = anyio.Event()
                    entered.set_result(server)
                    await self._leave_now.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            raise
        if not entered.done():
            entered.cancel()

    def _close_portal(self, error: BaseException | None) -> None:
        """Leave the block and wait for the proof. Ctrl-C meanwhile ends the grace, not the proof."""
        self._closed = True
        interrupted: KeyboardInterrupt | None = None
        asked: Future[None] | None = None
        while not self._block.done():
            try:
                asked = asked or self._portal.start_task_soon(self._begin_to_leave)
                wait([self._block], timeout=HEAR_EVERY)
            except KeyboardInterrupt as again:
                interrupted = again
                self.hurry()
        if self._handle is not None:
            self._handle._over = True  # noqa: SLF001 - the two are one
        self._end_portal()
        failure = self._block.exception()
        if interrupted is not None:
            raise interrupted
        if failure is not None and error is None:
            raise failure

    def _end_portal(self) -> None:
        """End the event loop, once: whoever starts and whoever closes may be two threads."""
        with self._ending_portal:
            if not self._portal_is_over:
                self._portal_is_over = True
                self._portal_context.__exit__(None, None, None)

    def _begin_to_leave(self) -> None:
        if self._leave_now is not None:
            self._leave_now.set()
        else:
            self._scope.cancel()
