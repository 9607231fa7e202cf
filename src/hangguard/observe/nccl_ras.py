"""NCCL's own account of its communicators, from the RAS thread that NCCL (2.24 and later) runs in every rank.

https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/troubleshooting/ras.html
"""

from __future__ import annotations

import errno
import os
import re
import socket
import time
from dataclasses import replace
from typing import ClassVar, NamedTuple

import anyio

from hangguard.facts import NOT_ASKED, Ask, Communicator, Process, Unseen
from hangguard.observe._nccl_members import answers_here, names_of, version_of_nccl
from hangguard.observe._ras_answer import read_json, read_text
from hangguard.observe.lane import Lane
from hangguard.observe.target import Shared, Target

SAFE_SINCE = (2, 29, 2)
"""Before, a question while a rank is missing overwrites memory of the process that answers, and before 2.27.3 any
question during the making of a communicator may crash it: https://github.com/NVIDIA/nccl/issues/1762, 1669, 1718.
In 2.29 the report for people can still crash it then (2346), so only JSON is asked for."""

_ALTOGETHER = 3.0
_HELLO_WITHIN = 0.6
"""The RAS thread says hello by itself, whatever the communicators do. Measured: 0.3-0.6 s for a whole answer."""
_TRIES = 3
"""All ranks of a machine listen on the same port (SO_REUSEPORT), and another try reaches another rank as a rule."""
_MOST_BYTES = 16 << 20

_REPLY_TO_WISH = re.compile(r"(OK|ERROR: [^\n]*)\r?\n")
"""To TIMEOUT and SET FORMAT; a version that does not know JSON says so, and answers in text."""

_REFUSED = "refused: there is no communicator yet (or NCCL is older than 2.24, or has NCCL_RAS_ENABLE=0)"


class CommunicatorsProbe:
    """Asks NCCL, when asked, and believes only answers of this launch's own processes.

    A question can crash a server with an older NCCL (:data:`SAFE_SINCE`); such a one is only asked in a look that
    is its last (``Ask.last``). Whether anybody listens, and says hello, is looked at always.
    """

    field: ClassVar[str] = "communicators"
    after: ClassVar[tuple[str, ...]] = ("tree",)

    def __init__(self, target: Target, shared: Shared, *, proc: str = "/proc") -> None:
        self._address = target.ras_address
        self._nodes = target.launch.nodes
        self._within = min(_ALTOGETHER, 0.9 * target.probe_within)
        self._shared = shared
        self._proc = proc
        self._lane = Lane("nccl ras", target.rights)

    async def look(self, ask: Ask) -> tuple[Communicator, ...] | Unseen:
        """Return the communicators, or why NCCL did not tell."""
        if not ask.communicators:
            return NOT_ASKED
        if self._address is None:
            return Unseen("this launch was given no NCCL_RAS_ADDR of its own")
        tree = self._shared.tree
        if isinstance(tree, Unseen):
            return Unseen(f"the members are unseen: {tree.reason}")
        members = [member for member in tree.members if member.state not in "ZX"]
        until = time.monotonic() + self._within
        try:
            return await self._ask(members, is_last=ask.last, until=until)
        except OSError as problem:
            if problem.errno == errno.ECONNREFUSED:
                return Unseen(_REFUSED)
            return Unseen(f"NCCL's RAS thread: {problem.strerror or type(problem).__name__}")

    async def aclose(self) -> None:
        """Let the thread go."""
        self._lane.close()

    async def _ask(self, members: list[Process], *, is_last: bool, until: float) -> tuple[Communicator, ...] | Unseen:
        assert self._address is not None
        if not _is_number(self._address[0]) and self._address[0] != "localhost":
            return Unseen(f"NCCL_RAS_ADDR is neither a numeric address nor localhost: {self._address[0]}")
        version = await self._lane.ask(lambda: version_of_nccl(self._proc, members), within=_HELLO_WITHIN)
        is_safe = isinstance(version, tuple) and version >= SAFE_SINCE
        problem = Unseen("no answer in time")
        for form in ("json",) if is_safe else ("json", "text"):
            reason = None if is_safe or is_last else _not_asked(version)
            answer = await self._answer(form, members, until, unless=reason)
            if isinstance(answer, Unseen):
                return answer
            try:
                told = read_json(answer.text) if answer.text.startswith("{") else read_text(answer.text)
            except ValueError as unreadable:  # no form that is known, or a number that Python does not read
                problem = Unseen(f"the answer of NCCL cannot be read: {unreadable}")
                continue
            names = await self._lane.ask(lambda: names_of(self._proc, members), within=_HELLO_WITHIN)
            if not answer.is_ours and not any(communicator.pids for communicator in told):
                return Unseen("it cannot be told whose answer it is: the descriptors of the members are hidden")
            return self._believe(told, {} if isinstance(names, Unseen) else names, members)
        return problem

    async def _answer(
        self, form: str, members: list[Process], until: float, *, unless: Unseen | None
    ) -> _Answer | Unseen:
        """Return the whole answer in this form, or why there is none. ``unless``: say hello only, for that reason."""
        assert self._address is not None
        for _ in range(_TRIES):
            with await _connect(self._address, until) as connection:
                hello = await _hello(connection, min(until, time.monotonic() + _HELLO_WITHIN))
                if hello is None:
                    continue
                if not hello.upper().startswith(b"SERVER PROTOCOL "):
                    return Unseen(f"port {self._address[1]} is not answered by NCCL: {hello[:40]!r}")
                is_ours = await self._is_ours(connection, members)
                if is_ours is False:
                    return Unseen(f"port {self._address[1]} answers for other processes")
                status = unless or await _status(connection, form, until)
                return status if isinstance(status, Unseen) else _Answer(status, is_ours=bool(is_ours))
        stopped = [member.pid for member in members if member.state in "Tt"]
        who = f"stopped (pid {', '.join(map(str, stopped))})" if stopped else "stopped, or its RAS thread hangs"
        return Unseen(f"accepts and never answers: the process that listens is {who}")

    async def _is_ours(self, connection: socket.socket, members: list[Process]) -> bool | None:
        ours, theirs = connection.getsockname()[1], connection.getpeername()[1]
        answer = await self._lane.ask(lambda: answers_here(self._proc, members, ours, theirs), within=_HELLO_WITHIN)
        return None if isinstance(answer, Unseen) else answer

    def _believe(
        self, told: tuple[Communicator, ...], names: dict[int, int], members: list[Process]
    ) -> tuple[Communicator, ...] | Unseen:
        """Return the communicators with our own numbers of the processes, if they are those of this launch."""
        tree = self._shared.tree
        departed = {gone.pid for gone in tree.departed} if not isinstance(tree, Unseen) else set()
        known = {member.pid for member in members} | set(names) | departed
        pids = {pid for communicator in told for _rank, pid in communicator.pids}
        strangers = sorted(pids - known)
        # Of a launch over several machines the ranks elsewhere have pids that mean nothing here.
        if pids and (strangers if self._nodes == 1 else not pids & known):
            return Unseen(f"answers for other processes: pid {', '.join(map(str, strangers[:8]))}")
        return tuple(
            replace(communicator, pids=tuple((rank, names.get(pid, pid)) for rank, pid in communicator.pids))
            for communicator in told
        )


