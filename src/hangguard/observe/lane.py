"""One daemon thread for one kind of blocking question."""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar, cast

import anyio

from hangguard.facts import Unseen
from hangguard.observe.rights import Rights, take_on

T = TypeVar("T")


class Lane:
    """Owns one daemon thread; at most one question is in flight.

    A question that never comes back (a wedged driver, a held memory-map lock, a dead network disk) costs this
    thread and nothing else: the asker goes on at its deadline, and so does the end of the program. That is
    why ``anyio.to_thread.run_sync(abandon_on_cancel=True)`` is not used: on asyncio the interpreter then
    waits for the thread for ever, and every look leaks another one.
    """

    def __init__(self, name: str, rights: Rights | None = None) -> None:
        """``rights``: with whose rights its thread opens files; where they cannot be taken on, every question fails."""
        self._name = name
        self._rights = rights
        self._questions: queue.SimpleQueue[_Question[Any] | None] = queue.SimpleQueue()
        self._bell: int | None = None
        self._last: _Question[Any] | None = None
        self._closed = False

    async def ask(self, question: Callable[[], T], *, within: float) -> T | Unseen:
        """Run ``question`` in the thread and return its answer, or why there is none within that time.

        What ``question`` raises arrives here. An answer that comes after its deadline, or after the asker
        was cancelled, is dropped; until it comes, every further question is answered with its age.
        """
        last = self._last
        if last is not None and self.is_busy:
            return Unseen(f"still busy with an earlier look for {time.monotonic() - last.since:.0f} s")
        if self._closed:
            return Unseen("no longer looking")
        asked = _Question(question)
        try:
            bell = self._send(asked)
        except RuntimeError as problem:  # RLIMIT_NPROC, or the limit of the control group (pids.max)
            return Unseen(f"no thread could be started to look ({problem})")
        self._last = asked
        try:
            with anyio.move_on_after(within):
                while not asked.is_answered:
                    await anyio.wait_readable(bell)
                    _silence(bell)
        finally:
            asked.is_awaited = False
        return asked.answer() if asked.is_answered else Unseen(f"no answer within {within:.3g} s")

    @property
    def is_busy(self) -> bool:
        """Whether its thread has not come back yet from the last question."""
        return self._last is not None and not self._last.is_over

    def close(self) -> None:
        """Let the thread end when it comes back. Never waits for it."""
        if not self._closed:
            self._closed = True
            self._questions.put(None)

    def _send(self, asked: _Question[Any]) -> int:
        if self._bell is None:
            bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            arguments = (self._questions, bell, self._rights)
            try:
                threading.Thread(target=_serve, args=arguments, name=f"hangguard {self._name}", daemon=True).start()
            except RuntimeError:
                os.close(bell)
                raise
            self._bell = bell
        _silence(self._bell)
        self._questions.put(asked)
        return self._bell


async def in_time(name: str, question: Callable[[], T], *, within: float, rights: Rights | None = None) -> T | Unseen:
    """Ask one blocking question in a thread of its own, with these rights. What it raises arrives here."""
    lane = Lane(name, rights)
    try:
        return await lane.ask(question, within=within)
    finally:
        lane.close()


class _Question(Generic[T]):
    """A question on its way, and later its answer."""

    def __init__(self, question: Callable[[], T]) -> None:
        self.since = time.monotonic()
        self.is_awaited = True
        self.is_answered = False
        self._question: Callable[[], T] | None = question
        self._result: T | None = None
        self._problem: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.is_answered and not self.is_awaited

    def run(self, obstacle: OSError | None = None) -> None:
        """Answer it, or say what is in the way. Called in the thread."""
        question, self._question = cast("Callable[[], T]", self._question), None
        self._problem = obstacle
        try:
            if obstacle is None:
                self._result = question()
        except BaseException as problem:  # noqa: BLE001 - it belongs to the asker, who gets it unchanged
            self._problem = problem
        self.is_answered = True

    def answer(self) -> T:
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        return cast("T", self._result)


def _serve(questions: queue.SimpleQueue[_Question[Any] | None], bell: int, rights: Rights | None) -> None:
    """Answer until told to end. Only here is the bell closed: nobody else knows when it rang last."""
    obstacle = _become(rights)
    while (asked := questions.get()) is not None:
        asked.run(obstacle)
        del asked
        os.eventfd_write(bell, 1)
    os.close(bell)


def _become(rights: Rights | None) -> OSError | None:
    try:
        if rights is not None:
            take_on(rights)
    except OSError as problem:
        return problem
    return None


def _silence(bell: int) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(bell)
