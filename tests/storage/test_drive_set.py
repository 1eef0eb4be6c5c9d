"""Drives that are added, absent, back, foreign, blank or broken: which of them a store trusts."""

from __future__ import annotations

import errno
import json
import os
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.config import DriveSpec
from kvstore.durability import Durability
from kvstore.errors import ConfigError, Corrupt, ForeignDrive, StorageError, WrongVersion
from kvstore.limits import DRIVE_CAPACITY_BYTES_MIN, DRIVES_MAX, PAGE_BYTES
from kvstore.storage.drive_set import SET_NAME, DriveSet, plan, read_set, write_set
from kvstore.storage.fsck import check
from kvstore.wire.record import Superblock
from tests.storage.fakes import FakeDisk
from tests.storage.rig import StoreRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS = 40
STORE = b"\xa1" * 16
PAYLOADS = {number: b"payload of %d" % number for number in range(BLOCKS)}


def superblock(number: int, set_number: int, drives: int, store: bytes = STORE) -> Superblock:
    return Superblock(
        store, bytes([number]) * 16, number, b"s" * 32, 16 << 20, 5, 0, 1, 0, 0, 0, set_number, drives
    )


def fresh(disks: list[FakeDisk]) -> list[FakeDisk]:
    """The same drives, to be opened again."""
    return [FakeDisk(disk.pages, capacity=disk.capacity_bytes) for disk in disks]


def reopened(rig: StoreRig, *, without: tuple[int, ...] = ()) -> None:
    rig.store.close()
    opened(rig, without=without)


def opened(rig: StoreRig, *, without: tuple[int, ...] = ()) -> None:
    rig.disks = fresh(rig.disks)
    rig.away = set(without)
    rig.open(without=without)


def refused(rig: StoreRig, kind: type[Exception], match: str, *, without: tuple[int, ...] = ()) -> None:
    """A refused opening changes nothing."""
    before = [dict(disk.pages) for disk in rig.disks]
    rig.disks = fresh(rig.disks)
    with pytest.raises(kind, match=match) as caught:
        rig.open(without=without)
    assert type(caught.value) is kind
    assert [disk.pages for disk in rig.disks] == before
    rig.disks = fresh(rig.disks)


def stored(rig: StoreRig) -> set[int]:
    found = set()
    for number, payload in PAYLOADS.items():
        done, got = rig.get(number)
        if done.miss is None:
            assert got == payload
            found.add(number)
    return found


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    """A store of two drives with blocks on both, a session, and its set's number 1."""
    rig = StoreRig(tmp_path / "data", disks=[FakeDisk(), FakeDisk(seed=1)])
    rig.open()
    for number, payload in PAYLOADS.items():
        rig.put(number, payload)
    rig.append(1, range(BLOCKS))
    yield rig
    rig.store.close()


def on(rig: StoreRig, position: int) -> set[int]:
    return {number for number in PAYLOADS if rig.home(number) == position}


def a_drive_away(rig: StoreRig, away: int) -> set[int]:
    """Leave a drive out and delete a block of each drive; returns the blocks left on the other."""
    theirs, ours = on(rig, away), on(rig, 1 - away)
    rig.store.close()
    rig.disks = fresh(rig.disks)
    rig.away = {away}
    with pytest.raises(StorageError, match=f"--without-drive {away}"):
        rig.open()
    opened(rig, without=(away,))
    assert stored(rig) == ours
    for number in (min(theirs), min(ours)):
        assert rig.delete(number).error is None
    return ours - {min(ours)}


