"""Erasing blocks by overwriting, with a crash at any step: repeated, it leaves nothing of them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import ReadOnly, StorageError
from kvstore.limits import PAGE_BYTES, SESSION_CHUNK_BLOCKS
from kvstore.storage import overwriting
from kvstore.storage.fsck import check
from kvstore.storage.items import DeleteItem
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.storage.items import DeleteDone

BLOCKS = 3
PAGES = 5
ERASED = b"-- what an erased user said --  "
KEPT = b"-- what their neighbour said -- "
STEPS_MAX = 200


def payload(said: bytes) -> bytes:
    return said * (PAGES * PAGE_BYTES // len(said))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path, FakeDisk())
    yield rig
    for disk in rig.disks:
        disk.close()


def filled(rig: StoreRig) -> None:
    rig.open()
    for number in range(BLOCKS):
        rig.put(number, payload(ERASED), Durability.SYNCED)
        rig.put(BLOCKS + number, payload(KEPT), Durability.SYNCED)


def start_erasing(rig: StoreRig) -> list[DeleteDone]:
    done: list[DeleteDone] = []
    items = [
        DeleteItem(TENANT, key(number), Durability.SYNCED, number, frozenset()) for number in range(BLOCKS)
    ]
    rig.store.delete(items, done.extend)
    return done


def erase(rig: StoreRig) -> list[DeleteDone]:
    done = start_erasing(rig)
    rig.settle()
    assert len(done) == BLOCKS
    return done


def reopen(rig: StoreRig) -> None:
    assert rig.disk is not None
    rig.disk = FakeDisk(rig.disk.pages)
    rig.open()


def pages_with(rig: StoreRig, said: bytes) -> int:
    assert rig.disk is not None
    return sum(said in page for page in rig.disk.pages.values())


def is_whole(rig: StoreRig, numbers: range) -> bool:
    return all(rig.get(number)[1] == payload(KEPT) for number in numbers)


@pytest.mark.parametrize("how", ["killed", "killed twice", "power"])
def test_an_erasure_that_dies_at_any_step_leaves_nothing_once_it_is_repeated(
    tmp_path: Path, how: str
) -> None:
    left = set()
    for step in range(STEPS_MAX):
        rig = StoreRig(tmp_path / str(step), FakeDisk(seed=step))
        filled(rig)
        done = start_erasing(rig)
        for _ in range(step):
            rig.poll_once()
        over = len(done) == BLOCKS
        if how == "power":
            rig.power_loss(step)
        else:
            rig.kill()
            assert rig.disk is not None
            rig.disk = rig.disk.after_kill(step)
        left.add(pages_with(rig, ERASED))
        if over:
            assert pages_with(rig, ERASED) == 0
        if how == "killed twice":  # the next process dies while it opens the drive
            assert rig.disk is not None
            rig.disk.fault_from = (rig.disk.operations + step % 7, -5)
            try:
                rig.open()
                rig.kill()
            except StorageError:
                pass
            rig.disk = rig.disk.after_kill(step)
        rig.open()
        assert [one.error for one in erase(rig)] == [None] * BLOCKS
        assert pages_with(rig, ERASED) == 0
        assert all(rig.get_miss(number) for number in range(BLOCKS))
        assert is_whole(rig, range(BLOCKS, 2 * BLOCKS))
        rig.close()
        if over:
            break
    assert over
    assert len(left) > 3, "it died where some pages were overwritten and others were not"


def test_places_in_use_again_are_not_overwritten(rig: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(rig)
    with monkeypatch.context() as patch:  # it dies before places are struck out
        patch.setattr("kvstore.storage.pending_overwrites.strike", lambda *_: None)
        erase(rig)
        places = overwriting._noted(rig.drive._index)
        assert len(places) == BLOCKS
        for number in range(10, 10 + BLOCKS):
            rig.put(number, payload(KEPT), Durability.SYNCED)
        used = {rig.record_at(number)[0] // PAGE_BYTES for number in range(10, 10 + BLOCKS)}
        assert used & {start for start, _ in places}
        rig.kill()
    rig.open()
    assert is_whole(rig, range(10, 10 + BLOCKS))
    assert is_whole(rig, range(BLOCKS, 2 * BLOCKS))
    assert overwriting._noted(rig.drive._index) == []
    rig.close()


def test_a_place_of_a_later_erasure_is_not_struck_out_by_an_earlier_one(rig: StoreRig) -> None:
    filled(rig)
    index = rig.drive._index
    (entry,) = index.lookup([(TENANT, key(0))])
    assert entry is not None
    start_erasing(rig)
    overwriting.strike(index, [entry._replace(generation=entry.generation + 1)])
    assert len(overwriting._noted(index)) == BLOCKS
    rig.settle()
    assert overwriting._noted(index) == []
    rig.close()


def test_an_erasure_is_refused_while_a_drive_keeps_the_remains_of_an_earlier_one(rig: StoreRig) -> None:
    filled(rig)
    start_erasing(rig)
    places = overwriting._noted(rig.drive._index)
    rig.kill()
    assert rig.disk is not None
    rig.disk = rig.disk.after_kill(1)
    rig.disk.unwritable = {places[0][0] + 1}
    rig.open()
    assert [type(one.error) for one in erase(rig)] == [ReadOnly] * BLOCKS
    rig.close()
    reopen(rig)
    assert [one.error for one in erase(rig)] == [None] * BLOCKS
    assert pages_with(rig, ERASED) == 0
    rig.close()


def test_a_deletion_waits_for_an_erasure_of_its_name(rig: StoreRig) -> None:
    """The erased record has its header until it is overwritten: power loss would bring it back."""
    filled(rig)
    extents, page = rig.drive._extents, rig.record_at(0)[0] // PAGE_BYTES
    extents.pin(page)
    erased = start_erasing(rig)
    put = rig.start_put(0, payload(KEPT), Durability.SYNCED)
    for _ in range(STEPS_MAX):
        rig.poll_once()
    assert rig.put_done[put].error is None
    deletions = [rig.start_delete(number, Durability.SYNCED) for number in (0, BLOCKS)]
    for _ in range(STEPS_MAX):
        rig.poll_once()
    assert erased == []
    assert [tag in rig.delete_done for tag in deletions] == [False, True], "others don't wait"
    extents.unpin(page)
    for _ in range(STEPS_MAX):
        rig.poll_once()
    assert rig.delete_done[deletions[0]].error is None
    assert [one.error for one in erased] == [None] * BLOCKS
    rig.power_loss(1)
    rig.open()
    assert rig.get_miss(0)
    assert pages_with(rig, ERASED) == 0
    rig.close()


def test_an_erased_block_is_overwritten_after_power_loss_even_if_its_name_is_in_use_again(
    rig: StoreRig,
) -> None:
    """The repeated erasure finds the new block, and no other."""
    filled(rig)
    rig.drive._extents.pin(rig.record_at(0)[0] // PAGE_BYTES)
    start_erasing(rig)
    put = rig.start_put(0, payload(KEPT), Durability.SYNCED)
    while put not in rig.put_done:
        rig.poll_once()
    rig.power_loss(1)
    rig.open()
    assert [one.error for one in erase(rig)] == [None] * BLOCKS
    assert pages_with(rig, ERASED) == 0
    rig.close()


@pytest.mark.parametrize("how", ["killed", "power"])
def test_a_block_that_failed_a_check_is_overwritten_despite_any_interruption(
    tmp_path: Path, how: str
) -> None:
    """No erasure would find it without its header, so the header is overwritten last."""
    for step in range(STEPS_MAX):
        rig = StoreRig(tmp_path / str(step), FakeDisk(seed=step))
        filled(rig)
        assert rig.disk is not None
        rig.disk.flip(rig.record_at(0)[0] + 2 * PAGE_BYTES, 3)
        rig.disk.durable = dict(rig.disk.pages)
        assert rig.get(0)[0].miss is not None
        for _ in range(step):
            rig.poll_once()
        over = rig.store.statistics().quarantined_bytes == 0
        if how == "power":
            rig.power_loss(step)
        else:
            rig.kill()
            rig.disk = rig.disk.after_kill(step)
        rig.open()
        assert [one.error for one in erase(rig)] == [None] * BLOCKS
        assert pages_with(rig, ERASED) == 0, step
        assert is_whole(rig, range(BLOCKS, 2 * BLOCKS))
        rig.close()
        if over:
            break
    assert over
    assert step > 1, "it was stopped before all was overwritten"


def test_an_erasure_interrupted_by_a_clean_stop_is_finished_by_the_next_start(rig: StoreRig) -> None:
    filled(rig)
    start_erasing(rig)
    rig.close()
    assert pages_with(rig, ERASED) > 0
    reopen(rig)
    assert pages_with(rig, ERASED) == 0
    assert is_whole(rig, range(BLOCKS, 2 * BLOCKS))
    rig.close()


def test_what_a_clean_stop_leaves_of_an_erasure_is_no_damage(rig: StoreRig) -> None:
    filled(rig)
    start_erasing(rig)
    rig.poll_once()  # a part of a payload is overwritten
    rig.close()
    assert rig.disk is not None
    source = FakeDrives([FakeDisk(rig.disk.pages)])
    report = check(rig.data, source=source, boot_id=rig.boot_id, payloads=True)
    assert report.damage == []
    assert report.counts["records that the next start overwrites, after an interrupted erasure"] > 0
    reopen(rig)
    rig.close()
    report = check(rig.data, source=FakeDrives([FakeDisk(rig.disk.pages)]), boot_id=rig.boot_id)
    assert report.counts["records that the next start overwrites, after an interrupted erasure"] == 0


def test_the_blocks_that_only_one_session_names_are_known_before_it_is_removed(rig: StoreRig) -> None:
    """The blocks left without a reference by its removal, whatever other sessions share with it."""
    rig.open()
    numbers = list(range(1, 2 * SESSION_CHUNK_BLOCKS + 40))
    for number in numbers:
        rig.put(number, b"KV")
    chunk, tail = SESSION_CHUNK_BLOCKS, numbers[-5:]
    rig.append(0, [*numbers, *numbers[:3], *tail])  # some of them twice
    rig.append(1, numbers[chunk : chunk + 10])  # blocks of a chunk that is not shared
    rig.fork(2, 0, chunk + 1)  # shares the first chunk
    for session, count in ((1, 0), (0, len(numbers) - chunk - 1), (2, chunk + 1)):
        name_of = SessionName(TENANT, USER, name(session))
        held = Counter(one for some in rig.store.manifests.own_keys(name_of) for one in some)
        references = rig.store.manifests.references((TENANT, one) for one in held)
        only = {one for one, known in zip(held, references, strict=True) if held[one] == known}
        removed = rig.remove(session)
        assert only == {one for _, one in removed.unreferenced}
        assert len(only) == count
    assert list(rig.store.manifests.own_keys(SessionName(TENANT, USER, name(0)))) == []
    rig.close()
