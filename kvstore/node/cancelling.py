"""Fetches of one connection that were cancelled before they reached the node.

A cancellation comes by gRPC and may overtake its fetch, which comes over the fabric or in another call. It is recorded
here, and the fetch is refused when it arrives. Each block of a fetch has one word, which its client may reuse once it
has been written: so the record also says whether the word has been written.

What always holds: a fetch whose cancellation was confirmed is never served afterwards. So when too many of these are
recorded, most of which never arrive, the oldest is dropped, and everything that comes by gRPC with a generation up to
its own is refused as well; its client cancels it late, and is told then. Unconfirmed ones are dropped oldest first, and
then served, as their words will say.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.limits import ACK_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Cancelled", "Noted"]


class Noted(enum.Enum):
    """The state of a fetch that may be cancelled."""

    NOT = "not"  # it was not cancelled: serve it
    UNTOLD = "untold"  # refuse it, and put its word
    TOLD = "told"  # refuse it; its word was put


class Cancelled:
    """By generation of their words, which are used once in the life of a connection."""

    def __init__(self) -> None:
        self._untold: OrderedDict[int, None] = OrderedDict()
        self._told: OrderedDict[int, None] = OrderedDict()
        self._forgotten = 0  # of those that were told, the highest that is not remembered
        self._called: OrderedDict[int, None] = OrderedDict()

    def over_fabric(self, generations: Iterable[int]) -> None:
        """Refuse these when they come; their words are put then."""
        self._untold.update(dict.fromkeys(generations))
        _bound(self._untold)

    def by_rpc(self, generations: Iterable[int]) -> list[int]:
        """Refuse these fetches when they arrive; returns those that have not arrived, whose words are to be put now."""
        never_came = [one for one in generations if one not in self._called]
        self._told.update(dict.fromkeys(never_came))
        while len(self._told) > ACK_WORDS:
            self._forgotten = max(self._forgotten, self._told.popitem(last=False)[0])
        return never_came

    def take(self, generation: int, *, called: bool) -> Noted:
        """Return the state of a fetch that has arrived; `called`: by gRPC.

        The last of those are remembered, so that none is taken for one that never came.
        """
        if called:
            if generation in self._told:
                del self._told[generation]
                return Noted.TOLD
            if generation <= self._forgotten:
                return Noted.TOLD
            self._called[generation] = None
            _bound(self._called)
        if generation in self._untold:
            del self._untold[generation]
            return Noted.UNTOLD
        return Noted.NOT


def _bound(generations: OrderedDict[int, None]) -> None:
    while len(generations) > ACK_WORDS:
        generations.popitem(last=False)
