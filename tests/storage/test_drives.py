"""Several drives in one store: where blocks and sessions go, and what a failed drive affects."""

from __future__ import annotations

import contextlib
import errno
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import NoSpace, Overloaded, ProtocolError, ReadOnly, StorageError
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    DELETES_QUEUED_MAX,
    DRIVE_CAPACITY_BYTES_MIN,
    GENERATIONS_PER_DRIVE,
    HEADER_BYTES,
    PREFIX_STEP_BLOCKS,
)
from kvstore.miss import MissReason
from kvstore.storage.fsck import check
from kvstore.storage.items import DeleteDone, DeleteItem
from tests.storage.fakes import SHORT, FakeDisk
from tests.storage.pair import fail, holders, homed, two
from tests.storage.rig import TENANT, key

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.storage.rig import StoreRig

BLOCKS = 60


def test_blocks_are_stored_at_home_and_read_from_there(pair: StoreRig) -> None:
    payloads = {number: b"payload of %d" % number for number in range(BLOCKS)}
    for number, payload in payloads.items():
        assert pair.put(number, payload).error is None
    assert all(holders(pair, number) == [pair.home(number)] for number in payloads)
    assert {pair.home(number) for number in payloads} == {0, 1}
    assert all(pair.get(number)[1] == payload for number, payload in payloads.items())
    done, _ = pair.get(BLOCKS)
    assert done.miss is not None
    assert done.miss.reason is MissReason.UNKNOWN
    total = pair.store.statistics()
    assert total.blocks == BLOCKS
    assert total.capacity_bytes == 2 * DRIVE_CAPACITY_BYTES_MIN
    assert [state.failure for state in pair.store.drive_states()] == ["", ""]


def test_no_two_blocks_on_any_drives_have_the_same_generation(pair: StoreRig) -> None:
    for number in range(BLOCKS):
        pair.put(number, b"x")
    entries = pair.store.lookup([(TENANT, key(number)) for number in range(BLOCKS)])
    generations = [entry.generation for entry in entries if entry is not None]
    assert len(set(generations)) == BLOCKS
    for number, generation in enumerate(generations):
        assert generation // GENERATIONS_PER_DRIVE == pair.home(number)
    assert pair.store.names_of(generations) == [(TENANT, key(number)) for number in range(BLOCKS)]
    assert pair.store.names_of([31 * GENERATIONS_PER_DRIVE]) == [None]


def test_evictions_find_their_drives(pair: StoreRig) -> None:
    numbers = [*homed(pair, 0, 3), *homed(pair, 1, 3)]
    for number in numbers:
        pair.put(number, b"x" * 5000)
    generations = [pair.get(number)[0].generation for number in numbers]
    assert pair.store.evict([*generations, 31 * GENERATIONS_PER_DRIVE]) == 6 * 3 * HEADER_BYTES
    pair.settle()
    assert pair.store.statistics().blocks == 0


@pytest.mark.parametrize("position", [0, 1])
def test_a_bad_payload_is_forgotten_by_the_drive_that_has_it(pair: StoreRig, position: int) -> None:
    (number,) = homed(pair, position)
    pair.put(number, b"payload")
    pair.disks[position].flip(pair.record_at(number)[0] + HEADER_BYTES, 0)
    done, _ = pair.get(number)
    assert done.miss is not None
    assert done.miss.reason is MissReason.CORRUPT
    assert pair.store.drives[position].statistics().quarantined == 1
    assert pair.put(number, b"payload").error is None


@pytest.mark.parametrize("fault", [-errno.EIO, -errno.ENOSPC, SHORT])
@pytest.mark.parametrize("position", [0, 1])
def test_a_failed_drive_is_read_and_its_new_blocks_go_elsewhere(
    pair: StoreRig, position: int, fault: int
) -> None:
    before, during, after = homed(pair, position, 3)
    pair.put(before, b"before")
    disk = pair.disks[position]
    disk.faults = {disk.operations: fault}
    error = pair.put(during, b"during").error
    assert isinstance(error, NoSpace if fault == -errno.ENOSPC else ReadOnly)
    assert pair.put(during, b"during").error is None, "the next one goes elsewhere"
    assert pair.put(after, b"after", Durability.SYNCED).error is None
    assert holders(pair, during) == holders(pair, after) == [1 - position]
    assert [pair.get(number)[1] for number in (before, during, after)] == [b"before", b"during", b"after"]
    assert pair.put(before, b"before").error is None, "it is stored, where it is"
    assert holders(pair, before) == [position]
    states = pair.store.drive_states()
    assert states[position].failure
    assert not states[1 - position].failure
    assert pair.store.statistics().takes_puts


