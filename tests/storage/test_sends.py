"""Blocks that a reader sends: when their turn comes, and with their extents pinned until the end."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.limits import DRIVE_INFLIGHT_READ_BYTES_MAX, PAGE_BYTES, TURN_BYTES
from kvstore.storage.eviction.types import Guard
from kvstore.storage.sends import Send
from kvstore.wire.record import record_bytes
from tests.storage.rig import TENANT, StoreRig, key

if TYPE_CHECKING:
    from kvstore.storage.index import Entry

LENGTH = 5000


class Handed:
    """A reader controlled by the test."""

    def __init__(self, rig: StoreRig) -> None:
        self.rig = rig
        self.begun: list[Send] = []
        self.takes = True

    def entry(self, number: int) -> Entry:
        (entry,) = self.rig.store.lookup([(TENANT, key(number))])
        assert entry is not None
        return entry

    def send(self, *numbers: int, tenant: bytes = TENANT, size_bytes: int = 0) -> Send:
        entries = [self.entry(number) for number in numbers]
        size_bytes = size_bytes or sum(record_bytes(entry.length) for entry in entries)
        one = Send(tenant, entries, size_bytes, lambda: self.start(one))
        self.rig.drive.send([one])
        return one

    def start(self, one: Send) -> bool:
        self.begun.append(one)
        return self.takes

    def is_pinned(self, entry: Entry) -> bool:
        return self.rig.drive._extents.is_pinned(entry.offset // PAGE_BYTES)

    @property
    def guarded(self) -> int:
        return self.rig.store.statistics().eviction.guarded.get(Guard.PIN, 0)


@pytest.fixture
def handed(fake: StoreRig) -> Handed:
    for number in range(4):
        fake.put(number, bytes([number]) * LENGTH)
    return Handed(fake)


def test_reads_handed_on_keep_their_extents_until_the_drive_is_done(handed: Handed) -> None:
    rig, entry = handed.rig, handed.entry(1)
    free = rig.store.statistics().free_bytes
    one = handed.send(1, 2)
    assert handed.begun == [one]
    assert handed.is_pinned(entry)
    assert handed.guarded == 2
    assert rig.store.statistics().gets_pending == 2
    rig.start_delete(1)
    for _ in range(5):
        rig.store.poll()
    assert rig.store.statistics().free_bytes == free, "its extent is nobody else's yet"
    rig.drive.sent(one)
    rig.settle()
    assert not handed.is_pinned(entry)
    assert handed.guarded == 0
    assert rig.store.statistics().free_bytes == free + record_bytes(LENGTH)
    assert rig.store.statistics().gets_pending == rig.store.statistics().drive_in_flight == 0


def test_unwanted_reads_release_their_extents(handed: Handed) -> None:
    handed.takes = False
    handed.send(1, 2)
    assert len(handed.begun) == 1
    assert not handed.is_pinned(handed.entry(1))
    assert handed.guarded == 0
    statistics = handed.rig.store.statistics()
    assert (statistics.gets_pending, statistics.drive_in_flight, statistics.drive_in_flight_bytes) == (
        0,
        0,
        0,
    )


def test_tenants_take_turns_and_the_reads_in_flight_are_bounded(handed: Handed) -> None:
    """A tenant with many reads is not before one with few, whatever reads them."""
    many = 4 * DRIVE_INFLIGHT_READ_BYTES_MAX // TURN_BYTES
    for _ in range(many):
        handed.send(1, tenant=b"evil", size_bytes=TURN_BYTES)
    fits = DRIVE_INFLIGHT_READ_BYTES_MAX // TURN_BYTES
    assert len(handed.begun) == fits
    good = handed.send(2, tenant=b"good", size_bytes=TURN_BYTES)
    assert len(handed.begun) == fits, "it waits like all others"
    for number in range(2):
        handed.rig.drive.sent(handed.begun[number])
    assert good in handed.begun[fits : fits + 2]
    handed.rig.drive.sent(good)
    ended = 2
    while ended < len(handed.begun):
        if handed.begun[ended] is not good:
            handed.rig.drive.sent(handed.begun[ended])
        ended += 1
    assert len(handed.begun) == many + 1
    assert handed.rig.store.statistics().drive_in_flight_bytes == 0


def test_reads_handed_on_are_not_submitted_by_us(handed: Handed) -> None:
    disk = handed.rig.disk
    assert disk is not None
    one = handed.send(1)
    assert not disk.in_flight
    done, payload = handed.rig.get(2)
    assert (done.miss, payload) == (None, bytes([2]) * LENGTH), "and we may read beside it"
    handed.rig.drive.sent(one)


def test_a_drive_closes_once_its_blocks_are_released(handed: Handed) -> None:
    handed.send(1)
    handed.rig.start_delete(1)
    handed.rig.drive.close()
    assert not handed.is_pinned(handed.begun[0].entries[0])
