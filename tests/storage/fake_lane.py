"""A lane over a fake drive: it acts like `nic_offload/lane.c`, at moments chosen by a seed."""

from __future__ import annotations

import ctypes
import mmap
import random
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvstore.durability import Durability
from kvstore.limits import GENERATION_MAX, PAGE_BYTES
from kvstore.storage.disk import DiskDone, DiskOp, DiskOpKind
from kvstore.storage.index import Entry
from kvstore.storage.index_layout import rows_of_entries
from kvstore.storage.items import PutDone
from kvstore.storage.sealing import domain_number
from kvstore.wire.record import Header, Kind, record_bytes
from nic_offload.lane import NO_GROUND, Ground, LaneState

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.storage.drive import Drive
    from kvstore.storage.items import PutItem, PutsDone
    from kvstore.storage.store import Store
    from nic_offload.vault import KeyName
    from tests.storage.fakes import FakeDisk

__all__ = ["FakeLane"]

_TAGS_BEGIN = 1 << 40  # of its own operations


@dataclass
class Record:
    item: PutItem
    done: PutsDone
    generation: int
    offset: int
    is_heard: bool = False  # the store knows of it
    result: int | None = None
    memory: mmap.mmap | None = None  # where it is encrypted,
    address: int = 0  # and where that is,
    key: KeyName | None = None  # and with what


