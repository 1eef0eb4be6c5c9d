"""The roll: which older records on the drive were live at the last start after an unclean shutdown.

Always holds: a roll is durable, in the unused copy, before the superblock makes it current; a roll with a wrong CRC
voids nothing, so damage to it can bring a deleted block back but cannot lose a stored one.

It doesn't say what is live now: the index does.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.wire.record import roll_bytes, roll_offset
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvstore.storage.disk import Disk
    from kvstore.wire.record import Superblock

__all__ = ["Roll", "write_roll"]


def write_roll(disk: Disk, superblock: Superblock, copy: int, live_pages: NDArray[np.int64]) -> int:
    """Write the bits of live header pages into a copy of the roll, durably; return the CRC32C."""
    bits = np.zeros(roll_bytes(superblock.capacity_bytes), np.uint8)
    np.bitwise_or.at(bits, live_pages >> 3, (1 << (live_pages & 7)).astype(np.uint8))
    data = bits.tobytes()
    disk.write_at(roll_offset(superblock.capacity_bytes, copy), data)
    disk.sync()
    return crc32c(data)


class Roll:
    """The current roll, for a recovery."""

    __slots__ = ("_bits", "_generation", "is_damaged")

    def __init__(self, disk: Disk, superblock: Superblock) -> None:
        """Read it; an unreadable roll counts as damaged."""
        self._generation = superblock.roll_generation
        self._bits = b""
        self.is_damaged = False
        if self._generation:
            offset = roll_offset(superblock.capacity_bytes, superblock.roll_copy)
            with suppress(StorageError):
                self._bits = disk.read_at(offset, roll_bytes(superblock.capacity_bytes))
            self.is_damaged = crc32c(self._bits) != superblock.roll_crc32c or not self._bits

    def allows(self, offset: int, generation: int) -> bool:
        """Return whether a record at this offset is valid."""
        if generation >= self._generation or self.is_damaged:
            return True
        page = offset // PAGE_BYTES
        return bool(self._bits[page >> 3] >> (page & 7) & 1)
