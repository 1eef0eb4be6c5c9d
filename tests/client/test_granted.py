"""Puts without a call to the node: `Client.arm` and `Client.put`, from the flag to the drive and back."""

from __future__ import annotations

import random
import threading
import time
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client
from kvstore.client.block_calls import Stored
from kvstore.client.blocks import Hit
from kvstore.durability import Durability
from kvstore.errors import (
    DeadlineExceeded,
    InvalidArgument,
    KeyTaken,
    KvError,
    Overloaded,
    UsageError,
)
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredNotify, arm
from tests.conftest import MIB, ClientWithBuffers
from tests.nic_offload.rig import PAGE, wait_until
from tests.node.in_process import NodeInProcess, kept_in

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.node.node import Node
    from kvstore.storage.items import PutItem, PutsDone

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
LENGTH = 50_000
LANDED = Durability.LANDED


def full(*_: object) -> None:
    raise Overloaded("The drive's queue of puts is full.")


def is_settled(node: NodeInProcess) -> bool:
    """Whether every block that arrived is in the index."""

    def settled(inside: Node) -> bool:
        return inside.hot.shelf.came == inside.granted._heard and len(inside.granted) == 0

    return bool(node.call(settled))


def test_a_landed_block_can_be_read_back_at_once(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    dice = random.Random(17)
    for number in range(150):
        block = rig.block(number, dice.randrange(1, 200_000), offset=dice.randrange(MIB))
        (result,) = rig.client.put([block], durability=LANDED)
        assert (result.error, result.durability) == (None, LANDED)
        if number % 2:
            assert isinstance(rig.client.exists([block.key])[0], Stored)
        assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
        assert rig.is_exact(block)
    wait_until(lambda: is_settled(node), "all of it is on the drive")
    assert rig.client.calls <= 4 + 75, "puts and gets need no call"


@pytest.mark.parametrize("drives", [1, 3])
def test_blocks_are_written_and_read_back_while_the_nodes_python_is_blocked(
    tmp_path: Path, drives: int
) -> None:
    """No Python runs at the node between the flag and `written`: its thread is held meanwhile."""
    with NodeInProcess(tmp_path / "node", drives=drives) as node, closing(ClientWithBuffers(node)) as rig:
        while_python_stands_still(node, rig)


def is_known_before_its_name_is_put_another_way(
    node: NodeInProcess, rig: ClientWithBuffers, durability: Durability
) -> bool:
    """Whether a put that is acknowledged while the node's Python stands still comes before one over gRPC."""
    rig.client.put([rig.block(0, 5000)])
    wait_until(lambda: is_settled(node), "the lane has ground, if there is one")
    held, go_on = threading.Event(), threading.Event()
    block, seen = rig.block(1, 5000), []

    def look(inside: Node) -> None:
        held.set()
        go_on.wait(WAIT_S)
        (area,) = inside.granted._areas.values()
        name = area.connection.tenant, block.key
        inside.granted.before_others([name])
        seen.append(inside.store.is_putting(name) or inside.store.lookup([name])[0] is not None)

    node._loop.call_soon_threadsafe(look, node.node)
    assert held.wait(WAIT_S)
    try:
        assert rig.client.put([block], durability=durability, timeout_s=WAIT_S / 2)[0].error is None
    finally:
        go_on.set()
    wait_until(lambda: is_settled(node), "both are stored")
    assert rig.client.status(wait_s=WAIT_S).blocks == 2
    return seen == [True]


def test_a_block_written_by_a_lane_is_known_before_its_name_is_put_another_way(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    assert is_known_before_its_name_is_put_another_way(node, rig, Durability.WRITTEN)


@pytest.mark.node("in process", lane=False)
def test_a_block_that_has_landed_is_stored_before_its_name_is_put_another_way(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """Otherwise the other put would be first, and this block, which was acknowledged, would be lost."""
    assert is_known_before_its_name_is_put_another_way(node, rig, LANDED)


@pytest.mark.parametrize("how", ["in a stream", "alone", "by a reservation"])
@pytest.mark.node("in process", lane=False)
def test_a_block_that_waits_for_a_full_drive_is_stored_before_its_name_is_put_another_way(
    node: NodeInProcess, rig: ClientWithBuffers, how: str
) -> None:
    put = node.node.store.put

    def one_place(items: Sequence[PutItem], done: PutsDone) -> None:
        put(items, done) if len(items) < 2 else full()

    first, second = rig.block(1, LENGTH), rig.block(2, LENGTH)
    other = rig.block(1, LENGTH, offset=5 * MIB)
    bytes_of = {one: rig.source[one.offset : one.offset + LENGTH] for one in (first, other)}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(node.node.store, "put", one_place)
        assert not any(put.error for put in rig.client.arm([first, second], durability=LANDED).wait(WAIT_S))
        if how == "alone":
            with pytest.raises(Overloaded, match="waits for the drive"):
                rig.client.put_inline(first.key, bytes_of[other])
        elif how == "in a stream":
            (result,) = rig.client.put_many_inline([(first.key, bytes_of[other])])
            assert isinstance(result.error, Overloaded)
        else:
            late = rig.client.reserve([other]).arm(None)
            assert isinstance(late.wait(0.1)[0].error, DeadlineExceeded)
        assert rig.client.get_inline(first.key, LENGTH) == bytes_of[first]
    wait_until(lambda: is_settled(node), "the drive has room again", WAIT_S)
    assert rig.client.get_inline(first.key, LENGTH) == bytes_of[first]
    if how == "by a reservation":
        assert isinstance(late.wait(WAIT_S)[0].error, KeyTaken)


@pytest.mark.parametrize("how", ["in a stream", "alone"])
def test_no_lane_takes_a_name_that_is_being_put_over_grpc(
    node: NodeInProcess, rig: ClientWithBuffers, how: str
) -> None:
    rig.client.put([rig.block(0, 5000)])
    wait_until(lambda: is_settled(node), "the lane has ground")
    held, go_on = threading.Event(), threading.Event()
    block = rig.block(1, 5000)
    done: list[object] = []

    def hold(inside: Node) -> None:
        put = inside.store.put

        def held_put(*arguments: Any) -> None:
            put(*arguments)
            held.set()
            go_on.wait(WAIT_S)
            del vars(inside.store)["put"]

        vars(inside.store)["put"] = held_put

    def put_inline() -> None:
        if how == "in a stream":
            done.extend(rig.client.put_many_inline([(block.key, b"others")]))
        else:
            done.append(rig.client.put_inline(block.key, b"others"))

    node.call(hold)
    thread = threading.Thread(target=put_inline)
    thread.start()
    assert held.wait(WAIT_S)
    try:
        puts = rig.client.arm([block], durability=LANDED)
        assert not puts.wait_landed(0.2), "its bytes have to be compared with the others"
    finally:
        go_on.set()
        thread.join(WAIT_S)
    assert isinstance(puts.wait(WAIT_S)[0].error, KeyTaken)
    assert len(done) == 1
    assert rig.client.get_inline(block.key, len(b"others")) == b"others"


def is_found_while_another_waits(
    node: NodeInProcess, rig: ClientWithBuffers, block: Block, other: Block, *, waiting: int
) -> None:
    """Put other bytes under a block's key while the drive is full; with them, so many blocks wait for it."""
    puts = rig.client.arm([other])
    wait_until(lambda: node.call(lambda inside: len(inside.granted)) == waiting, "the other has arrived")
    node.call(lambda inside: inside.catch_up())
    found = rig.client.get_inline(block.key, 5000)
    node.call(lambda inside: vars(inside.store).pop("put"))
    assert found == rig.source[:5000]
    assert isinstance(puts.wait(WAIT_S)[0].error, KeyTaken)


@pytest.mark.node("in process", lane=False)
@pytest.mark.parametrize("expires", ["never", "in a minute"])
def test_a_block_that_has_landed_is_found_whatever_is_put_under_its_key_meanwhile(
    node: NodeInProcess, rig: ClientWithBuffers, expires: str
) -> None:
    expires_unix_ms = (time.time_ns() // 1_000_000 + 60_000) * (expires != "never")
    block, other = rig.block(1, 5000, offset=0), rig.block(1, 5000, offset=MIB)
    node.call(lambda inside: vars(inside.store).update(put=full))
    (first,) = rig.client.put([block], durability=LANDED, expires_unix_ms=expires_unix_ms)
    assert first.error is None
    node.call(lambda inside: inside.catch_up())
    is_found_while_another_waits(node, rig, block, other, waiting=2)
    assert rig.client.get_inline(block.key, 5000) == rig.source[:5000]


@pytest.mark.node("in process", lane=False)
def test_a_stored_block_is_found_whatever_is_put_under_its_key_meanwhile(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    block, other = rig.block(1, 5000, offset=0), rig.block(1, 5000, offset=MIB)
    (first,) = rig.client.put([block])
    assert first.error is None
    rig.client.get([rig.wanted(block)])  # so it is in memory, and listed
    node.call(lambda inside: vars(inside.store).update(put=full))
    is_found_while_another_waits(node, rig, block, other, waiting=1)


def while_python_stands_still(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    rig.client.put([rig.block(0, 5000)])  # with which each drive lends its lane ground
    wait_until(lambda: is_settled(node), "the first is on the drive")
    held, go_on = threading.Event(), threading.Event()

    def stand_still() -> None:
        held.set()
        go_on.wait(WAIT_S)

    node._loop.call_soon_threadsafe(stand_still)
    assert held.wait(WAIT_S)
    blocks = [rig.block(number, 5000, offset=number * 8000) for number in range(1, 41)]
    try:
        puts = [rig.client.put([block], timeout_s=WAIT_S / 2)[0] for block in blocks]
        gets = rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S / 2)
    finally:
        go_on.set()
    assert {(put.error, put.durability) for put in puts} == {(None, Durability.WRITTEN)}
    assert gets == [Hit(block.key) for block in blocks]
    assert all(rig.is_exact(block) for block in blocks)
    wait_until(lambda: is_settled(node), "the index has them")
    assert rig.client.status(wait_s=WAIT_S).blocks == 41


def test_any_number_of_puts_is_armed_over_a_few_slots_with_one_flag(node: NodeInProcess) -> None:
    count, length = 5000, 4000
    with Client(node.target, slots=4) as client, FlagWords.create(1) as flags:
        kv = client.register(memory := allocate(count * 4096))
        memory[:] = random.Random(5).randbytes(count * 4096)
        blocks = [
            Block(block_key(number.to_bytes(4)), kv, number * 4096, length, threshold=number + 1)
            for number in range(count)
        ]
        puts = client.arm(blocks, flags[0])
        flags[0].store(1000)
        wait_until(lambda: puts.progress()[2] == 1000, "those that were due")
        time.sleep(0.05)
        assert puts.progress() == (1000, 1000, 1000)
        flags[0].store(count)
        assert {(one.error, one.durability) for one in puts.wait(60)} == {(None, Durability.WRITTEN)}
        back = client.register(found := allocate(count * 4096))
        for first in range(0, count, 1000):
            wanted = [Block(one.key, back, one.offset, length) for one in blocks[first : first + 1000]]
            assert all(isinstance(one, Hit) for one in client.get(wanted, timeout_s=WAIT_S))
        for block in blocks:
            piece = slice(block.offset, block.offset + length)
            assert found[piece] == memory[piece]


def test_a_batch_whose_caller_waits_only_until_it_has_landed_leaves_nothing_behind(
    rig: ClientWithBuffers,
) -> None:
    """Its end is not reported: the caller has seen it. So nothing else would take the batch from its link."""
    batches = []
    for number in range(5):
        batches.append(rig.client.arm([rig.block(number, LENGTH)], durability=LANDED))
        assert batches[-1].wait_landed(WAIT_S)
    link = rig.client._core.link
    assert link is not None
    wait_until(lambda: not link.operations, "all batches are over")
    assert [one.has_ended for one in batches] == [True] * 5


def test_a_put_is_armed_before_its_block_has_a_name(rig: ClientWithBuffers) -> None:
    blocks = [Block(b"", rig.from_region, number * LENGTH, LENGTH, threshold=1) for number in range(3)]
    puts = rig.client.arm(blocks, rig.flags[0])
    puts.name(0, rig.key(0))
    puts.name(2, rig.key(2))
    rig.flags[0].store(1)
    first, second, third = puts.wait(WAIT_S)
    assert [(one.key, one.error) for one in (first, third)] == [(rig.key(0), None), (rig.key(2), None)]
    assert isinstance(second.error, UsageError)
    wanted = [Block(rig.key(n), rig.to_region, n * LENGTH, LENGTH) for n in (0, 2)]
    assert rig.client.get(wanted) == [Hit(rig.key(0)), Hit(rig.key(2))]
    assert rig.target[2 * LENGTH : 3 * LENGTH] == rig.source[2 * LENGTH : 3 * LENGTH]
    with pytest.raises(InvalidArgument, match="once"):
        puts.name(0, rig.key(5))
    with pytest.raises(InvalidArgument, match="without a key"):
        rig.client.get(blocks)


def test_naming_a_put_after_it_has_fired_does_not_cost_the_link(rig: ClientWithBuffers) -> None:
    """The client has not been told yet that the put has failed."""
    rig.client.attach()
    before = rig.client._core.link
    rig.flags[0].store(1)
    failed = rig.client._core.fabric.statistics().failed
    with rig.client._core.lock:
        puts = rig.client.arm([Block(b"", rig.from_region, 0, LENGTH)], rig.flags[0])
        wait_until(lambda: rig.client._core.fabric.statistics().failed > failed, "it has fired")
        puts.name(0, rig.key(0))
    (result,) = puts.wait(WAIT_S)
    assert isinstance(result.error, UsageError)
    assert rig.client._core.link is before


def test_a_block_larger_than_agreed_is_refused_by_the_client(rig: ClientWithBuffers) -> None:
    with pytest.raises(InvalidArgument, match="up to 1048576 bytes"):
        rig.client.put([rig.block(0, MIB + 1)])
    assert rig.client.put([rig.block(0)])[0].error is None


def test_a_put_whose_flag_is_late_is_never_sent(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    puts = rig.client.arm([rig.block(0)], rig.flags[0], lease_ms=30)
    (result,) = puts.wait(WAIT_S)
    assert isinstance(result.error, DeadlineExceeded)
    rig.flags[0].store(1)
    (outcome,) = rig.client.get([rig.wanted(rig.block(0))])
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.UNKNOWN
    assert rig.client.put([rig.block(number) for number in range(16)])[15].error is None
    assert connections(node) == 1, "the link is the same"


def test_a_block_deleted_right_after_it_landed_stays_deleted(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    for number in range(60):
        block = rig.block(number, LENGTH)
        assert rig.client.put([block], durability=LANDED)[0].error is None
        rig.client.delete([block.key])
        (outcome,) = rig.client.get([rig.wanted(block)])
        assert isinstance(outcome, Miss), number
    wait_until(lambda: is_settled(node), "the drive has done what it was given")
    for number in range(60):
        (outcome,) = rig.client.get([rig.wanted(rig.block(number, LENGTH))])
        assert isinstance(outcome, Miss), number


def test_a_landed_block_becomes_the_hot_copy(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    blocks = [rig.block(number, LENGTH) for number in range(16)]
    assert all(one.error is None for one in rig.client.put(blocks))
    before = rig.client.statistics()
    assert rig.client.get([rig.wanted(block) for block in blocks]) == [Hit(block.key) for block in blocks]
    after = rig.client.statistics()
    assert (after.hits_memory - before.hits_memory, after.hits_drive) == (16, before.hits_drive)
    rig.client.delete([block.key for block in blocks])
    wait_until(
        lambda: node.call(lambda inside: inside.hot.pages.statistics().kept_bytes) == 0,
        "what dies gives its memory back",
    )


def test_an_idle_client_holds_no_memory(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    rig.client.put([rig.block(0, LENGTH)])
    assert node.call(lambda inside: inside.hot.shares.total_bytes) > 0
    wait_until(lambda: node.call(lambda inside: inside.hot.shares.total_bytes) == 0, "it is given back")
    time.sleep(0.3)
    assert node.call(lambda inside: inside.hot.shares.total_bytes) == 0, "and not taken again"
    assert rig.client.put([rig.block(1, LENGTH)])[0].error is None


def test_puts_wait_only_for_memory(tmp_path: Path) -> None:
    """The hot memory has room for six such blocks; forty pass through it, from two clients."""
    with NodeInProcess(tmp_path / "node", hot_bytes=6 * MIB + MIB // 2) as node:
        rigs = ClientWithBuffers(node), ClientWithBuffers(node)
        for rig in rigs:
            rig.flags[0].store(1000)
        puts = [rig.client.arm([rig.block(n) for n in range(20)], rig.flags[0]) for rig in rigs]
        for one in puts:
            assert {result.error for result in one.wait(60)} == {None}
        for rig in rigs:
            for number in range(0, 20, 5):
                block = rig.block(number)
                assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
                assert rig.is_exact(block)
            rig.close()


def rooms(node: NodeInProcess) -> int:
    return int(node.call(lambda inside: sum(len(area.rooms) for area in inside.granted._areas.values())))


def connections(node: NodeInProcess) -> int:
    return int(node.call(len))


def test_an_invalid_put_in_a_slot_ends_only_its_connection(node: NodeInProcess) -> None:
    bad, good = ClientWithBuffers(node), ClientWithBuffers(node)
    good.client.put([good.block(0, LENGTH)])
    bad.client.put([bad.block(0, LENGTH)])
    link = bad.client._core.link
    assert link is not None

    def slot_of(inside: Node) -> tuple[int, int]:
        area = inside.granted._areas[link.number]
        return area.description.flags + 8, area.description.key

    target, key = node.call(slot_of)
    due = node.call(lambda inside: inside.granted._areas[link.number].area.first_generation)
    arm(bad.client.fabric, [TriggeredNotify(7, link.endpoint, link.peer, target, key, due)])
    wait_until(lambda: connections(node) == 1, "that connection is closed")
    assert good.client.put([good.block(1, LENGTH)])[0].error is None
    wait_until(lambda: not bad.client.is_attached, "its client knows")
    assert bad.client.put([bad.block(1, LENGTH)])[0].error is None, "a new connection serves"
    for rig in (bad, good):
        rig.close()


def test_puts_in_flight_when_the_node_stops_fail(tmp_path: Path) -> None:
    with NodeInProcess(tmp_path / "node") as node:
        rig = ClientWithBuffers(node)
        rig.client.put([rig.block(0, LENGTH)])
        puts = rig.client.arm([rig.block(number, LENGTH) for number in range(1, 16)], rig.flags[0])
    results = puts.wait(WAIT_S)
    assert all(isinstance(one.error, KvError) for one in results)
    assert puts.has_ended
    rig.close()


def test_blocks_waiting_for_the_drive_can_be_read_and_deleted(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(node.node.store, "put", full)
        kept, gone = rig.block(0, LENGTH), rig.block(1, LENGTH)
        assert rig.client.put([kept], durability=LANDED)[0].error is None
        waiting = rig.client.arm([gone], durability=Durability.SYNCED)  # which no lane writes
        assert waiting.wait_landed(WAIT_S)
        wanted = [rig.wanted(kept), rig.wanted(gone)]
        assert rig.client.get(wanted, timeout_s=WAIT_S) == [Hit(kept.key), Hit(gone.key)]
        rig.client.delete([gone.key])
        assert waiting.wait(WAIT_S)[0].error is None, "it was put, and is gone again"
        here, missed = rig.client.get(wanted, timeout_s=WAIT_S)
        assert here == Hit(kept.key)
        assert isinstance(missed, Miss)
    wait_until(lambda: is_settled(node), "the drive takes puts again")
    here, missed = rig.client.get(wanted, timeout_s=WAIT_S)
    assert here == Hit(kept.key)
    assert isinstance(missed, Miss)


@pytest.mark.node("in process", hot_bytes=2 * MIB)
def test_blocks_of_another_size_get_memory_when_one_size_has_used_a_clients_share(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """Unused grants of one size are withdrawn for the other."""
    for length in (MIB - PAGE, 2 * PAGE, MIB, 3 * PAGE, MIB // 2, MIB):
        block = rig.block(length % 997, length, offset=0)
        assert rig.client.put([block, rig.block(length % 991, 2 * PAGE)], timeout_s=WAIT_S)[0].error is None
        wait_until(lambda: rooms(node) == 0, "an idle client holds nothing")
        (first, second) = rig.client.put(
            [rig.block(length % 983, length // 2 + 1, offset=0), rig.block(length % 977, MIB, offset=0)]
        )
        assert (first.error, second.error) == (None, None)


def forget_hot(inside: Node) -> None:
    """Evict the blocks from the node's memory; they stay on the drive."""
    for piece in kept_in(inside):
        inside.hot.pages.forget(piece)


def lost(node: NodeInProcess) -> int:
    return int(node.call(lambda inside: inside.counters.landed_taken + inside.counters.landed_failed))


@pytest.mark.parametrize("is_new_life", [False, True])
def test_other_bytes_under_a_key_that_is_only_on_the_drive_are_refused(
    tmp_path: Path, *, is_new_life: bool
) -> None:
    """`landed` is sent before the drive is read, so the node must know which names are stored."""
    with ExitStack() as stack:
        node = stack.enter_context(NodeInProcess(tmp_path / "node"))
        rig = ClientWithBuffers(node)
        blocks = [rig.block(number, LENGTH) for number in range(40)]
        assert all(one.error is None for one in rig.client.put(blocks))
        if is_new_life:
            rig.client.close()
            stack.pop_all().close()
            node = stack.enter_context(NodeInProcess(tmp_path / "node"))
            old, rig = rig, ClientWithBuffers(node)
            rig.name, rig.source[:] = old.name, old.source[:]
        stack.callback(rig.close)
        wait_until(lambda: is_settled(node), "it is on the drive")
        node.call(forget_hot)
        blocks = [rig.block(number, LENGTH) for number in range(40)]
        others = [rig.block(number, LENGTH, offset=MIB // 2) for number in range(20)]
        results = rig.client.put([*others, *blocks[20:]], durability=LANDED)
        assert all(isinstance(one.error, KeyTaken) for one in results[:20])
        assert all(one.key.hex() in str(one.error) for one in results[:20])
        assert [(one.error, one.durability) for one in results[20:]] == [(None, LANDED)] * 20
        assert rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S) == [
            Hit(block.key) for block in blocks
        ]
        assert all(map(rig.is_exact, blocks[-16:]))
        assert lost(node) == 0
        rig.client.delete([block.key for block in blocks])
        assert all(one.error is None for one in rig.client.put(others, durability=LANDED))


def test_other_bytes_under_a_key_that_will_expire_are_refused(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    soon_ms = int(time.time() * 1000) + 60_000
    for number in range(30):
        block, other = rig.block(number, LENGTH), rig.block(number, LENGTH, offset=MIB // 2)
        first = rig.client.arm([block], durability=LANDED, expires_unix_ms=soon_ms)
        assert first.wait(WAIT_S)[0].error is None
        second = rig.client.arm([other], durability=LANDED, expires_unix_ms=soon_ms)
        assert isinstance(second.wait(WAIT_S)[0].error, KeyTaken), number
    assert lost(node) == 0


def test_a_key_can_be_reused_once_its_block_is_removed(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is nothing to compare with, so `landed` is sent without reading the drive."""
    block = rig.block(0, LENGTH)
    for _ in range(3):
        assert rig.client.put([block])[0].error is None
        rig.client.delete([block.key])
        wait_until(lambda: is_settled(node), "nothing is under way")
        with monkeypatch.context() as patched:
            patched.setattr(node.node.store, "put", full)
            assert rig.client.arm([block], durability=LANDED).wait(WAIT_S)[0].error is None
            assert rig.client.get([rig.wanted(block)]) == [Hit(block.key)]
        rig.client.delete([block.key])
