"""The contents of a data folder, and whether each is opened, refused, rebuilt or created."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.clock import SystemClock
from kvstore.config import DriveSpec
from kvstore.errors import (
    ConfigError,
    Corrupt,
    FolderLocked,
    NoSpace,
    ReadOnly,
    StorageError,
    WrongVersion,
)
from kvstore.limits import (
    DRIVE_CAPACITY_BYTES_MAX,
    DRIVE_CAPACITY_BYTES_MIN,
    GENERATIONS_PER_DRIVE,
    PAGE_BYTES,
)
from kvstore.storage import index_check
from kvstore.storage.folder import FolderLock
from kvstore.storage.store import Store
from kvstore.wire.record import roll_offset
from tests.storage.fakes import FakeDisk
from tests.storage.rig import StoreRig


def drive_of(rig: StoreRig) -> Path:
    return rig.data / "drive-0.kv"


def poke(path: Path, offset: int, data: bytes) -> None:
    with path.open("r+b") as drive:
        drive.seek(offset)
        drive.write(data)


def blocks_survive(rig: StoreRig, *, rebuilt: bool) -> None:
    rig.open()
    assert rig.store.statistics().rebuilt is rebuilt
    assert rig.get(1)[1] == b"one" * 2000
    assert rig.get(2)[1] == b"two"


@pytest.fixture
def filled(real: StoreRig) -> StoreRig:
    real.put(1, b"one" * 2000)
    real.put(2, b"two")
    return real


def test_a_folder_is_opened_by_one_process_at_a_time(filled: StoreRig) -> None:
    with pytest.raises(FolderLocked):
        Store.open(filled.data, capacity_bytes=None, clock=SystemClock())
    filled.store.close()
    blocks_survive(filled, rebuilt=False)


def test_a_drive_of_another_version_is_refused_and_left_alone(filled: StoreRig) -> None:
    filled.store.close()
    for copy in (0, PAGE_BYTES):
        poke(drive_of(filled), copy + 8, b"\x02")
    before = drive_of(filled).read_bytes()
    with pytest.raises(WrongVersion, match="version 2; this build reads version 3"):
        filled.open()
    assert drive_of(filled).read_bytes() == before


@pytest.mark.parametrize("copy", [0, 1])
def test_one_damaged_superblock_loses_nothing(filled: StoreRig, copy: int) -> None:
    filled.store.close()
    poke(drive_of(filled), copy * PAGE_BYTES, b"garbage")
    blocks_survive(filled, rebuilt=False)


def test_of_two_valid_superblocks_the_newer_counts(filled: StoreRig) -> None:
    old = drive_of(filled).read_bytes()[:PAGE_BYTES]
    filled.store.close()
    poke(drive_of(filled), 0, old)  # as if the last write of copy 0 had been lost
    blocks_survive(filled, rebuilt=False)


def test_two_damaged_superblocks_are_not_formatted_over(filled: StoreRig) -> None:
    filled.store.close()
    poke(drive_of(filled), 0, b"garbage")
    poke(drive_of(filled), PAGE_BYTES, b"garbage")
    with pytest.raises(Corrupt):
        filled.open()


def test_a_drive_truncated_from_outside_is_refused(filled: StoreRig) -> None:
    filled.capacity_bytes = 2 * DRIVE_CAPACITY_BYTES_MIN
    filled.store.close()
    os.truncate(drive_of(filled), DRIVE_CAPACITY_BYTES_MIN // 2)
    with pytest.raises(StorageError, match="truncated"):
        filled.open()


def test_a_drive_one_page_shorter_than_its_superblock_says_is_refused(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data")
    rig.capacity_bytes = DRIVE_CAPACITY_BYTES_MIN + PAGE_BYTES
    rig.open().close()
    os.truncate(drive_of(rig), DRIVE_CAPACITY_BYTES_MIN)
    with pytest.raises(StorageError, match=r"was truncated: of the .* 4 KiB are missing"):
        rig.open()


def test_a_folder_without_a_drive_needs_a_valid_capacity(tmp_path: Path) -> None:
    for capacity in (None, 0, DRIVE_CAPACITY_BYTES_MIN - 1, DRIVE_CAPACITY_BYTES_MAX + 1):
        with pytest.raises(ConfigError):
            Store.open(tmp_path / "data", capacity_bytes=capacity, clock=SystemClock())
    with pytest.raises(NoSpace):
        Store.open(tmp_path / "data", capacity_bytes=1 << 43, clock=SystemClock())
    assert not list((tmp_path / "data").glob("drive*"))


def test_a_removed_drive_is_not_replaced_by_a_new_one(filled: StoreRig) -> None:
    filled.store.close()
    drive_of(filled).rename(filled.data / "elsewhere")
    with pytest.raises(StorageError, match="is missing"):
        filled.open()
    (filled.data / "elsewhere").rename(drive_of(filled))
    blocks_survive(filled, rebuilt=False)


def test_a_removed_device_is_an_error(filled: StoreRig) -> None:
    filled.store.close()
    drive_of(filled).unlink()
    drive_of(filled).symlink_to(filled.data / "no-such-device")
    with pytest.raises(StorageError, match="could not be opened"):
        filled.open()


@pytest.mark.parametrize("size", [0, PAGE_BYTES, DRIVE_CAPACITY_BYTES_MIN - 1])
def test_a_tiny_drive_is_refused(filled: StoreRig, size: int) -> None:
    filled.store.close()
    os.truncate(drive_of(filled), size)
    with pytest.raises(StorageError, match="less than the smallest drive"):
        filled.open()


def test_a_drive_above_the_limit_is_refused_and_left_alone(tmp_path: Path) -> None:
    disk = FakeDisk(capacity=DRIVE_CAPACITY_BYTES_MAX + PAGE_BYTES)
    with pytest.raises(StorageError, match="more than the largest drive"):
        StoreRig(tmp_path / "data", disk).open()
    assert disk.pages == {}
    disk.close()


def test_a_drive_truncated_under_a_running_store_gives_misses(filled: StoreRig) -> None:
    os.truncate(drive_of(filled), 4 * PAGE_BYTES)
    assert filled.get(1)[0].miss is not None
    assert filled.get(2)[0].miss is not None


def test_a_device_whose_formatting_was_interrupted_in_its_superblock_is_not_formatted_over(
    tmp_path: Path,
) -> None:
    """Half of the first copy is there: this may be somebody else's, so a person has to decide."""
    rig = StoreRig(tmp_path / "data", FakeDisk({0: b"TKVDRIVE" + bytes(PAGE_BYTES - 8)}))
    with pytest.raises(StorageError) as caught:
        rig.open()
    assert isinstance(caught.value, (Corrupt, WrongVersion))


