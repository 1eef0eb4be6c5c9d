"""Pages of tenants' quotas, granted to their clients' receivers, so that blocks can go to the drives without Python.

A lane (`kvstore.node.drive_lanes`) writes a block before Python knows of it, so room for it in its tenant's quota must
be found in advance. A client's receiver has a number of pages, which the C core counts down with each block that a lane
takes. When half of them are used it gets more; without enough of them a block comes to Python, and waits for room like
any other (`kvstore.storage.quotas`).

What always holds: a page is either granted, or charged for a reported block, or free for others; never two of these.
An idle client's pages are withdrawn, and so are a tenant's before one of its puts waits or is refused.

What it doesn't do: divide a tenant's pages between its clients. The first client has them until it is idle.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.limits import LANE_QUOTA_BYTES, PAGE_BYTES, ROOMS_IDLE_TICKS

if TYPE_CHECKING:
    from kvstore.node.put_area import PutArea
    from kvstore.storage.quotas import Quotas

__all__ = ["LaneQuotas"]

_PAGES: Final = LANE_QUOTA_BYTES // PAGE_BYTES


class LaneQuotas:
    """The pages granted to all receivers of a node."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._borrowers: dict[bytes, list[PutArea]] = {}  # by tenant: areas with granted pages
        quotas.recall = self._recall

    def renew(self, area: PutArea) -> bool:
        """Grant an active client as many pages as it should have, or as there are; return whether it got any."""
        if not area.is_limited or area.lent_pages > _PAGES // 2 or area.idle_ticks >= ROOMS_IDLE_TICKS:
            return False
        tenant = area.connection.tenant
        pages = self._quotas.lend(tenant, _PAGES - area.lent_pages)
        if pages:
            if not area.lent_pages:
                self._borrowers.setdefault(tenant, []).append(area)
            area.lent_pages += pages
            area.receiver.lend(pages)
        return pages > 0

    def charge(self, area: PutArea, pages: int) -> None:
        """Charge the tenant for blocks of this many pages, which lanes have accepted."""
        self._return(area, min(pages, area.lent_pages))  # fewer, if it had no quota when they arrived

    def take_back(self, area: PutArea) -> None:
        """Withdraw all pages, except those of blocks that lanes have accepted and not yet reported."""
        if area.lent_pages:
            self._return(area, area.receiver.recall())

    def _recall(self, tenant: bytes) -> None:
        for area in list(self._borrowers.get(tenant, ())):
            self.take_back(area)

    def _return(self, area: PutArea, pages: int) -> None:
        if not pages:
            return
        tenant = area.connection.tenant
        area.lent_pages -= pages
        self._quotas.give_back(tenant, pages)
        if not area.lent_pages:
            self._borrowers[tenant].remove(area)
            if not self._borrowers[tenant]:
                del self._borrowers[tenant]
