"""The index: (tenant, key) -> where the block lies, in LMDB. A cache of the truth on the drive.

It is trusted at opening only if it says the same store and the same epoch as the superblock, and was
either closed cleanly or written under this very boot of the kernel, whose page cache survives a killed
process. Otherwise it is thrown away and built anew from the drive.

Always holds:

- An epoch is durable in the superblock before any index holds it, and each opening and each clean close
  makes a new one. So an index brought back from an earlier time, even one copied from a running node, has
  an epoch that is over. (One copied and brought back between two epochs is not told apart; reads still
  check every header, so it can lose blocks, not serve wrong ones.)
- Commits are not synced, so after power loss the file may be any mixture of old and new pages; then the
  boot id has changed, and nothing in it is believed. Only the commit that marks it clean is synced, with
  all before it.
- A batch is published in one transaction: all of it or nothing.

It doesn't know about extents, pins or time.
"""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar

import lmdb

from kvstore.errors import StorageError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from kvstore.wire.record import Superblock

    Name = tuple[bytes, bytes]
    """Tenant and key."""

__all__ = ["Entry", "Index", "kernel_boot_id"]

T = TypeVar("T")

_ENTRY: Final = struct.Struct("<QIIQQ16s")
_META: Final = struct.Struct("<16sQ?36s")  # store uuid, epoch, clean, boot id
_META_KEY: Final = b"store"
_MAP_BYTES_MIN: Final = 64 << 20
_CAPACITY_PER_MAP_BYTE: Final = 16  # the smallest record takes 8 KiB and its entry far less than 512 bytes
_GROWTHS_MAX: Final = 4  # doublings of the map within one transaction


class Entry(NamedTuple):
    """Where a block lies and what its header says."""

    offset: int
    length: int
    crc32c: int
    generation: int
    expires_ms: int
    fingerprint: bytes


