"""The turns of sessions after appends, forks and truncations, and appends that arrive twice."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.durability import Durability
from kvstore.errors import NoSession, SessionRefused
from kvstore.limits import SESSION_TURN_TOKENS_MAX, SESSION_TURNS_MAX
from kvstore.storage.items import SessionStep
from kvstore.storage.manifests import Listed, SessionName
from kvstore.wire.manifest import Turn
from tests.storage.fakes import FakeDisk
from tests.storage.pair import fail, user_drive
from tests.storage.rig import TENANT, USER, StoreRig, key, name

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from kvstore.storage.items import SessionDone

BLOCKS = 300


@pytest.fixture
def filled(tmp_path: Path) -> Iterator[StoreRig]:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    rig.open()
    for number in range(BLOCKS):
        rig.start_put(number, b"x%d" % number)
        if number % 50 == 49:
            rig.settle()
    yield rig
    rig.store.close()


def turns(rig: StoreRig, number: int) -> list[tuple[int, ...]]:
    stored = rig.store.manifests.get(SessionName(TENANT, USER, name(number)))
    assert stored is not None
    return [tuple(turn) for turn in stored.manifest.turns]


def chat(rig: StoreRig) -> None:
    """Three turns, the last block of each with 8 tokens and all others with 16."""
    for at_ms, (first, end) in enumerate(((0, 130), (130, 140), (140, 300)), 1):
        tokens = 16 * (end - first) - 8
        assert rig.append(1, range(first, end), tokens=tokens, at_ms=at_ms, label="chat").error is None


def test_each_append_is_a_turn_and_survives_the_index(filled: StoreRig) -> None:
    chat(filled)
    expected = [(0, 2072, 1), (130, 152, 2), (140, 2552, 3)]
    assert turns(filled, 1) == expected
    listed = Listed(name(1), b"chat", 300, 3, 4776, 3, 0)
    assert filled.store.manifests.of_user(TENANT, USER) == [listed]
    for scanned in (False, True):
        filled.store.close()
        assert filled.disk is not None
        filled.disk = FakeDisk(filled.disk.pages)
        if scanned:
            shutil.rmtree(filled.data / "index-0")
        filled.open()
        assert turns(filled, 1) == expected
        assert filled.store.manifests.of_user(TENANT, USER) == [listed]


def take(rig: StoreRig, keys: Sequence[int], turns: Sequence[Turn], **more: Any) -> SessionDone:
    return rig._settled(rig.start_step(1, SessionStep.TAKE, keys=keys, turns=turns, label="chat", **more))


def test_a_session_is_taken_with_its_turns_whether_or_not_its_blocks_are_stored(filled: StoreRig) -> None:
    keys, whole = range(BLOCKS - 20, BLOCKS + 180), [Turn(0, 2000, 1), Turn(140, 900, 2)]
    for wrong in ([], [Turn(1, 9, 1)], [Turn(0, 9, 1), Turn(200, 1, 2)]):
        assert isinstance(take(filled, keys, wrong, epoch=2).error, SessionRefused)
    assert filled.store.manifests.of_user(TENANT, USER) == []
    assert take(filled, keys, whole, epoch=2, expires_ms=1 << 60).error is None
    filled.store.close()
    assert filled.disk is not None
    filled.disk = FakeDisk(filled.disk.pages)
    filled.open()
    listing = filled.store.manifests.keys(SessionName(TENANT, USER, name(1)))
    assert listing == [key(number) for number in keys]
    assert turns(filled, 1) == [(0, 2000, 1), (140, 900, 2)]
    listed = Listed(name(1), b"chat", 200, 2, 2900, 2, 1 << 60, 2)
    assert filled.store.manifests.of_user(TENANT, USER) == [listed]
    assert isinstance(take(filled, [1], [Turn(0, 1, 1)], epoch=2).error, SessionRefused), "it is there"
    assert isinstance(take(filled, [1], [Turn(0, 1, 1)], epoch=1).error, SessionRefused), "a later epoch"
    assert take(filled, [1], [Turn(0, 1, 1)], epoch=3).error is None, "that of a past epoch does not count"
    assert turns(filled, 1) == [(0, 1, 1)]


def test_a_copy_of_a_session_follows_its_home(filled: StoreRig) -> None:
    """Grown, cut and grown again, protected, and of a later epoch."""

    def copied(keys: Sequence[int], blocks: int, **more: Any) -> None:
        ends = [Turn(0, 9, 1)] if blocks or keys else []
        assert take(filled, keys, ends, blocks=blocks, replaces=True, **more).error is None

    wanted: list[int] = []
    for blocks, until in ((0, 130), (130, 140), (126, 260), (20, 20), (20, 300), (252, 290)):
        wanted = [*wanted[:blocks], *range(blocks, until)]
        copied(range(blocks, until), blocks, epoch=2, protected=blocks)
        there = filled.store.manifests.keys(SessionName(TENANT, USER, name(1)))
        assert there == [key(number) for number in wanted]
    assert SessionName(TENANT, USER, name(1)) in filled.store.protected
    assert isinstance(
        take(filled, [1], [Turn(0, 9, 1)], blocks=291, replaces=True, epoch=2).error, SessionRefused
    )
    assert isinstance(
        take(filled, [1], [Turn(0, 9, 1)], blocks=20, replaces=True, epoch=3).error, SessionRefused
    )
    assert filled.store.manifests.keys(SessionName(TENANT, USER, name(1))) is not None, "it stays"
    copied([5, 6], 0, epoch=3)
    assert SessionName(TENANT, USER, name(1)) not in filled.store.protected
    referenced = dict(filled.store.drives[0].manifests.all_references())
    assert referenced == {(TENANT, key(5)): 1, (TENANT, key(6)): 1}
    assert filled._settled(filled.start_step(1, SessionStep.REMOVE)).error is None
    assert dict(filled.store.drives[0].manifests.all_references()) == {}


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        (300, [(0, 2072, 1), (130, 152, 2), (140, 2552, 3)]),
        (299, [(0, 2072, 1), (130, 152, 2), (140, 2552 * 159 // 160, 3)]),
        (140, [(0, 2072, 1), (130, 152, 2)]),
        (135, [(0, 2072, 1), (130, 76, 2)]),
        (130, [(0, 2072, 1)]),
        (1, [(0, 15, 1)]),
        (0, []),
    ],
)
def test_a_fork_and_a_truncation_cut_turns_alike(
    filled: StoreRig, blocks: int, expected: list[tuple[int, int, int]]
) -> None:
    chat(filled)
    assert filled.fork(2, 1, blocks, label="fork").blocks == blocks
    assert filled.truncate(1, blocks).blocks == blocks
    assert turns(filled, 1) == turns(filled, 2) == expected
    labels = {one.session: one.label for one in filled.store.manifests.of_user(TENANT, USER)}
    assert labels == {name(1): b"chat", name(2): b"fork"}
    filled.append(2, [7], tokens=9, at_ms=4)
    assert turns(filled, 2) == [*expected, (blocks, 9, 4)]


def test_a_fork_from_another_drive_has_the_same_turns(pair: StoreRig) -> None:
    for number in range(20):
        pair.put(number, b"x")
    pair.append(1, range(10), tokens=160, at_ms=1)
    pair.append(1, range(10, 20), tokens=80, at_ms=2)
    fail(pair, user_drive(pair))
    assert pair.fork(2, 1, 15, label="copy").blocks == 15
    assert turns(pair, 2) == [(0, 160, 1), (10, 40, 2)]
    assert pair.session(2) == list(range(15))


def test_the_rest_of_a_turn_joins_it(filled: StoreRig) -> None:
    filled.append(1, range(10), tokens=160, at_ms=1, continues=True)
    filled.append(1, range(10, 20), tokens=100, at_ms=2, continues=True)
    filled.append(1, range(20, 30), tokens=1, at_ms=3)
    assert turns(filled, 1) == [(0, 260, 1), (20, 1, 3)]
    filled.append(1, [], tokens=5, at_ms=4)
    assert turns(filled, 1) == [(0, 260, 1), (20, 1, 3)], "a turn has a block"


def test_a_repeated_append_is_executed_once(filled: StoreRig) -> None:
    first = filled.append(1, range(200), first_block=0, tokens=7, at_ms=1)
    before = filled.store.manifests.get(SessionName(TENANT, USER, name(1)))
    again = filled.append(1, range(200), first_block=0, tokens=7, at_ms=2, durability=Durability.SYNCED)
    assert (first.error, again.error, again.blocks) == (None, None, 200)
    assert filled.store.manifests.get(SessionName(TENANT, USER, name(1))) == before, "nothing was written"
    filled.append(1, [7], first_block=200)
    assert filled.append(1, range(200), first_block=0).blocks == 201, "what stands before it is there, too"
    filled.delete(5)
    assert filled.append(1, range(200), first_block=0).error is None, "even if a block has gone since"


@pytest.mark.parametrize(
    ("first_block", "keys"), [(0, [9]), (4, [4]), (1, [9]), (2, [2, 4]), (0, [0, 1, 2, 4])]
)
def test_an_append_elsewhere_than_at_the_end_is_refused(
    filled: StoreRig, first_block: int, keys: list[int]
) -> None:
    filled.append(1, [0, 1, 2], first_block=0)
    done = filled.append(1, keys, first_block=first_block)
    assert isinstance(done.error, SessionRefused)
    assert "has 3 blocks" in str(done.error)
    assert filled.session(1) == [0, 1, 2]


def test_two_concurrent_appends_do_not_both_succeed(filled: StoreRig) -> None:
    tags = [filled.start_step(1, SessionStep.APPEND, keys=[number], first_block=0) for number in (1, 2)]
    filled.settle()
    first, second = (filled.session_done[tag].error for tag in tags)
    assert first is None
    assert isinstance(second, SessionRefused)
    assert filled.session(1) == [1]


def test_turns_and_their_tokens_are_bounded(filled: StoreRig) -> None:
    assert filled.append(1, [0], tokens=SESSION_TURN_TOKENS_MAX).error is None
    for tokens, continues in ((1, True), (SESSION_TURN_TOKENS_MAX + 1, False), (-1, False)):
        done = filled.append(1, [0], tokens=tokens, continues=continues)
        assert isinstance(done.error, SessionRefused)
    for _ in range(1, SESSION_TURNS_MAX):
        filled.start_step(1, SessionStep.APPEND, keys=[0])
        filled.settle()
    assert "at most 1024 turns" in str(filled.append(1, [0]).error)
    assert filled.append(1, [0], continues=True).blocks == SESSION_TURNS_MAX + 1
    assert len(turns(filled, 1)) == SESSION_TURNS_MAX


def test_a_step_of_a_missing_session_says_so(filled: StoreRig) -> None:
    assert isinstance(filled.truncate(9, 0).error, NoSession)
    assert isinstance(filled.fork(2, 9, 0).error, NoSession)
    assert isinstance(filled.append(9, [1], first_block=1).error, SessionRefused)
    assert isinstance(filled.append(9, [BLOCKS]).error, SessionRefused)
