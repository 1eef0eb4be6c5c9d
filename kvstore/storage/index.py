"""The index: (tenant, key) -> where the block is, and generation -> which block, in LMDB. A cache of the drive.

At a start it is trusted only if its file is intact (`kvstore.storage.index_file`), if it names the same drive and
epoch as the superblock, and if it was either closed cleanly, or written since the machine booted (the kernel's page
cache survives a killed process) and has every commit that the folder's lock file has noted. An index whose file is
not byte for byte the one that was closed is checked first (`kvstore.storage.index_check`). Otherwise it is discarded
and rebuilt.

Always holds:

- An epoch is durable in the superblock before any index has it, and each start and each clean stop makes a new one.
  So an index restored from an earlier time has a past epoch, or, if it was copied from a running node and restored
  after SIGKILL, lacks a noted commit. An index restored together with its notes most likely contradicts the drive
  (`kvstore.storage.index_check`).
- Commits are not synced, so after power loss the file may be any mixture of old and new pages. The boot id has
  changed then, and nothing in the file is trusted. Only the commit that marks the index as clean is synced, with all
  before it.
- Doubted blocks (`kvstore.storage.doubts`) are noted by generation, until the block is removed.
- A batch is published, or removed, in one transaction.
- Each block has one row by name and one by generation. The latter are appended, because generations rise.
- Errors of LMDB are StorageErrors; an index that raised one while it was open is not trusted again.

It doesn't know extents or pins. Sessions, unsettled changes of them, doubts, and places of erased blocks are in tables
of their own (`kvstore.storage.manifests`, `.doubts` and `.overwriting`).
"""

from __future__ import annotations

import os
import shutil
import struct
from contextlib import ExitStack, contextmanager, suppress
from itertools import islice, takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import lmdb
import numpy as np

from kvstore.errors import Corrupt, StorageError
from kvstore.limits import (
    HEADER_BYTES,
    INDEX_GROWTHS_MAX,
    INDEX_LIVES_LISTED_AT_ONCE,
    INDEX_MAP_BYTES_MIN,
    PAGE_BYTES,
    TENANT_BYTES,
)
from kvstore.storage.folder import CommitNote
from kvstore.storage.index_file import DATA_NAME, check_structure, is_sealed, overwrite, seal, unseal
from kvstore.storage.index_layout import (
    BLOCKS,
    BORN,
    ENTRY,
    ENTRY_ROW,
    EXPIRES,
    GENERATION,
    LIFE,
    LIFE_ROW,
    NAME_BYTES,
    OWNER,
    OWNERS,
    PLACE,
    PLACE_ROW,
    ROW,
    packed,
    record_pages,
)
from kvstore.storage.index_rows import check_order, rows_of
from kvstore.storage.overwriting import PLACES, note
from kvstore.storage.row_check import CHECK_BYTES, checked, is_whole
from kvstore.wire.record import Header, Kind

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.storage.folder import NotePlace
    from kvstore.storage.manifests import Place
    from kvstore.wire.record import Superblock

    Name = tuple[bytes, bytes]
    """Tenant and key."""
    NamesAndLives = tuple[NDArray[np.uint8], NDArray[Any]]
    """Names of blocks, a row each, and of each its offset, length, generation and expiry."""

__all__ = ["Entry", "Index", "header_of", "is_header_of", "kernel_boot_id"]

T = TypeVar("T")

_META: Final = struct.Struct("<16sQ?36s")  # drive uuid, epoch, clean, boot id
_META_KEY: Final = b"store 3"  # the rows had no checks before 2, and no domains before 3
_SEALED_META_KEY: Final = b"store 3, sealed"  # no label of a session was ever in this file in the clear
_COMMIT: Final = struct.Struct("<Q")
_COMMIT_KEY: Final = b"commit"  # the number of the last one: a head of another one is not trusted
_CAPACITY_PER_MAP_BYTE: Final = 16  # the smallest record takes 8 KiB and its entry far less than 512 bytes
_DOUBTED_KEY: Final = b"doubts"  # with the epoch up to which doubts are noted
_EPOCH: Final = struct.Struct("<Q")
_FAILURES: Final = (lmdb.Error, struct.error)
_TABLES: Final = (b"blocks", b"generations", b"sessions", b"chunks", b"references", b"meta")
_DOUBTS: Final = b"doubts"
_OWED: Final = b"owed"


