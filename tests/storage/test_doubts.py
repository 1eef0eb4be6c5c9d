"""Blocks that a crash may have torn: no put is settled with one before its bytes were checked."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import KeyTaken, ReadOnly
from kvstore.limits import CHECK_PIECE_BYTES, CHECKS_AT_ONCE, HEADER_BYTES, PAGE_BYTES
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.fsck import check
from kvstore.storage.index import Index
from tests.storage.fakes import FakeDisk
from tests.storage.pair import fail, holders, homed
from tests.storage.rig import TENANT, Slots, StoreRig, key

if TYPE_CHECKING:
    from pathlib import Path

PAYLOAD = b"payload" * 1000


def disk_of(rig: StoreRig) -> FakeDisk:
    assert rig.disk is not None
    return rig.disk


def tear(rig: StoreRig, number: int) -> None:
    """Lose a payload's last page."""
    offset, size = rig.record_at(number)
    disk = disk_of(rig)
    last = (offset + size) // PAGE_BYTES - 1
    disk.pages[last] = disk.durable[last] = bytes(PAGE_BYTES)


def crash(rig: StoreRig, *, torn: int | None = None) -> None:
    """Power loss, with the index gone and one record torn."""
    rig.drive._volume.disk.sync()
    if torn is not None:
        tear(rig, torn)
    rig.power_loss(seed=1)
    rig.open()
    assert rig.store.statistics().rebuilt


def restart(rig: StoreRig) -> None:
    """SIGKILL and a start under the same kernel."""
    rig.kill()
    rig.disk = disk_of(rig).after_kill(0)
    rig.open()
    assert not rig.store.statistics().rebuilt


def close_and_open(rig: StoreRig) -> None:
    rig.store.close()
    rig.disk = FakeDisk(disk_of(rig).pages)
    rig.open()
    assert not rig.store.statistics().rebuilt


def writes_of(rig: StoreRig) -> int:
    return disk_of(rig).kinds.count(DiskOpKind.WRITE)


def reads_of(rig: StoreRig) -> int:
    return disk_of(rig).kinds.count(DiskOpKind.READ)


@pytest.mark.parametrize("durability", [Durability.WRITTEN, Durability.SYNCED])
@pytest.mark.parametrize("meanwhile", [lambda _: None, restart, close_and_open])
def test_a_torn_record_found_by_a_scan_completes_no_put(
    fake: StoreRig, durability: Durability, meanwhile: object
) -> None:
    fake.put(1, PAYLOAD)
    crash(fake, torn=1)
    assert fake.store.explain(TENANT, key(1)).doubted
    assert "has not been checked" in str(fake.store.explain(TENANT, key(1)))
    meanwhile(fake)  # type: ignore[operator]
    assert fake.put(1, PAYLOAD, durability).error is None
    if durability is Durability.SYNCED:
        fake.power_loss(seed=2)
        fake.open()
    assert fake.get(1)[1] == PAYLOAD


