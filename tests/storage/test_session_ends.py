"""Sessions that expire: when they are removed, what that frees, and that no restart extends them."""

from __future__ import annotations

import random
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.errors import NoSession
from kvstore.limits import SESSIONS_EXPIRED_AT_ONCE
from kvstore.storage.deadlines import Deadlines
from kvstore.storage.eviction.types import Guard
from kvstore.storage.fsck import check
from kvstore.storage.items import SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.pair import fail, user_drive
from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

HOUR_MS = 3_600_000


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(6):
        rig.put(number, b"x")
    yield rig
    rig.store.close()


def pass_by(rig: StoreRig, passing_ms: int) -> None:
    rig.clock.now_ms += passing_ms
    rig.poll_once()
    rig.settle()


def references(rig: StoreRig, *numbers: int) -> list[int]:
    return rig.store.manifests.references((TENANT, key(number)) for number in numbers)


def limit(rig: StoreRig, number: int, lives_ms: int) -> None:
    ends_ms = rig.clock.now_ms + lives_ms if lives_ms else 0
    tag = rig.start_step(number, SessionStep.LIMIT, expires_ms=ends_ms)
    rig.settle()
    assert rig.session_done[tag].error is None


def reopen(rig: StoreRig, *, scanned: bool) -> None:
    rig.store.close()
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    if scanned:
        for folder in rig.data.glob("index*"):
            shutil.rmtree(folder)
    rig.open()


def test_a_session_ends_at_its_time_and_its_blocks_stay_without_its_name(rig: StoreRig) -> None:
    rig.append(1, [0, 1], expires_ms=rig.clock.now_ms + HOUR_MS)
    rig.append(2, [1, 2])
    pass_by(rig, HOUR_MS - 1)
    assert rig.session(1) == [0, 1]
    pass_by(rig, 1)
    assert rig.session(1) is None
    assert references(rig, 0, 1, 2) == [0, 1, 1]
    assert rig.get(0)[0].miss is None
    assert rig.session(2) == [1, 2]


def test_the_last_time_to_live_counts(rig: StoreRig) -> None:
    rig.append(1, [0], expires_ms=rig.clock.now_ms + 1000)
    pass_by(rig, 500)
    rig.append(1, [1], expires_ms=rig.clock.now_ms + 1000)
    pass_by(rig, 600)
    assert rig.session(1) == [0, 1]
    rig.append(1, [2])  # says nothing of it
    pass_by(rig, 400)
    assert rig.session(1) is None
    rig.append(1, [3], expires_ms=rig.clock.now_ms + 1000)
    limit(rig, 1, 0)
    pass_by(rig, HOUR_MS)
    assert rig.session(1) == [3]
    limit(rig, 1, 10)
    pass_by(rig, 10)
    assert rig.session(1) is None


def test_truncating_keeps_the_time_and_a_fork_has_none(rig: StoreRig) -> None:
    rig.append(1, [0, 1, 2], expires_ms=rig.clock.now_ms + 1000)
    rig.truncate(1, 2)
    rig.fork(2, 1, 2)
    pass_by(rig, 1000)
    assert rig.session(1) is None
    assert rig.session(2) == [0, 1]


def test_a_step_after_the_end_meets_no_session(rig: StoreRig) -> None:
    """Without a check of the clock in between."""
    for number in range(1, 5):
        rig.append(number, [0, 1], expires_ms=rig.clock.now_ms + 1000)
    rig.clock.now_ms += 1000
    assert rig.append(1, [3], first_block=0).blocks == 1
    assert isinstance(rig.truncate(2, 1).error, NoSession)
    assert isinstance(rig.fork(9, 3, 1).error, NoSession)
    tag = rig.start_step(4, SessionStep.LIMIT, expires_ms=rig.clock.now_ms + HOUR_MS)
    rig.settle()
    assert isinstance(rig.session_done[tag].error, NoSession)
    pass_by(rig, 0)
    assert [rig.session(number) for number in range(1, 5)] == [[3], None, None, None]
    assert references(rig, 0, 1, 3) == [0, 0, 1]


def test_an_extension_that_arrives_before_the_end_counts(rig: StoreRig) -> None:
    rig.append(1, [0], expires_ms=rig.clock.now_ms + 1000)
    rig.start_step(1, SessionStep.LIMIT, expires_ms=rig.clock.now_ms + HOUR_MS)  # is on its way to the drive
    pass_by(rig, 1000)
    assert rig.session(1) is None or rig.session(1) == [0]
    rig.append(2, [0], expires_ms=rig.clock.now_ms + 1000)
    limit(rig, 2, HOUR_MS)
    pass_by(rig, 1000)
    assert rig.session(2) == [0]


