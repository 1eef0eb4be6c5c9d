"""Blocks in the index whose bytes have not been verified, by generation.

Doubted blocks are those found by a scan, which reads no payloads; those not known to be synced when a process died,
since the drive may have lost them; those that a read-only drive could not read; and all of an older build's, which
recorded no doubts.

Always holds:

- A block is doubted until its CRC has been checked and confirmed (`believe`), over any number of restarts: the doubts
  are a table of the index, and are lost only with it.
- A doubted block is served like any other, because its CRC is checked then. But no put is acknowledged because of it,
  and a reserve does not report it as stored, since that would be a promise.

It checks nothing: `kvstore.storage.record_checks` does.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.errors import StorageError
from kvstore.limits import BATCH_BLOCKS_MAX, DOUBTS_LISTED_AT_ONCE
from kvstore.storage.row_check import checked

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.storage.index import Index

__all__ = ["Doubts"]

_GENERATION: Final = struct.Struct(">Q")
_DOUBT: Final = b"?"


class Doubts:
    """The doubts of one index."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._believed: set[int] = set()  # since the last commit

    def __bool__(self) -> bool:
        """Whether there may be any."""
        return self._index.has_doubts

    def __len__(self) -> int:
        if not self._index.has_doubts:
            return 0
        with self._index.reading() as transaction:
            noted = int(transaction.stat(self._index.doubts)["entries"])
        return max(0, noted - len(self._believed))  # some believed ones may be gone by now

    def of(self, generations: Iterable[int]) -> set[int]:
        """Return which of these blocks are doubted."""
        if not self._index.has_doubts:
            return set()
        with self._index.reading() as transaction:
            return {
                one
                for one in generations
                if one not in self._believed
                and transaction.get(_GENERATION.pack(one), db=self._index.doubts) is not None
            }

    def add(self, generations: Iterable[int]) -> None:
        """Mark those of these blocks that are stored as doubted."""
        asked = list(set(generations))
        self._believed.difference_update(asked)
        stored = [one for one, is_there in zip(asked, self._index.have(asked), strict=True) if is_there]

        def doubt(transaction: Any) -> None:
            for one in map(_GENERATION.pack, stored):
                transaction.put(one, checked(one, _DOUBT), db=self._index.doubts)

        self._write(doubt)

    def add_above(self, generation: int) -> None:
        """Mark all blocks of higher generations as doubted, in transactions of bounded size."""
        every = self._index.generations()
        above = every[every > generation]
        for first in range(0, len(above), DOUBTS_LISTED_AT_ONCE):
            some = [_GENERATION.pack(one) for one in above[first : first + DOUBTS_LISTED_AT_ONCE].tolist()]

            def doubt(transaction: Any, some: list[bytes] = some) -> None:
                with transaction.cursor(self._index.doubts) as cursor:
                    cursor.putmulti((one, checked(one, _DOUBT)) for one in some)

            self._write(doubt)

    def forget_gone(self) -> None:
        """Remove the doubts of blocks that are gone: a process may have died before it did."""
        if not self._index.has_doubts:
            return
        with self._index.reading() as transaction:
            noted = b"".join(transaction.cursor(self._index.doubts).iternext(values=False))
        gone = np.setdiff1d(np.frombuffer(noted, ">u8"), self._index.generations())

        def forget(transaction: Any) -> None:
            for one in map(_GENERATION.pack, gone.tolist()):
                transaction.delete(one, db=self._index.doubts)

        self._write(forget)

    def believe(self, generations: Iterable[int]) -> None:
        """Record that the CRCs of these blocks were checked and are right; `commit` makes that durable."""
        if self._index.has_doubts:
            self._believed |= self.of(generations)  # others would cost a useless commit
            if len(self._believed) > BATCH_BLOCKS_MAX:
                self.commit()

    def commit(self) -> None:
        """Make durable which blocks were verified. If that fails they are doubted again, and checked once more."""
        believed, self._believed = self._believed, set()
        if not believed:
            return

        def strike(transaction: Any) -> None:
            for one in believed:
                transaction.delete(_GENERATION.pack(one), db=self._index.doubts)

        with suppress(StorageError):
            self._write(strike)

    def _write(self, change: Any) -> None:
        self._index.has_doubts = True  # a block that is removed meanwhile takes its doubt along
        self._index.write(change)
        with self._index.reading() as transaction:
            self._index.has_doubts = transaction.stat(self._index.doubts)["entries"] > 0
