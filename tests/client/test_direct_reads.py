"""Gets of blocks in the memory of a node on the same machine, which need no call: what they return, and when."""

from __future__ import annotations

import os
import random
import signal
import threading
from typing import TYPE_CHECKING

from kvstore.client import Block, Hit, as_request
from kvstore.client import link as links
from kvstore.client.fabric_prefix import Prefixes
from kvstore.client.trace import Notes
from kvstore.client.transfer_watch import watched_by
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.lookups import Outcome
from kvstore.miss import Miss, MissReason
from kvstore.node.hot import HotMemory
from nic_offload.errors import FabricError
from nic_offload.fabric import MEMORY, Fabric
from nic_offload.pieces import Pieces
from tests.client.test_fabric_caller import get, link_of
from tests.client.test_seal import areas
from tests.client.test_shared import put, rig_of
from tests.conftest import MIB, ClientWithBuffers
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    import pytest

    from kvstore.demo.node_process import NodeProcess
    from kvstore.wire import kvstore_pb2 as pb
    from nic_offload.direct import DirectReads

LENGTH = 50_000
BLOCKS_PUT = 120  # of 400,000 bytes: three times what the memory has room for


def direct(rig: ClientWithBuffers) -> DirectReads:
    one = link_of(rig.client).direct
    assert one is not None
    return one


def small(rig: ClientWithBuffers, count: int) -> list[Block]:
    return [rig.block(number, LENGTH) for number in range(count)]


def reads(one: DirectReads, rig: ClientWithBuffers, block: Block) -> bool:
    """Whether the block can be read from the mapped memory of the node."""
    row = (block.key, block.length, 0, 0, rig.to_region.address, 0)
    return one.read(rig.client._core.fingerprint, [row], b"", MIB) is not None


def test_a_block_that_has_just_been_put_is_read_without_a_call(rig: ClientWithBuffers) -> None:
    blocks = small(rig, 8)
    for durability in (Durability.LANDED, Durability.WRITTEN):
        put(rig, blocks, durability)
        calls = link_of(rig.client).calls
        assert calls is not None
        assert get(rig, blocks) == [Hit(block.key) for block in blocks]
        assert all(map(rig.is_exact, blocks))
        get_in_background = rig.client.getting([rig.wanted(blocks[3])])
        assert get_in_background.wait() == [Hit(blocks[3].key)]
        assert calls.caller.shared_blocks == 0
        assert rig.client.delete([block.key for block in blocks]) == [True] * 8
    assert direct(rig).blocks == 2 * 9


def test_such_gets_are_in_the_statistics_and_in_the_history(rig: ClientWithBuffers) -> None:
    blocks = small(rig, 3)
    put(rig, blocks)
    before = rig.client.statistics()
    with as_request("request-7"):
        assert get(rig, blocks) == [Hit(block.key) for block in blocks]
    assert direct(rig).blocks == 3
    after = rig.client.statistics()
    assert after.hits_memory - before.hits_memory == 3
    assert after.got_bytes - before.got_bytes == 3 * LENGTH
    (look_up,) = rig.client.looked_up("request-7").lookups
    assert [(run.blocks, run.outcome) for run in look_up.runs] == [(3, Outcome.MEMORY)]


