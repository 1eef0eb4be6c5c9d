"""Which blocks may be copied to other nodes: those for which this node has certainly missed no deletion.

A deletion goes to all members and all absent nodes. So a node can't have missed one for a block that arrived during its
present tenure: since the first of its leases without a gap in which it may have been forgotten. An older block may have
been deleted while the node was away; the node is sure of it once a member that was present all the time reports that it
has the block and is sure of it.

What always holds: without proof a node is not sure; a new tenure starts from nothing.
What it doesn't do: ask other nodes. It keeps one bit per block, by generation, for the blocks reported to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.storage.drive import Drive

__all__ = ["CopyEligibility"]

_BITS: Final = 10  # of a generation, within one row of bits


class CopyEligibility:
    """The blocks of a node that may be copied."""

    def __init__(self, drives: Sequence[Drive], tenure: Callable[[], int]) -> None:
        self._drives, self._tenure = drives, tenure
        self._since_tenure = 0
        self._since: dict[int, int] = {}  # by drive: its last generation when the tenure was first seen
        self._copied: dict[int, int] = {}  # bits of generations
        self._live: dict[int, int] = {}  # of these, those found since the current scan began

    def is_sure(self, drive: Drive, generation: int) -> bool:
        """Whether no deletion of the block of this generation can have been missed."""
        if not self.note_tenure():
            return False
        if generation > self._since[drive.number]:
            return True
        row, bit = generation >> _BITS, 1 << (generation & ((1 << _BITS) - 1))
        if not self._copied.get(row, 0) & bit:
            return False
        self._live[row] = self._live.get(row, 0) | bit
        return True

    def note_copy(self, generation: int) -> None:
        """Note that a member that is sure of a block has it."""
        if self.note_tenure():
            row, bit = generation >> _BITS, 1 << (generation & ((1 << _BITS) - 1))
            for rows in (self._copied, self._live):
                rows[row] = rows.get(row, 0) | bit

    def end_scan(self) -> None:
        """Note the end of a scan of all blocks: those that it did not find are forgotten."""
        self._copied, self._live = self._live, {}

    def note_tenure(self) -> bool:
        """Record the present tenure; False if there is none. The sooner this is called, the more blocks are sure."""
        tenure = self._tenure()
        if tenure and tenure != self._since_tenure:
            # A lane holds earlier generations; after they are taken back, it gets later ones.
            self._since = {drive.number: drive.seal() for drive in self._drives}
            self._since_tenure = tenure
            self._copied, self._live = {}, {}
        return bool(tenure)