class FakeLane:
    """The lane of one drive. Its peers get `written`, in `told`, before the store learns of the record."""

    def __init__(self, store: Store, drive: Drive, disk: FakeDisk, seed: int) -> None:
        self.told: dict[int, PutDone] = {}  # what peers have heard, by tag
        self.failed = False
        self.refused: set[int] = set()  # that no peer heard of
        self._store, self.drive = store, drive
        self._disk = disk
        self.dice = random.Random(seed)
        self.ground = self.next = self._before = NO_GROUND.next
        self.expects = False
        self.wanted_pages = 0  # by a block that waits for ground; a test sets it
        self._used = self._used_before = 0
        self._is_heard = True  # the store knows what was left of the ground before
        self._clear_until = 0
        self.records: deque[Record] = deque()
        self._by_tag: dict[int, Record] = {}
        self._ended: list[Record] = []  # and not in the store yet
        self._next_tag = _TAGS_BEGIN
        self._reap = disk.reap
        disk.reap = self._reap_others  # type: ignore[method-assign]
        drive.use_lane(self)

    # --- what the store asks of it

    @property
    def pages(self) -> int:
        """The pages that the store doesn't own, as far as it knows."""
        return self.ground.pages + self.next.pages + (0 if self._is_heard else self._before.pages)

    def state(self) -> LaneState:
        self._is_heard = True
        return LaneState(
            self.ground, self.next, self._before, self._used, self._used_before, self.wanted_pages
        )

    def lend(self, ground: Ground) -> LaneState | None:
        if self.failed:
            return None
        state, self.next = self.state(), ground
        return state

    def seal(self) -> LaneState:
        state = self.state()
        self.ground = self.next = self._before = NO_GROUND.next
        self._used = self._used_before = 0
        return state

    def _take(self, pages: int) -> bool:
        """Whether the current ground, or the next one, has room."""
        if not self.ground.records or self.ground.pages < pages:
            if not self.next.records or self.next.pages < pages:
                return False
            self._before, self._used_before, self._is_heard = self.ground, self._used, False
            self.ground, self.next, self._used = self.next, NO_GROUND.next, 0
        page, generation, left, records = self.ground
        self.ground = Ground(page + pages, generation + 1, left - pages, records - 1)
        self._used += 1
        return True

    def expect(self, *, ground: bool) -> None:
        self.expects = ground

    def clear(self, generation: int) -> None:
        self._clear_until = generation

    def fail(self) -> None:
        self.failed = True
        self._clear_until = GENERATION_MAX

    # --- what peers and time do

    def takes(self, item: PutItem, done: PutsDone) -> bool:
        """Whether it writes a landed block."""
        size = record_bytes(item.length)
        name = item[:2]
        if self._store.drives[self._store._placement.order(*name)[0]] is not self.drive:
            return False
        known = self._store.lookup([name])[0] is not None or self._store.is_putting(name)
        known = known or any(one.item[:2] == name for one in self.unheard)
        if known or item.expires_ms or item.durability > Durability.WRITTEN or self.failed:
            return False
        keys, codec = self.drive._volume.keys, self.drive._volume.codec
        key_name = None if keys is None else keys.name_of(item.tenant, item.domain)
        if keys is not None and key_name is None:
            return False
        pages = size // PAGE_BYTES
        if not self._take(pages):
            return False
        record = Record(item, done, self.ground.generation - 1, (self.ground.page - pages) * PAGE_BYTES)
        header = Header(
            Kind.BLOCK,
            item.key,
            item.tenant,
            item.fingerprint,
            record.generation,
            item.length,
            item.crc32c,
            0,
        )
        if key_name is None:
            codec.pack([(item.slot_address, size, record.offset, header)])
        else:
            record.memory = mmap.mmap(-1, size)
            record.address = ctypes.addressof(ctypes.c_char.from_buffer(record.memory))
            codec.encrypt([(item.slot_address, record.address, size, record.offset, key_name, header)])
        record.key = key_name
        self.records.append(record)
        self._by_tag[self._next_tag] = record
        address = record.address or item.slot_address
        op = DiskOp(DiskOpKind.WRITE, address, size, record.offset, self._next_tag)
        self._next_tag += 1
        self._disk.in_flight.append(op)
        return True

    def step(self) -> None:
        """End some writes, and report some."""
        if self.dice.random() < 0.7:
            self._end_some()
        while self.records and self.records[0].result is not None and self.dice.random() < 0.8:
            if self.records[0].generation >= self._clear_until:
                break
            self._acknowledge(self.records.popleft())

    @property
    def unheard(self) -> list[Record]:
        """The records that the store doesn't know yet."""
        return [one for one in (*self._ended, *self.records) if not one.is_heard]

    def report_begun(self) -> None:
        """Report the blocks under way to the store."""
        self._report_begun(self.records)

    def _report_begun(self, records: Iterable[Record]) -> None:
        for one in records:
            if not one.is_heard:
                one.is_heard = True
                self.drive.puts.under_way([one.item], one.done)

    def catch_up(self) -> None:
        """Report completed blocks to the store: together, if all succeeded and none is known to it."""
        ended, self._ended = self._ended, []
        if not ended:
            return
        if any(one.is_heard or (one.result or 0) < 0 for one in ended) or not self.drive.takes_puts:
            self._report_begun(ended)
            self.drive.written(
                [
                    (one.item.tag, one.generation, one.offset, min(one.result or 0, 0), one.key)
                    for one in ended
                ]
            )
            return
        entries = [
            (
                one.item[:2],
                Entry(
                    one.offset,
                    one.item.length,
                    one.item.crc32c,
                    one.generation,
                    0,
                    one.item.fingerprint,
                    domain_number(one.key),
                ),
            )
            for one in ended
        ]
        error = self.drive.puts.publish_lane(rows_of_entries(entries))
        for one in ended:
            generation = 0 if error else one.generation
            one.done([PutDone(one.item.tag, error, Durability.WRITTEN, generation)])

    def drain(self) -> None:
        """Finish all writes, as a node does before it closes the store."""
        for _ in range(10_000):
            if not self.records and not self._ended:
                return
            self.step()
            self.catch_up()
            self._store.poll()
        raise AssertionError("the lane does not come to an end")

    def _acknowledge(self, record: Record) -> None:
        item, result = record.item, record.result or 0
        self.failed = self.failed or result < 0
        if not self.failed:
            self.told[item.tag] = PutDone(item.tag, None, Durability.WRITTEN)
        else:
            self.refused.add(item.tag)
        self._ended.append(record)

    def _end_some(self) -> None:
        mine = [op for op in self._disk.in_flight if op.tag >= _TAGS_BEGIN]
        self.dice.shuffle(mine)
        for op in mine[: self.dice.randrange(1, len(mine) + 1)] if mine else []:
            self._disk.in_flight.remove(op)
            result = self._disk._execute(op)
            self._by_tag.pop(op.tag).result = result if result < 0 or result == op.length else -5

    def _reap_others(self) -> list[DiskDone]:
        mine = [op for op in self._disk.in_flight if op.tag >= _TAGS_BEGIN]
        self._disk.in_flight = [op for op in self._disk.in_flight if op.tag < _TAGS_BEGIN]
        done = self._reap()
        self._disk.in_flight += mine
        return done
