"""The index: (tenant, key) -> where the block is, and generation -> which block. A cache of the drive.

Blocks are in a table of the C core, with a file of its own (`kvstore.storage.block_table`); everything else, which is
sessions, what a crash may have torn, and places to be overwritten, is in LMDB.

At a start it is trusted only if both files are intact (`kvstore.storage.index_file`, and the table's own checks), if
they name the same drive and epoch as the superblock, and if it was either closed cleanly, or written since the machine
booted (the kernel's page cache survives a killed process) and has every commit that the folder's lock file has noted.
An LMDB file that is not byte for byte the one that was closed is checked first (`kvstore.storage.index_check`).
Otherwise the index is discarded and rebuilt.

Always holds:

- An epoch is durable in the superblock before any index has it, and each start and each clean stop makes a new one.
  So an index restored from an earlier time has a past epoch, or, if it was copied from a running node and restored
  after SIGKILL, lacks a noted commit. An index restored together with its notes most likely contradicts the drive
  (`kvstore.storage.index_check`).
- Commits are not synced, so after power loss the files may be any mixture of old and new pages. The boot id has
  changed then, and nothing in them is trusted. Only the commit that marks the index as clean is synced, with all
  before it.
- Doubted blocks (`kvstore.storage.doubts`) are noted by generation. Notes of blocks that are gone say nothing.
- A batch is published, or removed, in one commit of the table. What LMDB has to note because of it is committed first:
  a process that dies in between has noted a place that is not free, which is left alone.
- Errors are StorageErrors; an index that raised one while it was open is not trusted again. Nor is one whose files were
  deleted or replaced meanwhile: it is not changed any more, and files in their place stay as they are.

It doesn't know extents or pins. Sessions, unsettled changes of them, doubts, and places of erased blocks are in tables
of their own (`kvstore.storage.manifests`, `.doubts` and `.overwriting`).
"""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import lmdb
import numpy as np

from kvstore.config import show_size
from kvstore.errors import Corrupt, StorageError
from kvstore.limits import HEADER_BYTES, INDEX_GROWTHS_MAX, INDEX_MAP_BYTES_MIN, PAGE_BYTES
from kvstore.storage.block_table import BlockTable
from kvstore.storage.folder import CommitNote, OpenFiles
from kvstore.storage.index_file import DATA_NAME, check_structure, is_sealed, overwrite, seal, unseal
from kvstore.storage.index_layout import (
    LIFE,
    NAME_BYTES,
    PLACE,
    PLACE_ROW,
    record_pages,
    rows_of_entries,
    unpacked,
)
from kvstore.storage.index_upgrade import upgrade
from kvstore.storage.overwriting import PLACES, note
from kvstore.storage.row_check import CHECK_BYTES, checked, is_whole

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.storage.folder import NotePlace
    from kvstore.storage.manifests import Place
    from kvstore.wire.record import Superblock

    Name = tuple[bytes, bytes]
    """Tenant and key."""
    NamesAndLives = tuple[NDArray[np.uint8], NDArray[Any]]
    """Names of blocks, a row each, and of each its offset, length, generation and expiry."""

__all__ = ["BLOCKS_NAME", "Entry", "Index", "entries_in"]

T = TypeVar("T")

_META: Final = struct.Struct("<16sQ?36s")  # drive uuid, epoch, clean, boot id
_META_KEY: Final = b"store 4"  # blocks were in LMDB before 4
_SEALED_META_KEY: Final = b"store 4, sealed"  # no label of a session was ever in this file in the clear
_COMMIT: Final = struct.Struct("<Q")
_COMMIT_KEY: Final = b"commit"  # the number of the last one: a head of another one is not trusted
_CAPACITY_PER_MAP_BYTE: Final = 16  # the smallest record takes 8 KiB and its entry far less than 512 bytes
_DOUBTED_KEY: Final = b"doubts"  # with the epoch up to which doubts are noted
_EPOCH: Final = struct.Struct("<Q")
_FAILURES: Final = (lmdb.Error, struct.error, OSError)
_TABLES: Final = (b"sessions", b"chunks", b"references", b"meta", b"owed", PLACES, b"doubts")
_TABLE_COMMITS: Final = 40  # bits of the last commit's number that are the table's; the others are LMDB's

BLOCKS_NAME: Final = "blocks"  # the table's file, beside LMDB's