@pytest.mark.parametrize("away", [0, 1])
def test_without_a_drive_its_blocks_are_misses_and_the_others_hits(rig: StoreRig, away: int) -> None:
    left = a_drive_away(rig, away)
    assert stored(rig) == left
    states = rig.store.drive_states()
    assert [state.statistics is None for state in states] == [number == away for number in (0, 1)]
    assert "left out" in states[away].failure
    assert rig.put(BLOCKS + 1, b"x").error is None


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize("away", [0, 1])
def test_a_returning_drive_is_emptied_so_nothing_deleted_comes_back(
    rig: StoreRig, away: int, *, rebuilt: bool
) -> None:
    """It is voided: it doesn't know which blocks were deleted, replaced or restarted without it."""
    theirs = on(rig, away)
    left = a_drive_away(rig, away)
    elsewhere = min(theirs - {min(theirs)})
    rig.put(elsewhere, PAYLOADS[elsewhere])
    reopened(rig)
    if rebuilt:
        rig.store.close()
        for number in (0, 1):
            shutil.rmtree(rig.data / f"index-{number}")
        opened(rig)
        assert rig.store.statistics().rebuilt
    assert stored(rig) == left | {elsewhere}
    assert rig.store.drives[away].statistics().blocks == 0
    for number in theirs - {elsewhere}:
        assert rig.put(number, PAYLOADS[number]).error is None
    assert rig.store.drives[away].statistics().blocks > 0
    reopened(rig)
    assert not rig.store.statistics().rebuilt
    assert stored(rig) == left | theirs


def test_a_session_restarted_while_its_drive_was_away_is_the_valid_one(rig: StoreRig) -> None:
    away = rig.store._placement.order(b"tenant-of-tests!", b"a-user-of-tests!")[0]
    a_drive_away(rig, away)
    number = min(stored(rig))
    assert rig.session(1) is None
    assert rig.append(1, [number]).error is None
    reopened(rig)
    assert rig.session(1) == [number]
    assert rig.append(1, [number]).blocks == 2


def test_the_old_blocks_of_a_returned_drive_are_void_after_power_loss_at_any_write(tmp_path: Path) -> None:
    """A fault at each write of the opening that readmits it, on either drive, and power loss."""
    for position in (0, 1):
        for number in range(12):
            case = StoreRig(tmp_path / f"{position}-{number}", disks=[FakeDisk(), FakeDisk(seed=1)])
            case.open()
            for one, payload in PAYLOADS.items():
                case.put(one, payload, Durability.SYNCED)
            left = a_drive_away(case, 1)
            case.store.close()
            case.away = set()
            case.disks = fresh(case.disks)
            disk = case.disks[position]
            disk.fault_from = (number, -errno.EIO)
            try:
                case.open()
            except StorageError:
                pass
            else:
                case.kill()
            case.disks = [one.after_power_loss(number) for one in case.disks]
            case.boot_id = f"{number + 1:036d}"
            case.open()
            assert stored(case) == left
            case.store.close()


def test_nothing_is_lost_if_leaving_a_drive_out_fails_at_any_write(tmp_path: Path) -> None:
    """The set without it was never valid, so it has missed nothing."""
    failed = 0
    for number in range(12):
        case = StoreRig(tmp_path / f"{number}", disks=[FakeDisk(), FakeDisk(seed=1)])
        case.open()
        for one, payload in PAYLOADS.items():
            case.put(one, payload, Durability.SYNCED)
        case.store.close()
        case.disks = fresh(case.disks)
        case.disks[0].fault_from = (number, -errno.EIO)
        before = read_set(case.data)
        try:
            case.open(without=(1,))
        except StorageError:
            failed += 1
        else:
            case.kill()
        counts = read_set(case.data) != before
        case.disks = [one.after_power_loss(number) for one in case.disks]
        case.boot_id = f"{number + 1:036d}"
        case.open()
        assert stored(case) == (_held_by(case, 0) if counts else set(PAYLOADS))
        assert (case.store.drives[1].statistics().blocks == 0) is counts
        case.store.close()
    assert failed > 4


def _held_by(rig: StoreRig, position: int) -> set[int]:
    names = [(b"tenant-of-tests!", number.to_bytes(32, "little")) for number in PAYLOADS]
    entries = rig.store.drives[position].lookup(names)
    return {number for number, entry in zip(PAYLOADS, entries, strict=True) if entry is not None}


