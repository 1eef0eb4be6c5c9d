"""Blocks in pieces, from an engine's pages to the node and back; and parts of blocks."""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.durability import Durability
from kvstore.errors import (
    InvalidArgument,
    NotRegistered,
)
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.pieces import Pieces
from tests.conftest import MIB, ClientWithBuffers, small_node
from tests.nic_offload.rig import needs_provider, wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from nic_offload.fabric import Region

pytestmark = pytest.mark.node("shared")

WAIT_S = 20.0
PAGE = 4096


class Pool:
    """An engine's KV: pages of several layers, in a buffer each; a block is one page of each."""

    def __init__(self, client: Client, layers: int, pages: int, page_bytes: int, seed: int = 0) -> None:
        self.layers, self.page_bytes = layers, page_bytes
        self.memory = [allocate(pages * page_bytes) for _ in range(layers)]
        for number, memory in enumerate(self.memory):
            if seed:
                memory[:] = random.Random(seed * 1000 + number).randbytes(len(memory))
        self.regions: list[Region] = [client.register(memory) for memory in self.memory]

    def pieces(self, page: int, first: int = 0, last: int | None = None) -> Pieces:
        rows = b"".join(
            layer.to_bytes(4, "little")
            + self.page_bytes.to_bytes(4, "little")
            + (page * self.page_bytes).to_bytes(8, "little")
            for layer in range(first, self.layers if last is None else last)
        )
        return Pieces(self.regions, rows)

    def page(self, page: int) -> bytes:
        return b"".join(
            memory[page * self.page_bytes : (page + 1) * self.page_bytes] for memory in self.memory
        )


def test_a_put_of_pieces_is_one_block(rig: ClientWithBuffers) -> None:
    pool = Pool(rig.client, 32, 20, PAGE, seed=3)
    blocks = [Block.of_pieces(rig.key(page), pool.pieces(page)) for page in range(20)]
    calls = rig.client.calls
    assert {(one.error, one.durability) for one in rig.client.put(blocks)} == {(None, Durability.WRITTEN)}
    assert rig.client.calls <= calls + 1, "nothing is asked but to attach"
    wanted = [Block(rig.key(page), rig.to_region, page * 32 * PAGE, 32 * PAGE) for page in range(20)]
    assert rig.client.get(wanted, timeout_s=WAIT_S) == [Hit(one.key) for one in wanted]
    for page, block in enumerate(wanted):
        assert rig.target[block.offset : block.offset + block.length] == pool.page(page)


def test_pieces_and_whole_blocks_share_one_flag_and_are_read_when_it_fires(rig: ClientWithBuffers) -> None:
    pool = Pool(rig.client, 8, 4, PAGE, seed=4)
    blocks = [
        Block.of_pieces(rig.key(0), pool.pieces(0), threshold=1),
        Block(rig.key(1), rig.from_region, 0, 5000, threshold=1),
        Block.of_pieces(rig.key(2), pool.pieces(2), threshold=2),
    ]
    puts = rig.client.arm(blocks, rig.flags[0])
    pool.memory[5][: 3 * PAGE] = b"s" * 3 * PAGE  # after it was armed, and before it fires
    before = pool.page(0)
    rig.flags[0].store(1)
    wait_until(lambda: puts.progress()[1] == 2, "two have landed")
    assert puts.wait_landed(0.05) is False
    pool.memory[5][: 3 * PAGE] = b"t" * 3 * PAGE  # the first has landed: its memory is the engine's again
    rig.flags[0].store(2)
    assert all(one.error is None for one in puts.wait(WAIT_S))
    for number, bytes_ in [(0, before), (1, rig.source[:5000]), (2, pool.page(2))]:
        wanted = Block(rig.key(number), rig.to_region, 0, len(bytes_))
        assert rig.client.get([wanted], timeout_s=WAIT_S) == [Hit(wanted.key)]
        assert rig.target[: len(bytes_)] == bytes_


