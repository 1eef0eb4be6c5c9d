"""Which blocks may be copied to other nodes: those of which this node has certainly missed no deletion.

A deletion goes to all members. So a node can't have missed one for a block that arrived while the node was on the map
under its current lease. An older block may have been deleted while the node was away; the node is sure of it once a
member that was present all the time says that it has the block and is sure of it.

What always holds: without proof a node is not sure; a new lease starts from nothing.
What it doesn't do: ask other nodes. It keeps one bit per block, by generation, for the blocks it was told about.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.storage.drive import Drive

__all__ = ["Sureness"]

_BITS: Final = 10  # of a generation, within one row of bits


class Sureness:
    """Which blocks of a node may be copied."""

    def __init__(self, drives: Sequence[Drive], lease: Callable[[], int]) -> None:
        self._drives, self._lease = drives, lease
        self._since_lease = 0
        self._since: dict[int, int] = {}  # by drive: its last generation when the lease was first seen
        self._told: dict[int, int] = {}  # bits of generations
        self._live: dict[int, int] = {}  # of these, those that were met since the last look began

    def is_sure(self, drive: Drive, generation: int) -> bool:
        """Whether no deletion of the block of this generation can have been missed."""
        if not self.note_lease():
            return False
        if generation > self._since[drive.number]:
            return True
        row, bit = generation >> _BITS, 1 << (generation & ((1 << _BITS) - 1))
        if not self._told.get(row, 0) & bit:
            return False
        self._live[row] = self._live.get(row, 0) | bit
        return True

    def told(self, generation: int) -> None:
        """A member that is sure of a block has said that it has it."""
        if self.note_lease():
            row, bit = generation >> _BITS, 1 << (generation & ((1 << _BITS) - 1))
            for rows in (self._told, self._live):
                rows[row] = rows.get(row, 0) | bit

    def looked_at_all(self) -> None:
        """A scan of all blocks has ended: blocks that it did not find are forgotten."""
        self._told, self._live = self._live, {}

    def note_lease(self) -> bool:
        """Take note of the lease as it is; False if there is none. The sooner, the more blocks are sure."""
        lease = self._lease()
        if lease and lease != self._since_lease:
            # A lane has generations from before; what it writes once they are taken back has later ones.
            self._since = {drive.number: drive.seal() for drive in self._drives}
            self._since_lease = lease
            self._told, self._live = {}, {}
        return bool(lease)
