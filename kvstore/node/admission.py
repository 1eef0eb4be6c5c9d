"""Admission: the `Entrance` begins few calls of each tenant at a time; the others wait in a queue of their tenant.

gRPC hands the node its calls in the order of their arrival, whatever their tenant, one of each method for each round
of the node's thread. So a call that can't begin yet must cost next to nothing, or the calls behind it wait inside
gRPC, where their tenant is not known. Of each tenant one call at a time has begun and wants the thread: a thousand
waiting calls get no more of it than one does, and less while other tenants call, so that the backlog leaves gRPC. After
a call that had the thread for long, the tenant's next one waits for as long, while other tenants call. A call that
waits for something else, such as a drive, is detected and no longer counts. On a node with one tenant, whose calls
could only wait for each other, `CALLS_BEGUN_MAX` may have begun.

What always holds: a tenant's calls begin in the order of their arrival. A call cancelled in the queue leaves nothing
behind. A tenant has its share of the places in the queue.
What it doesn't do: read messages. They are read once the call begins; until then gRPC holds what its window lets in.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from functools import partial
from types import coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from kvstore.errors import Overloaded
from kvstore.limits import (
    CALLS_BEGUN_LOOKS_MAX,
    CALLS_BEGUN_MAX,
    CALLS_LINE_LONG,
    CALLS_OUTSIDE_MAX,
    CALLS_REST,
    CALLS_REST_MS,
    CALLS_WAIT_MS,
    CALLS_WORK_US,
    TURNS_OTHERS_MS,
)
from kvstore.node.fair_queue import Places

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Generator

__all__ = ["Begun", "Entrance"]

T = TypeVar("T")


class Begun:
    """A call that has begun."""

    def __init__(self, over: Callable[[float], None]) -> None:
        """`over` is called once: when the call ends, or is seen to wait for something other than the thread.

        Its argument is the number of seconds for which the call had the thread.
        """
        self._over: Callable[[float], None] | None = over
        self._worked_s = 0.0
        self._waits_for: asyncio.Future[Any] | None = None
        self._waited_for: asyncio.Future[Any] | None = None  # at the last look
        self._looks = 0
        self._is_done = False  # except that the caller must still read the answer
        self._look_later()

    def _look_later(self) -> None:
        self._next = asyncio.get_running_loop().call_later(CALLS_WAIT_MS / 1000, self._look)

    def _look(self) -> None:
        self._looks += 1
        before, now = self._waited_for, self._waits_for
        self._waited_for = now
        waits = now is not None and now is before and not now.done()
        if waits or self._is_done or self._looks == CALLS_BEGUN_LOOKS_MAX:
            self.over()
        else:
            self._look_later()

    @coroutine
    def of(self, steps: Coroutine[Any, Any, T]) -> Generator[Any, Any, T]:
        """Run the call, and watch what it waits for."""
        error: BaseException | None = None
        now_s = asyncio.get_running_loop().time
        while True:
            began_s = now_s()
            try:
                self._waits_for = steps.send(None) if error is None else steps.throw(error)
            except StopIteration as end:
                self._is_done, self._waits_for = True, None
                return end.value  # type: ignore[no-any-return] # of a coroutine of T
            finally:
                self._worked_s += now_s() - began_s
                error = None  # its frames refer to this one
            try:
                yield self._waits_for
            except GeneratorExit:
                steps.close()
                raise
            except BaseException as raised:  # noqa: BLE001 - raised inside the call
                error = raised

    def over(self) -> None:
        """Admit the tenant's next call, if this one counts."""
        if self._over is not None:
            self._next.cancel()
            over, self._over = self._over, None
            over(self._worked_s)


class Entrance:
    """The admission of a node's calls."""

    def __init__(self, tenants: Callable[[], int]) -> None:
        """`tenants` returns how many tenants the node knows."""
        self._tenants = tenants
        self._begun: Counter[str | None] = Counter()
        self._last: tuple[str | None, ...] = ()  # the latest caller
        self._others_came = -math.inf  # when a caller arrived that differed from the one before
        self._outside: dict[str | None, deque[asyncio.Future[None]]] = {}
        self._places = Places(CALLS_OUTSIDE_MAX, tenants)

    async def enter(self, who: str | None) -> Begun:
        """Wait until a call of this tenant may begin; Overloaded if its share of places is taken."""
        if self._last not in ((), (who,)):
            self._others_came = asyncio.get_running_loop().time()
        self._last = (who,)
        if self._begun[who] < (CALLS_BEGUN_MAX if self._tenants() == 1 else 1):
            self._begun[who] += 1
        else:
            await self._wait(who)
        return Begun(partial(self._over, who))

    async def _wait(self, who: str | None) -> None:
        if not self._places.left(who):
            raise Overloaded("The tenant has as many calls waiting as its share of the node's.")
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outside.setdefault(who, deque()).append(mine)
        self._places.take(who)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.done() and not mine.cancelled():
                self._over(who, 0)  # its turn had come
            raise
        finally:
            self._places.give_back(who)

    def _over(self, who: str | None, worked_s: float) -> None:
        """Begin this tenant's next call in place of one that has ended, at once or a little later."""
        loop, line = asyncio.get_running_loop(), self._outside.get(who)
        rest_s = CALLS_REST_MS / 1000 if line is not None and len(line) > CALLS_LINE_LONG else 0
        if worked_s > CALLS_WORK_US / 1_000_000:
            rest_s = max(rest_s, CALLS_REST * worked_s)
        if rest_s and loop.time() - self._others_came < TURNS_OTHERS_MS / 1000:
            loop.call_later(rest_s, self._next, who)
        else:
            self._next(who)

    def _next(self, who: str | None) -> None:
        line = self._outside.get(who)
        while line:
            mine = line.popleft()
            if not mine.done():
                mine.set_result(None)
                return
        self._outside.pop(who, None)
        self._begun[who] -= 1
        if not self._begun[who]:
            del self._begun[who]
