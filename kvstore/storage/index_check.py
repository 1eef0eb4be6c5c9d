"""Checks an index that was not closed cleanly against itself, and a part of it against the drive, before it is trusted.

The index decides where the next records are written. The table of blocks was checked when it was loaded. After this
check, every row of LMDB is as it was written and is found by its name; and the rows belong to the last commit.
`extents_around` checks that no two records overlap and that none is out of bounds.

Checking all headers would be a scan of the drive, so only some are read: those of the newest
`INDEX_HEADERS_CHECKED_MAX` blocks, of the oldest `FREE_HEADERS_CHECKED_MAX`, and the first pages of as many free
extents. An index from earlier in this epoch, restored together with the lock file of that time, is detected there:
the drive has records where the index has others or none, with generations that had not been used at that time.

Always holds: an index that fails is Corrupt, with the reason. Nothing is written.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any, Final

import lmdb

from kvstore.errors import Corrupt, StorageError
from kvstore.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    FREE_HEADERS_CHECKED_MAX,
    INDEX_HEADERS_CHECKED_MAX,
    KEY_BYTES,
    PAGE_BYTES,
    SESSION_BYTES,
    TENANT_BYTES,
    USER_BYTES,
)
from kvstore.storage.overwriting import PLACE_BYTES
from kvstore.storage.row_check import is_whole
from kvstore.wire.record import Flaw, Kind, record_bytes

if TYPE_CHECKING:
    from kvstore.storage.extents import Extents
    from kvstore.storage.folder import BegunNote
    from kvstore.storage.index import Index
    from kvstore.storage.volume import Volume

__all__ = ["check_free", "check_index"]

_NAME_BYTES: Final = TENANT_BYTES + KEY_BYTES
_SESSION_NAME_BYTES: Final = TENANT_BYTES + USER_BYTES + SESSION_BYTES
_PLACE: Final = struct.Struct("<QI")  # how the rows of records begin
_NO_PLACE: Final = "a row has an impossible place"
_GENERATION: Final = struct.Struct(">Q")


def check_index(index: Index, volume: Volume) -> None:
    """Check every row."""
    try:
        with index.reading() as transaction:
            for table, name_bytes, is_record in (
                (index.sessions, _SESSION_NAME_BYTES, True),
                (index.chunks, _NAME_BYTES, True),
                (index.references, _NAME_BYTES, False),
                (index.owed, _SESSION_NAME_BYTES, False),
                (index.doubts, _GENERATION.size, False),
                (index.erased, PLACE_BYTES, False),
            ):
                _table(transaction, table, name_bytes, is_record=is_record)
        _headers(index, volume)
    except (lmdb.Error, struct.error, ValueError) as error:
        raise Corrupt(f"it can't be read: {error}") from error
    except Corrupt:
        raise
    except StorageError as error:
        raise Corrupt(f"it can't be read: {error}") from error


def check_free(volume: Volume, extents: Extents, begun: BegunNote) -> None:
    """Look for records that were begun after the index and its notes; Corrupt if there is one.

    Records of lower generations than that are no contradiction: their writers died before they were published.
    """
    superblock = volume.superblock
    if (begun.drive_uuid, begun.epoch) != (superblock.drive_uuid, superblock.epoch):
        raise Corrupt("the records begun after it are unknown")
    for start in extents.some_starts(FREE_HEADERS_CHECKED_MAX):
        offset = start * PAGE_BYTES
        try:
            page = volume.disk.read_at(offset, PAGE_BYTES)
        except StorageError:
            continue
        header = volume.codec.parse(page, 0, offset)
        if not isinstance(header, Flaw) and header.generation > begun.generation:
            raise Corrupt("it is older than a record on the drive")


def _table(transaction: Any, table: Any, name_bytes: int, *, is_record: bool) -> None:
    before = b""
    for name, row in transaction.cursor(table):
        if len(name) != name_bytes or not is_whole(name, row):
            raise Corrupt("a row was changed")
        if name <= before or transaction.get(name, db=table) != row:
            raise Corrupt("a row is not found where it stands")
        if is_record:
            _refuse_place(*_PLACE.unpack_from(row))
        before = name


def _refuse_place(offset: int, length: int) -> None:
    if offset % PAGE_BYTES or not BLOCK_BYTES_MIN <= length <= BLOCK_BYTES_MAX:
        raise Corrupt(_NO_PLACE)


def _headers(index: Index, volume: Volume) -> None:
    """Compare the newest and the oldest blocks with their headers. An unreadable header proves nothing.

    If the index is from an earlier time, the oldest have been replaced by others.
    """
    every = index.generations()
    some = {*every[-INDEX_HEADERS_CHECKED_MAX:].tolist(), *every[:FREE_HEADERS_CHECKED_MAX].tolist()}
    for (tenant, key), entry in index.of_generations(sorted(some)):
        name = tenant + key
        if entry.offset + record_bytes(entry.length) > volume.superblock.capacity_bytes:
            raise Corrupt("a row has a place beyond the drive")
        try:
            page = volume.disk.read_at(entry.offset, PAGE_BYTES)
        except StorageError:
            continue
        header = volume.codec.parse(page, 0, entry.offset)
        if isinstance(header, Flaw):
            continue  # damage of the drive: a get will detect it
        block = (header.kind, header.tenant + header.key, header.domain)
        said = (*block, header.generation, header.length, header.crc32c)
        if said != (Kind.BLOCK, name, entry.domain, entry.generation, entry.length, entry.crc32c):
            raise Corrupt("a row differs from its record's header")
