# ruff: noqa: SLF001  guarded() and Guarded are one thing in two forms
"""Start a server under a guardian, and stop it: the supervisor's side of ``guardian.py``."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import anyio

from hangguard import held
from hangguard.act import _daemons, _lease, _tree
from hangguard.act._left import LOOK_WITHIN
from hangguard.act._link import NEWS_WITHIN, START_WITHIN, Link, poll_until, start_guardian
from hangguard.act.files import as_removed, clear_files
from hangguard.act.told import Told, still_there
from hangguard.elsewhere import Elsewhere
from hangguard.errors import (
    CommandNotExecutable,
    CommandNotFound,
    GuardianFailed,
    HangguardError,
    WrongProcess,
)
from hangguard.facts import Daemon, EndedProcess, Exit, HeldFile, RemovedFile, Survivor, Unseen
from hangguard.observe import procfs
from hangguard.observe.lane import Lane
from hangguard.observe.memory_stacks import PythonThreads, read_directly, understand

Identity: TypeAlias = tuple[int, int]

TAKE_OVER_WITHIN = 15.0
"""An ending without grace takes at most this: settling, trackers, and scans of a large machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopped:
    """What a stop came to."""

    survivors: tuple[Survivor, ...]
    """Members that SIGKILL did not end."""
    ended: int
    """How many members are gone, over the whole stop."""
    seconds: float
    by: Literal["guardian", "supervisor"]
    """Who signalled: the supervisor does only when the guardian is dead."""
    files: tuple[RemovedFile, ...] = ()
    """What members were seen to have in /dev/shm and as named sockets, and what became of it after their end."""
    files_unseen: tuple[str, ...] = ()
    """What the last look before the first signal could not see of that."""
    unproved_files: tuple[str, ...] = ()
    """What the guardian alone, which is dead, has seen members have: nobody can prove it any more, so it stays."""
    daemons: tuple[Daemon, ...] = ()
    """Daemons of somebody else that the launch has started: left alone."""
    processes: tuple[EndedProcess, ...] = ()
    """Members that lived when the stop began, or began since, and are gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopProgress:
    """Where a stop is: asking, grace, killing, trackers, done; and how many members live."""

    step: str
    left: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LastWords:
    """What a member was asked to say before its end."""

    pid: int
    started: int
    begins: int | None
    """Where in the log, in bytes, its words begin; ``None``: it was not asked."""
    ends: int = 0
    """Where they end at the latest."""
    why_not: str = ""


@asynccontextmanager
async def guarded(
    *,
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str,
    log_path: str | None,
    lock_path: str | None,
    death_grace: float,
    on_death: str,
    pristine: bool,
    port: int | None = None,
    elsewhere: Elsewhere | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Guarded]:
    """Start ``argv`` under a guardian of its own; on leaving, whatever of it still lives is stopped.

    ``env`` is the whole environment. The server's output goes to ``log_path``, a file of this launch alone
    (``None``: nowhere); the guardian holds a lock on ``lock_path`` until it ends; whoever listens on ``port`` is no
    daemon of somebody else; what members leave ``elsewhere`` than in /dev/shm goes too, where it is told. What the body
    raises arrives as it is, never in a group.

    Raises :class:`CommandNotFound`, :class:`CommandNotExecutable`, or :class:`GuardianFailed` (also for a log
    or a lock that somebody else has).
    """
    elsewhere = elsewhere or Elsewhere()
    launch = {
        "do": "launch",
        "argv": [_text(part) for part in argv],
        "env": {_text(name): _text(value) for name, value in env.items()},
        "cwd": _path_text(cwd),
        "log_path": None if log_path is None else _path_text(log_path),
        "lock_path": None if lock_path is None else _path_text(lock_path),
        "death_grace": death_grace,
        "on_death": on_death,
        "pristine": pristine,
        "port": port,
        "elsewhere": elsewhere.carried(),
    }
    link = await start_guardian()
    leash = _Leash(link)
    guard = Guarded(link, death_grace=death_grace, clock=clock, elsewhere=elsewhere)
    try:
        await guard._launch(launch)
        # Not `async with`: a task group around the body would wrap what it raises, KeyboardInterrupt too.
        tasks = anyio.create_task_group()
        await tasks.__aenter__()
        try:
            # Not `await tasks.start(...)`: cancelled in that moment, it waits on asyncio for what only our end ends.
            guard._is_read = True
            tasks.start_soon(guard._follow)
            yield guard
        finally:
            with anyio.CancelScope(shield=True):
                await guard._leave()
            tasks.cancel_scope.cancel()
            await tasks.__aexit__(None, None, None)
    finally:
        try:
            with anyio.CancelScope(shield=True):
                await guard._see_guardian_end()
        finally:
            guard._close()
            del leash


class _Leash:
    """Hangs up when the frame of ``guarded()`` is thrown away with its event loop, without being left.

    The object that it hangs up for may live on then: its tasks are kept by the backend (anyio 4 on asyncio).
    """

    def __init__(self, link: Link) -> None:
        self._link = link
        self._owner = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self._owner:
            self._link.hang_up()


class Guarded:
    """A server with its guardian. Belongs to one event loop; :meth:`hurry` alone may be called from anywhere."""

    def __init__(
        self, link: Link, *, death_grace: float, clock: Callable[[], float], elsewhere: Elsewhere | None = None
    ) -> None:
        self.guardian_pid = link.process.pid
        self.guardian_started = link.started
        self.guardian_alive = True
        self.pid = 0
        self.started = 0
        self.log_id: tuple[int, int] | None = None
        """(device, inode) of the log."""
        self.exit: Exit | None = None
        """The end of the launched process; members may outlive it."""
        self.stopped: Stopped | None = None
        """The last stop, once it is done."""
        self.on_reaped: Callable[[Identity, int], None] | None = None
        """Called with (pid, start time) and exit code of every orphan that the guardian reaped."""
        self._link = link
        self._owner = os.getpid()
        self._death_grace = death_grace
        self._clock = clock
        self._log_path: bytes | None = None
        self._port: int | None = None
        self._remembered: set[Identity] = set()
        self._proofs: dict[Identity, str] = {}
        self._files: dict[tuple[Any, ...], held.Plain] = {}
        self._files_as_facts: tuple[HeldFile, ...] | None = ()
        """The same; ``None``: to be made again. The state file asks for it every second, and there may be thousands."""
        self._elsewhere = elsewhere
        self._told = Told(elsewhere)
        self.shm_before: frozenset[tuple[int, int]] | None = None
        """(device, inode) of what lay in /dev/shm before the launch, or is somebody else's too; ``None``: unseen."""
        self._daemons: _daemons.Daemons | None = None
        self._root_pidfd: int | None = None
        self._exited = anyio.Event()
        self._lost = anyio.Event()
        self._answered: anyio.Event | None = None
        self._answer: dict[str, Any] = {}
        self._questions: dict[int, anyio.Event] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._asked = 0
        self._is_read = False
        self._hurried = False
        self._on_progress: Callable[[StopProgress], None] | None = None
        # Shielded: the stop, which runs while the body is being cancelled, needs the answers.
        self._following = anyio.CancelScope(shield=True)
        self._ending: _tree.Ending | None = None

    # ------------------------------------------------------------------------------------ while it runs

    @property
    def members(self) -> frozenset[Identity]:
        """Return every member that was ever seen, living or dead."""
        return frozenset(self._remembered)

    @property
    def files(self) -> tuple[HeldFile, ...]:
        """Return what members were seen to have, and could leave."""
        if self._files_as_facts is None:
            self._files_as_facts = tuple(HeldFile(**file) for file in self._files.values())
        return self._files_as_facts

    async def wait_exit(self) -> Exit:
        """Wait until the launched process has ended."""
        await self._exited.wait()
        assert self.exit is not None
        return self.exit

    def remember(self, identities: Iterable[Identity]) -> None:
        """Note members that a sample has seen. Cheap when none is new.

        They are how the tree is found if the guardian dies.
        """
        self._check_owner()
        new = set(identities) - self._remembered
        self._remembered |= new
        if new and self.guardian_alive:
            self._link.post({"do": "remember", "members": sorted(new)})

    def remember_files(self, files: Iterable[HeldFile], others: Iterable[tuple[int, int]] = ()) -> None:
        """Note all that members were ever seen to have, and that is still there: it goes with their end.

        What is no longer among it is forgotten. Cheap when nothing is new. Left out is what cannot be theirs alone,
        see :func:`hangguard.held.may_be_left`; ``others`` (device, inode) was seen to be somebody else's too.
        """
        self._check_owner()
        not_ours = set(others) - (self.shm_before or frozenset())
        if self.shm_before is not None:
            self.shm_before |= not_ours
        plain = {held.key_of(file): file for file in map(asdict, files) if held.may_be_left(file, self.shm_before)}
        new = [file for key, file in plain.items() if key not in self._files]
        gone = [file for key, file in self._files.items() if key not in plain]
        if plain != self._files:
            self._files, self._files_as_facts = plain, None
        if (new or gone or not_ours) and self.guardian_alive:
            told = {"new": _lease.carried(new), "gone": _lease.carried(gone), "others": sorted(not_ours)}
            self._link.post({"do": "files", **told})

    def hurry(self) -> None:
        """End the grace of the stop in progress, or of the one to come. For any thread, and for signal handlers."""
        self._check_owner()
        self._hurried = True
        ending = self._ending
        if ending is not None:
            ending.hurry()
        self._link.ring()

    async def read_stacks(self, member: Identity, *, within: float) -> PythonThreads:
        """Return the Python stacks of one member, read by the guardian: the ancestor of all, which Yama lets read.

        Without a guardian that answers, this process reads; as the guardian's parent it is an ancestor too.
        """
        self._check_owner()
        reply = await self._ask("stacks", within=0.7 * within, pid=member[0], started=member[1])
        if reply is not None:
            return understand(reply, by="the guardian")
        return await read_directly(member, within=0.3 * within)

    async def last_words(self, members: Iterable[Identity], *, within: float) -> tuple[LastWords, ...]:
        """Have members say where they stand and end: SIGABRT, which Python's faulthandler answers with all stacks.

        The last act before a kill. The guardian asks nobody who is no member, would leave a core, or was not
        launched with ``PYTHONFAULTHANDLER``; and nobody at all under ``pristine``, without a log, or once a stop has
        begun. In the order in which they were asked; empty when the guardian does not answer.
        """
        self._check_owner()
        reply = await self._ask("last-words", within=within, members=sorted(members))
        heard = [] if reply is None else [dict(one) for one in reply.get("heard", ())]
        ends = 0 if reply is None else int(reply.get("log_ends", 0))
        words = []
        for one in reversed(heard):
            words.append(LastWords(**one, ends=ends))
            ends = ends if one["begins"] is None else one["begins"]
        return tuple(reversed(words))

    async def _ask(self, do: str, *, within: float, **fields: object) -> dict[str, Any] | None:
        if not self.guardian_alive or not self._is_read:
            return None
        self._asked = number = self._asked + 1
        self._questions[number] = anyio.Event()
        try:
            with anyio.move_on_after(within):
                self._link.post({"do": do, "id": number, "within": within, **fields})
                await self._questions[number].wait()
        finally:
            del self._questions[number]
        return self._replies.pop(number, None)

    async def stop(
        self,
        *,
        grace: float,
        within: float = 30.0,
        on_progress: Callable[[StopProgress], None] | None = None,
    ) -> Stopped:
        """Stop the server with everything that belongs to it, and say what is left.

        SIGTERM to the launched process and ``grace`` seconds, then SIGKILL to every member; when all are gone, and
        not before, what they were seen to have in /dev/shm goes too, unless somebody has it. ``within`` bounds
        what follows the grace: a guardian that does not answer by then is replaced by this process. A second
        call while one is in progress can shorten its grace; one after a stop without survivors returns that.
        """
        self._check_owner()
        if self.stopped is not None and not self.stopped.survivors and self._answered is None:
            return self.stopped
        began = self._clock()
        self._on_progress = on_progress or self._on_progress
        stopped = await self._ask_guardian_to_stop(grace, within, began) if self.guardian_alive else None
        if stopped is None:
            stopped = await self._take_over(grace if not self.guardian_alive else 0.0, within, began)
        await self._learn_exit(stopped)
        self.stopped = stopped
        self._on_progress = None
        return stopped

    # ------------------------------------------------------------------------------------ the guardian

    async def _launch(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {}
        with anyio.move_on_after(START_WITHIN):
            await self._link.send(message)
            answer = await self._link.next_message()
        if answer.get("say") != "launched":
            raise _refusal(answer)
        self.pid, self.started = answer["pid"], answer["started"]
        self.log_id = tuple(answer["log"]) if answer["log"] is not None else None
        self._log_path = None if message["log_path"] is None else message["log_path"].encode("latin-1")
        if answer["before"] is not None:
            self.shm_before = frozenset((device, inode) for device, inode in answer["before"])
        self._remembered.add((self.pid, self.started))
        self._proofs[self.pid, self.started] = _tree.LAUNCHED
        self._port = message.get("port")
        self._daemons = self._new_daemons()
        self._root_pidfd = _tree.open_pidfd((self.pid, self.started))

    def _new_daemons(self) -> _daemons.Daemons:
        return _daemons.Daemons(_tree, root_pid=self.pid, log_id=self.log_id, port=self._port)

    async def _follow(self) -> None:
        try:
            with self._following:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read_messages)
                    tasks.start_soon(self._watch_guardian)
                    tasks.start_soon(self._watch_root_alone)
                    tasks.start_soon(self._look_at_finds)
        finally:
            self._is_read = False
            self._wake_stop()

    async def _read_messages(self) -> None:
        while self.guardian_alive:
            await self._read_message()

    async def _read_message(self) -> None:
        if message := await self._link.next_message():
            self._hear(message)
        else:
            self._lose_guardian()

    async def _look_at_finds(self) -> None:
        while self.guardian_alive:
            await self._told.news()
            await self._look_at_told()

    async def _look_at_told(self) -> None:
        """Look at what the guardian has found, so that it is proved without it too, and let it go on."""
        proofs: dict[Identity, str] = {}
        spare = self._new_daemons().spare  # of its own, for it is asked in a thread beside others

        def find() -> set[Identity]:
            entries = _tree.read_entries()
            guardian = entries.get(self.guardian_pid)
            lives = guardian is not None and guardian.identity == (self.guardian_pid, self.guardian_started)
            return _tree.find_members(
                entries,
                below=[self.guardian_pid] if lives else [],
                remembered=tuple(self._remembered),
                log_id=self._named_log(),
                spare=spare,
                proofs=proofs,
            )

        self._remembered |= await self._told.look(lambda: self._remembered, find)
        self._proofs.update((who, proof) for who, proof in proofs.items() if who not in self._proofs)
        if self.guardian_alive and (number := self._told.unanswered()):
            self._link.post({"do": "heard", "id": number})

    async def _watch_guardian(self) -> None:
        await self._link.wait_guardian()
        for message in self._link.received():
            self._hear(message)
        self._lose_guardian()

    def _lose_guardian(self) -> None:
        if self.guardian_alive:
            self.guardian_alive = False
            self._lost.set()
            self._told.wake()
            self._wake_stop()

    def _wake_stop(self) -> None:
        if self._answered is not None:
            self._answered.set()
        for asked in self._questions.values():
            asked.set()

    def _hear(self, message: Mapping[str, Any]) -> None:
        said = message.get("say")
        if said == "exit":
            self._note_exit(message["code"])
        elif said == "reaped" and self.on_reaped is not None:
            self.on_reaped((message["pid"], message["started"]), message["code"])
        elif said in {"stacks", "last-words"}:
            if message["id"] in self._questions:
                self._replies[message["id"]] = dict(message)
                self._questions[message["id"]].set()
        elif said == "progress":
            self._tell(StopProgress(step=message["step"], left=message["left"]))
        elif said == "found":
            others = self._told.hear(message)
            if self.shm_before is not None:
                self.shm_before |= others
        elif said == "stopped":
            self._remembered |= {(pid, started) for pid, started in message["members"]}
            self._answer = dict(message)
            self._told.forget(_lease.received(message["files"]))
            self._wake_stop()

    def _tell(self, progress: StopProgress) -> None:
        if self._on_progress is not None:
            self._on_progress(progress)

    async def _ask_guardian_to_stop(self, grace: float, within: float, began: float) -> Stopped | None:
        if self._answered is None:
            self._answered, self._answer = anyio.Event(), {}
        answered = self._answered
        with anyio.move_on_after(grace + within):
            self._link.wake()
            await self._link.send({"do": "stop", "grace": grace})
            if self._is_read:
                await answered.wait()
            # asyncio.run() cancels every task at its end, shielded ones too: then nobody else reads.
            while not self._answer and self.guardian_alive and not self._is_read:
                await self._read_message()
                await self._look_at_told()
        if self._answered is answered:
            self._answered = None
        if not self._answer:
            return None
        told = self._answer
        files = as_removed(_lease.received(told["files"]))
        return self._stopped(
            told["members"],
            told["survivors"],
            began,
            "guardian",
            told["daemons"],
            told["processes"],
            files=files,
            files_unseen=tuple(told["files_unseen"]),
        )

    def _stopped(
        self,
        members: Collection[object],
        survivors: Sequence[dict[str, Any]],
        began: float,
        by: Literal["guardian", "supervisor"],
        daemons: Sequence[dict[str, Any]] = (),
        processes: Sequence[dict[str, Any]] = (),
        *,
        files: tuple[RemovedFile, ...] = (),
        files_unseen: tuple[str, ...] = (),
        unproved_files: tuple[str, ...] = (),
    ) -> Stopped:
        return Stopped(
            survivors=tuple(Survivor(**survivor) for survivor in survivors),
            ended=len(members) - len(survivors),
            seconds=self._clock() - began,
            by=by,
            daemons=tuple(Daemon(**daemon) for daemon in daemons),
            processes=tuple(EndedProcess(**process) for process in processes),
            files=files,
            files_unseen=files_unseen,
            unproved_files=unproved_files,
        )

    # ------------------------------------------------------------------------------------ without it

    async def _take_over(self, grace: float, within: float, began: float) -> Stopped:
        """End everything from here, now that the guardian is dead, or as good as dead."""
        await self._link.end_guardian()
        for message in self._link.received():
            self._hear(message)
        self._lose_guardian()
        await self._look_at_told()
        if self._ending is not None:
            self._ending.shorten(time.monotonic() + grace)
        unseen = await self._look_at_files()
        ending = self._ending = _tree.Ending(
            self._find_members,
            root=(self.pid, self.started),
            grace=grace,
            daemons=self._daemons,
            proofs=self._proofs,
        )
        if self._hurried:  # before there was an ending to hurry
            ending.hurry()
        lane = Lane("ending")
        try:
            ended = await lane.ask(ending.run, within=grace + max(within, TAKE_OVER_WITHIN))
        except OSError as problem:  # this program has no descriptors left, for example
            ended = Unseen(f"nobody could look: {problem.strerror}")
        finally:
            ending.hurry()
            self._ending = None
            lane.close()
        if isinstance(ended, Unseen):
            unknown = {"title": ended.reason, "state": "", "wait_channel": ""}
            left = [{"pid": pid, "started": at, **unknown} for pid, at in self._remembered]
            files = self._kept_files(ended.reason)
            return self._stopped(self._remembered, left, began, "supervisor", files=files, files_unseen=unseen)
        self._remembered |= ended.members
        survivors = [*ended.survivors, *self._hidden_members()]
        if survivors:
            files = self._kept_files("a member lives")
        else:
            files = await clear_files(self._files.values())
        return self._stopped(
            ended.members | {(one["pid"], one["started"]) for one in survivors},
            survivors,
            began,
            "supervisor",
            ended.daemons,
            ended.processes,
            files=files,
            files_unseen=unseen,
            unproved_files=await still_there(self._told.claimed(self._files, self.shm_before)),
        )

    async def _look_at_files(self) -> tuple[str, ...]:
        """Look at what members have before anybody is signalled, as the guardian does; return what was unseen."""
        lane, look = Lane("held files"), held.Look((), elsewhere=self._elsewhere)
        others, seen = held.Others(elsewhere=self._elsewhere), self._told.seen

        def run() -> None:
            members = self._find_members(_tree.read_entries())
            look.add(members)
            found = [*look.run(), *seen]
            others.run([file for file in found if held.key_of(file) not in self._files], members, self.shm_before)

        try:
            done = await lane.ask(run, within=LOOK_WITHIN)
        except OSError as problem:
            done = Unseen(problem.strerror or str(problem))
        finally:
            lane.close()
        if isinstance(done, Unseen) and not look.skip(done.reason):
            look.left_out.append(done.reason)
        if self.shm_before is None:
            look.left_out.append("what lay in /dev/shm before the launch")
        else:
            self.shm_before |= others.files()
        if not others.is_done:
            look.left_out.append("who else writes to shared memory that was new")
        for file in others.settled([*look.found, *seen]):
            if held.may_be_left(file, self.shm_before):
                self._files[held.key_of(file)] = file
        self._files_as_facts = None
        return tuple(look.left_out[:16])

    def _hidden_members(self) -> list[dict[str, Any]]:
        """Return the members that /proc does not show: only the guardian, their parent, could tell that they ended."""
        hidden = [who for who in sorted(self._remembered) if procfs.is_hidden(who[0])]
        unknown = {"title": "hidden by /proc", "state": "?", "wait_channel": ""}
        return [{"pid": pid, "started": started, **unknown} for pid, started in hidden]

    def _kept_files(self, why: str) -> tuple[RemovedFile, ...]:
        return as_removed(_lease.answer_of(file, None, why) for file in self._files.values())

    def _find_members(self, entries: Mapping[int, _tree.Entry]) -> set[Identity]:
        spare = None if self._daemons is None else self._daemons.spare
        return _tree.find_members(
            entries, remembered=tuple(self._remembered), log_id=self._named_log(), spare=spare, proofs=self._proofs
        )

    def _named_log(self) -> Identity | None:
        """Return the log if it still has its name. Blocks.

        The guardian had it open as long as it lived. Without that, and without a name, the kernel may have given its
        inode to another file: to the log of another run, for example, with members of its own.
        """
        with suppress(OSError, ValueError):
            if self._log_path is not None and held.file_id(os.lstat(self._log_path)) == self.log_id:
                return self.log_id
        return None

    async def _watch_root_alone(self) -> None:
        """Notice the end of the launched process when its parent can no longer tell."""
        await self._lost.wait()
        if self.exit is not None:
            return
        if self._root_pidfd is None:
            # What /proc hides is not seen to have ended.
            who = (self.pid, self.started)
            await poll_until(lambda: not (_tree.is_alive(who) or procfs.is_hidden(self.pid)), every=0.5)
            self._note_exit(Unseen("the guardian died first, and this system has no pidfds"))
            return
        await anyio.wait_readable(self._root_pidfd)
        self._note_exit(await self._ask_kernel_for_code(self._root_pidfd))

    async def _ask_kernel_for_code(self, pidfd: int) -> int | Unseen:
        # The kernel tells once the new parent, pid 1 as a rule, has waited for it.
        with anyio.move_on_after(NEWS_WITHIN):
            await poll_until(lambda: _tree.exit_code_of(pidfd) is not None)
        code = _tree.exit_code_of(pidfd)
        if code is not None:
            return code
        return Unseen("the guardian died first, and the kernel does not tell the code (Linux 6.15 does)")

    async def _learn_exit(self, stopped: Stopped) -> None:
        if all((left.pid, left.started) != (self.pid, self.started) for left in stopped.survivors):
            with anyio.move_on_after(NEWS_WITHIN + 1.0):
                await self._exited.wait()

    def _note_exit(self, code: int | Unseen) -> None:
        if self.exit is None:
            self.exit = Exit(code=code, at=self._clock())
            self._exited.set()

    # ------------------------------------------------------------------------------------ the end

    async def _leave(self) -> None:
        if os.getpid() != self._owner:
            return
        try:
            await self.stop(grace=self._death_grace)
            if self.guardian_alive:
                self._link.post({"do": "bye"})
        finally:
            self._following.cancel()

    async def _see_guardian_end(self) -> None:
        if os.getpid() == self._owner:
            self._link.hang_up()
            await self._link.end_guardian(within=self._death_grace + TAKE_OVER_WITHIN)
            self.guardian_alive = False

    def _close(self) -> None:
        """Let go of everything without waiting: the guardian ends the server if it still has one."""
        if os.getpid() == self._owner:
            self._link.hang_up()
        self._link.close()
        if self._root_pidfd is not None:
            os.close(self._root_pidfd)
            self._root_pidfd = None

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise WrongProcess(self._owner, os.getpid())


