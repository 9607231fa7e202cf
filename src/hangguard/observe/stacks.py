"""Where every Python thread of the members stands, through py-spy. Only when asked: it costs tens of ms each.

py-spy reads the memory of its target and never stops it (``--nonblocking``). It may itself hang, on a held
memory-map lock for example, so each run of it is a child of our own that is killed at the deadline. Where it is
missing, refused (Yama lets only ancestors trace) or late, a reader is asked instead: the guardian, as a rule.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import anyio

from hangguard.facts import Process, Stack, StackFrame, ThreadStack, Unseen
from hangguard.observe._children import Children
from hangguard.observe._waits import system_calls, wait_channels
from hangguard.observe.lane import Lane
from hangguard.observe.memory_stacks import PythonThreads, Reader
from hangguard.pystacks.walk import INNERMOST, OUTERMOST

T = TypeVar("T")

AT_ONCE = 8
MOST_BYTES = 16 << 20
"""A dump has some 250 bytes a frame; a larger one would take longer to read than to make."""
MISSING = Unseen("py-spy is not installed: pip install 'hangguard[stacks]'")
ENDED = Unseen("the process has ended")
PY_SPYS_SHARE = 0.6
"""Of the time, where there is a reader that needs the rest if py-spy is late."""

_LANES: dict[int, tuple[Lane, threading.Lock]] = {}
"""One for the whole program: starting a program from a dead network disk blocks, and must cost one thread.

By pid: a forked child inherits the lane and not its thread. The lock is held while a question is in flight.
"""


async def take_stacks(
    members: tuple[Process, ...],
    *,
    within: float,
    folders: tuple[str, ...] | None = None,
    path: str | None = None,
    reader: Reader | None = None,
) -> tuple[Stack, ...] | Unseen:
    """Return a stack for every member, in order, after ``within`` seconds at most.

    A member whose threads cannot be read carries the reason. Function names come without their class, which
    py-spy knows from Python 3.11 on only. ``folders`` and ``path`` are where py-spy is looked for: if not
    given, beside this interpreter and on ``PATH``. ``reader`` is asked for each member that py-spy does not show.
    Of a deep stack both tell its ends only, or the same stack would look like another one.
    """
    tool = find_py_spy(folders, path)
    if tool is None and reader is None:
        return MISSING
    for_the_end = min(0.25, 0.1 * within)
    look = _Look(tool, within - for_the_end, reader)
    try:
        return await look.take(members)
    finally:
        await look.children.aclose(within=for_the_end)


def find_py_spy(folders: tuple[str, ...] | None = None, path: str | None = None) -> str | None:
    """Return the program's path: first beside this interpreter (the environment of hangguard), then ``PATH``."""
    if folders is None:
        folders = (os.path.dirname(sys.executable), sysconfig.get_path("scripts"))  # noqa: PTH120 - "" stays ""
    for folder in filter(None, folders):
        if found := shutil.which("py-spy", path=folder):
            return found
    whole = os.environ.get("PATH", os.defpath) if path is None else path
    # Not the current directory, nor one below it: a program that lies there may be anybody's.
    return shutil.which("py-spy", path=os.pathsep.join(filter(os.path.isabs, whole.split(os.pathsep))))


