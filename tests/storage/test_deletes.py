"""Deletion and eviction: what is removed at once, what never returns, and when that is reported."""

from __future__ import annotations

import ctypes
import errno
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import Overloaded, ReadOnly
from kvstore.limits import BATCH_BLOCKS_MAX, DELETES_QUEUED_MAX, HEADER_BYTES, PAGE_BYTES
from kvstore.miss import MissReason
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.items import DeleteDone, DeleteItem, GetDone, GetItem
from kvstore.wire.record import record_bytes
from tests.storage.fakes import FakeDisk
from tests.storage.rig import FINGERPRINT, TENANT, StoreRig, key

if TYPE_CHECKING:
    from pathlib import Path


def disk_of(rig: StoreRig) -> FakeDisk:
    assert rig.disk is not None
    return rig.disk


def reopened_without_index(rig: StoreRig) -> None:
    shutil.rmtree(rig.data / "index-0")
    rig.open()
    assert rig.store.statistics().rebuilt


def kill(rig: StoreRig) -> None:
    rig.kill()
    rig.disk = disk_of(rig).after_kill(1)


def test_a_deleted_block_is_unknown_and_its_space_is_free(fake: StoreRig) -> None:
    free = fake.store.statistics().free_bytes
    fake.put(1, b"payload")
    assert fake.delete(1) == DeleteDone(fake._next_tag - 1, None, found=True, size_bytes=8192)
    done, _ = fake.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.UNKNOWN
    assert fake.store.statistics().free_bytes == free
    assert fake.delete(1).found is False
    assert fake.put(1, b"another payload").error is None, "the name can be written anew, at another length"


