"""Removes labels in the clear from an index, for a store that got its keys after it had sessions.

This happens at the first opening with keys, before anything is served: each label is sealed with its user's key, which
is made if there is none; then the rows of the index are copied to a new file, and the old one is overwritten with
zeros. So an erasure leaves no label in the clear in an index, neither in a row nor in pages that LMDB has freed.

Always holds: an opening that dies in between leaves an index that the next one continues with, or rebuilds from the
drive. An opening that can't make the keys leaves the labels as they are, and logs it; the next one tries again.

It doesn't touch records on the drive: the drive's own encryption rewrites them (`kvstore.storage.encrypting`).
"""

from __future__ import annotations

import logging
import shutil
import threading
from itertools import islice
from typing import TYPE_CHECKING

import lmdb

from kvstore.errors import StorageError
from kvstore.limits import (
    INDEX_COPY_SPARE_BYTES,
    INDEX_LABELS_AT_ONCE,
    INDEX_LABELS_KEYS_S,
    INDEX_ROWS_COPIED_AT_ONCE,
    INDEX_TABLES_MAX,
)
from kvstore.storage.index import Index
from kvstore.storage.index_file import DATA_NAME, overwrite
from kvstore.storage.manifests import Manifests

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import ExitStack
    from pathlib import Path

    from kvstore.storage.sealing import Keys
    from kvstore.storage.volume import Volume

__all__ = ["without_clear_labels"]

log = logging.getLogger(__name__)

_COPY = "copied"


def without_clear_labels(index: Index, folder: Path, volume: Volume, undo: ExitStack) -> Index:
    """Return an index with the same rows, newly opened, whose file has no label in the clear anywhere.

    `undo` abandons it.
    """
    keys, capacity_bytes = volume.keys, volume.superblock.capacity_bytes
    if keys is None or index.is_label_free:
        return index
    manifests = Manifests(index, keys)
    clear = manifests.with_clear_labels()
    try:
        _make_keys(keys, {(name.tenant, name.user) for name in clear})
        for first in range(0, len(clear), INDEX_LABELS_AT_ONCE):
            manifests.seal_labels(clear[first : first + INDEX_LABELS_AT_ONCE])
    except StorageError as error:
        log.warning("Labels of sessions stay in the index in the clear until the next start: %s", error)
        return index
    was_clean, knows_doubts = index.was_clean, index.knows_doubts
    index.abandon()
    _copy(folder)
    again = Index(folder, capacity_bytes, sealed=True)
    undo.callback(again.abandon)
    again.was_clean, again.knows_doubts = was_clean, knows_doubts
    return again


def _make_keys(keys: Keys, users: Iterable[tuple[bytes, bytes]]) -> None:
    """Make the keys of users that have none, durably."""
    woken = threading.Event()
    keys.on_finished(woken.set)  # the store has not set its own yet
    ends: list[StorageError | None] = []
    wanted = [user for user in users if keys.name_of(*user) is None]
    for tenant, user in wanted:
        keys.ensure(tenant, user, ends.append)
    while len(ends) < len(wanted):
        if not woken.wait(INDEX_LABELS_KEYS_S):
            raise StorageError("The keys of sessions' users were not made in time.")
        woken.clear()
        keys.settle_finished()
    for end in ends:
        if end is not None:
            raise end


def _copy(folder: Path) -> None:
    """Copy only the part of the index's file that is in use, and replace the file by the copy."""
    copy = folder / _COPY
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir(mode=0o700)
    size = (folder / DATA_NAME).stat().st_size
    try:
        with (
            lmdb.open(
                str(folder), map_size=size, max_dbs=INDEX_TABLES_MAX, readonly=True, create=False, lock=False
            ) as env,
            lmdb.open(
                str(copy), map_size=2 * size + INDEX_COPY_SPARE_BYTES, max_dbs=INDEX_TABLES_MAX, lock=False
            ) as new,
        ):
            _copy_rows(env, new)
    except lmdb.Error as error:
        raise StorageError(f"The index in {folder} could not be copied: {error}.") from error
    overwrite(folder)
    (copy / DATA_NAME).replace(folder / DATA_NAME)
    shutil.rmtree(copy)


def _copy_rows(env: lmdb.Environment, new: lmdb.Environment) -> None:
    """Copy row by row: LMDB copies pages with their unused ends, which may hold bytes of other pages from memory."""
    with env.begin() as reading:
        for name in [bytes(name) for name, _ in reading.cursor()]:
            rows = iter(reading.cursor(env.open_db(name, txn=reading, create=False)))
            table = new.open_db(name)
            while some := list(islice(rows, INDEX_ROWS_COPIED_AT_ONCE)):
                with new.begin(write=True) as writing:
                    writing.cursor(table).putmulti(some, append=True)
