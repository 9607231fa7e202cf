# ruff: noqa: PTH100, PTH118, PTH120
"""The process between supervisor and server: the server's parent, its reaper, and the only one that signals it.

Run as ``python -I -S guardian.py CONTROL DEATH SUPERVISOR``, three file descriptors: a socket to the
supervisor, the read end of a pipe whose write end the supervisor has, and a pidfd of the supervisor (or -1).
The pipe alone is not enough: a child that the supervisor forks keeps its write end open. A byte on the pipe
ends the grace of a stop (it can be written from a signal handler); its end, the socket's end or the pidfd
mean that the supervisor is gone.

The protocol is one JSON object a line, each with ``"v": 1``. The first line is the launch, so that no secret
of it stands in an argv. Bytes of argv, environment and paths travel as latin-1 text. Requests (``do``):
launch, stop, hurry, remember, files, heard, stacks, last-words, bye. Answers (``say``): launched, failed, exit, reaped,
progress, found, stopped, stacks, last-words, error. Stacks and last words carry the ``id`` of their question, and may
come late, in another order, or not at all; ``heard`` carries that of what was found.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import subprocess
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

    from hangguard import elsewhere, held
    from hangguard.act import _aside, _daemons, _lease, _left, _telling, _tree
else:
    import importlib.util

    def _load(name: str, folder: str = "act") -> object:
        path = os.path.join(os.path.dirname(os.path.abspath(__file__)), folder, name + ".py")
        spec = importlib.util.spec_from_file_location("hangguard" + name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    _tree, _aside, _daemons, _lease, _left = map(_load, ("_tree", "_aside", "_daemons", "_lease", "_left"))
    _telling = _load("_telling")
    held, elsewhere = _load("held", ""), _load("elsewhere", "")

PROTOCOL = 1
LONGEST_LINE = 64 << 20
LONGEST_QUEUE = 1 << 20
AGAIN = 5.0
"""Seconds until the next try when the supervisor is gone and something would not end."""
PR_SET_CHILD_SUBREAPER = 36


def main(arguments: list[str]) -> None:
    """Guard one launch, from the first message to the end."""
    control, death, supervisor = (int(text) for text in arguments)
    for fd in (control, death, supervisor):
        if fd >= 0:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    guardian = Guardian(socket.socket(fileno=control), death, supervisor)
    guardian.prepare()
    guardian.run()


class Refusal(Exception):
    """The launch cannot be started: which errno, and what it is about."""

    def __init__(self, number: int, what: str, path: str, problem: str) -> None:
        super().__init__(problem)
        self.fields = {"errno": number, "what": what, "path": path, "problem": problem}


class Guardian:
    """The loop. It owns the server and blocks on nothing but its poll."""

    def __init__(self, control: socket.socket, death: int, supervisor: int) -> None:
        self._line = Line(control)
        self._death = death
        self._supervisor = supervisor
        self._poll = select.poll()
        self._wake_reads, self._wake_writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._root: tuple[int, int] | None = None
        self._remembered: set[tuple[int, int]] = set()
        self._proofs: dict[tuple[int, int], str] = {}
        self._log_id: tuple[int, int] | None = None
        self._daemons: _daemons.Daemons | None = None
        self._port: int | None = None
        self._held: list[int] = []
        self._death_grace = 1.5
        self._on_death = "stop"
        self._ending: _tree.Ending | None = None
        self._due: float | None = None
        self._step = ""
        self._hurried = False
        self._told_to_end = False  # set by the handler of SIGTERM
        self._alone = False  # the supervisor is gone
        self._bye = False
        self._stopped = False
        self._childless = True
        self._over = False
        self._pristine = True
        self._aside = _aside.Aside(self._ring)
        self._left = _left.Left(self._aside, held=held, lease=_lease)
        self._telling = _telling.Telling(self._line.put, lambda: self._line.has_room)
        self._looked_last = False  # before the first SIGKILL
        self._ended: _tree.Ended | None = None  # and what it left is being removed

    # ------------------------------------------------------------------------------------ beginning

    def prepare(self) -> None:
        """Become the reaper of all orphans below, and deaf to the terminal."""
        signal.set_wakeup_fd(self._wake_writes, warn_on_full_buffer=False)
        # What the user's program ignores (nohup, a job in the background) would be ignored by the server too.
        for number in signal.valid_signals() - {signal.SIGPIPE, getattr(signal, "SIGXFSZ", signal.SIGPIPE)}:
            if signal.getsignal(number) is signal.SIG_IGN:
                signal.signal(number, signal.SIG_DFL)
        # Handlers, because an ignored signal is inherited over exec and a handler is not.
        for number in (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGCHLD):
            signal.signal(number, _do_nothing)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        _become_subreaper()
        os.set_blocking(self._death, False)
        for fd in (self._line.fileno(), self._death, self._supervisor, self._wake_reads):
            if fd >= 0:
                self._poll.register(fd, select.POLLIN)

    def _on_sigterm(self, number: int, frame: object) -> None:
        del number, frame
        self._told_to_end = True

    def _ring(self) -> None:
        with contextlib.suppress(OSError):  # full: then it wakes anyhow
            os.write(self._wake_writes, b"a")

    def _launch(self, message: dict[str, Any]) -> None:
        try:
            self._root = self._start(message)
        except Refusal as refusal:
            self._line.put("failed", **refusal.fields)
            self._over = True
            return
        self._proofs[self._root] = _tree.LAUNCHED
        self._daemons = self._new_daemons()
        before = None if self._left.before is None else sorted(self._left.before)
        self._line.put("launched", pid=self._root[0], started=self._root[1], log=self._log_id, before=before)

    def _start(self, message: dict[str, Any]) -> tuple[int, int]:
        self._death_grace = float(message["death_grace"])
        self._on_death = message["on_death"]
        self._pristine = bool(message["pristine"])
        self._port = message.get("port")
        if not message["pristine"]:
            # A core of a server is as large as its weights. One byte is too little for a file, and the only limit
            # that also keeps the kernel from handing the core to a program (fs/coredump.c). The hard limit stays.
            hard = resource.getrlimit(resource.RLIMIT_CORE)[1]
            resource.setrlimit(resource.RLIMIT_CORE, (1 if hard else 0, hard))
        if message["lock_path"] is not None:
            self._held.append(_open_lock(message["lock_path"]))
        log = subprocess.DEVNULL
        if message["log_path"] is not None:
            log = self._open_log(message["log_path"])
        cwd = _bytes(message["cwd"])
        self._left.note_before()
        self._left.elsewhere = elsewhere.received(message["elsewhere"])
        try:
            process = subprocess.Popen(
                [_bytes(part) for part in message["argv"]],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=cwd,
                env={_bytes(name): _bytes(value) for name, value in message["env"].items()},
                start_new_session=True,
                close_fds=True,
            )
        except (OSError, ValueError, IndexError) as error:
            raise _refusal(error, message, cwd) from error
        finally:
            if log >= 0:
                os.close(log)
        process.returncode = 0  # reaped here, by waitpid(-1): Popen must not try
        self._childless = False
        entry = _tree.read_entry(process.pid)
        return (process.pid, entry.started if entry else 0)

    def _open_log(self, path: str) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            log = os.open(_bytes(path), flags, 0o600)
        except OSError as error:
            raise Refusal(error.errno or errno.EIO, "log", path, error.strerror or str(error)) from error
        os.set_blocking(log, True)
        status = os.fstat(log)
        if not stat.S_ISREG(status.st_mode):
            raise Refusal(errno.EINVAL, "log", path, "it is not a regular file")
        if status.st_nlink > 1:
            raise Refusal(errno.EMLINK, "log", path, "it has another name, so it may be somebody's file")
        # Writing to the log is what makes a process a member, so it must be this launch's own. The lock goes
        # with the descriptor: it is free again when the last member that has the log is gone.
        self._held.append(os.dup(log))
        _lock(log, "log", path)
        self._log_id = (status.st_dev, status.st_ino)
        writers = _tree.log_writers(self._log_id, _tree.read_entries())
        if writers:
            raise Refusal(errno.EBUSY, "log", path, f"process {min(writers)} writes to it already")
        return log

    # ----------------------------------------------------------------------------------------- loop

    def run(self) -> None:
        """Turn until nothing is left to guard."""
        while not self._over:
            self._turn()
        self._line.flush()

    def _turn(self) -> None:
        for fd, _ in self._poll.poll(self._timeout()):
            if fd == self._wake_reads:
                _drain(fd)
            elif fd == self._supervisor:
                self._lose_supervisor()
            elif fd == self._death:
                self._read_death_pipe()
            else:
                self._read_messages()
        if self._told_to_end:
            self._obey_sigterm()
        self._reap()
        self._go_on()
        for answer in self._aside.answers():
            if self._left.hear(answer):
                self._due = time.monotonic()
            elif "of" not in answer:
                self._line.put(**answer)
        self._tell_finds()
        if not self._alone:
            self._poll.modify(self._line.fileno(), select.POLLIN | (select.POLLOUT if self._line.waits else 0))
        self._over = self._over or self._has_nothing_to_do()

    def _timeout(self) -> int | None:
        if self._due is None:
            return None
        return max(0, int((self._due - time.monotonic()) * 1000) + 1)

    def _has_nothing_to_do(self) -> bool:
        if self._ending is not None or self._due is not None:
            return False
        if self._bye and self._stopped:
            return True
        return self._alone and (self._root is None or self._childless or self._has_daemons_only())

    def _has_daemons_only(self) -> bool:
        """Whether all that is left below is left alone: it is nobody's to wait for."""
        try:
            left = self._find_members(_tree.read_entries())
            children = {entry.identity if (entry := _tree.read_entry(pid)) else None for pid in _tree.own_children()}
        except OSError:
            return False
        return not left and self._daemons is not None and children <= set(self._daemons.left)

    def _read_death_pipe(self) -> None:
        with contextlib.suppress(BlockingIOError):
            if not os.read(self._death, 512):
                self._lose_supervisor()
            else:
                self._hurry()

    def _hurry(self) -> None:
        """End the grace, also when the bell was faster than the request to stop."""
        self._hurried = True
        if self._ending is not None:
            self._ending.hurry()

    def _read_messages(self) -> None:
        for text in self._line.take():
            self._obey(text)
        if self._line.ended:
            self._lose_supervisor()

    def _lose_supervisor(self) -> None:
        if self._alone:
            return
        self._alone = self._line.ended = True
        for fd in (self._line.fileno(), self._death, self._supervisor):
            if fd >= 0:
                self._poll.unregister(fd)
        if self._ending is not None:
            self._ending.shorten(time.monotonic() + self._death_grace)
            self._due = time.monotonic()
        elif self._on_death == "stop" and self._root is not None and not (self._bye and self._stopped):
            self._begin_ending(self._death_grace)

    def _obey_sigterm(self) -> None:
        self._told_to_end = False
        if self._root is None or (self._stopped and self._childless):
            self._over = True
        else:
            self._begin_ending(self._death_grace)

    # ----------------------------------------------------------------------------------------- requests

    def _obey(self, text: bytes) -> None:
        try:
            message = json.loads(text)
            version, what = message["v"], message["do"]
        except (ValueError, TypeError, KeyError):
            version, what, message = None, None, {}
        if version != PROTOCOL:
            self._complain(f"protocol {version} is not spoken here, only {PROTOCOL}")
        elif what == "launch" and self._root is None:
            self._launch(message)
        elif what == "stop":
            self._begin_ending(float(message["grace"]))
        elif what == "hurry":
            self._hurry()
        elif what == "remember":
            self._remembered.update((int(pid), int(started)) for pid, started in message["members"])
        elif what == "files":
            self._left.remember(_lease.received(message["new"]))
            self._left.forget(_lease.received(message["gone"]))
            self._left.leave_to_others(message["others"])
        elif what == "heard":
            self._hear_of_finds(int(message["id"]))
        elif what == "stacks":
            self._read_stack(message)
        elif what == "last-words":
            self._ask_last_words(message)
        elif what == "bye":
            self._bye = True
            if not self._stopped:
                self._lose_supervisor()
        else:
            self._complain(f"there is no request {what!r} now")

    def _complain(self, problem: str) -> None:
        self._line.put("error", problem=problem)
        if self._root is None:
            self._over = True

    # ------------------------------------------------------------------------------------------- aside

    def _read_stack(self, message: dict[str, Any]) -> None:
        identity, within = (int(message["pid"]), int(message["started"])), float(message["within"])
        known, find = self._members_for_aside()
        self._aside.do(
            lambda: _aside.read_stack(
                identity, lambda: identity in known or identity in find(_tree.read_entries()), within=within
            ),
            within=within,
            label={"say": "stacks", "id": message["id"]},
        )

    def _ask_last_words(self, message: dict[str, Any]) -> None:
        label = {"say": "last-words", "id": message["id"]}
        wanted = [(int(pid), int(started)) for pid, started in message["members"]]
        if self._pristine or self._is_ending() or self._log_id is None:
            self._line.put(**label, heard=[], log_ends=0)
            return
        _, find = self._members_for_aside()
        log, within = self._held[-1], float(message["within"])
        self._aside.do(
            lambda: _aside.last_words(
                wanted,
                tree=_tree,
                find=find,
                log_size=lambda: os.fstat(log).st_size,
                is_over=self._is_ending,
                within=within,
            ),
            within=within,
            label=label,
        )

    def _is_ending(self) -> bool:
        """Whether a stop was asked for, or the supervisor is gone: then nothing is done to a member but that."""
        return self._ending is not None or self._ended is not None or self._stopped or self._alone

    def _members_for_aside(self) -> tuple[set[tuple[int, int]], Callable[[Mapping[int, _tree.Entry]], Any]]:
        """Return who is known, and the search for members, of copies: another thread uses them."""
        known = set(self._remembered) | ({self._root} if self._root is not None else set())
        below, log_id = [os.getpid()], self._log_id
        spare = None if self._root is None else self._new_daemons().spare  # asked before a launch: nobody is a member
        return known, lambda entries: _tree.find_members(
            entries, below=below, remembered=known, log_id=log_id, spare=spare
        )

    def _new_daemons(self) -> _daemons.Daemons:
        assert self._root is not None
        return _daemons.Daemons(_tree, root_pid=self._root[0], log_id=self._log_id, port=self._port)

    # ------------------------------------------------------------------------------------------- ending

    def _begin_ending(self, grace: float) -> None:
        if self._ended is not None:  # only its files are still to be removed, and then the answer comes
            return
        if self._ending is None:
            _, find = self._members_for_aside()
            self._telling.begin()
            self._left.look(lambda: find(_tree.read_entries()))
            self._ending = _tree.Ending(
                self._find_members,
                root=self._root,
                grace=grace,
                children=self._living_children,
                daemons=self._daemons,
                proofs=self._proofs,
                hold=self._look_before_killing,
            )
            self._looked_last = False
            self._step = ""
            if self._hurried:
                self._ending.hurry()
        else:
            self._ending.shorten(time.monotonic() + grace)
        self._due = time.monotonic()

    def _glance(self, *, at_once: bool = False) -> None:
        _, find = self._members_for_aside()
        self._left.glance(lambda: find(_tree.read_entries()), at_once=at_once)

    def _look_before_killing(self) -> bool:
        """Look at what members have made since they were asked to end; say whether that still takes time."""
        if not self._left.glances_until(alone=self._alone) and not self._looked_last:
            self._looked_last = True
            self._glance(at_once=True)
        looks_until = self._left.glances_until(alone=self._alone)
        self._tell_finds()
        return bool(looks_until or self._telling.holds_until(alone=self._alone))

    def _tell_finds(self) -> None:
        """Send what the looks have found, as far as it can be sent now, with all else that is still to be sent."""
        files, others = self._left.news()
        self._telling.add(_lease.carried(files), others)
        self._line.flush()

    def _hear_of_finds(self, number: int) -> None:
        self._telling.hear(number)
        if self._ending is not None:
            self._due = time.monotonic()

    def _find_members(self, entries: Mapping[int, _tree.Entry]) -> set[tuple[int, int]]:
        spare = None if self._daemons is None else self._daemons.spare
        return _tree.find_members(
            entries,
            below=[os.getpid()],
            remembered=self._remembered,
            log_id=self._log_id,
            spare=spare,
            proofs=self._proofs,
        )

    def _living_children(self) -> list[int]:
        self._reap()
        return _tree.own_children()

    def _go_on(self) -> None:
        if self._due is None or time.monotonic() < self._due:
            return
        if self._ended is not None:
            self._tell_end(self._ended)
            return
        if self._ending is None:  # alone, with something that would not end
            self._begin_ending(0.0)
        assert self._ending is not None
        if looks_until := self._left.looks_until(alone=self._alone):  # before anybody is signalled
            self._due = looks_until
            return
        self._tell_finds()
        if self._ending.step == "asking" and (until := self._telling.holds_until(alone=self._alone)):
            self._due = until
            return
        try:
            self._due = self._ending.tick(time.monotonic())
        except OSError:  # no memory or no descriptors now (ENOMEM, ENFILE): nobody was seen to be gone
            self._due = time.monotonic() + 0.2
        if self._ending.step != self._step:
            self._step = self._ending.step
            self._line.put("progress", step=self._step, left=self._ending.left)
        if self._ending.step == "grace":
            self._glance()
        if self._ending.result is not None:
            if until := self._left.glances_until(alone=self._alone):  # what it sees is still to be removed
                self._due = until
                return
            self._finish_ending(self._ending.result)

    def _finish_ending(self, result: _tree.Ended) -> None:
        self._reap()
        self._ending, self._ended = None, result
        until = 0.0 if result.survivors else self._left.clear()
        self._due = until or None
        if not until:
            self._tell_end(result)

    def _tell_end(self, result: _tree.Ended) -> None:
        """Tell what the end came to: what the members left is dealt with, or there was no more time."""
        self._ended, self._stopped = None, True
        files = _lease.carried(self._left.outcome("a member lives"))
        self._line.put(
            "stopped",
            survivors=result.survivors,
            daemons=result.daemons,
            processes=result.processes,
            members=sorted(result.members),
            files=files,
            files_unseen=self._left.unseen,
        )
        self._due = time.monotonic() + AGAIN if self._alone and result.survivors else None

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            self._childless = True
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                entry = None
                with contextlib.suppress(OSError):
                    entry = _tree.read_entry(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                code = os.waitstatus_to_exitcode(status)
                what = "exit" if self._root and ended.si_pid == self._root[0] else "reaped"
                self._line.put(what, pid=ended.si_pid, started=entry.started if entry else 0, code=code)
            self._childless = False


class Line:
    """Messages over the socket, which may be slow, full or gone: nothing here ever waits."""

    def __init__(self, control: socket.socket) -> None:
        control.settimeout(0.0)
        self._socket = control
        self._received = bytearray()
        self._queue: list[bytes] = []
        self._queued = 0
        self.ended = False

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._socket.fileno()

    @property
    def waits(self) -> bool:
        """Whether something is still to be sent."""
        return bool(self._queue) and not self.ended

    @property
    def has_room(self) -> bool:
        """Whether whoever reads has kept up so far."""
        return self._queued <= LONGEST_QUEUE

    def take(self) -> list[bytes]:
        """Return the lines that have arrived."""
        with contextlib.suppress(BlockingIOError):
            while not self.ended:
                try:
                    received = self._socket.recv(1 << 18)
                except ConnectionError:
                    received = b""
                self._received += received
                self.ended = not received or len(self._received) > LONGEST_LINE
        *lines, rest = bytes(self._received).split(b"\n")
        self._received = bytearray(rest)
        return lines

    def put(self, say: str, **fields: object) -> None:
        """Queue a message; news of orphans and progress are dropped when nobody reads."""
        if self.ended or (not self.has_room and say in {"reaped", "progress"}):
            return
        text = json.dumps({"v": PROTOCOL, "say": say, **fields}).encode() + b"\n"
        self._queue.append(text)
        self._queued += len(text)

    def flush(self) -> None:
        """Send what can be sent now."""
        try:
            while self.waits:
                sent = self._socket.send(self._queue[0], socket.MSG_NOSIGNAL)
                self._queued -= sent
                self._queue[0] = self._queue[0][sent:]
                if not self._queue[0]:
                    del self._queue[0]
        except BlockingIOError:
            return
        except OSError:
            self.ended = True


def _become_subreaper() -> None:
    # Without it (no ctypes in this Python) orphans go to pid 1; the log still tells whose they are.
    with contextlib.suppress(ImportError, OSError):
        import ctypes  # noqa: PLC0415  it may be missing

        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _refusal(error: Exception, message: dict[str, Any], cwd: bytes) -> Refusal:
    number = getattr(error, "errno", None) or errno.EINVAL
    problem = getattr(error, "strerror", None) or str(error)
    if getattr(error, "filename", None) == cwd:  # Popen tells by the name whether chdir failed, or exec
        return Refusal(number, "directory", message["cwd"], problem)
    return Refusal(number, "command", "".join(message["argv"][:1]), problem)


def _open_lock(path: str) -> int:
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(_bytes(path), flags, 0o600)
    except OSError as error:
        raise Refusal(error.errno or errno.EIO, "lock", path, error.strerror or str(error)) from error
    _lock(fd, "lock", path)
    return fd


def _lock(fd: int, what: str, path: str) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise Refusal(errno.EBUSY, what, path, "another launch has it") from error
    except OSError as error:
        raise Refusal(error.errno or errno.EIO, what, path, error.strerror or str(error)) from error


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


def _drain(fd: int) -> None:
    with contextlib.suppress(BlockingIOError):
        while os.read(fd, 4096):
            pass


def _do_nothing(number: int, frame: object) -> None:
    del number, frame


if __name__ == "__main__":
    main(sys.argv[1:])
