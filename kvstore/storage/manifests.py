"""Sessions in the index: user -> sessions -> chunks and tail -> block keys, and refcounts of all of these.

Always holds:

- A chunk counts the sessions that name it, and is removed with the last one. A block counts the chunks and tails that
  name it, so sessions that share a chunk cost its blocks one reference: forking is O(chunks).
- If few counts change, they change in the same transaction as the session. Those of a large session change in slices:
  chunks are counted before the session names them (`name_chunks`), and after it has dropped them (`settle`). In
  between, the session *owes* them: a chunk's count is always the number of sessions that name it or owe it. A start
  settles what a crash has left owed.
- A value has a bounded size: a chunk's fits into one page of LMDB.

It doesn't write to the drive, and doesn't know whether named blocks exist. References to removed blocks are kept: a
block may be stored again under its name.
"""

from __future__ import annotations

import struct
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from kvstore.errors import Corrupt, StorageError
from kvstore.limits import (
    ENCRYPT_LOOKED_AT_ONCE,
    PAGE_BYTES,
    SESSION_BYTES,
    SESSION_CHUNK_BLOCKS,
    SESSION_LABEL_BYTES_MAX,
    TENANT_BYTES,
    USER_BYTES,
)
from kvstore.storage.labels import LOST_LABEL, SEALED_MORE_BYTES, Labels, is_sealed_label, number_of_key
from kvstore.storage.overwriting import note
from kvstore.storage.row_check import CHECK_BYTES, checked
from kvstore.wire.manifest import Manifest, label_of, pack_manifest, parse_manifest, split_keys
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.storage.index import Index, Name
    from kvstore.storage.sealing import Keys

    Written = Mapping[bytes, tuple["Place", bytes]]
    """Chunks on the drive, by their keys: place and payload."""

__all__ = ["Changed", "Listed", "Manifests", "Place", "SessionName", "Stored"]

_PLACE: Final = struct.Struct("<QIIQ")  # it begins like the rows of all records do
_CHUNK: Final = struct.Struct("<QIIQI")  # place, then how many sessions name it
_COUNT: Final = struct.Struct("<I")
_CHUNK_WORK: Final = 8  # changing a chunk's count costs as much as this many blocks
_LABEL_BYTES_MAX: Final = SESSION_LABEL_BYTES_MAX + SEALED_MORE_BYTES
_NO_END: Final = 1 << 62  # no limit of work: all in one transaction


class SessionName(NamedTuple):
    """Tenant, user, session."""

    tenant: bytes
    user: bytes
    session: bytes


class Place(NamedTuple):
    """Where the record of a session or chunk is on the drive."""

    offset: int
    length: int
    crc32c: int
    generation: int

    @property
    def pages(self) -> int:
        """Return how many pages the record occupies."""
        return record_bytes(self.length) // PAGE_BYTES


class Stored(NamedTuple):
    """A session as the index has it."""

    place: Place
    manifest: Manifest

    def is_over(self, now_ms: int, epoch: int | None = None) -> bool:
        """Return whether it has expired or its epoch is over. It then counts as removed, and is removed soon."""
        return 0 < self.manifest.expires_ms <= now_ms or epoch not in (None, self.manifest.epoch)


class Listed(NamedTuple):
    """A session in a list."""

    session: bytes
    label: bytes | None  # None: it was lost with its user's key
    blocks: int
    turns: int
    tokens: int
    at_ms: int  # when its last turn began; 0: it has none
    expires_ms: int  # 0: never
    epoch: int = 0


class Changed(NamedTuple):
    """What a change has freed: records on the drive, and blocks whose refcount fell to zero."""

    manifest: Place | None  # the previous one
    chunks: list[Place]
    unreferenced: list[Name]
    owes: bool = False  # there are chunks to settle, in slices


