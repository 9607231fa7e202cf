"""Ctrl-C at the wrong moment: it must not hit a stop, tear down the event loop that stops, or be lost in a group."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any, TypeVar, overload

from anyio.from_thread import BlockingPortal, start_blocking_portal

T = TypeVar("T")

HEAR_EVERY = 0.2
"""Seconds after which a thread that waits looks for signals."""


@contextlib.contextmanager
def blocking_portal() -> Iterator[BlockingPortal]:
    """Give anyio's portal to an event loop in a thread of its own; Ctrl-C waits while that begins and ends.

    Interrupted there, anyio (4.12, from_thread.py) waits for the end of a loop that nobody has told to end.
    """
    context = start_blocking_portal("asyncio")
    portal: BlockingPortal | None = None
    try:
        with holding_interrupts():
            portal = context.__enter__()
        yield portal
    except BaseException as error:
        if portal is not None:
            with holding_interrupts():
                context.__exit__(type(error), error, error.__traceback__)
        raise
    else:
        with holding_interrupts():
            context.__exit__(None, None, None)


def result_of(future: Future[T]) -> T:
    """Wait for what another thread comes to, and hear signals meanwhile.

    A signal that comes between Python's own look for one and the kernel's wait for a lock waits as long as that lock:
    a start that an exception of its handler should have ended went on for ever (CPython 3.11, on a busy machine).
    """
    while not future.done():
        wait([future], timeout=HEAR_EVERY)
    return future.result()


@overload
def call(portal: BlockingPortal, method: Callable[..., Awaitable[T]], *args: object) -> T: ...
@overload
def call(portal: BlockingPortal, method: Callable[..., T], *args: object) -> T: ...
def call(portal: BlockingPortal, method: Callable[..., Any], *args: object) -> Any:
    """Do as ``portal.call`` does, and hear signals meanwhile."""
    return result_of(portal.start_task_soon(method, *args))


def bare(error: BaseException) -> BaseException | None:
    """Return an error as users expect it: of a group with a Ctrl-C in it that; ``None``: it is a cancellation.

    trio raises Ctrl-C in whichever task runs, and each task group around that one puts a group around it.
    """
    if isinstance(error, (Exception, KeyboardInterrupt, SystemExit)):
        return error
    found = (bare(one) for one in getattr(error, "exceptions", ()))
    return next((one for one in found if isinstance(one, (KeyboardInterrupt, SystemExit))), None)


@contextlib.contextmanager
def holding_interrupts(hurry: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Turn Ctrl-C into a call of ``hurry`` inside the block, and raise :class:`KeyboardInterrupt` at its end.

    Only in the main thread, and where the handler is one that raises wherever the program is:

    - Python's own raises out of asyncio's event loop, nobody runs that again, and the stop is cut off without its
      proof. ``asyncio.run`` leaves Ctrl-C to it throughout on Python 3.10, and since 3.11 (bpo-39622) while it
      cancels the tasks that its main task has left.
    - trio's raises in whichever task runs. One that only carries the stop's answers tells nobody before the stop is
      over, and so does not end its grace.

    The handlers of ``asyncio.run`` and ``anyio.run`` cancel, and stay; so does the caller's own.
    """
    pressed = False

    def hold(_number: int, _frame: FrameType | None) -> None:
        nonlocal pressed
        pressed = True
        hurry()

    before = signal.getsignal(signal.SIGINT)
    is_held = _raises_anywhere(before) and _replace_handler(hold)
    try:
        yield
    finally:
        if is_held and signal.getsignal(signal.SIGINT) is hold:
            signal.signal(signal.SIGINT, before)
    if pressed:
        raise KeyboardInterrupt


def _raises_anywhere(handler: object) -> bool:
    return handler is signal.default_int_handler or str(getattr(handler, "__module__", "")).startswith("trio.")


def _replace_handler(handler: Callable[[int, FrameType | None], object]) -> bool:
    """Say whether it was done."""
    if threading.current_thread() is not threading.main_thread():
        return False
    try:
        signal.signal(signal.SIGINT, handler)
    except ValueError:  # the main thread of a subinterpreter
        return False
    return True
