"""Puts and gets, and each reason for refusing one."""

from __future__ import annotations

import ctypes
import dataclasses
import random
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import InvalidArgument, KeyTaken, NoSpace, Overloaded, ProtocolError, StorageError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    BLOCK_BYTES_MAX,
    DRIVE_INFLIGHT_BYTES_MAX,
    DRIVE_INFLIGHT_READ_BYTES_MAX,
    HEADER_BYTES,
    PAGE_BYTES,
    STORE_QUEUED_MAX,
)
from kvstore.miss import MissReason
from kvstore.storage.eviction.types import Guard
from kvstore.storage.index import Index
from kvstore.storage.items import GetDone, GetItem, PutDone, PutItem
from kvstore.wire.record import record_bytes
from tests.storage.fakes import FakeDisk
from tests.storage.rig import FINGERPRINT, TENANT, Slots, StoreRig, key

if TYPE_CHECKING:
    from pathlib import Path


def reason(rig: StoreRig, number: int, **more: object) -> MissReason | None:
    done, _ = rig.get(number, **more)  # type: ignore[arg-type]
    return done.miss.reason if done.miss else None


@pytest.mark.parametrize("length", [1, 4095, 4096, 4097, 32768, 60000])
def test_a_put_block_can_be_fetched(fake: StoreRig, length: int) -> None:
    payload = random.Random(length).randbytes(length)
    assert fake.put(1, payload).error is None
    done, got = fake.get(1, length=length)
    assert done.miss is None
    assert (done.length, done.generation > 0) == (length, True)
    assert got == payload


def test_a_real_drive_keeps_blocks_over_a_clean_close_without_a_rebuild(real: StoreRig) -> None:
    payloads = {number: random.Random(number).randbytes(30_000 + number) for number in range(40)}
    for number, payload in payloads.items():
        real.start_put(number, payload, Durability.SYNCED if number % 3 == 0 else Durability.WRITTEN)
    real.settle()
    assert all(done.error is None for done in real.put_done.values())
    real.store.close()
    real.open()
    assert not real.store.statistics().rebuilt
    assert all(real.get(number)[1] == payload for number, payload in payloads.items())


def test_a_put_returns_the_requested_durability(fake: StoreRig) -> None:
    assert fake.put(1, b"a", Durability.WRITTEN).durability is Durability.WRITTEN
    assert fake.put(2, b"b", Durability.SYNCED).durability is Durability.SYNCED
    assert fake.put(3, b"c", Durability.LANDED).durability is Durability.WRITTEN


def test_an_unknown_key_and_another_tenants_key_are_unknown(fake: StoreRig) -> None:
    fake.put(1, b"mine")
    assert reason(fake, 2) is MissReason.UNKNOWN
    assert reason(fake, 1, tenant=b"somebody--else!!") is MissReason.UNKNOWN


def test_another_layout_is_a_layout_miss(fake: StoreRig) -> None:
    fake.put(1, b"bytes")
    assert reason(fake, 1, fingerprint=b"another--layout!") is MissReason.LAYOUT


def test_another_length_is_a_length_miss(fake: StoreRig) -> None:
    fake.put(1, b"bytes")
    assert reason(fake, 1, length=6) is MissReason.LENGTH
    assert reason(fake, 1, length=5) is None


def test_a_block_too_long_for_the_slot_is_a_length_miss_and_the_slot_is_not_written(fake: StoreRig) -> None:
    fake.put(1, bytes(9000))
    address = fake.slots.free[0]
    ctypes.memset(address, 0xEE, 65536)
    done: list[GetDone] = []
    fake.store.get([GetItem(TENANT, key(1), FINGERPRINT, 0, address, 8192, 7)], done.extend)
    fake.settle()
    assert done[0].miss is not None
    assert done[0].miss.reason is MissReason.LENGTH
    assert ctypes.string_at(address, 65536) == b"\xee" * 65536


def test_a_block_expires_on_time_and_its_name_can_be_written_again(fake: StoreRig) -> None:
    fake.put(1, b"short-lived", expires_ms=fake.clock.now_ms + 10)
    fake.clock.now_ms += 9
    assert fake.get(1)[1] == b"short-lived"
    fake.clock.now_ms += 1
    assert reason(fake, 1) is MissReason.EXPIRED
    free = fake.store.statistics().free_bytes
    assert fake.put(1, b"long-lived.").error is None
    assert fake.get(1)[1] == b"long-lived."
    assert fake.store.statistics().free_bytes == free, "the old extent came back"


