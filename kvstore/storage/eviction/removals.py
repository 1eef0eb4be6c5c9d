"""The reasons for which the last removed blocks were removed.

Always holds: the newest are remembered, by their exact names, a fixed number of them, some 600 bytes each; of one
name only the newest.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvstore.storage.eviction.items import Eviction

    Name = tuple[bytes, bytes]
    """Tenant and key."""

__all__ = ["History"]


class History:
    """Evictions by name, oldest first."""

    __slots__ = ("_by_name", "_size")

    def __init__(self, size: int) -> None:
        self._size = size
        self._by_name: OrderedDict[Name, Eviction] = OrderedDict()

    def add(self, name: Name, eviction: Eviction) -> None:
        """Remember one, in the place of the oldest."""
        self._by_name.pop(name, None)
        self._by_name[name] = eviction
        if len(self._by_name) > self._size:
            self._by_name.popitem(last=False)

    def of(self, name: Name) -> Eviction | None:
        """Return how a block went, if it is remembered."""
        return self._by_name.get(name)
