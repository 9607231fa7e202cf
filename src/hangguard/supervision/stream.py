"""What has a next one until there is none, as an asynchronous iterator."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import AsyncIterator
from typing import TypeVar

T_co = TypeVar("T_co", covariant=True)


class Stream(AsyncIterator[T_co]):
    """An asynchronous iterator that ends where :meth:`next_or_none` gives ``None``."""

    async def __anext__(self) -> T_co:
        one = await self.next_or_none()
        if one is None:
            raise StopAsyncIteration
        return one

    @abstractmethod
    async def next_or_none(self) -> T_co | None:
        """Return the next one, or ``None`` at the end."""
