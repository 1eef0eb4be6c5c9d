"""Quotas: how many bytes of a store a tenant may use; at its quota a tenant makes room for itself.

A tenant's use is what its blocks and the records of its sessions (`kvstore.storage.session_space`) take on the drives,
in whole pages with headers, what its pending puts and steps will take, and what was quarantined since the opening and
is not in use again. Blocks that are written without this module (by lanes, `kvstore.node.drive_lanes`) take pages lent
in advance, a small part of the quota: no other block takes them meanwhile, and they don't count as use.

Always holds:

- A tenant never exceeds its quota, on all drives together, except by what it had when the quota was set, of which the
  oldest is evicted at once, as far as possible; and by one record of a session on each drive, until that record's
  sync, if it takes no more than the one that it replaces.
- To make room for a tenant, or for pages lent to it, only its own blocks are evicted: of those that may be, exactly the
  least recently used one, on any drive. Before a put waits, unused lent pages are recalled. After an opening uses are
  unknown; then blocks are evicted by age, with the drives in step.
- A put, or a step of a session, that would exceed the quota waits, before it takes any room, while something of its
  tenant is pending or guarded for a limited time, `ROOM_WAIT_MS_MAX` at most; then it is refused, and the error has
  the quota. The tenant's later puts and steps on that drive wait behind it; other tenants' don't. While anything
  waits, the drive is synced, so that records that sessions have replaced are removed.
- No step is long: at most `EVICTION_URGENT_BLOCKS` are evicted before other work gets a turn.

Use is counted where it changes (`eviction.owners`), so it can't drift from what is stored. A drive that accepts no
writes still counts, but nothing is evicted there. A refused put may have caused evictions.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

from kvstore.config import show_size
from kvstore.errors import ConfigError, QuotaExceeded
from kvstore.limits import (
    EVICTION_STEPS_MAX,
    EVICTION_URGENT_BLOCKS,
    PAGE_BYTES,
    QUOTA_LENT_SHARE,
    QUOTA_OWNERS_MAX,
    ROOM_WAIT_MS_MAX,
)
from kvstore.storage.eviction.evictor import NEVER, Uses
from kvstore.storage.eviction.policy import Steps
from kvstore.storage.eviction.types import Evictions
from kvstore.storage.writes import RecordWrite

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.traffic import Traffic
    from kvstore.storage.writes import Owner, Writes

__all__ = ["Charged", "Made", "Quota", "QuotaQueue", "Quotas", "Wanting"]


class Quota(NamedTuple):
    """A tenant's quota and use. Without a quota, use is not counted."""

    bytes_max: int  # 0: no quota
    used_bytes: int


class Made(NamedTuple):
    """The outcome of making room."""

    blocks: int  # evicted
    more: bool  # a bound was reached: more blocks may be evictable


class Wanting(Protocol):
    """An operation that needs room in its tenant's quota."""

    @property
    def tenant(self) -> bytes:
        """The tenant that it is charged to."""
        ...

    @property
    def size_bytes(self) -> int:
        """The bytes it needs."""
        ...

    @property
    def pages_to_evict(self) -> int:
        """How many pages must be evicted for it."""
        ...

    def enter(self, quotas: Quotas) -> bool:
        """Return whether there is room for it."""
        ...

    def is_too_large(self, quotas: Quotas) -> bool:
        """Return whether it is larger than the quota."""
        ...

    def may_wait(self, quotas: Quotas) -> bool:
        """Return whether it may wait for room."""
        ...

    def let_in(self) -> None:
        """Go on."""
        ...

    def refuse(self, quota: Quota) -> None:
        """End: there is no room."""
        ...


