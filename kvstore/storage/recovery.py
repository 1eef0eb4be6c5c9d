"""Rebuilds the index by walking over the headers on the drive, as `docs/record-format.md` describes it.

Always holds: it writes nothing to the drive, and reads no payloads of blocks, except of those that were being
encrypted. Afterwards the index has, of blocks with one name that the roll allows, the one with the highest generation;
of one that was being encrypted, the old copy if the new one isn't whole; of a session, the newest complete manifest.

It doesn't check other payloads: their CRC is checked on every read. An unreadable page is skipped; if it was a header,
its record is lost. A record whose key can't be opened now, but was not destroyed, is not given up: then no new index
is made.
"""

from __future__ import annotations

import ctypes
import struct
from contextlib import closing, suppress
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvstore.errors import Corrupt, StorageError
from kvstore.limits import (
    HEADER_BYTES,
    PAGE_BYTES,
    SCAN_BATCH_RECORDS,
    SCAN_SKIPPED_BYTES,
    SCAN_UNREADABLE_PAGES_MAX,
    SCAN_WINDOW_BYTES,
)
from kvstore.storage.extents import Extents
from kvstore.storage.index import Entry
from kvstore.storage.live_roll import Roll
from kvstore.storage.manifests import Manifests, Place, SessionName, Stored
from kvstore.storage.read_ahead import Ahead
from kvstore.wire.manifest import CHUNK_PAYLOAD_BYTES, chunk_key, parse_manifest, session_key
from kvstore.wire.record import (
    Flaw,
    Header,
    Kind,
    record_bytes,
    records_begin,
)
from nic_offload.checksum import crc32c

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from kvstore.storage.disk import Progress
    from kvstore.storage.folder import LentNote
    from kvstore.storage.index import Index, Name
    from kvstore.storage.volume import Volume
    from kvstore.wire.record import HeaderCodec, Superblock

__all__ = ["Found", "add_lent", "check_manifests", "extents_around", "open_copy", "rebuild", "scan"]

_GENERATION: Final = struct.Struct("<Q")  # in the clear in an encrypted header, whose tag was right
_GENERATION_AT: Final = 16


class Found(NamedTuple):
    """A valid header, its position, and whether the roll allows its record."""

    offset: int
    header: Header
    is_allowed: bool


def scan(
    volume: Volume, progress: Progress | None = None, unopened: set[int] | None = None
) -> Generator[Found]:
    """Yield every header found by a walk over the drive, in order; close it unless it ended.

    A record whose key is gone counts as none, and is stepped over a page at a time. So is one whose key's slot is
    damaged, but its offset is added to `unopened`.
    """
    disk, superblock = volume.disk, volume.superblock
    with Ahead(disk, SCAN_WINDOW_BYTES) as ahead:
        walk = _Walk(ahead, volume, Roll(disk, superblock), set() if unopened is None else unopened)
        position = records_begin(superblock.capacity_bytes)
        for begin, end in disk.data_ranges(position):
            # A record may extend over a hole in a damaged file, so a range never moves the walk backwards.
            position = max(position, begin)
            while position < min(end, superblock.capacity_bytes):
                found, position = walk.step(position, end)
                if found is not None:
                    yield found
                if progress is not None:
                    progress("scanning the drive", position, superblock.capacity_bytes)


def rebuild(
    volume: Volume, index: Index, progress: Progress | None = None, unopened: set[int] | None = None
) -> int:
    """Fill an empty index from the drive; return the highest generation found, 0 if there is none.

    StorageError if there are records whose keys are damaged, unless their offsets are to be added to `unopened`, or the
    drive has forgotten its keyring: then they were given up.
    """
    generation_max = 0
    are_given_up = volume.superblock.keyring is None
    lost = set() if unopened is None or are_given_up else unopened
    sessions = _Sessions(volume, index)
    blocks, batch = _Blocks(volume, index), list[tuple["Name", Entry]]()
    with closing(scan(volume, progress, lost)) as records:
        for offset, header, is_allowed in records:
            generation_max = max(generation_max, header.generation)
            if not is_allowed:
                continue
            if header.kind != Kind.BLOCK:
                sessions.add(offset, header)
                continue
            entry = _entry_of(offset, header)
            batch.append(((header.tenant, header.key), entry))
            if len(batch) == SCAN_BATCH_RECORDS:
                blocks.publish(batch)
                batch.clear()
    if lost and unopened is None and not are_given_up:
        raise StorageError(
            f"{len(lost)} records need keys whose slots in the keyring are damaged, and a new index would lose them:"
            " restore the keyring, or give them up (`kvstore keys accept-keyring`)"
        )
    blocks.publish(batch)
    blocks.settle_moved()
    sessions.publish()
    return generation_max


