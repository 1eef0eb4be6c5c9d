"""Time on the node's thread: calls that name many blocks run in slices, and tenants take turns by time used.

What always holds: one slice at a time. Of the waiting tenants, the one that has used the least time is next, its calls
in order; an idle tenant saves nothing up. While other tenants call, as much time as a slice took, or more, is left to
them before the next one, so heavy calls use at most half of the thread. Of calls that carry a block, `MOVING_MAX` per
tenant run at a time while others call; the bytes of the rest wait in the network, not between the others and the
thread. One that takes longer than `MOVING_MS` no longer counts, so a client that stalls delays nobody. Work that can't
be sliced, such as a change of a large session, is done one at a time per tenant; while others call, as much time as it
took is left to them before the tenant's next one. Calls over the fabric, and fetched blocks, don't wait here; they are
processed as they arrive. But after more than `FABRIC_WORK_US` of work for a tenant at a stretch, it pauses
`FABRIC_REST` times as long while others call.
What it doesn't do: interrupt a slice; its caller keeps it short.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from kvstore.limits import FABRIC_REST, FABRIC_WORK_US, MOVING_MAX, MOVING_MS, TURNS_OTHERS_MS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from kvstore.clock import Clock

__all__ = ["Again", "Turn", "Turns"]

_NS = 1_000_000_000


class Turn:
    """The turn of one call."""

    def __init__(self, turns: Turns, tenant: bytes, rest: int) -> None:
        self._turns = turns
        self._rest = rest
        self._tenant = tenant
        self._is_mine = False

    async def next(self) -> None:
        """Yield to other calls until it is this one's turn again."""
        self.end()
        await self.begin()

    async def begin(self) -> None:
        """Wait until it is this one's turn."""
        await self._turns.wait(self._tenant)
        self._is_mine = True

    async def begin_again(self) -> None:
        """Wait until it is this one's turn, unless it still is."""
        if not self._is_mine:
            await self.begin()

    def end(self) -> None:
        """Yield to other calls, if it was this one's turn."""
        if self._is_mine:
            self._is_mine = False
            self._turns.over(self._tenant, self._rest)


class Again:
    """A function that runs once more, at the earliest requested time."""

    def __init__(self, do: Callable[[], None]) -> None:
        self._do = do
        self._timer: asyncio.TimerHandle | None = None

    def within(self, seconds: float) -> None:
        """Run it after this delay, or earlier."""
        loop = asyncio.get_running_loop()
        if self._timer is not None:
            if self._timer.when() <= loop.time() + seconds:
                return
            self._timer.cancel()
        self._timer = loop.call_later(seconds, self._come)

    def _come(self) -> None:
        self._timer = None
        self._do()