class Charged(RecordWrite):
    """A write of a tenant's block, and the bytes charged for it."""

    __slots__ = ("charged_pages",)

    def __init__(
        self, writes: Writes, owner: Owner, address: int, size_bytes: int, tenant: bytes, domain: bytes
    ) -> None:
        super().__init__(writes, owner, address, size_bytes, tenant, domain)
        self.charged_pages = 0

    @property
    def pages_to_evict(self) -> int:
        """How many pages must be evicted for it."""
        return self.size_bytes // PAGE_BYTES

    def enter(self, quotas: Quotas) -> bool:
        """Charge it if there is room, and return whether there was."""
        return quotas.enter(self)

    def is_too_large(self, quotas: Quotas) -> bool:
        """Return whether it is larger than the quota."""
        return not quotas.could_hold(self.tenant, self.size_bytes // PAGE_BYTES)

    def may_wait(self, quotas: Quotas) -> bool:
        """Return whether it may wait for room."""
        return quotas.waits_for_own(self.tenant)

    def let_in(self) -> None:
        """Queue it."""
        self._writes.add(self)

    def refuse(self, quota: Quota) -> None:
        """End the put: it fails with QuotaExceeded."""
        why = "All of the tenant's other blocks are guarded, and the block exceeds"
        if self.size_bytes > quota.bytes_max:
            why = "The block is larger than"
        self.owner.finish(
            [self],
            QuotaExceeded(
                f"{why} the quota of {show_size(quota.bytes_max)}, of which {show_size(quota.used_bytes)} are in use"
                f" and {show_size(self.size_bytes)} more are wanted."
            ),
        )


def _lends_nothing(tenant: bytes) -> None:
    """Recall nothing, because nothing is lent."""


class Quotas:
    """The quotas of all tenants of a store, over all its drives."""

    def __init__(self, drives: Sequence[Keeping], clock: Clock) -> None:
        self._drives = drives
        self._clock = clock
        self._pages_max: dict[bytes, int] = {}
        self._numbers: dict[bytes, int] = {}  # of all that ever had a quota; they stay counted
        self._under_way: dict[bytes, int] = {}  # pages of puts that were admitted and are in no index yet
        self._lent: dict[bytes, int] = {}  # pages for blocks that have not been reported yet
        self.recall: Callable[[bytes], None] = _lends_nothing  # takes a tenant's lent pages back
        self._over: set[bytes] = set()  # tenants that may exceed their quota since it was changed
        self._uses = Uses()
        for keeping in drives:
            keeping.core.share_uses(self._uses)
            keeping.owner_numbers = self._numbers

    def change(self, bytes_max: Mapping[bytes, int]) -> None:
        """Set the quotas of these tenants; all others have none. It examines all blocks of tenants new to it."""
        new = [tenant for tenant in bytes_max if tenant not in self._numbers]
        if len(self._numbers) + len(new) > QUOTA_OWNERS_MAX:
            raise ConfigError(
                f"{QUOTA_OWNERS_MAX} tenants have had a quota since the node was started; restart it."
            )
        self._pages_max = {tenant: limit // PAGE_BYTES for tenant, limit in bytes_max.items()}
        for tenant in new:
            number = self._numbers[tenant] = len(self._numbers) + 1
            each = [keeping.generations_of(tenant) for keeping in self._drives]
            self._uses.add(max(map(len, each)))
            for keeping, generations in zip(self._drives, each, strict=True):
                keeping.core.own(generations, number)
        self._over = {tenant for tenant in bytes_max if self._excess_pages(tenant, 0) > 0}

    def of(self, tenant: bytes) -> Quota:
        """Return a tenant's quota and its use."""
        return Quota(
            self._pages_max.get(tenant, 0) * PAGE_BYTES,
            self._used_pages(tenant) * PAGE_BYTES if tenant in self._pages_max else 0,
        )

    def limits(self, tenant: bytes) -> bool:
        """Return whether a tenant has a quota."""
        return tenant in self._pages_max

    def could_hold(self, tenant: bytes, pages: int) -> bool:
        """Return whether this many pages fit into the tenant's quota if nothing else is stored."""
        return tenant not in self._pages_max or pages <= self._pages_max[tenant]

    def has_room(self, tenant: bytes, pages: int) -> bool:
        """Return whether this many more pages fit into the tenant's quota."""
        return tenant not in self._pages_max or self._excess_pages(tenant, pages) <= 0

    def enter(self, write: Charged) -> bool:
        """Charge a put if there is room for it."""
        if write.tenant not in self._pages_max:
            return True
        pages = write.size_bytes // PAGE_BYTES
        if self._excess_pages(write.tenant, pages) > 0:
            return False
        self.charge(write)
        return True

    def lend(self, tenant: bytes, pages: int) -> int:
        """Lend a tenant pages of its quota, as far as there is room or can be made; return how many."""
        most = self._pages_max[tenant] // QUOTA_LENT_SHARE
        wanted, pages = min(pages, most), min(pages, most - self._lent.get(tenant, 0))
        if pages <= wanted // 2 or tenant in self._over:  # not for each block
            return 0
        if self._excess_pages(tenant, pages) > 0:
            self.make_room(tenant, pages, EVICTION_URGENT_BLOCKS)
            pages -= max(0, self._excess_pages(tenant, pages))
        if pages <= 0:
            return 0
        self._lent[tenant] = self._lent.get(tenant, 0) + pages
        return pages

    def give_back(self, tenant: bytes, pages: int) -> None:
        """End the loan of these pages."""
        left = self._lent[tenant] - pages
        if left:
            self._lent[tenant] = left
        else:
            del self._lent[tenant]

    def charge(self, write: Charged) -> None:
        """Charge a put that is being written: there was room for it, or no quota, when it began."""
        if write.tenant in self._pages_max:
            write.charged_pages = write.size_bytes // PAGE_BYTES
            self._under_way[write.tenant] = self._under_way.get(write.tenant, 0) + write.charged_pages

    def leave(self, write: Charged) -> None:
        """End a put's pending charge: it is in the index, or has failed."""
        if write.charged_pages:
            left = self._under_way[write.tenant] - write.charged_pages
            write.charged_pages = 0
            if left:
                self._under_way[write.tenant] = left
            else:
                del self._under_way[write.tenant]

    def waits_for_own(self, tenant: bytes) -> bool:
        """Return whether any of the tenant's guarded or pending blocks will become evictable."""
        if tenant in self._under_way:
            return True
        for one in self._drives:
            if one.quarantined_pages_of(tenant) or (one.takes_writes and one.space.is_changing(tenant)):
                return True
        return any(one.has_passing_guards() for one in self._drives)

    def make_room(self, tenant: bytes, pages: int, blocks_max: int) -> Made:
        """Evict the tenant's blocks until these pages fit, as far as guards allow."""
        number, now_ms = self._numbers[tenant], self._clock.wall_ms()
        steps = Steps(EVICTION_STEPS_MAX)
        drives = [one for one in self._drives if one.takes_writes]
        leaving_pages = sum(one.space.leaving[tenant] for one in drives)  # with the next sync
        excess_pages = self._excess_pages(tenant, pages) - leaving_pages
        victims: dict[Keeping, Evictions] = {}
        evicted = 0
        while excess_pages > 0 and evicted < blocks_max:
            uses = [one.core.oldest_use(number, steps) for one in drives]
            oldest = sorted((use, at) for at, use in enumerate(uses) if use is not None)
            if not oldest or steps.left <= 0:
                break
            at, keeping = oldest[0][1], drives[oldest[0][1]]
            # As many as were used before the oldest one of the other drives; among equals, the first drive's.
            before = [use + (at < other) for use, other in oldest[1:2]]
            some = keeping.core.evict_oldest(
                number, excess_pages, blocks_max - evicted, steps, now_ms, before=min(before, default=NEVER)
            )
            victims.setdefault(keeping, Evictions()).words.extend(some.words)
            excess_pages -= some.pages
            evicted += len(some)
        for keeping, all_of_it in victims.items():
            keeping.evict(all_of_it)
        return Made(evicted, steps.left <= 0 or (evicted == blocks_max and excess_pages > 0))

    def shrink(self, blocks_max: int) -> int:
        """Evict blocks of tenants that exceed a changed quota; return how many."""
        evicted = 0
        for tenant in list(self._over):
            made = self.make_room(tenant, 0, blocks_max - evicted)
            evicted += made.blocks
            if made.more:
                break
            self._over.discard(tenant)  # guarded blocks are evicted with its next put
        return evicted

    @property
    def is_over(self) -> bool:
        """Return whether `shrink` has something to do."""
        return bool(self._over)

    def _used_pages(self, tenant: bytes) -> int:
        number = self._numbers[tenant]
        stored = sum(
            keeping.core.owned_pages(number)
            + keeping.quarantined_pages_of(tenant)
            + keeping.space.used[tenant]
            for keeping in self._drives
        )
        return stored + self._under_way.get(tenant, 0)

    def _excess_pages(self, tenant: bytes, pages: int) -> int:
        return self._used_pages(tenant) + self._lent.get(tenant, 0) + pages - self._pages_max[tenant]


class QuotaQueue:
    """Puts and session steps of one drive that wait for room in their tenants' quotas."""

    def __init__(self, quotas: Quotas, writes: Writes, traffic: Traffic, clock: Clock) -> None:
        self.quotas = quotas
        self._writes = writes
        self._traffic = traffic
        self._clock = clock
        self._waiting: dict[bytes, deque[tuple[Wanting, int]]] = {}  # with the time each began to wait, in ns
        self._more = False
        self._closing = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    @property
    def is_due(self) -> bool:
        """Return whether there is work that no completion of a drive will trigger."""
        return self._more or self.quotas.is_over

    def look_again(self) -> None:
        """Run a step soon, because guards were released."""
        self._more = bool(self._waiting)

    def close(self) -> None:
        """Refuse everything that waits for guards."""
        self._closing = self._more = True

    def add(self, wanting: Wanting) -> None:
        """Queue an operation; it proceeds at once if there is room."""
        tenant = wanting.tenant
        if tenant not in self._waiting and wanting.enter(self.quotas):
            wanting.let_in()
        elif wanting.is_too_large(self.quotas):
            wanting.refuse(self.quotas.of(tenant))
        else:
            self._waiting.setdefault(tenant, deque()).append((wanting, self._clock.monotonic_ns()))
            self._more = True

    def step(self) -> None:
        """Make room for waiting operations and let them proceed, within bounds."""
        self._more = False
        if self._waiting:
            self._writes.sync_if_awaited(at_once=True)
        left = EVICTION_URGENT_BLOCKS - self.quotas.shrink(EVICTION_URGENT_BLOCKS)
        for tenant in list(self._waiting):
            if left <= 0:
                self._more = True
                break
            left -= self._serve(tenant, left)

    def _serve(self, tenant: bytes, blocks_max: int) -> int:
        waiting = self._waiting.pop(tenant)  # and to the end, if it has to wait longer
        made = Made(0, more=False)
        if self.quotas.limits(tenant) and self._writes.stopped is None:
            self.quotas.recall(tenant)
            pages = sum(one.pages_to_evict for one, _ in waiting)
            most = self.quotas.of(tenant).bytes_max // PAGE_BYTES
            made = self.quotas.make_room(tenant, min(pages, most), blocks_max)
        while waiting:
            first, since_ns = waiting[0]
            if self._writes.stopped is not None or first.enter(self.quotas):
                first.let_in()  # it is refused if the drive has stopped
            elif made.more or self._may_wait(first, since_ns):
                self._waiting[tenant] = waiting
                self._more = self._more or made.more
                break
            else:
                first.refuse(self.quotas.of(tenant))
            waiting.popleft()
        return made.blocks

    def _may_wait(self, wanting: Wanting, since_ns: int) -> bool:
        if self._closing and not (self._traffic.in_flight or self._traffic.queued):
            return False
        waited_ms = (self._clock.monotonic_ns() - since_ns) // 1_000_000
        return waited_ms < ROOM_WAIT_MS_MAX and wanting.may_wait(self.quotas)