class _Blocks:
    """The blocks that a scan finds: of each name the newest is published."""

    def __init__(self, volume: Volume, index: Index) -> None:
        self._volume = volume
        self._index = index
        # Blocks in the clear of which another record, encrypted or not, was found: being encrypted, or erased.
        self._older: dict[Name, list[Entry]] = {}

    def publish(self, entries: Sequence[tuple[Name, Entry]]) -> None:
        """Make a batch visible except where the name has a higher generation already."""
        newest: dict[Name, Entry] = {}
        known = self._index.lookup([name for name, _ in entries])
        for (name, entry), before in zip(entries, known, strict=True):
            rival = newest.get(name, before)
            is_newest = rival is None or rival.generation < entry.generation
            if is_newest:
                newest[name] = entry
            older = rival if is_newest else entry
            if older is not None and not older.domain:
                self._older.setdefault(name, []).append(older)
        self._index.publish(newest.items())

    def settle_moved(self) -> None:
        """Of blocks that were being encrypted, keep whole copies, and note the others in the clear for overwriting.

        A power failure may have kept the header of a new copy but not its payload; then the old one is untouched. An
        erasure would not find a second copy.
        """
        back: list[tuple[Name, Entry]] = []
        left: list[Entry] = []
        for (name, older), newest in zip(
            self._older.items(), self._index.lookup(list(self._older)), strict=True
        ):
            older.sort(key=lambda one: one.generation)
            if newest is not None and newest.domain and not self._is_whole(newest):
                back.append((name, older.pop()))
            left += older
        self._index.publish(back, left=left)

    def _is_whole(self, entry: Entry) -> bool:
        with suppress(StorageError):
            record = self._volume.disk.read_at(entry.offset, record_bytes(entry.length))
            header, payload = open_copy(self._volume.codec, record, entry.offset)
            return isinstance(header, Header) and crc32c(payload) == entry.crc32c
        return False


def _entry_of(offset: int, header: Header) -> Entry:
    return Entry(
        offset,
        header.length,
        header.crc32c,
        header.generation,
        header.expires_ms,
        header.fingerprint,
        header.domain,
    )


def open_copy(codec: HeaderCodec, record: bytes, offset: int) -> tuple[Header | Flaw, bytes]:
    """Open a record that was read; return its header and its payload, in the clear."""
    memory = ctypes.create_string_buffer(record, len(record))
    header = codec.open_record(ctypes.addressof(memory), len(record), offset)
    if isinstance(header, Flaw):
        return header, b""
    return header, memory.raw[HEADER_BYTES : HEADER_BYTES + header.length]


