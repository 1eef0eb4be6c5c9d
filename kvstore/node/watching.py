"""Watching: streams a tenant's own events to those of its clients that subscribe.

What always holds: a watcher sees only its own tenant's events; each watcher has a bounded queue, and dropped events
are counted and reported; a watcher that does not read is disconnected; without watchers an event costs one look-up a
batch. What it doesn't do: keep events for later watchers, or report sessions that expire.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from kvstore.errors import Overloaded
from kvstore.limits import WATCH_EVENTS_MAX, WATCH_EVENTS_SENT_MAX, WATCHERS_MAX, WATCHERS_OF_TENANT_MAX
from kvstore.node.fair_queue import Places
from kvstore.storage.index_layout import names_of
from kvstore.wire import observing_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.storage.eviction.types import Reason

__all__ = ["Watcher", "Watchers"]


class Watcher:
    """A watcher."""

    def __init__(self) -> None:
        self._events: deque[pb.Event] = deque()
        self._dropped = 0
        self._some = asyncio.Event()

    def queue(self, events: Iterable[pb.Event]) -> None:
        """Queue events, as far as there is room."""
        for event in events:
            if len(self._events) < WATCH_EVENTS_MAX:
                self._events.append(event)
            else:
                self._dropped += 1
        self._some.set()

    async def next(self, heartbeat_s: float) -> pb.WatchResponse:
        """The next events, or nothing after a heartbeat's time."""
        with suppress(TimeoutError):
            async with asyncio.timeout(heartbeat_s):  # `wait_for` may swallow the call's cancellation
                await self._some.wait()
        count = min(len(self._events), WATCH_EVENTS_SENT_MAX)
        response = pb.WatchResponse(
            events=[self._events.popleft() for _ in range(count)], dropped=self._dropped
        )
        self._dropped = 0
        if not self._events:
            self._some.clear()
        return response


class Watchers:
    """The watchers of a node."""

    def __init__(self, clock: Clock, tenants: Callable[[], int]) -> None:
        """`tenants` returns how many tenants the node knows."""
        self._clock = clock
        self._places = Places(WATCHERS_MAX, tenants)
        self._of_tenant: dict[bytes, list[Watcher]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of_tenant.values()))

    @contextmanager
    def watching(self, tenant: bytes) -> Iterator[Watcher]:
        """Watch a tenant's events inside this; Overloaded if there are too many watchers."""
        mine = self._of_tenant.get(tenant, [])
        if len(mine) >= WATCHERS_OF_TENANT_MAX or not self._places.left(tenant):
            raise Overloaded("The node has its maximum number of watching clients; watch with fewer.")
        watcher = Watcher()
        self._places.take(tenant)
        self._of_tenant[tenant] = [*mine, watcher]
        try:
            yield watcher
        finally:
            self._places.give_back(tenant)
            left = [one for one in self._of_tenant[tenant] if one is not watcher]
            if left:
                self._of_tenant[tenant] = left
            else:
                del self._of_tenant[tenant]

    def blocks(self, rows: NDArray[Any], reason: Reason | None) -> None:
        """Note blocks, given as rows of the index, that are now stored or, with a reason, removed."""
        if not self._of_tenant:
            return
        names, now_ms = names_of(rows), self._clock.wall_ms()
        for tenant, watchers in self._of_tenant.items():
            keys = [key for whose, key in names if whose == tenant]
            events = [_block(key, reason, now_ms) for key in keys]
            for watcher in watchers if events else ():
                watcher.queue(events)

    def session(self, tenant: bytes, user: str, session: str, blocks: int, *, removed: bool = False) -> None:
        """Note a session that has changed."""
        watchers = self._of_tenant.get(tenant, ())
        changed = pb.SessionChanged(user=user, session=session, blocks=blocks, removed=removed)
        for watcher in watchers:
            watcher.queue([pb.Event(at_unix_ms=self._clock.wall_ms(), session=changed)])


def _block(key: bytes, reason: Reason | None, now_ms: int) -> pb.Event:
    if reason is None:
        return pb.Event(at_unix_ms=now_ms, stored=pb.BlockStored(key=key))
    return pb.Event(at_unix_ms=now_ms, gone=pb.BlockGone(key=key, reason=int(reason)))  # type: ignore[arg-type]