class Entry(NamedTuple):
    """Where a block is on the drive, and what its header says."""

    offset: int
    length: int
    crc32c: int
    generation: int
    expires_ms: int
    fingerprint: bytes
    domain: int = 0  # the number, from 1, of the key that it is encrypted with; 0: it is in the clear


def header_of(name: Name, entry: Entry) -> Header:
    """Return the header that a block must have on the drive."""
    (tenant, key), (_, length, crc, generation, expires_ms, fingerprint, domain) = name, entry
    return Header(Kind.BLOCK, key, tenant, fingerprint, generation, length, crc, expires_ms, domain)


def is_header_of(found: object, name: Name, entry: Entry) -> bool:
    """Return whether a header is the one that the index names, except its expiry, which may have been extended."""
    return isinstance(found, Header) and found._replace(expires_ms=entry.expires_ms) == header_of(name, entry)


def kernel_boot_id() -> str:
    """Return the id of this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _values(rows: NDArray[np.uint8]) -> NDArray[Any]:
    return np.ascontiguousarray(rows[:, NAME_BYTES:]).view(ROW)[:, 0]


class Index:
    """An open index. One thread uses it."""

    def __init__(
        self, folder: Path, capacity_bytes: int, *, readonly: bool = False, sealed: bool = False
    ) -> None:
        self._folder = folder
        self._meta_key = _SEALED_META_KEY if sealed else _META_KEY
        self._map_bytes = max(INDEX_MAP_BYTES_MIN, capacity_bytes // _CAPACITY_PER_MAP_BYTE)
        self._readonly = readonly
        self._notes: NotePlace | None = None  # where commits are noted, from the start of the epoch
        self._noted = (b"", 0)
        self.was_clean = False
        self.knows_doubts = True  # an older build noted none
        self.doubts: Any = None  # the tables; an older build's index that is only read has none
        self.owed: Any = None
        self.erased: Any = None
        self.has_doubts = False  # whether there may be any
        self.is_sealed = False  # its file is byte for byte the one that was closed
        self._doubted = False
        self.failed: Callable[[StorageError], object] = lambda _: None  # called when LMDB has raised
        self._covered_bytes = 0
        self._open(durable=False)

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
        return cls(folder, capacity_bytes, sealed=sealed)

    def begin_epoch(self, superblock: Superblock, boot_id: str, notes: NotePlace) -> None:
        """Record which epoch this index belongs to. The superblock with it must be durable already."""
        unseal(self._folder)
        self._notes = notes
        self._noted = (superblock.drive_uuid, superblock.epoch)
        self._put_meta(superblock, boot_id, clean=False)

    def close_clean(self, superblock: Superblock, boot_id: str) -> None:
        """Make everything durable, mark the index as clean, and close. Superblock and records are durable already."""
        # LMDB's synced commit makes all data pages durable before the page that makes them current, so
        # power loss in the middle leaves the mark of the previous epoch, which is over.
        if self._doubted:
            self.abandon()
            return
        self._env.close()
        self._open(durable=True)
        self._put_meta(superblock, boot_id, clean=True)
        self._env.sync(True)
        self._env.close()
        with suppress(OSError):  # an index without a seal is checked at the next opening
            seal(self._folder)

    @property
    def is_label_free(self) -> bool:
        """Return whether no label of a session was ever in its file in the clear."""
        return self._meta_key == _SEALED_META_KEY

    def abandon(self) -> None:
        """Close without marking the index as clean. A failed index is removed, and the next opening builds another."""
        self._env.close()
        if self._doubted and not self._readonly:
            with suppress(OSError):
                (self._folder / DATA_NAME).unlink(missing_ok=True)

    def lookup(self, names: Sequence[Name]) -> list[Entry | None]:
        """Look up many blocks in one read transaction."""
        try:
            with self._env.begin(db=self.blocks, buffers=True) as transaction:
                found = [transaction.get(tenant + key) for tenant, key in names]
                return [None if value is None else Entry._make(ENTRY_ROW.unpack(value)) for value in found]
        except _FAILURES as error:
            raise self._unreadable(error) from error

    def prefix(self, tenant: bytes, keys: Sequence[bytes], now_ms: int) -> int:
        """Return how many keys from the first are stored and not expired; each one is looked up.

        Bisection would be wrong: expiry and quarantine leave holes.
        """
        try:
            with self._env.begin(db=self.blocks, buffers=True) as transaction:
                get = transaction.get
                for count, key in enumerate(keys):
                    row = get(tenant + key)
                    if row is None:
                        return count
                    (expires_ms,) = EXPIRES.unpack(row)
                    if 0 < expires_ms <= now_ms:
                        return count
        except _FAILURES as error:
            raise self._unreadable(error) from error
        return len(keys)

    def missing(self, tenant: bytes, keys: Sequence[bytes], now_ms: int) -> list[bytes]:
        """Return those of these keys that are not stored or have expired, in their order."""
        missing = []
        try:
            with self._env.begin(db=self.blocks, buffers=True) as transaction:
                for key in keys:
                    row = transaction.get(tenant + key)
                    if row is None or 0 < EXPIRES.unpack(row)[0] <= now_ms:
                        missing.append(key)
        except _FAILURES as error:
            raise self._unreadable(error) from error
        return missing

    def names_of(self, generations: Sequence[int]) -> list[Name | None]:
        """Return which block has each generation."""
        with self.reading() as transaction:
            rows = [transaction.get(GENERATION.pack(one), db=self.generations) for one in generations]
        return [None if row is None else (row[:TENANT_BYTES], row[TENANT_BYTES:48]) for row in rows]

    def publish(self, entries: Iterable[tuple[Name, Entry]], *, left: Sequence[Entry | Place] = ()) -> None:
        """Publish a batch; each entry replaces one of the same name. The places in `left` are noted for overwriting."""
        rows, owners = [], []
        for (tenant, key), entry in entries:
            name = tenant + key
            offset, length, _, generation, *_ = entry
            rows.append((name, checked(name, ENTRY.pack(*entry))))
            owners.append((GENERATION.pack(generation), OWNER.pack(name, offset, length)))

        def publish_all(transaction: Any) -> None:
            self._put_all(transaction, rows, owners)
            note(transaction, self.erased, left)

        self.write(publish_all)

    def publish_rows(self, blocks: NDArray[Any]) -> None:
        """Publish a batch, given as `NAMED_ROW`s."""
        rows, owners = packed(blocks)
        self.write(lambda transaction: self._put_all(transaction, rows, owners))

    def renew(self, entries: Iterable[tuple[Name, Entry]]) -> None:
        """Change the expiry of stored blocks to that of these entries, and nothing else."""

        def renew_all(transaction: Any) -> None:
            for (tenant, key), entry in entries:
                name = tenant + key
                transaction.put(name, checked(name, ENTRY.pack(*entry)), db=self.blocks)

        self.write(renew_all)

    def remove(self, names: Iterable[Name], spared: Collection[int] | None = None) -> list[Entry | None]:
        """Remove blocks; return the entry of each. Given `spared` keys, note the places of blocks with other keys."""

        def remove_all(transaction: Any) -> list[Entry | None]:
            gone = [self._remove_one(transaction, tenant + key) for tenant, key in names]
            if spared is not None:
                note(transaction, self.erased, [one for one in gone if one and one.domain not in spared])
            return gone

        return self.write(remove_all)

    def entries(self) -> Iterator[tuple[Name, Entry]]:
        """Return all entries, in the order of their names."""
        with self.reading() as transaction:
            for name, value in transaction.cursor(self.blocks):
                yield (name[:TENANT_BYTES], name[TENANT_BYTES:]), Entry._make(ENTRY_ROW.unpack(value))

    def after(self, name: bytes, limit: int) -> list[tuple[Name, Entry]]:
        """Return up to `limit` entries after a name (tenant and key), ordered by name."""
        with self.reading() as transaction, transaction.cursor(self.blocks) as cursor:
            rows = islice(cursor, limit) if cursor.set_range(name + b"\0") else ()
            return [
                ((found[:TENANT_BYTES], found[TENANT_BYTES:]), Entry._make(ENTRY_ROW.unpack(row)))
                for found, row in rows
            ]

    def of_domain(
        self, tenant: bytes, of: set[int] | None, after: bytes, limit: int
    ) -> tuple[list[Name], bytes | None]:
        """Return blocks of a tenant, all or those of some keys, and where to continue; None: there are no more."""
        rows = self.after(after or tenant, limit)
        names = [name for name, entry in rows if name[0] == tenant and (of is None or entry.domain in of)]
        is_more = len(rows) == limit and rows[-1][0][0] == tenant
        return names, b"".join(rows[-1][0]) if is_more else None

    def names(self) -> Iterator[NamesAndLives]:
        """Return the names of all blocks, many at once: tenant and key."""
        for rows in self.block_rows():
            yield rows[:, :NAME_BYTES], _values(rows)[LIFE]

    def owners(self) -> Iterator[tuple[int, Name, int, int]]:
        """Return generation, name, offset and length of all blocks, ordered by generation."""
        with self.reading() as transaction:
            for generation, row in transaction.cursor(self.generations):
                name, offset, length = OWNER.unpack(row)
                (number,) = GENERATION.unpack(generation)
                yield number, (name[:TENANT_BYTES], name[TENANT_BYTES:]), offset, length

    def lives(self) -> NDArray[Any]:
        """Return place, size, generation and expiry of all blocks as one array of records, unordered."""
        parts = (lives.astype(LIFE_ROW) for _, lives in self.names())
        return np.concatenate([np.empty(0, LIFE_ROW), *parts])

    def plain_bytes(self) -> int:
        """Return the bytes of blocks that are in the clear."""
        count = 0
        for values in map(_values, self.block_rows()):
            pages = -(-values["length"][values["domain"] == 0].astype(np.int64) // PAGE_BYTES)
            count += int(pages.sum()) * PAGE_BYTES + len(pages) * HEADER_BYTES
        return count

    def key_numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the domains' keys that blocks name, each once."""
        found = {0}.union(*(np.unique(_values(rows)["domain"]).tolist() for rows in self.block_rows()))
        return np.array(sorted(found - {0}), np.int64) - 1

    def block_rows(self) -> Iterator[NDArray[np.uint8]]:
        """Return the rows by name, thousands at once, in their order: name and value."""
        return rows_of(self._folder, *BLOCKS)

    def owner_rows(self) -> Iterator[NDArray[np.uint8]]:
        """Return the rows by generation, thousands at once, in their order: generation and value."""
        return rows_of(self._folder, *OWNERS)

    def check_order(self) -> None:
        """Raise Corrupt unless each row, by name and by generation, is where a search finds it."""
        check_order(self._folder, *BLOCKS)
        check_order(self._folder, *OWNERS)

    def generations_of(self, tenant: bytes, keys: Sequence[bytes]) -> list[int]:
        """Return the generation of each block; 0 if it is not stored."""
        names = [tenant + key for key in keys]
        with self.reading() as transaction, transaction.cursor(self.blocks) as cursor:
            found = dict(cursor.getmulti(names))
        return [BORN.unpack(found[name])[0] if name in found else 0 for name in names]

    def generations_of_tenant(self, tenant: bytes) -> NDArray[np.uint64]:
        """Return the generations of all blocks of a tenant, in ascending order."""
        parts = [np.empty(0, np.uint64)]
        with self.reading() as transaction, transaction.cursor(self.blocks) as cursor:
            there = cursor.set_range(tenant)
            items = iter(cursor)
            while there and (part := list(islice(items, INDEX_LIVES_LISTED_AT_ONCE))):
                there = part[-1][0].startswith(tenant)  # they are ordered by name
                if not there:
                    part = list(takewhile(lambda item: item[0].startswith(tenant), part))
                rows = np.frombuffer(b"".join(row for _, row in part), ROW)
                parts.append(rows["generation"].astype(np.uint64))
        return np.sort(np.concatenate(parts))

    def extents(self, lives: NDArray[Any] | None = None) -> NDArray[np.int64]:
        """Return first page and length of every record in all tables, a row each, in the order of pages."""
        lives = self.lives() if lives is None else lives
        parts = [lives[["offset", "length"]].astype(PLACE_ROW)]
        with self.reading(buffers=True) as transaction:
            for table in (self.sessions, self.chunks):
                rows = transaction.cursor(table).iternext(keys=False)
                parts.append(np.frombuffer(b"".join(row[: PLACE.size] for row in rows), PLACE_ROW))
        places = np.concatenate(parts)
        extents = np.stack(
            [(places["offset"] // PAGE_BYTES).astype(np.int64), record_pages(places["length"])], axis=1
        )
        return extents[np.argsort(extents[:, 0], kind="stable")]

    def __len__(self) -> int:
        with self.reading() as transaction:
            return int(transaction.stat(self.blocks)["entries"])

    @contextmanager
    def reading(self, *, buffers: bool = False) -> Iterator[Any]:
        """Begin a read transaction that raises our errors, and returns bytes, or views of the map."""
        try:
            with self._env.begin(buffers=True) if buffers else self._env.begin() as transaction:
                yield transaction
        except _FAILURES as error:
            raise self._unreadable(error) from error

    def write(self, change: Callable[[Any], T]) -> T:
        """Commit a change, which is repeated if the map had to grow; StorageError if nothing was changed."""
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
                self._cover()
                if self._notes is not None:
                    self._notes.write_note(CommitNote(*self._noted, commit))
                return result
        raise StorageError(f"The index in {self._folder} does not fit into {self._map_bytes} bytes.")

    def _put_all(
        self,
        transaction: Any,
        rows: list[tuple[bytes, bytes]],
        owners: list[tuple[bytes, bytes]],
    ) -> None:
        with transaction.cursor(self.blocks) as cursor:
            consumed, added = cursor.putmulti(rows, overwrite=False)
        if added != consumed:  # some names are taken, which is rare
            for name, row in rows:
                old = transaction.get(name, db=self.blocks)
                if old != row:
                    self._remove_one(transaction, name)
                    transaction.put(name, row, db=self.blocks)
        with transaction.cursor(self.generations) as cursor:
            consumed, added = cursor.putmulti(owners, append=True)
        if added != consumed:  # not in the order of generations: a rebuild
            for generation, owner in owners:
                transaction.put(generation, owner, db=self.generations)

    def _remove_one(self, transaction: Any, name: bytes) -> Entry | None:
        row = transaction.pop(name, db=self.blocks)
        if row is None:
            return None
        if not is_whole(name, row):  # the header is about to be wiped at whatever place the row says
            raise self._fails("contradicts itself: a block's row was changed")
        entry = Entry._make(ENTRY_ROW.unpack(row))
        transaction.delete(GENERATION.pack(entry.generation), db=self.generations)
        if self.has_doubts:
            transaction.delete(GENERATION.pack(entry.generation), db=self.doubts)
        return entry

    def _unreadable(self, error: Exception) -> StorageError:
        return self._fails(f"could not be read: {error}")

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
            max_dbs=len(_TABLES) + 3,
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
            self.blocks, self.generations, self.sessions, self.chunks, self.references, self._meta = (
                self._env.open_db(table, create=not self._readonly) for table in _TABLES
            )
            self._open_later()
        except BaseException:
            self._env.close()
            raise

    def _open_later(self) -> None:
        """Open the tables that an older build didn't have."""
        with suppress(lmdb.NotFoundError):
            self.owed = self._env.open_db(_OWED, create=not self._readonly)
            self.erased = self._env.open_db(PLACES, create=not self._readonly)
        with suppress(lmdb.NotFoundError):
            self.doubts = self._env.open_db(_DOUBTS, create=not self._readonly)
            with self._env.begin() as transaction:
                self.has_doubts = transaction.stat(self.doubts)["entries"] > 0

    def _refuse_if_cut(self) -> None:
        # Touching a page after the end of a mapped file kills the process, so this comes before any lookup.
        if self._file_bytes() < self._used_bytes():
            raise lmdb.CorruptedError("the file is shorter than what it says it holds")

    def _cover(self) -> None:
        """Extend the file to its stated length: LMDB doesn't write pages at its end that a transaction has freed."""
        used_bytes = self._used_bytes()
        if used_bytes > self._covered_bytes:
            if self._file_bytes() < used_bytes:
                os.truncate(self._folder / "data.mdb", used_bytes)
            self._covered_bytes = used_bytes

    def _used_bytes(self) -> int:
        return int((self._env.info()["last_pgno"] + 1) * self._page_bytes)

    def _file_bytes(self) -> int:
        return (self._folder / "data.mdb").stat().st_size

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
        if _COMMIT.unpack(commit)[0] != commits:
            return "its head is of another commit than its rows"
        self.was_clean = bool(clean)
        self.knows_doubts = doubted == _EPOCH.pack(epoch)
        if self.was_clean:
            return ""
        # A process may die between a commit and its note, so the index may be ahead by one.
        if (note.drive_uuid, note.epoch) != (drive_uuid, epoch) or commits not in (
            note.commit,
            note.commit + 1,
        ):
            return "it lacks a commit"
        return "" if boot == boot_id.encode() else "the power may have gone since it was written"

    def _put_meta(self, superblock: Superblock, boot_id: str, *, clean: bool) -> None:
        row = _META.pack(superblock.drive_uuid, superblock.epoch, clean, boot_id.encode())
        meta = checked(self._meta_key, row)

        def put(transaction: Any) -> None:
            transaction.put(self._meta_key, meta, db=self._meta)
            transaction.put(_DOUBTED_KEY, _EPOCH.pack(superblock.epoch), db=self._meta)

        self.write(put)
