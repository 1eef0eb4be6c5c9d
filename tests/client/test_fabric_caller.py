"""Reserves and gets over the fabric: no gRPC while it works, gRPC where it can't, and the same errors either way."""

from __future__ import annotations

import errno
import os
import random
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.client import Block, Client, Hit
from kvstore.client.gets import Get
from kvstore.errors import DeadlineExceeded, Overloaded, ProtocolError
from kvstore.limits import FABRIC_CALL_PLACES
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from kvstore.node.tenants import token_digest
from kvstore.wire import fabric_call
from kvstore.wire import kvstore_pb2 as pb
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from nic_offload.trigger import TriggeredPut, arm
from tests.client.test_promises import put
from tests.conftest import MIB, ClientWithBuffers, small_client, small_node
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess
from tests.stopping import stop
from tests.wire.calls import call_bytes, due_generation

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client.link import Link
    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node

WAIT_S = 20.0


@pytest.fixture
def inside(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "node") as node:
        yield node


@pytest.fixture
def rig_inside(inside: NodeInProcess) -> Iterator[ClientWithBuffers]:
    rig = ClientWithBuffers(inside)
    yield rig
    rig.close()


def link_of(client: Client) -> Link:
    client.attach()
    assert client._core.link is not None
    return client._core.link


def get(rig: ClientWithBuffers, blocks: list[Block]) -> list[Hit | Miss]:
    rig.target[:] = bytes(len(rig.target))
    return rig.client.get([rig.wanted(block) for block in blocks], timeout_s=WAIT_S)


