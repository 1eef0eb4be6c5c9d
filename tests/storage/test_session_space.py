"""The space of sessions' records: it counts in their tenant's quota, is bounded, and is freed completely."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import Counter
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvstore.durability import Durability
from kvstore.errors import NoSpace, QuotaExceeded
from kvstore.limits import PAGE_BYTES, SESSION_CHUNK_BLOCKS, SESSIONS_SHARE
from kvstore.storage.eviction.types import Guard
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, Slots, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from kvstore.storage.items import SessionDone

OTHER = b"another-tenants!"
CHUNK = list(range(SESSION_CHUNK_BLOCKS))
PAGES = 2  # of a chunk's record, and of a short session's
QUOTA = 3 * SESSION_CHUNK_BLOCKS * PAGES  # in pages
SESSIONS = st.integers(0, 3)
SLOTS = Slots(64, 64 << 10)
EXAMPLES = int(os.environ.get("TRIGGERKV_MACHINE_EXAMPLES", "0"))


def filled(rig: StoreRig, *tenants: bytes) -> StoreRig:
    rig.open()
    for tenant in tenants:
        for number in CHUNK:
            rig.start_put(number, b"x", tenant=tenant)
            if number % 32 == 31:
                rig.settle()
    rig.settle()
    return rig


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[StoreRig]:
    rig = filled(StoreRig(tmp_path / "data", FakeDisk()), TENANT, OTHER)
    yield rig
    rig.store.close()


def step(
    rig: StoreRig, tenant: bytes, number: int, which: SessionStep, keys: Sequence[int] = ()
) -> SessionDone:
    named = [key(one) for one in keys]
    session = SessionName(tenant, USER, name(number))
    return rig.change_session(SessionItem(session, which, Durability.WRITTEN, 0, named))


def append(rig: StoreRig, tenant: bytes, number: int, keys: Sequence[int]) -> SessionDone:
    return step(rig, tenant, number, SessionStep.APPEND, keys)


def pages(rig: StoreRig, tenant: bytes = TENANT) -> int:
    return sum(drive.keeping.space.used[tenant] for drive in rig.store.drives)


def recounted(rig: StoreRig) -> Counter[bytes]:
    """The counts according to the rows of the indexes."""
    counts: Counter[bytes] = Counter()
    for drive in rig.store.drives:
        counts += drive.manifests.pages_of_tenants()
    return counts


def counted(rig: StoreRig, *, passing: bool) -> Counter[bytes]:
    counts: Counter[bytes] = Counter()
    for drive in rig.store.drives:
        counts += drive.keeping.space.used
        if not passing:
            counts -= drive.keeping.space.coming + drive.keeping.space.leaving
    return counts


def sync(rig: StoreRig) -> None:
    """Sync every drive, so that everything waiting for it continues."""
    for drive in rig.store.drives:
        drive._writes.sync_if_awaited(at_once=True)
        drive._traffic.pump()
    for _ in count():
        rig.store.poll()
        if not any(drive._writes.waiting_for_sync or drive._wipes.pending for drive in rig.store.drives):
            return


def used(rig: StoreRig, tenant: bytes = TENANT) -> int:
    return rig.store.quota(tenant).used_bytes // PAGE_BYTES


def test_a_tenant_that_only_appends_loses_its_own_blocks_and_then_meets_its_quota(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: QUOTA * PAGE_BYTES, OTHER: QUOTA * PAGE_BYTES})
    rig.store.hold([(TENANT, key(0))], Guard.PROTECTED)
    for number in count():
        done = append(rig, TENANT, number, [0])
        assert used(rig) <= QUOTA
        if done.error is not None:
            break
    assert isinstance(done.error, QuotaExceeded)
    assert number == (QUOTA - PAGES) // PAGES, "all that could go has gone: one block is held"
    assert sum(rig.store.explain(TENANT, key(one)).stored for one in CHUNK) == 1
    assert all(rig.store.explain(OTHER, key(one)).stored for one in CHUNK)
    for other in range(5):
        assert append(rig, OTHER, other, CHUNK).error is None
        assert rig.put(1000 + other, b"x", tenant=OTHER).error is None
    assert append(rig, TENANT, 0, [0]).error is None, "it takes no more than it had"
    assert isinstance(append(rig, TENANT, number, [0]).error, QuotaExceeded)
    for one in range(number):
        assert step(rig, TENANT, one, SessionStep.REMOVE).error is None
    sync(rig)
    assert pages(rig) == 0
    assert pages(rig, OTHER) == 6 * PAGES, "a chunk, and what begins each of five sessions"
    assert append(rig, TENANT, number, [0]).error is None


def test_records_waiting_for_a_sync_are_counted_and_one_is_started(rig: StoreRig) -> None:
    """Otherwise a loop of appends and removals of long sessions takes the place of others' blocks."""
    rig.store.change_quotas({TENANT: QUOTA * PAGE_BYTES})
    for number in range(QUOTA):
        assert append(rig, TENANT, number, CHUNK).error is None
        assert step(rig, TENANT, number, SessionStep.REMOVE).error is None
        assert used(rig) <= QUOTA
        assert not recounted(rig)
    assert all(rig.store.explain(TENANT, key(one)).stored for one in CHUNK)