class _Look:
    """One look at all members, with one deadline."""

    def __init__(self, tool: str | None, within: float, reader: Reader | None) -> None:
        self.children = Children()
        self._tool = tool
        self._reader = reader
        self._within = within
        self._ends_at = time.monotonic() + within
        self._places = anyio.Semaphore(AT_ONCE)
        self._taken: dict[tuple[int, int], Stack] = {}
        self._waits: dict[tuple[int, int], dict[int, str]] = {}
        self._calls: dict[tuple[int, int], dict[int, str]] = {}

    async def take(self, members: tuple[Process, ...]) -> tuple[Stack, ...]:
        # The wait channels first: microseconds, and all there is where py-spy hangs.
        late = Unseen(f"py-spy did not answer within {self._within:.3g} s")
        for member in members:
            self._taken[member.identity] = Stack(
                pid=member.pid,
                started=member.started,
                title=member.title,
                threads=late,
                wait_channel=_read_wait_channel(member),
            )
        with anyio.move_on_after(self._within):
            async with anyio.create_task_group() as group:
                for member in members:
                    group.start_soon(self._take_one, member)
        return tuple(self._taken[member.identity] for member in members)

    async def _take_one(self, member: Process) -> None:
        async with self._places:
            found = PythonThreads(threads=ENDED)
            if _lives(member):
                await self._see_waits(member)
                found = await self._read(member)
            if not _lives(member):  # what was read may be of another process with the same pid
                found = PythonThreads(threads=ENDED)
            threads = found.threads
            if not found.is_python:
                threads = Unseen("not a Python program")
            elif not isinstance(threads, Unseen):
                threads = tuple(self._placed(member, thread, by_kernel=found.by != "py-spy") for thread in threads)
        stack = self._taken[member.identity]
        self._taken[member.identity] = replace(
            stack,
            threads=threads,
            is_python=found.is_python,
            seen_by="" if isinstance(threads, Unseen) else found.by,
        )

    async def _read(self, member: Process) -> PythonThreads:
        """Ask py-spy, and the reader for what it does not show."""
        threads = await self._threads_within(member.pid)
        if not isinstance(threads, Unseen):
            return PythonThreads(threads=threads, by="py-spy")
        left = self._ends_at - time.monotonic()
        if self._reader is not None and left > 0:
            found = await self._reader(member.identity, within=0.9 * left)
            if not isinstance(found.threads, Unseen) or not found.is_python:
                return found
            threads = Unseen(f"{threads.reason}; {found.by or 'the reader'}: {found.threads.reason}")
        return PythonThreads(threads=threads, is_python=await self._is_python(member.pid))

    async def _threads_within(self, pid: int) -> tuple[ThreadStack, ...] | Unseen:
        if self._tool is None:
            return MISSING
        if self._reader is None:
            return await self._threads_of(self._tool, pid)
        share = PY_SPYS_SHARE * self._within - (self._within - (self._ends_at - time.monotonic()))
        with anyio.move_on_after(share):
            return await self._threads_of(self._tool, pid)
        return Unseen(f"py-spy did not answer within {PY_SPYS_SHARE * self._within:.3g} s")

    def _placed(self, member: Process, thread: ThreadStack, *, by_kernel: bool) -> ThreadStack:
        """Add what the kernel says of the thread, and leave out the middle of a deep stack."""
        frames = thread.frames
        if len(frames) > INNERMOST + OUTERMOST:
            frames = frames[:INNERMOST] + frames[-OUTERMOST:]
        channel = self._waits.get(member.identity, {}).get(thread.thread_id)
        call = self._calls.get(member.identity, {}).get(thread.thread_id, "")
        active = channel == "" if by_kernel else thread.active
        return replace(thread, frames=frames, wait_channel=channel, system_call=call, active=active)

    async def _see_waits(self, member: Process) -> None:
        """Look closer at what its threads wait in. What asks for the right to trace may block: in the lane."""
        stack = self._taken[member.identity]
        if isinstance(stack.wait_channel, Unseen):
            return
        try:
            waits = await self._ask(lambda: wait_channels(member.pid))
            calls = await self._ask(lambda: system_calls(member.pid))
        except OSError as error:
            waits = calls = Unseen(f"wchan: {error.strerror}")
        if isinstance(waits, Unseen):
            self._taken[member.identity] = replace(stack, wait_channel=waits)
            return
        self._waits[member.identity] = waits
        self._calls[member.identity] = calls = {} if isinstance(calls, Unseen) else calls
        others = tuple(sorted({channel for tid, channel in waits.items() if tid != member.pid}))
        main = waits.get(member.pid, stack.wait_channel)
        self._taken[member.identity] = replace(
            stack, wait_channel=main, other_channels=others, system_call=calls.get(member.pid, "")
        )

    async def _threads_of(self, tool: str, pid: int) -> tuple[ThreadStack, ...] | Unseen:
        argv = (tool, "dump", "--nonblocking", "--json", "--pid", str(pid))

        def start() -> tuple[subprocess.Popen[bytes], _Output, _Output]:
            answer, problem = _Output(), _Output()
            child = self.children.start(
                argv, stdin=subprocess.DEVNULL, stdout=answer.descriptor, stderr=problem.descriptor
            )
            return child, answer, problem

        try:
            started = await self._ask(start)
            if isinstance(started, Unseen):
                return started
            child, answer, problem = started
            code = await _wait(child)
        except OSError as error:
            return Unseen(f"py-spy cannot be run: {error}")
        return _understand(answer.read()) if code == 0 else _explain(code, problem.read())

    async def _is_python(self, pid: int) -> bool:
        """Tell by the program's name or by libpython. Where it cannot be told: yes, for then it is missed."""
        try:
            program = os.readlink(f"/proc/{pid}/exe")  # noqa: PTH115 - pathlib would resolve nothing more
            if os.path.basename(program).startswith("python"):  # noqa: PTH119
                return True
            # This read waits for the memory-map lock. py-spy, which has just ended, did get it.
            maps = await self._ask(Path(f"/proc/{pid}/maps").read_bytes)
        except OSError:
            return True
        return isinstance(maps, Unseen) or b"/libpython" in maps

    async def _ask(self, question: Callable[[], T]) -> T | Unseen:
        """Ask in the lane: one question at a time over all looks of this program, while there is time."""
        lane, in_use = _LANES.setdefault(os.getpid(), (Lane("py-spy"), threading.Lock()))
        while True:
            if in_use.acquire(blocking=False):
                try:
                    answer = await lane.ask(question, within=self._ends_at - time.monotonic())
                finally:
                    in_use.release()
                if not isinstance(answer, Unseen) or time.monotonic() >= self._ends_at:
                    return answer
            await anyio.sleep(0.002)  # somebody else's question, or one whose look was cancelled


