"""Makes a client's calls in threads of its own, for asyncio.

What always holds: when an awaited call returns, its function has returned, even if the call was cancelled: the
cancellation is delivered after that. Whatever a cancelled call has created is undone first, so nothing of it is left in
flight.
What it doesn't do: end a function early. It ends by its own deadline.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import Closed
from kvstore.limits import ASYNC_CALLS_MAX

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["CallThreads", "ended"]

R = TypeVar("R")


class CallThreads:
    """The threads of one client, for one event loop. At most `ASYNC_CALLS_MAX` calls run at a time; others wait."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(ASYNC_CALLS_MAX, "kvstore-async")

    async def call(self, work: Callable[[], R], undo: Callable[[R], object] | None = None) -> R:
        """Call a function and await its result. If this is cancelled, `undo` is called with the result."""
        under_way = self._begun(work)
        try:
            return await asyncio.shield(under_way)
        except asyncio.CancelledError:
            await ended(under_way)  # its memory is in use until then
            if under_way.exception() is None and undo is not None:
                with suppress(Closed):  # with the client everything has ended
                    undoing = self._begun(partial(undo, under_way.result()))
                    await ended(undoing)
                    undoing.exception()
            raise

    def _begun(self, work: Callable[[], R]) -> asyncio.Future[R]:
        loop = asyncio.get_running_loop()
        try:
            return loop.run_in_executor(self._threads, copy_context().run, work)
        except RuntimeError as error:  # its threads have ended
            raise Closed("The client is closed.") from error

    async def close(self, close: Callable[[], None]) -> None:
        """Close the client by this function, and wait for calls that are under way, even if this is cancelled."""

        def close_all() -> None:
            close()
            self._threads.shutdown()

        closing = asyncio.get_running_loop().run_in_executor(None, close_all)
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            await ended(closing)
            raise


async def ended(under_way: asyncio.Future[Any]) -> None:
    """Wait for its end, even if this is cancelled meanwhile."""
    while not under_way.done():
        with suppress(asyncio.CancelledError):
            await asyncio.wait([under_way])