def kernel_boot_id() -> str:
    """Name this boot of the kernel."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


class Index:
    """An open index. One thread uses it."""

    def __init__(self, folder: Path, capacity_bytes: int) -> None:
        self._folder = folder
        self._map_bytes = max(_MAP_BYTES_MIN, capacity_bytes // _CAPACITY_PER_MAP_BYTE)
        self._open(durable=False)

    @classmethod
    def trusted(cls, folder: Path, superblock: Superblock, boot_id: str) -> Index | None:
        """Open the index of yesterday if it can be believed."""
        if not (folder / "data.mdb").is_file():
            return None
        try:
            index = cls(folder, superblock.capacity_bytes)
        except lmdb.Error:
            return None
        try:
            believed = index._is_of(superblock, boot_id)
        except (StorageError, lmdb.Error, struct.error):
            believed = False
        if believed:
            return index
        index.abandon()
        return None

    @classmethod
    def empty(cls, folder: Path, capacity_bytes: int) -> Index:
        """Throw away what is there and begin anew."""
        if folder.exists():
            shutil.rmtree(folder)
        folder.mkdir(mode=0o700)
        return cls(folder, capacity_bytes)

    def begin_epoch(self, superblock: Superblock, boot_id: str) -> None:
        """Say which epoch this index belongs to. The superblock has to be durable with it already."""
        self._put_meta(superblock, boot_id, clean=False)

    def close_clean(self, superblock: Superblock, boot_id: str) -> None:
        """Make everything durable, say so, and close. The superblock and all records are durable already."""
        # LMDB's synced commit makes all data pages durable before the page that makes them current, so
        # power loss in the middle leaves the mark of the epoch before, which is over.
        self._env.close()
        self._open(durable=True)
        self._put_meta(superblock, boot_id, clean=True)
        self._env.close()

    def abandon(self) -> None:
        """Close without saying that all is well."""
        self._env.close()

    def lookup(self, names: Sequence[Name]) -> list[Entry | None]:
        """Find many in one read transaction."""
        try:
            with self._env.begin(db=self._blocks, buffers=True) as transaction:
                found = [transaction.get(tenant + key) for tenant, key in names]
                return [None if value is None else Entry._make(_ENTRY.unpack(value)) for value in found]
        except lmdb.Error as error:
            raise StorageError(f"The index in {self._folder} could not be read: {error}.") from error

    def publish(self, entries: Iterable[tuple[Name, Entry]]) -> None:
        """Make a batch visible, each in place of what had its name before."""
        rows = [(tenant + key, _ENTRY.pack(*entry)) for (tenant, key), entry in entries]

        def put_all(transaction: lmdb.Transaction) -> None:
            for name, value in rows:
                transaction.put(name, value)

        self._write(put_all)

    def publish_newest(self, entries: Sequence[tuple[Name, Entry]]) -> None:
        """Make a batch visible except where the name has a higher generation already; for a rebuild."""
        newest: dict[Name, Entry] = {}
        for (name, entry), known in zip(entries, self.lookup([name for name, _ in entries]), strict=True):
            rival = newest.get(name, known)
            if rival is None or rival.generation < entry.generation:
                newest[name] = entry
        self.publish(newest.items())

    def remove(self, name: Name) -> None:
        """Forget one block."""
        self._write(lambda transaction: transaction.delete(name[0] + name[1]))

    def entries(self) -> Iterator[Entry]:
        """Give all entries, in the order of their names."""
        with self._env.begin(db=self._blocks, buffers=True) as transaction:
            for value in transaction.cursor().iternext(keys=False):
                yield Entry._make(_ENTRY.unpack(value))

    def __len__(self) -> int:
        with self._env.begin(db=self._blocks) as transaction:
            return int(transaction.stat(self._blocks)["entries"])

    def _open(self, *, durable: bool) -> None:
        # The folder's lock keeps other processes out and one thread uses the index, so LMDB's own locks
        # are left off. No write map: an unfinished transaction must not reach the file.
        self._env = lmdb.open(
            str(self._folder),
            map_size=self._map_bytes,
            max_dbs=2,
            sync=durable,
            metasync=durable,
            lock=False,
            readahead=False,
            meminit=False,
        )
        try:
            self._refuse_if_cut()
            self._blocks = self._env.open_db(b"blocks")
            self._meta = self._env.open_db(b"meta")
        except BaseException:
            self._env.close()
            raise

    def _refuse_if_cut(self) -> None:
        # Touching a page behind the end of a mapped file kills the process, so this comes before any look-up.
        used_bytes = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        if (self._folder / "data.mdb").stat().st_size < used_bytes:
            raise lmdb.CorruptedError("the file is shorter than what it says it holds")

    def _is_of(self, superblock: Superblock, boot_id: str) -> bool:
        with self._env.begin(db=self._meta) as transaction:
            meta = transaction.get(_META_KEY)
        if meta is None:
            return False
        store_uuid, epoch, clean, boot = _META.unpack(meta)
        if (store_uuid, epoch) != (superblock.store_uuid, superblock.epoch):
            return False
        return bool(clean) or boot == boot_id.encode()

    def _put_meta(self, superblock: Superblock, boot_id: str, *, clean: bool) -> None:
        meta = _META.pack(superblock.store_uuid, superblock.epoch, clean, boot_id.encode())
        self._write(lambda transaction: transaction.put(_META_KEY, meta, db=self._meta))

    def _write(self, change: Callable[[lmdb.Transaction], object]) -> None:
        for _ in range(_GROWTHS_MAX):
            try:
                with self._env.begin(db=self._blocks, write=True) as transaction:
                    change(transaction)
            except lmdb.MapFullError:
                self._map_bytes *= 2
                self._env.set_mapsize(self._map_bytes)
            except lmdb.Error as error:
                raise StorageError(f"The index in {self._folder} could not be written: {error}.") from error
            else:
                return
        raise StorageError(f"The index in {self._folder} does not fit into {self._map_bytes} bytes.")
