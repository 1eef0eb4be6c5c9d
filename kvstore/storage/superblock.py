"""The superblock on a drive: reading it, formatting a new drive, and voiding everything on one.

Always holds: at every moment of a rewrite one of the two copies is whole, and the newer whole one counts;
a drive that has any data in its first mebibyte is never formatted; formatting writes the
superblock last, so a crash in the middle leaves a drive that is formatted again.

Drives of up to `ZERO_FILL_BYTES_MAX` are filled with zeros here, once: this turns unwritten extents
of a file into written ones, to which later writes are faster. Larger drives are not filled, neither here
nor in the background; their first round of writes is slower.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final, NamedTuple

from kvstore.config import show_size
from kvstore.errors import Corrupt, StorageError, WrongVersion
from kvstore.limits import (
    BLANK_BYTES,
    DRIVE_CAPACITY_BYTES_MAX,
    DRIVE_CAPACITY_BYTES_MIN,
    FILL_PIECE_BYTES,
    GENERATIONS_PER_DRIVE,
    PAGE_BYTES,
    ZERO_FILL_BYTES_MAX,
)
from kvstore.wire.record import (
    FORMAT_VERSION,
    SUPERBLOCK_COPIES,
    Superblock,
    foreign_version,
    pack_superblock,
    parse_superblock,
)

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.clock import Clock
    from kvstore.storage.disk import Disk, Progress

__all__ = [
    "EPOCH_FORMATTED",
    "Membership",
    "find_superblock",
    "format_drive",
    "read_superblock",
    "renewed",
    "write_superblock",
]

EPOCH_FORMATTED: Final = 1  # the first opening makes it 2 before any record is written


class Membership(NamedTuple):
    """The store and the set that a new drive will belong to."""

    store_uuid: bytes
    secret: bytes
    set_number: int
    set_drives: int


def find_superblock(disk: Disk) -> Superblock | None:
    """Read a drive's superblock; None if the drive is blank: never formatted, or not completely."""
    if disk.capacity_bytes < DRIVE_CAPACITY_BYTES_MIN:
        raise StorageError(
            f"The drive has {show_size(disk.capacity_bytes)}, less than the smallest drive's"
            f" {show_size(DRIVE_CAPACITY_BYTES_MIN)}: it was truncated, or is not a drive."
        )
    if disk.capacity_bytes > DRIVE_CAPACITY_BYTES_MAX:
        raise StorageError(
            f"The drive has {show_size(disk.capacity_bytes)}, more than the largest drive's"
            f" {show_size(DRIVE_CAPACITY_BYTES_MAX)}."
        )
    pages = [disk.read_at(copy * PAGE_BYTES, PAGE_BYTES) for copy in range(SUPERBLOCK_COPIES)]
    superblock = _newest(pages)
    if superblock is None:
        if _is_blank(disk):
            return None
        raise _unreadable(pages)
    if disk.capacity_bytes < superblock.capacity_bytes:
        raise StorageError(
            f"The drive was truncated: of the {show_size(superblock.capacity_bytes)} that it was created with"
            f" {show_size(superblock.capacity_bytes - disk.capacity_bytes)} are missing."
        )
    return superblock


def read_superblock(path: Path) -> Superblock | None:
    """Read the superblock of a drive that a node may have open; None if there is none."""
    with path.open("rb") as file:
        return _newest([file.read(PAGE_BYTES) for _ in range(SUPERBLOCK_COPIES)])


def write_superblock(disk: Disk, superblock: Superblock) -> None:
    """Write both copies, each durable before the next begins."""
    page = pack_superblock(superblock)
    for copy in range(SUPERBLOCK_COPIES):
        disk.write_at(copy * PAGE_BYTES, page)
        disk.sync()


def _newest(pages: list[bytes]) -> Superblock | None:
    valid = [parsed for parsed in map(parse_superblock, pages) if isinstance(parsed, Superblock)]
    return max(valid, key=lambda superblock: superblock.epoch, default=None)


def _is_blank(disk: Disk) -> bool:
    """Check more than our own pages: some file systems begin later."""
    return disk.read_at(0, BLANK_BYTES).count(0) == BLANK_BYTES


def _unreadable(pages: list[bytes]) -> StorageError:
    for version in map(foreign_version, pages):
        if version is not None:
            return WrongVersion(
                f"The drive has format version {version}; this build reads version {FORMAT_VERSION}."
            )
    return Corrupt("The drive's superblock is damaged, or the drive holds other data; it was left unchanged.")


def format_drive(
    disk: Disk, number: int, membership: Membership, clock: Clock, progress: Progress | None = None
) -> Superblock:
    """Format a blank drive as one of a store."""
    _fill(disk, progress)
    superblock = Superblock(
        store_uuid=membership.store_uuid,
        drive_uuid=os.urandom(16),
        drive_index=number,
        secret=membership.secret,
        capacity_bytes=disk.capacity_bytes,
        epoch=EPOCH_FORMATTED,
        created_ms=clock.wall_ms(),
        generation_ceiling=number * GENERATIONS_PER_DRIVE + 1,
        roll_generation=0,
        roll_copy=0,
        roll_crc32c=0,
        set_number=membership.set_number,
        set_drives=membership.set_drives,
    )
    write_superblock(disk, superblock)
    return superblock


def renewed(superblock: Superblock) -> Superblock:
    """Return the superblock that voids every record on its drive, because tags contain the drive's previous uuid."""
    return superblock._replace(
        drive_uuid=os.urandom(16),
        epoch=superblock.epoch + 1,
        roll_generation=0,
        roll_copy=0,
        roll_crc32c=0,
        keyring=None,
    )


def _fill(disk: Disk, progress: Progress | None) -> None:
    if disk.capacity_bytes > ZERO_FILL_BYTES_MAX:
        return
    zeros = bytes(FILL_PIECE_BYTES)
    for offset in range(SUPERBLOCK_COPIES * PAGE_BYTES, disk.capacity_bytes, FILL_PIECE_BYTES):
        disk.write_at(offset, zeros[: disk.capacity_bytes - offset])
        if progress is not None:
            progress("filling the new drive with zeros", offset, disk.capacity_bytes)
    disk.sync()
