"""How the guardian becomes the reaper of all orphans below it, and deaf to the terminal.

Standard library only, imported by the guardian.
"""

from __future__ import annotations

import contextlib
import os
import signal

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable

PR_SET_CHILD_SUBREAPER = 36


def become_reaper(on_sigterm: Callable[[int, object], None], wake: int) -> None:
    """Take the signals, with a byte into ``wake`` for each, and the orphans."""
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    # What the user's program ignores (nohup, a job in the background) would be ignored by the server too.
    for number in signal.valid_signals() - {signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)}:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    # Handlers, because an ignored signal is inherited over exec and a handler is not.
    for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
        signal.signal(number, _do_nothing)
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    _become_subreaper()


def drain(fd: int) -> None:
    """Read all that is there from a pipe that does not block."""
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _become_subreaper() -> None:
    # Without it (no ctypes in this Python) orphans go to pid 1; the log still tells whose they are.
    with contextlib.suppress(ImportError, OSError):
        import ctypes  # noqa: PLC0415  it may be missing

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _do_nothing(number: int, frame: object) -> None:
    del number, frame
