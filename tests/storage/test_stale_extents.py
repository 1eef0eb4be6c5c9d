"""Erasing a block of a drive that is being encrypted: nothing is left of it in its old place.

The process, or the power, goes at each step of encrypting; then the block is erased. Once that is reported nothing that
it said is on the drive, though the free pages were not looked at yet.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import ReadOnly
from kvstore.limits import ENCRYPT_REST_MS, PAGE_BYTES
from kvstore.storage import overwriting
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.items import DeleteItem
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, StoreRig, key

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.storage.items import DeleteDone

BLOCKS = 3
SAID = tuple(b"-- what user %d said, word by word " % number for number in range(BLOCKS))
STEPS_MAX = 200


def payload(number: int) -> bytes:
    return SAID[number] * (5 * PAGE_BYTES // len(SAID[number]))


def has(rig: StoreRig, number: int) -> bool:
    """Whether anything of a block is readable on the drive."""
    assert rig.disk is not None
    return any(SAID[number][:30] in page for page in rig.disk.pages.values())


def being_encrypted(folder: Path, seed: int) -> StoreRig:
    """A drive that was in use before it had keys, and is being encrypted."""
    rig = StoreRig(folder, FakeDisk(seed=seed))
    rig.open()
    for number in range(BLOCKS):
        assert rig.put(number, payload(number), Durability.SYNCED).error is None
    rig.store.close()
    assert rig.disk is not None
    rig.keyring = FakeKeyring()
    rig.disk = FakeDisk(rig.disk.pages, seed=seed)
    rig.open()
    return rig


def step(rig: StoreRig) -> None:
    rig.clock.now_ms += ENCRYPT_REST_MS
    rig.store.poll()


def erase(rig: StoreRig, number: int) -> DeleteDone:
    done: list[DeleteDone] = []
    rig.store.delete([DeleteItem(TENANT, key(number), Durability.SYNCED, 0, frozenset())], done.extend)
    for _ in range(STEPS_MAX):
        if done:
            return done[0]
        rig.poll_once()
    raise AssertionError("the erasure is not answered")


@pytest.mark.parametrize("how", ["kill", "no-index", "power"])
def test_an_erased_block_is_not_left_where_it_was_before_it_was_encrypted(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    met = set()
    for steps in range(STEPS_MAX):
        rig = being_encrypted(tmp_path / str(steps), steps)
        for _ in range(steps):
            step(rig)
        over = rig.drive._encrypting._sweep is not None
        readable = tuple(has(rig, one) for one in range(BLOCKS))
        met.add((rig.drive.keeping.plain_bytes, rig.drive.puts.rewriting, readable))
        with monkeypatch.context() as patch:
            patch.setattr(Encrypting, "step", lambda _: None)  # nothing takes the old place
            rig.go_on_after(how, steps)
            for number in range(BLOCKS):
                assert rig.get(number)[1] == payload(number), (steps, number)
            for number in range(0, BLOCKS, 2):
                assert erase(rig, number).error is None
                assert not has(rig, number), (steps, number)
                assert rig.get_miss(number)
            for number in range(1, BLOCKS, 2):
                assert rig.get(number)[1] == payload(number), (steps, number)
            rig.close()
        if over:
            break
    assert over
    assert len(met) > 2 * BLOCKS, "it died at different steps"


class PowerGoneError(Exception):
    """The machine has stopped."""


class PowerGoes(FakeDisk):
    """A drive whose machine stops before one of the syncs of its opening."""

    syncs_left = 0

    def sync(self) -> None:
        if not self.syncs_left:
            raise PowerGoneError
        self.syncs_left -= 1
        super().sync()


def has_moved(rig: StoreRig, places: list[tuple[int, int]]) -> bool:
    """Whether the new copy of a block is durable, and its old place is still unchanged on the drive."""
    assert rig.disk is not None
    entries = rig.store.lookup([(TENANT, key(number)) for number in range(BLOCKS)])
    written = {page for page, _ in rig.disk.unsynced}
    new = max(entry.generation for entry in entries if entry is not None)
    return rig.drive.puts.has_synced(new) and written.isdisjoint(range(places[0][0], sum(places[0])))


def test_a_start_that_loses_power_while_overwriting_leaves_the_rest_to_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = being_encrypted(tmp_path, 2)
    assert rig.disk is not None
    while not (places := overwriting._noted(rig.drive._index)) or not has_moved(rig, places):
        step(rig)
    pages, ends = dict(rig.disk.durable), set()
    rig.kill()
    monkeypatch.setattr(Encrypting, "step", lambda _: None)  # nothing takes the old place
    for seed in range(STEPS_MAX):
        shutil.rmtree(rig.data / "index-0")
        rig.disk = disk = PowerGoes(pages, seed=seed)
        disk.syncs_left = seed // 8
        try:
            rig.open()
        except PowerGoneError:
            rig.disk = disk.after_power_loss(seed)
        else:
            break
        left = [page for page in range(places[0][0], sum(places[0])) if any(rig.disk.pages.get(page, b""))]
        ends.add(tuple(left))
        rig.open()
        for number in range(BLOCKS):
            assert rig.get(number)[1] == payload(number)
            assert erase(rig, number).error is None
            assert not has(rig, number), seed
        rig.kill()
    assert len(ends) > 3, "it stopped in the middle of overwriting"


def test_a_start_overwrites_no_old_place_before_the_new_copy_survives_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process died when the index had the new copy and the drive could still lose it."""
    rig = being_encrypted(tmp_path, 2)
    disk, index, copy = rig.disk, rig.data / "index-0", tmp_path / "index of then"
    assert disk is not None
    while not (places := overwriting._noted(rig.drive._index)) or disk.durable == disk.pages:
        step(rig)
    pages, durable, unsynced = dict(disk.pages), dict(disk.durable), list(disk.unsynced)
    rig.kill()
    shutil.copytree(index, copy)
    monkeypatch.setattr(Encrypting, "step", lambda _: None)  # nothing takes the old place
    overwritten = 0
    for seed in range(STEPS_MAX):
        shutil.rmtree(index)
        shutil.copytree(copy, index)
        rig.boot_id = "0" * 36
        rig.disk = disk = PowerGoes(pages, seed=seed)
        disk.durable, disk.unsynced, disk.syncs_left = dict(durable), list(unsynced), seed // 8
        try:
            rig.open()
        except PowerGoneError:
            rig.disk = disk.after_power_loss(seed)
        else:
            break
        overwritten += any(disk.pages.get(page) == bytes(PAGE_BYTES) for page in range(*_until(places[0])))
        rig.boot_id = "1" * 36
        rig.open()
        for number in range(BLOCKS):
            assert rig.get(number)[1] == payload(number), seed
        rig.kill()
    assert overwritten, "it stopped after it had begun to overwrite"


