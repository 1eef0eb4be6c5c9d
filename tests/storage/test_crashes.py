"""Random histories of a store on a drive that loses whatever it may lose.

Checked after each crash: every block acknowledged as durable enough for that crash is there, byte for byte; every other
one is there with the right bytes, or is a miss; deleted blocks whose deletion was acknowledged are misses; blocks that
were evicted for room, as happens in half of the histories because the drive is too small, were reported as such; a
session lists what the last step that survives has left, or what one of the later steps would have left, in order; and a
check of the folder finds nothing wrong. In half of the histories the crash is followed by puts, most of them of bytes
that were put before, and then by a second crash, before any block was read: their guarantees hold although it was
unknown what the first crash had torn. Of two drives one may be left out for a while: what is on it is lost, and stays
lost when it comes back; everything else holds as before.

Half of the seeds encrypt. With these, no sector of a payload is ever written as it was put.

TRIGGERKV_CRASH_SEEDS=n runs n seeds instead of 60 (a fifth as many with two drives), TRIGGERKV_CRASH_FIRST=n begins at
another one.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import KeyTaken, NoSpace
from kvstore.limits import DRIVE_CAPACITY_BYTES_MIN, PAGE_BYTES, SECTOR_BYTES
from kvstore.storage.eviction.types import Eviction, Reason
from kvstore.storage.fsck import check
from kvstore.storage.items import SessionStep
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, Slots, StoreRig, key

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

SEEDS = int(os.environ.get("TRIGGERKV_CRASH_SEEDS", "60"))
FIRST = int(os.environ.get("TRIGGERKV_CRASH_FIRST", "0"))
BATCH = 20
LIVES = 4
NAMES = 12
SESSIONS = 3
FSCK_EVERY = 10  # seeds
DURABILITIES = (Durability.WRITTEN, Durability.SYNCED)

SMALL_PAGES = 42  # of a drive on which not all names fit
FOR_ROOM = {Reason.SPACE, Reason.STRANDED, Reason.CLEARED}

SLOTS = Slots(64, 64 << 10)

State = tuple[int, ...] | None


class Watch:
    """Counts sectors that are written as they were put, and headers of encrypted records."""

    WORD_BYTES = 8
    ENCRYPTED = b"TKVSEALD"

    def __init__(self) -> None:
        self._begins: set[bytes] = set()
        self.in_clear = self.encrypted = 0

    def was_put(self, payload: bytes) -> None:
        """Remember the beginnings of a payload's sectors, apart from the common filling."""
        begins = (payload[at : at + self.WORD_BYTES] for at in range(0, len(payload), SECTOR_BYTES))
        self._begins.update(one for one in begins if len(one) == self.WORD_BYTES and one.strip(b"-"))

    def written(self, data: bytes) -> None:
        """Examine a write to a drive."""
        begins = [data[at : at + self.WORD_BYTES] for at in range(0, len(data), SECTOR_BYTES)]
        self.in_clear += sum(one in self._begins for one in begins)
        self.encrypted += begins.count(self.ENCRYPTED)


@dataclass
class Put:
    number: int
    payload: bytes
    durability: Durability
    expires: bool
    deletes: int  # of its name, begun when it was
    deleting: int  # of its name, under way when it was begun


@dataclass
class Delete:
    number: int
    durability: Durability
    puts: int  # of its name, begun when it was


@dataclass
class Step:
    number: int
    step: SessionStep
    durability: Durability
    keys: tuple[int, ...] = ()
    blocks: int = 0
    base: State = None  # what is forked

    def apply(self, state: State) -> State:
        if self.step is SessionStep.APPEND:
            return (state or ()) + self.keys
        if self.step is SessionStep.TRUNCATE:
            return None if state is None else state[: self.blocks]
        return self.base if self.step is SessionStep.FORK else None


@dataclass
class Expected:
    """Everything put under each name, which blocks must be stored or gone, and the sessions' states."""

    invoked: dict[int, list[bytes]] = field(default_factory=dict)
    acknowledged: dict[int, tuple[bytes, Durability]] = field(default_factory=dict)
    gone: dict[int, Durability] = field(default_factory=dict)
    puts: dict[int, int] = field(default_factory=dict)
    deletes: dict[int, int] = field(default_factory=dict)
    sessions: dict[int, State] = field(default_factory=dict)
    watch: Watch = field(default_factory=Watch)