def test_a_failed_sync_affects_only_its_own_drive(pair: StoreRig) -> None:
    ours, theirs = homed(pair, 0)[0], homed(pair, 1)[0]
    disk = pair.disks[0]
    disk.faults = {disk.operations + 1: -errno.EIO}
    first = pair.start_put(ours, b"ours", Durability.SYNCED)
    second = pair.start_put(theirs, b"theirs", Durability.SYNCED)
    pair.settle()
    assert isinstance(pair.put_done[first].error, ReadOnly)
    assert pair.put_done[second].error is None
    assert pair.store.statistics().takes_puts


def test_blocks_that_a_failed_drive_will_never_sync_are_synced_elsewhere(pair: StoreRig) -> None:
    written, synced, failing = homed(pair, 0, 3)
    pair.put(synced, b"synced", Durability.SYNCED)
    pair.put(written, b"written")
    disk = pair.disks[0]
    disk.faults = {disk.operations + 1: -errno.EIO}
    assert isinstance(pair.put(failing, b"x", Durability.SYNCED).error, ReadOnly)
    for number in (written, synced):
        payload = pair.get(number)[1]
        assert pair.put(number, payload, Durability.SYNCED).error is None
    assert holders(pair, synced) == [0]
    assert holders(pair, written) == [0, 1]
    assert isinstance(pair.delete(written).error, ReadOnly)
    assert holders(pair, written) == [0], "of the other copy it is gone"


def test_when_all_drives_have_failed_puts_fail_and_blocks_are_read(pair: StoreRig) -> None:
    numbers = [homed(pair, position)[0] for position in (0, 1)]
    for number in numbers:
        pair.put(number, b"payload")
    fail(pair, 0)
    fail(pair, 1)
    assert isinstance(pair.put(5, b"x").error, ReadOnly)
    assert not pair.store.statistics().takes_puts
    assert all(pair.get(number)[1] == b"payload" for number in numbers)


def test_an_expired_block_on_a_failed_drive_is_put_again_elsewhere(pair: StoreRig) -> None:
    (number,) = homed(pair, 0)
    pair.put(number, b"old", expires_ms=pair.clock.now_ms + 5)
    fail(pair, 0)
    pair.clock.now_ms += 5
    done, _ = pair.get(number)
    assert done.miss is not None
    assert done.miss.reason is MissReason.EXPIRED
    assert pair.put(number, b"new").error is None
    assert pair.get(number)[1] == b"new"


def test_a_deletion_is_reported_once_every_drive_has_executed_it(pair: StoreRig) -> None:
    (number,) = homed(pair, 0)
    pair.put(number, b"payload")
    other = homed(pair, 1)[0]
    pair.put(other, b"x")
    pair.store.evict([pair.get(other)[0].generation])
    pair.disks[1].held = {op.tag for op in pair.disks[1].in_flight}  # a wipe that has nothing to do with it
    tag = pair.start_delete(number)
    assert pair.store.lookup([(TENANT, key(number))]) == [None]
    for _ in range(20):
        pair.store.poll()
    assert tag not in pair.delete_done
    pair.disks[1].release()
    pair.settle()
    assert pair.delete_done[tag] == DeleteDone(tag, None, found=True, size_bytes=8192)
    assert pair.delete(number).found is False


def test_a_deletion_fails_while_a_drive_has_failed(pair: StoreRig) -> None:
    """A record of that name may be on the failed drive, and nothing would void it."""
    (number,) = homed(pair, 0)
    pair.put(number, b"payload")
    fail(pair, 1)
    assert isinstance(pair.delete(number).error, ReadOnly)
    assert pair.get_miss(number)


def test_a_batch_of_deletions_with_one_tag_and_repeated_names_is_answered_one_by_one(
    pair: StoreRig,
) -> None:
    for number in range(BLOCKS):
        pair.put(number, b"x")
    done: list[DeleteDone] = []
    items = [DeleteItem(TENANT, key(number), Durability.SYNCED, 7) for number in range(BLOCKS)]
    pair.store.delete(items, done.extend)
    pair.store.delete(items, done.extend)
    pair.settle()
    assert [one.found for one in done].count(True) == BLOCKS
    assert len(done) == 2 * BLOCKS
    assert {one.tag for one in done} == {7}
    assert pair.store.statistics().blocks == 0