def forbid_grpc(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("this was to go over the fabric")

    monkeypatch.setattr(client._core.stub, "Reserve", refuse)
    monkeypatch.setattr(client._core.stub, "Fetch", refuse)


def served(node: NodeInProcess) -> int:
    return int(node.call(lambda one: one.fabric.statistics().served))


def test_puts_and_gets_make_no_grpc_call(rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.client.attach()
    forbid_grpc(rig.client, monkeypatch)
    blocks = [rig.block(number, 100_000) for number in range(8)]
    put(rig, blocks)
    for _ in range(3):  # from the drive, and twice out of memory
        assert get(rig, blocks) == [Hit(block.key) for block in blocks]
        assert all(map(rig.is_exact, blocks))
    gone = rig.block(99, 100)
    assert [one.reason for one in get(rig, [gone])] == [MissReason.UNKNOWN]  # type: ignore[union-attr]
    assert rig.client.reserve(blocks).already_stored == 8


def test_calls_that_the_core_cannot_take_are_made_over_grpc(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_of(rig.client)
    assert link.calls is not None
    monkeypatch.setattr(link.calls.caller, "call", lambda *_: -errno.EBUSY)
    blocks = [rig.block(number) for number in range(4)]
    put(rig, blocks)
    assert get(rig, blocks) == [Hit(block.key) for block in blocks]
    assert all(map(rig.is_exact, blocks))


def test_a_place_is_free_once_its_call_is_answered_even_before_the_blocks_arrive(
    inside: NodeInProcess, rig_inside: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig = rig_inside
    blocks = [rig.block(number, 100_000) for number in range(2 * FABRIC_CALL_PLACES)]
    put(rig, blocks)
    forbid_grpc(rig.client, monkeypatch)
    pump = inside.call(lambda node: node.fetches.pump)

    def takes_calls_and_reads_nothing(node: Node) -> None:
        vars(node.fetches)["pump"] = vars(node.fabric_calls.cold)["feed"] = lambda: None

    inside.call(takes_calls_and_reads_nothing)
    gets = []
    for block in blocks:
        gets.append(rig.client.getting([rig.wanted(block)], timeout_s=WAIT_S))
        calls = link_of(rig.client).calls
        assert calls is not None
        caller = calls.caller
        wait_until(lambda caller=caller: caller.free_places == FABRIC_CALL_PLACES, "it is taken")  # type: ignore[misc]
    assert not any(get.group.row(0).over for get in gets if isinstance(get, Get))
    inside.call(lambda node: setattr(node.fetches, "pump", pump))
    inside.call(lambda node: node.fetches.pump())
    assert [get.wait() for get in gets] == [[Hit(block.key)] for block in blocks]


def test_a_call_is_made_over_grpc_when_the_fabric_accepts_no_more(
    rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rig.block(0)
    put(rig, [block])
    link = link_of(rig.client)
    assert link.calls is not None

    monkeypatch.setattr(link.calls.caller, "call", lambda *_: -errno.EAGAIN)
    assert get(rig, [block]) == [Hit(block.key)]
    assert link.calls.caller.free_places == FABRIC_CALL_PLACES
    monkeypatch.undo()
    forbid_grpc(rig.client, monkeypatch)
    for _ in range(2 * FABRIC_CALL_PLACES):
        assert get(rig, [block]) == [Hit(block.key)]
    assert rig.client._core.link is link


def test_a_generation_that_fits_in_no_word_is_refused(rig: ClientWithBuffers, node: NodeProcess) -> None:
    block = rig.block(0)
    put(rig, [block])
    link = link_of(rig.client)
    wanted = pb.FetchBlock(
        name=pb.BlockName(key=block.key, fingerprint=rig.client.fingerprint, length=block.length),
        target=rig.to_region.base,
        target_key=rig.to_region.key,
    )
    for generation in (0, 1 << 56):
        wanted.ack_generation = generation
        with pytest.raises(grpc.RpcError) as caught:
            rig.client._core.stub.Fetch(
                pb.FetchRequest(connection=link.number, blocks=[wanted]), timeout=WAIT_S
            )
        assert "A word's generation is" in str(caught.value)
    assert get(rig, [block]) == [Hit(block.key)]
    assert "Traceback" not in node.log()


def test_invalid_metadata_affects_no_other_client(
    inside: NodeInProcess, rig_inside: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The C core doesn't read it, and the node reads it only when it records what was served."""
    rig, block = rig_inside, rig_inside.block(0, 50_000)
    put(rig, [block])
    for _ in range(2):
        assert get(rig, [block]) == [Hit(block.key)]
    monkeypatch.setattr(fabric_call, "_header_bytes", lambda _: b"\xff\xff\xff\x01" + b"x" * 12)
    before = served(inside)
    assert get(rig, [block]) == [Hit(block.key)]
    monkeypatch.undo()
    wait_until(lambda: served(inside) == before + 1, "the thread shows its counts a little later")
    lookups = len(rig.client.looked_up().lookups)
    assert lookups >= 3, "it is told of, as nobody's request"
    assert get(rig, [block]) == [Hit(block.key)]


def test_a_client_of_an_earlier_version_gets_no_place_for_calls(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = pb.AttachRequest

    def earlier(**fields: Any) -> pb.AttachRequest:
        return whole(**{name: value for name, value in fields.items() if name != "answers_base"})

    rig = ClientWithBuffers(node)
    monkeypatch.setattr(pb, "AttachRequest", earlier)
    try:
        assert link_of(rig.client).calls is None
        block = rig.block(0)
        put(rig, [block])
        assert get(rig, [block]) == [Hit(block.key)]
    finally:
        rig.close()


@pytest.mark.parametrize("by_grpc", [False, True])
def test_refusals_are_the_same_over_both_transports(rig: ClientWithBuffers, by_grpc: bool) -> None:  # noqa: FBT001
    link = link_of(rig.client)
    if by_grpc:
        link.calls = None
    many = [rig.block(number, 100, offset=0) for number in range(link.slots + 1)]
    with pytest.raises(Overloaded, match="landing slots free") as caught:
        rig.client.reserve(many)
    assert caught.value.retry_after_ms > 0
    with pytest.raises(ProtocolError, match="attached for blocks of up to"):
        rig.client.reserve([rig.block(0, 2 * MIB)])
    assert rig.client._core.link is link, "a refusal costs no connection"
    rig.client.reserve([rig.block(0)]).give_back()


def test_a_corrupt_call_ends_only_its_connection(rig: ClientWithBuffers, node: NodeProcess) -> None:
    block = rig.block(0)
    put(rig, [block])
    link = link_of(rig.client)
    assert link.calls is not None
    generation, area = due_generation(link, 0), link.calls._area
    row = fabric_call.FetchRow(block.key, block.length, 1, 1, 0, 0)
    data = call_bytes(
        fabric_call.Call(generation, fabric_call.CallKind.FETCH, 1, bytes(16)),
        1,
        fabric_call.rows_of_fetch([row]),
    )
    assert data is not None
    data = data[:-1] + bytes([data[-1] ^ 1])
    data += link.endpoint.tag(area.base + fabric_call.flag_offset(0), area.key, generation, data)
    at = 8 * MIB
    rig.source[at : at + len(data)] = data
    spoilt = TriggeredPut(
        tag=1 << 40,
        endpoint=link.endpoint,
        peer=link.peer,
        region=rig.from_region,
        source=rig.from_region.address + at,
        length=len(data),
        target=area.base + fabric_call.call_offset(0),
        target_key=area.key,
        flag_target=area.base + fabric_call.flag_offset(0),
        flag_key=area.key,
        flag_value=generation,
    )
    arm(rig.client.fabric, [spoilt])
    wait_until(lambda: link.error is not None, "the link has ended")
    assert "fails its checksum" in node.log()
    assert get(rig, [block]) == [Hit(block.key)]
    assert rig.is_exact(block)


def test_a_stopped_node_costs_a_get_its_deadline_and_fails_a_reserve(
    rig: ClientWithBuffers, node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    block = rig.block(0)
    put(rig, [block])
    rig.client.attach()
    stop(node.pid)
    try:
        began_s = time.monotonic()
        (miss,) = rig.client.get([rig.wanted(block)], timeout_s=0.5)
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.NODE_AWAY
        assert 0.4 < time.monotonic() - began_s < 5
    finally:
        os.kill(node.pid, signal.SIGCONT)
    wait_until(lambda: get(rig, [block]) == [Hit(block.key)], "the node goes on")
    monkeypatch.setattr(rig.client._core.asking, "_timeout_ns", 300_000_000)
    stop(node.pid)
    try:
        with pytest.raises(DeadlineExceeded):
            rig.client.reserve([rig.block(1)])
    except BaseException:
        os.kill(node.pid, signal.SIGCONT)
        raise
    os.kill(node.pid, signal.SIGCONT)


def test_a_client_that_closes_in_the_middle_of_calls_ends_them(
    rig: ClientWithBuffers, node: NodeProcess
) -> None:
    block = rig.block(0)
    put(rig, [block])
    outcomes: list[Hit | Miss] = []
    stop(node.pid)
    try:
        thread = threading.Thread(target=lambda: outcomes.extend(rig.client.get([rig.wanted(block)])))
        thread.start()
        wait_until(
            lambda: bool(rig.client._core.link and rig.client._core.link.operations), "the get is under way"
        )
        rig.client.close()
        thread.join(WAIT_S)
    finally:
        os.kill(node.pid, signal.SIGCONT)
    assert [one.reason for one in outcomes if isinstance(one, Miss)] == [MissReason.NODE_AWAY]


# --- what the C core answers by itself


def test_a_deleted_block_leaves_the_shelf_at_once(
    inside: NodeInProcess, rig_inside: ClientWithBuffers
) -> None:
    rig, blocks = rig_inside, [rig_inside.block(number, 50_000) for number in range(6)]
    put(rig, blocks)
    for _ in range(3):
        assert get(rig, blocks) == [Hit(block.key) for block in blocks]
    assert served(inside) >= 6
    assert rig.client.delete([block.key for block in blocks[:3]]) == [True] * 3
    before = served(inside)
    outcomes = get(rig, blocks)
    assert [one.reason for one in outcomes[:3] if isinstance(one, Miss)] == [MissReason.UNKNOWN] * 3
    assert outcomes[3:] == [Hit(block.key) for block in blocks[3:]]
    assert served(inside) == before, "a call with a miss in it is not answered without the application"
    assert get(rig, blocks[3:]) == outcomes[3:]
    assert served(inside) == before + 3
    assert all(map(rig.is_exact, blocks[3:]))


@pytest.mark.parametrize("way", ["_read", "_keep_arrived"])
def test_a_block_deleted_while_it_is_read_is_not_put_on_the_shelf(
    inside: NodeInProcess, rig_inside: ClientWithBuffers, way: str
) -> None:
    """Before the bytes read are processed: those read by the store, and those read by a reader."""
    rig, block = rig_inside, rig_inside.block(0, 50_000)
    put(rig, [block])
    if way == "_read":
        inside.call(lambda one: one.fetches.readers._of.clear())
    held: list[tuple[Any, ...]] = []
    go_on = inside.call(lambda one: getattr(one.fetches, way))
    inside.call(lambda one: vars(one.fetches).update({way: lambda *batch: held.append(batch)}))
    thread = threading.Thread(target=get, args=(rig, [block]))
    thread.start()
    wait_until(lambda: bool(held), "the drive has read it")
    assert rig.client.delete([block.key]) == [True]
    inside.call(lambda one: vars(one.fetches).pop(way))
    inside.call(lambda _: go_on(*held[0]))
    thread.join(WAIT_S)
    assert inside.call(lambda one: len(one.hot.shelf)) == 0
    (miss,) = get(rig, [block])
    assert isinstance(miss, Miss)
    assert miss.reason is MissReason.UNKNOWN


def test_an_expiring_block_is_not_on_the_shelf(inside: NodeInProcess, rig_inside: ClientWithBuffers) -> None:
    rig, block = rig_inside, rig_inside.block(0, 50_000)
    puts = rig.client.reserve([block], expires_unix_ms=int(time.time() * 1000) + 3_600_000).arm(rig.flags[0])
    rig.flags[0].store(1)
    assert puts.wait(WAIT_S)[0].error is None
    for _ in range(4):
        assert get(rig, [block]) == [Hit(block.key)]
    assert served(inside) == 0
    assert inside.call(lambda one: len(one.hot.shelf)) == 0


def test_another_tenants_block_is_not_served(inside: NodeInProcess, rig_inside: ClientWithBuffers) -> None:
    rig, block = rig_inside, rig_inside.block(0, 50_000)
    put(rig, [block])
    for _ in range(3):
        assert get(rig, [block]) == [Hit(block.key)]
    assert served(inside) > 0
    before = served(inside)
    with small_client(inside.target, tenant="zeta") as zeta:
        memory = allocate(50_000)
        (miss,) = zeta.get([Block(block.key, zeta.register(memory), 0, 50_000)])
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.UNKNOWN
        assert bytes(memory) == bytes(len(memory))
    assert served(inside) == before


def test_look_ups_include_calls_answered_without_python(
    inside: NodeInProcess, rig_inside: ClientWithBuffers
) -> None:
    rig, blocks = rig_inside, [rig_inside.block(number, 50_000) for number in range(4)]
    put(rig, blocks)
    get(rig, blocks)
    get(rig, blocks)
    before = rig.client.statistics()
    lookups = len(rig.client.looked_up().lookups)
    assert get(rig, blocks) == [Hit(block.key) for block in blocks]
    wait_until(lambda: len(rig.client.looked_up().lookups) == lookups + 1, "the look-up is told")
    after = rig.client.statistics()
    assert after.hits_memory - before.hits_memory == 4
    assert after.got_bytes - before.got_bytes == 200_000
    last = rig.client.looked_up().lookups[-1]
    assert (last.blocks, last.size_bytes) == (4, 200_000)
    assert served(inside) >= 4


def test_a_tenants_rate_counts_calls_over_the_fabric(tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.toml"
    tenants.write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\nrequests_per_s = 4\n')
    arguments = ("--tenants", str(tenants))
    with (
        small_node(tmp_path / "node", arguments=arguments) as node,
        small_client(node.target, token="acme") as client,
    ):
        client.put_inline(block_key(b"1"), b"a" * 4096)
        wanted = [Block(block_key(b"1"), client.register(allocate(4096)), 0, 4096)]
        outcomes = [client.get(wanted)[0] for _ in range(20)]
        assert any(isinstance(one, Hit) for one in outcomes)
        assert any(isinstance(one, Miss) and one.reason is MissReason.BUSY for one in outcomes)


def test_revoking_a_token_ends_the_connections_opened_with_it(tmp_path: Path) -> None:
    """Calls over the fabric carry no token, so a stolen one must not live on in a connection."""
    tenants = tmp_path / "tenants.toml"
    one, two = token_digest("one"), token_digest("two")
    tenants.write_text(f'[acme]\ntokens_sha256 = ["{one}", "{two}"]\n')
    arguments = ("--tenants", str(tenants))
    with (
        small_node(tmp_path / "node", arguments=arguments) as node,
        small_client(node.target, token="one") as stolen,
        small_client(node.target, token="two") as kept,
    ):
        stolen.attach()
        link = link_of(kept)
        tenants.write_text(f'[acme]\ntokens_sha256 = ["{two}"]\n')
        os.kill(node.pid, signal.SIGHUP)
        wait_until(lambda: not stolen.is_attached, "the connection of the token that is gone ends")
        assert kept._core.link is link


@pytest.mark.slow
def test_bytes_are_exact_while_blocks_enter_and_leave_the_shelf(tmp_path: Path) -> None:
    """Four users put, get and delete each other's latest blocks, in a memory too small for all."""
    blocks, length = 40, 6 * MIB
    contents = [random.Random(number).randbytes(length) for number in range(blocks)]
    until_s = time.monotonic() + 50
    hits: list[int] = []

    def use(target: str, seed: int) -> None:
        rng = random.Random(seed)
        with Client(target, slots=2, block_bytes_max=length) as client, FlagWords.create(1) as flags:
            memory = allocate(2 * length)
            kv = client.register(memory)
            while len(hits) < 500 and time.monotonic() < until_s:
                number = rng.randrange(blocks) if rng.random() < 0.5 else rng.randrange(4)
                block = Block(block_key(number.to_bytes(4)), kv, 0, length)
                what = rng.random()
                if what < 0.1:
                    client.delete([block.key])
                elif what < 0.3:
                    memory[:length] = contents[number]
                    flags[0].store(0)
                    puts = client.reserve([block]).arm(flags[0])
                    flags[0].store(1)
                    assert puts.wait(WAIT_S)[0].error is None
                else:
                    memory[length:] = bytes(length)
                    (got,) = client.get([Block(block.key, kv, length, length)], timeout_s=WAIT_S)
                    if isinstance(got, Hit):
                        assert memory[length:] == contents[number]
                        hits.append(number)
                    else:
                        assert got.reason is MissReason.UNKNOWN

    with NodeInProcess(tmp_path / "node", 512 * MIB) as node:
        failures: list[BaseException] = []

        def guarded(seed: int) -> None:
            try:
                use(node.target, seed)
            except BaseException as error:  # noqa: BLE001 - told below, by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=guarded, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert failures == []
        assert len(hits) >= 500
        assert served(node) > 10
