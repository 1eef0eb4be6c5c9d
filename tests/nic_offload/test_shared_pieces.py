"""Blocks in pieces in the node's mapped memory: a client's core copies them into the pieces."""

from __future__ import annotations

import mmap
import random
from typing import TYPE_CHECKING

import pytest

from nic_offload.errors import RegionBusy
from nic_offload.pieces import Pieces
from tests.nic_offload.test_caller import DONE, TAG
from tests.nic_offload.test_shared import CORRUPT, SCATTERED, SERVED, Client, Wanted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from nic_offload.fabric import Region

PAGES_BYTES = 4 << 20


class Pages:
    """Registered memory of a client, with a block's pieces in random order."""

    def __init__(self, client: Client) -> None:
        self.memory = mmap.mmap(-1, PAGES_BYTES)
        self.region: Region = client.pair.near.fabric.register(self.memory)
        self._free = list(range(0, PAGES_BYTES, 4096))
        random.Random(3).shuffle(self._free)

    def pieces(self, sizes: Sequence[int]) -> tuple[Pieces, list[tuple[int, int]]]:
        """Pieces of these sizes, at most a page each; returns their places too."""
        places = [(self._free.pop(), size) for size in sizes]
        return Pieces.of(self.region, places), places

    def read(self, places: Sequence[tuple[int, int]]) -> bytes:
        return b"".join(self.memory[at : at + size] for at, size in places)


@pytest.fixture
def client() -> Iterator[Client]:
    client = Client()
    yield client
    client.close()


@pytest.fixture
def pages(client: Client) -> Pages:
    return Pages(client)


SIZES = {
    "pages": [4096] * 33,
    "one": [3000],
    "odd": [1, 4095, 17, 4096, 2, 900, 4096, 4096, 4096, 4096, 4096, 31],
}


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("skip", [0, 1, 20_000])
@pytest.mark.parametrize("more", [0, 5000])
def test_blocks_are_scattered_into_their_pieces_and_nowhere_else(
    client: Client, pages: Pages, sizes: list[int], skip: int, more: int
) -> None:
    size = sum(sizes)
    part = size if skip or more else 0
    block = Wanted(12_345, skip + size + more, skip, part)
    blocks = [Wanted(0, 700, 0, 700 if part else 0), block, Wanted(900_000, 5000, 0, 5000 if part else 0)]
    pieces, places = pages.pieces(sizes)
    group = client.get(blocks, pieces=[None, pieces])
    client.asked()
    client.answer(client.rows(blocks))
    assert group.wait(4, 20)
    assert client.codes(group, 4) == [SERVED, SCATTERED, SERVED, DONE]
    assert pages.read(places) == client.node[block.offset + skip : block.offset + skip + size]
    assert pages.memory[:].count(0) >= PAGES_BYTES - size, "bytes outside of the pieces"
    first, _, last = client.targets(blocks)
    near, base = client.pair.near, client.targets(blocks)[1]
    assert near.bytes_at(first, 700) == client.node[:700]
    assert near.bytes_at(base, size) == bytes(size), "the run was written to as well"
    assert near.bytes_at(last, 5000) == client.node[900_000:905_000]


@pytest.mark.parametrize("is_part", [False, True])
def test_many_bytes_are_scattered_into_pieces_at_any_address_and_nowhere_else(
    client: Client, *, is_part: bool
) -> None:
    """They are written past the cache, a line at a time, and the rest of a line as usual."""
    dice = random.Random(5)
    places: list[tuple[int, int]] = []
    for page in range(0, PAGES_BYTES, 4096):
        size = dice.choice([1, 63, 64, 65, 127, 128, 3000, 4000])
        places.append((page + dice.randrange(4096 - size + 1), size))
    places += [(4 * 4096 + PAGES_BYTES, 3 << 20)]
    dice.shuffle(places)
    memory = mmap.mmap(-1, 2 * PAGES_BYTES)
    pieces = Pieces.of(client.pair.near.fabric.register(memory), places)
    skip = 321 if is_part else 0
    block = Wanted(12_345, pieces.length + 2 * skip, skip, pieces.length if is_part else 0)
    group = client.get([block], pieces=[pieces])
    client.asked()
    client.answer(client.rows([block]))
    assert group.wait(2, 20)
    assert client.codes(group, 2) == [SCATTERED, DONE]
    at = block.offset + skip
    wanted = bytearray(len(memory))
    for place, size in places:
        wanted[place : place + size] = client.node[at : at + size]
        at += size
    assert memory[:] == wanted


def test_other_bytes_are_not_a_hit(client: Client, pages: Pages) -> None:
    blocks = [Wanted(0, 8192), Wanted(8192, 8192)]
    made = [pages.pieces([4096, 4096])[0] for _ in blocks]
    group = client.get(blocks, pieces=made)
    client.asked()
    good, other = client.rows(blocks)
    client.answer([good, (other[0], other[1] ^ 1)])
    assert group.wait(3, 20)
    assert client.codes(group, 2) == [SCATTERED, CORRUPT]


def test_a_block_that_is_sent_arrives_in_its_run(client: Client, pages: Pages) -> None:
    """Its caller scatters it."""
    blocks = [Wanted(0, 8192)]
    pieces, places = pages.pieces([4096, 4096])
    group = client.get(blocks, pieces=[pieces])
    client.asked()
    client.say_served(0)
    assert group.wait(1, 20)
    assert client.codes(group, 1) == [SERVED]
    assert pages.read(places) == bytes(8192)


def test_pieces_of_another_length_than_the_block_are_left_alone(client: Client, pages: Pages) -> None:
    blocks = [Wanted(0, 8192)]
    pieces, places = pages.pieces([4096, 4095])
    group = client.get(blocks, pieces=[pieces])
    client.asked()
    client.answer(client.rows(blocks))
    assert group.wait(2, 20)
    assert client.codes(group, 1) == [SERVED]
    assert client.is_exact(blocks)
    assert pages.read(places) == bytes(8191)


def test_their_memory_is_held_until_the_get_has_ended(client: Client, pages: Pages) -> None:
    blocks = [Wanted(i * 8192, 8192) for i in range(4)]
    group = client.get(blocks, pieces=[pages.pieces([4096, 4096])[0] for _ in blocks])
    with pytest.raises(RegionBusy):
        pages.region.close()
    client.asked()
    client.answer(client.rows(blocks))
    assert group.wait(5, 20)
    pages.region.close()


def test_a_call_that_cannot_be_made_holds_nothing(client: Client, pages: Pages) -> None:
    made = pages.pieces([4096])[0]
    while client.get_code([Wanted(0, 4096)], pieces=[made]) == 0:
        pass
    client.pair.near.endpoint.close()
    pages.region.close()


def test_many_gets_one_after_the_other(client: Client, pages: Pages) -> None:
    for number in range(1, 20):
        blocks = [Wanted(number * 16_384 + i * 4096, 4096) for i in range(3)]
        made = [pages.pieces([1000, 3000, 96]) for _ in blocks]
        group = client.get(blocks, tag=number * TAG, pieces=[one for one, _ in made])
        client.asked()
        client.answer(client.rows(blocks))
        assert group.wait(4, 20)
        for block, (_, places) in zip(blocks, made, strict=True):
            assert pages.read(places) == client.node[block.offset : block.offset + 4096]