def test_a_reservation_accepts_pieces(rig: ClientWithBuffers) -> None:
    pool = Pool(rig.client, 16, 12, PAGE, seed=5)
    blocks = [Block.of_pieces(rig.key(page), pool.pieces(page)) for page in range(12)]
    puts = rig.client.reserve(blocks).arm(rig.flags[0])
    pool.memory[3][:PAGE] = b"u" * PAGE
    rig.flags[0].store(1)
    assert all(one.error is None for one in puts.wait(WAIT_S))
    for page, block in enumerate(blocks):
        wanted = Block(block.key, rig.to_region, 0, block.length)
        assert rig.client.get([wanted], timeout_s=WAIT_S) == [Hit(wanted.key)]
        assert rig.target[: block.length] == pool.page(page)
    rig.client.reserve(blocks).arm(None).wait(WAIT_S)  # all of them stored: nothing to gather
    rig.client.reserve([Block.of_pieces(rig.key(99), pool.pieces(1))]).give_back()


@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", "shm", "sockets"])
def test_pieces_work_over_other_providers(tmp_path: Path, provider: str) -> None:
    """The NIC of sockets holds puts itself and can't gather, so those of pieces fire without it."""
    needs_provider(provider)
    with (
        small_node(tmp_path / "node", provider=provider) as node,
        Client(node.target, provider=provider, slots=8, block_bytes_max=MIB) as client,
        FlagWords.create(1) as flags,
    ):
        pool, back = Pool(client, 32, 8, PAGE, seed=6), Pool(client, 32, 8, PAGE)
        keys = [block_key(bytes([page])) for page in range(8)]
        blocks = [Block.of_pieces(key, pool.pieces(page)) for page, key in enumerate(keys)]
        puts = client.arm(blocks, flags[0])
        flags[0].store(1)
        assert all(one.error is None for one in puts.wait(WAIT_S))
        wanted = [Block.of_pieces(key, back.pieces(page)) for page, key in enumerate(keys)]
        assert client.get(wanted, timeout_s=WAIT_S) == [Hit(key) for key in keys]
        assert [back.page(page) for page in range(8)] == [pool.page(page) for page in range(8)]


def test_pieces_are_sent_over_grpc(rig: ClientWithBuffers) -> None:
    rig.client.put_inline(rig.key(1), [b"K" * 5000, memoryview(b"V" * 3000)])
    assert rig.client.get_inline(rig.key(1), 8000) == b"K" * 5000 + b"V" * 3000
    (result,) = rig.client.put_many_inline([(rig.key(2), (b"k", b"v" * 300_000))])
    assert result.error is None
    assert rig.client.get_inline(rig.key(2), 300_001) == b"k" + b"v" * 300_000


def test_an_invalid_block_of_pieces_is_refused(rig: ClientWithBuffers) -> None:
    pieces = Pool(rig.client, 2, 2, PAGE).pieces(0)
    key = rig.key(0)
    with pytest.raises(InvalidArgument, match="in total"):
        Block(key, rig.from_region, 0, 1, pieces=pieces)
    with pytest.raises(InvalidArgument, match="after the first"):
        Block.of_pieces(key, pieces, whole=3 * PAGE, skip=PAGE + 1)
    part = Block.of_pieces(key, pieces, whole=3 * PAGE, skip=PAGE)
    for put in (rig.client.arm, rig.client.reserve):
        with pytest.raises(InvalidArgument, match="but not put"):
            put([part])
    pool = Pool(rig.client, 2, 2, PAGE)
    block = Block.of_pieces(key, pool.pieces(0))
    pool.regions[1].close()
    for call in (rig.client.arm, rig.client.reserve, rig.client.get):
        with pytest.raises(NotRegistered, match="not registered"):
            call([block])


# --- gets


def test_blocks_are_scattered_into_their_pieces_and_nowhere_else(rig: ClientWithBuffers) -> None:
    """A few hundred, so in several windows; some are missed, and some form one run."""
    pool, back = Pool(rig.client, 32, 100, PAGE, seed=7), Pool(rig.client, 32, 100, PAGE, seed=8)
    blocks = [Block.of_pieces(rig.key(page), pool.pieces(page)) for page in range(100)]
    rig.client.put([one for page, one in enumerate(blocks) if page % 9])
    before = [back.page(page) for page in range(100)]
    places = list(range(100))
    random.Random(1).shuffle(places)
    wanted = [
        Block(block.key, rig.to_region, page * 32 * PAGE, block.length)
        if page % 10 == 5
        else Block.of_pieces(block.key, back.pieces(places[page]))
        for page, block in enumerate(blocks)
    ]
    outcomes = rig.client.get(wanted, timeout_s=WAIT_S)
    for page, outcome in enumerate(outcomes):
        if page % 9 == 0:
            assert isinstance(outcome, Miss)
            assert outcome.reason is MissReason.UNKNOWN
            assert back.page(places[page]) == before[places[page]]
        elif page % 10 == 5:
            assert rig.target[page * 32 * PAGE : (page + 1) * 32 * PAGE] == pool.page(page)
            assert back.page(places[page]) == before[places[page]]
        else:
            assert outcome == Hit(rig.key(page))
            assert back.page(places[page]) == pool.page(page)


