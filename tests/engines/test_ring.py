"""The ring that holds copied pages."""

from __future__ import annotations

import random
from collections import deque

from kvstore.engines.vllm.ring import Ring


def test_pieces_never_overlap() -> None:
    dice = random.Random(5)
    for size in (64, 100, 1000):
        ring = Ring(size)
        taken: deque[tuple[range, int]] = deque()
        most = 0
        for _ in range(3000):
            if taken and dice.random() < 0.5:
                ring.give_back(taken.popleft()[1])
                continue
            wanted = dice.randrange(1, size + 1)
            if (got := ring.take(wanted)) is None:
                continue
            offset, to_give_back = got
            piece = range(offset, offset + wanted)
            assert 0 <= offset <= size - wanted
            assert all(piece.stop <= other.start or other.stop <= piece.start for other, _ in taken)
            taken.append((piece, to_give_back))
            most = max(most, len(taken))
        assert most > 1


def test_an_empty_ring_holds_as_much_as_its_size_wherever_the_last_piece_ended() -> None:
    ring = Ring(10)
    for size in (4, 7, 10, 3, 10):
        got = ring.take(size)
        assert got is not None
        assert ring.take(10) is None
        ring.give_back(got[1])
    assert ring.take(11) is None


class SharedRing(Ring):
    """While one thread gives back, another takes as soon as it can read that the ring is empty."""

    _last = 0
    is_shared = False

    @property
    def _given_back(self) -> int:
        last = self._last
        if self.is_shared and last == self._taken:
            self.is_shared = False
            assert self.take(3) == (0, 3)
        return last

    @_given_back.setter
    def _given_back(self, given_back: int) -> None:
        self._last = given_back


def test_the_last_piece_may_be_given_back_while_another_thread_takes() -> None:
    ring = SharedRing(10)
    got = ring.take(8)
    assert got is not None
    ring.is_shared = True
    ring.give_back(got[1])
    assert ring.is_shared, "nothing was read after the ring was known to be empty"


def test_an_empty_ring_starts_over_and_has_all_of_its_room() -> None:
    ring = Ring(100)
    for _ in range(3):
        pieces = [ring.take(10) for _ in range(10)]
        assert [piece and piece[0] for piece in pieces[:3]] == [0, 10, 20]
        assert None not in pieces
        for piece in pieces[:3]:
            assert piece is not None
            ring.give_back(piece[1])
        again = ring.take(10)
        assert again is not None
        assert again[0] == 0, "the oldest room, while others are still in use"
        for piece in [*pieces[3:], again]:
            assert piece is not None
            ring.give_back(piece[1])