def test_without_the_folders_file_no_drive_is_left_out_and_all_are_trusted(rig: StoreRig) -> None:
    rig.store.close()
    (rig.data / SET_NAME).unlink()
    refused(rig, ConfigError, "Start once with all of them", without=(1,))
    opened(rig)
    assert stored(rig) == set(PAYLOADS)
    assert read_set(rig.data) is not None


def test_without_the_folders_file_the_drives_tell_which_of_them_is_stale(rig: StoreRig) -> None:
    left = a_drive_away(rig, 1)
    rig.store.close()
    (rig.data / SET_NAME).write_text("{half a li")
    opened(rig)
    assert stored(rig) == left


def test_a_stale_drive_does_not_continue_by_itself(rig: StoreRig) -> None:
    left = a_drive_away(rig, 1)
    rig.store.close()
    rig.away = {0}
    refused(rig, StorageError, "None of the drives that were in use last", without=(0,))
    rig.away = set()
    opened(rig)
    assert stored(rig) == left


def test_a_drive_that_can_be_opened_is_left_out_if_requested(rig: StoreRig) -> None:
    ours = on(rig, 0)
    rig.store.close()
    rig.disks = fresh(rig.disks)
    rig.open(without=(1,))
    assert stored(rig) == ours
    assert rig.disks[1].operations == 0, "it is not even looked at"


@pytest.mark.parametrize("number", [2, -1])
def test_a_drive_that_the_store_lacks_cannot_be_left_out(rig: StoreRig, number: int) -> None:
    rig.store.close()
    refused(rig, ConfigError, f"There is no drive {number} to leave out", without=(number,))
    opened(rig)


def test_a_drive_of_another_store_is_refused(rig: StoreRig, tmp_path: Path) -> None:
    other = StoreRig(tmp_path / "other", disks=[FakeDisk(), FakeDisk()])
    other.open().close()
    rig.store.close()
    ours = rig.disks[1]
    rig.disks[1] = other.disks[1]
    refused(rig, ForeignDrive, "Drive 1 cannot be used. It belongs to the store")
    opened(rig, without=(1,))
    rig.store.close()
    rig.disks[1] = ours
    rig.away = set()
    opened(rig)


def test_drives_under_each_others_names_are_refused(rig: StoreRig) -> None:
    rig.store.close()
    rig.disks.reverse()
    refused(rig, ForeignDrive, "under the wrong name")
    rig.disks.reverse()
    opened(rig)
    assert stored(rig) == set(PAYLOADS)


@pytest.mark.parametrize("number", [0, 1])
def test_a_drive_with_a_damaged_superblock_affects_only_itself(rig: StoreRig, number: int) -> None:
    ours = on(rig, 1 - number)
    rig.store.close()
    for copy in (0, 1):
        rig.disks[number].pages[copy] = b"garbage!" * 512
    refused(rig, Corrupt, f"Drive {number} cannot be used.*--without-drive {number}")
    opened(rig, without=(number,))
    assert stored(rig) == ours


def test_a_drive_of_another_version_is_named(rig: StoreRig) -> None:
    rig.store.close()
    for copy in (0, 1):
        page = bytearray(rig.disks[1].pages[copy])
        page[8] = 99
        rig.disks[1].pages[copy] = bytes(page)
    refused(rig, WrongVersion, "Drive 1 cannot be used. The drive has format version 99")
    opened(rig, without=(1,))


def test_a_drive_that_has_become_blank_is_not_formatted_unless_its_index_is_removed(rig: StoreRig) -> None:
    ours = on(rig, 0)
    rig.store.close()
    rig.disks[1] = FakeDisk()
    refused(rig, Corrupt, "It is blank, but the folder has its index")
    shutil.rmtree(rig.data / "index-1")
    opened(rig)
    assert stored(rig) == ours
    assert len(rig.store.drives) == 2


def test_a_drive_that_fails_during_opening_is_named(rig: StoreRig) -> None:
    rig.kill()
    rig.disks = fresh(rig.disks)
    rig.disks[1].fault_from = (2, -errno.EIO)  # behind the reading of its superblock
    with pytest.raises(StorageError, match="Drive 1 cannot be used"):
        rig.open()
    opened(rig, without=(1,))


