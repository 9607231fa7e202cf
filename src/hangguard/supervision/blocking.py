"""The blocking side of an asynchronous block: an event loop of its own, and a handle whose calls go through it."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from types import TracebackType
from typing import Any, ClassVar, Generic, TypeVar

from anyio.from_thread import BlockingPortal

from hangguard.errors import WrongProcess
from hangguard.supervision.interrupts import blocking_portal, call

T = TypeVar("T")
A = TypeVar("A")
H = TypeVar("H", bound="BlockingHandle")


class BlockingHandle:
    """What ``with`` gives: every method is one call of the asynchronous handle, through a portal."""

    _once_left: ClassVar[str]
    """What a call says once the block was left."""

    def __init__(self, portal: BlockingPortal) -> None:
        self._portal = portal
        self._owner = os.getpid()
        self._over = False

    def _call(self, method: Callable[..., Coroutine[Any, Any, T]], *args: object) -> T:
        self._check()
        outcome: T = call(self._portal, method, *args)
        return outcome

    def _check(self) -> None:
        if self._owner != os.getpid():
            raise WrongProcess(self._owner, os.getpid())
        if self._over:
            raise RuntimeError(self._once_left)


class Entered(Generic[H]):
    """One entering of an asynchronous block from blocking code, with the ``handle`` that it gave."""

    def __init__(self, block: AbstractAsyncContextManager[A], handle: Callable[[A, BlockingPortal], H]) -> None:
        """Enter. Raises what the block raises; its event loop has ended then."""
        self._portal_context = blocking_portal()
        portal = self._portal_context.__enter__()
        try:
            self._block = portal.wrap_async_context_manager(block)
            self.handle = handle(self._block.__enter__(), portal)
        except BaseException as error:
            self._portal_context.__exit__(type(error), error, None)
            raise

    def leave(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Leave it. Nothing in a forked child."""
        if self.handle._owner != os.getpid():  # noqa: SLF001 - the two are one
            return
        try:
            self._block.__exit__(kind, error, trace)
        finally:
            self.handle._over = True  # noqa: SLF001
            self._portal_context.__exit__(None, None, None)