def extents_around(
    index: Index, superblock: Superblock, lives: NDArray[Any] | None = None
) -> tuple[NDArray[np.int64], Extents]:
    """Return the header pages of an index and the free extents between its records; Corrupt if it is inconsistent."""
    live = index.extents(lives)
    first = records_begin(superblock.capacity_bytes)
    extents = Extents.around(live, first // PAGE_BYTES, superblock.capacity_bytes // PAGE_BYTES)
    return live[:, 0], extents


def add_lent(volume: Volume, index: Index, lent: Sequence[LentNote]) -> None:
    """Add blocks to a trusted index that a lane had written and acknowledged when the process died.

    All of them are on ground that was noted; deleted ones have no header any more. They may include a block that was
    not acknowledged yet.
    """
    if index.was_clean:
        return
    codec, superblock = volume.codec, volume.superblock
    found: list[tuple[Name, Entry]] = []
    for note in lent:
        if (note.drive_uuid, note.epoch) != (superblock.drive_uuid, superblock.epoch):
            continue
        page, until = note.page, note.page + note.pages
        data = volume.disk.read_at(page * PAGE_BYTES, note.pages * PAGE_BYTES)
        while page < until:
            offset = page * PAGE_BYTES
            header = codec.parse(data, (page - note.page) * PAGE_BYTES, offset)
            if header is Flaw.KEY_DAMAGED:
                raise Corrupt(
                    "a record that it doesn't have needs a key whose slot in the keyring is damaged"
                )
            is_its = (
                isinstance(header, Header)
                and header.kind == Kind.BLOCK
                and 0 <= header.generation - note.generation < note.records
            )
            if not is_its or not isinstance(header, Header):
                page += 1
                continue
            entry = _entry_of(offset, header)
            found.append(((header.tenant, header.key), entry))
            page += record_bytes(header.length) // PAGE_BYTES
    known = index.lookup([name for name, _ in found])
    new = [
        (name, entry)
        for (name, entry), there in zip(found, known, strict=True)
        if there is None or there.generation < entry.generation
    ]
    if new:
        _Blocks(volume, index).publish(sorted(new, key=lambda one: one[1].generation))


def check_manifests(volume: Volume, index: Index, synced_generation: int) -> None:
    """Read each record of a session or a chunk that is not known to be synced; Corrupt if one is not whole.

    Their payloads are in the index, so damage would go unnoticed until the index is gone.
    """
    manifests = Manifests(index)
    places = [stored.place for _, stored in manifests.all()]
    places += [place for _, _, place, _ in manifests.all_chunks()]
    for place in places:
        if place.generation > synced_generation:
            try:
                record = volume.disk.read_at(place.offset, record_bytes(place.length))
            except StorageError as error:
                raise Corrupt("A session's record cannot be read.") from error
            header, payload = open_copy(volume.codec, record, place.offset)
            if header in (Flaw.NO_KEY, Flaw.KEY_DAMAGED):
                continue  # its user was erased, which the index doesn't know yet; or it is unknown
            is_its = isinstance(header, Header) and header.generation == place.generation
            if not is_its or crc32c(payload) != place.crc32c:
                raise Corrupt("A session's record is incomplete.")


class _Sessions:
    """The sessions and chunks that a scan finds. Their payloads are read: they are small, and the index needs them."""

    def __init__(self, volume: Volume, index: Index) -> None:
        self._volume = volume
        self._index = index
        self._manifests = Manifests(index, volume.keys)
        self._clear: set[int] = set()  # where records are in the clear
        self._heads: dict[tuple[bytes, bytes], list[tuple[int, Place]]] = {}
        self._chunks: dict[tuple[bytes, bytes], list[Place]] = {}

    def add(self, offset: int, header: Header) -> None:
        """Remember the place of one."""
        place = Place(offset, header.length, header.crc32c, header.generation)
        name = (header.tenant, header.key)
        if not header.domain:
            self._clear.add(offset)
        if header.kind == Kind.SESSION:
            self._heads.setdefault(name, []).append((header.generation, place))
        elif header.kind == Kind.CHUNK:
            self._chunks.setdefault(name, []).append(place)

    def publish(self) -> None:
        """Put the newest whole manifest of each session into the index."""
        for (tenant, key), found in self._heads.items():
            for _, place in sorted(found, reverse=True):
                if self._publish_one(tenant, key, place):
                    break
        self._note_left()

    def _note_left(self) -> None:
        """Note for overwriting records in the clear that no session has: an erasure would not find them.

        An erasure interrupted by power loss leaves such records, and so does any change of a session.
        """
        known = {stored.place.offset for _, stored in self._manifests.all()}
        known.update(place.offset for _, _, place, _ in self._manifests.all_chunks())
        found = [place for heads in self._heads.values() for _, place in heads]
        found += [place for chunks in self._chunks.values() for place in chunks]
        left = [place for place in found if place.offset in self._clear and place.offset not in known]
        self._index.publish((), left=left)

    def _publish_one(self, tenant: bytes, key: bytes, place: Place) -> bool:
        payload = self._payload(place)
        manifest = None if payload is None else parse_manifest(payload)
        if manifest is None or session_key(manifest.user, manifest.session) != key:
            return False
        written = {}
        for chunk in manifest.chunks:
            found = self._chunk(tenant, chunk, manifest.user)
            if found is None:
                return False
            written[chunk] = found
        name = SessionName(tenant, manifest.user, manifest.session)
        is_clear = place.offset in self._clear
        self._manifests.replace(name, Stored(place, manifest), written, is_clear=is_clear)
        return True

    def _chunk(self, tenant: bytes, chunk: bytes, user: bytes) -> tuple[Place, bytes] | None:
        for place in sorted(self._chunks.get((tenant, chunk), ()), key=lambda place: -place.generation):
            payload = self._payload(place)
            if payload is None or len(payload) != CHUNK_PAYLOAD_BYTES:
                continue
            if chunk in {chunk_key(payload, user), chunk_key(payload)}:
                return place, payload
        return None

    def _payload(self, place: Place) -> bytes | None:
        with suppress(StorageError):
            record = self._volume.disk.read_at(place.offset, record_bytes(place.length))
            header, payload = open_copy(self._volume.codec, record, place.offset)
            if isinstance(header, Header) and crc32c(payload) == place.crc32c:
                return payload
        return None


class _Walk:
    """A window onto the drive at the position: large while there is little to jump over, one page otherwise."""

    def __init__(self, ahead: Ahead, volume: Volume, roll: Roll, unopened: set[int]) -> None:
        self._unopened = unopened
        self._ahead = ahead
        self._roll = roll
        self._capacity_bytes = volume.superblock.capacity_bytes
        self._codec = volume.codec
        self._window = b""
        self._window_at = 0
        self._window_bytes = SCAN_WINDOW_BYTES
        self._unreadable_pages = 0

    def step(self, position: int, end: int) -> tuple[Found | None, int]:
        """Examine one place; return what is there and the next place to examine."""
        try:
            at = self._show(position, end)
        except StorageError:
            return None, self._past_unreadable(position)
        header = self._codec.parse(self._window, at, position)
        if isinstance(header, Flaw):
            if header is Flaw.KEY_DAMAGED:
                (generation,) = _GENERATION.unpack_from(self._window, at + _GENERATION_AT)
                if self._roll.allows(position, generation):
                    self._unopened.add(position)
            self._window_bytes = SCAN_WINDOW_BYTES
            return None, self._next_magic(at)
        size = record_bytes(header.length)
        if position + size > self._capacity_bytes:
            return None, self._next_magic(at)
        if not self._roll.allows(position, header.generation):
            # It may overlap live records: a crash may have brought an older record back, inside which this one began
            # and from which it extends into the next. So it is not jumped over.
            self._window_bytes = SCAN_WINDOW_BYTES
            return Found(position, header, is_allowed=False), self._next_magic(at)
        self._window_bytes = PAGE_BYTES if size > SCAN_SKIPPED_BYTES else SCAN_WINDOW_BYTES
        return Found(position, header, is_allowed=True), position + size

    def _show(self, position: int, end: int) -> int:
        at = position - self._window_at
        if not 0 <= at < len(self._window):
            length = min(self._window_bytes, min(end, self._capacity_bytes) - position)
            self._window = self._ahead.read(position, length)
            self._window_at = position
            at = 0
        return at

    def _past_unreadable(self, position: int) -> int:
        """Find the unreadable page of the window, and step over it, as long as there are few."""
        if self._window_bytes > PAGE_BYTES:
            self._window_bytes = PAGE_BYTES
            return position
        self._unreadable_pages += 1
        if self._unreadable_pages > SCAN_UNREADABLE_PAGES_MAX:
            raise StorageError(f"The drive cannot be read: {self._unreadable_pages} pages of it gave errors.")
        return position + PAGE_BYTES

    def _next_magic(self, at: int) -> int:
        """Return the next page of the window that begins like a header, or the window's end."""
        return self._window_at + min(self._next_page_with(magic, at) for magic in self._codec.magics)

    def _next_page_with(self, magic: bytes, at: int) -> int:
        found = self._window.find(magic, at + 1)
        while found >= 0 and found % PAGE_BYTES:
            found = self._window.find(magic, found + 1)
        return found if found >= 0 else len(self._window)
