"""Puts: one write for each name, then publish and report.

Always holds:

- A put is reported only when its record is complete on the drive, in the index, and, if requested, synced
  (`kvstore.storage.writes` keeps the order of all records).
- A name is written once: later puts of it with the same bytes get the result of the first, or of the stored block;
  those with other bytes fail, and change nothing.
- The longest time to live that any of them requests applies, and is on the drive before that put is reported
  (`kvstore.storage.renewals`).
- A stored block completes no put while it is doubted (`kvstore.storage.doubts`), or if its key was destroyed: it is
  read and checked first. If it is whole, the put completes with it; if not, it is removed, and the put is written, or
  handed to another drive that has a block of the name.
- A replaced record is wiped before its extent is free.
- A put of a tenant at its quota waits before it is queued (`kvstore.storage.quotas`).

It doesn't check payloads of puts: it trusts the caller's `crc32c`.
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, cast

from kvstore.config import show_size
from kvstore.durability import Durability
from kvstore.errors import Expired, InvalidArgument, KeyTaken, KvError, NotEncrypted, ReadOnly, StorageError
from kvstore.limits import (
    BLOCK_BYTES_MAX,
    BLOCK_BYTES_MIN,
    FINGERPRINT_BYTES,
    KEY_BYTES,
    PAGE_BYTES,
    TENANT_BYTES,
)
from kvstore.storage.completion_queue import CompletionQueue
from kvstore.storage.eviction.types import Guard, Reason
from kvstore.storage.index import Entry
from kvstore.storage.index_layout import rows_of_entries
from kvstore.storage.items import PutDone, PutItem, PutsDone
from kvstore.storage.quotas import Charged
from kvstore.storage.record_checks import Finding
from kvstore.storage.renewals import Renewal, lives_as_long
from kvstore.storage.sealing import NO_DOMAIN, domain_number
from kvstore.wire.record import Header, Kind, record_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.storage.eviction_events import Keeping
    from kvstore.storage.index import Index, Name
    from kvstore.storage.quotas import QuotaQueue
    from kvstore.storage.record_checks import Checks
    from kvstore.storage.renewals import Renewals
    from kvstore.storage.writes import RecordWrite, Writes
    from nic_offload.vault import KeyName

    LaneEnd = tuple[int, int, int, int, KeyName | None]
    """Tag, generation, offset, result and key of a block that a lane wrote."""
    Doubtful = Callable[[Iterable[Entry | None]], Collection[int]]
    TakesPuts = Callable[[Sequence[tuple[PutItem, PutsDone]]], None]

__all__ = ["Puts"]

_NAME_SIZES: Final = (TENANT_BYTES, KEY_BYTES, FINGERPRINT_BYTES)


class Puts:
    """All puts that have not been reported yet."""

    def __init__(
        self,
        writes: Writes,
        index: Index,
        keeping: Keeping,
        queue: QuotaQueue,
        renewals: Renewals,
        clock: Clock,
        *,
        checks: Checks,
        doubtful: Doubtful,
        elsewhere: Callable[[Name], TakesPuts | None],
    ) -> None:
        self._elsewhere = elsewhere
        self._checks = checks
        self._doubtful = doubtful
        self._queue = queue
        self._renewals = renewals
        self._writes = writes
        self._index = index
        self._keeping = keeping
        self._clock = clock
        self._by_name: dict[Name, _Write | Renewal] = {}  # accepted and not published
        self._on_lane: dict[int, _Write] = {}  # those that a lane writes, by tag
        self.rewriting = 0  # blocks being rewritten
        self.completions: CompletionQueue[PutDone] = CompletionQueue()

    def accept(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Accept puts; each is reported through the completions, later or at once."""
        self.completions.promised += len(items)
        try:
            stored = self._index.lookup([item[:2] for item in items])
        except StorageError as error:
            for item in items:
                self._report(item, done, error)
            return
        doubtful = self._doubtful(stored)
        now_ms = self._clock.wall_ms()
        for item, entry in zip(items, stored, strict=True):
            refusal = _refusal(item, now_ms, encrypts=self._writes.encrypts)
            if refusal is not None:
                self._report(item, done, refusal)
            elif (first := self._by_name.get(item[:2])) is not None:  # tenant and key
                first.followers.append((item, done))
            elif entry is None or 0 < entry.expires_ms <= now_ms:
                self._write(item, done, entry)
            elif entry.generation in doubtful:
                self._check(item, done, entry)
            else:
                self._keeping.used([entry.generation])
                self._settle(item, done, entry)

    def under_way(self, items: Sequence[PutItem], done: PutsDone) -> None:
        """Note blocks that a lane writes; `written` ends each, and it is then reported like any other."""
        self.completions.promised += len(items)
        for item in items:
            write = _Write(self._writes, self, item, done, replaces=None)
            self._queue.quotas.charge(write)
            assert write.name not in self._by_name, "a lane has no block whose name is being put"
            self._by_name[write.name] = self._on_lane[item.tag] = write

    def written(self, rows: Iterable[LaneEnd]) -> None:
        """Note blocks that a lane has ended, in the order of generations.

        Each has the key that it was encrypted with: its domain may have another by now, or none.
        """

        def ended() -> Iterator[tuple[RecordWrite, int, int, int]]:
            for tag, generation, offset, result, key in rows:
                write = self._on_lane.pop(tag)
                write.key_name = key
                yield write, generation, offset, result

        self._writes.ground.note_ended(ended())

    def publish_lane(self, rows: NDArray[Any]) -> StorageError | None:
        """Publish blocks that a lane has written and that nobody knew before, given as `BLOCK_ROW`s.

        They are in the order of generations, and nothing waits for their ends. Return why none was published.
        """

        def publish() -> None:
            self._index.publish_rows(rows)
            self._keeping.published_rows(rows)

        return self._writes.publish_lane(rows["generation"].tolist(), publish)

    def lane_is_lost(self) -> None:
        """Give up on the lane's pending blocks, if any: they may be on the drive or not."""
        if not self._on_lane:
            return
        error = ReadOnly("The fabric's thread hangs, and its writes are unknown.")
        lost, self._on_lane = self._on_lane, {}
        self._writes.lane_is_lost(error)
        for write in lost.values():
            self._queue.quotas.leave(write)
            self._ended(write, list(write.items()), None, error)

    def _write(self, item: PutItem, done: PutsDone, replaces: Entry | None) -> None:
        write = _Write(self._writes, self, item, done, replaces=replaces)
        self._by_name[write.name] = write
        self._queue_unless_refused(write)

    def _queue_unless_refused(self, write: _Write) -> None:
        refusal = self._keeping.refusal(write.size_bytes // PAGE_BYTES)
        if refusal is None:
            self._queue.add(write)
        else:
            self._ended(write, list(write.items()), None, refusal)

    def _check(self, item: PutItem, done: PutsDone, entry: Entry) -> None:
        """Complete a put whose block is stored and whole; write it otherwise."""
        write = _Write(self._writes, self, item, done, replaces=None)
        self._by_name[write.name] = write
        self._checks.check(write.name, entry, lambda finding: self._checked(write, entry, finding))

    def _checked(self, write: _Write, entry: Entry, finding: Finding) -> None:
        name, generation = write.name, entry.generation
        wipe = finding is not Finding.FOREIGN
        if finding is Finding.UNREADABLE:
            self._keeping.unreadable(name, generation, wipe=wipe)
        elif finding is Finding.ERASED:
            with suppress(StorageError):  # a read-only drive keeps it in its index
                self._keeping.drop([name], Reason.ERASED, spared=[entry.domain])
        elif finding is not Finding.WHOLE:
            self._keeping.quarantine(name, generation, wipe=wipe)
        try:
            now = self._index.lookup([name])[0]  # it may have been removed meanwhile
        except StorageError as error:
            self._ended(write, list(write.items()), None, error)
            return
        if now is None or self._is_over(now):
            other = None if finding is Finding.WHOLE else self._elsewhere(name)
            if other is not None and not write.afterwards:
                self._hand_over(write, other)
                return
            write.replaces = now
            self._queue_unless_refused(write)
        elif finding is Finding.WHOLE:
            self._keeping.believe([generation])
            self._keeping.used([generation])
            self._ended(write, list(write.items()), now, None)
        else:  # it could not be quarantined: the drive has stopped, or its index has
            self._ended(write, list(write.items()), None, self._writes.stopped_again())

    def _hand_over(self, write: _Write, other: TakesPuts) -> None:
        """Pass the put to another drive that has a block of this name: it may have been acknowledged there."""
        items = list(write.items())
        del self._by_name[write.name]
        self.completions.promised -= len(items)
        other(items)

    def rewrite(self, name: Name, entry: Entry, address: int, over: Callable[[KvError | None], None]) -> bool:
        """Rewrite the block at this address, to replace its entry; False if the entry has changed.

        `over` is called when it was written, or has failed. It counts towards no quota. It is under way until its old
        place is overwritten.
        """
        if name in self._by_name or self._index.lookup([name])[0] != entry:
            return False
        item = PutItem(
            *name,
            entry.fingerprint,
            entry.length,
            entry.crc32c,
            address,
            entry.expires_ms,
            Durability.WRITTEN,
            0,
        )
        self._by_name[name] = write = _Rewrite(self._writes, self, item, _nobody, replaces=entry)
        write.over = over
        self.rewriting += 1
        self._writes.add(write)
        return True

    def _publish_rewrite(self, write: _Rewrite) -> None:
        """Put its new place into the index, unless the block has gone meanwhile."""
        old = write.replaces
        assert old is not None
        write.has_moved = self._index.lookup([write.name])[0] == old
        if write.has_moved:
            self._index.publish([(write.name, write.entry())], left=[old])
            self._keeping.moved(write.name, old, write.entry())

    def _finish_rewrite(self, write: _Rewrite, error: KvError | None) -> None:
        if error is None and write.has_moved:
            self._writes.after_sync(lambda error: self._leave(write, error))
        else:
            if error is None:
                self._keeping.void(write.entry())
            self._end_rewrite(write)
        write.over(error)

    def _leave(self, write: _Rewrite, error: StorageError | None) -> None:
        """Overwrite the old place: an erasure of the block would no longer find it."""
        assert write.replaces is not None
        if error is None:
            self._keeping.left.overwrite(write.replaces, lambda: self._end_rewrite(write))
        else:
            self._end_rewrite(write)

    def _end_rewrite(self, write: _Rewrite) -> None:
        """Continue what waited for it: later puts of its name, and deletions."""
        del self._by_name[write.name]
        self.completions.promised -= len(write.followers)
        for item, done in write.followers:
            self.accept([item], done)
        if write.afterwards:
            self._afterwards(write)
        self.rewriting -= 1

    @property
    def are_under_way(self) -> bool:
        """Return whether any put was accepted and is not in the index yet."""
        return bool(self._by_name)

    def is_under_way(self, name: Name) -> bool:
        """Return whether a put of this name was accepted and is not in the index yet."""
        return name in self._by_name

    def of_domain(self, tenant: bytes, domain: bytes | None) -> list[Name]:
        """Return the names of a tenant, or of one of its domains, that are being put."""
        return [
            name
            for name, work in self._by_name.items()
            if name[0] == tenant
            and (domain is None or any(item.domain == domain for item, _ in work.items()))
        ]

    def after(self, name: Name, then: Callable[[], None]) -> bool:
        """Call back when the pending put of this name has completed, if there is one."""
        write = self._by_name.get(name)
        if write is not None:
            write.afterwards.append(then)
        return write is not None

    def publish(self, records: Sequence[RecordWrite]) -> None:
        """Put blocks into the index; wipe and free what they replace."""
        writes = cast("Sequence[_Write]", [one for one in records if not isinstance(one, _Rewrite)])
        for record in records:
            if isinstance(record, _Rewrite):
                self._publish_rewrite(record)
        replacing = [write for write in writes if write.replaces is not None]
        before = self._index.lookup([write.name for write in replacing]) if replacing else ()
        rows = rows_of_entries((write.name, write.entry()) for write in writes)
        self._index.publish_rows(rows)
        # One may be gone, if it was deleted or quarantined meanwhile; its extent has then been handled.
        pairs = zip(replacing, before, strict=True)
        replaced = [(write.name, old) for write, old in pairs if old is not None and old == write.replaces]
        if replaced:
            self._keeping.free(rows_of_entries(replaced), Reason.SUPERSEDED)
        self._keeping.published_rows(rows)

    def finish(self, records: Sequence[RecordWrite], error: KvError | None) -> None:
        """Report blocks and the later puts of their names."""
        done: dict[PutsDone, list[PutDone]] = {}
        for record in records:
            assert isinstance(record, _Write)
            if isinstance(record, _Rewrite):
                self._finish_rewrite(record, error)
                continue
            if record.charged_pages:
                self._queue.quotas.leave(record)
            item = record.item
            if error is not None or item.durability is Durability.SYNCED:
                self._ended(record, list(record.items()), record.entry(), error)
                continue
            durability = max(item.durability, Durability.WRITTEN)
            done.setdefault(record.done, []).append(PutDone(item.tag, None, durability, record.generation))
            if record.followers or record.afterwards:
                self._ended(record, record.followers, record.entry(), None)
            else:  # the usual case
                del self._by_name[record.name]
        for callback, results in done.items():
            self.completions.add_all(callback, results)

    def settle_renewed(self) -> None:
        """Report the puts that waited for a later expiry; if the block has gone meanwhile, put it."""
        for renewal, is_there in self._renewals.settle_finished():
            if is_there or renewal.error is not None:
                self._ended(renewal, renewal.followers, renewal.entry, renewal.error)
                continue
            del self._by_name[renewal.name]
            for item, done in renewal.followers:
                under_way = self._by_name.get(renewal.name)
                if under_way is None:
                    self._write(item, done, None)
                else:
                    under_way.followers.append((item, done))
            if renewal.afterwards:
                self._afterwards(renewal)

    def _ended(
        self,
        work: _Write | Renewal,
        items: Sequence[tuple[PutItem, PutsDone]],
        entry: Entry | None,
        error: KvError | None,
    ) -> None:
        """Report puts of one name, except those that want it to live longer still. There is an entry or an error."""
        del self._by_name[work.name]
        for item, done in items:
            if error is None and entry is not None:
                self._settle(item, done, entry)
            else:
                self._report(item, done, error)
        if work.afterwards:
            self._afterwards(work)

    def _afterwards(self, work: _Write | Renewal) -> None:
        """Run what waited for the puts of a name, once the last of them has completed."""
        more = self._by_name.get(work.name)
        if more is not None:
            more.afterwards += work.afterwards
            return
        for then in work.afterwards:
            then()

    def _settle(self, item: PutItem, done: PutsDone, entry: Entry) -> None:
        """Report a put whose block is stored already, as soon as that is as durable as requested."""
        if (entry.length, entry.fingerprint) != (item.length, item.fingerprint):
            self._report(item, done, KeyTaken.of(item.key, "another length or layout"))
        elif entry.crc32c != item.crc32c:
            self._report(item, done, KeyTaken.of(item.key))
        elif not lives_as_long(entry.expires_ms, item.expires_ms):
            self._renew(item, done, entry)
        elif item.durability is Durability.SYNCED and not self.has_synced(entry.generation):
            self._report_when_synced(item, done, entry.generation)
        else:
            self._report(item, done, None)

    def has_synced(self, generation: int) -> bool:
        """Return whether a stored block, with its current expiry, would survive power loss now."""
        return generation <= self._writes.synced_generation and not self._renewals.is_unsynced(generation)

    def _renew(self, item: PutItem, done: PutsDone, entry: Entry) -> None:
        name = (item.tenant, item.key)
        under_way = self._by_name.get(name)
        if under_way is not None:  # for one that was put together with this one
            under_way.followers.append((item, done))
        elif self._writes.stopped is not None:
            self._report(item, done, self._writes.stopped_again())
        else:
            renewal = Renewal(self._renewals, name, entry, item, [(item, done)])
            self._by_name[name] = renewal
            self._renewals.add(renewal)

    def _report_when_synced(self, item: PutItem, done: PutsDone, generation: int) -> None:
        self._keeping.guard([generation], Guard.WRITE)

        def synced(error: StorageError | None) -> None:
            self._keeping.unguard([generation], Guard.WRITE)
            self._report(item, done, error)

        self._writes.after_sync(synced)

    def _report(self, item: PutItem, done: PutsDone, error: KvError | None) -> None:
        self.completions.add(done, PutDone(item.tag, error, max(item.durability, Durability.WRITTEN)))

    def _is_over(self, entry: Entry) -> bool:
        return entry.expires_ms != 0 and entry.expires_ms <= self._clock.wall_ms()


class _Write(Charged):
    """One block on its way to the drive, and the later puts of its name."""

    __slots__ = ("afterwards", "done", "expires_ms", "followers", "item", "name", "replaces")

    def __init__(
        self, writes: Writes, puts: Puts, item: PutItem, done: PutsDone, replaces: Entry | None
    ) -> None:
        super().__init__(writes, puts, item.slot_address, record_bytes(item.length), item.tenant, item.domain)
        self.item = item
        self.name = item[:2]  # tenant and key
        self.done = done
        self.expires_ms = item.expires_ms
        self.replaces = replaces
        self.followers: list[tuple[PutItem, PutsDone]] = []
        self.afterwards: list[Callable[[], None]] = []

    def items(self) -> Iterator[tuple[PutItem, PutsDone]]:
        yield self.item, self.done
        yield from self.followers

    def entry(self) -> Entry:
        item = self.item
        return Entry(
            self.offset,
            item.length,
            item.crc32c,
            self.generation,
            self.expires_ms,
            item.fingerprint,
            domain_number(self.key_name),
        )

    def header(self) -> Header:
        item = self.item
        for other, _ in self.followers:  # those so far: the longest life costs no write of its own
            alike = other[2:5] == item[2:5]  # fingerprint, length and CRC
            if alike and not lives_as_long(self.expires_ms, other.expires_ms):
                self.expires_ms = other.expires_ms
        return Header(
            Kind.BLOCK,
            item.key,
            item.tenant,
            item.fingerprint,
            self.generation,
            item.length,
            item.crc32c,
            self.expires_ms,
        )


class _Rewrite(_Write):
    """A block that is stored, on its way to another place."""

    waits_for_room = False

    __slots__ = ("has_moved", "over")

    def __init__(
        self, writes: Writes, puts: Puts, item: PutItem, done: PutsDone, replaces: Entry | None
    ) -> None:
        super().__init__(writes, puts, item, done, replaces)
        self.has_moved = False
        self.over: Callable[[KvError | None], None] = _nothing

    def header(self) -> Header:
        self.followers, followers = [], self.followers  # their requests are handled afterwards
        try:
            return super().header()
        finally:
            self.followers = followers


def _nobody(_: Sequence[PutDone]) -> None:
    """Ignore the end of a put that no client made."""


def _nothing(_: KvError | None) -> None:
    """Ignore a result."""


def _refusal(item: PutItem, now_ms: int, *, encrypts: bool) -> KvError | None:
    assert item.slot_address % PAGE_BYTES == 0
    if 0 < item.expires_ms <= now_ms:
        return Expired("The block's time to live ended before it was put.")
    if not BLOCK_BYTES_MIN <= item.length <= BLOCK_BYTES_MAX:
        return InvalidArgument(
            f"A block has 1 byte to {show_size(BLOCK_BYTES_MAX)}, not {item.length} bytes."
        )
    sizes = (len(item.tenant), len(item.key), len(item.fingerprint))
    if sizes != _NAME_SIZES:
        return InvalidArgument(f"A tenant, a key or a fingerprint has the wrong size: {sizes}.")
    if item.domain != NO_DOMAIN and not encrypts:
        return NotEncrypted()
    return None
