"""Pins: protect a tenant's blocks for a time, so that they are not evicted between a look-up and a get.

What always holds: a pin expires, even if its owner has died; only its own tenant can find it; all pins together hold
at most half of the store's drives, and one tenant's at most half of that, so that puts always find something to
evict. What it doesn't do: prevent deletion or expiry; outlive the process; count a block once if two pins hold it.
"""

from __future__ import annotations

import heapq
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.errors import Overloaded
from kvstore.limits import (
    PIN_TIMEOUT_MS,
    PIN_TIMEOUT_MS_MAX,
    PINNED_ENDED_AT_ONCE,
    PINS_MAX,
    PINS_OF_TENANT_MAX,
)
from kvstore.storage.eviction.items import Guard
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.clock import Clock
    from kvstore.storage.eviction_events import Held
    from kvstore.storage.store import Store

__all__ = ["Pinned", "Pins"]


@dataclass(frozen=True, slots=True)
class Pinned:
    """The outcome of a request for a pin."""

    pin: int  # 0: nothing was there to pin
    time_to_live_ms: int
    pinned: list[bool]


@dataclass(slots=True)
class _Pin:
    held: list[Held]
    size_bytes: int


class Pins:
    """All pins of a node."""

    def __init__(self, store: Store, clock: Clock) -> None:
        self._store = store
        self._clock = clock
        self._half_bytes = store.statistics().capacity_bytes // 2
        self._of_tenant: dict[bytes, dict[int, _Pin]] = {}
        self._deadlines: list[tuple[int, bytes, int]] = []  # a heap, which includes some pins that have ended
        self._bytes: dict[bytes, int] = {}
        self.count = 0

    def bytes_of(self, tenant: bytes, keys: Sequence[bytes]) -> int:
        """Return how many bytes a pin of these blocks would hold."""
        entries = self._store.lookup([(tenant, key) for key in keys])
        return sum(record_bytes(entry.length) for entry in entries if entry is not None)

    def hold(self, tenant: bytes, keys: Sequence[bytes]) -> list[Held | None]:
        """Protect blocks, for a pin; None for each that is not stored."""
        return self._store.hold([(tenant, key) for key in keys], Guard.LEASE)

    def let_go(self, held: Sequence[Held | None]) -> None:
        """Release blocks that did not become part of a pin."""
        self._store.release([one for one in held if one is not None], Guard.LEASE)

    def pin(
        self, tenant: bytes, held: Sequence[Held | None], size_bytes: int, time_to_live_ms: int
    ) -> Pinned:
        """Pin protected blocks; Overloaded, and nothing pinned, if that exceeds a limit."""
        time_to_live_ms = min(time_to_live_ms or PIN_TIMEOUT_MS, PIN_TIMEOUT_MS_MAX)
        self.refuse_too_much(tenant, size_bytes)
        pin = _Pin([one for one in held if one is not None], size_bytes)
        number = 0
        if pin.held:
            number = secrets.randbits(63) + 1
            self._of_tenant.setdefault(tenant, {})[number] = pin
            self._bytes[tenant] = self._bytes.get(tenant, 0) + size_bytes
            deadline_ns = self._clock.monotonic_ns() + time_to_live_ms * 1_000_000
            heapq.heappush(self._deadlines, (deadline_ns, tenant, number))
            self.count += 1
        return Pinned(number, time_to_live_ms, [one is not None for one in held])

    def refuse_too_much(self, tenant: bytes, wanted_bytes: int) -> None:
        """Overloaded, if a tenant, or all together, would have too much pinned."""
        if self._bytes.get(tenant, 0) + wanted_bytes > self._half_bytes // 2:
            raise Overloaded(
                f"A tenant may pin at most {self._half_bytes // 2} bytes of this node at a time."
            )
        if sum(self._bytes.values()) + wanted_bytes > self._half_bytes:
            raise Overloaded(f"All tenants together may pin at most {self._half_bytes} bytes of this node.")
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
        self._store.release(pin.held, Guard.LEASE)
        return True
