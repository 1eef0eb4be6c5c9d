"""Quotas of tenants in the store: which blocks are evicted, in which order, what is counted, and what waits."""

from __future__ import annotations

import errno
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.config import show_size
from kvstore.durability import Durability
from kvstore.errors import ConfigError, QuotaExceeded
from kvstore.limits import PAGE_BYTES, ROOM_WAIT_MS_MAX, TIMER_TICK_MS
from kvstore.miss import MissReason
from kvstore.storage.disk import DiskOpKind
from kvstore.storage.eviction.types import Guard, Reason
from kvstore.storage.manifests import SessionName
from kvstore.wire.record import record_bytes
from tests.storage.fakes import FakeDisk
from tests.storage.pair import homed, two
from tests.storage.rig import TENANT, USER, Slots, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.storage.eviction_events import Held

OTHER = b"another-tenants!"
FREE = b"has-no-quota----"
PAYLOAD = b"payload!" * 1024  # three pages with the header
BLOCK = 3 * PAGE_BYTES
SESSION = 2 * PAGE_BYTES  # the record of a short one
EXAMPLES = int(os.environ.get("TRIGGERKV_MACHINE_EXAMPLES", "0"))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    yield rig
    rig.store.close()


def fill(rig: StoreRig, count: int, tenant: bytes = TENANT, first: int = 0) -> None:
    for number in range(first, first + count):
        assert rig.put(number, PAYLOAD, tenant=tenant).error is None


def stored(rig: StoreRig, tenant: bytes = TENANT, until: int = 40) -> list[int]:
    entries = rig.store.lookup([(tenant, key(number)) for number in range(until)])
    return [number for number, entry in enumerate(entries) if entry is not None]


def reopen(rig: StoreRig) -> None:
    rig.store.close()
    rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    rig.open()


def hold(rig: StoreRig, numbers: range, guard: Guard = Guard.LEASE) -> list[Held]:
    held = rig.store.hold([(TENANT, key(number)) for number in numbers], guard)
    return [one for one in held if one is not None]


def test_a_tenant_at_its_quota_evicts_its_own_oldest_block(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 4 * BLOCK, OTHER: 2 * BLOCK})
    fill(rig, 2, OTHER)
    fill(rig, 3, FREE)
    fill(rig, 4)
    rig.get(0)
    assert rig.store.quota(TENANT) == (4 * BLOCK, 4 * BLOCK)
    fill(rig, 2, first=10)
    assert stored(rig) == [0, 3, 10, 11]
    assert stored(rig, OTHER) == [0, 1]
    assert stored(rig, FREE) == [0, 1, 2]
    told = rig.store.explain(TENANT, key(1))
    assert told.gone is not None
    assert told.gone.reason is Reason.QUOTA
    assert "quota" in str(told)
    done, _ = rig.get(1)
    assert done.miss is not None
    assert done.miss.reason is MissReason.QUOTA


def test_quotas_count_whole_pages_and_the_header(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 10 * PAGE_BYTES})
    for number, size in enumerate((1, 4096, 4097)):
        assert rig.put(number, b"x" * size).error is None
    assert rig.store.quota(TENANT).used_bytes == (2 + 2 + 3) * PAGE_BYTES


def test_stored_deleted_and_expired_blocks_are_counted_correctly(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 9 * BLOCK})
    fill(rig, 3)
    fill(rig, 3)
    assert rig.store.quota(TENANT).used_bytes == 3 * BLOCK
    rig.delete(0)
    assert rig.store.quota(TENANT).used_bytes == 2 * BLOCK
    rig.put(7, PAYLOAD, expires_ms=rig.clock.now_ms + 500)
    assert rig.store.quota(TENANT).used_bytes == 3 * BLOCK
    rig.clock.now_ms += 500 + TIMER_TICK_MS
    rig.poll_once()
    assert rig.store.quota(TENANT).used_bytes == 2 * BLOCK
    rig.disk.faults = {rig.disk.operations: -errno.EIO}  # type: ignore[union-attr]
    assert rig.put(8, PAYLOAD).error is not None
    assert rig.store.quota(TENANT).used_bytes == 2 * BLOCK


