"""Steps of large sessions are done in slices: what others see meanwhile, and what they may do."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pytest

from kvstore.durability import Durability
from kvstore.errors import SessionRefused, StorageError
from kvstore.limits import SESSION_CHUNK_BLOCKS
from kvstore.storage import manifests
from kvstore.storage.eviction.evictor import Evictor
from kvstore.storage.eviction.types import Guard, Refusal
from kvstore.storage.fsck import check
from kvstore.storage.items import SessionItem, SessionStep
from kvstore.storage.manifests import SessionName
from kvstore.storage.slices import Slices
from tests.storage.fakes import FakeDisk
from tests.storage.rig import TENANT, USER, StoreRig, name

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from pathlib import Path

BLOCKS: Final = 200
SLICE: Final = 10


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
    """A store with blocks, and slices of ten."""
    monkeypatch.setattr("kvstore.storage.session_writes.SESSION_SLICE_BLOCKS", SLICE)
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(BLOCKS):
        rig.start_put(number, b"x%d" % number)
        if number % 50 == 49:
            rig.settle()
    yield rig
    rig.store.close()


def counted(slices: int, done: list[int]) -> Iterator[None]:
    for number in range(slices):
        if number:
            yield
        done.append(number)


def test_work_is_done_in_turns_a_slice_each() -> None:
    slices, one, other = Slices(), list[int](), list[int]()
    slices.begin(counted(3, one))
    slices.begin(counted(2, other))
    assert (one, other) == ([0], [0])
    slices.step()
    assert (one, other) == ([0, 1], [0])
    slices.step()
    assert (one, other, bool(slices)) == ([0, 1], [0, 1], True)
    slices.step()
    assert (one, bool(slices)) == ([0, 1, 2], False)
    slices.step()


def test_a_session_is_visible_completely_or_not_at_all_and_reported_once_all_slices_are_done(
    filled: StoreRig,
) -> None:
    filled.append(1, range(BLOCKS))
    for step, before, after in (
        (SessionStep.FORK, None, list(range(BLOCKS))),
        (SessionStep.TRUNCATE, list(range(BLOCKS)), list(range(3))),
        (SessionStep.APPEND, list(range(3)), [0, 1, 2, *range(BLOCKS)]),
        (SessionStep.REMOVE, [0, 1, 2, *range(BLOCKS)], None),
    ):
        blocks = {SessionStep.FORK: BLOCKS, SessionStep.TRUNCATE: 3}.get(step, 0)
        keys = range(BLOCKS) if step is SessionStep.APPEND else ()
        tag = filled.start_step(2, step, keys=keys, blocks=blocks, source=1)
        looks = 0
        while tag not in filled.session_done:
            assert filled.session(2) in (before, after)
            filled.poll()
            looks += 1
        assert (filled.session_done[tag].error, filled.session(2)) == (None, after)
        assert looks >= BLOCKS // SLICE - 1
        assert not filled.drive._sessions.slices


def test_a_second_step_of_a_session_waits_for_all_slices_of_the_first(filled: StoreRig) -> None:
    first = filled.start_step(1, SessionStep.APPEND, keys=range(BLOCKS))
    second = filled.start_step(1, SessionStep.TRUNCATE, blocks=5)
    other = filled.start_step(2, SessionStep.APPEND, keys=[7])
    while first not in filled.session_done:
        assert second not in filled.session_done
        filled.poll()
    assert other in filled.session_done, "a short step of another session doesn't wait for a long one"
    filled.settle()
    assert filled.session(1) == list(range(5))


def test_a_block_named_meanwhile_is_not_deleted_with_another_session(filled: StoreRig) -> None:
    filled.append(1, range(BLOCKS))
    removal = filled.start_step(1, SessionStep.REMOVE, delete_blocks=True)
    assert filled.session(1) is None
    filled.append(2, [0, 1, BLOCKS - 1, 5])
    filled.settle()
    assert filled.session_done[removal].error is None
    assert filled.session(2) == [0, 1, BLOCKS - 1, 5]
    assert [filled.get_miss(number) for number in (0, 1, BLOCKS - 1, 5, 2)] == [False] * 4 + [True]


def test_an_append_with_one_unknown_block_among_many_leaves_nothing(filled: StoreRig) -> None:
    done = filled.append(1, [*range(BLOCKS), BLOCKS + 1])
    assert isinstance(done.error, SessionRefused)
    assert filled.session(1) is None


def test_a_close_finishes_the_remaining_slices(filled: StoreRig) -> None:
    filled.append(1, range(BLOCKS // 2))
    filled.append(2, range(BLOCKS // 2, BLOCKS))
    fork = filled.start_step(3, SessionStep.FORK, blocks=BLOCKS // 2, source=1)
    removal = filled.start_step(2, SessionStep.REMOVE, delete_blocks=True)
    filled.close()
    assert filled.session_done[fork].error is None
    assert filled.session_done[removal].error is None
    assert filled.disk is not None
    filled.disk = FakeDisk(filled.disk.pages)
    filled.open()
    assert (filled.session(2), filled.session(3)) == (None, list(range(BLOCKS // 2)))
    assert [filled.get_miss(number) for number in (0, BLOCKS // 2, BLOCKS - 1)] == [False, True, True]


def long_keys(turn: int) -> list[int]:
    """Blocks whose chunks all differ."""
    return [(at + at // SESSION_CHUNK_BLOCKS + turn) % BLOCKS for at in range(6 * SESSION_CHUNK_BLOCKS + 5)]


STEPS: Final = {
    "append": (SessionStep.APPEND, long_keys(9), 0),
    "fork": (SessionStep.FORK, (), 6 * SESSION_CHUNK_BLOCKS),
    "truncate": (SessionStep.TRUNCATE, (), 3),
    "remove": (SessionStep.REMOVE, (), 0),
}


def check_counts(rig: StoreRig) -> None:
    """No chunk is owed, each one is referenced, and the counts match the index."""
    for drive in rig.store.drives:
        manifests = drive.manifests
        assert not list(manifests.all_owed())
        named = {chunk for _, stored in manifests.all() for chunk in stored.manifest.chunks}
        assert {chunk for _, chunk, _, _ in manifests.all_chunks()} == named
        space = drive.keeping.space
        assert space.used - space.leaving == manifests.pages_of_tenants()
        assert not space.coming


@pytest.mark.parametrize("what", STEPS)
@pytest.mark.parametrize("polls", [0, 1, 3, 8, 30, 31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 50, 60, 90])
def test_a_crash_between_two_slices_leaves_a_complete_session_and_no_pending_work(
    filled: StoreRig, what: str, polls: int
) -> None:
    step, keys, blocks = STEPS[what]
    number = 2 if step is SessionStep.FORK else 1
    filled.append(1, long_keys(0))
    before = filled.session(number)
    tag = filled.start_step(number, step, keys=keys, blocks=blocks, source=1)
    for _ in range(polls):
        if tag not in filled.session_done:
            filled.poll()
    after = [*long_keys(0), *long_keys(9)] if step is SessionStep.APPEND else long_keys(0)[:blocks]
    filled.kill()
    assert filled.disk is not None
    filled.disk = FakeDisk(filled.disk.pages)
    report = check(filled.data, source=filled.source(), boot_id=filled.boot_id)
    assert report.damage == []
    filled.disk = FakeDisk(filled.disk.pages)
    filled.open()
    assert not filled.store.statistics().rebuilt
    now = filled.session(number)
    assert now in (before, None if step is SessionStep.REMOVE else after)
    if tag in filled.session_done:
        assert now != before
    check_counts(filled)
    filled.append(3, long_keys(20))
    check_counts(filled)


def test_no_transaction_of_a_long_step_is_long(filled: StoreRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each delays everything else; a transaction counts a slice's chunks, and the tails."""
    index, change = filled.drive._index, filled.drive._index.write
    counted, most = [0], [0]

    def count(self: manifests._Change, keys: Iterable[bytes], step: int) -> None:
        keys = list(keys)
        counted[0] += len(keys)
        most[0] = max(most[0], counted[0])
        original(self, keys, step)

    def write(do: Callable[[Any], Any]) -> Any:
        counted[0] = 0
        return change(do)

    original = manifests._Change._count
    monkeypatch.setattr(manifests._Change, "_count", count)
    monkeypatch.setattr(index, "write", write)
    filled.append(1, long_keys(0))
    for step, keys, blocks in STEPS.values():
        number = 2 if step is SessionStep.FORK else 1
        tag = filled.start_step(number, step, keys=keys, blocks=blocks, source=1)
        filled.settle()
        assert filled.session_done[tag].error is None
    filled.remove(2)
    assert 0 < most[0] <= 2 * SESSION_CHUNK_BLOCKS
    check_counts(filled)


