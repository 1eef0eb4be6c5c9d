"""An open drive, and the two counters that its superblock keeps: openings and generations.

Always holds: a generation is given once in the whole life of a store, whatever crashes, because they are
reserved in the superblock, durably, by the billion before the first of them is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kvstore.errors import ReadOnly
from kvstore.limits import GENERATION_MAX
from kvstore.storage.superblock import write_superblock
from kvstore.wire.record import HeaderCodec

if TYPE_CHECKING:
    from kvstore.storage.disk import Disk
    from kvstore.wire.record import Superblock

__all__ = ["Volume"]

_RESERVED_AT_ONCE: Final = 1 << 30


class Volume:
    """A drive with its superblock and its codec."""

    def __init__(self, disk: Disk, superblock: Superblock) -> None:
        self.disk = disk
        self.superblock = superblock
        self.codec = HeaderCodec(superblock.secret, superblock.drive_uuid)
        self._next_generation = superblock.generation_ceiling

    @property
    def last_generation(self) -> int:
        """Tell the highest generation that may have been given."""
        return self._next_generation - 1

    def next_epoch(self) -> None:
        """Begin an epoch, durably."""
        self._write(self.superblock._replace(epoch=self.superblock.epoch + 1))

    def skip_generations(self, used: int) -> None:
        """Give none that is not higher than one found on the drive."""
        self._next_generation = max(self._next_generation, used + 1)

    def take_generation(self) -> int:
        """Give the next generation."""
        generation = self._next_generation
        if generation >= self.superblock.generation_ceiling:
            self._reserve(generation)
        self._next_generation = generation + 1
        return generation

    def _reserve(self, generation: int) -> None:
        # This waits for the drive, once in a billion puts and at the first put after an opening.
        ceiling = min(generation + _RESERVED_AT_ONCE, GENERATION_MAX + 1)
        if generation >= ceiling:
            raise ReadOnly("The store has used up all generations and takes no more puts.")
        self._write(self.superblock._replace(generation_ceiling=ceiling))

    def _write(self, superblock: Superblock) -> None:
        write_superblock(self.disk, superblock)
        self.superblock = superblock
