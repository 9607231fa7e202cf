"""What is said between this process and the guardian of a launch: questions with their answers, and news."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, TypeAlias

import anyio

from hangguard.act._link import Link

Message: TypeAlias = Mapping[str, Any]
Hear: TypeAlias = Callable[[Message], None]
"""Is given every message of the guardian, before whoever waits for it as an answer goes on."""


class Conversation:
    """One guardian's side and ours. Belongs to one event loop.

    It keeps no :data:`Hear`: a circle of references would keep the descriptors of a launch that was thrown away open.
    """

    def __init__(self, link: Link) -> None:
        self.guardian_alive = True
        self.lost = anyio.Event()
        """Set when the guardian has died, or hung up."""
        self.is_read = False
        """Whether :meth:`follow` reads, or is about to."""
        self._link = link
        self._answered: anyio.Event | None = None
        self._answer: dict[str, Any] = {}
        self._questions: dict[int, anyio.Event] = {}
        self._replies: dict[int, dict[str, Any]] = {}
        self._asked = 0
        self._reading = anyio.Lock()
        # Shielded: the stop, which runs while the body is being cancelled, needs the answers.
        self._following = anyio.CancelScope(shield=True)

    # ------------------------------------------------------------------------------------ what we say

    def post(self, do: str, **fields: object) -> None:
        """Tell the guardian, if it lives."""
        if self.guardian_alive:
            self._link.post({"do": do, **fields})

    async def ask(self, do: str, *, within: float, **fields: object) -> dict[str, Any] | None:
        """Return the answer to a question; ``None``: there is none, or nobody who reads it."""
        if not self.guardian_alive or not self.is_read:
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

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for and is not answered yet."""
        return self._answered is not None

    async def ask_to_stop(
        self, grace: float, *, within: float, hear: Hear, after_each: Callable[[], Awaitable[None]]
    ) -> dict[str, Any] | None:
        """Have the guardian stop the server; return what that came to, or ``None`` when it does not answer in time.

        Asked again while a stop is in progress, it can shorten its grace, and gets the same answer. ``after_each`` runs
        after every message that is read here, because nobody else does.
        """
        if self._answered is None:
            self._answered, self._answer = anyio.Event(), {}
        answered = self._answered
        with anyio.move_on_after(grace + within):
            self._link.wake()
            await self._link.send({"do": "stop", "grace": grace})
            if self.is_read:
                await answered.wait()
            # asyncio.run() cancels every task at its end, shielded ones too: then nobody else reads.
            while not self._answer and self.guardian_alive and not self.is_read:
                async with self._reading:  # a socket has one waiter, and what it brings may be for all
                    if not self._answer and self.guardian_alive:
                        await self._read_message(hear)
                await after_each()
        if self._answered is answered:
            self._answered = None
        return self._answer or None

    # ------------------------------------------------------------------------------------ what it says

    async def follow(self, hear: Hear, *beside: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Read what the guardian says, and notice its end, until :meth:`leave`; ``beside`` runs next to it."""
        try:
            with self._following:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._read_messages, hear)
                    tasks.start_soon(self._watch_guardian, hear)
                    for task in beside:
                        tasks.start_soon(task)
        finally:
            self.is_read = False
            self._wake()

    def leave(self) -> None:
        """End :meth:`follow`."""
        self._following.cancel()

    def hear_the_rest(self, hear: Hear) -> None:
        """Take what it has said before it died, or was given up; nobody waits for an answer of it any more."""
        for message in self._link.received():
            self._take(message, hear)
        self._lose_guardian()

    def _lose_guardian(self) -> None:
        if self.guardian_alive:
            self.guardian_alive = False
            self.lost.set()
            self._wake()

    async def _read_messages(self, hear: Hear) -> None:
        while self.guardian_alive:
            await self._read_message(hear)

    async def _read_message(self, hear: Hear) -> None:
        if message := await self._link.next_message():
            self._take(message, hear)
        else:
            self._lose_guardian()

    async def _watch_guardian(self, hear: Hear) -> None:
        await self._link.wait_guardian()
        self.hear_the_rest(hear)

    def _take(self, message: Message, hear: Hear) -> None:
        hear(message)
        said = message.get("say")
        if said in {"stacks", "last-words"}:
            if message["id"] in self._questions:
                self._replies[message["id"]] = dict(message)
                self._questions[message["id"]].set()
        elif said == "stopped":
            self._answer = dict(message)
            self._wake()

    def _wake(self) -> None:
        if self._answered is not None:
            self._answered.set()
        for asked in self._questions.values():
            asked.set()
