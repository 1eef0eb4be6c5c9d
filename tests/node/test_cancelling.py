"""Fetches that are cancelled before they arrive, and when their words are put."""

from __future__ import annotations

import pytest

from kvstore.limits import ACK_WORDS
from kvstore.node.cancelling import Cancelled, Noted


@pytest.fixture
def cancelled() -> Cancelled:
    return Cancelled()


def test_a_fetch_that_arrived_over_grpc_is_not_taken_for_a_lost_one(cancelled: Cancelled) -> None:
    """Its word was written, and may belong to another get by now."""
    assert [cancelled.take(one, called=True) for one in (5, 6)] == [Noted.NOT, Noted.NOT]
    assert cancelled.by_rpc([5, 7, 6]) == [7]
    assert cancelled.take(7, called=True) is Noted.TOLD


def test_the_word_of_a_grpc_fetch_that_never_arrived_is_written_once(cancelled: Cancelled) -> None:
    assert cancelled.by_rpc([5]) == [5]
    assert cancelled.take(5, called=True) is Noted.TOLD


def test_the_word_of_a_fabric_fetch_is_written_when_the_fetch_arrives(cancelled: Cancelled) -> None:
    cancelled.over_fabric([5])
    assert cancelled.take(5, called=False) is Noted.UNTOLD
    assert cancelled.take(5, called=False) is Noted.NOT


def test_a_cancelled_fetch_is_never_served_however_many_never_arrive(cancelled: Cancelled) -> None:
    """The connection used to end when there were too many."""
    assert cancelled.by_rpc(range(10, 10 + 3 * ACK_WORDS)) == list(range(10, 10 + 3 * ACK_WORDS))
    assert len(cancelled._cancelled) == ACK_WORDS
    assert cancelled.take(10, called=True) is Noted.TOLD
    assert cancelled.take(10 + 3 * ACK_WORDS - 1, called=True) is Noted.TOLD
    assert cancelled.take(10 + 3 * ACK_WORDS, called=True) is Noted.NOT
    assert cancelled.take(11, called=False) is Noted.NOT, "one that comes over the fabric was never told"


def test_a_fetch_older_than_the_remembered_ones_is_refused_and_confirmed_when_cancelled(
    cancelled: Cancelled,
) -> None:
    cancelled.by_rpc(range(10, 11 + ACK_WORDS))
    assert cancelled.take(9, called=True) is Noted.TOLD
    assert cancelled.by_rpc([9]) == [9], "its word was never put"


def test_other_remembered_state_is_bounded(cancelled: Cancelled) -> None:
    for one in range(1, ACK_WORDS + 2):
        cancelled.take(one, called=True)
    assert cancelled.by_rpc([1, 2]) == [1], "the oldest is forgotten"
    cancelled.over_fabric(range(10_001, 10_002 + ACK_WORDS))
    assert cancelled.take(10_001, called=False) is Noted.NOT
    assert cancelled.take(10_002, called=False) is Noted.UNTOLD
