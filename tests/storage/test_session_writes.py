"""Sessions: the blocks they list and share, refcounts, and their state after a crash."""

from __future__ import annotations

import errno
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import NoSession, NoSpace, SessionRefused, StorageError
from kvstore.limits import (
    PAGE_BYTES,
    SESSION_BLOCKS_MAX,
    SESSION_CHUNK_BLOCKS,
    UNSYNCED_FREES_MAX,
)
from kvstore.storage.eviction.types import Guard
from kvstore.storage.fsck import check
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS = 300


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[StoreRig]:
    """A store with 300 blocks."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(BLOCKS):
        rig.start_put(number, b"x%d" % number)
        if number % 50 == 49:
            rig.settle()
    yield rig
    rig.store.close()


def references(rig: StoreRig, *numbers: int) -> list[int]:
    return rig.store.manifests.references((TENANT, key(number)) for number in numbers)


def chunks(rig: StoreRig) -> list[int]:
    return [count for *_, count in rig.drive.manifests.all_chunks()]


def is_sound(rig: StoreRig) -> None:
    """The sessions are the same after opening with the index and from the drive alone, and fsck finds nothing."""
    before = list(rig.drive.manifests.all())
    for scanned in (False, True):
        rig.store.close()
        assert rig.disk is not None
        rig.disk = FakeDisk(rig.disk.pages)
        disk = FakeDisk(rig.disk.pages)
        assert check(rig.data, source=FakeDrives([disk]), boot_id=rig.boot_id).damage == []
        if scanned:
            shutil.rmtree(rig.data / "index-0")
        rig.open()
        assert rig.store.statistics().rebuilt is scanned
        assert list(rig.drive.manifests.all()) == before


@pytest.mark.parametrize("batch", [1, 7, 125, 126, 127, 300])
def test_appended_blocks_are_named_in_order(filled: StoreRig, batch: int) -> None:
    for first in range(0, BLOCKS, batch):
        done = filled.append(1, range(first, min(first + batch, BLOCKS)))
        assert (done.error, done.blocks) == (None, min(first + batch, BLOCKS))
    assert filled.session(1) == list(range(BLOCKS))
    assert filled.store.manifests.keys(SessionName(TENANT, USER, name(1)), 290, 292) == [key(290), key(291)]
    assert len(chunks(filled)) == BLOCKS // SESSION_CHUNK_BLOCKS
    is_sound(filled)


@pytest.mark.parametrize("first", [0, 5, 125, 126, 127, 252, 260, 299, 300, 400])
@pytest.mark.parametrize("length", [0, 1, 126, 127, 300, None])
def test_keys_of_a_session_are_read_only_from_their_chunks(
    filled: StoreRig, first: int, length: int | None
) -> None:
    filled.append(1, range(BLOCKS))
    manifests = filled.store.manifests
    stored = manifests.get(SessionName(TENANT, USER, name(1)))
    assert stored is not None
    until = None if length is None else first + length
    wanted = [key(number) for number in range(BLOCKS)][first:until]
    assert manifests.keys_of(TENANT, stored.manifest, first, until) == wanted
    filled.start_step(1, SessionStep.REMOVE)
    filled.settle()
    tail = SESSION_CHUNK_BLOCKS * (BLOCKS // SESSION_CHUNK_BLOCKS)
    if wanted and first < tail:
        with pytest.raises(StorageError):
            manifests.keys_of(TENANT, stored.manifest, first, until)
    else:
        assert manifests.keys_of(TENANT, stored.manifest, first, until) == wanted


def test_steps_of_one_session_run_in_order_and_those_of_others_meanwhile(filled: StoreRig) -> None:
    tags = [filled.start_step(1, SessionStep.APPEND, keys=[number]) for number in range(20)]
    other = filled.start_step(2, SessionStep.APPEND, keys=[5])
    filled.settle()
    assert filled.session(1) == list(range(20))
    assert [tag for tag in filled.reported if tag in tags] == tags
    assert filled.reported.index(other) < filled.reported.index(tags[-1])


def test_a_block_that_is_not_stored_is_not_named(filled: StoreRig) -> None:
    filled.append(1, [1, 2])
    assert isinstance(filled.append(1, [3, BLOCKS]).error, SessionRefused)
    assert filled.session(1) == [1, 2]
    assert filled.append(1, [3]).blocks == 3


@pytest.mark.parametrize("blocks", [0, 1, 125, 126, 127, 252, 299, 300])
def test_a_truncated_session_names_its_first_blocks(filled: StoreRig, blocks: int) -> None:
    filled.append(1, range(BLOCKS))
    done = filled.truncate(1, blocks)
    assert done.blocks == blocks
    assert {key_ for _, key_ in done.unreferenced} == {key(number) for number in range(blocks, BLOCKS)}
    assert filled.session(1) == list(range(blocks))
    assert references(filled, *range(BLOCKS)) == [1] * blocks + [0] * (BLOCKS - blocks)
    is_sound(filled)
    assert filled.append(1, range(blocks, BLOCKS)).blocks == BLOCKS
    assert filled.session(1) == list(range(BLOCKS))


@pytest.mark.parametrize("blocks", [0, 1, 126, 200, 300])
def test_a_fork_shares_chunks_and_continues_separately(filled: StoreRig, blocks: int) -> None:
    filled.append(1, range(BLOCKS))
    assert filled.fork(2, 1, blocks).blocks == blocks
    whole = blocks // SESSION_CHUNK_BLOCKS
    assert sorted(chunks(filled)) == [1] * (2 - whole) + [2] * whole
    assert references(filled, 0) == [1 if whole or blocks == 0 else 2], "a shared chunk names a block once"
    filled.append(2, [7, 8])
    assert filled.session(1) == list(range(BLOCKS))
    assert filled.session(2) == [*range(blocks), 7, 8]
    is_sound(filled)
    filled.remove(1)
    assert filled.session(2) == [*range(blocks), 7, 8]
    is_sound(filled)


def test_a_removal_deletes_only_blocks_that_no_other_session_names(filled: StoreRig) -> None:
    filled.append(1, range(200))
    filled.fork(2, 1, 130)
    filled.append(3, [199])
    done = filled.remove(1, delete_blocks=True)
    assert {key_ for _, key_ in done.unreferenced} == {key(number) for number in range(130, 199)}
    assert [number for number in range(BLOCKS) if filled.get(number)[0].miss] == list(range(130, 199))
    assert filled.session(1) is None
    is_sound(filled)
    last = filled.remove(2).unreferenced
    assert {key_ for _, key_ in last} == {key(number) for number in range(130)}
    assert filled.get(0)[0].miss is None, "it was not asked to delete them"
    assert filled.remove(2).error is None, "what is gone is gone"


def test_equal_chunks_of_two_sessions_are_one_and_of_two_tenants_are_two(filled: StoreRig) -> None:
    filled.append(1, range(130))
    filled.append(2, range(130))
    assert chunks(filled) == [2]
    is_sound(filled)
    assert filled.fork(3, 1, 130).error is None
    assert chunks(filled) == [3]
    other = SessionItem(
        SessionName(b"somebody--else!!", USER, name(1)),
        SessionStep.FORK,
        Durability.WRITTEN,
        10**6,
        blocks=5,
        source=SessionName(TENANT, USER, name(1)),
    )
    filled.store.change_sessions([other], filled._sessions_done)
    filled.settle()
    assert filled.session_done[10**6].error is not None, "a tenant has no part in another's sessions"


def test_a_session_is_forked_only_within_its_tenant(filled: StoreRig) -> None:
    """Also by a tenant that has blocks of the same names, so that nothing else would refuse it."""
    stranger = b"somebody--else!!"
    filled.append(1, range(5))
    for number in range(5):
        filled.start_put(number, b"x%d" % number, tenant=stranger)
    filled.settle()
    fork = SessionItem(
        SessionName(stranger, USER, name(1)),
        SessionStep.FORK,
        Durability.WRITTEN,
        10**6,
        blocks=5,
        source=SessionName(TENANT, USER, name(1)),
    )
    filled.store.change_sessions([fork], filled._sessions_done)
    filled.settle()
    assert isinstance(filled.session_done[10**6].error, NoSession)


def test_a_users_sessions_are_listed_in_pages(filled: StoreRig) -> None:
    for number in range(1, 8):
        filled.append(number, range(number))
    manifests = filled.store.manifests
    assert manifests.of_user(TENANT, b"somebody--else!!") == []
    listed = manifests.of_user(TENANT, USER, limit=4)
    listed += manifests.of_user(TENANT, USER, listed[-1].session, limit=4)
    assert sorted((one.session, one.blocks) for one in listed) == sorted(
        (name(number), number) for number in range(1, 8)
    )


@pytest.mark.parametrize(
    ("step", "more"),
    [
        (SessionStep.TRUNCATE, {"blocks": 3}),
        (SessionStep.TRUNCATE, {"blocks": -1}),
        (SessionStep.FORK, {"source": 9}),
        (SessionStep.FORK, {"source": 1, "blocks": 3}),
        (SessionStep.FORK, {"blocks": 1}),
    ],
)
def test_an_impossible_step_is_an_error_and_changes_nothing(
    filled: StoreRig, step: SessionStep, more: dict[str, int]
) -> None:
    filled.append(1, [1, 2])
    filled.append(2, [1, 2])
    tag = filled.start_step(1, step, **more)  # type: ignore[arg-type]
    filled.settle()
    assert filled.session_done[tag].error is not None
    assert filled.session(1) == [1, 2]


def test_a_fork_onto_an_existing_session_is_refused(filled: StoreRig) -> None:
    filled.append(1, [1, 2])
    filled.append(2, [3])
    assert filled.fork(2, 1, 1).error is not None
    assert filled.session(2) == [3]


def test_a_session_is_bounded(filled: StoreRig) -> None:
    turn = [number % SESSION_CHUNK_BLOCKS for number in range(8 * SESSION_CHUNK_BLOCKS)]
    for _ in range(SESSION_BLOCKS_MAX // len(turn) - 1):
        filled.append(1, turn)
    assert filled.append(1, [*turn, 1]).error is not None
    assert filled.append(1, turn).blocks == SESSION_BLOCKS_MAX
    assert filled.append(1, [1]).error is not None
    is_sound(filled)


def test_a_replaced_manifest_is_wiped_only_once_the_new_one_is_synced(filled: StoreRig) -> None:
    filled.append(1, [1], Durability.SYNCED)
    syncs = filled.store.statistics().syncs
    filled.append(1, [2], Durability.WRITTEN)
    assert filled.disk is not None
    assert filled.store.statistics().syncs == syncs
    filled.kill()
    filled.disk = FakeDisk(filled.disk.durable)  # the drive keeps nothing that it did not have to
    filled.boot_id = "1" * 36
    filled.open()
    assert filled.session(1) == [1]


def test_manifests_that_wait_for_a_sync_are_bounded(filled: StoreRig) -> None:
    syncs = filled.store.statistics().syncs
    for number in range(UNSYNCED_FREES_MAX + 5):
        filled.append(1, [number])
    filled.settle()
    assert filled.store.statistics().syncs == syncs + 1


def test_a_removed_session_does_not_come_back_with_an_older_manifest(filled: StoreRig) -> None:
    for number in range(5):
        filled.append(1, [number])
    filled.remove(1)
    assert filled.disk is not None
    filled.kill()
    filled.disk = filled.disk.after_kill(1)
    shutil.rmtree(filled.data / "index-0")
    filled.open()
    assert filled.session(1) is None


@pytest.mark.parametrize("is_cut_first", [False, True])
def test_a_chunk_is_wiped_only_once_all_that_released_it_is_synced(
    filled: StoreRig, *, is_cut_first: bool
) -> None:
    """At power loss the drive keeps each wipe and only the records that it had to keep."""
    filled.append(1, range(200))
    filled.fork(2, 1, 200)
    filled.put(0, b"x0", Durability.SYNCED)
    filled.truncate(2, 10)
    if is_cut_first:
        filled.truncate(1, 20)
    filled.remove(1)
    assert filled.disk is not None
    wipes = {page: content for page, content in filled.disk.unsynced if not any(content)}
    assert wipes, "of the manifest of what was removed"
    filled.kill()
    filled.disk = FakeDisk(filled.disk.durable | wipes)
    filled.boot_id = "1" * 36
    filled.open()
    assert filled.session(2) == list(range(200))


def test_a_manifest_whose_chunk_is_lost_is_replaced_by_the_previous_one(filled: StoreRig) -> None:
    filled.append(1, range(100), Durability.SYNCED)
    filled.append(1, range(100, 140))
    assert filled.disk is not None
    [(_, _, chunk, _)] = filled.drive.manifests.all_chunks()
    filled.disk.flip(chunk.offset + PAGE_BYTES, 0)
    filled.kill()
    filled.disk = filled.disk.after_kill(1)
    shutil.rmtree(filled.data / "index-0")
    filled.open()
    assert filled.session(1) == list(range(100))


@pytest.mark.parametrize("write", [0, 1])
def test_a_step_whose_write_fails_is_an_error_and_the_session_stays(filled: StoreRig, write: int) -> None:
    filled.append(1, range(100), Durability.SYNCED)
    assert filled.disk is not None
    filled.disk.faults = {filled.disk.operations + write: -errno.EIO}
    assert filled.append(1, range(100, 140)).error is not None
    assert filled.session(1) == list(range(100))


@pytest.mark.parametrize("left_pages", [0, 1, 2, 3])
def test_a_step_without_room_is_no_space_and_leaves_no_trace(filled: StoreRig, left_pages: int) -> None:
    filled.append(1, range(100), Durability.SYNCED)
    filled.store.hold([(TENANT, key(number)) for number in range(BLOCKS)], Guard.PROTECTED)
    extents = filled.drive._extents
    taken = extents.allocate(extents.free_pages - left_pages)
    assert taken is not None
    assert isinstance(filled.append(1, range(100, 140)).error, NoSpace)
    assert filled.store.statistics().free_bytes == left_pages * PAGE_BYTES
    assert filled.session(1) == list(range(100))


def test_a_stored_block_is_stored_once(filled: StoreRig) -> None:
    free = filled.store.statistics().free_bytes
    assert filled.put(5, b"x5").error is None
    assert filled.store.statistics().free_bytes == free


def test_a_put_waits_for_space_that_the_sync_in_progress_will_free(filled: StoreRig) -> None:
    """A session's old records are freed by a sync; the wait is not over because it has begun."""
    filled.append(0, [1, 2])
    filled.append(0, [3])
    drive = filled.drive
    assert drive._writes.waiting_for_sync == 1
    free_bytes = filled.store.statistics().free_bytes
    drive._writes.sync_if_awaited(at_once=True)
    drive._traffic.pump()
    assert filled.store.statistics().drive_in_flight == 1
    assert drive._writes.waiting_for_sync == 1
    assert drive.is_busy
    filled.poll()
    assert drive._writes.waiting_for_sync == 0
    filled.settle()
    assert filled.store.statistics().free_bytes > free_bytes
    assert not drive.is_busy
