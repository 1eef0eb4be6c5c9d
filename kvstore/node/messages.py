"""Limits how many messages are being received at a time, for each tenant.

gRPC allocates room for a message as soon as it is awaited, up to `MESSAGE_BYTES_MAX`, and keeps the part that has
arrived of one that never ends. So at most `MESSAGES_COMING_MAX` are awaited at a time, shared among tenants; for all
others gRPC buffers at most `MESSAGE_AHEAD_BYTES`.

What always holds: a tenant's messages are awaited in the order in which its calls asked for them; a waiting call delays
only its own tenant. What it doesn't do: end a message that does not arrive; its call has a deadline.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from kvstore.limits import MESSAGES_COMING_MAX
from kvstore.node.fair_queue import Places

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

__all__ = ["Messages"]


class Messages:
    """The messages of a node."""

    def __init__(self, tenants: Callable[[], int]) -> None:
        """`tenants` returns how many tenants the node knows."""
        self._places = Places(MESSAGES_COMING_MAX, tenants)
        self._waiting: dict[str | None, deque[asyncio.Future[None]]] = {}

    @asynccontextmanager
    async def coming(self, who: str | None) -> AsyncIterator[None]:
        """Wait until this tenant may receive one more message; receive it inside this context."""
        if who in self._waiting or not self._places.left(who):
            mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(who, deque()).append(mine)
            try:
                await mine
            except asyncio.CancelledError:
                if mine.done() and not mine.cancelled():
                    self._over(who)  # its turn had come
                raise
        else:
            self._places.take(who)
        try:
            yield
        finally:
            self._over(who)

    def _over(self, who: str | None) -> None:
        self._places.give_back(who)
        for one in list(self._waiting):
            line = self._waiting[one]
            while line and (line[0].done() or self._places.left(one)):
                mine = line.popleft()
                if not mine.done():
                    self._places.take(one)
                    mine.set_result(None)
            if not line:
                del self._waiting[one]
