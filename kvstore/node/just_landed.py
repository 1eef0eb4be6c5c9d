"""Blocks that have landed by a grant, and that the store doesn't have yet, by name.

What always holds: they can be read until the store has them, or they are deleted. Of several with one name it is the
one that landed first: the store takes it, and may refuse the others.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, KeysView, Sequence

    from kvstore.node.hot import Name
    from kvstore.node.put_area import Landed

__all__ = ["JustLanded"]


class JustLanded:
    """All such blocks of a node."""

    def __init__(self) -> None:
        self._blocks: dict[Name, Landed] = {}
        self._waiting: list[asyncio.Future[None]] = []  # until one of them ends

    def __len__(self) -> int:
        return len(self._blocks)

    @property
    def names(self) -> KeysView[Name]:
        """Their names."""
        return self._blocks.keys()

    def get(self, name: Name) -> Landed | None:
        """The first one of a name, even if it must not be read."""
        return self._blocks.get(name)

    def find(self, name: Name) -> Landed | None:
        """The block of this name, if it can be read."""
        one = self._blocks.get(name)
        if one is None or one.is_gone or one.came.is_stored:  # the store must compare such a block first
            return None
        return one

    def add(self, landed: Iterable[Landed]) -> None:
        """Add those that are the first of their names."""
        for one in landed:
            first = self._blocks.get(one.name)
            if first is None or first.is_gone or one.came.id < first.came.id:
                self._blocks[one.name] = one

    def end(self, landed: Iterable[Landed]) -> None:
        """Remove those that the store is done with."""
        for one in landed:
            if self._blocks.get(one.name) is one:
                del self._blocks[one.name]
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():  # done: its call was cancelled
                future.set_result(None)

    async def stored(self, tenant: bytes, keys: Sequence[bytes]) -> None:
        """Wait until the store is done with those of a tenant's blocks that have landed by now.

        A call that needs stored blocks waits here first: their clients have been told that these can be used.
        """
        under_way = {key for owner, key in self._blocks if owner == tenant}
        for key in under_way.intersection(keys) if under_way else ():
            one = self._blocks.get((tenant, key))
            while one is not None and self._blocks.get(one.name) is one:
                self._waiting.append(future := asyncio.get_running_loop().create_future())
                await future
