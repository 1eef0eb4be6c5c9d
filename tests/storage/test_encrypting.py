"""A drive in use before it had keys: its data is encrypted beside all other work, and nothing is lost."""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
from typing import TYPE_CHECKING

import pytest

from kvstore.durability import Durability
from kvstore.errors import KeyTaken
from kvstore.limits import DRIVE_CAPACITY_BYTES_MIN, ENCRYPT_REST_MS, ENCRYPT_SHARE, HEADER_BYTES, PAGE_BYTES
from kvstore.storage.encrypting import Encrypting
from kvstore.storage.eviction.types import Guard
from kvstore.storage.fsck import check
from kvstore.storage.manifests import SessionName
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeDisk, FakeDrives
from tests.storage.rig import TENANT, USER, Slots, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

    from kvstore.storage.index import Entry

MARK = b"what the user said, word by word"
LABEL = "a label of hers"
TURNS_MAX = POLLS_MAX = 10_000
BLOCKS = 12
LIVES_MAX = 12
PATIENCE_MS = 100_000


def payload(number: int) -> bytes:
    return b"%4d" % number + MARK * (10 + 70 * (number % 7))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[StoreRig]:
    """A closed store with blocks and a session in the clear, and remains of deleted ones."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(BLOCKS + 4):
        assert rig.put(number, payload(number)).error is None
    assert rig.append(1, range(BLOCKS), label=LABEL).error is None
    for number in range(BLOCKS, BLOCKS + 4):
        assert rig.delete(number).error is None
    rig.store.close()
    assert is_marked(rig)
    yield rig
    rig.store.close()


def pages(rig: StoreRig) -> dict[int, bytes]:
    assert rig.disk is not None
    return rig.disk.pages


def is_marked(rig: StoreRig) -> bool:
    """Whether anything put is readable on the drive."""
    return any(MARK in page or LABEL.encode() in page or USER in page for page in pages(rig).values())


def opened(rig: StoreRig) -> StoreRig:
    """The store, opened again with keys."""
    if rig.keyring is None:
        rig.keyring = FakeKeyring()
    rig.disk = FakeDisk(pages(rig))
    rig.open()
    return rig


def turn(rig: StoreRig) -> None:
    """Do a node's work of one tick, a while later."""
    rig.clock.now_ms += ENCRYPT_REST_MS
    rig.store.poll()
    for _ in range(POLLS_MAX):
        if not rig.is_ready(0):
            return
        rig.store.poll()
    raise AssertionError("the store does not come to rest")


def encrypted(rig: StoreRig) -> None:
    for _ in range(TURNS_MAX):
        if not rig.store.statistics().clear_bytes:
            return
        turn(rig)
    raise AssertionError(rig.store.statistics())


def is_whole(rig: StoreRig, numbers: Iterable[int] = range(BLOCKS)) -> bool:
    return all(rig.get(number)[1] == payload(number) for number in numbers)


def is_sound(rig: StoreRig) -> bool:
    """Close it, and compare its index with its drive."""
    rig.store.close()
    assert rig.keyring is not None
    disk = FakeDisk(pages(rig))
    report = check(
        rig.data, source=FakeDrives([disk]), boot_id=rig.boot_id, payloads=True, open_keys=rig.keyring.open
    )
    opened(rig)
    return report.damage == []


def test_everything_unencrypted_is_encrypted_and_the_rest_overwritten(plain: StoreRig) -> None:
    rig = opened(plain)
    before = rig.store.statistics()
    assert before.clear_bytes >= sum(len(payload(number)) for number in range(BLOCKS))
    assert is_whole(rig), "while it is in the clear"
    encrypted(rig)
    assert not is_marked(rig)
    after = rig.store.statistics()
    assert (after.blocks, after.free_bytes, after.quarantined_bytes) == (before.blocks, before.free_bytes, 0)
    assert not after.clear_why
    assert is_whole(rig)
    assert rig.session(1) == list(range(BLOCKS))
    assert is_sound(rig)
    assert is_whole(rig)
    assert not rig.store.has_timers, "nothing is left to be done"
    assert rig.store.statistics().clear_bytes == 0