class _Answer(NamedTuple):
    text: str
    is_ours: bool
    """Whether the other end of the connection was found among the members' descriptors."""


def _not_asked(version: tuple[int, ...] | Unseen | None) -> Unseen:
    which = ".".join(map(str, version)) if isinstance(version, tuple) else "of unknown version"
    since = ".".join(map(str, SAFE_SINCE))
    return Unseen(f"says hello; not asked more, because a question may crash NCCL {which} (safe from {since} on)")


async def _connect(address: tuple[str, int], until: float) -> socket.socket:
    """Return a connected socket that does not block. Raises OSError.

    NCCL listens on the first address of the name that it was given, and ``localhost`` may begin with either.
    """
    host, port = address
    if host != "localhost":
        return await _connect_to(address, until)
    try:
        return await _connect_to(("127.0.0.1", port), until)
    except ConnectionRefusedError as refused:
        try:
            return await _connect_to(("::1", port), until)
        except OSError:
            raise refused from None


async def _connect_to(address: tuple[str, int], until: float) -> socket.socket:
    connection = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
    try:
        connection.settimeout(0.0)
        code = connection.connect_ex(address)
        if code == errno.EINPROGRESS:
            with anyio.fail_after(max(0.0, until - time.monotonic())):
                await anyio.wait_writable(connection)
            code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        _check(code)
    except BaseException:
        connection.close()
        raise
    return connection


def _check(code: int) -> None:
    if code:
        raise OSError(code, os.strerror(code))


async def _hello(connection: socket.socket, until: float) -> bytes | None:
    """Return the first line of the other side; ``None``: it says nothing."""
    connection.send(b"CLIENT PROTOCOL 2\n")  # the buffer is empty: never blocks
    received, is_whole = await _receive(connection, until, end=b"\n", most=4096)
    return received if received or is_whole else None


async def _status(connection: socket.socket, form: str, until: float) -> str | Unseen:
    """Ask, and return what comes until the end. Every rank has 1 s to answer the one that we ask."""
    wish = b"SET FORMAT json\n" if form == "json" else b""
    connection.send(b"TIMEOUT 1\n" + wish + b"VERBOSE STATUS\n")
    received, is_whole = await _receive(connection, until, end=None, most=_MOST_BYTES)
    if len(received) >= _MOST_BYTES:
        return Unseen(f"the answer of NCCL is longer than {_MOST_BYTES >> 20} MiB")
    if not is_whole:
        return Unseen("NCCL accepted the question, and has no answer of all its processes in time")
    text = received.decode(errors="replace")
    while _REPLY_TO_WISH.match(text):
        text = text.partition("\n")[2]
    return text


async def _receive(connection: socket.socket, until: float, *, end: bytes | None, most: int) -> tuple[bytes, bool]:
    """Return what came, and whether that is all of it: up to ``end``, or until the other side closed."""
    received = bytearray()
    with anyio.move_on_after(max(0.0, until - time.monotonic())):
        while len(received) < most:
            await anyio.wait_readable(connection)
            try:
                chunk = connection.recv(1 << 16)
            except BlockingIOError:
                continue
            received += chunk
            if not chunk or (end is not None and end in received):
                return bytes(received), True
    return bytes(received), False


def _is_number(host: str) -> bool:
    """Tell whether it is an address: the lookup of a name would block."""
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:
        return False
    return True
