"""A get past its deadline fails alone, and its memory stays busy until nothing can write to it any more."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.client.nodes import RegisteredMemory
from kvstore.errors import DeadlineExceeded, FabricStuck, NodeUnavailable, Overloaded, RegionBusy
from kvstore.limits import FETCH_CANCEL_MS
from kvstore.miss import Miss, MissReason
from nic_offload.group import Group
from tests.client.test_promises import put
from tests.client.test_resuming import key
from tests.conftest import MIB, ClientWithBuffers, small_node
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HeldDrive, NodeInProcess, kept_in
from tests.stopping import stop

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client.link import Link
    from kvstore.node.node import Node

pytestmark = pytest.mark.node("in process")

WAIT_S = 20.0
SHORT_S = 0.05
CANCEL_S = 5  # longer than a busy machine stands still
ASKED_S = 1.0  # the node has certainly been asked by then
CANARY = b"\x5a"


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine, too, a cancellation is confirmed in time."""
    for module in ("core", "gets"):
        monkeypatch.setattr(f"kvstore.client.{module}.FETCH_CANCEL_MS", 1000 * CANCEL_S)


def link_of(client: Client) -> Link:
    assert client._core.link is not None
    return client._core.link


def is_away(outcome: object) -> bool:
    return isinstance(outcome, Miss) and outcome.reason is MissReason.NODE_AWAY


def untouched(rig: ClientWithBuffers) -> bool:
    return bool(rig.target[:] == CANARY * len(rig.target))


def paint(rig: ClientWithBuffers) -> None:
    rig.target[:] = CANARY * len(rig.target)


def over_rpc(client: Client) -> None:
    """Make the client send its calls over gRPC."""
    client.attach()
    link_of(client).calls = None


@pytest.mark.parametrize("way", ["fabric", "rpc"])
def test_a_get_past_its_deadline_fails_by_itself(
    node: NodeInProcess, rig: ClientWithBuffers, way: str
) -> None:
    """It used to end the link, and with it every put armed on it."""
    blocks = [rig.block(number, 100_000) for number in range(4)]
    put(rig, blocks)
    if way == "rpc":
        over_rpc(rig.client)
    before = link_of(rig.client)
    rig.flags[0].store(0)
    armed = rig.client.reserve([rig.block(9)]).arm(rig.flags[0])
    drive = HeldDrive(node)
    paint(rig)
    outcomes = rig.client.get([rig.wanted(block) for block in blocks], timeout_s=ASKED_S)
    assert all(map(is_away, outcomes))
    assert rig.client._core.link is before
    assert drive.release() == 4
    rig.flags[0].store(10)
    (result,) = armed.wait(WAIT_S)
    assert result.error is None
    assert rig.client._core.link is before
    assert untouched(rig), "what was read after the cancellation was sent"
    assert rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S) == [
        Hit(block.key) for block in blocks
    ]
    wait_until(
        lambda: node.call(lambda inside: inside.hot.shares.total_bytes) == 0, "nothing is held any more"
    )