def test_a_lock_file_that_cannot_be_created_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"a file where the folder should be")
    with pytest.raises(ConfigError, match="it is a file, not a folder"):
        Store.open(tmp_path / "data", capacity_bytes=DRIVE_CAPACITY_BYTES_MIN, clock=SystemClock())


@pytest.mark.parametrize("is_there", [False, True])
def test_a_folder_in_which_nothing_could_be_created_is_unchanged(tmp_path: Path, *, is_there: bool) -> None:
    data = tmp_path / "data"
    if is_there:
        data.mkdir()
    size, clock = DRIVE_CAPACITY_BYTES_MIN, SystemClock()
    drive = DriveSpec(tmp_path / "none" / "drive", size)
    with pytest.raises(ConfigError, match="could not be created"):
        Store.open(data, capacity_bytes=None, clock=clock, drives=[drive])
    with pytest.raises(ConfigError, match="no drive 3 to leave out"):
        Store.open(data, capacity_bytes=size, clock=clock, without=[3])
    with pytest.raises(ConfigError, match="no drive 3 to leave out"):
        Store.open(
            data, capacity_bytes=None, clock=clock, without=[3], drives=[DriveSpec(tmp_path / "d", size)]
        )
    assert list(tmp_path.iterdir()) == ([data] if is_there else [])
    assert not is_there or not list(data.iterdir())


def test_a_lock_released_meanwhile_locks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = FolderLock(tmp_path / "data")
    flock = fcntl.flock

    def late(fd: int, how: int) -> None:
        first.give_up()  # after the second has opened the file
        flock(fd, how)

    monkeypatch.setattr("kvstore.storage.folder.fcntl.flock", late)
    with pytest.raises(FolderLocked, match="try again"):
        FolderLock(tmp_path / "data")