def test_another_tenants_block_is_not_deleted(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    assert fake.delete(1, tenant=b"somebody--else!!").found is False
    assert fake.get(1)[1] == b"payload"


def test_a_deleted_block_does_not_come_back_with_a_scan(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    fake.put(2, b"bystander")
    fake.delete(1)
    kill(fake)
    reopened_without_index(fake)
    assert fake.get(1)[0].miss is not None
    assert fake.get(2)[1] == b"bystander"


def test_an_evicted_block_whose_name_was_deleted_later_does_not_come_back(fake: StoreRig) -> None:
    """The older record was freed in the background; it must not outlive the deletion."""
    fake.put(1, b"first")
    first, _ = fake.record_at(1)
    fake.put(2, b"in between")
    generation = fake.get(1)[0].generation
    assert fake.store.evict([generation, 10**9]) == record_bytes(5)
    fake.put(3, b"takes the first one's place" * 1000)
    fake.put(1, b"again" * 3000)
    assert fake.record_at(1)[0] != first
    fake.delete(1)
    kill(fake)
    reopened_without_index(fake)
    assert fake.get(1)[0].miss is not None


def test_a_record_that_was_never_published_does_not_come_back_after_a_deletion(fake: StoreRig) -> None:
    """A process dies between the drive's write and the index; the name is stored again, and deleted."""
    fake.start_put(1, b"never reported")
    disk_of(fake).reap()  # it is on the drive, and nobody has heard of it
    kill(fake)
    fake.open()
    assert not fake.store.statistics().rebuilt
    fake.put(2, b"x" * 9000)  # elsewhere
    fake.put(1, b"reported" * 2000)
    fake.delete(1)
    kill(fake)
    reopened_without_index(fake)
    assert fake.get(1)[0].miss is not None


def test_the_older_of_two_records_does_not_come_back_when_the_newer_is_deleted(
    fake: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.storage.index_opening.finish", lambda *_: True)  # nor is it overwritten
    fake.put(1, b"old", expires_ms=fake.clock.now_ms + 1000)
    fake.clock.now_ms += 1000
    tag = fake.start_put(1, b"new" * 3000)
    while tag not in fake.put_done:
        fake.poll()
    rig_disk = disk_of(fake)
    rig_disk.held = {op.tag for op in rig_disk.in_flight}  # the wipe of the old one
    fake.kill()
    fake.disk = FakeDisk(rig_disk.pages)  # and it never happens
    reopened_without_index(fake)
    assert fake.get(1)[1] == b"new" * 3000
    fake.delete(1)
    kill(fake)
    fake.clock.now_ms -= 1000  # clocks are set back
    reopened_without_index(fake)
    assert fake.get(1)[0].miss is not None


def test_a_quarantined_block_does_not_come_back_after_a_deletion(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    offset, _ = fake.record_at(1)
    disk_of(fake).flip(offset + HEADER_BYTES, 0)
    assert fake.get(1)[0].miss is not None
    disk_of(fake).flip(offset + HEADER_BYTES, 0)  # it was the cable
    fake.put(1, b"payload")
    fake.delete(1)
    kill(fake)
    reopened_without_index(fake)
    assert fake.get(1)[0].miss is not None


def test_another_records_header_is_not_wiped_by_a_quarantine(fake: StoreRig) -> None:
    fake.put(1, b"one")
    fake.put(2, b"two")
    entry, other = fake.store.lookup([(TENANT, key(1)), (TENANT, key(2))])
    assert entry is not None
    assert other is not None
    fake.drive._index.publish([((TENANT, key(1)), entry._replace(offset=other.offset))])
    assert fake.get(1)[0].miss is not None
    assert fake.get(2)[1] == b"two"


def test_a_synced_deletion_is_reported_after_a_sync_that_began_after_the_wipe(fake: StoreRig) -> None:
    fake.put(1, b"payload", Durability.SYNCED)
    before = len(disk_of(fake).kinds)
    fake.delete(1, Durability.SYNCED)
    assert disk_of(fake).kinds[before:] == [DiskOpKind.WRITE, DiskOpKind.SYNC]
    fake.power_loss(seed=1)
    fake.open()
    assert fake.store.statistics().rebuilt
    assert fake.get(1)[0].miss is not None


def test_a_deletion_is_not_reported_before_wipes_that_began_before_it(fake: StoreRig) -> None:
    fake.put(1, b"one")
    fake.put(2, b"two")
    generation = fake.get(1)[0].generation
    fake.store.evict([generation])
    disk_of(fake).held = {op.tag for op in disk_of(fake).in_flight}
    tag = fake.start_delete(2)
    for _ in range(20):
        fake.store.poll()
    assert tag not in fake.delete_done
    disk_of(fake).release()
    fake.settle()
    assert fake.delete_done[tag].error is None


def test_a_block_whose_put_is_in_flight_is_deleted_after_it(fake: StoreRig) -> None:
    put = fake.start_put(1, b"payload")
    delete = fake.start_delete(1)
    fake.settle()
    assert fake.put_done[put].error is None
    assert fake.delete_done[delete].found
    assert fake.get(1)[0].miss is not None


def test_a_block_being_read_is_wiped_afterwards(fake: StoreRig) -> None:
    fake.put(1, b"payload" * 1000)
    done: list[GetDone] = []
    address = fake.slots.free.pop()
    fake.store.get([GetItem(TENANT, key(1), FINGERPRINT, 0, address, 65536, 99)], done.extend)
    disk_of(fake).held = {op.tag for op in disk_of(fake).in_flight}
    tag = fake.start_delete(1)
    for _ in range(20):
        fake.store.poll()
    assert tag not in fake.delete_done
    disk_of(fake).release()
    fake.settle()
    assert done[0].miss is None
    assert ctypes.string_at(address + HEADER_BYTES, 7000) == b"payload" * 1000
    assert fake.delete_done[tag].found


@pytest.mark.parametrize("fault", [-errno.EIO, -errno.ENOSPC])
def test_a_failed_wipe_is_an_error_and_stops_the_store(fake: StoreRig, fault: int) -> None:
    fake.put(1, b"payload")
    disk_of(fake).faults = {disk_of(fake).operations: fault}
    assert fake.delete(1).error is not None
    assert not fake.store.statistics().takes_puts
    assert fake.delete(1).error is not None
    fake.store.close()
    fake.disk = FakeDisk(disk_of(fake).pages)
    fake.open()
    assert fake.get(1)[0].miss is not None, "it is not in the index, and the opening voids it on the drive"
    kill(fake)
    reopened_without_index(fake)
    assert fake.get(1)[0].miss is not None


def test_a_failed_sync_is_an_error_of_the_deletion(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    disk_of(fake).faults = {disk_of(fake).operations + 1: -errno.EIO}
    assert isinstance(fake.delete(1, Durability.SYNCED).error, ReadOnly)


def test_more_deletions_than_the_queue_takes_are_refused_as_a_whole(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    generation = fake.get(1)[0].generation
    fake.store.evict([generation])
    disk_of(fake).held = {op.tag for op in disk_of(fake).in_flight}
    item = DeleteItem(TENANT, key(2), Durability.WRITTEN, 0)
    done: list[DeleteDone] = []
    for _ in range(DELETES_QUEUED_MAX // BATCH_BLOCKS_MAX):
        fake.store.delete([item] * BATCH_BLOCKS_MAX, done.extend)
    with pytest.raises(Overloaded):
        fake.store.delete([item], done.extend)
    disk_of(fake).release()
    fake.settle()
    assert len(done) == DELETES_QUEUED_MAX


def test_a_batch_is_deleted_in_one_transaction_and_one_answer(fake: StoreRig) -> None:
    for number in range(40):
        fake.put(number, b"x")
    answers: list[int] = []
    items = [DeleteItem(TENANT, key(number), Durability.SYNCED, number) for number in range(50)]
    fake.store.delete(items, lambda done: answers.append(sum(one.found for one in done)))
    assert fake.store.statistics().blocks == 0
    fake.settle()
    assert answers == [40]


def test_a_clean_close_waits_for_wipes(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.put(1, b"payload")
    offset, _ = rig.record_at(1)
    rig.store.evict([rig.get(1)[0].generation])
    rig.store.close()
    assert disk_of(rig).pages[offset // PAGE_BYTES] == bytes(PAGE_BYTES)


def test_blocks_are_identified_by_their_generations(fake: StoreRig) -> None:
    fake.put(1, b"one", expires_ms=fake.clock.now_ms + 1)
    old = fake.get(1)[0].generation
    fake.clock.now_ms += 1
    fake.put(1, b"anew")
    new = fake.get(1)[0].generation
    assert fake.store.names_of([old, new]) == [None, (TENANT, key(1))]
    assert fake.store.evict([old]) == 0
    assert fake.get(1)[1] == b"anew"


@pytest.mark.parametrize("hole", [None, 0, 1, 700, 999])
def test_the_prefix_ends_at_the_first_hole(fake: StoreRig, hole: int | None) -> None:
    entry_keys = [key(number) for number in range(1000)]
    fake.put(0, b"a template")
    template = fake.store.lookup([(TENANT, key(0))])[0]
    assert template is not None
    fake.drive._index.publish(
        ((TENANT, one), template._replace(generation=10**6 + number)) for number, one in enumerate(entry_keys)
    )
    assert fake.store.prefix(TENANT, entry_keys) == 1000
    assert fake.store.prefix(b"somebody--else!!", entry_keys) == 0
    if hole is not None:
        fake.drive._index.remove([(TENANT, key(hole))])
        assert fake.store.prefix(TENANT, entry_keys) == hole


def test_an_expired_block_ends_the_prefix(fake: StoreRig) -> None:
    fake.put(1, b"x")
    fake.put(2, b"x", expires_ms=fake.clock.now_ms + 5)
    fake.put(3, b"x")
    assert fake.store.prefix(TENANT, [key(1), key(2), key(3)]) == 3
    fake.clock.now_ms += 5
    assert fake.store.prefix(TENANT, [key(1), key(2), key(3)]) == 1
