"""Fetches of one connection that were cancelled before the node had heard of them.

A cancellation comes by gRPC and may overtake the fetch, which comes over the fabric or in another call. What is noted
here is refused when it comes. Each block of a fetch has one word, and its client may use that word for something else
once it has been put: so it is noted as well whether the word has been put already.

What always holds: a fetch that was told to be cancelled is never served afterwards; of those that are not told, the
oldest are forgotten first, and then served, which their words say.
"""

from __future__ import annotations

import enum
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.errors import Overloaded
from kvstore.limits import ACK_WORDS

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Cancelled", "Noted"]


class Noted(enum.Enum):
    """What is known of a fetch that comes."""

    NOT = "not"  # it was not cancelled: serve it
    UNTOLD = "untold"  # refuse it, and put its word
    TOLD = "told"  # refuse it; its word was put


class Cancelled:
    """By generation of their words, which are used once in the life of a connection."""

    def __init__(self) -> None:
        self._untold: OrderedDict[int, None] = OrderedDict()
        self._told: set[int] = set()
        self._called: OrderedDict[int, None] = OrderedDict()

    def called(self, generations: Iterable[int]) -> None:
        """Fetches have come by gRPC. The last of them are remembered, so that none is taken for one that never came."""
        self._called.update(dict.fromkeys(generations))
        _bound(self._called)

    def over_fabric(self, generations: Iterable[int]) -> None:
        """Refuse these when they come; their words are put then."""
        self._untold.update(dict.fromkeys(generations))
        _bound(self._untold)

    def by_rpc(self, generations: Iterable[int]) -> list[int]:
        """Refuse these when they come; give those that have not come, whose words are to be put now.

        Overloaded if there are too many that never came: then the connection has to end.
        """
        never_came = [one for one in generations if one not in self._called]
        self._told.update(never_came)
        if len(self._told) > ACK_WORDS:
            raise Overloaded(f"More than {ACK_WORDS} fetches were cancelled that never came.")
        return never_came

    def take(self, generation: int) -> Noted:
        """Say what is known of a fetch that has come."""
        if generation in self._told:
            self._told.discard(generation)
            return Noted.TOLD
        if generation in self._untold:
            del self._untold[generation]
            return Noted.UNTOLD
        return Noted.NOT


def _bound(generations: OrderedDict[int, None]) -> None:
    while len(generations) > ACK_WORDS:
        generations.popitem(last=False)