def test_a_look_up_of_blocks_in_memory_needs_no_call(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = small(rig, 8)
    keys = [block.key for block in blocks]
    put(rig, blocks)
    with as_request("request-8"), monkeypatch.context() as patch:
        patch.setattr(Prefixes, "_look", None)
        found = rig.client.prefix(keys)
    assert (found.blocks, found.miss, found.is_shared) == (8, None, True)
    (look_up,) = rig.client.looked_up("request-8").lookups
    assert [(run.blocks, run.outcome) for run in look_up.runs] == [(8, Outcome.STORED)]
    assert rig.client.delete([keys[5]]) == [True]
    found = rig.client.prefix(keys)
    assert (found.blocks, found.is_shared) == (5, False)


def test_a_deleted_block_is_not_read(rig: ClientWithBuffers, node: NodeProcess) -> None:
    """Not even if it was deleted by another client, and put again with other bytes."""
    with rig_of(node) as other:
        other.name = rig.name
        for number in range(100):
            block, again = rig.block(number % 16, LENGTH), other.block(number % 16, LENGTH)
            put(rig, [block])
            assert get(rig, [block]) == [Hit(block.key)]
            assert rig.is_exact(block)
            assert other.client.delete([block.key]) == [True]
            (outcome,) = get(rig, [block])
            assert isinstance(outcome, Miss)
            put(other, [again])
            assert get(rig, [block]) == [Hit(block.key)]
            piece = slice(block.offset, block.offset + LENGTH)
            assert rig.target[piece] == other.source[piece]
            assert other.client.delete([block.key]) == [True]
        assert direct(rig).blocks > 100


def test_parts_and_pieces_are_read(rig: ClientWithBuffers) -> None:
    block = rig.block(0)
    put(rig, [block])
    part = Block(block.key, rig.to_region, 0, 300_001, whole=MIB, skip=70_000)
    assert rig.client.get([part]) == [Hit(block.key)]
    assert rig.target[:300_001] == rig.source[70_000:370_001]
    pieces = Pieces.of(rig.to_region, [(3 * MIB, MIB // 2), (2 * MIB, MIB // 2)])
    assert rig.client.get([Block.of_pieces(block.key, pieces)]) == [Hit(block.key)]
    assert rig.target[3 * MIB : 3 * MIB + MIB // 2] == rig.source[: MIB // 2]
    assert rig.target[2 * MIB : 2 * MIB + MIB // 2] == rig.source[MIB // 2 : MIB]
    assert direct(rig).blocks == 2


def test_blocks_are_exact_while_the_memory_they_are_in_is_used_for_others(tmp_path: Path) -> None:
    """One client fills the hot memory again and again; two read what it has just put."""
    with (
        NodeInProcess(tmp_path / "node", hot_bytes=16 * MIB, shares_memory=True) as node,
        rig_of(node) as writer,
        rig_of(node) as first,
        rig_of(node) as second,
    ):
        newest, over, wrong = [0], threading.Event(), list[int]()

        def read(rig: ClientWithBuffers) -> None:
            numbers = random.Random(1)
            while not over.is_set():
                number = max(0, newest[0] - numbers.randrange(40))
                block = writer.block(number, 400_000)
                (outcome,) = rig.client.get([rig.wanted(block)])
                piece = slice(block.offset, block.offset + block.length)
                if isinstance(outcome, Hit) and rig.target[piece] != writer.source[piece]:
                    wrong.append(number)

        readers = [threading.Thread(target=read, args=(rig,)) for rig in (first, second)]
        put(writer, [writer.block(0, 400_000)])
        for reader in readers:
            reader.start()

        def more() -> bool:
            number = newest[0] + 1
            put(writer, [writer.block(number, 400_000)], Durability.LANDED)
            newest[0] = number
            return number >= BLOCKS_PUT and all(direct(rig).blocks >= 20 for rig in (first, second))

        try:
            wait_until(more, "both have read blocks without a call")
        finally:
            over.set()
            for reader in readers:
                reader.join()
        assert wrong == []


def test_nothing_is_read_from_the_memory_of_a_node_that_was_killed(
    rig: ClientWithBuffers, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if the client has not noticed yet: the next process may have deleted the block."""
    block = rig.block(0, LENGTH)
    put(rig, [block])
    assert get(rig, [block]) == [Hit(block.key)]
    mapped = direct(rig)
    with monkeypatch.context() as patch:
        patch.setattr(links.Link, "lose", lambda *_: None)
        node.kill()
        assert not reads(mapped, rig, block)


def test_a_node_that_hangs_still_has_its_blocks_read(rig: ClientWithBuffers, node: NodeProcess) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    assert get(rig, [block]) == [Hit(block.key)]
    os.kill(node.pid, signal.SIGSTOP)
    try:
        assert get(rig, [block]) == [Hit(block.key)]
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert rig.is_exact(block)


def test_a_get_whose_deadline_has_passed_is_a_miss(rig: ClientWithBuffers) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=0)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.NODE_AWAY


def test_a_watched_get_is_a_call(rig: ClientWithBuffers) -> None:
    """The node is to know the steps that the call carries."""
    block = rig.block(0, LENGTH)
    put(rig, [block])
    with watched_by(Notes("user", "chat", SystemClock())):
        assert rig.client.getting([rig.wanted(block)]).wait() == [Hit(block.key)]
    assert direct(rig).blocks == 0


def test_a_client_of_an_earlier_version_gets_no_directory(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would take the descriptor for one of its slots'."""
    told, requests = areas(monkeypatch), links.Link._requests

    def earlier(self: links.Link, first: pb.AttachRequest) -> Iterator[pb.AttachRequest]:
        assert first.reads_directory
        first.reads_directory = False
        return requests(self, first)

    monkeypatch.setattr(links.Link, "_requests", earlier)
    monkeypatch.setattr("kvstore.client.shared._FDS_MAX", 4)
    with rig_of(node) as rig:
        blocks = small(rig, 3)
        put(rig, blocks)
        assert get(rig, blocks) == [Hit(block.key) for block in blocks]
        link = link_of(rig.client)
        assert link.mapped.slots is not None
        assert link.direct is None
        assert not told[-1].shared.directory_bytes


def test_clients_that_come_and_go_leave_no_log(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "node", shares_memory=True) as node:
        for number in range(5):
            with rig_of(node) as rig:
                block = rig.block(number, LENGTH)
                put(rig, [block])
                assert get(rig, [block]) == [Hit(block.key)]
                assert direct(rig).blocks == 1
            wait_until(lambda: not node.call(lambda inside: inside.connections), "its connection is closed")
            node.call(lambda inside: inside.catch_up())
            assert node.call(lambda inside: vars(inside.sharing)["_desks"]) == {}


def test_a_closed_client_reads_nothing(rig: ClientWithBuffers) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    mapped = direct(rig)
    assert reads(mapped, rig, block)
    rig.client.close()
    assert not reads(mapped, rig, block)


def test_a_directory_that_can_not_be_shared_stays_until_the_fabric_is_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread of a fabric that hangs may still share it, and would write to memory that is gone."""

    def hangs(*_: object) -> None:
        raise FabricError("The fabric did not answer.")

    with Fabric(MEMORY) as fabric:
        hot = HotMemory(fabric, 4 * MIB, lambda: None, lambda: 1)
        with monkeypatch.context() as patch:
            patch.setattr(hot.shelf, "share", hangs)
            assert hot.open_directory() is None
        memory, _ = hot._directory or (None, 0)
        assert memory is not None
        assert not memory.closed
    hot.close()
    assert memory.closed
