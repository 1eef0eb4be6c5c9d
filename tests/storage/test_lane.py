"""A lane beside a store's own writes: in order, reported once, and recovered after SIGKILL."""

from __future__ import annotations

import errno
import logging
import os
import random
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.durability import Durability
from kvstore.errors import ReadOnly
from kvstore.limits import PAGE_BYTES
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.eviction.types import Guard
from kvstore.storage.index import Index
from kvstore.storage.items import SessionStep
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, StoreRig, key

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from numpy.typing import NDArray

    from kvstore.storage.eviction_events import Held
    from nic_offload.lane import Ground
    from tests.storage.fake_lane import FakeLane

SEEDS = int(os.environ.get("TRIGGERKV_LANE_SEEDS", "75"))  # `make crash`: 2,000
BLOCKS_MAX = 400  # that a drive could have
LENGTH = 5000


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 16)
    rig = StoreRig(tmp_path, FakeDisk(seed=1))
    rig.open()
    rig.use_lanes(1)
    yield rig
    if rig.disk is not None:
        rig.disk.release()
    rig.close()


def lane_of(rig: StoreRig) -> FakeLane:
    return rig.lanes[0]


def payload(number: int) -> bytes:
    return random.Random(number).randbytes(LENGTH)


def land(rig: StoreRig, number: int) -> int:
    """Land a block that the lane takes."""
    before = len(lane_of(rig).records)
    tag = rig.start_put(number, payload(number))
    assert len(lane_of(rig).records) == before + 1
    return tag


def end_all(rig: StoreRig) -> None:
    """End the lane's writes; it reports them."""
    for _ in range(200):
        lane_of(rig).step()


def is_stored(rig: StoreRig, number: int) -> bool:
    return rig.store.lookup([(TENANT, key(number))])[0] is not None


def kill_and_open(rig: StoreRig, seed: int = 0) -> None:
    rig.kill()
    rig.disks = [disk.after_kill(seed) for disk in rig.disks]
    rig.open()


def test_unnoted_acknowledged_blocks_are_found_after_sigkill(
    rig: StoreRig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put(100, payload(100))
    tags = [land(rig, number) for number in range(8)]
    end_all(rig)
    assert lane_of(rig).told.keys() == set(tags)
    assert not is_stored(rig, 0)
    caplog.set_level(logging.WARNING)
    kill_and_open(rig)
    assert not caplog.messages, "nothing was built anew"
    for number in [100, *range(8)]:
        assert rig.get(number)[1] == payload(number)


def test_ground_is_returned_with_all_unused_pages(rig: StoreRig) -> None:
    free = rig.drive._extents.free_pages
    ground = lane_of(rig).next.pages
    assert ground > 100
    for number in range(3):
        land(rig, number)
    end_all(rig)
    rig.drive.seal()
    rig.catch_up()
    rig.settle()
    assert rig.drive._extents.free_pages == free + ground - 3 * 3
    assert all(is_stored(rig, number) for number in range(3))
    assert not any(rig.drive._writes.ground.lent)


def test_the_next_ground_is_ready_before_the_first_is_used_up_and_no_block_waits_at_its_end(
    rig: StoreRig,
) -> None:
    lane = lane_of(rig)
    free = rig.drive._extents.free_pages + lane.next.pages
    grounds = set()
    for number in range(150):
        land(rig, number)  # the lane takes each
        rig.drive.lend()
        grounds.add(lane.next.page)
        assert lane.next.records > 0
        if number == 20:
            end_all(rig)
            assert len(lane.told) == 21
            rig.catch_up()
    assert len(grounds) >= 2
    end_all(rig)
    assert len(lane.told) == 129, "on all of the grounds, before we have taken note of any end"
    rig.catch_up()
    rig.drive.seal()
    assert rig.drive._extents.free_pages == free - 150 * 3
    rig.settle()
    assert all(is_stored(rig, number) for number in range(150))


def test_a_larger_ground_replaces_a_next_one_that_is_too_small(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    lane, drive, extents = lane_of(rig), rig.drive, rig.drive._extents
    free, first = extents.free_pages + lane.next.pages, lane.next.page
    land(rig, 0)
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 64)
    drive.lend()
    small = lane.next
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 16)
    lane.wanted_pages = small.pages + 1
    drive.lend()
    assert lane.next.pages > small.pages
    lane.wanted_pages = 0
    lane.ground = lane.ground._replace(records=0)  # the first is used up
    land(rig, 1)
    assert lane.ground.pages > small.pages
    drive.lend()
    drive.seal()
    assert extents.free_pages == free - 2 * 3
    end_all(rig)
    rig.catch_up()
    rig.settle()
    assert is_stored(rig, 0)
    assert is_stored(rig, 1)
    assert first == rig.record_at(0)[0] // PAGE_BYTES
    assert not rig.drive._writes.ground.lent


LARGE = payload(0) * 12


