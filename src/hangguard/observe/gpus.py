"""GPUs, through NVML in a disposable process: a call into a wedged driver may never return."""

from __future__ import annotations

import glob
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import anyio

from hangguard.facts import NOT_ASKED, Ask, Driver, Gpu, Launch, Unseen
from hangguard.observe._children import Children
from hangguard.observe._visible import choose_visible
from hangguard.observe.lane import Lane

READER = (sys.executable, str(Path(__file__).with_name("_nvml_reader.py")))
MOST_READERS = 4
"""The first one and three replacements: each may stay behind in the kernel, so there must be an end."""


class GpuProbe:
    """Asks NVML about the GPUs that a launch can see; ``()`` is seen: this machine has none.

    ``within`` bounds one look. ``start_within`` bounds the opening of the driver, which without persistence
    mode takes seconds for every board: a reader that is still opening it is not replaced before that.
    ``devices`` is the pattern of the device files that tell whether the machine has a driver at all.
    """

    field = "gpus"

    def __init__(
        self,
        launch: Launch,
        *,
        reader_argv: tuple[str, ...] = READER,
        within: float = 5.0,
        start_within: float = 30.0,
        devices: str = "/dev/nvidia*",
    ) -> None:
        self._env = launch.environment()
        self._argv = reader_argv
        self._within = within
        self._start_within = start_within
        self._devices = devices
        self._lane = Lane("gpus")
        self._children = Children()
        self._reader: _Reader | None = None
        self._started = 0
        self._is_looking = False
        self._is_closed = False
        self._settled: tuple[Gpu, ...] | Unseen | None = None
        self.driver: Driver | Unseen = NOT_ASKED
        """What the driver said of itself in the newest look that it answered."""

    async def look(self, ask: Ask) -> tuple[Gpu, ...] | Unseen:
        """Return the GPUs that the launch can see, or why they cannot be seen. Cancelling it is harmless."""
        del ask  # cheap enough for every sample
        self._children.reap()
        if self._settled is not None:
            return self._settled
        if self._is_looking:
            return Unseen("still busy with an earlier look")
        self._is_looking = True
        try:
            return self._understand(await self._ask())
        finally:
            self._is_looking = False

    async def aclose(self) -> None:
        """End the reader. One that the kernel does not let go is left behind, killed."""
        self._is_closed = True
        self._drop_reader()
        await self._children.aclose()
        self._lane.close()

    async def _ask(self) -> dict[str, Any] | Unseen:
        if self._reader is not None and self._reader.is_overdue():
            self._drop_reader()
        with anyio.move_on_after(self._within):
            reader = self._reader or await self._start_reader()
            if isinstance(reader, Unseen):
                return reader
            try:
                await reader.settle()
                return await reader.ask()
            except (OSError, ValueError) as error:
                self._drop_reader()
                return Unseen(f"the NVIDIA reader ended: {error}")
        if self._reader is not None and self._reader.is_overdue():
            self._drop_reader()
        return Unseen(f"the NVIDIA driver did not answer within {self._within:.3g} s")

    async def _start_reader(self) -> _Reader | Unseen:
        if self._started >= MOST_READERS:
            self._settled = Unseen(
                f"the NVIDIA driver did not answer: its reader was replaced {MOST_READERS - 1} times; not asked again"
            )
            return self._settled
        try:
            while self._reader is None and not self._is_closed:
                if isinstance(await self._lane.ask(self._launch_reader, within=self._within), Unseen):
                    await anyio.sleep(0.01)  # the start of an earlier look, cancelled since, is still on its way
        except OSError as error:
            return Unseen(f"the NVIDIA reader cannot be started: {error}")
        return self._reader or Unseen("no longer looking")

    def _launch_reader(self) -> None:
        """Start a reader and keep it here: the answer of a cancelled look would be dropped. Runs in the lane."""
        if self._reader is not None:
            return
        argv = (*self._argv, str(os.getpid()))
        self._reader = _Reader(self._children, argv, self._start_within, self._within)
        self._started += 1
        if self._is_closed:
            self._drop_reader()

    def _drop_reader(self) -> None:
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.end()

    def _understand(self, answer: dict[str, Any] | Unseen) -> tuple[Gpu, ...] | Unseen:
        if isinstance(answer, Unseen):
            return answer
        if "unseen" in answer:
            return self._explain_absence(answer)
        try:
            self.driver = _driver(answer.get("driver", {}))
            return choose_visible(answer["gpus"], self._env)
        except (KeyError, TypeError, ValueError) as error:
            return Unseen(f"the NVIDIA reader's answer cannot be read: {error!r}")

    def _explain_absence(self, answer: dict[str, Any]) -> tuple[Gpu, ...] | Unseen:
        if answer.get("absent") is None or glob.glob(self._devices):  # noqa: PTH207 - the pattern is absolute
            return Unseen(str(answer["unseen"]))
        if answer["absent"] == "library":
            self._settled = ()  # no driver and no device file; a driver is not installed under a running program
            self._drop_reader()
        return ()


