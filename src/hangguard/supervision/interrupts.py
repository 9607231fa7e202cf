"""Ctrl-C during a stop: it must not hit the stop itself, nor tear down the event loop that stops."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType


@contextlib.contextmanager
def holding_interrupts(hurry: Callable[[], None]) -> Iterator[None]:
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