def test_an_added_drive_takes_its_share_of_new_blocks(rig: StoreRig) -> None:
    rig.store.close()
    rig.disks.append(FakeDisk(seed=2))
    opened(rig)
    assert stored(rig) == set(PAYLOADS), "blocks that belong on the new drive now are found where they are"
    assert rig.session(1) == list(range(BLOCKS))
    moved = on(rig, 2)
    assert moved
    for number in moved:
        assert rig.put(number, PAYLOADS[number]).error is None
    assert rig.store.drives[2].statistics().blocks == 0, "and are not put a second time"
    for number in range(1000, 1000 + BLOCKS):
        rig.put(number, b"x")
    assert rig.store.drives[2].statistics().blocks == sum(
        rig.home(number) == 2 for number in range(1000, 1000 + BLOCKS)
    )
    for number in moved:
        assert rig.delete(number).found
    reopened(rig)
    assert stored(rig) == set(PAYLOADS) - moved
    assert not rig.store.statistics().rebuilt


def test_adding_a_drive_that_fails_at_any_write_loses_nothing(tmp_path: Path) -> None:
    for position in (0, 1):
        for number in range(8):
            case = StoreRig(tmp_path / f"{position}-{number}", FakeDisk())
            case.open()
            for one, payload in PAYLOADS.items():
                case.put(one, payload, Durability.SYNCED)
            case.store.close()
            case.disks = [*fresh(case.disks), FakeDisk(seed=2)]
            case.disks[position].fault_from = (number, -errno.EIO)
            try:
                case.open()
            except StorageError:
                pass
            else:
                case.kill()
            case.disks = [one.after_power_loss(number) for one in case.disks]
            case.boot_id = f"{number + 1:036d}"
            case.open()
            assert stored(case) == set(PAYLOADS)
            case.store.close()


def test_fsck_does_not_examine_a_drive_that_was_left_out(rig: StoreRig) -> None:
    left = a_drive_away(rig, 1)
    rig.store.close()
    rig.disks = fresh(rig.disks)
    rig.away = set()
    report = check(rig.data, source=rig.source(), boot_id=rig.boot_id)
    assert report.damage == []
    assert report.counts["drives that were left out, and will be voided"] == 1
    assert report.counts["blocks"] == len(left)
    rig.disks = fresh(rig.disks)
    rig.open()


# --- the rules by themselves


def test_a_complete_set_is_opened_as_it_is() -> None:
    found = {number: superblock(number, 7, 2) for number in (0, 1)}
    assert plan(found, DriveSet(STORE, 7, 2), indexes=[0, 1]) == ([0, 1], [], [], 2, 7, False)


def test_an_interrupted_set_is_restarted_with_a_higher_number() -> None:
    found = {0: superblock(0, 8, 2), 1: superblock(1, 7, 2)}
    assert plan(found, DriveSet(STORE, 7, 2)) == ([0, 1], [], [], 2, 9, True)


def test_a_drive_older_than_the_valid_set_is_stale() -> None:
    found = {0: superblock(0, 8, 2), 1: superblock(1, 7, 2)}
    assert plan(found, DriveSet(STORE, 8, 2)) == ([0], [1], [], 2, 9, True)
    assert plan(found, None) == ([0], [1], [], 2, 9, True)


def test_a_missing_drive_is_noticed_even_if_it_is_not_named() -> None:
    with pytest.raises(StorageError, match=r"Drive 1 cannot be used\. It is missing"):
        plan({0: superblock(0, 7, 2)}, None)
    with pytest.raises(StorageError, match=r"Drive 1 cannot be used\. It is missing"):
        plan({0: superblock(0, 7, 1)}, DriveSet(STORE, 7, 1), indexes=[0, 1])
    with pytest.raises(StorageError, match=r"Drive 0 cannot be used\. It is missing"):
        plan({1: superblock(1, 7, 2)}, DriveSet(STORE, 7, 2))


