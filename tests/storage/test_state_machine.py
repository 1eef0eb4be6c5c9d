"""The store compared with a dict: after any sequence of calls it answers as the dict does, or reports why not.

The drive is too small for all blocks, so blocks are evicted all the time: a block that the dict has and the store lacks
must be gone for a reason that the store reports, and never while it is guarded. Now and then the store is closed,
killed, or loses its index.

TRIGGERKV_MACHINE_EXAMPLES=n runs n sequences of 100 steps instead of 60 of 50.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvstore.durability import Durability
from kvstore.errors import NoSpace
from kvstore.limits import PAGE_BYTES, ROOM_WAIT_MS_MAX, TIMER_TICK_MS
from kvstore.miss import MissReason
from kvstore.storage.eviction.types import Guard, Reason
from kvstore.storage.fsck import check
from kvstore.storage.items import SessionStep
from kvstore.storage.manifests import SessionName
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, Slots, StoreRig, key, name

if TYPE_CHECKING:
    from kvstore.storage.eviction_events import Held

EXAMPLES = int(os.environ.get("TRIGGERKV_MACHINE_EXAMPLES", "0"))
PAGES = 96
NUMBERS = st.integers(0, 24)
SESSIONS = st.integers(0, 2)
SIZES = st.sampled_from([1, 4000, 9000, 20_000, 60_000])
DURABILITIES = st.sampled_from([Durability.WRITTEN, Durability.SYNCED])
FOR_ROOM = {Reason.SPACE, Reason.STRANDED, Reason.CLEARED}
HELD_MAX = 4
SLOTS = Slots(8, 64 << 10)


class StoreMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp())
        self.rig = StoreRig(self.folder / "data", FakeDisk(capacity=PAGES * PAGE_BYTES), SLOTS)
        self.blocks: dict[int, tuple[bytes, int]] = {}  # payload and expiry of what may be there
        self.sessions: dict[int, list[int]] = {}
        self.held: list[Held] = []
        self.seed = 0

    @initialize(policy=st.sampled_from(["lru", "s3fifo"]), has_lanes=st.booleans())
    def begin(self, policy: str, has_lanes: bool) -> None:  # noqa: FBT001 - Hypothesis passes by name
        self.rig.policy = policy
        self.has_lanes = has_lanes
        self.rig.patience_ms = ROOM_WAIT_MS_MAX + TIMER_TICK_MS  # a put may wait for what is held
        self.open()

    def open(self) -> None:
        self.rig.open()
        if self.has_lanes:
            self.rig.use_lanes(self.seed)

    def teardown(self) -> None:
        if hasattr(self.rig, "store"):
            self.rig.close()
            disk = FakeDisk(self.disk.pages, capacity=PAGES * PAGE_BYTES)
            self.rig.disks = [disk]
            report = check(self.folder / "data", source=self.rig.source(), boot_id=self.rig.boot_id)
            assert report.damage == []
            disk.close()
        shutil.rmtree(self.folder)

    @property
    def disk(self) -> FakeDisk:
        assert self.rig.disk is not None
        return self.rig.disk

    def is_stored(self, number: int) -> bool:
        """Whether the store has a block; a missing one needs a reason."""
        explanation = self.rig.store.explain(TENANT, key(number))
        if number not in self.blocks:
            assert not explanation.stored, f"{number} is there, and was never put or was deleted"
            return False
        if not explanation.stored:
            assert explanation.gone is not None, f"{number} is gone without a reason"
            expires_ms = self.blocks.pop(number)[1]
            is_over = 0 < expires_ms <= self.rig.clock.now_ms
            assert explanation.gone.reason in FOR_ROOM or (
                explanation.gone.reason is Reason.EXPIRED and is_over
            )
        return explanation.stored

    @rule(number=NUMBERS, size=SIZES, durability=DURABILITIES, lives_ms=st.sampled_from([0, 0, 0, 200, 5000]))
    def put(self, number: int, size: int, durability: Durability, lives_ms: int) -> None:
        known = self.is_stored(number)
        now_ms = self.rig.clock.now_ms
        over = known and 0 < self.blocks[number][1] <= now_ms
        payload = self.blocks[number][0] if known and not over else os.urandom(size)
        expires_ms = now_ms + lives_ms if lives_ms else 0
        done = self.rig.put(number, payload, durability, expires_ms=expires_ms)
        if done.error is not None:
            assert isinstance(done.error, NoSpace)
            assert self.held or self.sessions, "nothing is in the way of eviction"
        elif not known or over:
            self.blocks[number] = (payload, expires_ms)
        else:  # the longest life counts
            lives = (self.blocks[number][1], expires_ms)
            self.blocks[number] = (payload, max(lives) if all(lives) else 0)

    @rule(number=NUMBERS)
    def get(self, number: int) -> None:
        known = self.is_stored(number)
        done, got = self.rig.get(number)
        if done.miss is None:
            assert known
            assert got == self.blocks[number][0]
            assert not 0 < self.blocks[number][1] <= self.rig.clock.now_ms
        elif known:
            assert done.miss.reason is MissReason.EXPIRED
            assert 0 < self.blocks[number][1] <= self.rig.clock.now_ms
        else:
            assert done.miss.reason in {MissReason.UNKNOWN, MissReason.EVICTED, MissReason.EXPIRED}

    @rule(number=NUMBERS, durability=DURABILITIES)
    def delete(self, number: int, durability: Durability) -> None:
        known = self.is_stored(number)
        done = self.rig.delete(number, durability)
        assert (done.error, done.found) == (None, known)
        self.blocks.pop(number, None)

    @rule(number=NUMBERS)
    def evict(self, number: int) -> None:
        entry = self.rig.store.lookup([(TENANT, key(number))])[0]
        if entry is not None:
            self.rig.store.evict([entry.generation])
            self.held = [one for one in self.held if one.generation != entry.generation]

    @rule(number=NUMBERS, guard=st.just(Guard.LEASE))
    @precondition(lambda self: len(self.held) < HELD_MAX)
    def hold(self, number: int, guard: Guard) -> None:
        known = self.is_stored(number)
        (held,) = self.rig.store.hold([(TENANT, key(number))], guard)
        assert (held is not None) == known
        self.held += [held] if held else []

    @rule()
    @precondition(lambda self: self.held)
    def release(self) -> None:
        self.rig.store.release([self.held.pop(0)], Guard.LEASE)

    @invariant()
    def what_is_held_has_not_gone_for_room(self) -> None:
        for one in self.held:
            entry = self.rig.store.lookup([one.name])[0]
            if entry is None or entry.generation != one.generation:
                gone = self.rig.store.explain(*one.name).gone
                assert gone is None or gone.generation != one.generation or gone.reason not in FOR_ROOM
        self.held = [one for one in self.held if self.rig.store.lookup([one.name])[0] is not None]

    @rule(number=SESSIONS, keys=st.lists(NUMBERS, min_size=1, max_size=6, unique=True))
    def append(self, number: int, keys: list[int]) -> None:
        stored = [one for one in keys if self.is_stored(one)]
        if stored and self.rig.append(number, stored).error is None:
            self.sessions[number] = self.sessions.get(number, []) + stored

    @rule(number=SESSIONS, blocks=st.integers(0, 8))
    def truncate(self, number: int, blocks: int) -> None:
        done = self.rig.truncate(number, blocks)
        if done.error is None:
            self.sessions[number] = self.sessions[number][:blocks]
        else:
            refused = number not in self.sessions or blocks > len(self.sessions[number])
            assert isinstance(done.error, NoSpace) or refused

    @rule(number=SESSIONS, source=SESSIONS, blocks=st.integers(0, 8))
    def fork(self, number: int, source: int, blocks: int) -> None:
        if self.rig.fork(number, source, blocks).error is None:
            self.sessions[number] = self.sessions[source][:blocks]

    @rule(number=SESSIONS, delete_blocks=st.booleans())
    def remove(self, number: int, delete_blocks: bool) -> None:  # noqa: FBT001 - Hypothesis passes by name
        done = self.rig._settled(self.rig.start_step(number, SessionStep.REMOVE, delete_blocks=delete_blocks))
        assert done.error is None
        self.sessions.pop(number, None)
        if delete_blocks:
            for _, one in done.unreferenced:
                self.blocks.pop(int.from_bytes(one, "little"), None)

    @rule(number=SESSIONS, blocks=st.integers(1, 4))
    def protect_for_a_while(self, number: int, blocks: int) -> None:
        session = SessionName(TENANT, USER, name(number))
        before = [one for one in self.sessions.get(number, [])[:blocks] if self.is_stored(one)]
        self.rig.store.protect(session, blocks)
        in_place = [row for row in before if self.rig.store.statistics().eviction.guarded[Guard.PROTECTED]]
        self.rig.put(1000, bytes(30_000))
        if len(in_place) == blocks == len(set(before)) and self.sessions[number][:blocks] == before:
            self.check_protected(before)
        self.rig.store.unprotect(session)
        self.rig.delete(1000)

    def check_protected(self, numbers: list[int]) -> None:
        """A block has one position, so a block that another session has at another position is not protected here."""
        elsewhere = {
            one
            for other in self.sessions.values()
            for at, one in enumerate(other)
            if numbers[at : at + 1] != [one]
        }
        for number in set(numbers) - elsewhere:
            gone = self.rig.store.explain(TENANT, key(number))
            assert gone.stored or (gone.gone and gone.gone.reason not in FOR_ROOM)

    @rule(by_ms=st.sampled_from([50, 300, 6000]))
    def wait(self, by_ms: int) -> None:
        self.rig.clock.now_ms += by_ms
        self.rig.poll_once()
        self.rig.settle()

    @rule()
    def close(self) -> None:
        self.note_what_went()
        self.rig.close()
        self.reopen(FakeDisk(self.disk.pages, capacity=PAGES * PAGE_BYTES))

    @rule(loses_index=st.booleans())
    def kill(self, loses_index: bool) -> None:  # noqa: FBT001 - Hypothesis passes by name
        self.note_what_went()
        self.seed += 1
        self.rig.kill()
        if loses_index:
            shutil.rmtree(self.folder / "data" / "index-0")
        killed = self.disk
        self.reopen(killed.after_kill(self.seed))
        killed.close()  # or some thousand examples leave no descriptor to open anything with

    def note_what_went(self) -> None:
        """Finish wipes, so that evicted blocks stay evicted: their reasons are about to be dropped."""
        self.rig.settle()
        for number in list(self.blocks):
            self.is_stored(number)

    def reopen(self, disk: FakeDisk) -> None:
        self.rig.disk = disk
        self.open()
        self.held = []
        for number in range(25):
            assert self.rig.store.explain(TENANT, key(number)).stored == (number in self.blocks)

    @invariant()
    def sessions_are_as_told(self) -> None:
        if hasattr(self.rig, "store"):
            for number in range(3):
                assert self.rig.session(number) == self.sessions.get(number)
            statistics = self.rig.store.statistics()
            assert statistics.eviction.blocks == statistics.blocks
            pages = sum(pages for _, pages in self.rig.drive._index.extents())
            lent = sum(lane.pages for lane in self.rig.lanes)
            on_their_way = statistics.wipes_pending or self.rig.drive._writes.waiting_for_sync
            assert statistics.free_bytes == (PAGES - 4 - pages - lent) * PAGE_BYTES or on_their_way


@pytest.fixture(autouse=True)
def small_drives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.superblock.DRIVE_CAPACITY_BYTES_MIN", 1)
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 5)


TestStoreMachine = StoreMachine.TestCase
TestStoreMachine.settings = settings(
    max_examples=EXAMPLES or 60,
    stateful_step_count=100 if EXAMPLES else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