@pytest.mark.parametrize("more", [0, 1])
def test_an_index_copied_from_a_running_store_and_restored_after_sigkill_is_rebuilt(
    filled: StoreRig, more: int
) -> None:
    """Within one boot and one epoch: the lock file knows how far the index had got."""
    shutil.copytree(filled.data / "index-0", filled.data / "copy")
    for number in range(more):
        filled.put(3 + number, b"later")
    filled.kill()
    shutil.rmtree(filled.data / "index-0")
    (filled.data / "copy").rename(filled.data / "index-0")
    blocks_survive(filled, rebuilt=more > 0)
    assert all(filled.get(3 + number)[1] == b"later" for number in range(more))


@pytest.mark.parametrize("emptied", [False, True])
def test_an_index_restored_after_sigkill_with_the_lock_file_of_its_time_is_rebuilt(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch, *, emptied: bool
) -> None:
    """Everything that says how far the index had got is as old as the index: the drive contradicts it."""
    monkeypatch.setattr(index_check, "INDEX_HEADERS_CHECKED_MAX", 1)
    later = range(3, 4 if emptied else 6)
    shutil.copytree(filled.data / "index-0", filled.data / "copy")
    shutil.copy(filled.data / "kvstore.lock", filled.data / "lock of then")
    if emptied:  # so that the next stands in the place of the first
        filled.delete(1)
    for number in later:
        filled.put(number, b"later" * 1000)
    filled.kill()
    shutil.rmtree(filled.data / "index-0")
    (filled.data / "copy").rename(filled.data / "index-0")
    (filled.data / "lock of then").rename(filled.data / "kvstore.lock")
    filled.open()
    assert filled.store.statistics().rebuilt
    filled.put(9, b"new" * 2000)
    for number in later:
        assert filled.get(number)[1] == b"later" * 1000
    assert filled.get_miss(1) == emptied
    assert filled.get(2)[1] == b"two"


def test_a_put_in_flight_at_sigkill_causes_no_rebuild(tmp_path: Path) -> None:
    disk = FakeDisk()
    rig = StoreRig(tmp_path / "data", disk)
    rig.open()
    rig.put(1, b"one" * 2000)
    rig.put(2, b"two")
    rig.start_put(3, b"three")
    (write,) = disk.in_flight
    disk._execute(write)  # it is whole on the drive, and nobody has heard of it
    disk.in_flight.clear()
    rig.kill()
    blocks_survive(rig, rebuilt=False)
    assert rig.get_miss(3)
    rig.store.close()


def test_without_the_note_of_the_generations_an_index_that_was_not_closed_is_rebuilt(
    filled: StoreRig,
) -> None:
    """As an older build leaves it."""
    filled.kill()
    os.truncate(filled.data / "kvstore.lock", PAGE_BYTES)
    blocks_survive(filled, rebuilt=True)


def test_without_the_note_of_its_commits_an_index_that_was_not_closed_is_rebuilt(filled: StoreRig) -> None:
    filled.kill()
    (filled.data / "kvstore.lock").unlink()
    blocks_survive(filled, rebuilt=True)
    filled.store.close()
    (filled.data / "kvstore.lock").unlink()
    blocks_survive(filled, rebuilt=False)


def test_a_commit_not_noted_before_a_crash_causes_no_rebuild(filled: StoreRig) -> None:
    lock = filled.store._lock.place(0)
    note = lock.note
    filled.put(3, b"committed")
    lock.write_note(note)
    filled.kill()
    blocks_survive(filled, rebuilt=False)
    assert filled.get(3)[1] == b"committed"


