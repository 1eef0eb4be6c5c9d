"""The order rule of writes and the guarantees of a sync, one by one."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import ReadOnly
from kvstore.storage.disk import DiskOpKind
from tests.storage.rig import TENANT, StoreRig, key
from tests.storage.test_doubts import disk_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.storage.disk import DiskOp


def hold(rig: StoreRig, which: Callable[[DiskOp], bool] = lambda _: True) -> None:
    """Hold back all operations in flight."""
    disk_of(rig).held |= {op.tag for op in disk_of(rig).in_flight if which(op)}


def go_on(rig: StoreRig) -> None:
    """Poll until only held operations are in flight."""
    disk = disk_of(rig)
    for _ in range(100):
        rig.store.poll()
        if not any(op.tag not in disk.held for op in disk.in_flight):
            break
    for _ in range(3):
        rig.store.poll()


def release(rig: StoreRig, kind: DiskOpKind, offset: int | None = None) -> None:
    """End the held operations of this kind, at one offset if it is given."""
    disk = disk_of(rig)
    ending = {op.tag for op in disk.in_flight if op.kind is kind and offset in (None, op.offset)}
    assert ending
    disk.held -= ending
    disk._ring_bell()


def until_it_syncs(rig: StoreRig) -> None:
    for _ in range(100):
        if any(op.kind is DiskOpKind.SYNC for op in disk_of(rig).in_flight):
            return
        rig.store.poll()
    raise AssertionError("no sync was begun")


def is_stored(rig: StoreRig, number: int) -> bool:
    return rig.store.lookup([(TENANT, key(number))]) != [None]


@pytest.mark.parametrize("held", [0, 1, 2])
def test_no_generation_is_published_before_all_lower_ones_are_written(fake: StoreRig, held: int) -> None:
    tags = [fake.start_put(number, b"payload") for number in range(4)]
    slow = sorted(op.offset for op in disk_of(fake).in_flight)[held]
    hold(fake, lambda op: op.offset == slow)
    go_on(fake)
    assert [is_stored(fake, number) for number in range(4)] == [number < held for number in range(4)]
    assert set(fake.put_done) == set(tags[:held])
    release(fake, DiskOpKind.WRITE, slow)
    fake.settle()
    generations = [fake.get(number)[0].generation for number in range(4)]
    assert generations == sorted(generations)
    assert fake.reported == tags


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_after_a_failed_write_none_is_published_and_all_before_it_are_kept(
    fake: StoreRig, failing: int
) -> None:
    tags = [fake.start_put(number, b"payload") for number in range(4)]
    last = sorted(op.offset for op in disk_of(fake).in_flight)[failing]
    hold(fake, lambda op: op.offset == last)
    go_on(fake)
    disk_of(fake).faults = {disk_of(fake).operations: -errno.EIO}
    release(fake, DiskOpKind.WRITE, last)
    fake.settle()
    assert [fake.put_done[tag].error is None for tag in tags] == [number < failing for number in range(4)]
    assert [is_stored(fake, number) for number in range(4)] == [number < failing for number in range(4)]


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_of_writes_that_end_together_those_before_a_failed_one_are_kept(
    fake: StoreRig, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tags = [fake.start_put(number, b"payload") for number in range(4)]
    while len(disk_of(fake).in_flight) < len(tags):
        hold(fake)
        fake.store.poll()
    monkeypatch.setattr(disk_of(fake).rng, "shuffle", lambda _: None)
    monkeypatch.setattr(disk_of(fake).rng, "randrange", lambda *ends: ends[-1] - 1)
    disk_of(fake).faults = {disk_of(fake).operations + failing: -errno.EIO}
    disk_of(fake).release()
    fake.settle()
    assert [fake.put_done[tag].error is None for tag in tags] == [number < failing for number in range(4)]
    assert [is_stored(fake, number) for number in range(4)] == [number < failing for number in range(4)]


def test_a_synced_put_is_reported_after_a_sync_that_began_after_its_write(fake: StoreRig) -> None:
    fake.put(9, b"earlier")
    tag = fake.start_put(1, b"payload", Durability.SYNCED)
    until_it_syncs(fake)
    hold(fake)
    go_on(fake)
    assert is_stored(fake, 1)
    assert tag not in fake.put_done
    release(fake, DiskOpKind.SYNC)
    fake.settle()
    assert fake.put_done[tag].error is None


def test_a_sync_does_not_cover_writes_that_ended_after_it_began(fake: StoreRig) -> None:
    first = fake.start_put(1, b"payload", Durability.SYNCED)
    until_it_syncs(fake)
    hold(fake)
    second = fake.start_put(2, b"payload", Durability.SYNCED)
    third = fake.start_put(3, b"payload")
    go_on(fake)
    assert is_stored(fake, 2)
    assert set(fake.put_done) == {third}
    syncs = disk_of(fake).kinds.count(DiskOpKind.SYNC)
    disk_of(fake).faults = {disk_of(fake).operations + 1: -errno.EIO}  # the next sync
    release(fake, DiskOpKind.SYNC)
    fake.settle()
    assert fake.put_done[first].error is None
    assert isinstance(fake.put_done[second].error, ReadOnly)
    assert disk_of(fake).kinds.count(DiskOpKind.SYNC) == syncs + 2
    assert isinstance(fake.put(3, b"payload", Durability.SYNCED).error, ReadOnly)


def test_writes_during_a_sync_do_not_count_as_synced(fake: StoreRig) -> None:
    fake.start_put(1, b"payload", Durability.SYNCED)
    until_it_syncs(fake)
    hold(fake)
    fake.start_put(2, b"payload")
    go_on(fake)
    release(fake, DiskOpKind.SYNC)
    fake.settle()
    syncs = disk_of(fake).kinds.count(DiskOpKind.SYNC)
    assert fake.put(1, b"payload", Durability.SYNCED).error is None
    assert disk_of(fake).kinds.count(DiskOpKind.SYNC) == syncs, "it is"
    assert fake.put(2, b"payload", Durability.SYNCED).error is None
    assert disk_of(fake).kinds.count(DiskOpKind.SYNC) == syncs + 1, "it is not, so that took one more"


def test_pages_are_free_once_their_header_is_wiped_and_not_before(fake: StoreRig) -> None:
    fake.put(1, b"payload", Durability.SYNCED)
    offset, size = fake.record_at(1)
    free = fake.store.statistics().free_bytes
    fake.start_delete(1)
    hold(fake)
    go_on(fake)
    assert fake.store.statistics().free_bytes == free
    fake.start_put(2, b"payload")
    assert all(op.offset != offset for op in disk_of(fake).in_flight if op.length == size)
    disk_of(fake).release()
    fake.settle()
    assert fake.store.statistics().free_bytes == free, "one came and one went"
