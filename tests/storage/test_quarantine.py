"""Unreadable records: their names can be put again, and their space counts for their tenant until it is freed."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import QuotaExceeded
from kvstore.limits import HEADER_BYTES, PAGE_BYTES, SCRUB_PIECE_BYTES
from kvstore.miss import MissReason
from kvstore.storage import overwriting
from kvstore.storage.disk import DiskOpKind
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeDisk
from tests.storage.pair import fail, holders, homed
from tests.storage.rig import TENANT, Slots, StoreRig, key
from tests.storage.test_doubts import PAYLOAD, disk_of

if TYPE_CHECKING:
    from pathlib import Path

BLOCK = 3 * PAGE_BYTES


def reason(rig: StoreRig, number: int) -> MissReason | None:
    miss = rig.get(number)[0].miss
    return None if miss is None else miss.reason


def overwrite(rig: StoreRig) -> None:
    """Poll until nothing is quarantined."""
    while rig.store.statistics().quarantined_bytes:
        rig.poll()
    assert overwriting._noted(rig.drive._index) == []


@pytest.mark.parametrize("page", [0, 1, 2], ids=["header", "payload", "last page"])
@pytest.mark.parametrize("durability", [Durability.WRITTEN, Durability.SYNCED])
def test_an_unreadable_block_can_be_put_again(fake: StoreRig, page: int, durability: Durability) -> None:
    fake.put(1, PAYLOAD, Durability.SYNCED)
    offset, size = fake.record_at(1)
    free = fake.store.statistics().free_bytes
    disk_of(fake).unreadable = {offset // PAGE_BYTES + page}
    assert reason(fake, 1) is MissReason.UNREADABLE
    assert fake.store.lookup([(TENANT, key(1))]) == [None]
    overwrite(fake)
    assert fake.store.statistics().free_bytes == free + size, "it has been overwritten"
    assert not disk_of(fake).unreadable
    assert fake.put(1, PAYLOAD, durability).error is None
    assert fake.get(1)[1] == PAYLOAD


def test_an_unreadable_block_does_not_come_back_after_a_deletion(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD, Durability.SYNCED)
    disk_of(fake).unreadable = {fake.record_at(1)[0] // PAGE_BYTES + 1}
    assert reason(fake, 1) is MissReason.UNREADABLE
    fake.delete(1)
    fake.store.close()
    shutil.rmtree(fake.data / "index-0")
    fake.disk = FakeDisk(disk_of(fake).pages)
    fake.open()
    assert reason(fake, 1) is MissReason.UNKNOWN


def test_another_records_header_in_front_of_a_bad_page_is_not_wiped(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    fake.put(2, PAYLOAD)
    entry, other = fake.store.lookup([(TENANT, key(1)), (TENANT, key(2))])
    assert entry is not None
    assert other is not None
    fake.drive._index.publish([((TENANT, key(1)), entry._replace(offset=other.offset))])
    disk_of(fake).unreadable = {other.offset // PAGE_BYTES + 1}
    assert reason(fake, 1) is MissReason.UNREADABLE
    disk_of(fake).unreadable = set()
    assert fake.get(2)[1] == PAYLOAD


@pytest.mark.parametrize("harm", ["unreadable", "crc"])
def test_a_quarantined_block_counts_against_its_tenant_until_it_is_overwritten(
    fake: StoreRig, harm: str
) -> None:
    fake.store.change_quotas({TENANT: 2 * BLOCK})
    fake.put(1, PAYLOAD)
    offset, _ = fake.record_at(1)
    if harm == "unreadable":
        disk_of(fake).unreadable = {offset // PAGE_BYTES + 1}
    else:
        disk_of(fake).flip(offset + HEADER_BYTES, 0)
    disk_of(fake).unwritable = {offset // PAGE_BYTES + 2}
    assert fake.get(1)[0].miss is not None
    assert fake.store.quota(TENANT).used_bytes == BLOCK
    statistics = fake.store.statistics()
    assert (statistics.quarantined, statistics.quarantined_bytes) == (1, BLOCK)
    assert statistics.takes_puts, "nothing is at risk: its header is wiped"
    assert fake.put(2, PAYLOAD).error is None
    assert fake.store.quota(TENANT).used_bytes == 2 * BLOCK
    assert fake.put(3, PAYLOAD).error is None, "and 2 has gone for it"
    assert fake.store.quota(TENANT).used_bytes == 2 * BLOCK
    assert fake.store.lookup([(TENANT, key(2))]) == [None]


@pytest.mark.parametrize("killed", [False, True])
def test_space_that_could_not_be_overwritten_is_free_and_uncharged_after_a_restart(
    fake: StoreRig, *, killed: bool
) -> None:
    free = fake.store.statistics().free_bytes
    fake.put(1, PAYLOAD)
    offset, _ = fake.record_at(1)
    disk_of(fake).flip(offset + HEADER_BYTES, 0)
    disk_of(fake).unwritable = {offset // PAGE_BYTES + 2}
    assert reason(fake, 1) is MissReason.CORRUPT
    assert fake.store.statistics().free_bytes == free - BLOCK
    if killed:
        fake.kill()
    else:
        fake.store.close()
    fake.disk = FakeDisk(disk_of(fake).pages)  # another life: the drive has replaced the sector, or has not
    fake.open()
    fake.store.change_quotas({TENANT: 2 * BLOCK})
    assert fake.store.quota(TENANT).used_bytes == 0
    statistics = fake.store.statistics()
    assert (statistics.quarantined_bytes, statistics.free_bytes) == (0, free)
    assert reason(fake, 1) is MissReason.UNKNOWN, "and its bytes are not found there again"


def test_an_encrypted_block_is_quarantined_until_the_drive_has_overwritten_it(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.keyring = FakeKeyring()
    rig.open()
    free = rig.store.statistics().free_bytes
    assert rig.put(1, PAYLOAD, domain=b"a domain of hers").error is None
    offset, _ = rig.record_at(1)
    disk_of(rig).flip(offset + HEADER_BYTES, 0)
    disk_of(rig).unwritable = {offset // PAGE_BYTES + 2}
    assert reason(rig, 1) is MissReason.CORRUPT
    statistics = rig.store.statistics()
    assert (statistics.quarantined_bytes, statistics.free_bytes) == (BLOCK, free - BLOCK)
    assert overwriting._noted(rig.drive._index) == [], "without its key nobody reads it"
    rig.store.close()


def test_a_put_waits_for_its_tenants_quarantined_blocks(fake: StoreRig) -> None:
    fake.store.change_quotas({TENANT: BLOCK})
    fake.put(1, PAYLOAD)
    disk_of(fake).flip(fake.record_at(1)[0] + HEADER_BYTES, 0)
    item = fake.start_get(1)
    while item.tag not in fake.get_done:
        fake.poll()
    assert fake.store.verify_payload(item, fake.get_done[item.tag]).miss is not None
    tag = fake.start_put(2, PAYLOAD)
    assert fake.store.statistics().waiting_for_quota == 1
    fake.settle()
    assert fake.put_done[tag].error is None
    assert not isinstance(fake.put_done[tag].error, QuotaExceeded)


def test_a_large_extent_is_overwritten_in_pieces(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk(), Slots(16, 4 * SCRUB_PIECE_BYTES))
    rig.open()
    payload = b"payload!" * (2 * SCRUB_PIECE_BYTES // 8)
    rig.put(1, payload)
    offset, size = rig.record_at(1)
    free = rig.store.statistics().free_bytes
    disk_of(rig).unreadable = {offset // PAGE_BYTES + 70}
    before = disk_of(rig).kinds.count(DiskOpKind.WRITE)
    assert reason(rig, 1) is MissReason.UNREADABLE
    overwrite(rig)
    assert disk_of(rig).kinds.count(DiskOpKind.WRITE) - before == 2 + 1, "the header last"
    pages = range(offset // PAGE_BYTES, (offset + size) // PAGE_BYTES)
    assert not any(any(disk_of(rig).pages[page]) for page in pages)
    assert rig.store.statistics().free_bytes == free + size
    rig.store.close()


def test_a_close_does_not_wait_for_a_scrub_that_has_not_begun(fake: StoreRig) -> None:
    for number in range(3):
        fake.put(number, PAYLOAD)
        disk_of(fake).flip(fake.record_at(number)[0] + HEADER_BYTES, 0)
    items = [fake.start_get(number) for number in range(3)]
    while any(item.tag not in fake.get_done for item in items):
        fake.poll()
    for item in items:
        assert fake.store.verify_payload(item, fake.get_done[item.tag]).miss is not None
    fake.store.close()
    fake.disk = FakeDisk(disk_of(fake).pages)
    fake.open()
    assert not fake.store.statistics().rebuilt
    assert fake.store.statistics().quarantined_bytes == 0


def test_a_drive_that_accepts_no_writes_keeps_its_unreadable_blocks_and_new_puts_go_elsewhere(
    pair: StoreRig,
) -> None:
    (number,) = homed(pair, 0)
    pair.put(number, PAYLOAD, Durability.SYNCED)
    offset, _ = pair.record_at(number)
    fail(pair, 0)
    pair.disks[0].unreadable = {offset // PAGE_BYTES + 1}
    assert reason(pair, number) is MissReason.UNREADABLE
    assert holders(pair, number) == [0]
    assert pair.put(number, PAYLOAD, Durability.SYNCED).error is None
    assert holders(pair, number) == [0, 1]
    assert pair.get(number)[1] == PAYLOAD


@pytest.mark.parametrize("position", [0, 1])
def test_of_two_drives_the_one_with_the_block_quarantines_it(pair: StoreRig, position: int) -> None:
    (number,) = homed(pair, position)
    pair.put(number, PAYLOAD)
    pair.disks[position].unreadable = {pair.record_at(number)[0] // PAGE_BYTES}
    assert reason(pair, number) is MissReason.UNREADABLE
    assert pair.store.drives[position].statistics().quarantined == 1
    assert pair.put(number, PAYLOAD).error is None
    assert pair.get(number)[1] == PAYLOAD
