"""Many pieces, one flag: adjacent pieces become one extent, and the flag follows all of them or doesn't arrive."""

from __future__ import annotations

import errno
import random
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from nic_offload.scatter import Flag, Piece, coalesce, gather_get, scatter_put
from tests.nic_offload.rig import after_ms, wait_until

if TYPE_CHECKING:
    from nic_offload.flags import FlagWord
    from tests.nic_offload.rig import Pair

PAGE = 4096


def test_pieces_adjacent_on_both_sides_become_one_extent() -> None:
    pieces = [Piece(0, 100, 10), Piece(10, 110, 5), Piece(15, 200, 5), Piece(21, 205, 5), Piece(26, 210, 0)]
    assert coalesce(pieces) == [Piece(0, 100, 15), Piece(15, 200, 5), Piece(21, 205, 5)]


def test_an_extent_is_never_longer_than_one_operation_allows() -> None:
    pieces = [Piece(i * 4, 64 + i * 4, 4) for i in range(5)]
    assert coalesce(pieces, length_max=8) == [Piece(0, 64, 8), Piece(8, 72, 8), Piece(16, 80, 4)]


def test_no_pieces_make_no_extent() -> None:
    assert coalesce([]) == []


@pytest.mark.parametrize("seed", range(8))
def test_extents_contain_exactly_the_bytes_of_the_pieces(seed: int) -> None:
    rng = random.Random(seed)
    pieces, local, remote = [], 0, 1000
    for _ in range(200):
        local += rng.choice([0, 0, 0, 7])
        remote += rng.choice([0, 0, 0, 3])
        length = rng.randrange(0, 20)
        pieces.append(Piece(local, remote, length))
        local, remote = local + length, remote + length
    bytes_of = [(p.local + i, p.remote + i) for p in pieces for i in range(p.length)]
    extents = coalesce(pieces)
    assert [(e.local + i, e.remote + i) for e in extents for i in range(e.length)] == bytes_of
    assert len(extents) < len(pieces)


def paged(pair: Pair, seed: int = 1, pages: int = 64) -> list[Piece]:
    """Pages in random order here and in sequence at the peer; a few are adjacent."""
    near, there = pair.near, pair.there
    order = list(range(pages))
    random.Random(seed).shuffle(order)
    order[10:20] = sorted(order[10:20])
    order[30:40] = range(100, 110)
    return [
        Piece(near.region.address + page * PAGE, there.base + i * PAGE, PAGE) for i, page in enumerate(order)
    ]


def test_pages_are_put_as_one_block_and_the_flag_is_last(pair: Pair, flag: FlagWord) -> None:
    near, far, there = pair.near, pair.far, pair.there
    near.fill(0, random.Random(2).randbytes(110 * PAGE))
    pieces = paged(pair)
    word = Flag(there.word_target(3), there.key, 77)
    puts = scatter_put(
        near.fabric,
        tag=1,
        endpoint=near.endpoint,
        peer=there.peer,
        region=near.region,
        pieces=pieces,
        target_key=there.key,
        flag=word,
        trigger=near.counter(flag),
        threshold=5,
    )
    assert 10 < puts <= 55
    there.fence()
    assert far.word(3).load() == 0
    flag.store(5)
    wait_until(lambda: far.word(3).load() == 77, "the flag")
    for piece in pieces:
        start = piece.local - near.region.address
        assert far.bytes_at(piece.remote - there.base, PAGE) == near.bytes_at(start, PAGE)
    assert near.final(1).kind == EventKind.DONE
    assert near.kinds(1) == [EventKind.DONE]
    assert near.fabric.statistics().put_bytes >= len(pieces) * PAGE


def test_if_a_piece_fails_the_flag_never_arrives(pair: Pair, flag: FlagWord) -> None:
    if pair.provider == "shm":
        pytest.skip("shm never completes a put with a bad key: its deadline ends the endpoint, not the put")
    near, far, there = pair.near, pair.far, pair.there
    pieces = [*paged(pair), Piece(near.region.address, there.base + (1 << 40), PAGE)]
    scatter_put(
        near.fabric,
        tag=1,
        endpoint=near.endpoint,
        peer=there.peer,
        region=near.region,
        pieces=pieces,
        target_key=there.key,
        flag=Flag(there.word_target(3), there.key, 77),
        trigger=near.counter(flag),
        threshold=1,
    )
    flag.store(1)
    end = near.final(1)
    assert (end.kind, end.status) == (EventKind.FAILED, -errno.EPIPE)
    assert end.value > 0
    assert end.value != errno.EPIPE
    assert far.word(3).load() == 0


def test_a_flag_that_is_never_stored_ends_everything_at_its_deadline(pair: Pair, flag: FlagWord) -> None:
    near, there = pair.near, pair.there
    scatter_put(
        near.fabric,
        tag=1,
        endpoint=near.endpoint,
        peer=there.peer,
        region=near.region,
        pieces=paged(pair),
        target_key=there.key,
        flag=Flag(there.word_target(3), there.key, 77),
        trigger=near.counter(flag),
        threshold=1,
        deadline_ns=after_ms(20),
    )
    end = near.final(1)
    assert end.kind == EventKind.FAILED
    assert end.status in (-errno.ETIMEDOUT, -errno.EPIPE)
    flag.store(1)
    there.fence()
    assert pair.far.word(3).load() == 0
    assert near.fabric.statistics().waiting == 0


def test_pages_are_fetched_into_their_places_and_the_owner_is_notified(pair: Pair, flag: FlagWord) -> None:
    near, far, there = pair.near, pair.far, pair.there
    far.fill(0, random.Random(3).randbytes(64 * PAGE))
    pieces = paged(pair, seed=4)
    with far.fabric.register(far.memory, remote_read=True, endpoint=far.endpoint) as readable:
        gets = gather_get(
            near.fabric,
            tag=1,
            endpoint=near.endpoint,
            peer=there.peer,
            region=near.region,
            pieces=[piece._replace(remote=piece.remote - there.base + readable.base) for piece in pieces],
            source_key=readable.key,
            flag=Flag(there.word_target(3), there.key, 99),
            trigger=near.counter(flag),
            threshold=1,
        )
        assert gets < len(pieces)
        flag.store(1)
        assert near.final(1).kind == EventKind.DONE
    for i, piece in enumerate(pieces):
        assert near.bytes_at(piece.local - near.region.address, PAGE) == far.bytes_at(i * PAGE, PAGE)
    wait_until(lambda: far.word(3).load() == 99, "the owner's word")
    assert near.fabric.statistics().got_bytes == len(pieces) * PAGE
