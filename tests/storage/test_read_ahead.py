"""Reading ahead returns the drive's bytes, however wrong the guesses are."""

from __future__ import annotations

import random

import pytest

from kvstore.errors import StorageError
from kvstore.limits import PAGE_BYTES
from kvstore.storage.read_ahead import Ahead
from tests.storage.fakes import FakeDisk

_PAGES = 2000
_PIECE_PAGES = 4


class _Counting(FakeDisk):
    """Counts the reads that a caller had to wait for."""

    waited_for = 0

    def read_at(self, offset: int, length: int) -> bytes:
        self.waited_for += 1
        return super().read_at(offset, length)


def _disk(seed: int) -> _Counting:
    pages = {page: page.to_bytes(8, "little") * (PAGE_BYTES // 8) for page in range(_PAGES)}
    return _Counting(pages, seed=seed, capacity=_PAGES * PAGE_BYTES)


def _expected(page: int, pages: int) -> bytes:
    return b"".join(one.to_bytes(8, "little") * (PAGE_BYTES // 8) for one in range(page, page + pages))


def _walk(rng: random.Random) -> list[tuple[int, int]]:
    """Runs of equal steps between steps of any size, sometimes backwards."""
    places, page = [], 0
    while page < _PAGES - 40 * _PIECE_PAGES:
        jump, pages = rng.randrange(1, 30), rng.randrange(1, _PIECE_PAGES + 1)
        for _ in range(rng.choice((1, 2, 3, 60))):
            if page + pages <= _PAGES:
                places.append((page, pages))
            page += jump
        page = max(0, page - rng.choice((0, 0, 0, jump)))
    return places


@pytest.mark.parametrize("seed", range(40))
def test_every_read_returns_the_drives_bytes(seed: int) -> None:
    rng, disk = random.Random(seed), _disk(seed)
    disk.faults = {rng.randrange(500): rng.choice((-5, 1)) for _ in range(20)}
    with Ahead(disk, _PIECE_PAGES * PAGE_BYTES) as ahead:
        for page, pages in _walk(rng):
            try:
                got = ahead.read(page * PAGE_BYTES, pages * PAGE_BYTES)
            except StorageError:
                continue  # the drive's own, of a read that was waited for
            assert got == _expected(page, pages)
    assert not disk.in_flight
    disk.close()


def test_a_failed_guess_is_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = _disk(1)
    monkeypatch.setattr(disk, "_execute", lambda _op: -5)  # whatever was submitted fails
    with Ahead(disk, PAGE_BYTES) as ahead:
        for page in range(0, 100, 2):
            assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
    disk.close()


def test_an_unreadable_page_is_an_error_and_the_next_is_not() -> None:
    disk = _disk(1)
    disk.unreadable = {40}
    with Ahead(disk, PAGE_BYTES) as ahead:
        for page in range(0, 100, 2):
            if page == 40:
                with pytest.raises(StorageError):
                    ahead.read(page * PAGE_BYTES, PAGE_BYTES)
            else:
                assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
    disk.close()


def test_of_equal_jumps_hardly_any_is_waited_for() -> None:
    disk = _disk(1)
    with Ahead(disk, PAGE_BYTES) as ahead:
        for page in range(0, 1500, 3):
            ahead.read(page * PAGE_BYTES, PAGE_BYTES)
    assert disk.waited_for < 10
    disk.close()


def test_guessing_continues_after_many_wrong_guesses() -> None:
    disk = _disk(1)
    with Ahead(disk, PAGE_BYTES) as ahead:
        for begin in range(0, 1400, 100):
            for page in range(begin, begin + 50):
                ahead.read(page * PAGE_BYTES, PAGE_BYTES)
        disk.waited_for = 0
        for page in range(1500, 1900):
            ahead.read(page * PAGE_BYTES, PAGE_BYTES)
    assert disk.waited_for < 10
    disk.close()


def test_jumps_that_differ_cause_no_other_read() -> None:
    disk = _disk(1)
    with Ahead(disk, PAGE_BYTES) as ahead:
        page, count = 0, 0
        for jump in range(1, 50):
            page, count = page + jump, count + 1
            ahead.read(page * PAGE_BYTES, PAGE_BYTES)
    assert disk.operations == count
    disk.close()


@pytest.mark.timeout(10)
def test_guessing_continues_when_slow_wrong_guesses_have_ended() -> None:
    disk = _disk(1)
    with Ahead(disk, PAGE_BYTES) as ahead:
        for page in range(101):
            ahead.read(page * PAGE_BYTES, PAGE_BYTES)
        disk.held = {op.tag for op in disk.in_flight}
        held = [(op.tag, op.offset) for op in disk.in_flight]
        assert len(held) > 10
        for page in range(500, 600):
            assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
        assert [(op.tag, op.offset) for op in disk.in_flight if op.tag in disk.held] == held
        disk.release()
        for page in range(700, 750):
            assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
        disk.waited_for = 0
        for page in range(750, 1900):
            assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
    assert disk.waited_for == 0
    disk.close()


@pytest.mark.timeout(10)
def test_guessing_continues_after_the_memory_was_full_of_wrong_guesses() -> None:
    disk = _disk(1)
    disk.held = set(range(64))
    with Ahead(disk, PAGE_BYTES) as ahead:
        for begin in range(0, 700, 10):
            for page in range(
                begin, begin + 3
            ):  # the third is the second equal jump: one guess, never asked for
                assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
        assert len(disk.in_flight) == 32
        disk.release()
        disk.waited_for = 0
        for page in range(800, 1900):
            assert ahead.read(page * PAGE_BYTES, PAGE_BYTES) == _expected(page, 1)
    assert disk.waited_for < 10
    disk.close()
