"""The supervisor's connection to a guardian: its process, the socket, the death pipe, the pidfds."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio

from hangguard.act import _membership, _signals
from hangguard.errors import GuardianFailed
from hangguard.facts import Unseen
from hangguard.observe.lane import Lane

PROTOCOL = 1
GUARDIAN = str(Path(__file__).parent.parent / "guardian.py")
START_WITHIN = 30.0
"""Seconds for the guardian and the exec of the server; both take milliseconds where the disk answers."""
NEWS_WITHIN = 2.0
"""Seconds for what follows at once when something is over: the exit code, the guardian's own end."""


async def poll_until(condition: Callable[[], bool], *, every: float = 0.02) -> None:
    """Wait for what the kernel has no descriptor for."""
    while not condition():  # noqa: ASYNC110 - nobody could set an event
        await anyio.sleep(every)


async def start_guardian(*, within: float = START_WITHIN) -> Link:
    """Start one. Raises :class:`~hangguard.errors.GuardianFailed`, with what helps, and no :class:`OSError`."""
    lane = Lane("guardian")
    try:
        with anyio.CancelScope(shield=True):  # a guardian that starts has somebody who waits for it
            link = await lane.ask(_start, within=within)
    except OSError as problem:
        raise GuardianFailed(f"it could not be started: {_with_help(problem)}") from problem
    finally:
        lane.close()
    if isinstance(link, Unseen):
        raise GuardianFailed(f"it did not start ({link.reason})")
    return link


_HELPS = {
    errno.EMFILE: "this program has too many files open; ulimit -n raises how many it may have",
    errno.ENFILE: "this machine has too many files open; sysctl fs.file-max raises how many it may have",
}


def _with_help(problem: OSError) -> str:
    return f"{problem} ({helps})" if (helps := _HELPS.get(problem.errno or 0)) else str(problem)


def _start() -> Link:
    if problem := _membership.why_proc_misleads():
        raise GuardianFailed(problem)
    with contextlib.ExitStack() as closing, contextlib.ExitStack() as undoing:
        ours, theirs = socket.socketpair()
        ours.settimeout(0.0)
        undoing.callback(ours.close)
        closing.callback(theirs.close)
        death_reads, death_writes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        closing.callback(os.close, death_reads)
        death = Descriptor(death_writes)
        undoing.callback(death.close)
        supervisor = _pidfd_of_this_process()
        passed = [theirs.fileno(), death_reads]
        if supervisor >= 0:
            closing.callback(os.close, supervisor)
            passed.append(supervisor)
        arguments = [str(theirs.fileno()), str(death_reads), str(supervisor)]
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", GUARDIAN, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                cwd="/",
                # What finds the interpreter's own libraries, and nothing that could be a secret.
                env={name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ},
                pass_fds=passed,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            problem = _with_help(error) if isinstance(error, OSError) else str(error)
            raise GuardianFailed(f"{sys.executable!r} could not be started: {problem}") from error
        undoing.callback(_undo, process)
        entry = _membership.read_entry(process.pid)
        pidfd = _signals.open_pidfd(entry.identity) if entry is not None else None
        undoing.pop_all()
    return Link(
        process=process,
        started=entry.started if entry is not None else 0,
        control=ours,
        death=death,
        pidfd=None if pidfd is None else Descriptor(pidfd),
    )


def _undo(process: subprocess.Popen[bytes]) -> None:
    """End a guardian that nobody has spoken to: it has nothing yet. Blocks."""
    process.kill()
    process.wait()


def pidfd_of(identity: tuple[int, int]) -> Descriptor | None:
    """Return a pidfd of this process; ``None``: it is gone, there are none, or this program has no room for one."""
    with contextlib.suppress(OSError):
        pidfd = _signals.open_pidfd(identity)
        return None if pidfd is None else Descriptor(pidfd)
    return None


