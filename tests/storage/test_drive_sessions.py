"""Sessions in a store of several drives: where they are stored, and that there is never a second copy."""

from __future__ import annotations

import errno

import pytest

from kvstore.durability import Durability
from kvstore.errors import NoSpace, ReadOnly
from kvstore.storage.eviction.types import Guard
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk
from tests.storage.pair import fail, homed, user_drive
from tests.storage.rig import TENANT, USER, StoreRig, key, name

BLOCKS = 60


def test_a_session_is_on_its_users_drive_and_names_blocks_on_all(pair: StoreRig) -> None:
    for number in range(BLOCKS):
        pair.put(number, b"x")
    assert pair.append(1, range(BLOCKS)).blocks == BLOCKS
    assert pair.session(1) == list(range(BLOCKS))
    where = [drive.manifests.get(SessionName(TENANT, USER, name(1))) for drive in pair.store.drives]
    assert [one is not None for one in where] == [position == user_drive(pair) for position in (0, 1)]
    assert [one[:3] for one in pair.store.manifests.of_user(TENANT, USER)] == [(name(1), b"", BLOCKS)]
    assert pair.store.manifests.references([(TENANT, key(3)), (TENANT, key(BLOCKS))]) == [1, 0]
    assert pair.append(1, [BLOCKS]).error is not None, "no drive has that block"


def test_sessions_are_stored_elsewhere_when_their_drive_has_failed_and_stay_there(pair: StoreRig) -> None:
    home = user_drive(pair)
    for number in range(BLOCKS):
        pair.put(number, b"x")
    pair.append(1, [0, 1])
    fail(pair, home)
    assert pair.session(1) == [0, 1]
    assert isinstance(pair.append(1, [2]).error, ReadOnly), "what is there can be read and not changed"
    assert isinstance(pair.remove(1).error, ReadOnly)
    assert pair.append(2, range(BLOCKS)).error is None
    assert pair.fork(3, 1, 1).error is None, "a fork of what is on the failed drive is written anew"
    assert pair.session(3) == [0]
    assert pair.store.drives[1 - home].manifests.get(SessionName(TENANT, USER, name(2))) is not None
    pair.store.close()
    pair.disks = [FakeDisk(disk.pages) for disk in pair.disks]
    pair.open()
    assert [pair.session(number) for number in (1, 2, 3)] == [[0, 1], list(range(BLOCKS)), [0]]
    assert pair.append(2, [5]).blocks == BLOCKS + 1
    assert pair.store.drives[home].manifests.get(SessionName(TENANT, USER, name(2))) is None
    assert pair.append(1, [2]).blocks == 3


@pytest.mark.parametrize("blocks", [0, 1, 126, 130, 200])
def test_a_fork_from_another_drive_is_the_same_session(pair: StoreRig, blocks: int) -> None:
    for number in range(200):
        pair.start_put(number, b"x")
        if number % 50 == 49:
            pair.settle()
    pair.append(1, range(200))
    fail(pair, user_drive(pair))
    assert pair.fork(2, 1, blocks).blocks == blocks
    assert pair.session(2) == list(range(blocks))
    assert pair.fork(3, 1, 201).error is not None
    assert pair.fork(4, 9, 0).error is not None
    assert pair.fork(2, 1, 1).error is not None, "it is there already"


def test_a_step_lost_with_a_failing_drive_is_not_started_elsewhere(pair: StoreRig) -> None:
    """Its record may be on the failed drive, and would exist beside the new one after power loss."""
    home = user_drive(pair)
    pair.put(1, b"x")
    disk = pair.disks[home]
    disk.faults = {disk.operations: -errno.EIO}
    assert isinstance(pair.append(1, [1]).error, ReadOnly)
    assert isinstance(pair.append(1, [1]).error, ReadOnly)
    assert pair.session(1) is None
    assert pair.append(2, [1]).error is None


def test_records_of_a_step_without_room_are_doubted_until_their_wipe_is_synced(pair: StoreRig) -> None:
    home = user_drive(pair)
    drive = pair.store.drives[home]
    named = homed(pair, home, 1)
    pair.put(named[0], b"x")
    pair.store.hold([(TENANT, key(named[0]))], Guard.PROTECTED)  # nothing makes room
    extents = drive._extents
    assert extents.allocate(extents.free_pages - 3) is not None, "room for a chunk, and not for its session"
    name_of_it = SessionName(TENANT, USER, name(1))
    assert isinstance(pair.append(1, named * 130).error, NoSpace)
    pair.settle()
    assert drive.holds_session(name_of_it)
    assert pair.put(named[0], b"x", Durability.SYNCED).error is None, "which takes a sync"
    assert not drive.holds_session(name_of_it)