class Life:
    """One life of the store: its calls and their results."""

    def __init__(self, rig: StoreRig, rng: random.Random, expected: Expected) -> None:
        self.rig = rig
        self.histories = [drive.keeping._history for drive in rig.store.drives]
        self.closed = False
        self.is_small = rig.drive.capacity_bytes == SMALL_PAGES * PAGE_BYTES
        self.rng = rng
        self.expected = expected
        self.pending_puts: dict[int, Put] = {}
        self.pending_deletes: dict[int, Delete] = {}
        self.steps: dict[int, list[tuple[int, Step]]] = {}
        self.lost = False  # a drive that was there in this life is left out after it

    def note_evictions(self) -> None:
        """Evicted blocks are no longer expected; no other block may be missing."""
        self.rig.catch_up()
        numbers = list(self.expected.acknowledged)
        stored = self.rig.store.lookup([(TENANT, key(number)) for number in numbers])
        for number, entry in zip(numbers, stored, strict=True):
            if entry is None:
                gone = self.rig.store.explain(TENANT, key(number)).gone
                assert gone is not None, f"block {number} is gone without a reason"
                assert gone.reason in FOR_ROOM, f"block {number} is gone: {gone.reason.name}"
                del self.expected.acknowledged[number]

    def was_gone_at_the_close(self, number: int) -> Eviction | None:
        """The removal of a block, if it happened while the store was closing."""
        if not self.closed:
            return None
        gone = [history.of(TENANT + key(number)) for history in self.histories]
        return max((one for one in gone if one is not None), key=lambda one: one.at_ms, default=None)

    def live(self) -> None:
        """Random operations that reuse extents, stopped anywhere."""
        actions = [self.put] * 40 + [self.rig.poll_once] * 20 + [self.delete] * 12 + [self.settle] * 8
        actions += [self.session] * 12 + [self.evict] * 4 + [self.wait] * 8
        for _ in range(self.rng.randrange(5, 50)):
            self.rng.choice(actions)()
            self.hear()
            self.note_evictions()

    def put(self, again: float = 0.5) -> None:
        """Put new bytes, or with this probability those put under the name before."""
        number, expected = self.rng.randrange(NAMES), self.expected
        stored = expected.invoked.setdefault(number, [])
        if stored and self.rng.random() < again:
            payload = self.rng.choice(stored[-2:])
        else:
            payload = self.rng.randbytes(self.rng.choice([10, 5000, 20_000]))
            if stored:
                payload = payload[: len(stored[0])].ljust(len(stored[0]), b"-")  # a name has one length
            stored.append(payload)
            expected.watch.was_put(payload)
        expires = number % 4 == 0
        expires_ms = self.rig.clock.now_ms + self.rng.randrange(1, 20) if expires else 0
        durability = self.rng.choice(DURABILITIES)
        deleting = sum(one.number == number for one in self.pending_deletes.values())
        expected.puts[number] = expected.puts.get(number, 0) + 1
        expected.gone.pop(number, None)
        tag = self.rig.start_put(number, payload, durability, expires_ms=expires_ms)
        self.pending_puts[tag] = Put(
            number, payload, durability, expires, expected.deletes.get(number, 0), deleting
        )

    def put_first(self) -> None:
        """Put before the first get, and stop at any moment."""
        for _ in range(self.rng.randrange(1, 20)):
            self.put(again=0.9)
            if self.rng.random() < 0.3:
                self.rig.settle()
            elif self.rng.random() < 0.5:
                self.rig.poll_once()
            self.hear()
            self.note_evictions()

    def delete(self) -> None:
        number, expected = self.rng.randrange(NAMES), self.expected
        expected.deletes[number] = expected.deletes.get(number, 0) + 1
        expected.acknowledged.pop(number, None)
        durability = self.rng.choice(DURABILITIES)
        tag = self.rig.start_delete(number, durability)
        self.pending_deletes[tag] = Delete(number, durability, expected.puts.get(number, 0))

    def evict(self) -> None:
        number = self.rng.randrange(NAMES)
        entry = self.rig.store.lookup([(TENANT, key(number))])[0]
        if entry is not None:
            self.rig.store.evict([entry.generation])
            self.expected.deletes[number] = self.expected.deletes.get(number, 0) + 1
            self.expected.acknowledged.pop(number, None)

    def session(self) -> None:
        number = self.rng.randrange(SESSIONS)
        step = self.rng.choice([SessionStep.APPEND] * 4 + [SessionStep.TRUNCATE, SessionStep.REMOVE])
        done = Step(number, step, self.rng.choice(DURABILITIES))
        if step is SessionStep.APPEND:
            stored = self.rig.store.lookup([(TENANT, key(one)) for one in range(NAMES)])
            known = [one for one, entry in enumerate(stored) if entry is not None]
            if not known:
                return
            done.keys = tuple(self.rng.choices(known, k=self.rng.choice([1, 3, 60, 150])))
        elif step is SessionStep.TRUNCATE:
            done.blocks = self.rng.randrange(150)
        if self.rng.random() < 0.2:
            self.settle()
            source = self.rng.randrange(SESSIONS)
            forked = self.rig.session(source)
            if self.rig.session(number) is None and forked is not None:
                done = Step(
                    number, SessionStep.FORK, done.durability, blocks=self.rng.randrange(len(forked) + 1)
                )
                done.base = tuple(forked[: done.blocks])
                tag = self.rig.start_step(
                    number, done.step, done.durability, source=source, blocks=done.blocks
                )
                self.steps.setdefault(number, []).append((tag, done))
                return
        tag = self.rig.start_step(number, done.step, done.durability, keys=done.keys, blocks=done.blocks)
        self.steps.setdefault(number, []).append((tag, done))

    def settle(self) -> None:
        self.rig.settle()
        self.hear()
        self.note_evictions()
        check_get(self.rig, self.rng.randrange(NAMES), self.expected)

    def wait(self) -> None:
        self.rig.clock.now_ms += self.rng.randrange(5)

    def hear(self) -> None:
        expected = self.expected
        for tag in [tag for tag in self.pending_puts if tag in self.rig.put_done]:
            put = self.pending_puts.pop(tag)
            error = self.rig.put_done[tag].error
            if isinstance(error, NoSpace) and self.is_small:
                # Records of sessions, which nobody evicts, may lie so on so small a drive that no room is left.
                continue
            others = [one for one in expected.invoked[put.number] if one != put.payload]
            if isinstance(error, KeyTaken) and others:
                continue
            assert error is None
            sure = (
                put.deleting == 0 and put.deletes == expected.deletes.get(put.number, 0) and not put.expires
            )
            if sure:
                self.note_acknowledged(put)
        for tag in [tag for tag in self.pending_deletes if tag in self.rig.delete_done]:
            delete = self.pending_deletes.pop(tag)
            assert self.rig.delete_done[tag].error is None
            if delete.puts == expected.puts.get(delete.number, 0):
                expected.gone[delete.number] = max(
                    delete.durability, expected.gone.get(delete.number, delete.durability)
                )

    def note_acknowledged(self, put: Put) -> None:
        """The acknowledged block is the stored one; another block of its name can only have been evicted before."""
        payload, durability = self.expected.acknowledged.get(put.number, (put.payload, put.durability))
        if payload != put.payload:
            gone = self.rig.store.explain(TENANT, key(put.number)).gone
            gone = self.was_gone_at_the_close(put.number) or gone
            assert gone is not None
            assert gone.reason in FOR_ROOM, f"block {put.number} was written twice"
            durability = put.durability
        self.expected.acknowledged[put.number] = (put.payload, max(durability, put.durability))

    def allowed(self, number: int, survives: Durability) -> set[State]:
        """The possible states of a session after a crash that keeps everything this durable."""
        now: set[State] = {self.expected.sessions.get(number)}
        ever, before = set(now), set(now)
        for tag, step in self.steps.get(number, []):
            done = self.rig.session_done.get(tag)
            if done is not None and done.error is not None:
                continue
            stepped = {step.apply(state) for state in now}
            now = stepped if done is not None else now | stepped
            before |= now
            if done is not None and step.durability >= survives:
                ever = set(now)
            elif step.step is SessionStep.REMOVE:
                ever = set(before)  # a crash may keep any of the wipes that were to take all of them
            else:
                ever |= now
        return ever | {None} if self.lost else ever


