"""The effects of a failing drive on the store: errors for its blocks, and never wrong bytes."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import NoSpace, ReadOnly, StorageError
from kvstore.limits import HEADER_BYTES, PAGE_BYTES, SCAN_UNREADABLE_PAGES_MAX
from kvstore.miss import MissReason
from kvstore.storage.disk import DiskOpKind
from tests.storage.fakes import SHORT, FakeDisk
from tests.storage.rig import TENANT, StoreRig, key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FAULTS = [-errno.EIO, -errno.ENOSPC, SHORT]


def disk_of(rig: StoreRig) -> FakeDisk:
    assert rig.disk is not None
    return rig.disk


def fail_next(rig: StoreRig, fault: int) -> None:
    disk_of(rig).faults = {disk_of(rig).operations: fault}


@pytest.mark.parametrize("fault", [-errno.EIO, SHORT])
def test_a_failed_write_makes_the_drive_read_only_for_good(fake: StoreRig, fault: int) -> None:
    fake.put(1, b"before")
    fail_next(fake, fault)
    assert isinstance(fake.put(2, b"x" * 9000).error, ReadOnly)
    writes = disk_of(fake).kinds.count(DiskOpKind.WRITE)
    assert isinstance(fake.put(3, b"after").error, ReadOnly)
    assert disk_of(fake).kinds.count(DiskOpKind.WRITE) == writes, "nothing is tried again"
    assert fake.get(1)[1] == b"before"
    assert fake.get(2)[0].miss is not None
    assert not fake.store.statistics().takes_puts


def test_a_full_file_system_under_the_drive_is_no_space(fake: StoreRig) -> None:
    fail_next(fake, -errno.ENOSPC)
    assert isinstance(fake.put(1, b"x").error, NoSpace)
    assert isinstance(fake.put(2, b"x").error, NoSpace)


def test_a_failed_sync_makes_the_drive_read_only_and_is_not_retried(fake: StoreRig) -> None:
    fake.put(1, b"written")
    disk_of(fake).faults = {disk_of(fake).operations + 1: -errno.EIO}
    assert isinstance(fake.put(2, b"synced", Durability.SYNCED).error, ReadOnly)
    syncs = disk_of(fake).kinds.count(DiskOpKind.SYNC)
    assert isinstance(fake.put(1, b"written", Durability.SYNCED).error, ReadOnly)
    assert isinstance(fake.put(3, b"after").error, ReadOnly)
    assert isinstance(fake.put(1, b"written").error, ReadOnly), "the failed sync has torn it"
    fake.store.close()
    assert disk_of(fake).kinds.count(DiskOpKind.SYNC) == syncs


@pytest.mark.parametrize("fault", [-errno.EIO, SHORT])
def test_a_read_that_fails_once_is_retried(fake: StoreRig, fault: int) -> None:
    fake.put(1, b"payload" * 1000)
    disk_of(fake).faults = {disk_of(fake).operations: fault}
    assert fake.get(1)[1] == b"payload" * 1000
    assert fake.store.statistics().quarantined == 0


def test_a_put_is_not_reported_before_those_with_lower_generations(fake: StoreRig) -> None:
    slow = fake.start_put(1, b"slow")
    disk_of(fake).held = {op.tag for op in disk_of(fake).in_flight}
    fast = fake.start_put(2, b"fast", Durability.SYNCED)
    while len(disk_of(fake).in_flight) > 1:
        fake.poll()
    assert fast not in fake.put_done
    assert fake.store.lookup([(TENANT, key(2))]) == [None]
    disk_of(fake).release()
    fake.settle()
    assert fake.reported[-2:] == [slow, fast]


def test_a_successful_put_fails_with_one_before_it(fake: StoreRig) -> None:
    failing = fake.start_put(1, b"failing")
    disk_of(fake).held = {op.tag for op in disk_of(fake).in_flight}
    fine = fake.start_put(2, b"fine")
    while len(disk_of(fake).in_flight) > 1:
        fake.poll()
    disk_of(fake).faults = {disk_of(fake).operations: -errno.EIO}
    disk_of(fake).release()
    fake.settle()
    assert isinstance(fake.put_done[failing].error, ReadOnly)
    assert isinstance(fake.put_done[fine].error, ReadOnly)


def test_a_stale_header_that_outlives_a_slow_put_hides_no_acknowledged_block(tmp_path: Path) -> None:
    """The order rule, end to end: B lies in the range of a freed record's header, not yet overwritten by A."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.put(1, b"freed" * 8000, Durability.SYNCED, expires_ms=rig.clock.now_ms + 1)
    stale, _ = rig.record_at(1)
    rig.clock.now_ms += 1
    rig.put(1, b"fresh" * 8000, Durability.SYNCED)  # frees the first
    slow = rig.start_put(2, b"a")
    assert disk_of(rig).in_flight[0].offset == stale
    disk_of(rig).held = {disk_of(rig).in_flight[0].tag}
    acknowledged = rig.start_put(3, b"b", Durability.SYNCED)
    for _ in range(20):
        rig.store.poll()
    assert not {slow, acknowledged} & set(rig.put_done), "or else the scan would lose it"
    rig.power_loss(seed=1)
    rig.open()
    assert rig.store.statistics().rebuilt
    rig.store.close()