class Turns:
    """The turns of tenants in a node's thread."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waiting: dict[bytes, deque[asyncio.Future[None]]] = {}
        self._spent_ns: dict[bytes, int] = {}  # of tenants that wait or work
        self._moving: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()  # by tenant
        self._long: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()  # by tenant
        self._whole: WeakValueDictionary[bytes, asyncio.Semaphore] = WeakValueDictionary()  # by tenant
        self._rests: dict[bytes, int] = {}  # until when, by tenant
        self._is_given = False  # a turn is in progress, or about to begin
        self._began_ns = 0
        self._last = self._other = (b"", 0)  # the last caller and the last other tenant before it, with times

    def note_call(self, tenant: bytes) -> None:
        """Note that a tenant called."""
        if tenant != self._last[0]:
            self._other = self._last
        self._last = (tenant, self._clock.monotonic_ns())

    @asynccontextmanager
    async def of(self, tenant: bytes, rest: int = 1) -> AsyncIterator[Turn]:
        """Run steps inside this, with `next` between them; `rest` times each step's time is left to others."""
        turn = Turn(self, tenant, rest)
        await turn.begin()
        try:
            yield turn
        finally:
            turn.end()

    async def wait(self, tenant: bytes) -> None:
        """Wait until it is this tenant's turn."""
        if tenant not in self._spent_ns:
            self._spent_ns[tenant] = min(self._spent_ns.values(), default=0)
        if not self._is_given:
            self._begin()
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self.over(tenant)  # its turn had come
            raise

    def over(self, tenant: bytes, rest: int = 0) -> None:
        """End a step."""
        now_ns = self._clock.monotonic_ns()
        took_ns = now_ns - self._began_ns
        self._spent_ns[tenant] += took_ns
        asyncio.get_running_loop().call_later(
            rest * took_ns / _NS if self._others_call(tenant, now_ns) else 0, self._give
        )

    @asynccontextmanager
    async def moving(self, tenant: bytes) -> AsyncIterator[None]:
        """Carry a block inside this, once few enough of this tenant's are in progress."""
        if not self._others_call(tenant, self._clock.monotonic_ns()):
            yield
            return
        places = self._moving.setdefault(tenant, asyncio.Semaphore(MOVING_MAX))
        await places.acquire()
        is_held = True

        def leave() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                places.release()

        slow = asyncio.get_running_loop().call_later(MOVING_MS / 1000, leave)
        try:
            yield
        finally:
            slow.cancel()
            leave()

    async def long(self, tenant: bytes) -> Callable[[], None]:
        """Wait until this tenant may do something long; returns a function to call when it is done."""
        place = self._long.setdefault(tenant, asyncio.Semaphore(1))
        await place.acquire()
        began_ns = self._clock.monotonic_ns()

        def over() -> None:
            now_ns = self._clock.monotonic_ns()
            rest_s = (now_ns - began_ns) / _NS if self._others_call(tenant, now_ns) else 0
            asyncio.get_running_loop().call_later(rest_s, place.release)

        return over

    @asynccontextmanager
    async def whole(self, tenant: bytes) -> AsyncIterator[None]:
        """Run work without steps inside this, once the tenant's pause after earlier work has ended."""
        async with self._whole.setdefault(tenant, asyncio.Semaphore(1)):
            while self.rests(tenant):  # noqa: ASYNC110 - when the pause ends is known
                await asyncio.sleep((self._rests[tenant] - self._clock.monotonic_ns()) / _NS)
            began_ns = self._clock.monotonic_ns()
            try:
                yield
            finally:
                self.worked(tenant, self._clock.monotonic_ns() - began_ns)

    def worked(self, tenant: bytes, took_ns: int) -> None:
        """Note the time of unsliced work for a tenant, which may pause the tenant."""
        if took_ns > FABRIC_WORK_US * 1_000:
            now_ns = self._clock.monotonic_ns()
            if self._others_call(tenant, now_ns):
                self._rests[tenant] = max(self._rests.get(tenant, 0), now_ns) + FABRIC_REST * took_ns

    def rests(self, tenant: bytes) -> bool:
        """Whether the tenant is paused."""
        until_ns = self._rests.get(tenant, 0)
        if until_ns and until_ns <= self._clock.monotonic_ns():
            del self._rests[tenant]
            return False
        return until_ns > 0

    def rests_s(self) -> float:
        """Seconds until the first pause ends; 0: no tenant is paused."""
        if not self._rests:
            return 0
        now_ns = self._clock.monotonic_ns()
        self._rests = {one: until_ns for one, until_ns in self._rests.items() if until_ns > now_ns}
        return min(((until_ns - now_ns) / _NS for until_ns in self._rests.values()), default=0)

    def _others_call(self, tenant: bytes, now_ns: int) -> bool:
        whose, when_ns = self._other if self._last[0] == tenant else self._last
        return whose != b"" and now_ns - when_ns < TURNS_OTHERS_MS * 1_000_000

    def _begin(self) -> None:
        self._is_given = True
        self._began_ns = self._clock.monotonic_ns()

    def _give(self) -> None:
        """Start the next call's turn."""
        self._is_given = False
        for tenant in [one for one in self._spent_ns if one not in self._waiting]:
            del self._spent_ns[tenant]
        while self._waiting:
            tenant = min(self._waiting, key=self._spent_ns.__getitem__)
            mine = self._waiting[tenant].popleft()
            if not self._waiting[tenant]:
                del self._waiting[tenant]
            if not mine.done():
                self._begin()
                mine.set_result(None)
                return