@pytest.fixture
def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
    """A drive that has as little free as it keeps, and a lane without ground."""
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 16)
    rig = StoreRig(tmp_path, FakeDisk(seed=1))
    rig.open()
    for number in range(BLOCKS_MAX):
        rig.put(number, LARGE)
        if rig.drive._extents.free_pages < rig.drive.keeping.marks.high_pages:
            break
    rig.use_lanes(1)
    rig.drive.seal()
    yield rig
    rig.close()


def take_all_free(rig: StoreRig) -> None:
    rig.settle()
    while longest := rig.drive._extents.longest:
        rig.drive._extents.allocate(longest)


def lease_all(rig: StoreRig) -> list[Held]:
    """Guard all blocks and take all free pages, so that nothing can become free."""
    names = [(TENANT, key(number)) for number in range(BLOCKS_MAX)]
    take_all_free(rig)
    return [one for one in rig.drive.hold(names, Guard.LEASE) if one]


def test_a_full_drive_makes_room_for_its_lane(full: StoreRig) -> None:
    """A block that finds no ground waits for it: none is left to Python."""
    lane, drive = lane_of(full), full.drive
    took = 0
    while took * 3 < 3 * drive.keeping.marks.high_pages:
        if max(lane.ground.pages, lane.next.pages) < 3:
            lane.wanted_pages = 3
            drive.lend()
            assert lane.expects
            full.poll_once()
            lane.wanted_pages = 0
        else:
            land(full, 10_000 + took)
            took += 1
    end_all(full)
    full.catch_up()
    assert all(is_stored(full, 10_000 + number) for number in range(took))


def test_room_is_made_for_a_lane_at_once(full: StoreRig) -> None:
    take_all_free(full)
    assert not full.drive._room.is_being_made
    full.drive.lend()
    assert lane_of(full).expects


def test_no_block_waits_for_ground_while_guards_keep_it(full: StoreRig) -> None:
    lane, drive = lane_of(full), full.drive
    held = lease_all(full)
    drive.lend()
    assert not lane.expects
    drive.release(held, Guard.LEASE)
    drive.lend()
    assert (lane.expects, lane.next.pages) == (True, 0)
    while not lane.next.pages:
        full.poll()  # it gets some as soon as there is any


def test_no_block_waits_for_ground_while_others_wait_for_room(full: StoreRig) -> None:
    """They are first, and would take it back."""
    lane, drive = lane_of(full), full.drive
    held = lease_all(full)
    tag = full.start_put(20_000, payload(1), Durability.SYNCED)
    full.poll_once()
    drive.release(held, Guard.LEASE)
    drive.lend()
    assert drive._writes.waiting
    assert drive._room.is_being_made
    assert not lane.expects
    full.settle()
    assert full.put_done[tag].error is None
    drive.lend()
    assert lane.expects


def test_fragmented_free_space_is_not_granted_to_a_lane(rig: StoreRig) -> None:
    lane, drive = lane_of(rig), rig.drive
    drive.seal()
    extents = drive._extents
    pieces = []
    while (page := extents.allocate(3)) is not None:
        pieces.append(page)
    for page in pieces[::2]:
        extents.release(page, 3)
    drive.lend(record_pages=3)
    assert extents.free_pages > drive.keeping.marks.high_pages
    assert (lane.next.pages, lane.expects) == (0, False)
    for page in pieces[1:120:2]:
        extents.release(page, 3)
    drive.lend(record_pages=3)
    assert lane.next.pages > 100


def test_a_block_too_large_for_any_ground_does_not_wait_for_it(rig: StoreRig) -> None:
    lane, drive = lane_of(rig), rig.drive
    lane.wanted_pages = 10 * lane.next.pages
    drive.lend()
    assert not lane.expects
    lane.wanted_pages = 0
    drive.lend()
    assert lane.expects


def test_writes_of_lane_and_store_are_reported_in_one_order(rig: StoreRig) -> None:
    """The lane reports nothing while one of our writes with a lower generation is in flight."""
    land(rig, 0)
    disk = rig.disk
    assert disk is not None
    ours = rig.start_put(1, payload(1), Durability.SYNCED)
    disk.held = {op.tag for op in disk.in_flight if op.tag < 1 << 40}
    rig.drive.lend()
    late = land(rig, 2)
    end_all(rig)
    rig.catch_up()
    rig.store.poll()
    assert is_stored(rig, 0), "it came before"
    end_all(rig)
    assert late not in rig.put_done
    assert not lane_of(rig).told
    disk.release()
    rig.settle()
    assert ours in rig.put_done
    end_all(rig)
    rig.catch_up()
    assert rig.put_done[late].error is None
    generations = [
        entry.generation for entry in rig.store.lookup([(TENANT, key(one)) for one in range(3)]) if entry
    ]
    assert generations == sorted(generations)


def test_after_a_failed_write_the_lane_acknowledges_nothing(rig: StoreRig) -> None:
    disk = rig.disk
    assert disk is not None
    rig.start_put(1, payload(1), Durability.SYNCED)
    rig.drive.lend()
    late = land(rig, 2)
    disk.faults = {disk.operations: -errno.EIO}
    rig.store.poll()
    assert rig.drive.failure is not None
    rig.settle()
    assert isinstance(rig.put_done[late].error, ReadOnly)
    assert late not in lane_of(rig).told
    assert not is_stored(rig, 2)
    tag = rig.start_put(3, payload(3))
    rig.settle()
    assert isinstance(rig.put_done[tag].error, ReadOnly)