def test_a_put_that_cannot_fit_is_refused_with_the_quota_named(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 2 * BLOCK})
    fill(rig, 2)
    too_large = rig.put(5, bytes(30_000)).error
    assert isinstance(too_large, QuotaExceeded)
    assert show_size(2 * BLOCK) in str(too_large)
    assert stored(rig) == [0, 1], "nothing goes for what can never fit"
    hold(rig, range(2), Guard.PROTECTED)
    refused = rig.put(6, PAYLOAD).error
    assert isinstance(refused, QuotaExceeded)
    assert show_size(2 * BLOCK) in str(refused)
    assert rig.put(6, PAYLOAD, tenant=OTHER).error is None


def test_a_put_waits_for_the_end_of_a_guard_but_not_forever(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 2 * BLOCK})
    fill(rig, 2)
    held = hold(rig, range(2))
    first = rig.start_put(5, PAYLOAD)
    rig.poll_once()
    assert first not in rig.put_done
    assert rig.store.statistics().waiting_for_quota == 1
    beside = rig.start_put(0, PAYLOAD, tenant=OTHER)
    rig.settle_by_polling(beside)
    assert rig.put_done[beside].error is None, "nobody else waits"
    assert first not in rig.put_done
    rig.store.release(held[:1], Guard.LEASE)
    rig.settle()
    assert rig.put_done[first].error is None
    assert stored(rig) == [1, 5]
    hold(rig, range(5, 6))
    second = rig.start_put(6, PAYLOAD)
    rig.poll_once()
    rig.clock.now_ms += ROOM_WAIT_MS_MAX
    rig.settle_by_polling(second)
    assert isinstance(rig.put_done[second].error, QuotaExceeded)


def test_a_batch_larger_than_the_quota_ends_with_its_last_blocks(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 4 * BLOCK})
    tags = [rig.start_put(number, PAYLOAD) for number in range(20)]
    assert rig.store.quota(TENANT).used_bytes <= 4 * BLOCK
    rig.settle()
    assert all(rig.put_done[tag].error is None for tag in tags)
    assert len(stored(rig)) == 4
    assert rig.store.quota(TENANT).used_bytes == 4 * BLOCK


def test_waiting_puts_are_ended_when_the_store_closes(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 2 * BLOCK})
    fill(rig, 2)
    hold(rig, range(2))
    tag = rig.start_put(5, PAYLOAD)
    rig.store.close()
    assert isinstance(rig.put_done[tag].error, QuotaExceeded)


def test_waiting_puts_are_ended_when_the_drive_fails(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 2 * BLOCK})
    fill(rig, 2)
    hold(rig, range(2))
    tag = rig.start_put(5, PAYLOAD)
    rig.disk.faults = {rig.disk.operations: -errno.EIO}  # type: ignore[union-attr]
    rig.start_put(1, PAYLOAD, tenant=OTHER)
    rig.settle()
    assert rig.put_done[tag].error is not None


def test_usage_is_known_after_a_restart_and_the_oldest_record_is_evicted_first(rig: StoreRig) -> None:
    fill(rig, 5)
    reopen(rig)
    rig.store.change_quotas({TENANT: 5 * BLOCK})
    assert rig.store.quota(TENANT).used_bytes == 5 * BLOCK
    rig.get(0)
    fill(rig, 1, first=9)
    assert stored(rig) == [0, 2, 3, 4, 9]


def test_usage_is_known_again_after_the_index_was_lost(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 5 * BLOCK})
    fill(rig, 5)
    rig.power_loss(3)
    rig.open()
    assert rig.store.statistics().rebuilt
    rig.store.change_quotas({TENANT: 5 * BLOCK})
    assert rig.store.quota(TENANT).used_bytes == len(stored(rig)) * BLOCK


def test_a_smaller_quota_evicts_the_oldest_and_removing_it_keeps_all(rig: StoreRig) -> None:
    fill(rig, 6)
    fill(rig, 6, OTHER)
    rig.store.change_quotas({TENANT: 4 * BLOCK})
    rig.poll()
    assert stored(rig) == [2, 3, 4, 5]
    rig.store.change_quotas({})
    fill(rig, 6, first=10)
    assert len(stored(rig)) == 10
    rig.store.change_quotas({TENANT: 3 * BLOCK})
    rig.settle()
    rig.poll()
    assert stored(rig) == [13, 14, 15]
    assert len(stored(rig, OTHER)) == 6