class _Output:
    """A file in memory for what a child writes: nothing has to be drained, no disk can be full.

    It closes with its last reference, because a start that comes back too late has nobody to close it.
    """

    def __init__(self) -> None:
        try:
            self.descriptor = os.memfd_create("py-spy")
        except AttributeError:  # a Python built for glibc before 2.27
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())

    def __del__(self) -> None:
        with contextlib.suppress(AttributeError, OSError):
            os.close(self.descriptor)

    def read(self) -> bytes:
        """Return the first ``MOST_BYTES`` and one byte more, if there are as many."""
        return os.pread(self.descriptor, MOST_BYTES + 1, 0)


async def _wait(child: subprocess.Popen[bytes]) -> int:
    with contextlib.suppress(AttributeError, OSError):  # reaped by somebody else, or no pidfds here: poll() knows
        descriptor = os.pidfd_open(child.pid)
        try:
            await anyio.wait_readable(descriptor)
        finally:
            os.close(descriptor)
    while (code := child.poll()) is None:  # noqa: ASYNC110 - a moment, between its end and its being reapable
        await anyio.sleep(0.002)
    return code


def _understand(answer: bytes) -> tuple[ThreadStack, ...] | Unseen:
    """Read the JSON of py-spy 0.4 (its struct ``StackTrace``)."""
    if len(answer) > MOST_BYTES:
        return Unseen(f"the dump is larger than {MOST_BYTES >> 20} MiB")
    try:
        threads = [_read_thread(thread) for thread in json.loads(answer.decode(errors="replace"))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        return Unseen(f"py-spy's answer cannot be read: {error!r}")
    # Always the same order, the main thread first.
    return tuple(sorted(threads, key=lambda thread: (thread.name != "MainThread", thread.thread_id)))


def _read_thread(thread: dict[str, Any]) -> ThreadStack:
    frames = (
        StackFrame(
            function=str(frame["name"]).rpartition(".")[2],
            file=str(frame["filename"]),
            line=int(frame["line"]),
        )
        for frame in thread["frames"]
    )
    return ThreadStack(
        name=thread["thread_name"] or "",
        # Before Python 3.11 the interpreter does not know the kernel's number, only that of pthread_self; py-spy
        # then cannot ask the kernel whether the thread runs, and calls most threads active.
        thread_id=int(thread["os_thread_id"] or thread["thread_id"]),
        active=bool(thread["active"]),
        frames=tuple(frames),
    )


def _explain(code: int, problem: bytes) -> Unseen:
    """Make a sentence for people from the first line of py-spy's error. Nothing is decided by it."""
    text = problem.decode(errors="replace").strip()
    if text.lower().startswith("permission denied"):
        return Unseen("py-spy may not read this process: another user's, or ptrace is restricted here")
    first = text.partition("\n")[0].removeprefix("Error:").strip()
    return Unseen(f"py-spy: {first}" if first else f"py-spy ended with code {code}")


def _read_wait_channel(member: Process) -> str | Unseen:
    if not _lives(member):
        return ENDED
    try:
        os.readlink(f"/proc/{member.pid}/exe")  # noqa: PTH115 - the same permission; wchan itself would only say "0"
    except PermissionError:
        return Unseen("not permitted")
    except OSError:
        pass  # a kernel thread has no program
    try:
        channel = Path(f"/proc/{member.pid}/wchan").read_text(encoding="ascii", errors="replace")
    except OSError as error:
        return Unseen(f"wchan: {error.strerror}")
    return "" if channel == "0" else channel


def _lives(member: Process) -> bool:
    """Tell whether the pid still is this member. Fields 3 and 22 of proc_pid_stat(5): state, start time."""
    try:
        stat = Path(f"/proc/{member.pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    fields = stat.rpartition(")")[2].split()
    return int(fields[19]) == member.started
