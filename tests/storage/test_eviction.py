"""Eviction through the store: which blocks are evicted, which stay, and which puts wait."""

from __future__ import annotations

import random
from collections import OrderedDict
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import NoSpace, ProtocolError, ReadOnly
from kvstore.limits import PAGE_BYTES, ROOM_WAIT_MS_MAX, SESSION_BLOCKS_MAX, TIMER_TICK_MS
from kvstore.miss import Miss, MissReason
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.eviction.types import Guard, Reason, Refusal
from kvstore.storage.eviction_events import Held, watermarks
from kvstore.storage.manifests import SessionName
from kvstore.wire.record import record_bytes, records_begin
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, Slots, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGES = 128  # of a small drive
RECORDS_PAGES = PAGES - records_begin(PAGES * PAGE_BYTES) // PAGE_BYTES
PAYLOAD = b"payload!" * 1024  # three pages with the header
PAYLOAD_PAGES = 3
FIT = RECORDS_PAGES // PAYLOAD_PAGES


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
    monkeypatch.setattr("kvstore.storage.superblock.DRIVE_CAPACITY_BYTES_MIN", 1)
    rig = StoreRig(tmp_path / "data", FakeDisk(capacity=PAGES * PAGE_BYTES))
    rig.open()
    yield rig
    disk_of(rig).release()  # what a failed test has left, so that closing does not wait for it
    rig.store.close()


def payload_of(number: int) -> bytes:
    return number.to_bytes(8, "little") * 1024


def disk_of(rig: StoreRig) -> FakeDisk:
    assert rig.disk is not None
    return rig.disk


def fill(rig: StoreRig, first: int, count: int) -> None:
    for number in range(first, first + count):
        assert rig.put(number, payload_of(number)).error is None


def stored(rig: StoreRig, numbers: range) -> list[int]:
    entries = rig.store.lookup([(TENANT, key(number)) for number in numbers])
    return [number for number, entry in zip(numbers, entries, strict=True) if entry is not None]


def reason(rig: StoreRig, number: int) -> Reason | None:
    gone = rig.store.explain(TENANT, key(number)).gone
    return gone.reason if gone else None


def session_name(number: int) -> SessionName:
    return SessionName(TENANT, USER, name(number))


def reopen(rig: StoreRig) -> None:
    rig.store.close()
    rig.disk = FakeDisk(disk_of(rig).pages, capacity=PAGES * PAGE_BYTES)
    rig.open()


def some_polls(rig: StoreRig) -> None:
    for _ in range(20):
        rig.poll_once()


@pytest.mark.parametrize("policy", ["lru", "s3fifo"])
def test_a_store_far_smaller_than_its_puts_accepts_every_put(small: StoreRig, policy: str) -> None:
    small.store.close()
    small.disk = FakeDisk(disk_of(small).pages, capacity=PAGES * PAGE_BYTES)
    small.policy = policy
    small.open()
    rng = random.Random(1)
    payloads = {number: rng.randbytes(rng.choice([1, 4096, 9000, 60_000])) for number in range(300)}
    for number, payload in payloads.items():
        small.start_put(number, payload, rng.choice([Durability.WRITTEN, Durability.SYNCED]))
        if rng.random() < 0.3:
            small.settle()
    small.settle()
    assert [done.error for done in small.put_done.values() if done.error] == []
    hits = 0
    for number, payload in payloads.items():
        done, got = small.get(number)
        if done.miss is None:
            hits += 1
            assert got == payload
        else:
            assert done.miss.reason is MissReason.EVICTED
            assert "evicted for" in done.miss.detail
    assert hits > 3
    statistics = small.store.statistics()
    assert statistics.eviction.policy == policy
    assert statistics.eviction.blocks == statistics.blocks == hits
    assert statistics.waiting_for_room == 0