def check_get(rig: StoreRig, number: int, expected: Expected) -> None:
    done, got = rig.get(number)
    assert done.miss is not None or got in expected.invoked[number], f"wrong bytes for {number}"


def drives_of(rig: StoreRig, numbers: Iterable[int]) -> dict[int, set[int]]:
    """The drives on which each block is stored."""
    return {
        number: {
            drive.number for drive in rig.store.drives if drive.lookup([(TENANT, key(number))]) != [None]
        }
        for number in numbers
    }


@pytest.fixture
def data(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, if there is such a thing: the drives are, and the folders are synced a hundred times."""
    memory = Path("/dev/shm")
    inside = memory if os.access(memory, os.W_OK) else tmp_path
    with tempfile.TemporaryDirectory(dir=inside) as made:
        yield Path(made)


@pytest.mark.parametrize("first_seed", range(FIRST, FIRST + SEEDS, BATCH))
def test_crashes(data: Path, monkeypatch: pytest.MonkeyPatch, first_seed: int) -> None:
    monkeypatch.setattr("kvstore.storage.superblock.DRIVE_CAPACITY_BYTES_MIN", 1)
    monkeypatch.setattr("kvstore.storage.extents.LENT_SHARE", 3)
    watches = {}
    for seed in range(first_seed, first_seed + BATCH):
        slice_sessions(monkeypatch, seed)
        watches[seed] = run(data / str(seed), seed)
        shutil.rmtree(data / str(seed))
    check_watches(watches)


@pytest.mark.parametrize("first_seed", range(FIRST, FIRST + SEEDS // 5, BATCH))
def test_crashes_with_two_drives(data: Path, first_seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.superblock.DRIVE_CAPACITY_BYTES_MIN", 1)
    watches = {}
    for seed in range(first_seed, first_seed + BATCH):
        monkeypatch.setattr(os, "urandom", random.Random(seed).randbytes)  # uuids decide what lies where
        slice_sessions(monkeypatch, seed)
        watches[seed] = run(data / str(seed), seed, drives=2)
        shutil.rmtree(data / str(seed))
    check_watches(watches)


def is_encrypted(seed: int) -> bool:
    """Whether a run is encrypted: half of them are, with small and large drives, with and without lanes."""
    return seed % 8 in {1, 3, 4, 6}


def has_lanes(seed: int) -> bool:
    return seed % 4 >= 2


def test_half_of_the_seeds_encrypt_in_addition() -> None:
    seeds = range(FIRST, FIRST + 16)
    assert sum(map(is_encrypted, seeds)) == len(seeds) // 2
    for is_small in (False, True):
        for lanes in (False, True):
            alike = [seed for seed in seeds if bool(seed % 2) is is_small and has_lanes(seed) is lanes]
            assert sum(map(is_encrypted, alike)) == len(alike) // 2 == 2


def check_watches(watches: dict[int, Watch]) -> None:
    """Encrypted stores wrote nothing in the clear; the others did, so the check works."""
    for encrypts in (False, True):
        some = [watch for seed, watch in watches.items() if is_encrypted(seed) is encrypts]
        assert (sum(one.in_clear for one in some) > 0) is not encrypts
        assert (sum(one.encrypted for one in some) > 0) is encrypts


def slice_sessions(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Do steps of sessions in many slices or in one; a crash may come between any two."""
    monkeypatch.setattr("kvstore.storage.session_writes.SESSION_SLICE_BLOCKS", (1, 2, 252)[seed % 3])


def run(data: Path, seed: int, drives: int = 1) -> Watch:
    rng = random.Random(seed)
    capacity = SMALL_PAGES * PAGE_BYTES if seed % 2 else DRIVE_CAPACITY_BYTES_MIN
    expected = Expected()
    watch = expected.watch.written
    disks = [FakeDisk(seed=seed + number, capacity=capacity, watch=watch) for number in range(drives)]
    rig = StoreRig(data, None, SLOTS, disks=disks)
    if is_encrypted(seed):
        rig.keyring = FakeKeyring()
    without: list[int] = []
    for number in range(LIVES):
        rig.open(without=without)
        life = Life(rig, rng, expected)
        if has_lanes(seed):
            rig.use_lanes(seed)
        life.live()
        places = drives_of(rig, range(NAMES))
        survives = end(rig, rng, life, (seed * LIVES + number) * drives)
        if rng.random() < 0.3:
            shutil.rmtree(data / f"index-{rng.randrange(drives)}", ignore_errors=True)  # it is a cache
        was_away = without
        without = [rng.randrange(drives)] if drives > 1 and rng.random() < 0.3 else []
        if was_away and without != was_away:
            without = []  # a drive that was away does not go on alone
        rig.open(without=without)
        if without != was_away and without:
            lose(expected, life, places, without[0])
        where = f"seed {seed}, life {number}"
        survive(rig, life, survives, where)
        if rng.random() < 0.5:
            life = Life(rig, rng, expected)
            life.put_first()
            survives = end(rig, rng, life, (seed * LIVES + number) * drives + 500_000)
            rig.open(without=without)
            survive(rig, life, survives, f"{where}, puts first")
        check_blocks(rig, life, where)
        rig.kill()
        rig.disks = [disk.after_kill(0) for disk in rig.disks]
        assert not (is_encrypted(seed) and expected.watch.in_clear), f"{where}: a payload is in the clear"
    if seed % FSCK_EVERY == 0:
        open_keys = None if rig.keyring is None else rig.keyring.open
        report = check(data, source=rig.source(), boot_id=rig.boot_id, open_keys=open_keys)
        assert report.damage == [], f"seed {seed}"
    for disk in rig.disks:
        disk.close()
    return expected.watch


def lose(expected: Expected, life: Life, places: dict[int, set[int]], away: int) -> None:
    """Expect no block of a drive that is left out; a session may be lost or not."""
    # A block that lay nowhere yet was put by the close, which nobody has asked where to.
    for number in [one for one in expected.acknowledged if places[one] <= {away}]:
        del expected.acknowledged[number]
    life.lost = True


def end(rig: StoreRig, rng: random.Random, life: Life, seed: int) -> Durability:
    """Close, kill or cut the power; returns the durability that survives."""
    if rng.random() < 0.2:
        rig.close()
        life.hear()
        life.closed = True
        rig.disks = [
            FakeDisk(disk.pages, seed=seed + number, capacity=disk.capacity_bytes, watch=disk.watch)
            for number, disk in enumerate(rig.disks)
        ]
        return Durability.WRITTEN
    if rng.random() < 0.6:
        rig.power_loss(seed)
        return Durability.SYNCED
    rig.kill()
    rig.disks = [disk.after_kill(seed + number) for number, disk in enumerate(rig.disks)]
    return Durability.WRITTEN


def survive(rig: StoreRig, life: Life, survives: Durability, where: str) -> None:
    """Note which sessions survived a crash, and expect only what had to survive; no block is read."""
    expected = life.expected
    expected.acknowledged = {one: was for one, was in expected.acknowledged.items() if was[1] >= survives}
    expected.gone = {one: durability for one, durability in expected.gone.items() if durability >= survives}
    for number in list(expected.acknowledged):
        gone = life.was_gone_at_the_close(number)
        if (
            gone is not None
            and gone.reason in FOR_ROOM
            and rig.store.lookup([(TENANT, key(number))]) == [None]
        ):
            del expected.acknowledged[number]
    for number in range(SESSIONS):
        named = rig.session(number)
        state = None if named is None else tuple(named)
        assert state in life.allowed(number, survives), f"{where}: session {number} names {state}"
        expected.sessions[number] = state
    # What survived this crash is on the drive for good: an opening has synced it.
    expected.acknowledged = {one: (was[0], Durability.SYNCED) for one, was in expected.acknowledged.items()}
    expected.gone = dict.fromkeys(expected.gone, Durability.SYNCED)


def check_blocks(rig: StoreRig, life: Life, where: str) -> None:
    expected = life.expected
    for number in expected.invoked:
        check_get(rig, number, expected)
    for number in list(expected.acknowledged):
        done, got = rig.get(number)
        if done.miss is None:
            assert got == expected.acknowledged[number][0], f"{where}: block {number} is not what was put"
        else:
            gone = rig.store.explain(TENANT, key(number)).gone
            assert gone is not None, f"{where}: block {number} is lost: {done.miss}"
            assert gone.reason in FOR_ROOM, f"{where}: block {number} is lost: {gone.reason.name}"
            del expected.acknowledged[number]
    for number in expected.gone:
        assert rig.get(number)[0].miss is not None, f"{where}: block {number} came back"