@pytest.mark.parametrize("way", ["fabric", "rpc"])
def test_a_get_whose_deadline_passes_before_the_call_fails_by_itself(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """It was cancelled as a fabric get, then sent over gRPC with no time left, so no word ever arrived."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    if way == "rpc":
        over_rpc(rig.client)
    link, fetch = link_of(rig.client), rig.client._core.asking.fetch
    free = len(link._free_words)

    def fetch_late(*asked: Any) -> None:
        time.sleep(2 * SHORT_S)  # the thread that asks doesn't get a core
        fetch(*asked)

    with monkeypatch.context() as patched:
        patched.setattr(rig.client._core.asking, "fetch", fetch_late)
        # gRPC need not send what has no time left.
        patched.setattr(rig.client._core.asking, "_fetch_by_rpc", lambda *_: DeadlineExceeded("Not sent."))
        before, began_s = rig.client.calls, time.monotonic()
        (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=SHORT_S)
    assert is_away(outcome)
    assert time.monotonic() - began_s < CANCEL_S
    assert rig.client._core.link is link
    assert len(link._free_words) == free
    assert rig.client.calls == before, "there was nothing to cancel"
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]


def test_a_get_whose_cancellation_is_not_confirmed_ends_the_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    with small_node(tmp_path / "node") as process:
        rig = ClientWithBuffers(process)
        block = rig.block(0, 100_000)
        put(rig, [block])
        stop(process.pid)
        try:
            began_s = time.monotonic()
            (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=SHORT_S)
            took_s = time.monotonic() - began_s
        finally:
            os.kill(process.pid, signal.SIGCONT)
        assert is_away(outcome)
        assert not rig.client.is_attached
        assert SHORT_S + FETCH_CANCEL_MS / 1000 <= took_s < SHORT_S + FETCH_CANCEL_MS / 1000 + 5.0
        rig.to_region.close()  # nothing comes through the link any more
        rig.close()


def test_a_fetch_that_arrives_after_its_cancellation_is_not_served(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """The cancellation goes over gRPC, and may overtake the fetch."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    link = link_of(rig.client)
    due = link.take_generations(1) + 1
    word = link._free_words[-1]

    def cancel(inside: Node) -> None:
        (connection,) = inside.connections.values()
        inside.fetches.cancel(connection, {due: word}, called=False)

    node.call(cancel)
    paint(rig)
    began_s = time.monotonic()
    (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)
    assert is_away(outcome)
    assert time.monotonic() - began_s < WAIT_S / 2, "its word said so"
    assert untouched(rig)
    assert rig.client._core.link is link
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]


def stand_still(node: NodeInProcess, go_on: threading.Event) -> threading.Thread:
    """Block the node's event loop until `go_on` is set."""
    stands = threading.Event()

    def stand(_: Node) -> None:
        stands.set()
        go_on.wait(WAIT_S)

    standing = threading.Thread(target=lambda: node.call(stand))
    standing.start()
    assert stands.wait(WAIT_S)
    return standing