def test_a_header_page_damaged_on_the_drive_is_corrupt_and_counted(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    offset, size = fake.record_at(1)
    disk_of(fake).flip(offset + 60, 3)
    free = fake.store.statistics().free_bytes
    done, _ = fake.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.CORRUPT
    while fake.store.statistics().quarantined_bytes:
        fake.poll()
    statistics = fake.store.statistics()
    assert (statistics.quarantined, statistics.quarantined_bytes, statistics.blocks) == (1, 0, 0)
    assert statistics.free_bytes == free + size, "the drive has overwritten all of it"
    assert fake.put(1, b"payload").error is None
    assert fake.get(1)[1] == b"payload"


def test_a_payload_damaged_on_the_drive_is_corrupt(fake: StoreRig) -> None:
    fake.put(1, b"payload")
    offset, _ = fake.record_at(1)
    disk_of(fake).flip(offset + HEADER_BYTES, 0)
    done, _ = fake.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.CORRUPT
    assert fake.store.statistics().quarantined == 1


@pytest.mark.parametrize(
    ("what", "other_payload", "other_fields"),
    [
        ("another key", b"payload-2", {}),
        ("another tenant", b"payload-1", {"tenant": b"somebody--else!!", "number": 1}),
        ("another generation", b"payload-2", {"number": 1}),
    ],
)
def test_a_valid_record_in_the_wrong_place_is_corrupt(
    fake: StoreRig, what: str, other_payload: bytes, other_fields: dict[str, object]
) -> None:
    """Even with a tag for this very place, as with an index that confuses two blocks."""
    fake.put(1, b"payload-1", expires_ms=fake.clock.now_ms + 1 if what == "another generation" else 0)
    entry = fake.store.lookup([(TENANT, key(1))])[0]
    assert entry is not None
    number = other_fields.pop("number", 2)
    fake.clock.now_ms += 1
    fake.put(number, other_payload, **other_fields)  # type: ignore[arg-type]
    other_name = (other_fields.get("tenant", TENANT), key(number))  # type: ignore[arg-type]
    other = fake.store.lookup([other_name])[0]  # type: ignore[list-item]
    assert other is not None
    mixed = entry._replace(offset=other.offset, expires_ms=other.expires_ms, crc32c=other.crc32c)
    fake.drive._index.publish([((TENANT, key(1)), mixed)])
    done, _ = fake.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.CORRUPT


def test_a_late_quarantine_of_a_replaced_block_does_not_affect_the_new_one(fake: StoreRig) -> None:
    fake.put(1, b"old", expires_ms=fake.clock.now_ms + 1)
    old = fake.get(1)[0].generation
    fake.clock.now_ms += 1
    fake.put(1, b"new")
    fake.store.quarantine(TENANT, key(1), old)
    assert fake.get(1)[1] == b"new"


def test_200_flipped_bits_never_give_wrong_bytes(tmp_path: Path) -> None:
    rng = random.Random(7)
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    payloads = {number: rng.randbytes(6000) for number in range(50)}
    for number, payload in payloads.items():
        rig.put(number, payload)
    end = max(sum(rig.record_at(number)) for number in payloads)
    for _ in range(200):
        disk_of(rig).flip(rng.randrange(2 * PAGE_BYTES, end), rng.randrange(8))
    for rebuilt in (False, True):
        for number, payload in payloads.items():
            done, got = rig.get(number)
            assert got == payload or done.miss is not None
        rig.store.close()
        if not rebuilt:
            shutil.rmtree(rig.data / "index-0")
            disk_of(rig).closed = False
            rig.disk = FakeDisk(disk_of(rig).pages)
            rig.open()
            assert rig.store.statistics().rebuilt


def test_an_unreadable_page_costs_a_rebuild_only_its_record(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(20):
        rig.put(number, b"p" * 5000)
    offset, _ = rig.record_at(7)
    rig.store.close()
    shutil.rmtree(rig.data / "index-0")
    rig.disk = FakeDisk(disk_of(rig).pages)
    disk_of(rig).unreadable = {offset // PAGE_BYTES}
    rig.open()
    assert [number for number in range(20) if rig.get(number)[0].miss] == [7]
    rig.store.close()
    shutil.rmtree(rig.data / "index-0")
    rig.disk = FakeDisk(disk_of(rig).pages | dict.fromkeys(range(2000, 3200), b"\x01" * PAGE_BYTES))
    disk_of(rig).unreadable = set(range(2000, 2000 + SCAN_UNREADABLE_PAGES_MAX + 1))
    with pytest.raises(StorageError, match="cannot be read"):
        rig.open()


def test_a_damaged_header_costs_a_rebuild_only_its_record(tmp_path: Path) -> None:
    for bit in (0, 12 * 8, 110 * 8):  # magic, length, tag
        rig = StoreRig(tmp_path / str(bit), FakeDisk())
        rig.open()
        for number in range(5):
            rig.put(number, b"p")
        disk_of(rig).flip(rig.record_at(2)[0] + bit // 8, 0)
        rig.store.close()
        shutil.rmtree(rig.data / "index-0")
        rig.disk = FakeDisk(disk_of(rig).pages)
        rig.open()
        assert [number for number in range(5) if rig.get(number)[0].miss] == [2]
        rig.store.close()


def test_a_header_inside_a_payload_is_not_taken_for_a_record(tmp_path: Path) -> None:
    """A client stores a complete valid record of its own, including the header page, as a payload."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.put(1, b"genuine")
    offset, size = rig.record_at(1)
    record = b"".join(disk_of(rig).pages[page] for page in range(offset // 4096, (offset + size) // 4096))
    rig.put(2, record)
    outer, _ = rig.record_at(2)
    disk_of(rig).flip(outer, 0)  # its header is lost, so the scan looks at the payload's pages
    rig.store.close()
    shutil.rmtree(rig.data / "index-0")
    rig.disk = FakeDisk(disk_of(rig).pages)
    rig.open()
    assert rig.record_at(1)[0] == offset
    assert rig.store.statistics().blocks == 1
    rig.store.close()


@pytest.mark.parametrize("fault", FAULTS, ids=["EIO", "ENOSPC", "short"])
@pytest.mark.parametrize("persistent", [False, True], ids=["once", "persistent"])
def test_a_fault_at_each_operation_in_turn(tmp_path: Path, fault: int, *, persistent: bool) -> None:
    """From the first opening to the close: nothing is acknowledged that a later opening doesn't have."""

    def at(number: int) -> Callable[[FakeDisk], None]:
        def plant(disk: FakeDisk) -> None:
            if persistent:
                disk.fault_from = (number, fault)
            else:
                disk.faults = {number: fault}

        return plant

    calm = _life(tmp_path / "calm", lambda _: None)
    for number in range(calm):
        _life(tmp_path / f"{number}", at(number))


def _life(data: Path, plant: Callable[[FakeDisk], None]) -> int:
    disk = FakeDisk(seed=3)
    plant(disk)
    rig = StoreRig(data, disk)
    kept: dict[int, bytes] = {}
    try:
        rig.open()
    except StorageError:
        pass
    else:
        for number in range(4):
            payload = bytes([number]) * 5000
            done = rig.put(number, payload, Durability.SYNCED if number % 2 else Durability.WRITTEN)
            if done.error is None and number % 2:
                kept[number] = payload
            done_get, got = rig.get(number)
            assert got == payload or done_get.miss is not None
        with contextlib.suppress(StorageError):
            rig.store.close()
    operations = disk.operations
    rig.disk = disk.after_power_loss(seed=5)
    rig.boot_id = "1" * 36
    rig.open()
    for number, payload in kept.items():
        assert rig.get(number)[1] == payload
    rig.store.close()
    return operations
