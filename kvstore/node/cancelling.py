"""Fetches of one connection that were cancelled before they reached the node.

A cancellation arrives over gRPC and may overtake its fetch, which arrives over the fabric or in another call. It is
recorded here, and the fetch is refused when it arrives. Each block of a fetch has one word, which its client may reuse
once it has been written: so the record also says whether the word has been written.

What always holds: a fetch whose cancellation was confirmed is never served afterwards. So when too many of these are
recorded, most of which never arrive, the oldest is dropped, and every fetch that arrives over gRPC with a generation up
to its own is refused as well; such a fetch gets its word when its client cancels it. Unconfirmed cancellations are
dropped oldest first; their fetches are then served, as their words will say.
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
    """Cancelled fetches, by the generations of their words, each of which is used once in a connection's life."""

    def __init__(self) -> None:
        self._untold: OrderedDict[int, None] = OrderedDict()
        self._cancelled: OrderedDict[int, None] = OrderedDict()
        self._forgotten = 0  # the highest of the confirmed ones that were dropped
        self._called: OrderedDict[int, None] = OrderedDict()

    def over_fabric(self, generations: Iterable[int]) -> None:
        """Refuse these fetches when they arrive; their words are put then."""
        self._untold.update(dict.fromkeys(generations))
        _bound(self._untold)

    def by_rpc(self, generations: Iterable[int]) -> list[int]:
        """Refuse these fetches when they arrive; returns those that have not arrived, whose words are to be put now."""
        never_came = [one for one in generations if one not in self._called]
        self._cancelled.update(dict.fromkeys(never_came))
        while len(self._cancelled) > ACK_WORDS:
            self._forgotten = max(self._forgotten, self._cancelled.popitem(last=False)[0])
        return never_came

    def take(self, generation: int, *, called: bool) -> Noted:
        """Return the state of a fetch that has arrived; `called`: over gRPC.

        The latest of those are remembered, so that `by_rpc` knows that they have arrived.
        """
        if called:
            if generation in self._cancelled:
                del self._cancelled[generation]
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
