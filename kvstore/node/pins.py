"""Pins: protect a tenant's blocks for a time, so that they are not evicted between a look-up and a get.

What always holds: a pin expires, even if its owner has died; only its own tenant can find it; all pins together hold
at most half of the store's drives, and one tenant's at most half of that, so that puts always find something to
evict. A block that is removed leaves its pins, and a pin without blocks has ended. What it doesn't do: prevent deletion
or expiry; outlive the process; count a block once if two pins hold it.
"""

from __future__ import annotations

import heapq
import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvstore.config import show_size
from kvstore.errors import Overloaded
from kvstore.limits import (
    PIN_TIMEOUT_MS,
    PIN_TIMEOUT_MS_MAX,
    PINNED_ENDED_AT_ONCE,
    PINS_MAX,
    PINS_OF_TENANT_MAX,
)
from kvstore.storage.eviction.types import Guard
from kvstore.storage.index_layout import names_of
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.storage.eviction.types import Reason
    from kvstore.storage.eviction_events import Held
    from kvstore.storage.index import Name
    from kvstore.storage.store import Store

__all__ = ["Pin", "Pinned", "Pins"]


@dataclass(frozen=True, slots=True)
class Pinned:
    """The outcome of a request for a pin."""

    pin: int  # 0: nothing was there to pin
    time_to_live_ms: int
    pinned: list[bool]


@dataclass(slots=True, eq=False)
class Pin:
    """Blocks that a pin protects, or will once it has a number."""

    tenant: bytes
    number: int = 0
    held: dict[Name, tuple[Held, int]] = field(default_factory=dict)  # with the bytes of each

    @property
    def size_bytes(self) -> int:
        """How many bytes it holds."""
        return sum(size_bytes for _, size_bytes in self.held.values())


class Pins:
    """All pins of a node."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._half_bytes = store.statistics().capacity_bytes // 2
        self._of_tenant: dict[bytes, dict[int, Pin]] = {}
        self._of_block: dict[Name, list[Pin]] = {}
        self._deadlines: list[tuple[int, bytes, int]] = []  # a heap, which includes some pins that have ended
        self._bytes: dict[bytes, int] = {}
        self.count = 0

    def sizes(self, tenant: bytes, keys: Sequence[bytes]) -> list[int]:
        """Return how many bytes a pin of each block would hold; 0 if it is not stored."""
        entries = self._store.lookup([(tenant, key) for key in keys])
        return [0 if entry is None else record_bytes(entry.length) for entry in entries]

    def hold(self, pin: Pin, keys: Sequence[bytes], sizes: Sequence[int]) -> list[bool]:
        """Protect blocks for a pin that has no number yet; return which are stored."""
        names = [(pin.tenant, key) for key in keys]
        wanted = {name: size for name, size in zip(names, sizes, strict=True) if name not in pin.held}
        for name, held in zip(wanted, self._store.hold(list(wanted), Guard.LEASE), strict=True):
            if held is not None:
                pin.held[name] = held, wanted[name]
                self._of_block.setdefault(name, []).append(pin)
        return [name in pin.held for name in names]

    def release(self, pin: Pin) -> None:
        """Release the blocks of a pin."""
        for name in pin.held:
            self._leaves(pin, name)
        self._store.release([held for held, _ in pin.held.values()], Guard.LEASE)

    def pin(self, pin: Pin, pinned: list[bool], time_to_live_ms: int) -> Pinned:
        """Give a pin its number; Overloaded, and nothing changed, if that exceeds a limit."""
        time_to_live_ms = min(time_to_live_ms or PIN_TIMEOUT_MS, PIN_TIMEOUT_MS_MAX)
        tenant, size_bytes = pin.tenant, pin.size_bytes
        self.refuse_too_much(tenant, size_bytes)
        if pin.held:
            pin.number = secrets.randbits(63) + 1
            self._of_tenant.setdefault(tenant, {})[pin.number] = pin
            self._bytes[tenant] = self._bytes.get(tenant, 0) + size_bytes
            deadline_ns = self._clock.monotonic_ns() + time_to_live_ms * 1_000_000
            heapq.heappush(self._deadlines, (deadline_ns, tenant, pin.number))
            self.count += 1
        return Pinned(pin.number, time_to_live_ms, pinned)

    def changed(self, rows: NDArray[Any], reason: Reason | None) -> None:
        """Note that blocks, given as rows of the index, were removed or, without a reason, stored."""
        for name in names_of(rows) if reason is not None and self._of_block else ():
            for pin in list(self._of_block.get(name, ())):
                self._leaves(pin, name)
                _, size_bytes = pin.held.pop(name)
                if pin.number:
                    self._bytes[pin.tenant] -= size_bytes
                    if not pin.held:
                        self.unpin(pin.tenant, pin.number)

    def refuse_too_much(self, tenant: bytes, wanted_bytes: int) -> None:
        """Overloaded, if a tenant, or all together, would have too much pinned."""
        if self._bytes.get(tenant, 0) + wanted_bytes > self._half_bytes // 2:
            raise Overloaded(
                f"A tenant may pin at most {show_size(self._half_bytes // 2)} of this node at a time; end some pins, or"
                " pin fewer blocks."
            )
        if sum(self._bytes.values()) + wanted_bytes > self._half_bytes:
            raise Overloaded(
                f"All tenants together may pin at most {show_size(self._half_bytes)} of this node; try again later."
            )
        mine = len(self._of_tenant.get(tenant, ()))
        if mine >= PINS_OF_TENANT_MAX or self.count >= PINS_MAX:
            raise Overloaded(
                "The node has its maximum number of pins; let some end, or pin more blocks per call."
            )

    def expire(self) -> None:
        """End expired pins, a bounded number of blocks at a time."""
        now_ns, blocks = self._clock.monotonic_ns(), 0
        while self._deadlines and self._deadlines[0][0] <= now_ns and blocks < PINNED_ENDED_AT_ONCE:
            _, tenant, number = heapq.heappop(self._deadlines)
            pin = self._of_tenant.get(tenant, {}).get(number)
            blocks += 0 if pin is None else len(pin.held)
            self.unpin(tenant, number)

    def unpin(self, tenant: bytes, number: int) -> bool:
        """End a tenant's pin; returns whether it had not ended yet."""
        mine = self._of_tenant.get(tenant, {})
        pin = mine.pop(number, None)
        if pin is None:
            return False
        self._bytes[tenant] -= pin.size_bytes
        if not mine:
            del self._of_tenant[tenant], self._bytes[tenant]
        self.count -= 1
        if len(self._deadlines) > 2 * self.count + PINS_OF_TENANT_MAX:  # most of them have ended
            self._deadlines = [one for one in self._deadlines if one[2] in self._of_tenant.get(one[1], ())]
            heapq.heapify(self._deadlines)
        self.release(pin)
        return True

    def _leaves(self, pin: Pin, name: Name) -> None:
        pins = self._of_block[name]
        pins.remove(pin)
        if not pins:
            del self._of_block[name]