def _pidfd_of_this_process() -> int:
    """Return it, or -1: Linux before 5.3, a sandbox that refuses the call, a Python built without it."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):
        return -1


@dataclass(slots=True, kw_only=True)
class Link:
    """The guardian's process, and the socket, pipe and pidfd to it."""

    process: subprocess.Popen[bytes]
    started: int
    control: socket.socket
    death: Descriptor
    pidfd: Descriptor | None
    _arrived: bytearray = field(default_factory=bytearray)
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _unsent: bytearray = field(default_factory=bytearray)
    _ended: bool = False
    _writing: anyio.Lock = field(default_factory=anyio.Lock)

    async def send(self, message: Mapping[str, object]) -> None:
        """Send, waiting until the guardian has room."""
        self.post(message)
        if self._unsent:
            async with self._writing:  # a socket has one waiter
                while self._unsent:
                    await anyio.wait_writable(self.control)
                    self._flush()

    def post(self, message: Mapping[str, object]) -> None:
        """Send what can be sent now; the rest goes with the next message."""
        self._unsent += json.dumps({"v": PROTOCOL, **message}).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.control.send(self._unsent, socket.MSG_NOSIGNAL)]
        except BlockingIOError:
            return
        except OSError:
            self._unsent.clear()  # its reader is gone; whoever watches the guardian hears of it

    def ring(self) -> None:
        """Write one byte to the death pipe: end the grace."""
        with contextlib.suppress(OSError):
            os.write(self.death.number, b"h")

    async def next_message(self) -> dict[str, Any]:
        """Return the next message; empty: the socket has ended."""
        while True:
            self._messages += self.received()
            if self._messages:
                return self._messages.pop(0)
            if self._ended:
                return {}
            await anyio.wait_readable(self.control)

    def received(self) -> list[dict[str, Any]]:
        """Return the messages that are there."""
        try:
            while not self._ended:
                more = self.control.recv(1 << 16)
                self._arrived += more
                self._ended = not more
        except BlockingIOError:
            pass
        except OSError:
            self._ended = True
        *lines, rest = bytes(self._arrived).split(b"\n")
        self._arrived = bytearray(rest)
        return [json.loads(line) for line in lines]

    async def wait_guardian(self) -> None:
        """Wait until the guardian has ended, and reap it."""
        if self.pidfd is not None:
            with contextlib.suppress(OSError), self._second_pidfd() as pidfd:  # none is left: then by asking
                await anyio.wait_readable(pidfd.number)
                if self.process.poll() is None:  # reaped by the program itself, and its pid is another child's by now
                    self.process.returncode = 0
        await poll_until(lambda: self.process.poll() is not None)

    def _second_pidfd(self) -> contextlib.closing[Descriptor]:
        assert self.pidfd is not None
        return contextlib.closing(Descriptor(os.dup(self.pidfd.number)))  # a descriptor has one waiter

    def wake(self) -> None:
        """Let the guardian go on if somebody has stopped it: a stopped process hears no request."""
        self._signal(signal.SIGCONT)

    async def has_ended(self, *, within: float) -> bool:
        """Say whether the guardian has ended by then, and was reaped."""
        if self.process.poll() is not None:
            return True
        with anyio.move_on_after(within):
            await self.wait_guardian()
            return True
        return False

    async def end_guardian(self, within: float = NEWS_WITHIN) -> bool:
        """See that the guardian has ended and is no zombie of this process; end it if it has not by then.

        Returns whether it has: one that waits in the kernel for good has not.
        """
        if await self.has_ended(within=within):
            return True
        self._signal(signal.SIGKILL)
        return await self.has_ended(within=NEWS_WITHIN)

    def _signal(self, number: int) -> None:
        """Signal the guardian. By its pidfd: a program that waits for all children may have reaped it, and not told."""
        if self.pidfd is not None:
            try:
                signal.pidfd_send_signal(self.pidfd.number, number)
            except ProcessLookupError:
                return
            except OSError:  # a sandbox that knows pidfds and refuses this call
                pass
            else:
                return
        with contextlib.suppress(OSError):
            self.process.send_signal(number)

    def hang_up(self) -> None:
        """End the socket for both sides, also where a forked child still has it open."""
        with contextlib.suppress(OSError):
            self.control.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close all descriptors."""
        self.control.close()
        self.death.close()
        if self.pidfd is not None:
            self.pidfd.close()


class Descriptor:
    """A descriptor that is closed when the last reference goes, as a socket's is."""

    def __init__(self, number: int) -> None:
        self.number = number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)

    __del__ = close