def test_an_intact_record_found_by_a_scan_completes_a_put_once_it_is_checked(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    crash(fake)
    assert fake.store.statistics().doubted == 1
    before = writes_of(fake)
    assert fake.put(1, PAYLOAD, Durability.SYNCED).error is None
    assert writes_of(fake) == before, "it is there"
    assert fake.store.statistics().doubted == 0
    assert str(fake.store.explain(TENANT, key(1))) == "The block is stored."
    restart(fake)
    reads = reads_of(fake)
    assert fake.put(1, PAYLOAD).error is None
    assert reads_of(fake) == reads, "what has been checked and synced is not doubted again"


def test_a_get_with_a_valid_crc_ends_the_doubt(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    crash(fake)
    assert fake.get(1)[1] == PAYLOAD
    fake.poll_once()
    assert fake.store.statistics().doubted == 0
    close_and_open(fake)
    assert fake.store.statistics().doubted == 0


def test_after_sigkill_exactly_the_blocks_not_known_to_be_synced_are_doubted(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD, Durability.SYNCED)
    fake.put(2, PAYLOAD)
    restart(fake)
    assert fake.store.statistics().doubted == 1
    assert fake.store.explain(TENANT, key(2)).doubted
    assert fake.get(2)[1] == PAYLOAD
    fake.poll_once()
    restart(fake)
    assert fake.store.statistics().doubted == 0, "the opening has synced, and both were checked"
    fake.put(3, PAYLOAD)
    restart(fake)
    assert fake.store.statistics().doubted == 1
    assert fake.store.explain(TENANT, key(3)).doubted
    tear(fake, 3)
    assert fake.put(3, PAYLOAD).error is None
    assert fake.get(3)[1] == PAYLOAD


@pytest.mark.parametrize("dies", [False, True])
def test_the_doubt_of_a_block_is_removed_with_it(
    fake: StoreRig, monkeypatch: pytest.MonkeyPatch, *, dies: bool
) -> None:
    """Also if the process dies when the block is removed and its doubt is not."""
    for number in range(3):
        fake.put(number, PAYLOAD)
    restart(fake)
    assert fake.store.statistics().doubted == 3
    with monkeypatch.context() as before_it:
        if dies:
            before_it.setattr(Index, "_forget_doubts", lambda *_: None)
        assert fake.delete(1).error is None
    assert fake.store.statistics().doubted == 2 + dies
    restart(fake)
    assert fake.store.statistics().doubted == 2
    assert fake.store.explain(TENANT, key(2)).doubted


def test_a_block_torn_by_a_failed_sync_completes_no_put_after_a_restart(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    disk_of(fake).faults = {disk_of(fake).operations + 1: -errno.EIO}
    assert isinstance(fake.put(2, b"x", Durability.SYNCED).error, ReadOnly)
    restart(fake)
    tear(fake, 1)
    assert fake.put(1, PAYLOAD, Durability.SYNCED).error is None
    fake.power_loss(seed=3)
    fake.open()
    assert fake.get(1)[1] == PAYLOAD


def test_a_block_torn_by_a_failed_sync_completes_no_put_before_a_restart(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    disk_of(fake).faults = {disk_of(fake).operations + 1: -errno.EIO}
    fake.put(2, b"x", Durability.SYNCED)
    tear(fake, 1)
    assert isinstance(fake.put(1, PAYLOAD).error, ReadOnly)


def test_all_of_an_older_builds_index_is_doubted(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    fake.store.close()
    index = Index(fake.data / "index-0", 0)
    index.write(lambda transaction: transaction.delete(b"doubts", db=index._meta))
    index.abandon()
    fake.disk = FakeDisk(disk_of(fake).pages)
    fake.open()
    assert not fake.store.statistics().rebuilt
    assert fake.store.statistics().doubted == 1
    tear(fake, 1)
    assert fake.put(1, PAYLOAD).error is None
    assert fake.get(1)[1] == PAYLOAD


def test_an_unreadable_record_completes_no_put(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    crash(fake)
    disk_of(fake).unreadable = {fake.record_at(1)[0] // PAGE_BYTES + 1}
    assert fake.put(1, PAYLOAD).error is None
    assert fake.get(1)[1] == PAYLOAD
    assert fake.store.statistics().quarantined == 1


@pytest.fixture
def large(tmp_path: Path) -> StoreRig:
    rig = StoreRig(tmp_path / "data", FakeDisk(), Slots(16, CHECK_PIECE_BYTES + (64 << 10)))
    rig.open()
    return rig


@pytest.mark.parametrize("harm", ["none", "header", "last byte", "one failed read"])
def test_a_record_of_several_pieces_is_checked_to_its_end(large: StoreRig, harm: str) -> None:
    payload = bytes(range(256)) * ((CHECK_PIECE_BYTES + PAGE_BYTES) // 256)
    large.put(1, payload)
    crash(large)
    offset, _ = large.record_at(1)
    disk = disk_of(large)
    if harm == "header":
        disk.flip(offset + 60, 0)
    elif harm == "last byte":
        disk.flip(offset + HEADER_BYTES + len(payload) - 1, 0)
    elif harm == "one failed read":
        disk.faults = {disk.operations + 1: -errno.EIO}
    before = writes_of(large)
    assert large.put(1, payload).error is None
    is_whole = harm in ("none", "one failed read")
    assert (writes_of(large) == before) is is_whole
    assert large.get(1)[1] == payload
    large.store.close()


def test_many_puts_that_wait_for_checks_all_complete(fake: StoreRig) -> None:
    numbers = range(5 * CHECKS_AT_ONCE)
    for number in numbers:
        fake.put(number, PAYLOAD)
    crash(fake, torn=7)
    before = writes_of(fake)
    tags = [fake.start_put(number, PAYLOAD) for number in numbers]
    tags += [fake.start_put(7, PAYLOAD), fake.start_put(8, PAYLOAD)]
    fake.settle()
    assert all(fake.put_done[tag].error is None for tag in tags)
    assert fake.get(7)[1] == PAYLOAD
    assert writes_of(fake) - before == 3, "the torn one: its wipe, its scrub, and its new record"


@pytest.mark.parametrize("torn", [None, 1])
def test_a_block_removed_while_it_is_checked_is_written(fake: StoreRig, torn: int | None) -> None:
    fake.put(1, PAYLOAD)
    crash(fake, torn=torn)
    entry = fake.store.lookup([(TENANT, key(1))])[0]
    assert entry is not None
    tag = fake.start_put(1, PAYLOAD)
    fake.store.evict([entry.generation])
    fake.settle()
    assert fake.put_done[tag].error is None
    assert fake.get(1)[1] == PAYLOAD


def test_a_deletion_during_a_check_follows_the_put(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    crash(fake)
    tag = fake.start_put(1, PAYLOAD)
    delete = fake.start_delete(1)
    fake.settle()
    assert fake.put_done[tag].error is None
    assert fake.delete_done[delete].found
    assert fake.get(1)[0].miss is not None


def test_another_records_header_is_not_wiped_by_a_check(fake: StoreRig) -> None:
    fake.put(1, b"one")
    fake.put(2, b"two")
    crash(fake)
    entry, other = fake.store.lookup([(TENANT, key(1)), (TENANT, key(2))])
    assert entry is not None
    assert other is not None
    fake.drive._index.publish([((TENANT, key(1)), entry._replace(offset=other.offset))])
    fake.drive._doubts.add([entry.generation])
    assert fake.put(1, b"one").error is None
    assert fake.get(1)[1] == b"one"
    assert fake.get(2)[1] == b"two"


def test_a_session_whose_record_is_torn_is_not_taken_from_the_index(fake: StoreRig) -> None:
    """A repeated step would count as executed, and be lost with the next power loss."""
    fake.put(1, PAYLOAD, Durability.SYNCED)
    fake.append(1, [1], first_block=0)
    place = fake.store.manifests.page(TENANT, b"", 1)[0][0][0]
    stored = fake.store.manifests.get(place)
    assert stored is not None
    fake.kill()
    disk = fake.disk = disk_of(fake).after_kill(0)
    disk.flip(stored.place.offset + HEADER_BYTES, 0)
    fake.open()
    assert fake.store.statistics().rebuilt
    assert fake.session(1) is None
    assert fake.append(1, [1], Durability.SYNCED, first_block=0).error is None
    fake.power_loss(seed=1)
    fake.open()
    assert fake.session(1) == [1]


def test_an_unchecked_block_of_a_failed_drive_is_put_elsewhere(pair: StoreRig) -> None:
    (number,) = homed(pair, 0)
    pair.put(number, PAYLOAD)
    for drive in pair.store.drives:
        drive._volume.disk.sync()
    pair.power_loss(seed=1)
    pair.open()
    fail(pair, 0)
    assert pair.put(number, PAYLOAD).error is None
    assert holders(pair, number) == [0, 1]
    pair.disks[0].flip(pair.store.drives[0].lookup([(TENANT, key(number))])[0].offset + HEADER_BYTES, 0)  # type: ignore[union-attr]
    assert pair.get(number)[1] == PAYLOAD, "from the drive where nobody doubts it"


def test_a_torn_record_at_home_does_not_hide_another_drives_block(pair: StoreRig) -> None:
    (number,) = homed(pair, 0)
    pair.put(number, PAYLOAD)
    for drive in pair.store.drives:
        drive._volume.disk.sync()
    pair.power_loss(seed=1)
    pair.open()
    fail(pair, 0)
    assert pair.put(number, PAYLOAD, Durability.SYNCED).error is None
    assert holders(pair, number) == [0, 1]
    at_home = pair.store.drives[0].lookup([(TENANT, key(number))])[0]
    assert at_home is not None
    pair.power_loss(seed=1)
    for position in (0, 1):  # a scan doubts both
        shutil.rmtree(pair.data / f"index-{position}", ignore_errors=True)
    torn = at_home.offset // PAGE_BYTES + 1
    pair.disks[0].pages[torn] = pair.disks[0].durable[torn] = bytes(PAGE_BYTES)
    pair.open()
    assert holders(pair, number) == [0, 1]
    assert isinstance(pair.put(number, PAYLOAD[::-1]).error, KeyTaken)
    assert holders(pair, number) == [1]
    assert pair.get(number)[1] == PAYLOAD


def test_a_check_of_payloads_makes_an_index_that_doubts_only_torn_blocks(fake: StoreRig) -> None:
    for number in range(5):
        fake.put(number, PAYLOAD)
    fake.drive._volume.disk.sync()
    tear(fake, 3)
    fake.power_loss(seed=1)
    report = check(fake.data, repair=True, payloads=True, source=fake.source(), boot_id=fake.boot_id)
    assert report.repaired
    fake.disk = FakeDisk(disk_of(fake).pages)
    fake.open()
    assert not fake.store.statistics().rebuilt
    assert fake.store.statistics().doubted == 1
    assert fake.store.explain(TENANT, key(3)).doubted


def test_a_large_index_is_doubted_in_parts(fake: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.doubts.DOUBTS_LISTED_AT_ONCE", 3)
    for number in range(10):
        fake.put(number, b"payload")
    crash(fake)
    assert fake.store.statistics().doubted == 10


def test_doubts_are_removed_with_the_index(fake: StoreRig) -> None:
    fake.put(1, PAYLOAD)
    crash(fake)
    fake.delete(1)
    assert fake.store.statistics().doubted == 0
    fake.put(2, PAYLOAD)
    fake.store.close()
    shutil.rmtree(fake.data / "index-0")
    fake.disk = FakeDisk(disk_of(fake).pages)
    fake.open()
    assert fake.store.statistics().doubted == 1, "the index was lost, and with it what was known"


@pytest.mark.parametrize("how", ["delete", "evict"])
def test_a_header_inside_a_record_restored_by_a_crash_hides_none_after_it(fake: StoreRig, how: str) -> None:
    """It began in the room of a freed record, and reached into the next; the crash kept only the header."""
    fake.put(1, bytes(5 * PAGE_BYTES), Durability.SYNCED)
    fake.put(2, PAYLOAD, Durability.SYNCED)
    before = dict(disk_of(fake).pages)
    (first, _), (second, size) = fake.record_at(1), fake.record_at(2)
    fake.delete(1)
    fake.delete(2)
    fake.put(3, b"small")
    fake.put(4, bytes(5 * PAGE_BYTES))
    reaching, reaches = fake.record_at(4)
    assert first < reaching < second < reaching + reaches
    pages = disk_of(fake).pages
    kept = [first, *range(second, second + size, PAGE_BYTES)]
    pages.update((at // PAGE_BYTES, before[at // PAGE_BYTES]) for at in kept)
    fake.kill()
    fake.disk = FakeDisk(pages)
    fake.boot_id = "1" * 36
    fake.open()
    assert [fake.record_at(1)[0], fake.record_at(2)[0]] == [first, second]
    assert fake.put(2, PAYLOAD, Durability.SYNCED).error is None
    if how == "delete":
        fake.delete(1)
    else:
        entry = fake.store.lookup([(TENANT, key(1))])[0]
        assert entry is not None
        fake.store.evict([entry.generation])
        fake.settle()
    fake.power_loss(seed=1)
    fake.open()
    assert fake.get(2)[1] == PAYLOAD


@pytest.mark.parametrize("more", ["a longer life", "synced"])
def test_other_bytes_under_a_key_of_a_failed_drive_are_refused_at_any_durability(
    pair: StoreRig, more: str
) -> None:
    (number,) = homed(pair, 0)
    expires_ms = pair.clock.now_ms + 2_000 if more == "a longer life" else 0
    pair.put(number, PAYLOAD, expires_ms=expires_ms)
    fail(pair, 0)
    durability = Durability.SYNCED if more == "synced" else Durability.WRITTEN
    assert isinstance(pair.put(number, PAYLOAD[::-1], durability).error, KeyTaken)
    assert pair.get(number)[1] == PAYLOAD


def test_a_put_follows_one_of_its_name_in_flight_on_another_drive(pair: StoreRig) -> None:
    (number,) = homed(pair, 0)
    fail(pair, 0)
    assert pair.put(number, PAYLOAD).error is None
    assert holders(pair, number) == [1]
    there = pair.store.drives[1].lookup([(TENANT, key(number))])[0]
    assert there is not None
    pair.store.drives[1]._volume.disk.sync()
    pair.power_loss(seed=1)
    shutil.rmtree(pair.data / "index-1")
    torn = there.offset // PAGE_BYTES + 1
    pair.disks[1].pages[torn] = pair.disks[1].durable[torn] = bytes(PAGE_BYTES)
    pair.open()
    first = pair.start_put(number, PAYLOAD)  # finds the torn record, and is written where that was
    while holders(pair, number):
        pair.poll_once()
    second = pair.start_put(number, PAYLOAD[::-1])
    pair.settle()
    assert pair.put_done[first].error is None
    assert isinstance(pair.put_done[second].error, KeyTaken)
    assert pair.get(number)[1] == PAYLOAD