def test_a_real_drive_far_smaller_than_its_puts_accepts_every_put(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", slots=Slots(64, 1 << 20))
    rig.open()
    rng = random.Random(2)
    seed_of = {number: rng.choice([1, 70_000, 500_000, 1_000_000]) for number in range(120)}
    for number, length in seed_of.items():
        rig.start_put(number, random.Random(number).randbytes(length))
        if number % 20 == 19:
            rig.settle()
    assert [done.error for done in rig.put_done.values() if done.error] == []
    assert sum(map(record_bytes, seed_of.values())) > 2 * (16 << 20)
    for number, length in seed_of.items():
        done, got = rig.get(number)
        if done.miss is None:
            assert got == random.Random(number).randbytes(length)
        else:
            assert done.miss.reason is MissReason.EVICTED
    rig.store.close()
    rig.open()
    assert not rig.store.statistics().rebuilt
    assert len(stored(rig, range(120))) > 10
    rig.store.close()


@pytest.mark.parametrize("seed", range(4))
def test_lru_is_exact_through_the_store(small: StoreRig, seed: int) -> None:
    rng = random.Random(seed)
    uses: OrderedDict[int, None] = OrderedDict()  # of what is stored, oldest first
    lost = 0
    for _ in range(400):
        number = rng.randrange(3 * FIT)
        if rng.random() < 0.5:
            assert small.put(number, payload_of(number)).error is None
        elif small.get(number)[0].miss is not None:
            continue
        uses.pop(number, None)
        uses[number] = None
        here = set(stored(small, range(3 * FIT)))
        while len(uses) > len(here):
            oldest = next(iter(uses))
            assert oldest not in here, "another one went, though this one was used longer ago"
            del uses[oldest]
            lost += 1
        assert here == set(uses)
    assert lost > 50


def test_repeated_puts_and_gets_from_memory_count_as_uses(small: StoreRig) -> None:
    fill(small, 0, FIT - 2)
    small.put(0, payload_of(0))
    small.store.used([small.store.lookup([(TENANT, key(1))])[0].generation])  # type: ignore[union-attr]
    fill(small, 100, FIT - 6)
    assert {0, 1} <= set(stored(small, range(10)))
    assert len(stored(small, range(FIT))) < 10


def test_room_is_made_ahead_so_that_a_put_finds_it(small: StoreRig) -> None:
    fill(small, 0, 3 * FIT)
    marks = watermarks(RECORDS_PAGES)
    assert 0 < marks.low_pages < marks.high_pages < RECORDS_PAGES // 16
    small.settle()
    assert small.store.statistics().free_bytes >= marks.low_pages * PAGE_BYTES


def test_the_beginning_of_a_session_remains(small: StoreRig) -> None:
    fill(small, 0, 6)
    small.append(1, range(6))
    fill(small, 10, 6)
    small.append(2, [0, 1, 2, *range(10, 13)])  # it shares a prefix
    for number in range(100, 100 + 2 * FIT):
        small.put(number, payload_of(number))
        here = stored(small, range(6))
        assert here == list(range(len(here)))
        here = [one for one in [0, 1, 2, 10, 11, 12] if one in stored(small, range(20))]
        assert here == [0, 1, 2, 10, 11, 12][: len(here)]
    assert stored(small, range(20)) == []


def test_a_fork_and_a_truncated_session_are_evicted_from_their_tails_too(small: StoreRig) -> None:
    fill(small, 0, 8)
    small.append(1, range(8))
    small.fork(2, 1, 6)
    small.truncate(1, 2)
    small.remove(1)
    small.get(5)  # which is of use with all before it only
    for number in range(100, 100 + 2 * FIT):
        small.put(number, payload_of(number))
        here = stored(small, range(6))
        assert here == list(range(len(here)))
    assert stored(small, range(8)) == []


def test_uses_of_truncated_blocks_keep_no_others_of_their_session(small: StoreRig) -> None:
    fill(small, 0, 5)
    small.append(1, range(5))
    small.truncate(1, 2)
    small.get(4)
    fill(small, 100, FIT - 3)
    assert stored(small, range(5)) == [4]


def test_a_block_that_is_put_again_takes_its_place_in_its_session(small: StoreRig) -> None:
    fill(small, 0, 8)
    small.append(1, range(8))
    small.get(0)
    fill(small, 100, FIT - 8)
    kept = len(stored(small, range(8)))
    assert 0 < kept < 8
    for number in range(kept):
        small.get(number)
    for number in range(kept, 8):  # a client computes the rest anew, and the session names it already
        small.start_put(number, payload_of(number))
    small.settle()
    assert stored(small, range(8)) == list(range(8))
    for number in range(200, 200 + 2 * FIT):
        small.put(number, payload_of(number))
        here = stored(small, range(8))
        assert here == list(range(len(here)))
    assert stored(small, range(8)) == []


@pytest.mark.parametrize("guard", [Guard.PIN, Guard.LEASE, Guard.PROTECTED])
def test_a_guarded_block_is_not_evicted_until_it_is_released(small: StoreRig, guard: Guard) -> None:
    fill(small, 0, 4)
    held = small.store.hold([(TENANT, key(number)) for number in (0, 1, 99)], guard)
    assert held[2] is None
    fill(small, 100, 3 * FIT)
    assert stored(small, range(4)) == [0, 1]
    small.store.release([one for one in held if one is not None], guard)
    fill(small, 300, 3 * FIT)
    assert stored(small, range(4)) == []


def test_a_guarded_block_is_deleted_or_expires_when_its_guards_end(small: StoreRig) -> None:
    small.put(1, PAYLOAD)
    small.put(2, PAYLOAD, expires_ms=small.clock.now_ms + 1000)
    held = small.store.hold([(TENANT, key(1)), (TENANT, key(2))], Guard.LEASE)
    assert small.delete(1).found
    small.clock.now_ms += 1000
    some_polls(small)
    assert stored(small, range(3)) == [2]
    small.store.release([one for one in held if one], Guard.LEASE)
    small.poll()
    assert stored(small, range(3)) == []
    small.store.release([one for one in held if one], Guard.LEASE)


def test_a_protected_session_keeps_present_and_future_blocks(small: StoreRig) -> None:
    fill(small, 0, 4)
    small.append(1, range(4))
    assert small.store.protect(session_name(1)) is None
    fill(small, 4, 1)
    small.append(1, [4])
    fill(small, 100, 3 * FIT)
    assert stored(small, range(5)) == list(range(5))
    assert small.store.protect(session_name(1), 2) is None
    fill(small, 300, 3 * FIT)
    assert stored(small, range(5)) == [0, 1]
    assert small.store.unprotect(session_name(1)) is None
    assert small.store.unprotect(session_name(1)) is Refusal.NOT_HELD
    fill(small, 500, 3 * FIT)
    assert stored(small, range(5)) == []
    for blocks in (0, SESSION_BLOCKS_MAX + 1):
        with pytest.raises(ProtocolError):
            small.store.protect(session_name(1), blocks)


def test_a_removed_session_is_no_longer_protected(small: StoreRig) -> None:
    fill(small, 0, 4)
    small.append(1, range(4))
    small.store.protect(session_name(1))
    small.remove(1)
    assert small.store.unprotect(session_name(1)) is Refusal.NOT_HELD
    fill(small, 100, 3 * FIT)
    assert stored(small, range(4)) == []


def hold_all(rig: StoreRig, guard: Guard) -> list[Held]:
    """Fill the drive with guarded blocks."""
    held: list[Held] = []
    for number in range(FIT):
        if rig.store.statistics().free_bytes < 2 * PAYLOAD_PAGES * PAGE_BYTES:
            break
        rig.put(number, payload_of(number))
        held += [one for one in rig.store.hold([(TENANT, key(number))], guard) if one]
    assert len(stored(rig, range(FIT))) == len(held) > FIT - 4
    rig.put(99, PAYLOAD)
    held += [one for one in rig.store.hold([(TENANT, key(99))], guard) if one]
    return held


def test_a_put_waits_for_the_end_of_a_lease(small: StoreRig) -> None:
    held = hold_all(small, Guard.LEASE)
    first, second = small.start_put(1000, PAYLOAD), small.start_put(1001, b"small")
    some_polls(small)
    assert small.store.statistics().waiting_for_room == 2
    read = small.start_get(5)
    some_polls(small)
    assert small.get_done[read.tag].miss is None, "reads go on"
    small.store.release(held[:3], Guard.LEASE)
    small.settle()
    assert small.put_done[first].error is None
    assert small.put_done[second].error is None
    assert stored(small, range(4)) == [2, 3], "no more went than was needed"


def test_a_small_put_does_not_overtake_a_large_one_that_waits(small: StoreRig) -> None:
    held = hold_all(small, Guard.LEASE)
    small.store.release(held[:1], Guard.LEASE)
    small.delete(0)
    large = small.start_put(1000, bytes(7 * PAGE_BYTES))
    some_polls(small)
    assert small.store.statistics().free_bytes >= 2 * PAGE_BYTES, "room for a small one"
    little = small.start_put(1001, b"small")
    some_polls(small)
    assert little not in small.put_done, "it would take a bit of what the large one waits for"
    small.store.release(held[1:3], Guard.LEASE)
    small.settle()
    assert small.put_done[large].error is None
    assert small.put_done[little].error is None


def test_a_put_does_not_wait_forever(small: StoreRig) -> None:
    hold_all(small, Guard.LEASE)
    tags = [small.start_put(number, PAYLOAD) for number in (1000, 1001, 1002)]
    some_polls(small)
    small.clock.now_ms += ROOM_WAIT_MS_MAX - 1
    some_polls(small)
    assert not small.put_done.keys() & set(tags)
    small.clock.now_ms += 1
    some_polls(small)
    for tag in tags:
        error = small.put_done[tag].error
        assert isinstance(error, NoSpace)
        assert str(error).endswith("all blocks are leased.")
    assert small.store.statistics().takes_puts
    small.clock.now_ms += 60_000
    later = small.start_put(1003, PAYLOAD)
    some_polls(small)
    assert later not in small.put_done, "it has its own time to wait"
    small.clock.now_ms += ROOM_WAIT_MS_MAX
    some_polls(small)
    assert isinstance(small.put_done[later].error, NoSpace)


def test_a_put_does_not_wait_for_guards_that_will_not_end(small: StoreRig) -> None:
    held = hold_all(small, Guard.PROTECTED)
    error = small.put(1000, PAYLOAD).error
    assert isinstance(error, NoSpace)
    assert str(error).endswith("are protected.")
    small.store.release(held[:2], Guard.PROTECTED)
    assert small.put(1000, PAYLOAD).error is None


def test_a_put_waits_for_a_read_to_end(small: StoreRig) -> None:
    held = hold_all(small, Guard.PROTECTED)
    small.store.release(held[4:5], Guard.PROTECTED)
    small.start_get(4)
    disk_of(small).held = {op.tag for op in disk_of(small).in_flight}
    tag = small.start_put(1000, PAYLOAD)
    some_polls(small)
    assert tag not in small.put_done
    assert stored(small, range(5)) == [0, 1, 2, 3, 4], "it is being read"
    disk_of(small).release()
    small.settle()
    assert small.put_done[tag].error is None
    assert reason(small, 4) is Reason.SPACE


def test_blocks_that_wait_for_a_sync_are_not_evicted(small: StoreRig) -> None:
    held = hold_all(small, Guard.PROTECTED)
    small.delete(0)
    disk = disk_of(small)
    synced = small.start_put(2000, PAYLOAD, Durability.SYNCED)
    while DiskOpKind.SYNC not in [op.kind for op in disk.in_flight]:
        small.poll()
    disk.held = {op.tag for op in disk.in_flight}
    waiting = small.start_put(1000, PAYLOAD)
    some_polls(small)
    assert stored(small, range(2000, 2001)) == [2000]
    assert small.store.statistics().eviction.guarded[Guard.WRITE] == 1
    disk.release()
    small.settle()
    assert small.put_done[synced].error is None
    assert small.put_done[waiting].error is None
    assert reason(small, 2000) is Reason.SPACE
    assert held


def test_waiting_puts_are_refused_when_the_drive_fails(small: StoreRig) -> None:
    hold_all(small, Guard.LEASE)
    tags = [small.start_put(number, PAYLOAD) for number in (1000, 1001)]
    some_polls(small)
    disk_of(small).fault_from = (disk_of(small).operations, -5)
    small.delete(3)
    small.settle()
    assert all(isinstance(small.put_done[tag].error, ReadOnly) for tag in tags)


def test_closing_a_store_ends_all_waits(small: StoreRig) -> None:
    hold_all(small, Guard.LEASE)
    tags = [small.start_put(number, PAYLOAD) for number in (1000, 1001)]
    some_polls(small)
    small.store.close()
    assert all(isinstance(small.put_done[tag].error, NoSpace) for tag in tags)
    small.disk = FakeDisk(disk_of(small).pages, capacity=PAGES * PAGE_BYTES)
    small.open()
    assert not small.store.statistics().rebuilt


def test_an_expired_block_is_removed_from_the_drive_by_itself(small: StoreRig) -> None:
    free = small.store.statistics().free_bytes
    small.put(1, PAYLOAD, expires_ms=small.clock.now_ms + 10_000)
    small.put(2, PAYLOAD, expires_ms=small.clock.now_ms + 20_000)
    reopen(small)
    small.clock.now_ms += 10_000 - 1
    some_polls(small)
    assert stored(small, range(3)) == [1, 2]
    small.clock.now_ms += TIMER_TICK_MS
    some_polls(small)
    assert stored(small, range(3)) == [2]
    done, _ = small.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.EXPIRED
    small.clock.now_ms += 10_000
    some_polls(small)
    assert small.store.statistics().free_bytes == free
    assert reason(small, 2) is Reason.EXPIRED


def test_a_large_put_evicts_no_more_than_twice_its_room(small: StoreRig) -> None:
    rng = random.Random(3)
    for number in range(200):
        small.put(number, b"x")  # two pages each
        if rng.random() < 0.5:
            small.get(rng.randrange(number + 1))
    before = stored(small, range(200))
    large = 14 * PAGE_BYTES
    assert small.put(1000, bytes(large)).error is None
    lost_pages = 2 * (len(before) - len(stored(small, range(200))))
    assert lost_pages <= 2 * 15 + watermarks(RECORDS_PAGES).high_pages + 2
    assert Reason.CLEARED in [reason(small, number) for number in before]
    assert small.get(1000)[1] == bytes(large)


def test_a_large_put_is_refused_if_guarded_blocks_lie_everywhere(small: StoreRig) -> None:
    for number in range(RECORDS_PAGES // 2 - 4):
        small.put(number, b"x")
    held = small.store.hold([(TENANT, key(number)) for number in range(0, 60, 3)], Guard.PROTECTED)
    before = stored(small, range(60))
    error = small.put(1000, bytes(14 * PAGE_BYTES)).error
    assert isinstance(error, NoSpace)
    assert "leave no contiguous room" in str(error)
    gone = len(before) - len(stored(small, range(60)))
    assert 2 * gone <= 15 + watermarks(RECORDS_PAGES).high_pages + 1
    assert isinstance(small.put(1001, bytes(14 * PAGE_BYTES)).error, NoSpace)
    assert len(before) - len(stored(small, range(60))) <= gone + 2, "it does not cost the same again"
    assert small.put(1002, b"x").error is None
    small.store.release([one for one in held if one], Guard.PROTECTED)
    assert small.put(1003, bytes(14 * PAGE_BYTES)).error is None


def test_a_large_put_waits_for_leases_in_its_way(small: StoreRig) -> None:
    for number in range(RECORDS_PAGES // 2 - 4):
        small.put(number, b"x")
    held = small.store.hold([(TENANT, key(number)) for number in range(0, 60, 3)], Guard.LEASE)
    tags = [small.start_put(number, bytes(14 * PAGE_BYTES)) for number in (1000, 1001)]
    some_polls(small)
    assert small.store.statistics().waiting_for_room == 2
    small.clock.now_ms += ROOM_WAIT_MS_MAX - 1
    some_polls(small)
    assert small.store.statistics().waiting_for_room == 2
    small.store.release([one for one in held if one], Guard.LEASE)
    small.settle()
    assert [small.put_done[tag].error for tag in tags] == [None, None]


def test_a_block_that_gets_a_guard_while_its_place_is_cleared_stays(small: StoreRig) -> None:
    fill(small, 0, 3)
    entries = small.store.lookup([(TENANT, key(number)) for number in range(3)])
    small.store.hold([(TENANT, key(1))], Guard.PIN)
    small.drive.keeping.clear([entry.generation for entry in entries if entry] + [10**9])
    assert stored(small, range(3)) == [1]


def test_a_put_larger_than_the_drive_is_refused_and_evicts_nothing(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk(), Slots(2, 20 << 20))
    rig.open()
    rig.put(1, b"stays")
    error = rig.put(2, bytes(17 << 20)).error
    assert isinstance(error, NoSpace)
    assert "in all" in str(error)
    assert rig.get(1)[1] == b"stays"
    rig.store.close()


def test_replaced_manifests_make_room_for_a_waiting_put(small: StoreRig) -> None:
    small.put(0, b"x")
    for _ in range(RECORDS_PAGES // 2 - 3):
        assert small.append(1, [0]).error is None
    assert small.put(1, bytes(9 * PAGE_BYTES)).error is None
    assert small.session(1) is not None


def test_after_a_restart_the_oldest_are_evicted_first_and_sessions_from_their_tails(small: StoreRig) -> None:
    fill(small, 0, 5)
    small.append(1, range(5))
    fill(small, 10, 3)
    small.get(0)
    reopen(small)
    gone: list[int] = []
    for number in range(100, 100 + 2 * FIT):
        small.put(number, payload_of(number))
        here = stored(small, range(13))
        gone += [one for one in [*range(5), *range(10, 13)] if one not in here and one not in gone]
    assert gone == [4, 3, 2, 1, 0, 10, 11, 12]


def test_the_reason_of_a_removal_can_be_queried(small: StoreRig) -> None:
    store, clock = small.store, small.clock
    assert str(store.explain(TENANT, key(1))).startswith("The block was never stored here")
    small.put(1, PAYLOAD)
    assert store.explain(TENANT, key(1)).stored
    assert str(store.explain(TENANT, key(1))) == "The block is stored."
    clock.now_ms += 3000
    fill(small, 100, 2 * FIT)
    clock.now_ms += 5000
    assert str(store.explain(TENANT, key(1))) == "The block was evicted for room 5.0 s ago, after 3.0 s idle."
    assert store.explain(b"somebody--else!!", key(1)).gone is None
    small.put(2, PAYLOAD, expires_ms=clock.now_ms + 100)
    small.put(3, PAYLOAD)
    small.delete(3)
    small.put(4, PAYLOAD)
    entry = store.lookup([(TENANT, key(4))])[0]
    assert entry is not None
    store.quarantine(TENANT, key(4), entry.generation)
    small.put(5, PAYLOAD, expires_ms=clock.now_ms + 50)
    clock.now_ms += 50
    small.put(5, PAYLOAD)
    clock.now_ms += 100
    some_polls(small)
    assert [reason(small, number) for number in range(1, 6)] == [
        Reason.SPACE,
        Reason.EXPIRED,
        Reason.DELETED,
        Reason.QUARANTINED,
        Reason.SUPERSEDED,
    ]
    assert store.explain(TENANT, key(5)).stored
    for number, why in [
        (3, Miss(MissReason.UNKNOWN, "it was deleted")),
        (4, Miss(MissReason.CORRUPT, "it was dropped because it failed a check or could not be read")),
    ]:
        done, _ = small.get(number)
        assert done.miss == why