def test_sessions_of_a_tenant_without_quota_are_bounded_and_leave_others_as_much(rig: StoreRig) -> None:
    room = rig.store.statistics().capacity_bytes // PAGE_BYTES // SESSIONS_SHARE
    for number in count():
        done = append(rig, TENANT, number, [0])
        if done.error is not None:
            break
    assert isinstance(done.error, NoSpace)
    assert not isinstance(done.error, QuotaExceeded)
    assert room // 2 - 8 < pages(rig) <= room // 2
    assert all(rig.store.explain(TENANT, key(one)).stored for one in CHUNK), (
        "none goes for what it can't have"
    )
    assert rig.put(2000, b"x").error is None
    for other in range(100):
        assert append(rig, OTHER, other, [0]).error is None
        assert step(rig, OTHER, other, SessionStep.REMOVE).error is None
    assert step(rig, TENANT, 0, SessionStep.REMOVE).error is None
    assert append(rig, TENANT, number, [0]).error is None


def test_repeated_appends_of_the_same_chunk_write_it_once(rig: StoreRig) -> None:
    free = rig.store.statistics().free_bytes
    assert append(rig, TENANT, 1, CHUNK * 8).blocks == 8 * len(CHUNK)
    assert free - rig.store.statistics().free_bytes == 2 * PAGES * PAGE_BYTES == pages(rig) * PAGE_BYTES


def test_protected_blocks_can_be_unprotected_at_the_quota(rig: StoreRig) -> None:
    rig.append(1, CHUNK)
    assert rig.change_session(protect(len(CHUNK))).error is None
    sync(rig)
    rig.store.change_quotas({TENANT: pages(rig) * PAGE_BYTES + len(CHUNK) * PAGES * PAGE_BYTES})
    assert isinstance(rig.put(5000, b"x").error, QuotaExceeded)
    assert isinstance(rig.append(2, [0]).error, QuotaExceeded)
    assert rig.change_session(protect(0)).error is None
    assert rig.truncate(1, 3).error is None
    assert rig.put(5000, b"x").error is None


@pytest.mark.parametrize("how", ["close", "kill", "power loss"])
def test_a_restart_and_a_crash_result_in_the_same_counts(rig: StoreRig, how: str) -> None:
    for number in range(4):
        rig.append(number, CHUNK * 2 + CHUNK[: 10 * number], Durability.SYNCED)
    rig.fork(9, 1, 200)
    rig.truncate(2, 3)
    append(rig, OTHER, 1, CHUNK)
    sync(rig)
    before = counted(rig, passing=True)
    assert before == {TENANT: 6 * PAGES, OTHER: 2 * PAGES}
    if how == "close":
        rig.close()
        rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    elif how == "kill":
        rig.kill()
        rig.disks = [FakeDisk(disk.pages) for disk in rig.disks]
    else:
        rig.power_loss(7)
    rig.open()
    assert counted(rig, passing=True) == recounted(rig) == before
    rig.store.change_quotas({TENANT: 100_000 * PAGE_BYTES})
    assert used(rig) == before[TENANT] + len(CHUNK) * PAGES


def protect(blocks: int) -> SessionItem:
    session = SessionName(TENANT, USER, name(1))
    return SessionItem(session, SessionStep.PROTECT, Durability.WRITTEN, 0, blocks=blocks)


def test_a_step_waiting_for_room_is_ended_when_the_store_closes(rig: StoreRig) -> None:
    rig.store.change_quotas({TENANT: PAGES * PAGE_BYTES})
    rig.settle()
    rig.put(0, b"x")
    rig.store.hold([(TENANT, key(0))], Guard.LEASE)
    tag = rig.start_step(1, SessionStep.APPEND, keys=[0])
    rig.poll_once()
    assert tag not in rig.session_done
    rig.store.close()
    assert isinstance(rig.session_done[tag].error, QuotaExceeded)


