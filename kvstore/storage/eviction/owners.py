"""The blocks of each owner with a quota: an exact LRU order and a count of pages.

It exists beside the policy, which orders all blocks. An owner is a small number; 0 means none, and rows without an
owner are neither ordered nor counted here, and cost nothing as long as no later row has an owner.

Always holds:

- Whatever has an owner is counted with it, from `take` to `leave`.
- A row in an owner's ring was used after all before it in that ring. Stamps come from one counter for all drives of a
  store, so the least recently used row can be found across several drives.
- Adding, touching and removing a row is O(1), and so is finding the least recently used one.

Rows that may not be evicted are set aside here as they are in the policy, and for as long; see `evictor`. It knows no
limits: `kvstore.storage.quotas` does. 18 bytes a row, if any row has an owner.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING

from kvstore.limits import QUOTA_OWNERS_MAX
from kvstore.storage.eviction.policy import NO_ROW
from kvstore.storage.eviction.rings import Rings

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Owners", "Uses"]

_HEADS = QUOTA_OWNERS_MAX + 1  # a ring for each owner; that of owner 0 stays empty


class Uses:
    """How many uses there have been, on all drives that share this."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Owners:
    """One drive's. Node 0 to `QUOTA_OWNERS_MAX` are heads of rings; a row's node stands behind them."""

    __slots__ = ("_owners", "_rings", "_stamps", "pages", "uses")

    def __init__(self) -> None:
        self.uses = Uses()
        self.pages: dict[int, int] = {}  # of each owner who has any
        self._rings = Rings(_HEADS)
        # Of each row, as far as the last one that had an owner:
        self._owners = array("H")
        self._stamps = array("Q")  # the number of its last use

    def of(self, row: int) -> int:
        """Tell a row's owner."""
        return self._owners[row] if row < len(self._owners) else 0

    def take(self, row: int, owner: int, pages: int) -> None:
        """Note whose a new row is; it has been used just now."""
        if not owner:
            return
        self._reach(row)
        self._owners[row] = owner
        self.pages[owner] = self.pages.get(owner, 0) + pages
        self.uses.count += 1
        self._stamps[row] = self.uses.count
        self._rings.push(owner, _HEADS + row)

    def take_all(self, rows: Sequence[int], owner: int, pages: int) -> None:
        """Note all rows of an owner who had none, in the order of their use; it may be a million of them."""
        assert owner not in self.pages
        if not rows:
            return
        self._reach(max(rows))
        self.pages[owner] = pages
        before, count = self.uses.count, len(rows)
        owners, stamps, push = self._owners, self._stamps, self._rings.push
        for at, row in enumerate(rows, 1):
            owners[row] = owner
            stamps[row] = before * at // count
            push(owner, _HEADS + row)

    def _reach(self, row: int) -> None:
        missing = row + 1 - len(self._owners)
        if missing > 0:
            self._owners.extend(bytes(missing))
            self._stamps.frombytes(bytes(self._stamps.itemsize * missing))
            self._rings.reach(_HEADS + row)

    def touch(self, rows: Sequence[int]) -> None:
        """Note uses, in this order; what was set aside is back."""
        if not self.pages:
            return
        owners, rings = self._owners, self._rings
        for row in rows:
            owner = owners[row] if row < len(owners) else 0
            if owner:
                self.uses.count += 1
                self._stamps[row] = self.uses.count
                rings.unlink(_HEADS + row)
                rings.push(owner, _HEADS + row)

    def inherit(self, row: int, place: int) -> None:
        """Let a row have been used when `place` was, unless it was used after that."""
        owner = self.of(row)
        if not owner or not self._rings.is_linked(_HEADS + place):
            return
        assert owner == self.of(place), "a session's blocks are one tenant's"
        node = _HEADS + row
        if self._rings.is_linked(node):
            if self._stamps[row] > self._stamps[place]:
                return
            self._rings.unlink(node)
        self._rings.push_behind(_HEADS + place, node)
        self._stamps[row] = self._stamps[place]

    def set_aside(self, row: int) -> None:
        """Pass a row over until it is touched or inherits."""
        self._rings.unlink(_HEADS + row)

    def leave(self, row: int, pages: int) -> None:
        """Forget a row that is gone."""
        owner = self.of(row)
        if owner:
            self._rings.unlink(_HEADS + row)
            self._owners[row] = 0
            self.pages[owner] -= pages
            if not self.pages[owner]:
                del self.pages[owner]

    def oldest(self, owner: int) -> int:
        """Return the row of an owner that was used longest ago, of those not set aside; `NO_ROW` if there is none."""
        node = self._rings.after[owner]
        return node - _HEADS if node >= _HEADS else NO_ROW

    def stamp(self, row: int) -> int:
        """Return the number of a row's last use."""
        return self._stamps[row]