def _until(place: tuple[int, int]) -> tuple[int, int]:
    return place[0], sum(place)


def test_an_erasure_waits_until_the_old_place_is_overwritten(tmp_path: Path) -> None:
    """An earlier get holds it; the erasure, and the block's later puts, end after it."""
    rig = being_encrypted(tmp_path, 1)
    assert rig.disk is not None
    extents = rig.drive._extents
    (entry,) = rig.store.lookup([(TENANT, key(2))])
    assert entry is not None
    extents.pin(entry.offset // PAGE_BYTES)
    for _ in range(STEPS_MAX):
        step(rig)
    assert rig.store.is_putting((TENANT, key(2)))
    done: list[DeleteDone] = []
    rig.store.delete([DeleteItem(TENANT, key(2), Durability.SYNCED, 0, frozenset())], done.extend)
    for _ in range(STEPS_MAX):
        step(rig)
    assert done == []
    assert has(rig, 2)
    assert rig.drive._encrypting._sweep is None, "nothing is said to be clean before"
    extents.unpin(entry.offset // PAGE_BYTES)
    for _ in range(STEPS_MAX):
        if done:
            break
        rig.poll_once()
    assert [one.error for one in done] == [None]
    assert not has(rig, 2)
    rig.close()


def test_a_place_that_cannot_be_overwritten_stops_erasures_and_is_retried(tmp_path: Path) -> None:
    rig = being_encrypted(tmp_path, 1)
    assert rig.disk is not None
    (entry,) = rig.store.lookup([(TENANT, key(0))])
    assert entry is not None
    rig.disk.unwritable = {entry.offset // PAGE_BYTES + 3}
    for _ in range(STEPS_MAX):
        step(rig)
    assert not rig.store.is_putting((TENANT, key(0)))
    assert has(rig, 0)
    assert isinstance(erase(rig, 0).error, ReadOnly)
    assert rig.store.statistics().clear_bytes > 0
    rig.close()
    rig.disk = FakeDisk(rig.disk.pages)
    rig.open()
    assert not has(rig, 0), "it was noted"
    assert erase(rig, 1).error is None
    assert overwriting._noted(rig.drive._index) == []
    rig.close()


def test_a_clean_stop_in_the_middle_leaves_nothing_that_the_next_start_does_not_overwrite(
    tmp_path: Path,
) -> None:
    seen = set()
    for steps in range(STEPS_MAX):
        rig = being_encrypted(tmp_path / str(steps), steps)
        for _ in range(steps):
            step(rig)
        over = rig.drive._encrypting._sweep is not None
        rig.close()
        assert rig.disk is not None
        rig.disk = FakeDisk(rig.disk.pages, seed=steps)
        rig.open()
        seen.add(sum(has(rig, number) for number in range(BLOCKS)))
        for number in range(BLOCKS):
            assert erase(rig, number).error is None
            assert not has(rig, number)
        rig.close()
        if over:
            break
    assert over
    assert len(seen) > 2
