"""Puts of one name with different expiries and durabilities: the longest and the highest count."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import Expired, NoSpace, ReadOnly
from kvstore.limits import PAGE_BYTES
from kvstore.miss import MissReason
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.eviction.types import Guard, Reason
from kvstore.storage.fsck import check
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from kvstore.storage.renewals import lives_as_long
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.errors import KvError
    from kvstore.storage.items import PutItem

SOON_MS = 2_000
LATER_MS = 60_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    yield rig
    disk_of(rig).release()
    rig.store.close()


def disk_of(rig: StoreRig) -> FakeDisk:
    assert rig.disk is not None
    return rig.disk


def expiry(rig: StoreRig, number: int = 1) -> int:
    entry = rig.store.lookup([(TENANT, key(number))])[0]
    assert entry is not None
    return entry.expires_ms


def reopened(rig: StoreRig, how: str, seed: int = 1) -> None:
    """Open again after an end of some kind."""
    if how == "closed":
        rig.store.close()
        rig.disk = FakeDisk(disk_of(rig).pages)
    elif how == "power":
        rig.power_loss(seed)
    else:
        rig.kill()
        rig.disk = disk_of(rig).after_kill(seed)
    if how == "scanned":
        shutil.rmtree(rig.data / "index-0")
    rig.open()


def late(rig: StoreRig, ms: int) -> None:
    rig.clock.now_ms += ms
    rig.store.poll()
    rig.settle()


@pytest.mark.parametrize(
    ("one", "other", "long"),
    [(0, 0, True), (0, 5, True), (5, 0, False), (5, 5, True), (6, 5, True), (5, 6, False)],
)
def test_how_expiries_are_compared(one: int, other: int, *, long: bool) -> None:
    assert lives_as_long(one, other) is long


@pytest.mark.parametrize("how", ["running", "closed", "killed", "scanned"])
@pytest.mark.parametrize("wanted_ms", [0, LATER_MS])
def test_a_put_with_a_longer_time_to_live_extends_the_expiry(rig: StoreRig, how: str, wanted_ms: int) -> None:
    start_ms = rig.clock.now_ms
    assert rig.put(1, b"kv", expires_ms=start_ms + SOON_MS).error is None
    at = rig.record_at(1)
    wanted = start_ms + wanted_ms if wanted_ms else 0
    assert rig.put(1, b"kv", expires_ms=wanted).error is None
    assert rig.record_at(1) == at, "only its header was written"
    if how != "running":
        reopened(rig, how)
    assert expiry(rig) == wanted
    late(rig, SOON_MS + 200)
    assert rig.get(1)[1] == b"kv"
    if wanted:
        late(rig, wanted_ms)
        assert rig.get(1)[0].miss is not None
        assert rig.store.statistics().blocks == 0


def test_a_put_with_a_shorter_time_to_live_changes_nothing(rig: StoreRig) -> None:
    rig.put(1, b"kv")
    writes = disk_of(rig).kinds.count(DiskOpKind.WRITE)
    assert rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS).error is None
    assert disk_of(rig).kinds.count(DiskOpKind.WRITE) == writes
    late(rig, SOON_MS + 200)
    assert rig.get(1)[1] == b"kv"


@pytest.mark.parametrize("how", ["running", "scanned"])
def test_concurrent_puts_of_one_name_live_as_long_as_the_longest(rig: StoreRig, how: str) -> None:
    now = rig.clock.now_ms
    tags = [rig.start_put(1, b"kv", expires_ms=now + ms) for ms in (SOON_MS, LATER_MS, SOON_MS + 1)]
    rig.settle()
    assert [rig.put_done[tag].error for tag in tags] == [None] * 3
    if how == "scanned":
        reopened(rig, how)
    assert expiry(rig) == now + LATER_MS


def test_a_put_during_the_write_of_the_first_still_extends_the_expiry(rig: StoreRig) -> None:
    disk = disk_of(rig)
    now = rig.clock.now_ms
    first = rig.start_put(1, b"kv", expires_ms=now + SOON_MS)
    assert disk.in_flight, "its header is made"
    second = rig.start_put(1, b"kv")
    third = rig.start_put(1, b"kv", expires_ms=now + LATER_MS)
    rig.settle()
    assert [rig.put_done[tag].error for tag in (first, second, third)] == [None] * 3
    assert expiry(rig) == 0
    reopened(rig, "scanned")
    assert expiry(rig) == 0


def together(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch, *puts: tuple[bytes, int]
) -> list[KvError | None]:
    """Put blocks in one batch, given as payload and expiry."""
    items: list[PutItem] = []
    with monkeypatch.context() as collecting:
        collecting.setattr(rig.store, "put", lambda some, _: items.extend(some))
        tags = [rig.start_put(1, payload, expires_ms=expires_ms) for payload, expires_ms in puts]
    rig.store.put(items, rig._puts_done)
    rig.settle()
    return [rig.put_done[tag].error for tag in tags]


def test_a_put_of_another_length_extends_nothing(rig: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    soon = rig.clock.now_ms + SOON_MS
    first, other = together(rig, monkeypatch, (b"kv", soon), (b"longer", 0))
    assert first is None
    assert other is not None
    assert expiry(rig) == soon


def test_a_batch_with_one_name_writes_it_once_with_the_longest_expiry(
    rig: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = rig.clock.now_ms
    writes = disk_of(rig).kinds.count(DiskOpKind.WRITE)
    errors = together(rig, monkeypatch, (b"kv", now + SOON_MS), (b"kv", now + LATER_MS), (b"kv", now + 1))
    assert errors == [None] * 3
    assert expiry(rig) == now + LATER_MS
    assert disk_of(rig).kinds.count(DiskOpKind.WRITE) == writes + 1


def test_an_extension_is_acknowledged_once_it_is_on_the_drive(rig: StoreRig) -> None:
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    disk = disk_of(rig)
    tag = rig.start_put(1, b"kv")
    disk.held = {op.tag for op in disk.in_flight}
    assert disk.held
    for _ in range(20):
        rig.poll_once()
    assert tag not in rig.put_done
    disk.release()
    rig.settle()
    assert rig.put_done[tag].error is None


def test_a_failed_extension_is_not_acknowledged(rig: StoreRig) -> None:
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    disk = disk_of(rig)
    disk.faults[disk.operations + 1] = -5  # behind the read of its header
    assert isinstance(rig.put(1, b"kv").error, ReadOnly)
    assert isinstance(rig.put(1, b"kv").error, ReadOnly)
    assert rig.put(1, b"kv", expires_ms=rig.clock.now_ms + 1).error is None, "it has that already"


@pytest.mark.parametrize("seed", range(12))
def test_a_synced_extension_survives_power_loss(rig: StoreRig, seed: int) -> None:
    assert rig.put(1, b"kv", Durability.SYNCED, expires_ms=rig.clock.now_ms + SOON_MS).error is None
    if seed % 2:  # the header has been written by one who did not ask for a sync
        assert rig.put(1, b"kv").error is None
    assert rig.put(1, b"kv", Durability.SYNCED).error is None
    reopened(rig, "power", seed)
    assert expiry(rig) == 0
    late(rig, SOON_MS + 200)
    assert rig.get(1)[1] == b"kv"


@pytest.mark.parametrize("seed", range(8))
def test_a_synced_put_of_a_written_block_is_synced_before_it_is_acknowledged(
    rig: StoreRig, seed: int
) -> None:
    assert rig.put(1, b"kv").error is None
    assert rig.put(1, b"kv", Durability.SYNCED).error is None
    reopened(rig, "power", seed)
    assert rig.get(1)[1] == b"kv"


def test_a_synced_put_along_with_a_written_one_of_its_name_is_synced(rig: StoreRig) -> None:
    tags = [rig.start_put(1, b"kv"), rig.start_put(1, b"kv", Durability.SYNCED)]
    rig.settle()
    assert [rig.put_done[tag].error for tag in tags] == [None, None]
    reopened(rig, "power", 3)
    assert rig.get(1)[1] == b"kv"


@pytest.mark.parametrize("seed", range(30))
def test_a_kill_or_a_power_loss_in_the_middle_leaves_one_expiry_or_the_other(
    rig: StoreRig, seed: int
) -> None:
    soon = rig.clock.now_ms + SOON_MS
    rig.put(1, b"kv" * 3000, Durability.SYNCED, expires_ms=soon)
    rig.start_put(1, b"kv" * 3000)
    for _ in range(seed % 4):
        rig.poll_once()
    reopened(rig, ["killed", "power", "scanned"][seed % 3], seed)
    assert expiry(rig) in {0, soon}
    assert rig.get(1)[1] == b"kv" * 3000
    rig.kill()
    rig.disk = disk_of(rig).after_kill(seed)
    report = check(rig.data, source=FakeDrives([FakeDisk(disk_of(rig).pages)]), boot_id=rig.boot_id)
    assert report.damage == []
    rig.open()


def test_an_expiry_extended_by_a_killed_process_is_not_damage(rig: StoreRig) -> None:
    """The header says more than the index; it was not acknowledged."""
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    rig.start_put(1, b"kv")
    disk = disk_of(rig)
    while not any(op.kind is DiskOpKind.WRITE for op in disk.in_flight):  # it is read before
        rig.poll_once()
    while disk.in_flight:
        disk.reap()
    rig.kill()
    rig.disk = disk.after_kill(1)
    report = check(rig.data, source=FakeDrives([FakeDisk(disk_of(rig).pages)]), boot_id=rig.boot_id)
    assert report.damage == []
    rig.open()
    assert not rig.store.statistics().rebuilt
    assert rig.get(1)[1] == b"kv"


def test_a_get_during_the_extension_is_a_hit(rig: StoreRig) -> None:
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    disk = disk_of(rig)
    item = rig.start_get(1)
    disk.held = {op.tag for op in disk.in_flight if op.kind is DiskOpKind.READ}
    rig.start_put(1, b"kv")
    for _ in range(20):
        rig.poll_once()
    disk.release()
    rig.settle()
    assert rig.get_done[item.tag].miss is None


def test_nothing_is_put_where_a_header_is_being_written_until_that_has_ended(rig: StoreRig) -> None:
    """Its block is dropped meanwhile, and others are put: the late header must not come back, nor lie over them."""
    for number in (2, 1, 3):
        rig.put(number, b"kv", expires_ms=(number == 1) * (rig.clock.now_ms + SOON_MS))
    rig.delete(2)  # so that there is another place for block 1
    offset, _ = rig.record_at(1)
    disk = disk_of(rig)
    tag = rig.start_put(1, b"kv")
    while not any(op.kind is DiskOpKind.WRITE for op in disk.in_flight):  # it is read before
        rig.poll_once()
    disk.held = {op.tag for op in disk.in_flight}
    rig.drive.keeping.drop([(TENANT, key(1))], Reason.DELETED)
    puts = [rig.start_put(number, bytes([number]) * 5000) for number in range(10, 40)]
    for _ in range(200):
        rig.poll_once()
    assert all(rig.record_at(number)[0] != offset for number in range(10, 40))
    disk.release()
    rig.settle()
    assert all(rig.put_done[one].error is None for one in (tag, *puts))
    assert rig.get(1)[1] == b"kv", "it was put, since it was not there any more"
    assert expiry(rig) == 0
    assert rig.delete(1).found
    reopened(rig, "scanned")
    assert rig.get(1)[0].miss is not None, "the late header is gone as well"
    assert all(rig.get(number)[1] == bytes([number]) * 5000 for number in range(10, 40))


def test_a_deletion_follows_the_put_that_extends_the_expiry(rig: StoreRig) -> None:
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    put = rig.start_put(1, b"kv")
    gone = rig.start_delete(1)
    rig.settle()
    assert rig.put_done[put].error is None
    assert rig.delete_done[gone].found
    assert rig.get(1)[0].miss is not None
    reopened(rig, "scanned")
    assert rig.get(1)[0].miss is not None


def test_a_deletion_follows_all_puts_before_it(rig: StoreRig) -> None:
    """Of which the second extends the first one's expiry, and ends later."""
    now = rig.clock.now_ms
    first = rig.start_put(1, b"kv", expires_ms=now + SOON_MS)
    assert disk_of(rig).in_flight, "its header is made"
    second = rig.start_put(1, b"kv")
    gone = rig.start_delete(1)
    rig.settle()
    assert [rig.put_done[tag].error for tag in (first, second)] == [None, None]
    assert rig.delete_done[gone].found
    assert rig.get(1)[0].miss is not None
    assert rig.reported.index(second) < rig.reported.index(gone)