def test_a_fork_of_a_session_removed_meanwhile_reverts_its_counts(filled: StoreRig) -> None:
    filled.append(1, long_keys(0))
    fork = filled.start_step(2, SessionStep.FORK, blocks=6 * SESSION_CHUNK_BLOCKS, source=1)
    source = filled.drive.manifests.get(SessionName(TENANT, USER, name(1)))
    assert source is not None
    gone = source.manifest.chunks[-1]
    filled.drive._index.write(lambda one: one.delete(TENANT + gone, db=filled.drive._index.chunks))
    filled.settle()
    assert isinstance(filled.session_done[fork].error, StorageError)
    assert filled.session(2) is None
    assert not list(filled.drive.manifests.all_owed())
    assert {count for *_, count in filled.drive.manifests.all_chunks()} == {1}
    filled.settle()
    assert not filled.drive.keeping.space.coming


def test_a_long_session_is_protected_and_released_in_slices(
    filled: StoreRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.storage.eviction_events.SESSION_STEP_BLOCKS", SLICE)
    filled.append(1, range(BLOCKS))
    core = filled.drive.keeping.core
    rows: list[int] = []

    def is_counted(name: str) -> None:
        original = getattr(Evictor, name)

        def counted(self: Evictor, *of: int, **more: int) -> Refusal | None:
            before = self.statistics().guarded[Guard.PROTECTED]
            answer: Refusal | None = original(self, *of, **more)
            rows.append(abs(self.statistics().guarded[Guard.PROTECTED] - before))
            return answer

        monkeypatch.setattr(Evictor, name, counted)

    is_counted("protect_session")
    is_counted("unprotect_session")
    session = SessionName(TENANT, USER, name(1))
    for blocks in (BLOCKS, 35, 120, SESSION_CHUNK_BLOCKS * 10, 0):
        item = SessionItem(session, SessionStep.PROTECT, Durability.WRITTEN, 0, blocks=blocks)
        assert filled.change_session(item).error is None
        guarded = core.statistics().guarded[Guard.PROTECTED]
        assert guarded == min(blocks, BLOCKS)
    assert max(rows) <= SLICE
    assert sum(rows) == BLOCKS + (BLOCKS - 35) + 85 + 80 + BLOCKS


def test_of_sessions_that_end_together_a_few_are_removed_at_a_time(filled: StoreRig) -> None:
    for number in range(1, 21):
        filled.append(number, [number], expires_ms=filled.clock.now_ms + 1000)
    filled.clock.now_ms += 2000
    left = [len(filled.store.manifests)]
    while left[-1]:
        filled.poll_once()
        left.append(len(filled.store.manifests))
    assert max(before - after for before, after in pairwise(left)) <= 2
