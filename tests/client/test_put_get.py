"""The path itself: a real node process, a real fabric, a real drive."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, FabricError, Overloaded
from kvstore.miss import Miss, MissReason
from tests.conftest import MIB, ClientWithBuffers, small_client, small_node
from tests.nic_offload.rig import needs_provider, wait_until

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.node("shared")

WAIT_S = 20.0


def put_all(
    rig: ClientWithBuffers, lengths: list[int], durability: Durability = Durability.WRITTEN
) -> list[object]:
    blocks = [rig.block(i, length) for i, length in enumerate(lengths)]
    rig.flags[0].store(0)
    puts = rig.client.arm(blocks, rig.flags[0], durability=durability)
    rig.flags[0].store(len(blocks))
    for result in puts.wait(WAIT_S):
        assert result.error is None
        assert result.durability is not None
        assert result.durability >= durability
    return list(blocks)


@pytest.mark.parametrize("durability", list(Durability))
def test_a_put_of_every_durability_is_read_back_exactly(
    rig: ClientWithBuffers, durability: Durability
) -> None:
    lengths = [1, 511, 4095, 4096, 4097, 65537, MIB - 1, MIB]
    blocks = [rig.block(i, length) for i, length in enumerate(lengths)]
    put_all(rig, lengths, durability)
    if durability is Durability.LANDED:
        # `landed` promises nothing of the drive; the same blocks put as `written` wait for the first ones.
        put_all(rig, lengths)
    outcomes = rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)
    assert outcomes == [Hit(block.key) for block in blocks]
    assert all(rig.is_exact(block) for block in blocks)


def test_a_get_writes_only_inside_its_block(rig: ClientWithBuffers) -> None:
    put_all(rig, [5000])
    rig.target[:] = b"\xa5" * len(rig.target)
    block = rig.block(0, 5000, region=rig.to_region, offset=12345)
    assert rig.client.get([block], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.target[12345:17345] == rig.source[:5000]
    assert rig.target[:12345] == b"\xa5" * 12345
    assert rig.target[17345:] == b"\xa5" * (len(rig.target) - 17345)


def test_another_process_fires_the_put_without_a_call_by_the_application(rig: ClientWithBuffers) -> None:
    block = rig.block(0)
    puts = rig.client.arm([block], rig.flags[0])
    before = rig.client.calls
    store = (
        "import sys\nfrom nic_offload.flags import FlagWords\n"
        "with FlagWords.open(sys.argv[1]) as f: f[0].store(1)"
    )
    subprocess.run([sys.executable, "-c", store, rig.flags.path], check=True, timeout=WAIT_S)
    (result,) = puts.wait(WAIT_S)
    assert result.error is None
    assert 0 < result.fired_ns <= result.landed_ns <= result.durable_ns
    assert rig.client.calls == before


def test_nothing_is_sent_before_its_threshold(rig: ClientWithBuffers) -> None:
    blocks = [rig.block(i) for i in range(3)]
    puts = rig.client.arm(blocks, rig.flags[0])
    rig.flags[0].store(2)
    while puts.progress()[2] < 2:
        assert puts.progress()[0] <= 2
    assert rig.client.get([rig.wanted(blocks[2])], timeout_s=WAIT_S) == [Miss(MissReason.UNKNOWN)]
    rig.flags[0].store(3)
    assert all(result.error is None for result in puts.wait(WAIT_S))


def test_a_stored_block_is_not_sent_again(rig: ClientWithBuffers) -> None:
    put_all(rig, [MIB] * 4)
    sent = rig.client.fabric.statistics().put_bytes
    reservation = rig.client.reserve([rig.block(i) for i in range(5)])
    assert reservation.already_stored == 4
    puts = reservation.arm(rig.flags[0])
    rig.flags[0].store(5)
    assert [result.already_stored for result in puts.wait(WAIT_S)] == [True] * 4 + [False]

    def calls_bytes() -> int:  # the reserve itself; a put's bytes are counted when the NIC is done with it
        return rig.client.fabric.statistics().put_bytes - sent - MIB

    wait_until(lambda: calls_bytes() > 0, "the put that went out is counted")
    assert calls_bytes() < 4096


def test_a_cancelled_put_is_never_sent_and_its_slot_is_reused(node: NodeProcess) -> None:
    rig = ClientWithBuffers(node, slots=1)
    for _ in range(3):  # more rounds than there are slots
        puts = rig.client.arm([rig.block(0)], rig.flags[0])
        assert puts.cancel() == 1
        (result,) = puts.wait(WAIT_S)
        assert isinstance(result.error, FabricError)
        _until_a_slot_is_free(rig)
    rig.flags[0].store(100)
    assert rig.client.get([rig.wanted(rig.block(0))], timeout_s=WAIT_S) == [Miss(MissReason.UNKNOWN)]
    rig.close()


def _until_a_slot_is_free(rig: ClientWithBuffers) -> None:
    for _ in range(1000):
        try:
            rig.client.reserve([rig.block(1)]).give_back()
        except Overloaded:
            continue
        return
    pytest.fail("the slot did not come back")


def test_a_written_block_is_not_sent_again(rig: ClientWithBuffers) -> None:
    """However soon it is put: the C core has acknowledged it, and the node's Python may not know it yet."""
    for first in range(20, 80, 3):
        blocks = [rig.block(number, 4096) for number in range(first, first + 3)]
        assert not any(one.error for one in rig.client.arm(blocks).wait(WAIT_S))
        reservation = rig.client.reserve(blocks)
        assert reservation.already_stored == 3
        reservation.give_back()