def test_a_session_is_not_started_elsewhere_before_its_removal_is_synced(pair: StoreRig) -> None:
    home = user_drive(pair)
    pair.put(1, b"x")
    pair.append(1, [1], Durability.SYNCED)
    disk = pair.disks[home]
    disk.faults = {disk.operations + 1: -errno.EIO}  # the wipe is done, the sync fails
    assert isinstance(pair.remove(1).error, ReadOnly)
    assert pair.session(1) is None
    assert isinstance(pair.append(1, [1]).error, ReadOnly)
    before = pair.disks
    pair.power_loss(seed=3)
    for position in (0, 1):
        before[position].faults = {}
    pair.open()
    assert pair.session(1) in ([1], None)


def test_a_block_that_a_session_on_another_drive_names_is_referenced(pair: StoreRig) -> None:
    home = user_drive(pair)
    numbers = [*homed(pair, 0, 2), *homed(pair, 1, 2)]
    for number in numbers:
        pair.put(number, b"x")
    pair.append(1, numbers)
    other_user = next(
        user
        for user in (bytes([one]) * 16 for one in range(256))
        if pair.store._placement.order(TENANT, user)[0] != home
    )
    theirs = SessionName(TENANT, other_user, name(1))
    done = pair.change_session(
        SessionItem(theirs, SessionStep.APPEND, Durability.WRITTEN, 0, [key(numbers[0])])
    )
    assert done.error is None
    removed = pair.remove(1, delete_blocks=True)
    assert sorted(one for _, one in removed.unreferenced) == sorted(key(number) for number in numbers[1:])
    assert [pair.get_miss(number) for number in numbers] == [False, True, True, True]
    last = pair.change_session(
        SessionItem(theirs, SessionStep.REMOVE, Durability.WRITTEN, 0, delete_blocks=True)
    )
    assert last.unreferenced == [(TENANT, key(numbers[0]))]
    assert pair.store.statistics().blocks == 0


def test_a_removal_with_blocks_is_reported_once_they_are_removed_from_every_drive(pair: StoreRig) -> None:
    home = user_drive(pair)
    numbers = homed(pair, 1 - home, 3)
    for number in numbers:
        pair.put(number, b"x", Durability.SYNCED)
    pair.append(1, numbers, Durability.SYNCED)
    other = pair.disks[1 - home]
    tag = pair.start_step(1, SessionStep.REMOVE, delete_blocks=True)
    for _ in range(50):
        pair.store.poll()
        other.held = {op.tag for op in other.in_flight}
    assert tag not in pair.session_done
    assert pair.store.statistics().sessions_pending == 1
    other.release()
    pair.settle()
    assert pair.session_done[tag].error is None
    pair.power_loss(seed=4)
    pair.open()
    assert pair.store.statistics().rebuilt
    assert all(pair.get_miss(number) for number in numbers)
    assert pair.session(1) is None


def test_a_removal_whose_blocks_cannot_be_deleted_fails(pair: StoreRig) -> None:
    home = user_drive(pair)
    (number,) = homed(pair, 1 - home)
    pair.put(number, b"x")
    pair.append(1, [number])
    fail(pair, 1 - home)
    assert isinstance(pair.remove(1, delete_blocks=True).error, ReadOnly)
    assert pair.session(1) is None


def test_every_drive_knows_the_positions_of_its_blocks_in_sessions_of_others(pair: StoreRig) -> None:
    """So each evicts from a session's tail first, wherever its manifest is, and after reopening as well."""
    numbers = [*homed(pair, 0, 3), *homed(pair, 1, 3)]
    for number in numbers:
        pair.put(number, b"x")
    pair.append(1, numbers, Durability.SYNCED)

    def links() -> list[int]:
        return [drive.keeping.core.statistics().session_links for drive in pair.store.drives]

    assert links() == [3, 3]
    pair.store.close()
    pair.disks = [FakeDisk(disk.pages, seed=number) for number, disk in enumerate(pair.disks)]
    pair.open()
    assert links() == [3, 3]
    pair.remove(1)
    assert links() == [0, 0]