def test_an_extent_being_read_is_not_reallocated_before_the_read_ends(fake: StoreRig) -> None:
    assert fake.disk is not None
    fake.put(1, b"old" * 1000, expires_ms=fake.clock.now_ms + 10)
    old_offset, _ = fake.record_at(1)
    address = fake.slots.free.pop()
    done: list[GetDone] = []
    fake.store.get([GetItem(TENANT, key(1), FINGERPRINT, 0, address, 65536, 99)], done.extend)
    fake.disk.held = {op.tag for op in fake.disk.in_flight}
    fake.clock.now_ms += 10
    for number in range(1, 20):  # number 1 replaces, the others would take its place
        fake.start_put(number, b"new" * 1000)
        while len(fake.put_done) < number + 1:
            fake.poll()
    assert old_offset not in {fake.record_at(number)[0] for number in range(1, 20)}
    fake.disk.release()
    fake.settle()
    assert done[0].miss is None
    assert ctypes.string_at(address + HEADER_BYTES, 3000) == b"old" * 1000
    fake.put(50, b"new" * 1000)
    assert fake.record_at(50)[0] == old_offset


@pytest.mark.parametrize("length", [0, BLOCK_BYTES_MAX + 1])
def test_a_length_out_of_bounds_is_refused(fake: StoreRig, length: int) -> None:
    done = fake.put(1, b"", length=length)
    assert isinstance(done.error, InvalidArgument)
    assert reason(fake, 1) is MissReason.UNKNOWN


def test_a_drive_full_of_protected_blocks_is_no_space_and_continues_to_serve(fake: StoreRig) -> None:
    payload = bytes(range(256)) * 200
    blocks = fake.store.statistics().free_bytes // record_bytes(len(payload))
    for number in range(blocks):
        if fake.put(number, payload).error is not None:
            break  # it would go at once, to keep room
        assert fake.store.hold([(TENANT, key(number))], Guard.PROTECTED)[0] is not None
    taken = fake.drive._extents.allocate(fake.drive._extents.longest - 2)
    assert taken is not None
    assert isinstance(fake.put(blocks, payload).error, NoSpace)
    assert fake.get(0)[1] == payload
    assert fake.put(blocks + 1, b"small").error is None, "what still fits is taken"


def test_a_second_put_of_a_key_is_reported_with_the_first_and_fails_if_its_bytes_differ(
    fake: StoreRig,
) -> None:
    assert fake.disk is not None
    first = fake.start_put(1, b"the first")
    fake.disk.held = {op.tag for op in fake.disk.in_flight}
    same, other = fake.start_put(1, b"the first"), fake.start_put(1, b"the other")
    fake.start_put(2, b"bystander")
    for _ in range(5):
        fake.poll()
        if not any(op.tag not in fake.disk.held for op in fake.disk.in_flight):
            break
    assert not {first, same, other} & set(fake.put_done)
    fake.disk.release()
    fake.settle()
    assert fake.put_done[first].error is None
    assert fake.put_done[same].error is None
    assert isinstance(fake.put_done[other].error, KeyTaken)
    assert fake.get(1)[1] == b"the first"
    assert isinstance(fake.put(1, b"the third", Durability.SYNCED).error, KeyTaken)
    assert fake.put(1, b"the first", Durability.SYNCED).error is None
    assert fake.get(1)[1] == b"the first"


def test_a_second_put_that_requests_synced_waits_for_a_sync(fake: StoreRig) -> None:
    fake.put(1, b"payload", Durability.WRITTEN)
    syncs = fake.store.statistics().syncs
    fake.put(1, b"payload", Durability.SYNCED)
    assert fake.store.statistics().syncs == syncs + 1
    fake.put(1, b"payload", Durability.SYNCED)
    assert fake.store.statistics().syncs == syncs + 1, "it is synced already"