def test_a_stalled_grpc_fetch_is_confirmed_as_cancelled_and_never_served(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node's loop has the call, and processes it only after the client has given it up.

    It has the cancellation as well, mostly: on a busy machine this may come late, and the block be served; then again.
    """
    block = rig.block(0, 100_000)
    put(rig, [block])
    over_rpc(rig.client)
    link, cancel = link_of(rig.client), rig.client._core.cancel_fetch

    def cancelled_while_it_stands() -> object:
        go_on = threading.Event()
        standing = stand_still(node, go_on)
        paint(rig)

        def cancelled(*asked: Any, **more: Any) -> None:
            cancel(*asked, **more)
            threading.Timer(0.2, go_on.set).start()

        monkeypatch.setattr(rig.client._core, "cancel_fetch", cancelled)
        (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=SHORT_S)
        standing.join(WAIT_S)
        return outcome

    assert any(is_away(cancelled_while_it_stands()) for _ in range(5))
    assert rig.client._core.link is link
    node.call(lambda _: None)
    assert untouched(rig)
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]


def test_ack_words_of_a_get_refused_during_its_cancellation_stay_reserved(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node writes one, as for a call that never arrived: another get once waited for its own in the same place."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    over_rpc(rig.client)
    link, go_on = link_of(rig.client), threading.Event()
    free = len(link._free_words)
    meanwhile: list[int] = []

    def refused_late(*_: Any) -> Overloaded:
        meanwhile.append(len(link._free_words))
        time.sleep(2 * SHORT_S)
        return Overloaded("Refused.")

    monkeypatch.setattr(rig.client._core.asking, "_fetch_by_rpc", refused_late)
    standing = stand_still(node, go_on)
    get = rig.client.getting([rig.wanted(block)], timeout_s=SHORT_S)
    go_on.set()
    standing.join(WAIT_S)
    assert is_away(get.wait()[0])
    assert meanwhile == [free - 1]
    assert rig.client._core.link is link
    assert len(link._free_words) == free


def test_gets_that_end_at_any_moment_leave_the_link_intact_and_write_nothing_afterwards(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    """From the drive and the hot memory, over the fabric and gRPC, with deadlines from zero to ample."""
    blocks = [rig.block(number, MIB // 2) for number in range(12)]
    put(rig, blocks)
    link = link_of(rig.client)
    calls = link.calls
    dice = random.Random(15)
    missed = hits = 0
    for turn in range(150):
        some = dice.sample(blocks, dice.randint(1, len(blocks)))
        if turn % 3 == 0:  # they come from the drive again
            node.call(forget_all)
        link.calls = calls if dice.random() < 0.7 else None
        outcomes = rig.client.get([rig.wanted(block) for block in some], timeout_s=dice.random() * 0.02)
        hits += sum(isinstance(one, Hit) for one in outcomes)
        missed += sum(map(is_away, outcomes))
        assert all(rig.is_exact(b) for b, one in zip(some, outcomes, strict=True) if isinstance(one, Hit))
        paint(rig)
        rig.client.status()  # some time for what must not come
        assert untouched(rig), turn
        if rig.client._core.link is not link:  # the machine stood still for longer than a node has to confirm
            rig.client.attach()
            link = link_of(rig.client)
            calls = link.calls
    assert hits
    assert missed
    wait_until(
        lambda: node.call(lambda inside: inside.hot.shares.total_bytes) == 0, "nothing is held any more"
    )


def forget_all(inside: Node) -> None:
    for piece in kept_in(inside):
        inside.hot.pages.forget(piece)


# --- memory


def test_a_region_is_busy_while_a_get_may_write_to_it(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    """It could once be closed, and late bytes were written to whatever was mapped there next."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    drive = HeldDrive(node)
    get = rig.client.getting([rig.wanted(block)], timeout_s=WAIT_S)
    with pytest.raises(RegionBusy):
        rig.to_region.close()
    drive.release()
    assert get.wait() == [Hit(block.key)]
    rig.to_region.close()
    rig.target.close()  # nobody keeps it


def test_a_region_is_free_after_a_get_ends_in_any_way(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    block = rig.block(0, 100_000)
    put(rig, [block])
    drive = HeldDrive(node)
    assert is_away(rig.client.get([rig.wanted(block)], timeout_s=SHORT_S)[0])
    drive.release()
    rig.client.get([rig.wanted(rig.block(5))], timeout_s=WAIT_S)  # a miss
    rig.client.get([rig.wanted(block)] * 3, timeout_s=WAIT_S)
    rig.to_region.close()


def test_a_region_is_busy_while_an_armed_put_may_read_it(rig: ClientWithBuffers) -> None:
    puts = rig.client.reserve([rig.block(0)]).arm(rig.flags[0])
    with pytest.raises(RegionBusy):
        rig.from_region.close()
    puts.cancel()
    rig.from_region.close()


def test_the_first_blocks_can_be_waited_for_while_the_others_are_still_read(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    hot, cold = rig.block(0, 100_000), rig.block(1, 100_000)
    put(rig, [hot, cold])
    assert rig.client.get([rig.wanted(hot)], timeout_s=WAIT_S) == [Hit(hot.key)]
    drive = HeldDrive(node)
    get = rig.client.getting([rig.wanted(hot), rig.wanted(cold)], timeout_s=WAIT_S)
    wait_until(lambda: drive.waiting() == 1, "the drive is asked")
    assert get.wait(1) == [Hit(hot.key)]
    drive.release()
    assert get.wait(2) == get.wait() == [Hit(hot.key), Hit(cold.key)]


def test_a_get_whose_caller_is_interrupted_still_ends(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rig.block(0, 100_000)
    put(rig, [block])
    free = len(link_of(rig.client)._free_words)
    real, waits = Group.wait, []

    def interrupted(group: Group, first: int, timeout_s: float) -> bool:
        waits.append(first)
        if len(waits) == 1:
            raise KeyboardInterrupt
        return real(group, first, timeout_s)

    monkeypatch.setattr(Group, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)
    wait_until(lambda: len(link_of(rig.client)._free_words) == free, "its word is free")
    rig.to_region.close()  # nothing holds it


def test_closing_the_client_ends_a_get_and_nothing_arrives_afterwards(node: NodeInProcess) -> None:
    rig = ClientWithBuffers(node)
    block = rig.block(0, 100_000)
    put(rig, [block])
    drive = HeldDrive(node)
    paint(rig)
    get = rig.client.getting([rig.wanted(block)], timeout_s=WAIT_S)
    rig.close()
    assert is_away(get.wait()[0])
    drive.release()
    node.call(lambda _: None)
    assert untouched(rig)
    rig.target.close()  # nobody keeps it


def test_blocks_read_for_a_client_that_has_closed_are_not_sent(node: NodeInProcess) -> None:
    rig = ClientWithBuffers(node)
    block = rig.block(0, 100_000)
    put(rig, [block])
    drive = HeldDrive(node)
    get = rig.client.getting([rig.wanted(block)], timeout_s=WAIT_S)
    wait_until(lambda: drive.waiting() == 1, "the drive is asked")
    rig.close()
    assert is_away(get.wait()[0])
    wait_until(lambda: node.call(len) == 0, "the node knows that its client has gone")
    found = node.call(lambda inside: inside.counters.hits_drive)
    drive.release()
    wait_until(lambda: node.call(lambda inside: not inside.fetches._under_way), "the block has been read")
    assert node.call(lambda inside: inside.counters.hits_drive) == found, "and nobody has got it"
    wait_until(
        lambda: node.call(lambda inside: inside.hot.shares.total_bytes) == 0, "nothing is held any more"
    )


def test_a_region_is_busy_while_a_resume_is_under_way(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    chat = rig.client.session("ada", "chat 7")
    blocks = [Block(key(at), rig.from_region, at * MIB, 1000, threshold=1) for at in range(3)]
    puts = chat.reserve(blocks).arm(rig.flags[0])
    rig.flags[0].store(1)
    assert all(one.error is None for one in puts.wait(WAIT_S))
    chat.append([one.key for one in blocks], tokens=3)
    drive = HeldDrive(node)
    with chat.resuming(
        lambda number, name: Block(name, rig.to_region, number * MIB, 1000), timeout_s=WAIT_S
    ) as back:
        with pytest.raises(RegionBusy):
            rig.to_region.close()
        drive.release()
        assert back.whole().is_whole
        rig.to_region.close()


def test_memory_registered_with_several_nodes_stays_registered_where_it_is_busy(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    block = rig.block(0, 100_000)
    put(rig, [block])
    drive = HeldDrive(node)
    memory = RegisteredMemory(bytearray(MIB))
    with Client(node.target, slots=1, block_bytes_max=4096) as other:
        busy, idle = memory.at(rig.client), memory.at(other)
        get = rig.client.getting([Block(block.key, busy, 0, block.length)], timeout_s=WAIT_S)
        with pytest.raises(RegionBusy):
            memory.close()
        assert idle.handle is None
        drive.release()
        assert get.wait() == [Hit(block.key)]
        memory.close()
        assert busy.handle is None


def test_a_get_whose_fabric_hangs_ends_and_its_memory_stays_allocated(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hanging provider may still write to it. Callers used to wait forever."""
    block = rig.block(0, 100_000)
    put(rig, [block])
    drive = HeldDrive(node)
    get = rig.client.getting([rig.wanted(block)], timeout_s=WAIT_S)
    link = link_of(rig.client)

    def hangs() -> None:
        raise FabricStuck("Closing an endpoint got no answer.")

    with monkeypatch.context() as patched:
        patched.setattr(link.endpoint, "close", hangs)
        rig.client._core.lose(link, NodeUnavailable("The node went away."))
    assert is_away(get.wait()[0])
    with pytest.raises(RegionBusy):
        rig.to_region.close()
    drive.release()
    link.endpoint.close()


def test_memory_without_other_references_lives_as_long_as_its_region(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    block = rig.block(0, 100_000)
    put(rig, [block])
    region = rig.client.register(bytearray(MIB))
    drive = HeldDrive(node)
    get = rig.client.getting([Block(block.key, region, 0, block.length)], timeout_s=WAIT_S)
    gc.collect()
    others = [bytearray(MIB) for _ in range(8)]  # they would be where it was
    drive.release()
    assert get.wait() == [Hit(block.key)]
    assert ctypes.string_at(region.address, block.length) == rig.source[: block.length]
    assert not any(map(any, others))
    region.close()
