"""How much of a drive session records take, by tenant, and how much they may take.

A record counts from the moment its step may write it until its header is about to be wiped: while it is being
written, while it is in the index, and while it waits for the sync after which it can be removed. So after all of that
has ended the counts are those of the index, which are also the counts at a start.

Always holds:

- Sessions never take more than one part in `SESSIONS_SHARE` of a drive, and those of one tenant at most what they
  leave free of that: a tenant that only appends never takes the last page of this part from the others.
- They count towards their tenant's quota as blocks do (`kvstore.storage.quotas`), and are never evicted.
- A step whose record takes no more pages than the one it replaces is admitted beyond both bounds, one per tenant at a
  time, since the older record is removed once the new one is synced. So protection can always be ended and a session
  truncated, however full the drive is. A removal writes nothing.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from kvstore.config import show_size
from kvstore.errors import NoSpace, QuotaExceeded
from kvstore.limits import PAGE_BYTES, SESSIONS_SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from kvstore.errors import StorageError
    from kvstore.storage.quotas import Quota, Quotas

__all__ = ["Claim", "SessionSpace"]


class SessionSpace:
    """The session space of one drive."""

    def __init__(self, pages: int) -> None:
        self._pages_max = pages // SESSIONS_SHARE
        self._total = 0
        self.used: Counter[bytes] = Counter()  # pages of each tenant that has any
        self.coming: Counter[bytes] = Counter()  # those not in the index yet
        self.leaving: Counter[bytes] = Counter()  # those no longer in it

    def restore(self, used: Mapping[bytes, int]) -> None:
        """Start with the counts of the index."""
        self.used.update(used)
        self._total = self.used.total()

    def fits(self, tenant: bytes, pages: int) -> bool:
        """Return whether sessions of a tenant may take this many more pages."""
        return self.used[tenant] + pages <= self._pages_max - self._total - pages

    def is_changing(self, tenant: bytes) -> bool:
        """Return whether records of a tenant are coming or leaving."""
        return tenant in self.coming or tenant in self.leaving

    def take(self, tenant: bytes, pages: int) -> None:
        """Count records that are going to be written."""
        self._count(tenant, pages)
        _add(self.coming, tenant, pages)

    def failed(self, tenant: bytes, pages: int) -> None:
        """Stop counting them: they are about to be wiped, or were never written."""
        _add(self.coming, tenant, -pages)
        self._count(tenant, -pages)

    def kept(self, tenant: bytes, pages: int) -> None:
        """Note that they are in the index."""
        _add(self.coming, tenant, -pages)

    def leaves(self, tenant: bytes, pages: int) -> None:
        """Note records that left the index and are still on the drive."""
        _add(self.leaving, tenant, pages)

    def gone(self, tenant: bytes, pages: int) -> None:
        """Stop counting those: they are about to be wiped."""
        _add(self.leaving, tenant, -pages)
        self._count(tenant, -pages)

    def _count(self, tenant: bytes, pages: int) -> None:
        self._total += pages
        _add(self.used, tenant, pages)


class Claim:
    """The space that a step's records need, until there is room (`kvstore.storage.quotas.QuotaQueue`)."""

    __slots__ = ("_let_in", "_refuse", "grows", "pages", "size_bytes", "space", "tenant")

    def __init__(
        self,
        space: SessionSpace,
        tenant: bytes,
        pages: int,
        let_in: Callable[[], None],
        refuse: Callable[[StorageError], None],
        *,
        grows: bool,
    ) -> None:
        """`grows`: the records take more than the one that they replace."""
        self.space = space
        self.tenant = tenant
        self.pages = pages
        self.size_bytes = pages * PAGE_BYTES
        self.grows = grows
        self._let_in = let_in
        self._refuse = refuse

    @property
    def fits(self) -> bool:
        """Return whether sessions may take this much of the drive."""
        return self.space.fits(self.tenant, self.pages)

    def enter(self, quotas: Quotas) -> bool:
        """Return whether there is room for it."""
        if not self.grows and not self.space.is_changing(self.tenant):
            return True
        return self.fits and quotas.has_room(self.tenant, self.pages)

    @property
    def pages_to_evict(self) -> int:
        """How many pages must be evicted for it."""
        return self.pages if self.grows and self.fits else 0

    def is_too_large(self, quotas: Quotas) -> bool:
        """Return whether it is larger than the quota."""
        return self.grows and not quotas.could_hold(self.tenant, self.pages)

    def may_wait(self, quotas: Quotas) -> bool:
        """Return whether it may wait for room."""
        return self.space.is_changing(self.tenant) or (self.fits and quotas.waits_for_own(self.tenant))

    def let_in(self) -> None:
        """Continue the step."""
        self.space.take(self.tenant, self.pages)
        self._let_in()

    def refuse(self, quota: Quota) -> None:
        """End the step without effect: with the error that fits why there is no room."""
        if not self.fits:
            self._refuse(
                NoSpace(
                    f"The drive has no room for {show_size(self.size_bytes)} of a session: sessions have as much of it"
                    " as they may; remove some."
                )
            )
        else:
            self._refuse(
                QuotaExceeded(
                    f"The session needs {show_size(self.size_bytes)}, and of the quota of {show_size(quota.bytes_max)}"
                    f" {show_size(quota.used_bytes)} are in use by records that can't be evicted."
                )
            )


def _add(counts: Counter[bytes], tenant: bytes, pages: int) -> None:
    counts[tenant] += pages
    if not counts[tenant]:
        del counts[tenant]