@pytest.mark.parametrize("scanned", [False, True])
def test_the_time_survives_a_restart(rig: StoreRig, *, scanned: bool) -> None:
    rig.append(1, [0, 1], expires_ms=rig.clock.now_ms + HOUR_MS)
    rig.append(2, [0, 1], expires_ms=rig.clock.now_ms + HOUR_MS)
    limit(rig, 2, 0)
    reopen(rig, scanned=scanned)
    pass_by(rig, HOUR_MS - 1)
    assert rig.session(1) == [0, 1]
    pass_by(rig, 1)
    assert rig.session(1) is None
    assert rig.session(2) == [0, 1]
    rig.append(3, [0], expires_ms=rig.clock.now_ms + HOUR_MS)
    rig.store.close()
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    rig.clock.now_ms += HOUR_MS
    rig.open()
    pass_by(rig, 0)
    assert rig.session(3) is None, "its time was over while nobody looked"


def test_a_session_restored_by_power_loss_is_still_expired(rig: StoreRig) -> None:
    rig.append(1, [0, 1], expires_ms=rig.clock.now_ms + 1000)
    pass_by(rig, 1000)
    for seed in range(5):
        rig.power_loss(seed)
        rig.open()
        pass_by(rig, 0)
        assert rig.session(1) is None


def test_its_protection_ends_with_it(rig: StoreRig) -> None:
    rig.append(1, [0, 1], expires_ms=rig.clock.now_ms + 1000)
    rig.store.protect(SessionName(TENANT, USER, name(1)))
    assert rig.store.statistics().eviction.guarded[Guard.PROTECTED] == 2
    pass_by(rig, 1000)
    assert rig.store.statistics().eviction.guarded[Guard.PROTECTED] == 0
    assert rig.store.statistics().eviction.protected_sessions == 0


def test_many_that_end_at_once_are_removed_in_portions_and_a_check_finds_nothing(rig: StoreRig) -> None:
    count = 2 * SESSIONS_EXPIRED_AT_ONCE + 5
    for number in range(count):
        rig.append(number, [number % 6], expires_ms=rig.clock.now_ms + 1000)
    rig.clock.now_ms += 1000
    left = []
    for _ in range(3):
        rig.poll_once()
        left.append(sum(rig.session(number) is not None for number in range(count)))
        rig.settle()
    assert left[0] >= count - 2 * SESSIONS_EXPIRED_AT_ONCE
    while any(rig.session(number) is not None for number in range(count)):
        rig.poll_once()
    rig.settle()
    assert references(rig, *range(6)) == [0] * 6
    rig.store.close()
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    disk = FakeDisk(rig.disks[0].pages)
    assert check(rig.data, source=FakeDrives([disk]), boot_id=rig.boot_id).damage == []
    rig.open()


def test_with_several_drives_it_ends_wherever_it_is_and_its_name_is_free(pair: StoreRig) -> None:
    for number in range(20):
        pair.put(number, b"x")
    pair.append(1, range(20), expires_ms=pair.clock.now_ms + 1000)
    pass_by(pair, 1000)
    assert pair.session(1) is None
    while any(drive.is_busy for drive in pair.store.drives):
        pair.poll()
    fail(pair, user_drive(pair))
    assert pair.append(1, [3]).error is None
    assert pair.session(1) == [3]


def test_deadlines_are_returned_once_in_order_and_memory_is_bounded() -> None:
    rng = random.Random(7)
    deadlines, model = Deadlines(), {}
    names = [SessionName(bytes([one]), b"", b"") for one in range(50)]
    now_ms = 0
    for _ in range(5000):
        one, time_ms = rng.choice(names), rng.choice([0, now_ms + rng.randrange(1000)])
        deadlines.set(one, time_ms)
        model[one] = time_ms
        now_ms += rng.choice([0, 0, 1, 20])
        most = rng.choice([0, 1, 100])
        given = deadlines.due(now_ms, most)
        due = sorted((time_ms, one) for one, time_ms in model.items() if 0 < time_ms <= now_ms)
        assert given == [one for _, one in due[:most]]
        for one in given:
            model[one] = 0
        assert len(deadlines) == sum(time_ms > 0 for time_ms in model.values())
        assert len(deadlines._heap) <= 2 * len(names) + 1025