def _refusal(answer: Mapping[str, Any]) -> HangguardError:
    if answer.get("say") != "failed":
        problem = answer.get("problem") or ("it ended at once" if not answer else f"it said {answer}")
        return GuardianFailed(problem)
    number, problem = answer["errno"], answer["problem"]
    path = os.fsdecode(answer["path"].encode("latin-1"))
    if answer["what"] in {"log", "lock"}:
        return GuardianFailed(f"the {answer['what']} {path!r} cannot be used: {problem}")
    if answer["what"] == "directory":
        if number == errno.EACCES:
            return CommandNotExecutable(path, problem="the working directory may not be entered")
        return CommandNotFound(path, what="directory")
    if number in {errno.EAGAIN, errno.ENOMEM, errno.ENFILE, errno.EMFILE}:  # nothing is wrong with the program
        return GuardianFailed(f"{path!r} could not be started: {problem} (a limit of processes, memory or files)")
    if number in {errno.ENOENT, errno.ENOTDIR}:
        if os.sep in path and Path(path).exists():
            return CommandNotExecutable(path, problem="the interpreter named in its first line does not exist")
        return CommandNotFound(path)
    return CommandNotExecutable(path, problem=problem.lower())


def _text(value: str) -> str:
    """Carry the bytes that the operating system would get: the guardian has no locale of ours."""
    return os.fsencode(value).decode("latin-1")


def _path_text(path: str) -> str:
    return _text(str(Path(path).absolute()))  # the guardian stands in /