def test_a_session_is_evicted_from_its_tail_for_a_quota_too(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 5 * BLOCK + SESSION})
    fill(rig, 4)
    assert rig.append(1, range(4)).error is None
    fill(rig, 1, first=8)
    fill(rig, 2, first=10)
    assert stored(rig) == [0, 1, 8, 10, 11]
    rig.store.protect(SessionName(TENANT, USER, name(1)))
    fill(rig, 2, first=20)
    assert stored(rig) == [0, 1, 11, 20, 21]


def test_a_block_before_a_deleted_one_inherits_its_use(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 3 * BLOCK + SESSION})
    fill(rig, 2)
    rig.append(1, range(2))
    fill(rig, 1, first=5)
    rig.get(1)
    rig.delete(1)
    fill(rig, 2, first=10)
    assert stored(rig) == [0, 10, 11], "0 was used with 1, after 5"


def test_a_block_before_a_deleted_one_keeps_its_own_later_use(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: 3 * BLOCK + SESSION})
    fill(rig, 2)
    rig.append(1, range(2))
    fill(rig, 1, first=5)
    rig.get(0)
    rig.delete(1)
    fill(rig, 2, first=10)
    assert stored(rig) == [0, 10, 11], "0 was used after 5"


def test_over_two_drives_the_oldest_is_evicted_wherever_it_is(tmp_path: Path) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    rig.store.change_quotas({TENANT: 12 * BLOCK})
    fill(rig, 12)
    for number in (3, 0, 5):
        rig.get(number)
    for more in range(12):
        fill(rig, 1, first=20 + more)
    oldest_first = [1, 2, 4, 6, 7, 8, 9, 10, 11, 3, 0, 5]
    gone = sorted(oldest_first, key=lambda number: rig.store.explain(TENANT, key(number)).gone is None)
    assert [rig.store.explain(TENANT, key(number)).stored for number in oldest_first] == [False] * 12
    assert len(gone) == 12
    assert stored(rig) == list(range(20, 32))
    rig.get(20)
    fill(rig, 11, first=100)
    assert stored(rig) == [20]
    reopen(rig)
    rig.store.change_quotas({TENANT: 6 * BLOCK})
    rig.settle()
    rig.poll()
    assert rig.store.quota(TENANT).used_bytes == 6 * BLOCK
    assert all(drive.lookup([(TENANT, key(n)) for n in range(100, 111)]) for drive in rig.store.drives)
    rig.store.close()


@pytest.mark.parametrize("seed", range(4))
def test_many_evicted_at_once_are_the_oldest_of_all_drives(tmp_path: Path, seed: int) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    rig.store.change_quotas({TENANT: 40 * BLOCK})
    rng = random.Random(seed)
    numbers = homed(rig, 0, 12) + homed(rig, 1, 12)
    rng.shuffle(numbers)
    for number in numbers:
        assert rig.put(number, PAYLOAD).error is None
    for number in rng.sample(numbers, 8):
        rig.get(number)
        numbers.append(numbers.pop(numbers.index(number)))
    for kept in (17, 16, 5):
        rig.store.change_quotas({TENANT: kept * BLOCK})
        rig.settle()
        rig.poll_once()
        rig.settle()
        entries = rig.store.lookup([(TENANT, key(number)) for number in numbers])
        assert [entry is not None for entry in entries] == [at >= 24 - kept for at in range(24)]
    rig.store.close()


def test_nothing_is_evicted_from_a_failed_drive(tmp_path: Path) -> None:
    rig = two(tmp_path / "data")
    rig.open()
    rig.store.change_quotas({TENANT: 6 * BLOCK})
    fill(rig, 6)
    failed = rig.store.drives[0]
    rig.disks[0].faults = {rig.disks[0].operations: -errno.EIO}
    number = 1000
    while failed.takes_puts:
        rig.put(number, b"x", tenant=OTHER)
        number += 1
    there = sum(entry is not None for entry in failed.lookup([(TENANT, key(n)) for n in range(6)]))
    fill(rig, 6 - there, first=20)
    assert sum(e is not None for e in failed.lookup([(TENANT, key(n)) for n in range(6)])) == there
    assert rig.store.quota(TENANT).used_bytes == 6 * BLOCK
    rig.store.close()