def test_a_failed_step_returns_its_room(rig: StoreRig) -> None:
    extents = rig.drive._extents
    rig.store.hold([(TENANT, key(number)) for number in CHUNK], Guard.PROTECTED)
    rig.store.hold([(OTHER, key(number)) for number in CHUNK], Guard.PROTECTED)
    assert extents.allocate(extents.free_pages - 3) is not None, "room for a chunk, and not for its session"
    assert isinstance(rig.append(1, CHUNK * 2).error, NoSpace)
    rig.settle()
    assert pages(rig) == 0


class SpaceMachine(RuleBasedStateMachine):
    """Random session steps: the counts always equal those of the index plus the steps in flight."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.seed = 0

    @initialize(drives=st.sampled_from([1, 2]), quota=st.sampled_from([0, 300, 340]))
    def begin(self, drives: int, quota: int) -> None:
        disks = [FakeDisk(seed=number) for number in range(drives)]
        self.rig = StoreRig(self.folder / "data", slots=SLOTS, disks=disks)
        filled(self.rig, TENANT)
        self.quota = quota
        self.limit()

    def limit(self) -> None:
        if self.quota:
            self.rig.store.change_quotas({TENANT: self.quota * PAGE_BYTES})

    def teardown(self) -> None:
        if hasattr(self, "rig"):
            for number in range(4):
                self.rig.remove(number)
            sync(self.rig)
            assert not counted(self.rig, passing=True)
            self.rig.store.close()
        shutil.rmtree(self.folder)

    @rule(number=SESSIONS, blocks=st.integers(1, 300), first=st.integers(0, 125))
    def append(self, number: int, blocks: int, first: int) -> None:
        keys = [(first + one) % SESSION_CHUNK_BLOCKS for one in range(blocks)]
        self.rig.append(number, keys)

    @rule(number=SESSIONS, source=SESSIONS, blocks=st.integers(0, 300))
    def fork(self, number: int, source: int, blocks: int) -> None:
        self.rig.fork(number, source, blocks)

    @rule(number=SESSIONS, blocks=st.integers(0, 300))
    def truncate(self, number: int, blocks: int) -> None:
        self.rig.truncate(number, blocks)

    @rule(number=SESSIONS, delete_blocks=st.booleans())
    def remove(self, number: int, delete_blocks: bool) -> None:  # noqa: FBT001 - Hypothesis passes by name
        self.rig.remove(number, delete_blocks=delete_blocks)

    @rule(number=SESSIONS, lives_ms=st.sampled_from([0, 500]))
    def limit_session(self, number: int, lives_ms: int) -> None:
        ends_ms = self.rig.clock.now_ms + lives_ms if lives_ms else 0
        session = SessionName(TENANT, USER, name(number))
        item = SessionItem(session, SessionStep.LIMIT, Durability.WRITTEN, 0, expires_ms=ends_ms)
        self.rig.change_session(item)

    @rule()
    def put_all_again(self) -> None:
        for number in CHUNK:
            self.rig.put(number, b"x")

    @rule()
    def wait(self) -> None:
        self.rig.clock.now_ms += 600
        self.rig.poll_once()
        self.rig.settle()

    @rule()
    def sync(self) -> None:
        sync(self.rig)
        assert counted(self.rig, passing=True) == recounted(self.rig)

    @rule(how=st.sampled_from(["close", "kill", "power"]))
    def begin_anew(self, how: str) -> None:
        self.seed += 1
        if how == "power":
            self.rig.power_loss(self.seed)
        else:
            self.rig.close() if how == "close" else self.rig.kill()
            self.rig.disks = [FakeDisk(disk.pages) for disk in self.rig.disks]
        self.rig.open()
        assert counted(self.rig, passing=True) == recounted(self.rig)
        self.limit()

    @invariant()
    def it_is_what_the_index_says_and_within_the_quota(self) -> None:
        if hasattr(self, "rig"):
            assert counted(self.rig, passing=False) == recounted(self.rig)
            over = len(self.rig.store.drives) * PAGES * 2  # records that take the place of others
            assert not self.quota or used(self.rig) <= self.quota + over


TestSpaceMachine = SpaceMachine.TestCase
TestSpaceMachine.settings = settings(
    max_examples=EXAMPLES or 15,
    stateful_step_count=100 if EXAMPLES else 25,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
