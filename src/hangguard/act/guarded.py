"""The handle on a server that runs under a guardian: what it was seen to be, what is asked of it, its stop."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import anyio
from anyio.abc import TaskGroup

from hangguard.act import _lease
from hangguard.act._link import NEWS_WITHIN, START_WITHIN, Descriptor, Link, pidfd_of
from hangguard.act.belongings import Belongings
from hangguard.act.conversation import Conversation, Message
from hangguard.act.files import as_removed
from hangguard.act.hung_start import end_hung_start
from hangguard.act.launch_message import refusal
from hangguard.act.stopped import Stopped, StopProgress, as_stopped
from hangguard.act.told import Told
from hangguard.act.without_guardian import TAKE_OVER_WITHIN, OwnEnding, wait_for_end
from hangguard.elsewhere import Elsewhere
from hangguard.errors import GuardianFailed, WrongProcess
from hangguard.facts import Exit, HeldFile, Unseen
from hangguard.observe.memory_stacks import PythonThreads, read_directly, understand

Identity: TypeAlias = tuple[int, int]

log = logging.getLogger("hangguard")

_SLOW_START = "a disk does not answer, or somebody keeps its program from being opened"


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


class Guarded:
    """A server with its guardian. Belongs to one event loop; :meth:`hurry` alone may be called from anywhere."""

    def __init__(
        self, link: Link, *, death_grace: float, clock: Callable[[], float], elsewhere: Elsewhere | None = None
    ) -> None:
        self.guardian_pid = link.process.pid
        self.guardian_started = link.started
        self.exit: Exit | None = None
        """The end of the launched process; members may outlive it."""
        self.stopped: Stopped | None = None
        """The last stop, once it is done."""
        self.on_reaped: Callable[[Identity, int], None] | None = None
        """Called with (pid, start time) and exit code of every orphan that the guardian reaped."""
        self._link = link
        self._talk = Conversation(link)
        self._belongings = Belongings(elsewhere)
        self._told = Told(elsewhere)
        self._own_ending = OwnEnding(self._belongings, clock, told=self._told)
        self._owner = os.getpid()
        self._death_grace = death_grace
        self._clock = clock
        self._root_pidfd: Descriptor | None = None
        self._is_starting = False
        """Whether the launch was sent, and not answered: then something may start of which nobody knows here."""
        self._start_failure: GuardianFailed | None = None
        self._exited = anyio.Event()
        self._on_progress: Callable[[StopProgress], None] | None = None

    # ------------------------------------------------------------------------------------ what it was seen to be

    @property
    def pid(self) -> int:
        """Return the launched process; 0: not launched yet."""
        return self._belongings.root[0]

    @property
    def started(self) -> int:
        """Return its start time in clock ticks since boot."""
        return self._belongings.root[1]

    @property
    def log_id(self) -> tuple[int, int] | None:
        """Return (device, inode) of the log."""
        return self._belongings.log_id

    @property
    def guardian_alive(self) -> bool:
        """Whether it lives, and has not hung up."""
        return self._talk.guardian_alive

    @property
    def members(self) -> frozenset[Identity]:
        """Return every member that was ever seen, living or dead."""
        return frozenset(self._belongings.members)

    @property
    def files(self) -> tuple[HeldFile, ...]:
        """Return what members were seen to have, and could leave."""
        return self._belongings.files

    @property
    def shm_before(self) -> frozenset[tuple[int, int]] | None:
        """(device, inode) of what lay in /dev/shm before the launch, or is somebody else's too; ``None``: unseen."""
        return self._belongings.shm_before

    # ------------------------------------------------------------------------------------ while it runs

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
        if new := self._belongings.add_members(identities):
            self._talk.post("remember", members=sorted(new))

    def remember_files(self, files: Iterable[HeldFile], others: Iterable[tuple[int, int]] = ()) -> None:
        """Note all that members were ever seen to have, and that is still there: it goes with their end.

        What is no longer among it is forgotten. Cheap when nothing is new. Left out is what cannot be theirs alone,
        see :func:`hangguard.held.may_be_left`; ``others`` (device, inode) was seen to be somebody else's too.
        """
        self._check_owner()
        new, gone, not_ours = self._belongings.set_files(files, others)
        if new or gone or not_ours:
            self._talk.post("files", new=_lease.carried(new), gone=_lease.carried(gone), others=sorted(not_ours))

    def hurry(self) -> None:
        """End the grace of the stop in progress, or of the one to come. For any thread, and for signal handlers."""
        self._check_owner()
        self._own_ending.hurry()
        self._link.ring()

    async def read_stacks(self, member: Identity, *, within: float) -> PythonThreads:
        """Return the Python stacks of one member, read by the guardian: the ancestor of all, which Yama lets read.

        Without a guardian that answers, this process reads; as the guardian's parent it is an ancestor too.
        """
        self._check_owner()
        reply = await self._talk.ask("stacks", within=0.7 * within, pid=member[0], started=member[1])
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
        reply = await self._talk.ask("last-words", within=within, members=sorted(members))
        heard = [] if reply is None else [dict(one) for one in reply.get("heard", ())]
        ends = 0 if reply is None else int(reply.get("log_ends", 0))
        words = []
        for one in reversed(heard):
            words.append(LastWords(**one, ends=ends))
            ends = ends if one["begins"] is None else one["begins"]
        return tuple(reversed(words))

    # ------------------------------------------------------------------------------------ its stop

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
        if self.stopped is not None and not self.stopped.survivors and not self._talk.is_stopping:
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

    async def _ask_guardian_to_stop(self, grace: float, within: float, began: float) -> Stopped | None:
        told = await self._talk.ask_to_stop(grace, within=within, hear=self._hear, after_each=self._look_at_told)
        if told is None:
            return None
        return as_stopped(
            members=told["members"],
            survivors=told["survivors"],
            seconds=self._clock() - began,
            by="guardian",
            daemons=told["daemons"],
            processes=told["processes"],
            files=as_removed(_lease.received(told["files"])),
            files_unseen=tuple(told["files_unseen"]),
        )

    async def _take_over(self, grace: float, within: float, began: float) -> Stopped:
        """End everything from here, now that the guardian is dead, or as good as dead."""
        await self._link.end_guardian()
        self._talk.hear_the_rest(self._hear)
        await self._look_at_told()
        return await self._own_ending.run(grace=grace, within=within, began=began)

    async def _learn_exit(self, stopped: Stopped) -> None:
        if all((left.pid, left.started) != self._belongings.root for left in stopped.survivors):
            with anyio.move_on_after(NEWS_WITHIN + 1.0):
                await self._exited.wait()

    # ------------------------------------------------------------------------------------ for guarded() alone

    async def _launch(self, message: Mapping[str, Any]) -> None:
        answer: dict[str, Any] = {}
        self._is_starting = True
        with anyio.move_on_after(START_WITHIN) as limit:
            await self._link.send(message)
            answer = await self._link.next_message()
        if limit.cancelled_caught:
            self._start_failure = GuardianFailed(f"the server did not start within {START_WITHIN:g} s; {_SLOW_START}")
            raise self._start_failure
        self._is_starting = not answer
        if answer.get("say") != "launched":
            failure = refusal(answer)
            self._start_failure = failure if isinstance(failure, GuardianFailed) else None
            raise failure
        self._belongings.begin(message, answer)
        self._root_pidfd = pidfd_of(self._belongings.root)

    def _follow_in(self, tasks: TaskGroup) -> None:
        # Not `await tasks.start(...)`: cancelled in that moment, it waits on asyncio for what only our end ends.
        self._talk.is_read = True
        tasks.start_soon(self._talk.follow, self._hear, self._watch_root_alone, self._look_at_finds)

    def _hear(self, message: Message) -> None:
        said = message.get("say")
        if said == "exit":
            self._note_exit(message["code"])
        elif said == "reaped" and self.on_reaped is not None:
            self.on_reaped((message["pid"], message["started"]), message["code"])
        elif said == "progress" and self._on_progress is not None:
            self._on_progress(StopProgress(step=message["step"], left=message["left"]))
        elif said == "found":
            self._belongings.add_others(self._told.hear(message))
        elif said == "spared" and self._belongings.daemons is not None:
            self._belongings.daemons.hear(message["who"])
        elif said == "stopped":
            self._belongings.add_members((pid, started) for pid, started in message["members"])
            self._told.forget(_lease.received(message["files"]))

    async def _watch_root_alone(self) -> None:
        """Notice the end of the launched process when its parent can no longer tell."""
        await self._talk.lost.wait()
        self._told.wake()  # nothing more is told
        if self.exit is None:
            pidfd = self._root_pidfd
            self._note_exit(await wait_for_end(self._belongings.root, None if pidfd is None else pidfd.number))

    async def _look_at_finds(self) -> None:
        while self.guardian_alive:
            await self._told.news()
            await self._look_at_told()

    async def _look_at_told(self) -> None:
        """Look at what the guardian has found, so that it is proved without it too, and let it go on."""
        proofs: dict[Identity, str] = {}
        look_below = self._belongings.look_below((self.guardian_pid, self.guardian_started))

        def find() -> set[Identity]:
            found, why = look_below()
            proofs.update(why)
            return found

        self._belongings.add_members(await self._told.look(lambda: self._belongings.members, find))
        self._belongings.add_proofs(proofs)
        if self.guardian_alive and (number := self._told.unanswered()):
            self._talk.post("heard", id=number)

    def _note_exit(self, code: int | Unseen) -> None:
        if self.exit is None:
            self.exit = Exit(code=code, at=self._clock())
            self._exited.set()

    async def _leave(self) -> None:
        if os.getpid() != self._owner:
            return
        try:
            await self.stop(grace=self._death_grace)
            self._talk.post("bye")
        finally:
            self._talk.leave()

    async def _see_guardian_end(self) -> None:
        if os.getpid() != self._owner:
            return
        ends = anyio.current_time() + self._death_grace + TAKE_OVER_WITHIN
        await self._see_it_told_to_stop(ends)
        self._link.hang_up()
        has_ended = await self._link.has_ended(within=max(0.0, ends - anyio.current_time()))
        if self._is_starting and not has_ended:
            self._note_left(await end_hung_start(self._link))
        elif self._is_starting and (self._link.process.returncode or 0) < 0:
            self._note_left("it was killed while it started the server, which may start yet")
        elif not await self._link.end_guardian(within=0.0):
            self._note_left(f"the guardian, process {self.guardian_pid}, has not ended yet")
        self._talk.guardian_alive = False

    async def _see_it_told_to_stop(self, ends: float) -> None:
        """Tell the guardian to stop, if no stop was answered: hung up on, it would keep the server under "keep".

        After the launch, in order, also where its answer has not come: the body was never entered then.
        """
        if self.stopped is None and self.guardian_alive:
            self._link.wake()
            with anyio.move_on_after(max(0.0, ends - anyio.current_time())):
                await self._link.send({"do": "stop", "grace": self._death_grace})

    def _note_left(self, left: str) -> None:
        if left and self._start_failure is not None:
            self._start_failure.left = left
        elif left:  # the caller was cancelled, say: then no error of ours tells it
            log.warning("%s", left)

    def _close(self) -> None:
        """Let go of everything without waiting: the guardian ends the server if it still has one."""
        if os.getpid() == self._owner:
            self._link.hang_up()
        self._link.close()
        if self._root_pidfd is not None:
            self._root_pidfd.close()
            self._root_pidfd = None

    def _check_owner(self) -> None:
        if os.getpid() != self._owner:
            raise WrongProcess(self._owner, os.getpid())