def test_the_number_of_drives_is_bounded_by_the_generations() -> None:
    with pytest.raises(ConfigError, match=f"at most {DRIVES_MAX}"):
        plan(dict.fromkeys(range(DRIVES_MAX + 1)), None)
    assert plan(dict.fromkeys(range(DRIVES_MAX)), None).blank == list(range(DRIVES_MAX))


def test_the_folders_file_round_trips_and_a_damaged_one_counts_as_missing(tmp_path: Path) -> None:
    assert read_set(tmp_path) is None
    written = DriveSet(STORE, 12, 3)
    write_set(tmp_path, written)
    assert read_set(tmp_path) == written
    assert json.loads((tmp_path / SET_NAME).read_text())["drives"] == 3
    for damage in ("", "[]", "{}", '{"store": 5, "set": 1, "drives": 1}', '{"store": "zz", "set": 1}'):
        (tmp_path / SET_NAME).write_text(damage)
        assert read_set(tmp_path) is None
    with pytest.raises(StorageError, match="cannot be written"):
        write_set(tmp_path / "nowhere", written)


# --- real files


@pytest.fixture
def files(tmp_path: Path) -> Iterator[StoreRig]:
    """A store over two files outside of its folder."""
    rig = StoreRig(tmp_path / "data")
    rig.specs = [DriveSpec(tmp_path / f"{name}.kv", DRIVE_CAPACITY_BYTES_MIN) for name in "ab"]
    rig.open()
    for number, payload in PAYLOADS.items():
        rig.put(number, payload)
    yield rig
    rig.store.close()


def test_drives_given_once_are_remembered(files: StoreRig) -> None:
    files.store.close()
    files.open()
    assert len(files.store.drives) == 2
    files.store.close()
    files.specs = []
    files.open()
    assert stored(files) == set(PAYLOADS)
    assert [(files.data / f"drive-{number}.kv").readlink().name for number in (0, 1)] == ["a.kv", "b.kv"]