def test_a_failed_write_of_the_lanes_stops_the_drive(rig: StoreRig) -> None:
    disk = rig.disk
    assert disk is not None
    first = land(rig, 0)
    end_all(rig)
    disk.fault_from = (disk.operations, -errno.EIO)
    second = land(rig, 1)
    rig.settle()
    assert rig.put_done[first].error is None
    assert isinstance(rig.put_done[second].error, ReadOnly)
    assert rig.drive.failure is not None


def test_a_deletion_waits_for_blocks_on_the_lane(rig: StoreRig) -> None:
    land(rig, 0)
    tag = rig.start_delete(0)
    rig.store.poll()
    assert tag not in rig.delete_done
    rig.settle()
    assert rig.delete_done[tag].error is None
    assert not is_stored(rig, 0)
    kill_and_open(rig)
    assert not is_stored(rig, 0)


def test_a_put_of_a_name_on_the_lane_shares_its_outcome(rig: StoreRig) -> None:
    land(rig, 0)
    writes = rig.disk.kinds.count(DiskOpKind.WRITE) if rig.disk else 0
    tag = rig.start_put(0, payload(0), Durability.SYNCED)
    rig.settle()
    assert rig.put_done[tag].error is None
    assert rig.disk is not None
    assert rig.disk.kinds.count(DiskOpKind.WRITE) == writes + 1


def test_a_lane_that_no_longer_reports_fails_its_blocks_and_nothing_waits(rig: StoreRig) -> None:
    tag = land(rig, 0)
    rig.lanes[0].report_begun()
    rig.lanes = []
    rig.store.close()
    assert isinstance(rig.put_done[tag].error, ReadOnly)
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    rig.open()


@pytest.mark.parametrize("first", range(0, SEEDS, 25))
def test_crashes_of_a_lane(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 64)
    for seed in range(first, first + 25):
        crashes(tmp_path / str(seed), seed)


def crashes(data: Path, seed: int) -> None:
    """Crash with fresh names: acknowledged blocks survive any kill, and deleted ones stay deleted."""
    dice = random.Random(seed)
    rig = StoreRig(data, FakeDisk(seed=seed))
    there: set[int] = set()
    gone: set[int] = set()
    numbers = iter(range(10_000))
    for life in range(4):
        rig.open()
        for number in there:
            assert rig.get(number)[1] == payload(number), f"seed {seed}, life {life}: {number}"
        assert not any(is_stored(rig, number) for number in gone), f"seed {seed}, life {life}"
        rig.use_lanes(seed * 10 + life)
        puts: dict[int, int] = {}
        deletes: dict[int, int] = {}
        for _ in range(dice.randrange(60)):
            match dice.randrange(10):
                case 0 if there:
                    number = dice.choice(sorted(there))
                    there.discard(number)
                    deletes[rig.start_delete(number)] = number
                case 1:
                    rig.start_step(1, SessionStep.APPEND, keys=sorted(there)[:3]) if there else None
                case 2:
                    number = next(numbers)
                    puts[rig.start_put(number, payload(number), Durability.SYNCED)] = number
                case 3 | 4:
                    rig.poll_once()
                case 5:
                    rig.drive.lend()
                case _:
                    number = next(numbers)
                    puts[rig.start_put(number, payload(number))] = number
            lane_of(rig).step()
            rig._hear_lanes()
            there |= {puts.pop(tag) for tag in list(puts) if tag in rig.put_done}
            gone |= {deletes.pop(tag) for tag in list(deletes) if tag in rig.delete_done}
        rig.kill()
        rig.disks = [disk.after_kill(seed + life) for disk in rig.disks]
    for disk in rig.disks:
        disk.close()


def test_pages_of_a_lane_count_as_pages(rig: StoreRig) -> None:
    land(rig, 0)
    rig.settle()
    offset, size = rig.record_at(0)
    assert (offset % PAGE_BYTES, size) == (0, 3 * PAGE_BYTES)


def test_ground_is_noted_until_the_index_has_its_blocks(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    ground, noted = rig.drive._writes.ground, []
    note, publish = ground._note_lent, Index.publish_rows
    places: set[int] = {lent.place for lent in ground.lent}

    def note_lent(place: int, of: Ground | None) -> None:
        (places.discard if of is None else places.add)(place)
        note(place, of)

    def published(index: Index, rows: NDArray[Any]) -> None:
        generations = rows["generation"].tolist()
        for one in generations:
            assert any(one < lent.until and lent.place in places for lent in ground.lent)
        noted.extend(generations)
        publish(index, rows)

    monkeypatch.setattr(ground, "_note_lent", note_lent)
    monkeypatch.setattr(Index, "publish_rows", published)
    for number in range(8):
        land(rig, number)
    end_all(rig)
    rig.drive.seal()
    rig.take_written()
    assert len(noted) == 8
    assert not places
    assert all(is_stored(rig, number) for number in range(8))