def test_a_returned_reservation_frees_its_slots(node: NodeProcess) -> None:
    rig = ClientWithBuffers(node, slots=2)
    for _ in range(5):
        _until_a_slot_is_free(rig)
    rig.close()


def test_a_wait_that_times_out_says_which_puts_have_not_ended_and_they_continue(
    rig: ClientWithBuffers,
) -> None:
    puts = rig.client.arm([rig.block(0), rig.block(1)], rig.flags[0])
    rig.flags[0].store(1)
    wait_until(lambda: puts.progress()[2] == 1, "the first has ended")
    stored, pending = puts.wait(0.01)
    assert (stored.error, type(pending.error), puts.ended()) == (None, DeadlineExceeded, None)
    rig.flags[0].store(2)
    assert [one.error for one in puts.wait(WAIT_S)] == [None, None]


def test_a_late_flag_fires_nothing(rig: ClientWithBuffers) -> None:
    puts = rig.client.arm([rig.block(0)], rig.flags[0], lease_ms=200)
    (result,) = puts.wait(WAIT_S)
    assert isinstance(result.error, DeadlineExceeded)
    rig.flags[0].store(1)
    assert rig.client.get([rig.wanted(rig.block(0))], timeout_s=WAIT_S) == [Miss(MissReason.UNKNOWN)]
    put_all(rig, [MIB])  # and the client goes on


def test_a_get_under_another_layout_or_length_is_a_miss(node: NodeProcess, rig: ClientWithBuffers) -> None:
    put_all(rig, [MIB])
    short = rig.block(0, MIB - 1, region=rig.to_region)
    (outcome,) = rig.client.get([short], timeout_s=WAIT_S)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.LENGTH
    with small_client(node.target, layout=b"another") as other:
        region = other.register(bytearray(MIB))
        (outcome,) = other.get([rig.block(0, region=region)], timeout_s=WAIT_S)
        assert isinstance(outcome, Miss)
        assert outcome.reason is MissReason.LAYOUT


def test_another_tenant_does_not_get_the_block(node: NodeProcess, rig: ClientWithBuffers) -> None:
    put_all(rig, [MIB])
    with small_client(node.target, tenant="other") as other:
        region = other.register(bytearray(MIB))
        (outcome,) = other.get([rig.block(0, region=region)], timeout_s=WAIT_S)
        assert isinstance(outcome, Miss)
        assert outcome.reason is MissReason.UNKNOWN


def test_inline_and_fabric_calls_see_the_same_blocks(rig: ClientWithBuffers) -> None:
    data = bytes(rig.source[:70_000])
    assert rig.client.put_inline(rig.key(0), data) is Durability.WRITTEN
    assert rig.client.get_inline(rig.key(0), len(data)) == data
    block = rig.block(0, len(data))
    assert rig.client.get([rig.wanted(block)], timeout_s=WAIT_S) == [Hit(block.key)]
    assert rig.is_exact(block)
    assert rig.client.get_inline(rig.key(1), 10) == Miss(MissReason.UNKNOWN)