def test_a_link_keeps_the_given_name(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data")
    rig.specs = [DriveSpec(tmp_path / "a.kv", DRIVE_CAPACITY_BYTES_MIN)]
    rig.open().close()
    (tmp_path / "by-id").symlink_to(tmp_path / "a.kv")
    rig.specs = [DriveSpec(tmp_path / "by-id")]
    rig.open().close()
    assert [link.name for link in rig.data.glob("drive-*")] == ["drive-0.kv"], "the same one by another name"
    rig.data = tmp_path / "another"
    rig.open().close()
    assert (rig.data / "drive-0.kv").readlink() == tmp_path / "by-id"


def test_a_new_folder_recognizes_the_drives_by_their_superblocks(files: StoreRig, tmp_path: Path) -> None:
    files.store.close()
    files.data = tmp_path / "another"
    files.specs.reverse()
    files.open()
    assert stored(files) == set(PAYLOADS)
    assert (files.data / "drive-0.kv").readlink().name == "a.kv"


def test_a_third_file_is_created_and_added(files: StoreRig, tmp_path: Path) -> None:
    files.store.close()
    files.specs = [DriveSpec(tmp_path / "c.kv", 2 * DRIVE_CAPACITY_BYTES_MIN)]
    files.open()
    assert stored(files) == set(PAYLOADS)
    assert files.store.statistics().capacity_bytes == 4 * DRIVE_CAPACITY_BYTES_MIN
    assert 0.4 < len(on(files, 2)) / BLOCKS + 0.5 < 1.4


def test_a_file_with_content_is_neither_formatted_nor_linked(files: StoreRig, tmp_path: Path) -> None:
    files.store.close()
    thesis = tmp_path / "thesis"
    thesis.write_bytes(bytes(65536) + b"years of work" + bytes(DRIVE_CAPACITY_BYTES_MIN))
    before = thesis.read_bytes()
    known, files.specs = files.specs, [DriveSpec(thesis)]
    with pytest.raises(ConfigError, match="holds other data"):
        files.open()
    assert thesis.read_bytes() == before
    files.specs = known
    files.open()
    assert len(files.store.drives) == 2


def test_a_drive_of_another_store_is_not_linked(files: StoreRig, tmp_path: Path) -> None:
    other = StoreRig(tmp_path / "other")
    other.specs = [DriveSpec(tmp_path / f"{name}.kv", DRIVE_CAPACITY_BYTES_MIN) for name in "xyz"]
    other.open().close()
    files.store.close()
    known = files.specs
    files.specs = [*known, other.specs[2]]
    with pytest.raises(ForeignDrive):
        files.open()
    assert not (files.data / "drive-2.kv").is_symlink()
    files.specs = [*known, other.specs[1]]
    with pytest.raises(ConfigError, match="has another drive"):
        files.open()
    files.specs = known
    files.open()
    other.open().close()


def test_a_file_is_not_the_drive_of_two_nodes(files: StoreRig, tmp_path: Path) -> None:
    other = StoreRig(tmp_path / "other")
    other.specs = files.specs
    with pytest.raises(StorageError, match="is in use"):
        other.open()
    assert stored(files) == set(PAYLOADS)


def test_a_missing_path_is_not_created_unless_a_size_is_given(tmp_path: Path) -> None:
    """It may be the name of a device, which a file in its place would not bring back."""
    rig = StoreRig(tmp_path / "data")
    rig.specs = [DriveSpec(tmp_path / "nvme9n1")]
    with pytest.raises(ConfigError, match="give its size"):
        rig.open()
    assert not (tmp_path / "nvme9n1").exists()


def test_a_drive_that_failed_to_join_is_not_missed_afterwards(tmp_path: Path) -> None:
    """The others have the number of the set that it was to join; but that set was never valid."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number, payload in PAYLOADS.items():
        rig.put(number, payload)
    rig.store.close()
    rig.disks = [*fresh(rig.disks), FakeDisk()]
    rig.disks[1].fault_from = (20, -errno.EIO)  # while it is filled with zeros
    with pytest.raises(StorageError, match="Drive 1 cannot be used"):
        rig.open()
    rig.disks = fresh(rig.disks[:1])
    rig.open()
    assert stored(rig) == set(PAYLOADS)
    assert len(rig.store.drive_states()) == 1
    rig.store.close()


def test_a_removed_drive_is_named_and_its_place_can_be_given_to_a_new_one(
    files: StoreRig, tmp_path: Path
) -> None:
    ours = on(files, 0)
    files.store.close()
    (tmp_path / "b.kv").unlink()
    files.specs = []
    with pytest.raises(StorageError, match=r"Drive 1 cannot be used.*--without-drive 1"):
        files.open()
    files.open(without=(1,))
    assert stored(files) == ours
    files.store.close()
    (files.data / "drive-1.kv").unlink()
    shutil.rmtree(files.data / "index-1")
    files.specs = [DriveSpec(tmp_path / "new.kv", DRIVE_CAPACITY_BYTES_MIN)]
    files.open()
    assert stored(files) == ours
    assert [drive.number for drive in files.store.drives] == [0, 1]


def test_a_drive_truncated_from_outside_is_named_and_the_other_opens(files: StoreRig, tmp_path: Path) -> None:
    ours = on(files, 0)
    files.store.close()
    os.truncate(tmp_path / "b.kv", 5 * PAGE_BYTES)
    with pytest.raises(StorageError, match="Drive 1 cannot be used"):
        files.open()
    files.open(without=(1,))
    assert stored(files) == ours


def test_a_drive_truncated_under_a_running_store_is_a_miss_only_for_its_own_blocks(
    files: StoreRig, tmp_path: Path
) -> None:
    os.truncate(tmp_path / "b.kv", 2 * PAGE_BYTES)
    assert stored(files) == on(files, 0)
    os.truncate(tmp_path / "b.kv", DRIVE_CAPACITY_BYTES_MIN)