class Entry(NamedTuple):
    """Where a block is on the drive, and what its header says."""

    offset: int
    length: int
    crc32c: int
    generation: int
    expires_ms: int
    fingerprint: bytes
    domain: int = 0  # the number, from 1, of the key that it is encrypted with; 0: it is in the clear


def entries_in(rows: NDArray[Any]) -> Iterator[tuple[Name, Entry]]:
    """Return name and entry of each of these rows."""
    for tenant, key, offset, length, crc, born, fingerprint, domain, expires_ms in unpacked(rows.tobytes()):
        yield (tenant, key), Entry(offset, length, crc, born, expires_ms, fingerprint, domain)


def _commit_of(table: int, rest: int) -> int:
    """Return one number for the last commits of both files."""
    return (rest << _TABLE_COMMITS | table & (1 << _TABLE_COMMITS) - 1) & (1 << 64) - 1


class Index:
    """An open index. One thread uses it."""

    def __init__(
        self,
        folder: Path,
        capacity_bytes: int,
        *,
        readonly: bool = False,
        sealed: bool = False,
        is_new: bool = False,
    ) -> None:
        self._folder = folder
        self._meta_key = _SEALED_META_KEY if sealed else _META_KEY
        self._map_bytes = max(INDEX_MAP_BYTES_MIN, capacity_bytes // _CAPACITY_PER_MAP_BYTE)
        self._readonly = readonly
        self._notes: NotePlace | None = None  # where commits are noted, from the start of the epoch
        self._noted = (b"", 0)
        self.was_clean = False
        self.knows_doubts = True  # an older build noted none
        self.has_doubts = False  # whether there may be any
        self.is_sealed = False  # its file is byte for byte the one that was closed
        self._doubted = False
        self.failed: Callable[[StorageError], object] = lambda _: None  # called when it has raised
        self._covered_bytes = 0
        path = folder / BLOCKS_NAME
        self._table = BlockTable.create(path) if is_new else BlockTable.load(path, readonly=readonly)
        try:
            self._open(durable=False)
            self._files = OpenFiles(path, folder / DATA_NAME)
        except BaseException:
            self._table.close()
            raise

    @classmethod
    def trusted(
        cls, folder: Path, superblock: Superblock, boot_id: str, note: CommitNote, *, readonly: bool = False
    ) -> Index:
        """Open the existing index if it can be trusted; otherwise Corrupt, with the reason as a phrase.

        The index of a drive that has nothing in the clear must never have had anything in the clear itself, unless it
        is only read.
        An index that is not sealed must be checked before any row of it is trusted.
        """
        if not (folder / DATA_NAME).is_file():
            raise Corrupt("there is none")
        is_as_closed = is_sealed(folder)
        if not is_as_closed:
            check_structure(folder)
        if not readonly:
            with suppress(StorageError, lmdb.Error, struct.error):
                upgrade(folder, folder / BLOCKS_NAME, superblock)
        try:
            sealed = superblock.keyring is not None and not superblock.plain_below
            index = cls(folder, superblock.capacity_bytes, readonly=readonly, sealed=sealed)
        except (StorageError, lmdb.Error) as error:
            raise Corrupt(f"it can't be opened: {error}") from error
        with ExitStack() as undo:
            undo.callback(index.abandon)
            try:
                doubt = index._doubt(superblock, boot_id, note)
            except (StorageError, lmdb.Error, struct.error) as error:
                raise Corrupt(f"it can't be read: {error}") from error
            if doubt:
                raise Corrupt(doubt)
            undo.pop_all()
        index.is_sealed = is_as_closed
        return index

    @classmethod
    def empty(cls, folder: Path, capacity_bytes: int, *, sealed: bool = False) -> Index:
        """Discard the index and create an empty one. A `sealed` one must never have a label in the clear.

        Then the discarded one is overwritten, because it may have some.
        """
        if folder.is_dir() and not folder.is_symlink():
            if sealed:
                overwrite(folder)
            shutil.rmtree(folder)
        else:
            folder.unlink(missing_ok=True)
        folder.mkdir(mode=0o700)
        return cls(folder, capacity_bytes, sealed=sealed, is_new=True)

    def begin_epoch(self, superblock: Superblock, boot_id: str, notes: NotePlace) -> None:
        """Record which epoch this index belongs to. The superblock with it must be durable already."""
        unseal(self._folder)
        self._notes = notes
        self._noted = (superblock.drive_uuid, superblock.epoch)
        self._begin_epoch_of_table(superblock)
        self._put_meta(superblock, boot_id, clean=False)

    def close_clean(self, superblock: Superblock, boot_id: str) -> None:
        """Make everything durable, mark the index as clean, and close. Superblock and records are durable already."""
        # LMDB's synced commit makes all data pages durable before the page that makes them current, so
        # power loss in the middle leaves the mark of the previous epoch, which is over.
        with suppress(StorageError), self._failing("closed"):  # then it is not clean
            self._refuse_if_deleted()
            self._env.close()
            self._open(durable=True)
            self._begin_epoch_of_table(superblock)
            self._asked(self._table.sync)
            self._put_meta(superblock, boot_id, clean=True)
            self._env.sync(True)
        if self._doubted:
            self.abandon()
            return
        self._env.close()
        self._table.close()
        with suppress(OSError):  # an index without a seal is checked at the next opening
            seal(self._folder)

    @property
    def is_label_free(self) -> bool:
        """Return whether no label of a session was ever in its file in the clear."""
        return self._meta_key == _SEALED_META_KEY

    def abandon(self) -> None:
        """Close without marking the index as clean. A failed index is removed, and the next opening builds another."""
        self._env.close()
        self._table.close()
        if self._doubted and not self._readonly:
            data = self._folder / DATA_NAME
            with suppress(OSError):
                if self._files.is_in_place(data):
                    data.unlink()

    def lookup(self, names: Sequence[Name]) -> list[Entry | None]:
        """Look up many blocks at once."""
        rows = self._asked(lambda: self._table.find(b"".join([part for name in names for part in name])))
        return [entry if entry.generation else None for _, entry in entries_in(rows)]

    def stored(self, names: bytes) -> NDArray[np.bool_]:
        """Return which blocks are stored, given tenant and key of each; none if it fails, which is reported."""
        are_stored = np.zeros(len(names) // NAME_BYTES, np.bool_)
        with suppress(StorageError):
            are_stored = self._asked(lambda: self._table.find(names))["generation"] > 0
        return are_stored

    def prefix(self, tenant: bytes, keys: Sequence[bytes], now_ms: int) -> int:
        """Return how many keys from the first are stored and not expired; each one is looked up.

        Bisection would be wrong: expiry and quarantine leave holes.
        """
        return self._asked(lambda: self._table.find_until(tenant, b"".join(keys), len(keys), now_ms))

    def missing(self, tenant: bytes, keys: Sequence[bytes], now_ms: int) -> list[bytes]:
        """Return those of these keys that are not stored or have expired, in their order."""
        rows = self._find(tenant, keys)
        expires_ms = rows["expires_ms"]
        there = (rows["generation"] > 0) & ((expires_ms == 0) | (expires_ms > now_ms))
        return [keys[at] for at in np.flatnonzero(~there).tolist()]

    def names_of(self, generations: Sequence[int]) -> list[Name | None]:
        """Return which block has each generation."""
        rows = self._of_generations(generations)
        named = ((tenant, key, born) for tenant, key, _, _, _, born, *_ in unpacked(rows.tobytes()))
        return [(tenant, key) if born else None for tenant, key, born in named]

    def of_generations(self, generations: Sequence[int]) -> list[tuple[Name, Entry]]:
        """Return the blocks that have these generations."""
        rows = self._of_generations(generations)
        return list(entries_in(rows[rows["generation"] > 0]))

    def have(self, generations: Sequence[int]) -> list[bool]:
        """Return which generations are those of blocks."""
        found: list[bool] = (self._of_generations(generations)["generation"] > 0).tolist()
        return found

    def publish(self, entries: Iterable[tuple[Name, Entry]], *, left: Sequence[Entry | Place] = ()) -> None:
        """Publish a batch; each entry replaces one of the same name. The places in `left` are noted for overwriting."""
        if left:
            self.write(lambda transaction: note(transaction, self.erased, left))
        self.publish_rows(rows_of_entries(entries))

    def publish_rows(self, blocks: NDArray[Any]) -> None:
        """Publish a batch, given as `BLOCK_ROW`s."""
        if not len(blocks):
            return
        replaced = self._doubted_of(blocks)
        self._change(lambda: self._table.put(blocks))
        self._forget_doubts(replaced)

    def renew(self, entries: Iterable[tuple[Name, Entry]]) -> None:
        """Change the expiry of stored blocks to that of these entries, and nothing else."""
        renewed = list(entries)
        names = b"".join([part for name, _ in renewed for part in name])
        self._change(
            lambda: self._table.renew(names, np.array([entry.expires_ms for _, entry in renewed], np.uint64))
        )

    def remove(self, names: Iterable[Name], spared: Collection[int] | None = None) -> NDArray[Any]:
        """Remove blocks; return the row of each, without a generation where there was none.

        Given `spared` keys, note the places of blocks with other keys.
        """
        names = list(names)
        if spared is not None:
            gone = [one for one in self.lookup(names) if one is not None and one.domain not in spared]
            if gone:
                self.write(lambda transaction: note(transaction, self.erased, gone))
        rows = self._change(lambda: self._table.remove(b"".join([part for name in names for part in name])))
        self._forget_doubts(rows["generation"])
        return rows

    def remove_generations(self, generations: Sequence[int]) -> NDArray[Any]:
        """Remove the blocks with these generations, all of which are there; return them in this order."""
        rows = self._change(lambda: self._table.remove_generations(generations))
        self._forget_doubts(rows["generation"])
        assert rows["generation"].all(), "somebody else knows other blocks"
        return rows

    def entries(self) -> Iterator[tuple[Name, Entry]]:
        """Return all entries, in no order."""
        for rows in self.block_rows():
            yield from entries_in(rows)

    def after(self, at: int, limit: int, tenant: bytes | None = None) -> tuple[list[tuple[Name, Entry]], int]:
        """Look at `limit` blocks, or a few more, from a place on; return them, or those of one tenant.

        Also return where to continue; 0: there are no more. From 0 on, each block that is there all the time is found.
        """
        rows, at = self._asked(lambda: self._table.after(at, limit, tenant))
        return list(entries_in(rows)), at

    def of_domain(self, tenant: bytes, of: set[int] | None, at: int, limit: int) -> tuple[list[Name], int]:
        """Return blocks of a tenant, all or those of some keys, and where to continue; 0: there are no more."""
        entries, at = self.after(at, limit, tenant)
        return [name for name, entry in entries if of is None or entry.domain in of], at

    def names(self) -> Iterator[NamesAndLives]:
        """Return the names of all blocks, many at once: tenant and key."""
        for rows in self.block_rows():
            yield rows.view(np.uint8).reshape(len(rows), -1)[:, :NAME_BYTES], rows[LIFE]

    def lives(self) -> NDArray[Any]:
        """Return place, size, generation and expiry of all blocks as `LIFE_ROW`s, unordered."""
        return self._asked(self._table.lives)

    def plain_bytes(self) -> int:
        """Return the bytes of blocks that are in the clear."""
        count = 0
        for rows in self.block_rows():
            pages = -(-rows["length"][rows["domain"] == 0].astype(np.int64) // PAGE_BYTES)
            count += int(pages.sum()) * PAGE_BYTES + len(pages) * HEADER_BYTES
        return count

    def key_numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the domains' keys that blocks name, each once."""
        found = {0}.union(*(np.unique(rows["domain"]).tolist() for rows in self.block_rows()))
        return np.array(sorted(found - {0}), np.int64) - 1

    def block_rows(self) -> Iterator[NDArray[Any]]:
        """Return the rows of all blocks, thousands at once, in no order. Nothing is changed meanwhile."""
        try:
            yield from self._table.rows()
        except StorageError as error:
            raise self._fails(str(error)) from error

    def generations_of(self, tenant: bytes, keys: Sequence[bytes]) -> list[int]:
        """Return the generation of each block; 0 if it is not stored."""
        found: list[int] = self._find(tenant, keys)["generation"].tolist()
        return found

    def generations(self, tenant: bytes | None = None) -> NDArray[np.uint64]:
        """Return the generations of all blocks in ascending order, or those of one tenant."""
        return self._table.generations(tenant)

    def newest(self, limit: int) -> NDArray[np.uint64]:
        """Return the last generations, at most `limit`, in ascending order."""
        return self._table.newest(limit)

    def extents(self, lives: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Return first page and length of every record in all tables, a row each, in the order of pages."""
        lives = self.lives() if lives is None else lives
        rows = list[bytes]()
        with self.reading(buffers=True) as transaction:
            for table in (self.sessions, self.chunks):
                rows += (row[: PLACE.size] for row in transaction.cursor(table).iternext(keys=False))
            others = np.frombuffer(b"".join(rows), PLACE_ROW)
        offsets, lengths = (np.concatenate([lives[part], others[part]]) for part in ("offset", "length"))
        order = np.argsort(offsets)
        pages = (offsets[order] // PAGE_BYTES).astype(np.int64)
        return np.stack([pages, record_pages(lengths[order])]).T

    def __len__(self) -> int:
        return len(self._table)

    @contextmanager
    def reading(self, *, buffers: bool = False) -> Iterator[Any]:
        """Begin a read transaction that raises our errors, and returns bytes, or views of the map."""
        with (
            self._failing("read"),
            self._env.begin(buffers=True) if buffers else self._env.begin() as transaction,
        ):
            yield transaction

    def write(self, change: Callable[[Any], T]) -> T:
        """Commit a change, which is repeated if the map had to grow; StorageError if nothing was changed."""
        self._refuse_if_deleted()
        for _ in range(INDEX_GROWTHS_MAX):
            try:
                with self._env.begin(write=True) as transaction:
                    commit = transaction.id()
                    result = change(transaction)
                    transaction.put(_COMMIT_KEY, _COMMIT.pack(commit), db=self._meta)
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._env.set_mapsize(self._map_bytes)
            except _FAILURES as error:
                raise self._fails(f"could not be written: {error}") from error
            else:
                self._last_commit = commit
                with self._failing("written"):
                    self._cover()
                self._note_commit()
                return result
        raise StorageError(f"The index in {self._folder} does not fit into {show_size(self._map_bytes)}.")

    def _change(self, change: Callable[[], T]) -> T:
        """Make a change of the table; StorageError if nothing was changed."""
        self._refuse_if_deleted()
        result = self._asked(change)
        self._note_commit()
        return result

    def _asked(self, ask: Callable[[], T]) -> T:
        try:
            return ask()
        except StorageError as error:
            raise self._fails(str(error)) from error

    def _find(self, tenant: bytes, keys: Sequence[bytes]) -> NDArray[Any]:
        return self._asked(lambda: self._table.find(b"".join([tenant + key for key in keys])))

    def _of_generations(self, generations: Sequence[int]) -> NDArray[Any]:
        return self._asked(lambda: self._table.of_generations(generations))

    def _doubted_of(self, blocks: NDArray[Any]) -> NDArray[np.uint64]:
        """Return the generations of what these blocks replace, if there may be doubts."""
        if not self.has_doubts:
            return np.empty(0, np.uint64)
        names = blocks.view(np.uint8).reshape(len(blocks), -1)[:, :NAME_BYTES].tobytes()
        before = self._asked(lambda: self._table.find(names))["generation"]
        replaced: NDArray[np.uint64] = before[before != blocks["generation"]]
        return replaced

    def _forget_doubts(self, generations: NDArray[np.uint64]) -> None:
        """Remove the doubts of blocks that are gone."""
        if self.has_doubts and generations.any():
            gone = generations[generations > 0].astype(">u8").tobytes()

            def forget(transaction: Any) -> None:
                for at in range(0, len(gone), 8):
                    transaction.delete(gone[at : at + 8], db=self.doubts)

            self.write(forget)

    def _note_commit(self) -> None:
        if self._notes is not None:
            commit = _commit_of(self._table.commit, self._last_commit)
            self._notes.write_note(CommitNote(*self._noted, commit))

    def _begin_epoch_of_table(self, superblock: Superblock) -> None:
        self._asked(lambda: self._table.begin_epoch(superblock.drive_uuid, superblock.epoch))

    def _refuse_if_deleted(self) -> None:
        # Files without names can still be written, but the next start doesn't find what is in them.
        if not self._files.are_in_place():
            raise self._fails("was deleted or replaced while it was open")

    @contextmanager
    def _failing(self, how: str) -> Iterator[None]:
        try:
            yield
        except _FAILURES as error:
            raise self._fails(f"could not be {how}: {error}") from error

    def _fails(self, how: str) -> StorageError:
        self._doubted = True
        error = StorageError(f"The index in {self._folder} {how}.")
        self.failed(error)
        return error

    def _open(self, *, durable: bool) -> None:
        # The folder's lock keeps other processes out and one thread uses the index, so LMDB's own locks
        # are off. No write map: an unfinished transaction must not reach the file.
        self._env = lmdb.open(
            str(self._folder),
            map_size=self._map_bytes,
            max_dbs=len(_TABLES),
            readonly=self._readonly,
            create=not self._readonly,
            sync=durable,
            metasync=durable,
            lock=False,
            readahead=False,
            meminit=True,  # else old bytes of the heap, KV among them, get into the file with the ends of pages
        )
        try:
            self._page_bytes = self._env.stat()["psize"]
            self._refuse_if_cut()
            (
                self.sessions,
                self.chunks,
                self.references,
                self._meta,
                self.owed,
                self.erased,
                self.doubts,
            ) = (self._env.open_db(table, create=not self._readonly) for table in _TABLES)
            self._last_commit = int(self._env.info()["last_txnid"])
            with self._env.begin() as transaction:
                self.has_doubts = transaction.stat(self.doubts)["entries"] > 0
        except BaseException:
            self._env.close()
            raise

    def _refuse_if_cut(self) -> None:
        # Touching a page after the end of a mapped file kills the process, so this comes before any lookup.
        if self._file_bytes() < self._used_bytes():
            raise lmdb.CorruptedError("the file is shorter than its header says")

    def _cover(self) -> None:
        """Extend the file to its stated length: LMDB doesn't write pages at its end that a transaction has freed."""
        used_bytes = self._used_bytes()
        if used_bytes > self._covered_bytes:
            if self._file_bytes() < used_bytes:
                os.truncate(self._folder / DATA_NAME, used_bytes)
            self._covered_bytes = used_bytes

    def _used_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._page_bytes)

    def _file_bytes(self) -> int:
        return (self._folder / DATA_NAME).stat().st_size

    def _doubt(self, superblock: Superblock, boot_id: str, note: CommitNote) -> str:
        """Return why this is not the drive's index as it was closed; empty if it is."""
        with self._env.begin(db=self._meta) as transaction:
            meta, commit = transaction.get(self._meta_key), transaction.get(_COMMIT_KEY)
            doubted = transaction.get(_DOUBTED_KEY)
            if not self.is_label_free and (sealed := transaction.get(_SEALED_META_KEY)) is not None:
                self._meta_key, meta = _SEALED_META_KEY, sealed
            elif meta is None and self._readonly:
                self._meta_key, meta = _META_KEY, transaction.get(_META_KEY)
        if meta is None or commit is None or not is_whole(self._meta_key, meta):
            return "it is of another version, may have labels in the clear, or is not one of an index"
        drive_uuid, epoch, clean, boot = _META.unpack(meta[:-CHECK_BYTES])
        if (drive_uuid, epoch) != (superblock.drive_uuid, superblock.epoch):
            return "it is of another drive or another time"
        commits = self._env.info()["last_txnid"]
        if _COMMIT.unpack(commit)[0] != commits or not self._table.is_of(drive_uuid, epoch):
            return "its head is of another commit than its rows"
        self.was_clean = bool(clean)
        self.knows_doubts = doubted == _EPOCH.pack(epoch)
        if self.was_clean:
            return ""
        if (note.drive_uuid, note.epoch) != (drive_uuid, epoch) or not self._has_all_until(
            note.commit, commits
        ):
            return "it lacks a commit"
        return "" if boot == boot_id.encode() else "there may have been a power failure since it was written"

    def _has_all_until(self, noted: int, commits: int) -> bool:
        # A process may die between a commit and its note, so the index may be ahead by one.
        table = self._table.commit
        return noted in (
            _commit_of(table, commits),
            _commit_of(table - 1, commits),
            _commit_of(table, commits - 1),
        )

    def _put_meta(self, superblock: Superblock, boot_id: str, *, clean: bool) -> None:
        row = _META.pack(superblock.drive_uuid, superblock.epoch, clean, boot_id.encode())
        meta = checked(self._meta_key, row)

        def put(transaction: Any) -> None:
            transaction.put(self._meta_key, meta, db=self._meta)
            transaction.put(_DOUBTED_KEY, _EPOCH.pack(superblock.epoch), db=self._meta)

        self.write(put)