def test_a_block_larger_than_a_slab_is_fetched(node: NodeProcess, tenant: str) -> None:
    with Client(node.target, tenant=tenant, slots=2, block_bytes_max=16 * MIB) as client:
        pool, back = Pool(client, 12, 2, MIB, seed=9), Pool(client, 12, 2, MIB)
        keys = [block_key(bytes([page])) for page in range(2)]
        client.put([Block.of_pieces(key, pool.pieces(page)) for page, key in enumerate(keys)])
        wanted = [Block.of_pieces(key, back.pieces(page)) for page, key in enumerate(keys)]
        assert client.get(wanted, timeout_s=WAIT_S) == [Hit(key) for key in keys]
        assert [back.page(page) for page in range(2)] == [pool.page(page) for page in range(2)]


def test_more_blocks_than_fit_in_a_call_are_fetched_in_one_get(rig: ClientWithBuffers) -> None:
    count = 2500
    blocks = [Block(rig.key(number), rig.from_region, number * 3000, 3000) for number in range(count)]
    assert all(one.error is None for one in rig.client.put(blocks, timeout_s=60))
    wanted = [rig.wanted(block) for block in blocks]
    assert rig.client.get(wanted, timeout_s=60) == [Hit(one.key) for one in blocks]
    assert rig.target[: count * 3000] == rig.source[: count * 3000]


def test_layers_of_a_block_are_fetched_separately(rig: ClientWithBuffers) -> None:
    """Each part is exact, and bytes beside it don't change."""
    layers = 16
    pool = Pool(rig.client, layers, 6, PAGE, seed=10)
    blocks = [Block.of_pieces(rig.key(page), pool.pieces(page)) for page in range(6)]
    rig.client.put(blocks)
    whole = layers * PAGE
    for first, last in [(0, 1), (15, 16), (3, 9), (0, 16)]:
        back = Pool(rig.client, layers, 6, PAGE)
        wanted = [
            Block.of_pieces(block.key, back.pieces(page, first, last), whole=whole, skip=first * PAGE)
            for page, block in enumerate(blocks)
        ]
        assert rig.client.get(wanted, timeout_s=WAIT_S) == [Hit(one.key) for one in blocks]
        for page in range(6):
            expected = pool.page(page)[first * PAGE : last * PAGE]
            assert back.page(page) == bytes(first * PAGE) + expected + bytes((layers - last) * PAGE)
    # In one run, and not in whole pages.
    part = Block(blocks[2].key, rig.to_region, 100, 5001, whole=whole, skip=777)
    before = rig.target[:]
    assert rig.client.get([part], timeout_s=WAIT_S) == [Hit(part.key)]
    assert rig.target[100:5101] == pool.page(2)[777 : 777 + 5001]
    assert (rig.target[:100], rig.target[5101:]) == (before[:100], before[5101:])


def test_a_part_states_the_length_of_the_whole_block(rig: ClientWithBuffers) -> None:
    block = rig.block(1, 8 * PAGE)
    rig.client.put([block])
    wanted = Block(block.key, rig.to_region, 0, PAGE, whole=9 * PAGE)
    (outcome,) = rig.client.get([wanted], timeout_s=WAIT_S)
    assert isinstance(outcome, Miss)


def test_a_get_of_pieces_without_a_wait_is_refused(rig: ClientWithBuffers) -> None:
    block = Block.of_pieces(rig.key(0), Pool(rig.client, 2, 2, PAGE).pieces(0))
    with pytest.raises(InvalidArgument, match="get"):
        rig.client.getting([block])