def test_more_tenants_than_can_be_counted_are_refused(rig: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.quotas.QUOTA_OWNERS_MAX", 2)
    rig.store.change_quotas({TENANT: BLOCK, OTHER: BLOCK})
    with pytest.raises(ConfigError, match="restart it"):
        rig.store.change_quotas({FREE: BLOCK})
    assert rig.store.quota(TENANT).bytes_max == BLOCK


NUMBERS = st.integers(0, 15)
OWNERS = st.sampled_from([TENANT, OTHER, FREE])
SIZES = st.sampled_from([1, 4096, 4097, 9000])
SLOTS = Slots(64, 64 << 10)
PAGES_MAX = {TENANT: 12, OTHER: 7}


class QuotaMachine(RuleBasedStateMachine):
    """The store compared with lists of blocks in order of use: at every step exactly the same blocks are stored."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.drives = 1
        self.limits = dict(PAGES_MAX)
        self.blocks: dict[bytes, dict[int, tuple[int, int]]] = {
            TENANT: {},
            OTHER: {},
            FREE: {},
        }  # in order of use
        self.held: list[tuple[bytes, int, Held]] = []
        self.rig: StoreRig

    @initialize(drives=st.sampled_from([1, 2]), policy=st.sampled_from(["lru", "s3fifo"]))
    def begin(self, drives: int, policy: str) -> None:
        self.drives = drives
        disks = [FakeDisk(seed=number) for number in range(drives)]
        self.rig = StoreRig(self.folder / "data", slots=SLOTS, disks=disks)
        self.rig.policy = policy
        self.open()

    def open(self) -> None:
        self.rig.open()
        self.rig.store.change_quotas({tenant: pages * PAGE_BYTES for tenant, pages in self.limits.items()})

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            self.rig.store.close()
        shutil.rmtree(self.folder)

    def pages(self, tenant: bytes) -> int:
        return sum(pages for pages, _ in self.blocks[tenant].values())

    def use(self, tenant: bytes, number: int) -> None:
        self.blocks[tenant][number] = self.blocks[tenant].pop(number)

    def is_held(self, tenant: bytes, number: int) -> bool:
        return any(one[:2] == (tenant, number) for one in self.held)

    def make_room(self, tenant: bytes, pages: int) -> bool:
        for number in list(self.blocks[tenant]):
            if self.pages(tenant) + pages <= self.limits[tenant]:
                break
            if not self.is_held(tenant, number):
                del self.blocks[tenant][number]
        return self.pages(tenant) + pages <= self.limits[tenant]

    @rule(tenant=OWNERS, number=NUMBERS, size=SIZES, lives_ms=st.sampled_from([0, 0, 0, 5000]))
    def put(self, tenant: bytes, number: int, size: int, lives_ms: int) -> None:
        known = self.blocks[tenant].get(number)
        expires_ms = self.rig.clock.now_ms + lives_ms if lives_ms else 0
        pages = record_bytes(size) // PAGE_BYTES
        tag = self.rig.start_put(number, bytes(size), tenant=tenant, expires_ms=expires_ms)
        if known is None and tenant in self.limits and not self.make_room(tenant, pages):
            self.rig.poll_once()
            self.rig.clock.now_ms += ROOM_WAIT_MS_MAX
            self.rig.settle_by_polling(tag)
            assert isinstance(self.rig.put_done[tag].error, QuotaExceeded)
            self.expire()
            return
        self.rig.settle()
        if known is None:
            assert self.rig.put_done[tag].error is None
            self.blocks[tenant][number] = (pages, expires_ms)
        else:
            self.use(tenant, number)
            before, ends_ms = known
            if self.rig.put_done[tag].error is None:  # of the same bytes: the longer life wins
                ends_ms = max(ends_ms, expires_ms) if ends_ms and expires_ms else 0
            self.blocks[tenant][number] = (before, ends_ms)

    @rule(tenant=OWNERS, number=NUMBERS)
    def get(self, tenant: bytes, number: int) -> None:
        done, _ = self.rig.get(number, tenant=tenant)
        assert (done.miss is None) == (number in self.blocks[tenant])
        if done.miss is None:
            self.use(tenant, number)

    @rule(tenant=OWNERS, number=NUMBERS)
    def delete(self, tenant: bytes, number: int) -> None:
        assert self.rig.delete(number, tenant=tenant).found == (number in self.blocks[tenant])
        self.blocks[tenant].pop(number, None)
        self.held = [one for one in self.held if one[:2] != (tenant, number)]

    @rule(tenant=OWNERS, number=NUMBERS)
    def hold(self, tenant: bytes, number: int) -> None:
        if number in self.blocks[tenant] and len(self.held) < 5:
            (held,) = self.rig.store.hold([(tenant, key(number))], Guard.LEASE)
            assert held is not None
            self.held.append((tenant, number, held))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        tenant, number, held = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.rig.store.release([held], Guard.LEASE)
        if not self.is_held(tenant, number):
            self.use(tenant, number)
        self.expire()

    @rule(passing_ms=st.sampled_from([1000, 6000]))
    def wait(self, passing_ms: int) -> None:
        self.rig.clock.now_ms += passing_ms
        self.expire()

    def expire(self) -> None:
        self.rig.poll_once()
        self.rig.settle()
        for tenant, blocks in self.blocks.items():
            for number, (_, expires_ms) in list(blocks.items()):
                over = 0 < expires_ms <= self.rig.clock.now_ms
                if over and not self.is_held(tenant, number):
                    del blocks[number]

    @precondition(lambda self: not self.held)
    @rule(pages=st.sampled_from([6, 12, 20]))
    def change(self, pages: int) -> None:
        self.limits[TENANT] = pages
        self.rig.store.change_quotas({tenant: most * PAGE_BYTES for tenant, most in self.limits.items()})
        self.rig.poll_once()
        self.rig.settle()
        self.make_room(TENANT, 0)

    @precondition(lambda self: self.drives == 1)
    @rule(killed=st.booleans())
    def reopen(self, *, killed: bool) -> None:
        generations = {
            (tenant, number): entry.generation
            for tenant, blocks in self.blocks.items()
            for number in blocks
            if (entry := self.rig.store.lookup([(tenant, key(number))])[0]) is not None
        }
        if killed:
            self.rig.kill()
        else:
            self.rig.store.close()
        self.rig.disks = [FakeDisk(disk.pages) for disk in self.rig.disks]
        self.held = []
        for tenant, blocks in self.blocks.items():
            self.blocks[tenant] = dict(sorted(blocks.items(), key=lambda one: generations[tenant, one[0]]))
        self.open()
        self.expire()

    @invariant()
    def it_is_as_it_should(self) -> None:
        if not hasattr(self, "rig"):
            return
        for tenant, blocks in self.blocks.items():
            assert stored(self.rig, tenant, 16) == sorted(blocks)
            if tenant in self.limits:
                quota = self.rig.store.quota(tenant)
                assert quota == (self.limits[tenant] * PAGE_BYTES, self.pages(tenant) * PAGE_BYTES)
                assert quota.used_bytes <= quota.bytes_max


TestQuotas = QuotaMachine.TestCase
TestQuotas.settings = settings(
    max_examples=EXAMPLES or 60,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)


def test_syncs_do_not_delay_puts_at_the_quota(rig: StoreRig) -> None:
    """A block whose put waits for its sync may not be evicted; a put behind it waits, and then completes."""
    rig.store.change_quotas({TENANT: BLOCK})
    first = rig.start_put(1, PAYLOAD, Durability.SYNCED)
    second = rig.start_put(2, PAYLOAD)
    rig.settle()
    assert rig.put_done[first].error is rig.put_done[second].error is None
    assert stored(rig) == [2]
    assert DiskOpKind.SYNC in rig.disk.kinds  # type: ignore[union-attr]
