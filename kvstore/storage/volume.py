"""An open drive, and what its superblock keeps: openings, generations, and which roll counts.

Always holds: a generation is given once in the whole life of a store, whatever crashes, because each drive has
its own range of them, and they are reserved in its superblock, durably, a billion at a time, before the first of
them is used.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from kvstore.errors import ReadOnly
from kvstore.limits import GENERATIONS_PER_DRIVE, GENERATIONS_RESERVED_AT_ONCE
from kvstore.storage.live_roll import write_roll
from kvstore.storage.superblock import EPOCH_FORMATTED, write_superblock
from kvstore.wire.record import FORMAT_VERSION, RECORD_MAGIC, HeaderCodec, Kind
from nic_offload.lane import RecordFormat
from nic_offload.vault import SALT_BYTES, RecordCipher

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from kvstore.storage.disk import Disk
    from kvstore.storage.sealing import Keys
    from kvstore.wire.record import Superblock

__all__ = ["Volume"]


class Volume:
    """A drive with its superblock and its codec."""

    def __init__(self, disk: Disk, superblock: Superblock, keys: Keys | None = None) -> None:
        """With keys, records are encrypted; each opening has its own record keys, by a salt."""
        self.disk = disk
        self.superblock = superblock
        self.keys = keys
        secret, drive = superblock.secret, superblock.drive_uuid
        if keys is None:
            self.codec = HeaderCodec(secret, drive)
        else:
            cipher = RecordCipher(keys.vault, keys.header_secret, os.urandom(SALT_BYTES), drive)
            self.codec = HeaderCodec(secret, drive, cipher, keys.load)
        self._next_generation = superblock.generation_ceiling

    @property
    def is_all_sealed(self) -> bool:
        """Return whether nothing on the drive is in the clear, or will be."""
        superblock = self.superblock
        if self.keys is None:
            return False
        if superblock.keyring is None:
            return superblock.epoch == EPOCH_FORMATTED
        return not superblock.plain_below

    @property
    def last_generation(self) -> int:
        """Return the highest generation that may have been given."""
        return self._next_generation - 1

    @property
    def record_format(self) -> RecordFormat:
        """The format with which a lane makes headers of blocks, and a reader compares them."""
        secret, drive_uuid = self.superblock.secret, self.superblock.drive_uuid
        return RecordFormat(RECORD_MAGIC, FORMAT_VERSION, Kind.BLOCK, secret, drive_uuid)

    def begin_epoch(self, live_pages: NDArray[np.int64] | None = None) -> None:
        """Begin an epoch of accepting puts, durably, with generations reserved for it.

        Given the header pages of all live records, it voids every other record on the drive.
        """
        if live_pages is not None:
            crc = write_roll(self.disk, self.superblock, 1 - self.superblock.roll_copy, live_pages)
            self.superblock = self.superblock._replace(
                roll_generation=self._next_generation,
                roll_copy=1 - self.superblock.roll_copy,
                roll_crc32c=crc,
            )
        self._next_epoch(generation_ceiling=self._ceiling_above(self._next_generation))

    def end_epoch(self) -> None:
        """Begin the epoch of a closed store, durably; unused generations are given back."""
        self._next_epoch(generation_ceiling=self._next_generation)

    def note_nothing_plain(self) -> None:
        """Record, durably, that nothing on the drive is in the clear."""
        self._write(self.superblock._replace(plain_below=0))  # waits for the drive, once

    def skip_generations(self, used: int) -> None:
        """Issue only generations above any that was found on the drive."""
        self._next_generation = max(self._next_generation, used + 1)

    def take_generation(self) -> int:
        """Return the next generation."""
        generation = self._next_generation
        if generation >= self.superblock.generation_ceiling:
            self._reserve(generation)
        self._next_generation = generation + 1
        return generation

    def take_generations(self, count: int) -> int:
        """Return the first of `count` consecutive generations."""
        first = self._next_generation
        if first + count > self.superblock.generation_ceiling:
            self._reserve(first + count - 1)
        self._next_generation = first + count
        return first

    def _reserve(self, generation: int) -> None:
        ceiling = self._ceiling_above(generation)
        if generation >= ceiling:
            raise ReadOnly("The drive has used up all its generations and accepts no more puts.")
        self._write(self.superblock._replace(generation_ceiling=ceiling))  # waits for the drive, very rarely

    def _ceiling_above(self, generation: int) -> int:
        own_until = (self.superblock.drive_index + 1) * GENERATIONS_PER_DRIVE
        return min(generation + GENERATIONS_RESERVED_AT_ONCE, own_until)

    def _next_epoch(self, generation_ceiling: int) -> None:
        said = self.superblock._replace(
            epoch=self.superblock.epoch + 1, generation_ceiling=generation_ceiling
        )
        if self.keys is not None:
            if said.keyring is None:  # from here on nothing is written in the clear
                is_new = self.superblock.epoch == EPOCH_FORMATTED
                said = said._replace(plain_below=0 if is_new else self._next_generation)
            said = said._replace(keyring=self.keys.mark)
        self._write(said)

    def _write(self, superblock: Superblock) -> None:
        write_superblock(self.disk, superblock)
        self.superblock = superblock