def test_a_stored_key_with_another_length_or_layout_is_not_acknowledged(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    assert fake.put(1, b"longer payload").error is not None
    assert fake.put(1, b"payload", fingerprint=b"another--layout!").error is not None


def test_one_sync_covers_many_puts(fake: StoreRig) -> None:
    for number in range(30):
        fake.start_put(number, b"x", Durability.SYNCED)
    fake.settle()
    assert fake.store.statistics().syncs < 15


def test_old_bytes_of_a_slot_do_not_reach_the_drive(fake: StoreRig) -> None:
    assert fake.disk is not None
    fake.put(1, b"p" * 5000)
    offset, size = fake.record_at(1)
    record = b"".join(
        fake.disk.pages[page] for page in range(offset // PAGE_BYTES, (offset + size) // PAGE_BYTES)
    )
    assert record[120:HEADER_BYTES] == bytes(HEADER_BYTES - 120)
    assert record[HEADER_BYTES:] == (b"p" * 5000).ljust(size - HEADER_BYTES, b"\0")


def test_the_bytes_in_flight_are_capped_and_two_large_reads_still_overlap(tmp_path: Path) -> None:
    disk = FakeDisk(capacity=128 << 20)
    rig = StoreRig(tmp_path / "data", disk, Slots(48, 4 << 20))
    rig.open()
    for number in range(40):
        rig.start_put(number, bytes(1 << 20))
        assert rig.store.statistics().drive_in_flight_bytes <= DRIVE_INFLIGHT_BYTES_MAX
    assert rig.store.statistics().drive_in_flight_bytes > DRIVE_INFLIGHT_READ_BYTES_MAX
    rig.settle()
    for number in range(12):
        rig.start_get(number)
        assert rig.store.statistics().drive_in_flight_bytes <= DRIVE_INFLIGHT_READ_BYTES_MAX
    rig.settle()
    for number in range(50, 54):
        rig.put(number, bytes(3 << 20))
    for number in range(50, 54):
        rig.start_get(number)
    assert rig.store.statistics().drive_in_flight == 2
    rig.settle()
    rig.store.close()


def test_more_than_the_queue_takes_is_refused_as_a_whole(fake: StoreRig) -> None:
    address = fake.slots.free[0]
    item = PutItem(TENANT, key(0), FINGERPRINT, 0, 0, address, 0, Durability.WRITTEN, 0)  # refused one by one
    batch = [item] * BATCH_BLOCKS_MAX
    done: list[PutDone] = []
    with pytest.raises(ProtocolError):
        fake.store.put([*batch, item], done.extend)
    for _ in range(STORE_QUEUED_MAX // BATCH_BLOCKS_MAX):
        fake.store.put(batch, done.extend)
    with pytest.raises(Overloaded):
        fake.store.put([item], done.extend)
    get = GetItem(TENANT, key(0), FINGERPRINT, 0, address, 65536, 0)
    got: list[GetDone] = []
    for _ in range(STORE_QUEUED_MAX // BATCH_BLOCKS_MAX + 1):
        fake.store.get([get] * BATCH_BLOCKS_MAX, got.extend)
    fake.settle()
    assert len(done) == STORE_QUEUED_MAX
    reasons = [one.miss.reason for one in got if one.miss]
    assert reasons.count(MissReason.BUSY) == BATCH_BLOCKS_MAX
    assert reasons.count(MissReason.UNKNOWN) == STORE_QUEUED_MAX


def test_callbacks_are_called_only_from_poll_and_may_call_the_store(fake: StoreRig) -> None:
    calls: list[str] = []

    def after_get(_: object) -> None:
        calls.append("got")

    def after_put(_: object) -> None:
        calls.append("put")
        fake.store.get([GetItem(TENANT, key(1), FINGERPRINT, 0, fake.slots.free[1], 65536, 0)], after_get)
        calls.append("asked")

    fake.store.put(
        [PutItem(TENANT, key(1), FINGERPRINT, 9, 0, fake.slots.free[0], 0, Durability.WRITTEN, 0)], after_put
    )
    assert calls == []
    fake.settle()
    assert calls == ["put", "asked", "got"]


def test_close_finishes_accepted_work_and_accepts_no_more(fake: StoreRig) -> None:
    for number in range(20):
        fake.start_put(number, b"x" * 5000, Durability.SYNCED)
    fake.store.close()
    assert [done.error for done in fake.put_done.values()] == [None] * 20
    with pytest.raises(StorageError):
        fake.start_put(99, b"x")


def test_statistics_are_plain_values(fake: StoreRig) -> None:
    fake.put(1, b"x")
    statistics = dataclasses.asdict(fake.store.statistics())
    assert statistics["blocks"] == 1
    assert statistics["takes_puts"] is True


def test_close_does_not_wait_for_work_lost_to_an_exception(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    with monkeypatch.context() as broken:
        broken.delattr(Index, "publish_rows")
        with pytest.raises(AttributeError):
            rig.put(1, b"x")
    with pytest.raises(StorageError, match="unusable after an earlier exception"):
        rig.store.close()
    rig.disk = FakeDisk(rig.disk.pages if rig.disk else None)
    rig.open()
    rig.store.close()
