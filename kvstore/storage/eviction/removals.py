"""Why the last removed blocks were removed.

Always holds: a fixed number of the newest removals is remembered, by exact name, in some 300 bytes each; of one
name only the newest.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from kvstore.storage.eviction.items import EVICTION_WORDS, eviction_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.storage.eviction.items import Eviction, Evictions

    Name = tuple[bytes, bytes]
    """Tenant and key."""

__all__ = ["History"]


class History:
    """Evictions by name, oldest first."""

    __slots__ = ("_first_words", "_size", "_words")

    def __init__(self, size: int) -> None:
        self._size = size
        self._words = array("Q", bytes(8 * EVICTION_WORDS * size))
        self._first_words: OrderedDict[Name, int] = OrderedDict()  # where the words of each begin

    def add(self, names: Sequence[Name], evictions: Evictions) -> None:
        """Remember evictions, in place of the oldest."""
        by_name, ours, words = self._first_words, self._words, evictions.words
        for name, at in zip(names, range(0, len(words), EVICTION_WORDS), strict=True):
            first = by_name.pop(name, -1)
            if first < 0:
                full = len(by_name) == self._size
                first = by_name.popitem(last=False)[1] if full else len(by_name) * EVICTION_WORDS
            by_name[name] = first
            ours[first : first + EVICTION_WORDS] = words[at : at + EVICTION_WORDS]

    def of(self, name: Name) -> Eviction | None:
        """Return the eviction of a block, if it is remembered."""
        first = self._first_words.get(name, -1)
        return None if first < 0 else eviction_of(self._words, first)

    def session_of(self, name: Name) -> int:
        """Return the last session that a removed block was in; 0 if it was in none, or isn't remembered."""
        first = self._first_words.get(name, -1)
        return 0 if first < 0 else self._words[first + 2]
