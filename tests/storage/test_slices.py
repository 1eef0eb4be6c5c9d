"""Steps of large sessions are done in slices: what others see meanwhile, and what they may do."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest

from kvstore.errors import SessionRefused
from kvstore.storage.items import SessionStep
from kvstore.storage.slices import Slices
from tests.storage.fakes import FakeDisk
from tests.storage.rig import StoreRig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCKS: Final = 200
SLICE: Final = 10


@pytest.fixture
def filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StoreRig]:
    """A store with blocks, in which a slice is of ten."""
    monkeypatch.setattr("kvstore.storage.sessions.SESSION_SLICE_BLOCKS", SLICE)
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


def test_a_session_is_seen_whole_or_not_at_all_and_is_told_of_when_all_slices_are_done(
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


def test_a_block_that_a_session_names_meanwhile_is_not_deleted_with_another(filled: StoreRig) -> None:
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


def test_a_close_does_what_slices_are_left(filled: StoreRig) -> None:
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
