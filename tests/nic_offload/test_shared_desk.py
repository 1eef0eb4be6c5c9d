"""A desk that sends its peer the locations of blocks: its answers, and how long the locations stay valid."""

from __future__ import annotations

import struct
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from nic_offload.checksum import crc32c
from tests.nic_offload.rig import Pair, wait_until
from tests.nic_offload.test_shelf import ANSWER_WORD, ANSWERS_AT, DESK, FIRST, ShelfRig, Wanted, two

if TYPE_CHECKING:
    from collections.abc import Iterator

SHARES, WHERE = 2, 3
HEAD = struct.Struct("<IIQB7x")
HELD_S = 2.0


@pytest.fixture
def rig(pair: Pair) -> Iterator[ShelfRig]:
    yield ShelfRig(pair, shares=True)  # noqa: PT022 - closed with the pair, whose fabrics own it


def told(rig: ShelfRig, generation: int = FIRST) -> list[tuple[int, int]]:
    """The offset and checksum of each block in the answer."""
    word = rig.pair.near.word(ANSWER_WORD)
    wait_until(lambda: word.load() == generation << 8 | WHERE, "the answer")
    head = rig.pair.near.bytes_at(ANSWERS_AT, HEAD.size)
    crc, length, named, kind = HEAD.unpack(head)
    data = rig.pair.near.bytes_at(ANSWERS_AT, length)
    assert crc == crc32c(data[4:])
    assert (named, kind) == (generation, 3)
    return [(offset, one) for offset, one, _ in struct.iter_unpack("<QII", data[HEAD.size :])]


def test_it_reports_where_blocks_are_and_sends_none(rig: ShelfRig) -> None:
    rows = two(rig)
    rig.call(Wanted(rows, flags=SHARES))
    assert told(rig) == [(0, crc32c(rig.blocks[1])), (8192, crc32c(rig.blocks[2]))]
    assert rig.got(1, 5000) == bytes(5000)
    assert [rig.pair.near.word(word).load() for word in (1, 2)] == [0, 0]
    (served,) = rig.served()
    assert (served.desk, list(served.ids), served.size_bytes) == (DESK, [1001, 1002], 5001)
    assert 0 < served.began_ns <= served.ended_ns


def test_a_caller_that_does_not_request_it_is_sent_its_blocks(rig: ShelfRig) -> None:
    rig.call(Wanted(two(rig)))
    rig.acked(1)
    assert rig.got(1, 5000) == rig.blocks[1]


def test_a_desk_that_does_not_share_sends_blocks_to_a_caller_that_requests_it(pair: Pair) -> None:
    rig = ShelfRig(pair)
    rig.call(Wanted(two(rig), flags=SHARES))
    rig.acked(1)
    assert rig.got(1, 5000) == rig.blocks[1]


def test_blocks_are_kept_until_the_next_call_in_the_same_place(rig: ShelfRig) -> None:
    rows = two(rig)
    rig.call(Wanted(rows, flags=SHARES))
    told(rig)
    assert not rig.shelf.take([1001])[0]
    assert not rig.shelf.take([1001])[0], "and it was unlisted by that"
    rig.call(Wanted((rows[1],), FIRST + 1, flags=SHARES))
    assert told(rig, FIRST + 1) == [(8192, crc32c(rig.blocks[2]))]
    assert rig.shelf.take([1001])[0]
    assert not rig.shelf.take([1002])[0]


def test_any_call_releases_them_also_one_for_the_application(rig: ShelfRig) -> None:
    rows = two(rig)
    rig.call(Wanted(rows, flags=SHARES))
    told(rig)
    rig.call(replace(Wanted(rows, FIRST + 1), kind=2))
    assert rig.pair.far.final(7).value == FIRST + 1
    assert rig.shelf.take([1001])[0]
    assert rig.shelf.take([1002])[0]


def test_blocks_of_a_peer_that_does_not_call_again_are_kept_only_for_a_while() -> None:
    with Pair("net") as pair:
        rig = ShelfRig(pair, shares=True)
        began = time.monotonic()
        rig.call(Wanted(two(rig), flags=SHARES))
        told(rig)
        wait_until(lambda: rig.shelf.take([1001])[0], "the block may go", 20)
        assert time.monotonic() - began >= HELD_S
        assert rig.shelf.take([1002])[0]


def test_a_closed_desk_keeps_nothing(rig: ShelfRig) -> None:
    rig.call(Wanted(two(rig), flags=SHARES))
    told(rig)
    rig.pair.far.endpoint.close()
    rig.desk.close()
    assert rig.shelf.take([1001])[0]
    assert rig.shelf.take([1002])[0]


def test_kept_bytes_count_as_in_flight(pair: Pair) -> None:
    rig = ShelfRig(pair, bytes_max=5001, shares=True)
    rows = two(rig)
    rig.watch(FIRST, 1)
    for number in range(3):
        rig.call(Wanted(rows, FIRST + number, flags=SHARES))
        told(rig, FIRST + number)
    rig.call(Wanted(rows[1:], flags=SHARES), place=1)
    assert rig.pair.far.final(7).value == FIRST, (
        "the application's: all that may be is kept for the other call"
    )
