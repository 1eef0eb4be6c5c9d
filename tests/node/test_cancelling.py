"""Which fetches of a connection were cancelled before the node had heard of them, and whose words are put when."""

from __future__ import annotations

import pytest

from kvstore.errors import Overloaded
from kvstore.limits import ACK_WORDS
from kvstore.node.cancelling import Cancelled, Noted


@pytest.fixture
def cancelled() -> Cancelled:
    return Cancelled()


def test_a_fetch_that_has_come_by_grpc_is_not_taken_for_one_that_never_came(cancelled: Cancelled) -> None:
    """Its word has been put, and may be somebody else's by now."""
    cancelled.called([5, 6])
    assert cancelled.by_rpc([5, 7, 6]) == [7]
    assert cancelled.take(5) is Noted.NOT
    assert cancelled.take(7) is Noted.TOLD


def test_of_a_fetch_by_grpc_that_never_came_the_word_is_put_once(cancelled: Cancelled) -> None:
    assert cancelled.by_rpc([5]) == [5]
    assert cancelled.take(5) is Noted.TOLD
    assert cancelled.take(5) is Noted.NOT


def test_of_a_fetch_over_the_fabric_the_word_is_put_when_it_comes(cancelled: Cancelled) -> None:
    cancelled.over_fabric([5])
    assert cancelled.take(5) is Noted.UNTOLD
    assert cancelled.take(5) is Noted.NOT


def test_what_is_remembered_is_bounded(cancelled: Cancelled) -> None:
    cancelled.called(range(ACK_WORDS + 1))
    assert cancelled.by_rpc([0, 1]) == [0], "the oldest is forgotten"
    cancelled.over_fabric(range(ACK_WORDS + 1))
    assert cancelled.take(1) is Noted.UNTOLD
    assert cancelled.take(0) is Noted.TOLD
    cancelled.by_rpc(range(10_000, 10_000 + ACK_WORDS))
    with pytest.raises(Overloaded):
        cancelled.by_rpc([1 << 40])