@pytest.mark.parametrize("flipped", [False, True])
def test_a_damaged_roll_voids_nothing(tmp_path: Path, *, flipped: bool) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.put(1, b"one" * 2000)
    rig.put(2, b"two")
    rig.kill()
    rig.open()  # not clean: a roll is made
    superblock = rig.drive._volume.superblock
    assert superblock.roll_generation > 1
    rig.store.close()
    assert rig.disk is not None
    rig.disk = FakeDisk(rig.disk.pages)
    roll = roll_offset(superblock.capacity_bytes, superblock.roll_copy)
    if flipped:
        rig.disk.flip(roll, 0)
    else:
        rig.disk.unreadable = {roll // PAGE_BYTES}
    shutil.rmtree(rig.data / "index-0")
    blocks_survive(rig, rebuilt=True)
    rig.store.close()


def test_a_new_drive_is_not_scanned_and_one_killed_in_its_first_run_is(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data")
    rig.open()
    assert not rig.store.statistics().rebuilt
    rig.put(1, b"one" * 2000)
    rig.put(2, b"two")
    rig.kill()
    shutil.rmtree(rig.data / "index-0")
    blocks_survive(rig, rebuilt=True)
    rig.store.close()


def test_an_existing_drive_keeps_its_capacity(filled: StoreRig) -> None:
    filled.store.close()
    filled.capacity_bytes = 4 * DRIVE_CAPACITY_BYTES_MIN
    blocks_survive(filled, rebuilt=False)
    assert filled.store.statistics().capacity_bytes == DRIVE_CAPACITY_BYTES_MIN


def test_an_interrupted_formatting_is_repeated(tmp_path: Path) -> None:
    disk = FakeDisk()
    disk.fault_from = (10, -5)
    rig = StoreRig(tmp_path / "data", disk)
    with pytest.raises(StorageError):
        rig.open()
    rig.disk = disk.after_power_loss(1)
    rig.open()
    assert rig.put(1, b"x").error is None
    rig.store.close()


def test_the_index_of_a_killed_process_is_trusted_only_in_the_same_boot(filled: StoreRig) -> None:
    filled.kill()
    blocks_survive(filled, rebuilt=False)
    filled.kill()
    filled.boot_id = "1" * 36
    blocks_survive(filled, rebuilt=True)


def test_a_clean_index_is_trusted_in_another_boot(filled: StoreRig) -> None:
    filled.store.close()
    filled.boot_id = "1" * 36
    blocks_survive(filled, rebuilt=False)


def test_a_deleted_index_is_rebuilt(filled: StoreRig) -> None:
    filled.store.close()
    shutil.rmtree(filled.data / "index-0")
    blocks_survive(filled, rebuilt=True)


@pytest.mark.parametrize("keep", [0, 100, 4096, 8192, -4096])
def test_a_truncated_index_is_rebuilt(filled: StoreRig, keep: int) -> None:
    filled.store.close()
    index = filled.data / "index-0" / "data.mdb"
    os.truncate(index, keep if keep >= 0 else index.stat().st_size + keep)
    blocks_survive(filled, rebuilt=True)


def test_an_index_of_garbage_is_rebuilt(filled: StoreRig) -> None:
    filled.store.close()
    poke(filled.data / "index-0" / "data.mdb", 0, b"\xff" * 8192)
    blocks_survive(filled, rebuilt=True)


@pytest.mark.parametrize("running", [False, True], ids=["closed", "running"])
def test_yesterdays_index_is_rebuilt(filled: StoreRig, *, running: bool) -> None:
    if not running:
        filled.store.close()
    shutil.copytree(filled.data / "index-0", filled.data / "yesterday")
    if not running:
        filled.open()
    filled.put(3, b"today")
    filled.store.close()
    shutil.rmtree(filled.data / "index-0")
    (filled.data / "yesterday").rename(filled.data / "index-0")
    blocks_survive(filled, rebuilt=True)
    assert filled.get(3)[1] == b"today"


def test_an_index_of_another_store_is_rebuilt(filled: StoreRig, tmp_path: Path) -> None:
    other = StoreRig(tmp_path / "other")
    other.open().close()
    filled.store.close()
    shutil.rmtree(filled.data / "index-0")
    shutil.copytree(other.data / "index-0", filled.data / "index-0")
    blocks_survive(filled, rebuilt=True)


def test_generations_rise_over_openings_and_rebuilds(filled: StoreRig) -> None:
    generations = []
    for number in range(10, 14):
        filled.put(number, b"x")
        generations.append(filled.get(number)[0].generation)
        filled.kill()
        if number % 2:
            shutil.rmtree(filled.data / "index-0")
        filled.open()
    assert generations == sorted(set(generations))


CHILD = """
import sys, pathlib
from kvstore.durability import Durability
from tests.storage.rig import StoreRig
rig = StoreRig(pathlib.Path(sys.argv[1]))
rig.open()
for number in range(10_000):
    tag = rig.start_put(number, number.to_bytes(4, "little") * 3000)
    while tag not in rig.put_done:
        rig.poll()
    if rig.put_done[tag].error is None:
        print(number, flush=True)
"""


@pytest.mark.parametrize("index_survives", [True, False])
def test_acknowledged_blocks_survive_kill_9(tmp_path: Path, *, index_survives: bool) -> None:
    data = tmp_path / "data"
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, str(data)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        acknowledged = [int(child.stdout.readline()) for _ in range(60)]
        child.kill()
        acknowledged += [int(line) for line in child.stdout.read().splitlines()]
    if not index_survives:
        shutil.rmtree(data / "index-0")
    rig = StoreRig(data)
    rig.open()
    assert rig.store.statistics().rebuilt is not index_survives
    for number in acknowledged:
        assert rig.get(number)[1] == number.to_bytes(4, "little") * 3000
    rig.store.close()


def test_generations_are_reserved_again_when_they_run_out_and_end_with_the_drives_own(
    filled: StoreRig,
) -> None:
    volume = filled.drive._volume
    ceiling = volume.superblock.generation_ceiling
    volume.skip_generations(ceiling - 2)
    assert filled.put(10, b"last of its lot").error is None
    assert volume.superblock.generation_ceiling == ceiling
    assert filled.put(11, b"first of the next").error is None
    assert volume.superblock.generation_ceiling > ceiling
    volume.skip_generations(GENERATIONS_PER_DRIVE - 2)
    assert filled.put(12, b"the very last").error is None
    assert isinstance(filled.put(13, b"too many").error, ReadOnly)
    assert filled.get(12)[0].generation == GENERATIONS_PER_DRIVE - 1


def test_of_two_records_with_one_name_a_rebuild_takes_the_newer_wherever_it_is(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())

    def rebuilt_gives(expected: dict[int, bytes], lost_wipe: int) -> None:
        rig.store.close()
        shutil.rmtree(rig.data / "index-0")
        assert rig.disk is not None
        page = lost_wipe // PAGE_BYTES
        assert not any(rig.disk.pages[page])
        rig.disk = FakeDisk(rig.disk.pages | {page: old[page]})
        rig.open()
        assert rig.store.statistics().rebuilt
        assert {number: rig.get(number)[1] for number in expected} == expected

    rig.open()
    for number in (1, 2):
        rig.put(number, b"old", expires_ms=rig.clock.now_ms + 1)
    first_at, second_at = rig.record_at(1)[0], rig.record_at(2)[0]
    assert rig.disk is not None
    old = dict(rig.disk.pages)
    rig.clock.now_ms += 1
    rig.put(1, b"new")
    assert rig.record_at(1)[0] > first_at, "the old record comes first"
    rebuilt_gives({1: b"new"}, first_at)
    rig.put(2, b"new")
    assert rig.record_at(2)[0] < second_at, "the new record comes first"
    rebuilt_gives({1: b"new", 2: b"new"}, second_at)
    rig.store.close()


def test_a_clean_close_makes_written_blocks_survive_power_loss(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    rig.put(1, b"one" * 2000)
    rig.put(2, b"two")
    disk = rig.disk
    assert disk is not None
    rig.store.close()
    rig.disk = disk.after_power_loss(seed=1)
    rig.boot_id = "1" * 36
    blocks_survive(rig, rebuilt=False)
    rig.store.close()


def test_a_file_in_the_place_of_the_index_does_not_prevent_a_start(filled: StoreRig) -> None:
    filled.store.close()
    shutil.rmtree(filled.data / "index-0")
    (filled.data / "index-0").write_text("no folder")
    blocks_survive(filled, rebuilt=True)


def test_a_folder_in_the_place_of_the_seal_does_not_prevent_a_start(filled: StoreRig) -> None:
    filled.store.close()
    (filled.data / "index-0" / "seal").unlink()
    (filled.data / "index-0" / "seal").mkdir()
    blocks_survive(filled, rebuilt=False)