def _driver(said: dict[str, Any]) -> Driver | Unseen:
    """CUDA's version comes as 1000 times the major and 10 times the minor number (nvml.h)."""
    version, cuda = said.get("version"), said.get("cuda")
    if not isinstance(version, str) and not isinstance(cuda, int):
        return Unseen(version["unseen"] if isinstance(version, dict) else "the driver does not tell its version")
    return Driver(
        version=version if isinstance(version, str) else None,
        cuda=(cuda // 1000, cuda % 1000 // 10) if isinstance(cuda, int) else None,
    )


class _Reader:
    """One reader process. It owes at most one answer; the first, sent unasked, says that the driver is open."""

    def __init__(self, children: Children, argv: tuple[str, ...], start_within: float, within: float) -> None:
        self._socket, theirs = socket.socketpair()
        self._socket.settimeout(0.0)
        with theirs:
            try:
                self._child = children.start(
                    argv, stdin=theirs.fileno(), stdout=theirs.fileno(), stderr=subprocess.DEVNULL
                )
            except OSError:
                self._socket.close()
                raise
        self._within = within
        self._received = bytearray()
        self._owed_since: float | None = time.monotonic()
        self._patience = start_within

    def is_overdue(self) -> bool:
        """Tell whether the answer that it owes should have come. What has arrived unread counts as come."""
        if self._owed_since is None:
            return False
        try:
            self._receive()
        except OSError:
            return True
        if b"\n" in self._received:
            return False
        # A tenth less than its time: the look that asked started its own clock a moment earlier.
        return time.monotonic() - self._owed_since >= 0.9 * self._patience

    async def settle(self) -> None:
        """Wait for what it owes to an earlier look, which nobody wants any more."""
        while self._owed_since is not None:
            await self._next_line()

    async def ask(self) -> dict[str, Any]:
        """Ask and return the answer. Raises OSError if the reader ends, ValueError if it talks nonsense."""
        self._socket.send(b"?")  # one byte in an empty buffer: never blocks
        self._owed_since, self._patience = time.monotonic(), self._within
        answer = json.loads(await self._next_line())
        if not isinstance(answer, dict):
            raise ValueError(answer)  # noqa: TRY004 - what it says is wrong, not how it was asked
        return answer

    def end(self) -> None:
        """Kill it, without waiting: a process in the driver may not end."""
        self._child.kill()
        self._socket.close()

    async def _next_line(self) -> bytes:
        while b"\n" not in self._received:
            await anyio.wait_readable(self._socket)
            self._receive()
        line, _, rest = bytes(self._received).partition(b"\n")
        self._received[:] = rest
        self._owed_since = None
        return line

    def _receive(self) -> None:
        try:
            chunk = self._socket.recv(1 << 20)
        except BlockingIOError:
            return
        if not chunk:
            raise ConnectionResetError("end of its output")
        self._received += chunk
