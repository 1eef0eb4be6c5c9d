"""A drive that was in use before it had keys: what it has is encrypted beside all other work, and nothing is lost."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.limits import ENCRYPT_REST_MS
from kvstore.storage.fsck import check
from tests.storage.fake_keys import FakeKeyring
from tests.storage.fakes import FakeBay, FakeDisk
from tests.storage.rig import USER, StoreRig

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

MARK = b"what the user said, word by word"
LABEL = "a label of hers"
TURNS_MAX = POLLS_MAX = 10_000
BLOCKS = 12
LIVES_MAX = 12


def payload(number: int) -> bytes:
    return b"%4d" % number + MARK * (10 + 70 * (number % 7))


@pytest.fixture
def plain(tmp_path: Path) -> Iterator[StoreRig]:
    """A store with blocks and a session in the clear, and what deleted ones have left; it is closed."""
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
    """Whether anything that was put can be read on the drive."""
    return any(MARK in page or LABEL.encode() in page or USER in page for page in pages(rig).values())


def opened(rig: StoreRig) -> StoreRig:
    """In another life, with keys."""
    if rig.keyring is None:
        rig.keyring = FakeKeyring()
    rig.disk = FakeDisk(pages(rig))
    rig.open()
    return rig


def turn(rig: StoreRig) -> None:
    """What a node does within a tick, a while later."""
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
    """Close it, and hold its index against its drive."""
    rig.store.close()
    assert rig.keyring is not None
    disk = FakeDisk(pages(rig))
    report = check(
        rig.data, bay=FakeBay([disk]), boot_id=rig.boot_id, payloads=True, open_keys=rig.keyring.open
    )
    opened(rig)
    return report.damage == []


def test_all_that_was_in_the_clear_is_encrypted_and_the_rest_overwritten(plain: StoreRig) -> None:
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


def test_a_store_that_was_encrypted_from_its_beginning_has_nothing_to_do(tmp_path: Path) -> None:
    rig = StoreRig(tmp_path / "data", FakeDisk())
    opened(rig)
    assert rig.put(1, payload(1)).error is None
    assert rig.store.statistics().clear_bytes == 0
    rig.store.close()
    opened(rig)
    assert rig.store.statistics().clear_bytes == 0
    rig.store.close()


@pytest.mark.parametrize("power", [False, True])
def test_it_goes_on_after_being_killed_at_any_moment(plain: StoreRig, *, power: bool) -> None:
    """At every few operations of the drive, and then again while it goes on."""
    rig, lives = plain, 0
    left = random.Random(3)
    opened(rig)
    rig.store.close()
    opened(rig)
    while rig.store.statistics().clear_bytes:
        stop_at = rig.disk.operations + left.randrange(1, 30)  # type: ignore[union-attr]
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