def test_a_block_of_the_maximum_size(tmp_path: Path) -> None:
    length = 64 * MIB
    with (
        NodeProcess(tmp_path / "node", capacity="256MiB") as node,
        Client(node.target, slots=1, block_bytes_max=length) as client,
    ):
        rig = ClientWithBuffers(node)
        data = bytearray(rig.source[:] * 4)
        into = bytearray(length)
        source = client.register(data)
        block = Block(rig.key(0), source, 0, length, threshold=1)
        puts = client.arm([block], rig.flags[0])
        rig.flags[0].store(1)
        assert puts.wait(WAIT_S)[0].error is None
        target = client.register(into)
        assert client.get([Block(block.key, target, 0, length)], timeout_s=WAIT_S) == [Hit(block.key)]
        assert into == data
        rig.close()


@pytest.mark.parametrize("provider", ["tcp;ofi_rxm", "shm", "sockets"])
def test_puts_and_gets_work_over_other_providers(tmp_path: Path, provider: str) -> None:
    needs_provider(provider)
    with small_node(tmp_path / "node", provider=provider) as node:
        rig = ClientWithBuffers(node)
        with Client(node.target, provider=provider, slots=8, block_bytes_max=MIB) as client:
            source, target = client.register(rig.source), client.register(rig.target)
            blocks = [Block(rig.key(i), source, i * MIB, MIB, threshold=1) for i in range(8)]
            puts = client.arm(blocks, rig.flags[0])
            rig.flags[0].store(1)
            assert all(result.error is None for result in puts.wait(WAIT_S))
            wanted = [Block(block.key, target, block.offset, MIB) for block in blocks]
            assert client.get(wanted, timeout_s=WAIT_S) == [Hit(block.key) for block in blocks]
            assert all(rig.is_exact(block) for block in blocks)
        rig.close()


def test_an_expired_block_is_removed_without_a_request(rig: ClientWithBuffers) -> None:
    others = rig.client.status().blocks
    expires_unix_ms = time.time_ns() // 1_000_000 + 1500  # a busy drive takes a while
    assert rig.client.put_inline(rig.key(1), b"short-lived", expires_unix_ms=expires_unix_ms) is not None
    deadline_s = time.monotonic() + WAIT_S
    while rig.client.status().blocks > others:
        assert time.monotonic() < deadline_s, "the block is still there"
    outcome = rig.client.get_inline(rig.key(1), 11)
    assert isinstance(outcome, Miss)
    assert outcome.reason is MissReason.EXPIRED


_FORKED = """
import os, sys, threading
from kvstore import Block, Client, block_key

client = Client(sys.argv[1], tenant=sys.argv[2])
kv = client.register(bytearray(4096))
def put(name): return client.put([Block(block_key(name), kv, 0, 4096)])[0].durability.name
print(put(b"before"))
with client._core.lock:  # as another thread may when this one forks
    child = os.fork()
    if not child:
        closing = threading.Thread(target=client.close, daemon=True)
        closing.start()
        closing.join(10)
        os._exit(closing.is_alive())
print(os.waitpid(child, 0)[1], put(b"after"))
client.close()
"""


def test_a_forked_child_may_close_its_parents_client(node: NodeProcess, tenant: str) -> None:
    command = [sys.executable, "-c", _FORKED, node.target, tenant]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["WRITTEN", "0", "WRITTEN"], done.stderr
    assert "Traceback" not in done.stderr


_CALLS_FORKED = """
import os, sys
from kvstore import Block, Client, block_key
from kvstore.errors import Closed

client = Client(sys.argv[1], tenant=sys.argv[2], transport=sys.argv[3])
kv = client.register(bytearray(4096))
block, key = Block(block_key(b"one"), kv, 0, 4096), block_key(b"two")
client.put([block])
client.put_inline(key, b"two")
child = os.fork()
if not child:
    refused = 0
    for call in (
        lambda: client.get([block]),
        lambda: client.put([block]),
        lambda: client.get_inline(key, 3),
        lambda: list(client.get_many_inline([(key, 3)])),
        lambda: client.put_many_inline([(key, b"two")]),
        lambda: client.exists([key]),
    ):
        try:
            call()
        except Closed:
            refused += 1
    os._exit(refused)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), client.get_inline(key, 3).decode())
client.close()
"""


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_a_forked_child_is_refused_each_call_of_its_parents_client(
    node: NodeProcess, tenant: str, transport: str
) -> None:
    """It has none of the threads that would end a call, and would break the parent's connection."""
    command = [sys.executable, "-c", _CALLS_FORKED, node.target, tenant, transport]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.split() == ["6", "two"], done.stderr
