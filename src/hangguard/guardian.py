# ruff: noqa: PTH100, PTH120
"""The process between supervisor and server: the server's parent, its reaper, and the only one that signals it.

Run as ``python -I -S guardian.py CONTROL DEATH SUPERVISOR``, three file descriptors: a socket to the
supervisor, the read end of a pipe whose write end the supervisor has, and a pidfd of the supervisor (or -1).
The pipe alone is not enough: a child that the supervisor forks keeps its write end open. A byte on the pipe
ends the grace of a stop (it can be written from a signal handler); its end, the socket's end or the pidfd
mean that the supervisor is gone.

The protocol is one JSON object a line, each with ``"v": 1``. The first line is the launch, so that no secret
of it stands in an argv. Bytes of argv, environment and paths travel as latin-1 text. Requests (``do``):
launch, stop, hurry, remember, files, heard, stacks, last-words, bye. Answers (``say``): launched, failed, exit, reaped,
progress, found, spared, stopped, stacks, last-words, error. Stacks and last words carry the ``id`` of their question,
and may come late, in another order, or not at all; ``heard`` carries that of what was found.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import select
import socket
import subprocess
import sys
import time

if __name__ == "__main__":
    # The package itself would import all of hangguard, and what that needs: here it is the place of its parts, no more.
    _package = sys.modules["hangguard"] = type(sys)("hangguard")
    _package.__path__ = [os.path.dirname(os.path.abspath(__file__))]

from hangguard import elsewhere
from hangguard.act import (
    _aside,
    _daemons,
    _ending,
    _lease,
    _left,
    _line,
    _membership,
    _reaper,
    _starting,
    _telling,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any

AGAIN = 5.0
"""Seconds until the next try when the supervisor is gone and something would not end."""


def main(arguments: list[str]) -> None:
    """Guard one launch, from the first message to the end."""
    control, death, supervisor = (int(text) for text in arguments)
    for fd in (control, death, supervisor):
        if fd >= 0:
            fcntl.fcntl(fd, fcntl.F_SETFD, fcntl.FD_CLOEXEC)
    guardian = Guardian(socket.socket(fileno=control), death, supervisor)
    guardian.prepare()
    guardian.run()


class Guardian:
    """The loop. It owns the server and blocks on nothing but its poll."""

    def __init__(self, control: socket.socket, death: int, supervisor: int) -> None:
        self._line = _line.Line(control)
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
        self._ending: _ending.Ending | None = None
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
        self._left = _left.Left(self._aside)
        self._telling = _telling.Telling(self._line.put, lambda: self._line.has_room)
        self._looked_last = False  # before the first SIGKILL
        self._ended: _ending.Ended | None = None  # and what it left is being removed

    # ------------------------------------------------------------------------------------ beginning

    def prepare(self) -> None:
        """Become the reaper of all orphans below, and deaf to the terminal."""
        _reaper.become_reaper(self._on_sigterm, self._wake_writes)
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
        except _starting.Refusal as refusal:
            self._line.put("failed", **refusal.fields)
            self._over = True
            return
        self._proofs[self._root] = _membership.LAUNCHED
        self._daemons = _daemons.Daemons(root_pid=self._root[0], log_id=self._log_id, port=self._port)
        before = None if self._left.before is None else sorted(self._left.before)
        self._line.put("launched", pid=self._root[0], started=self._root[1], log=self._log_id, before=before)

    def _start(self, message: dict[str, Any]) -> tuple[int, int]:
        self._death_grace = float(message["death_grace"])
        self._on_death = message["on_death"]
        self._pristine = bool(message["pristine"])
        self._port = message.get("port")
        if not self._pristine:
            _starting.limit_cores()
        if message["lock_path"] is not None:
            self._held.append(_starting.open_lock(message["lock_path"]))
        log = subprocess.DEVNULL
        if message["log_path"] is not None:
            log = self._open_log(message["log_path"])
        self._left.note_before()
        self._left.elsewhere = elsewhere.received(message["elsewhere"])
        pid = _starting.start(message, log)
        self._childless = False
        entry = _membership.read_entry(pid)
        return (pid, entry.started if entry else 0)

    def _open_log(self, path: str) -> int:
        log, self._log_id = _starting.open_log(path)
        self._held.append(os.dup(log))
        writers = _membership.log_writers(self._log_id, _membership.read_entries())
        if writers:
            raise _starting.Refusal(errno.EBUSY, "log", path, f"process {min(writers)} writes to it already")
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
                _reaper.drain(fd)
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
            left = self._find_members(_membership.read_entries())
            children = {
                entry.identity if (entry := _membership.read_entry(pid)) else None for pid in _membership.own_children()
            }
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
        if version != _line.PROTOCOL:
            self._complain(f"protocol {version} is not spoken here, only {_line.PROTOCOL}")
        elif what == "launch" and self._root is None:
            self._launch(message)
        elif what == "stop":
            self._begin_ending(float(message["grace"]))
        elif what == "hurry":
            self._hurry()
        elif what == "remember":
            self._remember({(int(pid), int(started)) for pid, started in message["members"]})
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

    def _remember(self, members: set[tuple[int, int]]) -> None:
        self._remembered |= members
        if self._daemons is None or self._is_ending() or not self._daemons.may_be_among(members):
            return
        # A job of a tmux below is seen to be that one's as long as its shell lives, and then it is a child of ours.
        with contextlib.suppress(OSError):
            entries = _membership.read_entries()
            self._daemons.spare(_membership.descendants([os.getpid()], entries), entries)
        if (news := self._daemons.news()) is not None:
            self._line.put("spared", who=news)

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
                identity, lambda: identity in known or identity in find(_membership.read_entries()), within=within
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

    def _members_for_aside(self) -> tuple[set[tuple[int, int]], Callable[[Mapping[int, _membership.Entry]], Any]]:
        """Return who is known, and the search for members, of copies: another thread uses them."""
        known = set(self._remembered) | ({self._root} if self._root is not None else set())
        below, log_id = [os.getpid()], self._log_id
        spare = None if self._daemons is None else self._daemons.copy().spare  # before a launch nobody is a member
        return known, lambda entries: _membership.find_members(
            entries, below=below, remembered=known, log_id=log_id, spare=spare
        )

    # ------------------------------------------------------------------------------------------- ending

    def _begin_ending(self, grace: float) -> None:
        if self._ended is not None:  # only its files are still to be removed, and then the answer comes
            return
        if self._ending is None:
            _, find = self._members_for_aside()
            self._telling.begin()
            self._left.look(lambda: find(_membership.read_entries()))
            self._ending = _ending.Ending(
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
        self._left.glance(lambda: find(_membership.read_entries()), at_once=at_once)

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

    def _find_members(self, entries: Mapping[int, _membership.Entry]) -> set[tuple[int, int]]:
        spare = None if self._daemons is None else self._daemons.spare
        return _membership.find_members(
            entries,
            below=[os.getpid()],
            remembered=self._remembered,
            log_id=self._log_id,
            spare=spare,
            proofs=self._proofs,
        )

    def _living_children(self) -> list[int]:
        self._reap()
        return _membership.own_children()

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

    def _finish_ending(self, result: _ending.Ended) -> None:
        self._reap()
        self._ending, self._ended = None, result
        until = 0.0 if result.survivors else self._left.clear()
        self._due = until or None
        if not until:
            self._tell_end(result)

    def _tell_end(self, result: _ending.Ended) -> None:
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
                    entry = _membership.read_entry(ended.si_pid)
                _, status = os.waitpid(ended.si_pid, 0)
                code = os.waitstatus_to_exitcode(status)
                what = "exit" if self._root and ended.si_pid == self._root[0] else "reaped"
                self._line.put(what, pid=ended.si_pid, started=entry.started if entry else 0, code=code)
            self._childless = False


if __name__ == "__main__":
    main(sys.argv[1:])