def test_a_block_does_not_expire_while_its_expiry_is_extended(rig: StoreRig) -> None:
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    disk = disk_of(rig)
    rig.start_put(1, b"kv")
    disk.held = {op.tag for op in disk.in_flight}
    at = rig.record_at(1)
    rig.clock.now_ms += SOON_MS + 500
    for _ in range(20):
        rig.poll_once()
    disk.release()
    rig.settle()
    late(rig, 500)
    assert rig.get(1)[1] == b"kv"
    assert rig.record_at(1) == at, "it was not put anew"


@pytest.mark.parametrize("seed", range(6))
def test_random_puts_of_few_names_live_as_long_as_promised(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rig = StoreRig(tmp_path / "data", FakeDisk(seed=seed))
    rig.open()
    promised: dict[int, int] = {}  # until when; what is acknowledged only adds to it
    for _ in range(120):
        number = rng.randrange(6)
        now = rig.clock.now_ms
        expires = rng.choice([0, now + rng.randrange(1, 4000), now + rng.randrange(1, 4000)])
        tag = rig.start_put(
            number, b"kv%d" % number, rng.choice([Durability.WRITTEN, Durability.SYNCED]), expires_ms=expires
        )
        if rng.random() < 0.6:
            rig.settle()
            assert rig.put_done[tag].error is None
        promised[number] = max(promised.get(number, 0), expires or 1 << 60)
        if rng.random() < 0.1:
            rig.settle()
            reopened(rig, rng.choice(["closed", "killed", "scanned"]), rng.randrange(99))
        if rng.random() < 0.3:
            rig.settle()
            late(rig, rng.randrange(1500))
        rig.settle()
        for number_, until in promised.items():
            if until > rig.clock.now_ms:
                assert rig.get(number_)[1] == b"kv%d" % number_
    rig.store.close()


def test_with_several_drives_the_expiry_is_extended_where_the_block_is(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", disks=[FakeDisk(), FakeDisk(seed=1)])
    rig.open()
    soon = rig.clock.now_ms + SOON_MS
    for number in range(20):
        assert rig.put(number, b"kv", expires_ms=soon).error is None
        assert rig.put(number, b"kv").error is None
    assert [expiry(rig, number) for number in range(20)] == [0] * 20
    assert {rig.home(number) for number in range(20)} == {0, 1}
    assert rig.store.statistics().blocks == 20
    rig.store.close()


def test_a_failed_drive_that_cannot_extend_an_expiry_does_not_end_the_block(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", disks=[FakeDisk(), FakeDisk(seed=1)])
    rig.open()
    number = next(one for one in range(20) if rig.home(one) == 0)
    rig.put(number, b"kv", expires_ms=rig.clock.now_ms + SOON_MS)
    rig.disks[0].fault_from = (rig.disks[0].operations, -5)
    other = next(one for one in range(20, 60) if rig.home(one) == 0)
    assert rig.put(other, b"fails").error is not None
    assert rig.put(number, b"kv").error is None
    late(rig, SOON_MS + 500)
    assert rig.get(number)[1] == b"kv"
    rig.store.close()


# What is over, and what cannot stay.


@pytest.mark.parametrize("ago_ms", [0, 1, 10**9])
def test_a_put_whose_time_to_live_has_passed_is_refused(rig: StoreRig, ago_ms: int) -> None:
    assert isinstance(rig.put(1, b"kv", expires_ms=rig.clock.now_ms - ago_ms).error, Expired)
    assert rig.store.statistics().blocks == 0
    rig.put(1, b"kv")
    assert isinstance(rig.put(1, b"kv", expires_ms=rig.clock.now_ms - ago_ms).error, Expired)
    assert rig.get(1)[1] == b"kv"


PAGES = 512
FIT = (PAGES - 4 - 2) // 3  # blocks of 8,000 bytes, beside the record of one session


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
    monkeypatch.setattr("kvstore.storage.superblock.DRIVE_CAPACITY_BYTES_MIN", 1)
    rig = StoreRig(tmp_path / "data", FakeDisk(capacity=PAGES * PAGE_BYTES))
    rig.open()
    yield rig
    rig.store.close()


def fill_with_protected(rig: StoreRig, blocks: int) -> None:
    for number in range(blocks):
        assert rig.put(number, b"p" * 8000).error is None
    assert rig.append(1, range(blocks)).error is None
    assert rig.store.protect(SessionName(TENANT, USER, name(1))) is None


def test_with_everything_protected_a_put_is_no_space_and_not_acknowledged_and_evicted(
    small: StoreRig,
) -> None:
    refused = 0
    for number in range(400):
        done = small.put(number, b"p" * 8000)
        if done.error is not None:
            assert isinstance(done.error, NoSpace)
            assert "are protected" in str(done.error)
            refused += 1
            continue
        late(small, 200)
        assert small.get(number)[0].miss is None, "it was acknowledged"
        small.store.hold([(TENANT, key(number))], Guard.PROTECTED)
    assert refused > 200
    assert small.store.statistics().free_bytes >= small.drive.keeping.marks.low_pages * PAGE_BYTES
    assert small.store.statistics().blocks == 400 - refused


def test_room_beside_protected_blocks_is_used_and_the_last_put_stays(small: StoreRig) -> None:
    fill_with_protected(small, FIT - 8)
    for number in range(1000, 1100):
        assert small.put(number, b"n" * 8000).error is None
        late(small, 200)
        assert small.get(number)[0].miss is None
    small.store.unprotect(SessionName(TENANT, USER, name(1)))
    assert small.drive.keeping.core.protected_pages == 0


def test_protected_pages_are_counted_through_every_change(small: StoreRig) -> None:
    core = small.drive.keeping.core
    for number in range(6):
        small.put(number, b"p" * 8000)
    session = SessionName(TENANT, USER, name(1))
    small.append(1, range(4))
    small.store.protect(session, 2)
    assert core.protected_pages == 6
    held = small.store.hold([(TENANT, key(5)), (TENANT, key(0))], Guard.PROTECTED)
    assert core.protected_pages == 9
    small.store.protect(session, 4)
    assert core.protected_pages == 15
    small.delete(5)
    assert core.protected_pages == 12
    small.store.release([one for one in held if one is not None], Guard.PROTECTED)
    small.store.unprotect(session)
    assert core.protected_pages == 0


# Sessions.


def limit_of(rig: StoreRig) -> int:
    stored = rig.store.manifests.get(SessionName(TENANT, USER, name(1)))
    assert stored is not None
    return stored.manifest.expires_ms


def test_a_repeated_append_still_sets_the_sessions_expiry(rig: StoreRig) -> None:
    for number in range(4):
        rig.put(number, b"kv")
    soon = rig.clock.now_ms + SOON_MS
    assert rig.append(1, [0, 1], first_block=0, expires_ms=soon).blocks == 2
    assert rig.append(1, [2, 3], first_block=2).blocks == 4
    assert rig.append(1, [0, 1], first_block=0, expires_ms=0).blocks == 4
    assert limit_of(rig) == 0
    assert rig.session(1) == [0, 1, 2, 3]
    reopened(rig, "scanned")
    assert limit_of(rig) == 0


def protected(rig: StoreRig) -> list[bool]:
    return [
        rig.drive.keeping.core.is_guarded(entry.generation)
        for entry in rig.store.lookup([(TENANT, key(number)) for number in range(4)])
        if entry is not None
    ]


def protect(rig: StoreRig, blocks: int, durability: Durability = Durability.SYNCED) -> None:
    item = SessionItem(SessionName(TENANT, USER, name(1)), SessionStep.PROTECT, durability, 0, blocks=blocks)
    assert rig.change_session(item).error is None


@pytest.mark.parametrize("how", ["closed", "killed", "scanned", "power"])
def test_protection_survives_a_restart(rig: StoreRig, how: str) -> None:
    for number in range(4):
        rig.put(number, b"kv", Durability.SYNCED)
    rig.append(1, range(4), Durability.SYNCED)
    protect(rig, 3)
    assert protected(rig) == [True, True, True, False]
    reopened(rig, how, 5)
    assert protected(rig) == [True, True, True, False]
    protect(rig, 0)
    assert protected(rig) == [False] * 4
    reopened(rig, how, 6)
    assert protected(rig) == [False] * 4


def test_protection_stays_with_a_session_that_is_appended_truncated_and_limited_and_not_with_its_fork(
    rig: StoreRig,
) -> None:
    for number in range(4):
        rig.put(number, b"kv")
    rig.append(1, range(2))
    protect(rig, 3)
    rig.append(1, range(2, 4))
    assert protected(rig) == [True, True, True, False]
    rig.fork(2, 1, 4)
    rig.truncate(1, 3)
    rig.append(1, [3])
    item = SessionItem(
        SessionName(TENANT, USER, name(1)),
        SessionStep.LIMIT,
        Durability.WRITTEN,
        0,
        expires_ms=rig.clock.now_ms + LATER_MS,
    )
    rig.change_session(item)
    reopened(rig, "scanned")
    assert protected(rig) == [True, True, True, False]
    rig.remove(1)
    assert protected(rig) == [False] * 4
    reopened(rig, "scanned")
    assert protected(rig) == [False] * 4


def test_a_protected_block_that_expires_and_is_put_again_is_protected_in_every_session(rig: StoreRig) -> None:
    """The session that it joined last is not the one that protects it."""
    soon = rig.clock.now_ms + SOON_MS
    for number in range(4):
        rig.put(number, b"kv", expires_ms=soon)
    rig.append(1, range(4))
    protect(rig, 4)
    rig.fork(2, 1, 4)
    rig.clock.now_ms = soon + 1
    for number in range(4):
        assert rig.put(number, b"kv").error is None
    assert protected(rig) == [True] * 4


def test_nothing_of_a_protected_session_is_evicted_when_a_drive_is_full_after_a_restart(
    small: StoreRig,
) -> None:
    for number in range(40):
        small.put(number, b"p" * 8000)
    small.append(1, range(40))
    protect(small, 40)
    small.store.close()
    small.disk = FakeDisk(disk_of(small).pages, capacity=PAGES * PAGE_BYTES)
    small.open()
    for number in range(1000, 1300):
        assert small.put(number, b"n" * 8000).error is None
    assert all(small.get(number)[1] == b"p" * 8000 for number in range(40))


def test_a_session_that_does_not_exist_is_not_protected(rig: StoreRig) -> None:
    item = SessionItem(
        SessionName(TENANT, USER, name(1)), SessionStep.PROTECT, Durability.WRITTEN, 0, blocks=1
    )
    assert rig.change_session(item).error is not None


def test_a_miss_of_an_expired_block_says_so(rig: StoreRig) -> None:
    rig.put(1, b"kv", expires_ms=rig.clock.now_ms + 1)
    rig.clock.now_ms += 1
    done, _ = rig.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.EXPIRED