class Manifests:
    """The tables of sessions, chunks and references of one index."""

    def __init__(self, index: Index, keys: Keys | None = None) -> None:
        """Without the store's keys, sealed labels are lost, and new sessions' labels are in the clear."""
        self._index = index
        self._labels = Labels(keys)

    def get(self, name: SessionName) -> Stored | None:
        """Find a session; it has no label if that is lost, and a sealed one if its key is damaged."""
        row_name = b"".join(name)
        with self._index.reading() as transaction:
            row = transaction.get(row_name, db=self._index.sessions)
        if row is None:
            return None
        stored = _stored(row)
        with suppress(Corrupt):
            label = self._labels.unseal(row_name, stored.manifest.label)
            return stored._replace(manifest=stored.manifest._replace(label=label or b""))
        return stored

    def keys(self, name: SessionName, first: int = 0, until: int | None = None) -> list[bytes] | None:
        """Return a session's block keys, or a range of them; None if there is no such session."""
        stored = self.get(name)
        return None if stored is None else self.keys_of(name.tenant, stored.manifest, first, until)

    def keys_of(
        self, tenant: bytes, manifest: Manifest, first: int = 0, until: int | None = None
    ) -> list[bytes]:
        """Return block keys of a session that was found, or some of them; only the chunks of these are read.

        StorageError if the session has changed meanwhile, so that one of these chunks is gone.
        """
        first, until, _ = slice(first, until).indices(manifest.blocks)
        if until <= first:
            return []
        from_chunk = min(first // SESSION_CHUNK_BLOCKS, len(manifest.chunks))
        keys: list[bytes] = []
        with self._index.reading() as transaction:
            for chunk in manifest.chunks[from_chunk : -(-until // SESSION_CHUNK_BLOCKS)]:
                row = transaction.get(tenant + chunk, db=self._index.chunks)
                if row is None:
                    raise StorageError("The index contradicts itself: a session lists a missing chunk.")
                keys += split_keys(row[_CHUNK.size : -CHECK_BYTES])
        if until > len(manifest.chunks) * SESSION_CHUNK_BLOCKS:
            keys += manifest.tail
        before = from_chunk * SESSION_CHUNK_BLOCKS
        return keys[first - before : until - before]

    def of_user(self, tenant: bytes, user: bytes, after: bytes = b"", limit: int = 1000) -> list[Listed]:
        """List a user's sessions, in order, starting after `after`."""
        found: list[Listed] = []
        with self._index.reading() as transaction, transaction.cursor(self._index.sessions) as cursor:
            there = cursor.set_range(tenant + user + after)
            while there and len(found) < limit:
                name, row = cursor.item()
                if not name.startswith(tenant + user):
                    break
                if name[TENANT_BYTES + USER_BYTES :] != after:
                    found.append(self._listed(name, _stored(row).manifest))
                there = cursor.next()
        return found

    def page(self, tenant: bytes, after: bytes, limit: int) -> tuple[list[tuple[SessionName, Listed]], bool]:
        """List sessions of one tenant, or with b"" of all, in the order of their names, starting after `after`.

        Also returns whether there are more.
        """
        found: list[tuple[SessionName, Listed]] = []
        with self._index.reading() as transaction, transaction.cursor(self._index.sessions) as cursor:
            there = cursor.set_range(after or tenant or b"\0")
            if there and cursor.key() == after:
                there = cursor.next()
            while there and cursor.key().startswith(tenant):
                if len(found) == limit:
                    return found, True
                row, user_end = cursor.key(), TENANT_BYTES + USER_BYTES
                name = SessionName(row[:TENANT_BYTES], row[TENANT_BYTES:user_end], row[user_end:])
                found.append((name, self._listed(row, _stored(cursor.value()).manifest)))
                there = cursor.next()
        return found, False

    def _listed(self, row_name: bytes, manifest: Manifest) -> Listed:
        turns, label = manifest.turns, None
        with suppress(Corrupt):  # the others are listed
            label = self._labels.unseal(row_name, manifest.label)
        return Listed(
            row_name[-SESSION_BYTES:],
            label,
            manifest.blocks,
            len(turns),
            sum(turn.tokens for turn in turns),
            turns[-1].at_ms if turns else 0,
            manifest.expires_ms,
            manifest.epoch,
        )

    def __len__(self) -> int:
        with self._index.reading() as transaction:
            return int(transaction.stat(self._index.sessions)["entries"])

    def own_keys(self, name: SessionName) -> Iterator[set[bytes]]:
        """Yield the keys whose refcounts fall with this session, some at a time; a key repeats for each reference."""
        stored = self.get(name)
        if stored is None:
            return
        yield set(stored.manifest.tail)
        # A chunk counts its blocks once, however many sessions list it.
        for chunk in set(stored.manifest.chunks):
            with self._index.reading() as transaction:
                row = transaction.get(name.tenant + chunk, db=self._index.chunks)
            if row is not None and _CHUNK.unpack_from(row)[-1] == 1:
                yield set(split_keys(row[_CHUNK.size : -CHECK_BYTES]))

    def without_references(self, names: Sequence[Name]) -> list[Name]:
        """Those of these blocks that no session names."""
        return [name for name, count in zip(names, self.references(names), strict=True) if not count]

    def references(self, names: Iterable[Name]) -> list[int]:
        """Return the refcount of each block."""
        with self._index.reading() as transaction:
            rows = [transaction.get(tenant + key, db=self._index.references) for tenant, key in names]
        return [0 if row is None else _COUNT.unpack_from(row)[0] for row in rows]

    def chunk_keys(self, tenant: bytes, chunk: bytes) -> tuple[bytes, ...]:
        """Return the keys in a chunk."""
        with self._index.reading() as transaction:
            row = transaction.get(tenant + chunk, db=self._index.chunks)
        if row is None:
            raise StorageError("A chunk of the session was removed meanwhile.")
        return split_keys(row[_CHUNK.size : -CHECK_BYTES])

    def all(self) -> Iterator[tuple[SessionName, Stored]]:
        """Return all sessions; sealed labels all look alike."""
        with self._index.reading() as transaction:
            for name, row in transaction.cursor(self._index.sessions):
                tenant, user, session = (
                    name[:TENANT_BYTES],
                    name[TENANT_BYTES:-SESSION_BYTES],
                    name[-SESSION_BYTES:],
                )
                stored = _stored(row)
                if is_sealed_label(stored.manifest.label):
                    stored = stored._replace(manifest=stored.manifest._replace(label=LOST_LABEL))
                yield SessionName(tenant, user, session), stored

    def with_clear_labels(self) -> list[SessionName]:
        """Return the sessions whose labels are in the clear."""
        named = ((name, stored.manifest.label) for name, stored in self.all())
        return [name for name, label in named if label and not is_sealed_label(label)]

    def seal_labels(self, names: Sequence[SessionName]) -> None:
        """Seal the labels of these sessions, whose users have keys."""

        def seal_all(transaction: Any) -> None:
            for name in names:
                row_name = b"".join(name)
                place, manifest = _stored(transaction.get(row_name, db=self._index.sessions))
                label = self._labels.seal(name.tenant, name.user, row_name, manifest.label)
                value = _PLACE.pack(*place) + pack_manifest(manifest._replace(label=label))
                transaction.put(row_name, checked(row_name, value), db=self._index.sessions)

        self._index.write(seal_all)

    def key_numbers(self) -> NDArray[np.int64]:
        """Return the numbers of the keys that labels of sessions name: those of their users, as in their records."""
        with self._index.reading() as transaction:
            rows = transaction.cursor(self._index.sessions)
            numbers = {number_of_key(label_of(row[_PLACE.size :])) for _, row in rows}
        return np.array(sorted(one for one in numbers if one is not None), np.int64)

    def pages_of_tenants(self) -> Counter[bytes]:
        """Return how many pages the records of each tenant take."""
        pages: Counter[bytes] = Counter()
        with self._index.reading(buffers=True) as transaction:
            for table in (self._index.sessions, self._index.chunks):
                for name, row in transaction.cursor(table):
                    pages[bytes(name[:TENANT_BYTES])] += Place._make(_PLACE.unpack_from(row)).pages
        return pages

    def session_below(
        self, generation: int, after: bytes
    ) -> tuple[tuple[SessionName, Place] | None, bytes | None]:
        """Find the next session after a row with a record or chunk of a lower generation, and where to continue.

        None there: all were examined. Each call examines a bounded number of rows.
        """
        row, place, after_it = self._below(self._index.sessions, generation, after)
        if row is None or place is None:
            return None, after_it
        user_end = TENANT_BYTES + USER_BYTES
        name = SessionName(row[:TENANT_BYTES], row[TENANT_BYTES:user_end], row[user_end:])
        return (name, place), after_it

    def chunk_below(
        self, generation: int, after: bytes
    ) -> tuple[tuple[bytes, bytes, Place] | None, bytes | None]:
        """Find the next such chunk: its tenant, its key and where it is."""
        row, place, after_it = self._below(self._index.chunks, generation, after)
        if row is None or place is None:
            return None, after_it
        return (row[:TENANT_BYTES], row[TENANT_BYTES:], place), after_it

    def _below(
        self, table: Any, generation: int, after: bytes
    ) -> tuple[bytes | None, Place | None, bytes | None]:
        with self._index.reading() as transaction, transaction.cursor(table) as cursor:
            there = cursor.set_range(after or b"\0")
            if there and cursor.key() == after:
                there = cursor.next()
            for _ in range(ENCRYPT_LOOKED_AT_ONCE):
                if not there:
                    return None, None, None
                place = Place._make(_PLACE.unpack_from(cursor.value()))
                is_older = place.generation < generation
                if table is self._index.sessions and not is_older:
                    is_older = self._has_older_chunk(transaction, cursor.key(), cursor.value(), generation)
                if is_older:
                    return bytes(cursor.key()), place, bytes(cursor.key())
                after = bytes(cursor.key())
                there = cursor.next()
        return None, None, after

    def _has_older_chunk(self, transaction: Any, name: bytes, row: bytes, generation: int) -> bool:
        table, tenant = self._index.chunks, name[:TENANT_BYTES]
        rows = (transaction.get(tenant + chunk, db=table) for chunk in _stored(row).manifest.chunks)
        return any(row and Place._make(_PLACE.unpack_from(row)).generation < generation for row in rows)

    def move_chunk(self, tenant: bytes, chunk: bytes, old: Place, new: Place) -> bool:
        """Note another place of a chunk; False, and nothing changed, if it is no longer at the old one."""

        def move(transaction: Any) -> bool:
            row = transaction.get(tenant + chunk, db=self._index.chunks)
            if row is None:
                return False
            *place, count = _CHUNK.unpack_from(row)
            if Place._make(place) != old:
                return False
            moved = checked(tenant + chunk, _CHUNK.pack(*new, count) + row[_CHUNK.size : -CHECK_BYTES])
            transaction.put(tenant + chunk, moved, db=self._index.chunks)
            return True

        return self._index.write(move)

    def all_chunks(self) -> Iterator[tuple[bytes, bytes, Place, int]]:
        """Return tenant, key, place and refcount of all chunks."""
        with self._index.reading() as transaction:
            for name, row in transaction.cursor(self._index.chunks):
                *place, count = _CHUNK.unpack_from(row)
                yield name[:TENANT_BYTES], name[TENANT_BYTES:], Place._make(place), count

    def all_references(self) -> Iterator[tuple[Name, int]]:
        """Return all referenced blocks and their refcounts."""
        with self._index.reading() as transaction:
            for name, row in transaction.cursor(self._index.references):
                yield (name[:TENANT_BYTES], name[TENANT_BYTES:]), _COUNT.unpack_from(row)[0]

    def all_owed(self) -> Iterator[tuple[bytes, bytes]]:
        """Return tenant and key of each chunk that a session owes."""
        if self._index.owed is not None:
            with self._index.reading() as transaction:
                for name, row in transaction.cursor(self._index.owed):
                    for chunk in split_keys(row[:-CHECK_BYTES]):
                        yield name[:TENANT_BYTES], chunk

    def name_chunks(
        self, name: SessionName, chunks: Sequence[bytes], written: Written, work_max: int
    ) -> tuple[int, list[Place]]:
        """Count the first of these chunks for a session that will name them; return how many, and what became free."""
        return self._index.write(
            lambda transaction: _Change(self._index, transaction, name).name_chunks(chunks, written, work_max)
        )

    def replace(
        self,
        name: SessionName,
        new: Stored | None,
        written: Written,
        work_max: int = _NO_END,
        *,
        is_clear: bool = False,
        erased: Sequence[Place] | None = None,
    ) -> Changed:
        """Replace the session of this name, or remove it; `written` are the chunks that are on the drive.

        If that releases more than the limit, chunks are owed. StorageError, and nothing changed, if the new one names a
        chunk that is neither known nor written. If the record `is_clear`, so is the label.
        Earlier places of a session that is `erased` are noted for overwriting, and so is what becomes free.
        """
        if new is not None and not is_clear:
            label = self._labels.seal(name.tenant, name.user, b"".join(name), new.manifest.label)
            new = new._replace(manifest=new.manifest._replace(label=label))

        def change(transaction: Any) -> Changed:
            note(transaction, self._index.erased, erased or ())
            one = _Change(self._index, transaction, name, is_erased=erased is not None)
            return one.replace(new, written, work_max)

        return self._index.write(change)

    def settle(self, name: SessionName, work_max: int = _NO_END, *, is_erased: bool = False) -> Changed:
        """Release some of the chunks that a session owes; if it is erased, what becomes free is noted."""
        return self._index.write(
            lambda transaction: _Change(self._index, transaction, name, is_erased=is_erased).settle(work_max)
        )

    def settle_all(self) -> bool:
        """Release all chunks that sessions owe, at an opening; return whether there were any.

        What becomes free is noted for overwriting: nothing says which of the sessions were being erased.
        """
        with self._index.reading() as transaction:
            owing = [bytes(name) for name, _ in transaction.cursor(self._index.owed)]
        user_end = TENANT_BYTES + USER_BYTES
        for name in owing:
            self.settle(
                SessionName(name[:TENANT_BYTES], name[TENANT_BYTES:user_end], name[user_end:]), is_erased=True
            )
        return bool(owing)


class _Change:
    """One transaction on one session."""

    def __init__(self, index: Index, transaction: Any, name: SessionName, *, is_erased: bool = False) -> None:
        self._is_erased = is_erased
        self._index = index
        self._transaction = transaction
        self._row_name = b"".join(name)
        self._tenant = name.tenant
        self._freed: list[Place] = []
        self._unreferenced: dict[bytes, None] = {}

    def name_chunks(
        self, chunks: Sequence[bytes], written: Written, work_max: int
    ) -> tuple[int, list[Place]]:
        work = named = 0
        while named < len(chunks) and work < work_max:
            work += self._name_chunk(chunks[named], written.get(chunks[named]))
            named += 1
        self._owe(self._owed() + b"".join(chunks[:named]))
        return named, self._freed

    def replace(self, new: Stored | None, written: Written, work_max: int) -> Changed:
        row = self._transaction.get(self._row_name, db=self._index.sessions)
        old = None if row is None else _stored(row)
        old_chunks, old_tail = (set(old.manifest.chunks), set(old.manifest.tail)) if old else (set(), set())
        new_chunks, new_tail = (set(new.manifest.chunks), set(new.manifest.tail)) if new else (set(), set())
        # Additions come first, so that no count falls to zero in between.
        for chunk in new_chunks.difference(old_chunks, split_keys(self._owed())):
            self._name_chunk(chunk, written.get(chunk))
        self._count(new_tail - old_tail, 1)
        self._owe(b"".join(old_chunks - new_chunks))
        self._settle(work_max)
        self._count(old_tail - new_tail, -1)
        if new is not None:
            value = _PLACE.pack(*new.place) + pack_manifest(new.manifest)
            self._transaction.put(self._row_name, checked(self._row_name, value), db=self._index.sessions)
        elif old is not None:
            self._transaction.delete(self._row_name, db=self._index.sessions)
        return self._changed(None if old is None else old.place)

    def settle(self, work_max: int) -> Changed:
        self._settle(work_max)
        return self._changed(None)

    def _changed(self, before: Place | None) -> Changed:
        names = [(self._tenant, key) for key in self._unreferenced]
        if self._is_erased:
            note(self._transaction, self._index.erased, self._freed + ([] if before is None else [before]))
        return Changed(before, self._freed, names, bool(self._owed()))

    def _settle(self, work_max: int) -> None:
        chunks, work = split_keys(self._owed()), 0
        for at, chunk in enumerate(chunks):
            if work >= work_max:
                self._owe(b"".join(chunks[at:]))
                return
            work += self._drop_chunk(chunk)
        self._owe(b"")

    def _owed(self) -> bytes:
        row: bytes | None = self._transaction.get(self._row_name, db=self._index.owed)
        return b"" if row is None else row[:-CHECK_BYTES]

    def _owe(self, chunks: bytes) -> None:
        if chunks:
            self._transaction.put(self._row_name, checked(self._row_name, chunks), db=self._index.owed)
        else:
            self._transaction.delete(self._row_name, db=self._index.owed)

    def _name_chunk(self, chunk: bytes, written: tuple[Place, bytes] | None) -> int:
        """Increment a chunk's refcount; return how many block refcounts that changed."""
        row = self._transaction.get(self._tenant + chunk, db=self._index.chunks)
        if row is not None:
            *place, count = _CHUNK.unpack_from(row)
            self._put_chunk(chunk, Place._make(place), count + 1, row[_CHUNK.size : -CHECK_BYTES])
            if written is not None:
                self._freed.append(written[0])  # another session wrote the same chunk first
            return _CHUNK_WORK
        if written is None:
            raise StorageError("A chunk of the session was removed meanwhile.")
        self._put_chunk(chunk, written[0], 1, written[1])
        self._count(set(split_keys(written[1])), 1)
        return SESSION_CHUNK_BLOCKS

    def _drop_chunk(self, chunk: bytes) -> int:
        """Decrement a chunk's refcount; return how many block refcounts that changed."""
        row = self._transaction.get(self._tenant + chunk, db=self._index.chunks)
        if row is None:
            raise StorageError("The index contradicts itself: a session lists a missing chunk.")
        *place, count = _CHUNK.unpack_from(row)
        if count > 1:
            self._put_chunk(chunk, Place._make(place), count - 1, row[_CHUNK.size : -CHECK_BYTES])
            return _CHUNK_WORK
        self._transaction.delete(self._tenant + chunk, db=self._index.chunks)
        self._freed.append(Place._make(place))
        self._count(set(split_keys(row[_CHUNK.size : -CHECK_BYTES])), -1)
        return SESSION_CHUNK_BLOCKS

    def _put_chunk(self, chunk: bytes, place: Place, count: int, payload: bytes) -> None:
        name = self._tenant + chunk
        row = checked(name, _CHUNK.pack(*place, count) + payload)
        self._transaction.put(name, row, db=self._index.chunks)

    def _count(self, keys: Iterable[bytes], step: int) -> None:
        table = self._index.references
        for key in keys:
            name = self._tenant + key
            row = self._transaction.get(name, db=table)
            count = (0 if row is None else _COUNT.unpack_from(row)[0]) + step
            if count < 0:
                raise StorageError(
                    "The index contradicts itself: a block has fewer references than sessions."
                )
            if count:
                self._transaction.put(name, checked(name, _COUNT.pack(count)), db=table)
            else:
                self._transaction.delete(name, db=table)
                self._unreferenced[key] = None


def _stored(row: Sequence[int] | bytes) -> Stored:
    manifest = parse_manifest(bytes(row[_PLACE.size : -CHECK_BYTES]), _LABEL_BYTES_MAX)
    if manifest is None:
        raise StorageError("The index contradicts itself: a session's row is invalid.")
    return Stored(Place._make(_PLACE.unpack_from(bytes(row[: _PLACE.size]))), manifest)
