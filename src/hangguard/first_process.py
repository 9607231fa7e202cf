"""Pid 1 of a container: a reaper that stays behind while the real work goes on in a child. Standard library only.

Whoever loses his parent becomes a child of pid 1, and stays a zombie until that waits for him. A program that waits for
its own children by their pids (subprocess does) cannot wait for strangers beside them: the kernel shows it one ended
child at a time, and taking a known one would take its exit code away from whoever started it. Here the only known child
is the program itself, so everything else may be taken, and nothing that goes wrong in the program ends the reaping.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time

PASSED_ON = frozenset((signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP))
"""What asks hangguard to stop. Pid 1 gets no signal that it does not wait for: the kernel drops the others."""

OF_THE_TERMINAL = frozenset((signal.SIGINT, signal.SIGQUIT))
"""Ctrl-C and Ctrl-\\ reach the whole foreground group, and the child with it; SIGHUP reaches the session's leader."""

SI_KERNEL = 0x80
"""``si_code`` of what the kernel sends by itself, include/uapi/asm-generic/siginfo.h."""

FAREWELL = 5.0
"""Seconds for the guardian to end the server where the program itself was killed; it takes its death grace and 2 s."""

SIGNAL_BASE = 128


def stay_behind_as_pid_1() -> None:
    """Go on in a child where this is pid 1, and never return in pid 1 itself. Elsewhere do nothing.

    To be called before any thread is started.
    """
    if os.getpid() != 1:
        return
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored, it would have the kernel throw all exit codes away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*PASSED_ON, signal.SIGCHLD})
    try:
        child = os.fork()
    except OSError as problem:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        print(f"hangguard: pid 1 cannot fork ({problem.strerror}): orphans are not reaped", file=sys.stderr)  # noqa: T201
        return
    if child == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    os._exit(_reap_until_the_end_of(child))


def _reap_until_the_end_of(child: int) -> int:
    """Reap everybody and pass signals on until the child has ended; return its exit code, as a shell gives it."""
    while (code := _reap(child)) is None:
        heard = signal.sigwaitinfo({*PASSED_ON, signal.SIGCHLD})
        if heard.si_signo in PASSED_ON and not (heard.si_signo in OF_THE_TERMINAL and heard.si_code == SI_KERNEL):
            os.kill(child, heard.si_signo)  # not reaped yet, so the pid is his
    if code >= 0:
        return code
    _wait_for_the_others()
    return SIGNAL_BASE - code


def _reap(child: int) -> int | None:
    """Wait for everybody who has ended; return the exit code of the child if he is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == child:
                code = os.waitstatus_to_exitcode(status)
    return code


def _wait_for_the_others() -> None:
    """Give the guardian of a program that was killed the time to end the server: our own end kills everybody."""
    ends = time.monotonic() + FAREWELL
    while _has_children() and (left := ends - time.monotonic()) > 0.0:
        signal.sigtimedwait({signal.SIGCHLD}, left)


def _has_children() -> bool:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return False
    return True
