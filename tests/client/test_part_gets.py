"""Gets of pieces and of parts with failures: changed bytes, expired deadlines, closed memory."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Hit
from kvstore.errors import KvError
from kvstore.limits import SLAB_BYTES, SLABS_KEPT
from kvstore.miss import Miss, MissReason
from tests.client.test_cancelled_gets import CANARY, is_away, link_of, over_rpc, paint, untouched
from tests.client.test_pieces import Pool
from tests.client.test_promises import put
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HeldDrive, NodeInProcess, kept_in

if TYPE_CHECKING:
    from kvstore.node.node import Node
    from tests.conftest import ClientWithBuffers

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
PAGE = 4096
LENGTH = 100_000


def part_of(rig: ClientWithBuffers, block: Block, skip: int, length: int) -> Block:
    return Block(block.key, rig.to_region, block.offset + skip, length, whole=block.length, skip=skip)


@pytest.mark.parametrize("way", ["fabric", "rpc"])
def test_parts_are_exact_from_the_drive_and_from_memory(rig: ClientWithBuffers, way: str) -> None:
    blocks = [rig.block(number, LENGTH) for number in range(4)]
    put(rig, blocks)
    if way == "rpc":
        over_rpc(rig.client)
    for skip, length in [
        (0, LENGTH),
        (1, 2),
        (50_000, 50_000),
        (4096, 4096),
    ]:  # the first comes from the drive
        paint(rig)
        wanted = [part_of(rig, block, skip, length) for block in blocks]
        assert rig.client.get(wanted, timeout_s=WAIT_S) == [Hit(block.key) for block in blocks]
        for block in wanted:
            place = slice(block.offset, block.offset + length)
            assert rig.target[place] == rig.source[place]
            rig.target[place] = CANARY * length
        assert untouched(rig), "and nothing else"


@pytest.mark.parametrize("on_shelf", [True, False])
def test_a_part_of_a_block_that_changed_elsewhere_is_not_sent(
    node: NodeInProcess,
    rig: ClientWithBuffers,
    on_shelf: bool,  # noqa: FBT001 - a parameter of the test
) -> None:
    block = rig.block(0, LENGTH)
    put(rig, [block])
    wanted = part_of(rig, block, 0, PAGE)
    assert rig.client.get([wanted], timeout_s=WAIT_S) == [Hit(block.key)]
    paint(rig)

    def damage(inside: Node) -> None:
        piece = inside.hot.pages.find(inside.hot.pages.generation(kept_in(inside)[0]))
        assert piece is not None
        inside.hot.payload(piece, LENGTH)[77_777] ^= 1
        inside.hot.pages.release(piece)
        if not on_shelf:
            inside.hot.shelf.take([inside.hot.pages.generation(piece)])

    node.call(damage)
    if on_shelf:
        (outcome,) = rig.client.get([wanted], timeout_s=WAIT_S)
        assert isinstance(outcome, Miss)
        assert outcome.reason is MissReason.CORRUPT
        assert untouched(rig)
    assert rig.client.get([wanted], timeout_s=WAIT_S) == [Hit(block.key)], (
        "the drive's bytes are as they were"
    )
    assert rig.target[:PAGE] == rig.source[:PAGE]


@pytest.mark.parametrize("by_rpc", [True, False])
def test_a_part_that_no_block_has_is_refused_by_the_node(rig: ClientWithBuffers, by_rpc: bool) -> None:  # noqa: FBT001
    block = rig.block(0, LENGTH)
    put(rig, [block])
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]  # so that it is hot
    if by_rpc:
        over_rpc(rig.client)
    for skip, length in [(LENGTH, 1), (1, LENGTH), ((1 << 32) - 1, 2)]:
        wanted = part_of(rig, block, 0, 1)
        object.__setattr__(wanted, "skip", skip)  # as a client may that is none of ours
        object.__setattr__(wanted, "length", length)
        paint(rig)
        outcome: object = None
        try:
            (outcome,) = rig.client.get([wanted], timeout_s=WAIT_S)
        except KvError as error:
            outcome = error
        assert not isinstance(outcome, Hit)
        assert not by_rpc or "after the first" in str(outcome)
        assert untouched(rig)


def pages_of(pool: Pool) -> list[bytes]:
    return [bytes(memory[:]) for memory in pool.memory]


def test_pieces_belong_to_the_caller_again_after_a_timeout(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    layers, count = 25, 60  # 6 MB: two windows
    pool, back = Pool(rig.client, layers, count, PAGE, seed=3), Pool(rig.client, layers, count, PAGE, seed=4)
    blocks = [Block.of_pieces(rig.key(page), pool.pieces(page)) for page in range(count)]
    assert all(one.error is None for one in rig.client.reserve(blocks[:16]).arm(None).wait(WAIT_S))
    drive, before = HeldDrive(node), pages_of(back)
    wanted = [Block.of_pieces(one.key, back.pieces(page)) for page, one in enumerate(blocks[:16])]
    link = link_of(rig.client)
    outcomes = rig.client.get(wanted, timeout_s=1.5)  # until then the node has heard of it
    assert all(map(is_away, outcomes))
    for region in back.regions:  # nothing holds them
        region.close()
    assert drive.release() == 16
    assert pages_of(back) == before, "what came late came into nobody's memory"
    assert rig.client._core.link is link
    again = Pool(rig.client, layers, count, PAGE)
    wanted = [Block.of_pieces(one.key, again.pieces(page)) for page, one in enumerate(blocks[:16])]
    assert rig.client.get(wanted, timeout_s=WAIT_S) == [Hit(one.key) for one in wanted]
    assert [again.page(page) for page in range(16)] == [pool.page(page) for page in range(16)]


def test_a_region_is_busy_while_a_get_may_scatter_into_it(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    pool, back = Pool(rig.client, 4, 4, PAGE, seed=3), Pool(rig.client, 4, 4, PAGE)
    block = Block.of_pieces(rig.key(0), pool.pieces(0))
    rig.client.reserve([block]).arm(None).wait(WAIT_S)
    drive = HeldDrive(node)
    outcomes: list[Hit | Miss] = []
    wanted = Block.of_pieces(block.key, back.pieces(2))
    getting = threading.Thread(target=lambda: outcomes.extend(rig.client.get([wanted], timeout_s=WAIT_S)))
    getting.start()
    wait_until(lambda: any(not region._is_idle() for region in back.regions), "the get")
    with pytest.raises(KvError, match="wait for its puts and gets"):
        back.regions[3].close()
    drive.release()
    getting.join(WAIT_S)
    assert outcomes == [Hit(block.key)]
    assert back.page(2) == pool.page(0)
    for region in back.regions:
        region.close()


def test_slabs_are_reused_and_bounded(rig: ClientWithBuffers) -> None:
    slabs = rig.client._core.slabs
    taken = [slabs.take(1) for _ in range(SLABS_KEPT + 3)]
    assert len({one.region.address for one in taken}) == len(taken)
    taken[0].region._hold()  # something may still come into it
    for one in taken:
        slabs.give_back(one)
    again = [slabs.take(SLAB_BYTES) for _ in range(SLABS_KEPT + 3)]
    assert taken[0].region not in [one.region for one in again]
    assert sum(one in taken for one in again) == SLABS_KEPT
    taken[0].region._release()
    large = slabs.take(SLAB_BYTES + 1)
    slabs.give_back(large)
    assert large.region.handle is None, "one of another size is not kept"
    assert taken[0].region.handle is None, "nor what was in use for longer than it was needed"
