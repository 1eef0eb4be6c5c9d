"""A resume in progress: layer by layer, the first usable before the last was read; never incomplete unnoticed."""

from __future__ import annotations

import mmap
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit
from kvstore.errors import (
    Closed,
)
from kvstore.limits import RESUME_AHEAD_BATCHES, RESUME_BATCH_BLOCKS
from kvstore.miss import MissReason
from kvstore.names import block_key
from kvstore.steps import Step
from tests.conftest import small_client
from tests.node.in_process import HeldDrive, NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

SIZE = 20_000
LAYERS = 4
WAIT_S = 20.0


def key(number: int) -> bytes:
    return block_key(b"resuming", number.to_bytes(4))


def bytes_of(number: int) -> bytes:
    return number.to_bytes(4) * (SIZE // 4)


def layer_of(number: int) -> int:
    """The layer of a session's block: all layers of some tokens come before those of the next tokens."""
    return number % LAYERS


class ResumeRig:
    """A client with a session of several blocks, and memory for them."""

    def __init__(self, node: NodeInProcess, blocks: int) -> None:
        self.node = node
        self.client = small_client(node.target)
        self.memory = mmap.mmap(-1, blocks * SIZE)
        self.memory[:] = b"\xdd" * len(self.memory)
        self.region = self.client.register(self.memory)
        for number in range(blocks):
            self.client.put_inline(key(number), bytes_of(number))
        self.chat = self.client.session("user", "chat")
        self.chat.append([key(number) for number in range(blocks)], 16 * blocks)
        self.placed: list[int] = []

    def place(self, number: int, name: bytes) -> Block:
        self.placed.append(number)
        return Block(name, self.region, number * SIZE, SIZE)

    def has(self, numbers: Sequence[int]) -> bool:
        return all(self.memory[number * SIZE : (number + 1) * SIZE] == bytes_of(number) for number in numbers)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "data") as node:
        yield node


def test_the_first_layer_is_usable_before_the_last_is_read(here: NodeInProcess) -> None:
    rig = ResumeRig(here, 10 * LAYERS)
    drive = HeldDrive(here, lambda name: name not in {key(at) for at in range(0, 10 * LAYERS, LAYERS)})
    with rig.chat.resuming(rig.place, layer_of=layer_of, timeout_s=WAIT_S) as back:
        assert back.wait_layer(0)
        assert rig.has(range(0, 10 * LAYERS, LAYERS))
        assert not rig.has([1])
        assert drive.release() == 10 * (LAYERS - 1), "the drive had read nothing of the other layers"
        assert all(back.wait_layer(layer) for layer in range(LAYERS))
        assert back.whole().is_whole
    assert rig.has(range(10 * LAYERS))
    assert [layer_of(number) for number in rig.placed] == sorted(layer_of(number) for number in rig.placed)
    rig.chat.report()
    seen = rig.chat.trace().seen
    first, whole = (one for one in seen if one.step in {Step.FIRST_USABLE, Step.WHOLE})
    assert (first.step, first.blocks, whole.step) == (Step.FIRST_USABLE, 10, Step.WHOLE)
    rig.client.close()


def test_blocks_arrive_in_the_requested_order_at_most_two_batches_ahead(here: NodeInProcess) -> None:
    count = RESUME_BATCH_BLOCKS * (RESUME_AHEAD_BATCHES + 2)
    rig = ResumeRig(here, count)
    with rig.chat.resuming(rig.place, timeout_s=WAIT_S) as back:
        assert rig.placed == list(range(RESUME_AHEAD_BATCHES * RESUME_BATCH_BLOCKS))
        assert back.wait_blocks(1)
        assert rig.has([0])
        assert back.wait_blocks(RESUME_BATCH_BLOCKS + 1)
        assert rig.has(range(RESUME_BATCH_BLOCKS + 1))
        assert back.whole().usable_blocks == count
    assert rig.placed == list(range(count))
    assert rig.has(range(count))
    rig.client.close()


def test_a_gap_is_a_miss_for_the_waiter_and_the_prefix_is_that_of_the_session(here: NodeInProcess) -> None:
    rig = ResumeRig(here, 10 * LAYERS)
    rig.client.delete([key(6)])  # of layer 2
    with rig.chat.resuming(rig.place, layer_of=layer_of, timeout_s=WAIT_S) as back:
        assert back.wait_layer(1)
        assert not back.wait_layer(2)
        assert not back.wait_layer(0), "once it misses, nothing is said to be usable that could not be"
        resumed = back.whole()
    assert (resumed.usable_blocks, resumed.usable_tokens) == (6, 96)
    assert resumed.miss is not None
    assert resumed.miss.reason is MissReason.UNKNOWN
    assert rig.has(range(6))
    rig.client.close()


def test_an_abandoned_resume_leaves_nothing_in_flight(here: NodeInProcess) -> None:
    rig = ResumeRig(here, 3 * RESUME_BATCH_BLOCKS)
    with rig.chat.resuming(rig.place, timeout_s=WAIT_S) as back:
        assert back.wait_blocks(3)
    after = rig.memory[:]
    assert here.call(lambda node: (node.pins.count, node.fetches.are_waiting)) == (0, False)
    assert rig.client.get([rig.place(0, key(0))]) == [Hit(key(0))]
    assert rig.memory[:] == after
    with pytest.raises(Closed, match="closed before"):
        back.whole()
    rig.client.close()


def test_a_part_of_a_get_can_be_waited_for(here: NodeInProcess) -> None:
    rig = ResumeRig(here, 20)
    get = rig.client.getting([rig.place(number, key(number)) for number in range(20)], timeout_s=WAIT_S)
    assert get.wait(5) == [Hit(key(number)) for number in range(5)]
    assert rig.has(range(5))
    assert get.wait(100) == get.wait() == [Hit(key(number)) for number in range(20)]
    assert get.wait(0) == []
    rig.client.close()
