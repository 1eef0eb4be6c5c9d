"""Moves the blocks of an older build's index, which were in LMDB, into the table of blocks, once.

Always holds: only an index that was closed cleanly, belongs to the drive, and whose rows are all whole is upgraded. Any
other is left as it is, and rebuilt. An upgrade that is interrupted begins anew: LMDB has its blocks until the table is
durable.
"""

from __future__ import annotations

import logging
import struct
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

import lmdb
import numpy as np

from kvstore.limits import INDEX_ROWS_AT_ONCE, INDEX_TABLES_MAX
from kvstore.storage.block_table import BlockTable
from kvstore.storage.index_file import DATA_NAME, unseal
from kvstore.storage.index_layout import BLOCK_ROW
from kvstore.storage.row_check import CHECK_BYTES, checked, is_whole

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.wire.record import Superblock

__all__ = ["upgrade"]

log = logging.getLogger(__name__)

_META: Final = struct.Struct("<16sQ?36s")  # drive, epoch, whether it was closed cleanly, boot
_COMMIT: Final = struct.Struct("<Q")
_COMMIT_KEY: Final = b"commit"  # the number of the last one
_KEYS: Final = {  # an index that was sealed later has its row of before as well
    b"store 3, sealed": b"store 4, sealed",
    b"store 3": b"store 4",
}
_FIELDS: Final = ("offset", "length", "crc32c", "generation", "expires_ms", "fingerprint", "domain")
_OLD_ROW: Final = np.dtype(
    [("tenant", "V16"), ("key", "V32"), *((name, BLOCK_ROW[name]) for name in _FIELDS), ("check", "V4")]
)


def upgrade(folder: Path, blocks: Path, superblock: Superblock) -> None:
    """Upgrade an index in `folder`, if it is an older one that can be; `blocks` is the file of the table."""
    size = (folder / DATA_NAME).stat().st_size
    with (
        lmdb.open(
            str(folder), map_size=2 * size, max_dbs=INDEX_TABLES_MAX, lock=False, meminit=True, create=False
        ) as env,
        env.begin(write=True) as transaction,
    ):
        meta = env.open_db(b"meta", transaction, create=False)
        commit = transaction.get(_COMMIT_KEY, db=meta)
        found = ((key, transaction.get(key, db=meta)) for key in _KEYS)
        key, row = next(((key, row) for key, row in found if row is not None), (b"", b""))
        is_last = commit == _COMMIT.pack(transaction.id() - 1)
        if not is_last or not row or not _is_sound(row, key, superblock):
            return
        log.info("The index in %s is an older build's, and is converted.", folder)
        unseal(folder)
        old = [env.open_db(name, transaction, create=False) for name in (b"blocks", b"generations")]
        if not _copy(transaction.cursor(old[0]), blocks, superblock):
            return
        for table in old:
            transaction.drop(table)
        for one in _KEYS:
            transaction.delete(one, db=meta)
        transaction.put(_KEYS[key], checked(_KEYS[key], row[:-CHECK_BYTES]), db=meta)
        transaction.put(_COMMIT_KEY, _COMMIT.pack(transaction.id()), db=meta)


def _copy(rows: Iterable[tuple[bytes, bytes]], blocks: Path, superblock: Superblock) -> bool:
    """Make a table of these rows, durably; False if one is not whole."""
    left = iter(rows)
    table = BlockTable.create(blocks)
    try:
        while some := list(islice(left, INDEX_ROWS_AT_ONCE)):
            if not all(is_whole(name, row) for name, row in some):
                return False
            table.put(_rows(some))
        table.begin_epoch(superblock.drive_uuid, superblock.epoch)
        table.sync()
    finally:
        table.close()
    return True


def _is_sound(meta: bytes, key: bytes, superblock: Superblock) -> bool:
    if not is_whole(key, meta):
        return False
    drive_uuid, epoch, is_clean, _ = _META.unpack(meta[:-CHECK_BYTES])
    return bool(is_clean) and (drive_uuid, epoch) == (superblock.drive_uuid, superblock.epoch)


def _rows(some: list[tuple[bytes, bytes]]) -> NDArray[Any]:
    old = np.frombuffer(b"".join([name + row for name, row in some]), _OLD_ROW)
    rows = np.zeros(len(old), BLOCK_ROW)
    for name in ("tenant", "key", *_FIELDS):
        rows[name] = old[name]
    return rows