def test_a_store_encrypted_from_its_start_has_nothing_to_do(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    opened(rig)
    assert rig.put(1, payload(1)).error is None
    assert rig.store.statistics().clear_bytes == 0
    rig.store.close()
    opened(rig)
    assert rig.store.statistics().clear_bytes == 0
    rig.store.close()


@pytest.mark.parametrize("power", [False, True])
def test_it_continues_after_being_killed_at_any_moment(plain: StoreRig, *, power: bool) -> None:
    """At every few operations of the drive, and then again while it continues."""
    rig, lives = plain, 0
    left = random.Random(3)
    opened(rig)
    rig.store.close()
    opened(rig)
    while rig.store.statistics().clear_bytes:
        stop_at = rig.disk.operations + left.randrange(1, 12)  # type: ignore[union-attr]
        for _ in range(TURNS_MAX):
            if rig.disk.operations >= stop_at or not rig.store.statistics().clear_bytes:  # type: ignore[union-attr]
                break
            rig.clock.now_ms += ENCRYPT_REST_MS
            rig.store.poll()
        lives += 1
        assert lives < TURNS_MAX
        if power:
            rig.power_loss(lives)
        else:
            rig.kill()
            rig.disk = rig.disk.after_kill(lives)  # type: ignore[union-attr]
        rig.open()
        assert is_whole(rig)
        assert rig.session(1) == list(range(BLOCKS))
        if lives > LIVES_MAX:
            encrypted(rig)
    assert lives > 2
    assert not is_marked(rig)
    assert is_sound(rig)
    assert not is_marked(rig)


def test_a_sync_requested_at_once_follows_one_in_progress(
    plain: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise encrypting stops for good on a node where nothing else needs a sync."""
    monkeypatch.setattr(Encrypting, "step", lambda _: None)
    rig, heard = opened(plain), list[str]()
    writes = rig.drive._writes
    while writes._sync is not None or writes._awaiting or writes._unhurried:
        rig.store.poll()
    writes.after_sync(lambda _: heard.append("the first"))
    writes.sync_if_awaited()
    rig.drive._traffic.pump()  # the drive has it
    writes.after_sync(lambda _: heard.append("at once"), unhurried=True)
    writes.sync_if_awaited(at_once=True)
    for _ in range(20):
        rig.store.poll()
    assert heard == ["the first", "at once"]


def entry_of(rig: StoreRig, number: int) -> Entry | None:
    return rig.store.lookup([(TENANT, key(number))])[0]


def until(rig: StoreRig, happened: Callable[[], bool]) -> None:
    """Continue, one poll at a time, until a condition holds."""
    for _ in range(TURNS_MAX):
        if happened():
            return
        rig.clock.now_ms += ENCRYPT_REST_MS
        rig.store.poll()
        rig.step_lanes()
    raise AssertionError("it never came to that")


def held_in_the_middle(rig: StoreRig) -> int:
    """Continue until a block is being rewritten; returns it, or a stored one if all have been."""

    def rewritten() -> list[int]:
        return [number for number in range(BLOCKS) if rig.store.is_putting((TENANT, key(number)))]

    until(rig, lambda: bool(rewritten()) or not rig.drive.keeping.plain_bytes)
    there = (number for number in range(BLOCKS) if entry_of(rig, number) is not None)
    return next(iter(rewritten()), next(there, 0))


@pytest.mark.parametrize("durability", list(Durability)[1:])
@pytest.mark.parametrize("in_the_middle", [False, True])
def test_a_block_deleted_meanwhile_stays_deleted(
    plain: StoreRig, durability: Durability, *, in_the_middle: bool
) -> None:
    rig = opened(plain)
    deleted: list[int] = []
    for at in range(BLOCKS):
        number = held_in_the_middle(rig) if in_the_middle else at
        deleted.append(number)
        done = rig.delete(number, durability)
        assert (done.error, done.found) == (None, True)
        assert entry_of(rig, number) is None
        if at == 2:
            rig.kill()  # with a new index, of all that can be found on the drive
            shutil.rmtree(rig.data / "index-0")
            opened(rig)
            assert not [one for one in deleted if entry_of(rig, one) is not None]
    encrypted(rig)
    assert not any(entry_of(rig, number) for number in range(BLOCKS))
    assert not is_marked(rig)
    assert is_sound(rig)


def test_a_put_of_a_block_being_rewritten_completes_with_it(plain: StoreRig) -> None:
    rig = opened(plain)
    for _ in range(BLOCKS // 2):
        number = held_in_the_middle(rig)
        same, other = (
            rig.start_put(number, payload(number), Durability.SYNCED),
            rig.start_put(number, b"other"),
        )
        longer = rig.start_put(number, payload(number), expires_ms=rig.clock.now_ms + 1_000_000)
        rig.settle()
        assert rig.put_done[same].error is None
        assert isinstance(rig.put_done[other].error, KeyTaken)
        assert rig.put_done[longer].error is None
    encrypted(rig)
    assert is_whole(rig)
    assert not is_marked(rig)


def test_guards_stay_until_their_holders_release_them(plain: StoreRig) -> None:
    rig = opened(plain)
    names = [(TENANT, key(number)) for number in range(BLOCKS)]
    pins = [rig.store.hold(names, Guard.LEASE) for _ in range(2)]
    assert rig.store.protect(SessionName(TENANT, USER, name(1)), 3) is None
    core = rig.drive.keeping.core
    encrypted(rig)
    assert not is_marked(rig)
    entries = [entry for entry in rig.store.lookup(names) if entry is not None]
    assert all(entry.domain for entry in entries)
    assert all(core.is_guarded(entry.generation) for entry in entries)
    assert core.statistics().guarded[Guard.LEASE] == BLOCKS - 3
    assert core.statistics().guarded[Guard.PROTECTED] == 3
    for held in pins:
        assert all(core.is_guarded(entry.generation) for entry in entries)
        rig.store.release([one for one in held if one is not None], Guard.LEASE)
    assert core.statistics().guarded[Guard.LEASE] == 0
    assert [core.is_guarded(entry.generation) for entry in entries] == [True] * 3 + [False] * (BLOCKS - 3)
    assert rig.drive.keeping._moved == {}


def test_a_block_evicted_or_expired_meanwhile_does_not_come_back(plain: StoreRig) -> None:
    rig = opened(plain)
    evicted = []
    for _ in range(4):
        number = held_in_the_middle(rig)
        evicted.append(number)
        (gone,) = [entry for entry in rig.store.lookup([(TENANT, key(number))]) if entry is not None]
        assert rig.store.evict([gone.generation]) > 0
        assert entry_of(rig, number) is None
        until(rig, lambda: not rig.store.is_putting((TENANT, key(evicted[-1]))))
    encrypted(rig)
    assert not any(entry_of(rig, number) for number in evicted)
    assert is_whole(rig, set(range(BLOCKS)) - set(evicted))
    assert not is_marked(rig)
    assert is_sound(rig)


def test_a_get_of_the_old_place_is_correct_while_the_block_moves(plain: StoreRig) -> None:
    rig = opened(plain)
    assert rig.disk is not None
    for number in range(BLOCKS):
        before = len(rig.disk.in_flight)
        item = rig.start_get(number)
        if len(rig.disk.in_flight) > before:
            rig.disk.held.add(rig.disk.in_flight[-1].tag)
        for _ in range(20):
            rig.clock.now_ms += ENCRYPT_REST_MS
            rig.store.poll()
        rig.disk.release()
        rig.settle()
        done = rig.store.verify_payload(item, rig.get_done[item.tag])
        assert done.miss is None
        got = ctypes.string_at(item.slot_address + HEADER_BYTES, done.length)
        assert got == payload(number)
    encrypted(rig)
    assert not is_marked(rig)


@pytest.mark.parametrize("unreadable", [False, True])
def test_a_damaged_block_is_a_miss_and_is_overwritten(plain: StoreRig, *, unreadable: bool) -> None:
    rig = opened(plain)
    entry = entry_of(rig, 3)
    assert entry is not None
    assert rig.disk is not None
    if unreadable:
        rig.disk.unreadable.add(entry.offset // PAGE_BYTES + 1)
    else:
        rig.disk.flip(entry.offset + PAGE_BYTES + 7, 3)
    encrypted(rig)
    assert entry_of(rig, 3) is None
    assert rig.get_miss(3)
    assert is_whole(rig, [number for number in range(BLOCKS) if number != 3])
    assert not is_marked(rig)


def test_a_full_drive_waits_for_room_and_reports_it(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk(), Slots(64, 1 << 20))
    rig.open()
    size = 900 << 10
    numbers = range(DRIVE_CAPACITY_BYTES_MIN // size)
    for number in numbers:
        assert rig.put(number, bytes([number]) * size).error is None
    small = (MARK * 128)[:PAGE_BYTES]
    filler = itertools.count(1000)
    while rig.drive._extents.longest * PAGE_BYTES > size // 2:
        assert rig.put(next(filler), small * 100).error is None
    there = {number for number in numbers if entry_of(rig, number) is not None}
    rig.store.close()
    opened(rig)
    for _ in range(200):
        turn(rig)
    said = rig.store.statistics()
    assert said.clear_bytes > 0
    assert "free in one piece" in said.clear_why
    assert {number for number in numbers if entry_of(rig, number) is not None} == there, "nothing had to go"
    # Which blocks are copied first, and so which of the freed pieces stay whole, depends on the drive's random secret.
    for number in sorted(there)[: len(there) // 2]:
        rig.delete(number)
        for _ in range(200):
            turn(rig)
        if not rig.store.statistics().clear_bytes:
            break
    encrypted(rig)
    assert not is_marked(rig)
    rig.store.close()


def test_it_works_a_bounded_part_of_the_time(plain: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.storage.encrypting.ENCRYPT_STRETCH_BYTES", 64 << 10)
    rig = opened(plain)
    work = rig.drive._encrypting
    begun: list[int] = []
    while rig.store.statistics().clear_bytes:
        was_working = work.is_working
        rig.store.poll()
        if work.is_working and not was_working:
            begun.append(rig.clock.now_ms)
        rig.clock.now_ms += 7 if work.is_working else 1
        assert len(begun) < TURNS_MAX
        if len(begun) > 3:
            break
    assert len(begun) > 3
    rests = [after - before for before, after in itertools.pairwise(begun)]
    assert all(rest >= ENCRYPT_REST_MS for rest in rests)
    until(rig, lambda: work.is_working)
    worked_ms = 4_000
    rig.clock.now_ms += worked_ms
    until_ms = rig.clock.now_ms + worked_ms * (ENCRYPT_SHARE - 1)
    while rig.clock.now_ms < until_ms:
        rig.store.poll()
        rig.clock.now_ms += not work.is_working
    assert not work.is_working
    encrypted(rig)


def test_a_lane_continues_meanwhile(plain: StoreRig) -> None:
    rig = opened(plain)
    rig.use_lanes(3)
    for number in range(100, 130):
        assert rig.put(number, payload(number)).error is None
        turn(rig)
    for _ in range(TURNS_MAX):
        if not rig.store.statistics().clear_bytes:
            break
        turn(rig)
        rig.step_lanes()
    assert is_whole(rig, [*range(BLOCKS), *range(100, 130)])
    rig.close()
    assert not is_marked(rig)
    opened(rig)
    assert rig.store.statistics().clear_bytes == 0


def test_sessions_change_meanwhile_and_chunks_move(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    numbers = range(130)
    for number in numbers:
        assert rig.put(number, MARK).error is None
    assert rig.append(1, numbers, label=LABEL).error is None
    assert rig.fork(2, 1, 127, label=LABEL).error is None
    rig.store.close()
    opened(rig)
    for at in range(200):
        turn(rig)
        if at % 5 == 0:
            assert rig.append(2, [at % 130]).error is None
        if at == 60:
            assert rig.remove(1).error is None
    encrypted(rig)
    assert not is_marked(rig)
    keys = b"".join(key(number) for number in range(126))
    assert not any(keys[:64] in page for page in pages(rig).values())
    session = rig.session(2)
    assert session is not None
    assert session[:127] == list(range(127))
    assert rig.session(1) is None
    assert is_sound(rig)
    assert rig.session(2) == session
    rig.store.close()


def test_a_failed_overwrite_is_retried_at_the_next_start(plain: StoreRig) -> None:
    far = DRIVE_CAPACITY_BYTES_MIN // PAGE_BYTES - 1
    pages(plain)[far] = (MARK * PAGE_BYTES)[:PAGE_BYTES]  # as a deleted block leaves it
    rig = opened(plain)
    assert rig.disk is not None
    until(rig, lambda: rig.drive._encrypting._sweep is not None)
    assert rig.drive._extents.free_from(far) == (far, 1)
    rig.disk.unwritable.add(far)
    for _ in range(1000):
        turn(rig)
    said = rig.store.statistics()
    assert said.clear_bytes > 0
    assert "tried again at the next start" in said.clear_why
    assert is_marked(rig)
    rig.store.close()
    opened(rig)
    encrypted(rig)
    assert not is_marked(rig)


def has_ground(rig: StoreRig) -> bool:
    rig.drive.lend()
    return bool(rig.drive._writes.ground.lent)


def test_ground_returned_by_a_lane_is_overwritten_too(tmp_path: Path) -> None:
    """It isn't free when the free pages are checked, and is unchanged when returned; deleted pages lie everywhere."""
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    numbers = range(DRIVE_CAPACITY_BYTES_MIN // (60 << 10))
    for number in numbers:
        assert rig.put(number, (MARK * 1900)[: 56 << 10]).error is None
    for number in set(numbers) - set(numbers[:: len(numbers) // BLOCKS]):
        rig.delete(number)
    rig.store.close()
    opened(rig)
    rig.use_lanes(3)
    until(rig, lambda: rig.drive._encrypting._sweep is not None)
    until(rig, lambda: has_ground(rig))
    extents = rig.drive._extents
    free = {page for page in pages(rig) if (extents.free_from(page) or (0, 0))[0] == page}
    lent = [page for page, content in pages(rig).items() if MARK in content and page not in free]
    assert lent, "or this shows nothing"
    until(rig, lambda: not rig.store.statistics().clear_bytes)
    assert not is_marked(rig)
    until(rig, lambda: has_ground(rig))
    assert rig.put(500, payload(50)).error is None
    assert rig.get(500)[1] == payload(50)
    rig.close()


@pytest.mark.parametrize("seed", range(8))
def test_no_label_is_left_even_if_sessions_change_and_the_process_is_killed_meanwhile(
    tmp_path: Path, seed: int
) -> None:
    chance = random.Random(seed)
    rig = StoreRig(tmp_path / "data", FakeDisk(seed=seed))
    rig.patience_ms = PATIENCE_MS
    rig.open()
    for number in range(BLOCKS):
        assert rig.put(number, payload(number)).error is None
    change_sessions(rig, chance, 40, until=14)
    rig.kill()
    assert rig.disk is not None
    rig.disk = rig.disk.after_kill(seed)
    opened(rig)
    for life in range(LIVES_MAX // 3):
        stop_at = rig.disk.operations + chance.randrange(1, 80)
        while rig.disk.operations < stop_at and rig.store.statistics().clear_bytes:
            rig.clock.now_ms += ENCRYPT_REST_MS
            rig.store.poll()
            if chance.random() < 0.1:
                change_sessions(rig, chance, 1)
        rig.kill()
        rig.disk = rig.disk.after_kill(life)
        rig.open()
    for _ in range(30):
        turn(rig)
        change_sessions(rig, chance, 1)
    encrypted(rig)
    assert not is_marked(rig)
    rig.store.close()
    assert not any(LABEL.encode() in file.read_bytes() for file in (rig.data / "index-0").iterdir())


def change_sessions(rig: StoreRig, chance: random.Random, times: int, until: int = 6) -> None:
    """Append to, fork and remove sessions; steps of missing sessions change nothing."""
    for _ in range(times):
        number, other = chance.sample(range(1, until), 2)
        what = chance.random()
        if what < 0.6:
            rig.append(
                number, [chance.randrange(BLOCKS) for _ in range(chance.choice([1, 3, 70]))], label=LABEL
            )
        elif what < 0.8:
            rig.fork(number, other, 1, label=LABEL)
        else:
            rig.remove(number)