def test_a_batch_too_large_for_one_drive_is_refused_as_a_whole(pair: StoreRig) -> None:
    first, second = homed(pair, 0)[0], homed(pair, 1)[0]
    pair.put(second, b"x")
    pair.store.evict([pair.get(second)[0].generation])
    pair.disks[1].held = {op.tag for op in pair.disks[1].in_flight}
    done: list[DeleteDone] = []
    item = DeleteItem(TENANT, key(first), Durability.WRITTEN, 0)
    for _ in range(DELETES_QUEUED_MAX // BATCH_BLOCKS_MAX):
        pair.store.delete([item] * BATCH_BLOCKS_MAX, done.extend)
    for _ in range(50):
        pair.store.poll()
    assert pair.store.drives[0].deletes_left == DELETES_QUEUED_MAX, "one drive has done its part"
    with pytest.raises(Overloaded):
        pair.store.delete([item], done.extend)
    assert pair.store.drives[0].deletes_left == DELETES_QUEUED_MAX, "and has not begun what was refused"
    with pytest.raises(ProtocolError):
        pair.store.delete([item] * (BATCH_BLOCKS_MAX + 1), done.extend)
    pair.disks[1].release()
    pair.settle()
    assert len(done) == DELETES_QUEUED_MAX


@pytest.mark.parametrize("hole", [None, 0, 1, PREFIX_STEP_BLOCKS - 1, PREFIX_STEP_BLOCKS, 299])
def test_the_prefix_runs_over_all_drives_and_ends_at_the_first_hole(pair: StoreRig, hole: int | None) -> None:
    for number in range(300):
        pair.start_put(number, b"x", expires_ms=pair.clock.now_ms + 5 if number == hole else 0)
        if number % 50 == 49:
            pair.settle()
    keys = [key(number) for number in range(300)]
    pair.clock.now_ms += 5
    assert pair.store.prefix(TENANT, keys) == (300 if hole is None else hole)
    assert pair.store.prefix(TENANT, []) == 0
    assert pair.store.prefix(b"somebody--else!!", keys) == 0


def test_callbacks_that_call_the_store_again_are_served(pair: StoreRig) -> None:
    """Reports of one drive cause work on the other, whose descriptor has not been polled yet."""
    numbers = [homed(pair, 0)[0], homed(pair, 1)[0]]
    for number in numbers:
        pair.put(number, b"x")
    done: list[bool] = []

    def again(first: object) -> None:
        assert first
        pair.store.delete([DeleteItem(TENANT, key(numbers[1]), Durability.SYNCED, 1)], last)

    def last(answers: object) -> None:
        assert answers
        done.append(True)

    pair.store.delete([DeleteItem(TENANT, key(numbers[0]), Durability.SYNCED, 0)], again)
    while not done:
        pair.poll()


def test_a_callback_that_raises_loses_no_answers_of_others(pair: StoreRig) -> None:
    done: list[DeleteDone] = []

    def raising(answers: object) -> None:
        raise ValueError(answers)

    pair.store.delete([DeleteItem(TENANT, key(1), Durability.WRITTEN, 0)], raising)
    pair.store.delete([DeleteItem(TENANT, key(2), Durability.WRITTEN, 1)], done.extend)
    with pytest.raises(ValueError, match="DeleteDone"):
        pair.settle()
    pair.settle()
    assert [one.tag for one in done] == [1]


def test_close_reports_results_that_only_wait_for_a_poll(tmp_path: Path) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    rig.put(1, b"x")
    tag = rig.start_delete(1, Durability.WRITTEN)
    while any(drive.is_busy for drive in rig.store.drives):
        for drive in rig.store.drives:
            drive.poll()  # without the store, which would report it
    assert tag not in rig.delete_done
    rig.store.close()
    assert rig.delete_done[tag].found


def test_close_finishes_deletions_and_everything_is_clean_afterwards(tmp_path: Path) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    for number in range(BLOCKS):
        rig.put(number, b"x")
    tags = [rig.start_delete(number, Durability.SYNCED) for number in range(BLOCKS)]
    rig.store.close()
    assert all(rig.delete_done[tag].error is None for tag in tags)
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    rig.boot_id = "1" * 36
    rig.open()
    assert not rig.store.statistics().rebuilt
    assert rig.store.statistics().blocks == 0
    rig.store.close()
    with pytest.raises(StorageError, match="closed"):
        rig.put(1, b"x")


@pytest.mark.parametrize("position", [0, 1])
@pytest.mark.parametrize(
    ("fault", "persistent"),
    [(-errno.EIO, False), (-errno.EIO, True), (-errno.ENOSPC, False), (SHORT, False)],
    ids=["EIO once", "EIO from then on", "ENOSPC once", "short once"],
)
def test_a_fault_at_each_operation_of_one_drive_in_turn(
    tmp_path: Path, fault: int, position: int, *, persistent: bool
) -> None:
    """Nothing is acknowledged that a later opening doesn't have, and nothing deleted comes back."""

    def at(number: int) -> Callable[[FakeDisk], None]:
        def plant(disk: FakeDisk) -> None:
            if persistent:
                disk.fault_from = (number, fault)
            else:
                disk.faults = {number: fault}

        return plant

    calm = _life(tmp_path / "calm", position, lambda _: None)
    for number in range(calm):
        _life(tmp_path / f"{number}", position, at(number))


def _life(data: Path, position: int, plant: Callable[[FakeDisk], None]) -> int:
    rig = two(data, seed=3)
    rig.open()  # so that both drives hold something when the fault comes
    first, second = homed(rig, 0, 4), homed(rig, 1, 4)
    for number in (*first[:2], *second[:2]):
        rig.put(number, b"deleted later", Durability.SYNCED)
    rig.store.close()
    rig.disks = [FakeDisk(disk.pages, seed=number) for number, disk in enumerate(rig.disks)]
    plant(rig.disks[position])
    deleted: list[int] = []
    safe: dict[int, bytes] = {}
    session: list[int] | None = None
    with contextlib.suppress(StorageError):
        rig.open()
        with rig.store:
            deleted = [
                number
                for number in (*first[:2], *second[:2])
                if rig.delete(number, Durability.SYNCED).error is None
            ]
            safe = _put_twice(rig, [*first[2:], *second[2:]])
            for _ in range(2):
                if safe and rig.append(1, list(safe), Durability.SYNCED).error is None:
                    session = (session or []) + list(safe)
    operations = rig.disks[position].operations
    rig.disks = [disk.after_power_loss(seed=5) for disk in rig.disks]
    rig.boot_id = "1" * 36
    rig.open()
    assert all(rig.get(number)[1] == payload for number, payload in safe.items())
    assert all(rig.get_miss(number) for number in deleted)
    if session is not None:
        assert rig.session(1) == session
    rig.store.close()
    return operations


def _put_twice(rig: StoreRig, numbers: list[int]) -> dict[int, bytes]:
    """Put blocks, if necessary a second time on another drive; returns the stored ones."""
    safe = {}
    for number in numbers:
        payload = bytes([number % 251]) * 5000
        if any(rig.put(number, payload, Durability.SYNCED).error is None for _ in range(2)):
            safe[number] = payload
        done, got = rig.get(number)
        assert got == payload or done.miss is not None
    return safe


def test_fsck_checks_and_repairs_each_drive_by_itself(tmp_path: Path) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    for number in range(BLOCKS):
        rig.put(number, b"payload of %d" % number)
    rig.append(1, range(BLOCKS))
    rig.store.close()
    shutil.rmtree(rig.data / "index-1")

    def checked(*, repair: bool = False) -> list[str]:
        rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
        report = check(rig.data, source=rig.source(), boot_id=rig.boot_id, repair=repair, payloads=True)
        assert (report.counts["blocks"], report.counts["sessions"]) == (BLOCKS, 1)
        assert report.counts["missing blocks of sessions"] == 0
        return report.left if repair else report.damage

    before = dict(rig.disks[0].pages)
    assert checked() == ["unusable index"]
    assert checked(repair=True) == []
    assert rig.disks[0].pages == before, "the drive whose index was right is left alone"
    assert checked() == []
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    rig.open()
    assert not rig.store.statistics().rebuilt
    assert all(rig.get(number)[1] == b"payload of %d" % number for number in range(BLOCKS))
    rig.store.close()


def test_fsck_continues_without_a_drive_that_cannot_be_opened(tmp_path: Path) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    for number in range(BLOCKS):
        rig.put(number, b"x")
    theirs = sum(rig.home(number) == 1 for number in range(BLOCKS))
    rig.store.close()
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    rig.away = {1}
    report = check(rig.data, source=rig.source(), boot_id=rig.boot_id)
    assert report.damage == ["unusable drives"]
    assert report.counts["blocks"] == BLOCKS - theirs


def test_random_completion_order_over_two_drives_serves_every_get(tmp_path: Path) -> None:
    rig = two(tmp_path / "data", seed=9)
    rig.open()
    rng = random.Random(9)
    payloads = {number: rng.randbytes(rng.choice([10, 5000, 30_000])) for number in range(BLOCKS)}
    for number, payload in payloads.items():
        rig.start_put(number, payload)
        if number % 20 == 19:
            rig.settle()
    rig.settle()
    items = [rig.start_get(number) for number in range(BLOCKS)]
    rig.settle()
    assert all(rig.get_done[item.tag].miss is None for item in items)
    rig.store.close()
