"""Invalid input and failing nodes: one typed error in one sentence, or a miss with its reason, in bounded time."""

from __future__ import annotations

import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from kvstore import errors
from kvstore.client import Block, Client
from kvstore.config import NodeConfig, parse_listen, parse_size
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import (
    ConfigError,
    InvalidArgument,
    KvError,
    NodeUnavailable,
    NotRegistered,
    Overloaded,
    ProtocolError,
    RegionBusy,
    UsageError,
)
from kvstore.limits import (
    ACK_WORDS,
    BATCH_BLOCKS_MAX,
    CHUNK_BYTES_MAX,
    GET_BLOCKS_MAX,
    GRANTED_PUTS,
    LEASE_TIMEOUT_MS_MAX,
)
from kvstore.miss import Miss, MissReason
from kvstore.wire import batches_pb2, batches_pb2_grpc, kvstore_pb2_grpc
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.status import ERROR_NAME, error_from_rpc
from tests.conftest import MIB, ClientWithBuffers, small_client, small_node
from tests.nic_offload.rig import wait_until
from tests.ports import next_port
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.node("shared")

WAIT_S = 20.0
KEY = bytes(range(32))


def is_one_sentence(error: BaseException) -> bool:
    text = str(error)
    return text.endswith(".") and "\n" not in text and len(text) < 300


@pytest.fixture
def nobody() -> str:
    """An address at which no process listens."""
    return f"127.0.0.1:{next_port()}"


# --- what the client refuses before it calls anybody


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda rig: Block(b"short", rig.from_region, 0, 10), "32 bytes, not 5"),
        (lambda rig: Block(rig.key(0), rig.from_region, 0, 0), "not 0"),
        (lambda rig: Block(rig.key(0), rig.from_region, 0, (64 << 20) + 1), "not 67108865"),
        (lambda rig: Block(rig.key(0), rig.from_region, 16 * MIB - 9, 10), "not in the registered region"),
        (lambda rig: Block(rig.key(0), rig.from_region, -1, 10), "not in the registered region"),
    ],
)
def test_a_block_that_every_node_refuses_is_refused_by_the_client(
    rig: ClientWithBuffers, make: Callable[[ClientWithBuffers], Block], says: str
) -> None:
    before = rig.client.calls
    with pytest.raises(InvalidArgument, match=says) as caught:
        make(rig)
    assert is_one_sentence(caught.value)
    assert rig.client.calls == before


def test_memory_that_is_not_registered_is_refused(node: NodeProcess, rig: ClientWithBuffers) -> None:
    block = rig.block(0)
    with (
        small_client(node.target) as other,
        pytest.raises(NotRegistered, match="not registered with this client"),
    ):
        other.reserve([block])
    rig.from_region.close()
    with pytest.raises(NotRegistered, match="not registered"):
        rig.client.reserve([block])
    with pytest.raises(NotRegistered, match="not registered"):
        rig.client.get([block])


def test_reservations_are_not_empty_and_batches_are_bounded(rig: ClientWithBuffers) -> None:
    for reserved in (0, BATCH_BLOCKS_MAX + 1):
        with pytest.raises(InvalidArgument, match="blocks, not"):
            rig.client.reserve([rig.block(0)] * reserved)
    with pytest.raises(InvalidArgument, match="blocks, not"):
        rig.client.get([rig.block(0)] * (GET_BLOCKS_MAX + 1))


def test_a_lease_has_a_maximum_duration(rig: ClientWithBuffers) -> None:
    for lease_ms in (0, LEASE_TIMEOUT_MS_MAX + 1):
        with pytest.raises(InvalidArgument, match="A lease lasts"):
            rig.client.reserve([rig.block(0)], lease_ms=lease_ms)


def test_a_reservation_can_be_armed_only_once(rig: ClientWithBuffers) -> None:
    reservation = rig.client.reserve([rig.block(0)])
    reservation.arm(rig.flags[0])
    with pytest.raises(InvalidArgument, match="once"):
        reservation.arm(rig.flags[0])


def test_a_region_with_a_waiting_put_cannot_be_closed(rig: ClientWithBuffers) -> None:
    puts = rig.client.reserve([rig.block(0)]).arm(rig.flags[0])
    with pytest.raises(RegionBusy, match="still use the region"):
        rig.from_region.close()
    puts.cancel()


# --- what the node refuses


@pytest.fixture
def stub(rig: ClientWithBuffers) -> kvstore_pb2_grpc.KvStoreStub:
    rig.client.reserve([rig.block(15)])  # attaches
    return rig.client._core.stub


def number_of(rig: ClientWithBuffers) -> int:
    """The number of its connection."""
    assert rig.client._core.link is not None
    return rig.client._core.link.number


def name(length: int = 10, key: bytes = b"k" * 32, fingerprint: bytes = b"f" * 16) -> pb.BlockName:
    return pb.BlockName(key=key, fingerprint=fingerprint, length=length)


BAD_RESERVES = [  # of a connection that is there, where none is named
    (pb.ReserveRequest(connection=999, blocks=[pb.ReserveBlock(name=name())]), "no connection 999"),
    (pb.ReserveRequest(), "1 to 1024 blocks, not 0"),
    (pb.ReserveRequest(blocks=[pb.ReserveBlock(name=name(key=b""))]), "32 bytes, not 0"),
    (
        pb.ReserveRequest(blocks=[pb.ReserveBlock(name=name(fingerprint=b"x"))]),
        "16 bytes, not 1",
    ),
    (pb.ReserveRequest(blocks=[pb.ReserveBlock(name=name(length=0))]), "1 byte to 64 MiB, not 0 bytes"),
    (pb.ReserveRequest(blocks=[pb.ReserveBlock(name=name(length=1 << 40))]), "1 byte to 64 MiB, not"),
    (
        pb.ReserveRequest(blocks=[pb.ReserveBlock(name=name(length=2 * MIB))]),
        "was attached for",
    ),
    (
        pb.ReserveRequest(blocks=[pb.ReserveBlock(name=name(), ack_word=ACK_WORDS + GRANTED_PUTS)]),
        "is not one of them",
    ),
    (
        pb.ReserveRequest(lease_ms=LEASE_TIMEOUT_MS_MAX + 1, blocks=[pb.ReserveBlock(name=name())]),
        "A lease lasts",
    ),
    (
        pb.ReserveRequest(durability=9, blocks=[pb.ReserveBlock(name=name())]),  # type: ignore[arg-type]
        "no durability 9",
    ),
]


@pytest.mark.parametrize(("request_", "says"), BAD_RESERVES)
def test_the_node_refuses_a_bad_reserve_in_one_sentence(
    rig: ClientWithBuffers, stub: kvstore_pb2_grpc.KvStoreStub, request_: pb.ReserveRequest, says: str
) -> None:
    connection = number_of(rig)
    asked = pb.ReserveRequest(connection=connection)
    asked.MergeFrom(request_)
    with pytest.raises(grpc.RpcError, match=says) as caught:
        stub.Reserve(asked, timeout=WAIT_S)
    failure = caught.value
    assert isinstance(failure, grpc.Call)
    assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert dict(failure.trailing_metadata() or ())[ERROR_NAME] == "ProtocolError"
    rig.client.reserve([rig.block(14)]).give_back()
    assert number_of(rig) == connection, "it is the same as before"


def test_the_node_refuses_a_fetch_whose_ack_word_is_not_the_clients(
    rig: ClientWithBuffers, stub: kvstore_pb2_grpc.KvStoreStub
) -> None:
    request = pb.FetchRequest(
        connection=number_of(rig), blocks=[pb.FetchBlock(name=name(), ack_word=ACK_WORDS + GRANTED_PUTS)]
    )
    with pytest.raises(grpc.RpcError, match="is not one of them"):
        stub.Fetch(request, timeout=WAIT_S)


def test_a_client_with_another_fabric_provider_gets_an_error(node: NodeProcess) -> None:
    with small_client(node.target, provider="sockets") as client:
        region = client.register(bytearray(10))
        with pytest.raises(ProtocolError, match="the client's is sockets"):
            client.reserve([Block(b"k" * 32, region, 0, 10)])


def test_more_slots_than_exist_is_overloaded_and_leases_nothing(node: NodeProcess) -> None:
    rig = ClientWithBuffers(node, slots=4)
    with pytest.raises(Overloaded, match="4 of 4 landing slots free and 5"):
        rig.client.reserve([rig.block(i) for i in range(5)])
    rig.client.reserve([rig.block(i) for i in range(4)]).give_back()
    rig.close()


def test_an_inline_put_of_another_length_than_announced_is_refused(node: NodeProcess) -> None:
    with grpc.insecure_channel(node.target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        start = pb.PutRequest(start=pb.PutStart(tenant="t", name=name(length=10)))
        for chunk, says in (
            (b"123", "3 bytes arrived and 10"),
            (b"x" * 11, "More bytes arrived than the 10"),
        ):
            with pytest.raises(grpc.RpcError, match=says):
                stub.Put(iter([start, pb.PutRequest(chunk=chunk)]), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError, match="begins with its start message"):
            stub.Put(iter([pb.PutRequest(chunk=b"x")]), timeout=WAIT_S)


def test_an_oversized_chunk_is_refused_with_our_own_error(node: NodeProcess) -> None:
    large = b"x" * (8 * MIB)
    block = name(length=len(large))
    with grpc.insecure_channel(node.target) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        batches = batches_pb2_grpc.BatchesStub(channel)  # type: ignore[no-untyped-call]
        part = batches_pb2.PutPart(name=block, chunk=large)
        start = pb.PutRequest(start=pb.PutStart(tenant="t", name=block))
        calls = (
            lambda: stub.Put(iter([start, pb.PutRequest(chunk=large)]), timeout=WAIT_S),
            lambda: list(
                batches.PutBatch(
                    iter([batches_pb2.PutBatchRequest(tenant="t", parts=[part])]), timeout=WAIT_S
                )
            ),
        )
        for call in calls:
            with pytest.raises(grpc.RpcError) as refused:
                call()
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert type(error_from_rpc("A put", refused.value)) is errors.ProtocolError
            assert refused.value.details() == (
                "A chunk has at most 4 MiB, not 8 MiB; send the block in several."
            )
        half = [pb.PutRequest(chunk=large[:CHUNK_BYTES_MAX])] * 2
        stub.Put(iter([start, *half]), timeout=WAIT_S)  # as the sentence says
        with pytest.raises(grpc.RpcError, match="larger than max"):  # gRPC's own, as docs/grpc.md says
            stub.Put(iter([start, pb.PutRequest(chunk=large + bytes(MIB))]), timeout=WAIT_S)


# --- bad times


def test_an_absent_node_is_an_error_for_a_put_and_a_miss_for_a_get(nobody: str) -> None:
    with small_client(nobody) as client:
        region = client.register(bytearray(100))
        block = Block(b"k" * 32, region, 0, 100)
        begun_s = time.monotonic()
        with pytest.raises(NodeUnavailable, match="no node at "):
            client.reserve([block])
        (outcome,) = client.get([block])
        assert isinstance(outcome, Miss)
        assert outcome.reason is MissReason.NODE_AWAY
        with pytest.raises(NodeUnavailable):
            client.put_inline(block.key, b"x")
        inline = client.get_inline(block.key, 1)
        assert isinstance(inline, Miss)
        assert inline.reason is MissReason.NODE_AWAY
        with pytest.raises(NodeUnavailable):
            client.status()
        assert time.monotonic() - begun_s < WAIT_S


def test_an_unresponsive_node_costs_a_get_its_deadline_and_no_more(node: NodeProcess) -> None:
    rig = ClientWithBuffers(node)
    rig.client.reserve([rig.block(0)]).give_back()  # attached
    stop(node.pid)
    try:
        begun_s = time.monotonic()
        (outcome,) = rig.client.get([rig.wanted(rig.block(0))], timeout_s=1.0)
        assert isinstance(outcome, Miss)
        assert outcome.reason is MissReason.NODE_AWAY
        assert time.monotonic() - begun_s < 5.0
        wait_until(lambda: not rig.client._core.breaker.is_open, "the client tries again")
        begun_s = time.monotonic()  # and again where the client has to attach first
        (outcome,) = rig.client.get([rig.wanted(rig.block(0))], timeout_s=1.0)
        assert isinstance(outcome, Miss)
        assert time.monotonic() - begun_s < 5.0
    finally:
        subprocess.run(["kill", "-CONT", str(node.pid)], check=True)
    # The link was ended, because a late write could not be ruled out otherwise; the next call makes a new one.
    rig.client.status(wait_s=WAIT_S)
    rig.client.reserve([rig.block(0)]).give_back()
    rig.close()


def test_a_full_drive_evicts_and_reports_the_evictions(tmp_path: Path) -> None:
    with NodeProcess(tmp_path / "node", capacity="24MiB") as node:
        rig = ClientWithBuffers(node, slots=8)
        put: list[Block] = []
        for start in range(0, 64, 8):
            rig.flags[0].store(0)
            blocks = [Block(rig.key(start + i), rig.from_region, i * MIB, MIB, threshold=1) for i in range(8)]
            puts = rig.client.reserve(blocks).arm(rig.flags[0])
            rig.flags[0].store(1)
            assert [result.error for result in puts.wait(WAIT_S)] == [None] * 8
            put += blocks
        served = 0
        for block in put:
            (outcome,) = rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)
            if isinstance(outcome, Miss):
                assert outcome.reason is MissReason.EVICTED
            else:
                assert rig.is_exact(block)
                served += 1
        assert 16 <= served <= 23  # of 24 MiB: 1 MiB and a page each, the superblocks, and what is kept free
        rig.close()


def test_slots_and_key_of_a_closed_client_are_not_given_to_another(node: NodeProcess) -> None:
    script = (
        "import sys, os, mmap\n"
        "from kvstore.client import Block, Client\n"
        "client = Client(sys.argv[1], slots=8, block_bytes_max=1 << 20)\n"
        "region = client.register(bytearray(1 << 20))\n"
        "client.reserve([Block(bytes([i]) * 32, region, 0, 1 << 20) for i in range(8)])\n"
        "os.kill(os.getpid(), 9)\n"
    )
    for _ in range(3):
        ended = subprocess.run([sys.executable, "-c", script, node.target], check=False, timeout=WAIT_S)
        assert ended.returncode == -9
    rig = ClientWithBuffers(node)
    _until(lambda: rig.client.status().connections == 0)
    rig.close()


def test_leases_that_are_neither_used_nor_returned_end_the_connection(tmp_path: Path) -> None:
    with small_node(tmp_path / "node") as node:
        rig = ClientWithBuffers(node, slots=2)
        rig.client.reserve([rig.block(0)], lease_ms=100)  # neither armed nor given back
        assert rig.client.status().connections == 1
        _until(lambda: rig.client.status().connections == 0)
        assert "an expired lease was not given back" in node.log()
        _until(lambda: not rig.client.is_attached)  # it hears of that a little later
        rig.client.reserve([rig.block(0)]).give_back()  # attaches anew
        rig.close()


def _until(holds: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


# --- starting a node


def test_two_nodes_do_not_share_a_folder(tmp_path: Path) -> None:
    with small_node(tmp_path / "node"), pytest.raises(NodeUnavailable, match="folder"):
        small_node(tmp_path / "node")


def test_a_taken_port_is_reported(tmp_path: Path, node: NodeProcess) -> None:
    port = int(node.target.rpartition(":")[2])
    with pytest.raises(NodeUnavailable, match="is in use by another process"):
        small_node(tmp_path / "other", port=port)


def test_a_node_without_tls_listens_only_on_loopback(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.1", "::"):
        with pytest.raises(ConfigError, match="TLS"):
            NodeConfig(data=tmp_path, host=host)


def test_a_drive_has_a_minimum_size(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="too small"):
        NodeConfig(data=tmp_path, capacity_bytes=1)


def test_an_unknown_eviction_policy_is_refused(tmp_path: Path) -> None:
    assert NodeConfig(data=tmp_path, eviction="s3fifo").eviction == "s3fifo"
    with pytest.raises(ConfigError, match="'fifo' is no eviction policy; choose one of lru, s3fifo"):
        NodeConfig(data=tmp_path, eviction="fifo")


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [("512", 512), ("4KiB", 4096), ("4kb", 4000), ("1.5GiB", 3 << 29), ("2 T", 2 * 10**12), ("1M", 10**6)],
)
def test_sizes_are_parsed_with_units(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1G", "1X", "1e9", "1GG"])
def test_an_invalid_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not a size"):
        parse_size(text)


def test_addresses_are_parsed_with_and_without_ports() -> None:
    assert parse_listen("localhost:70") == ("127.0.0.1", 70)
    assert parse_listen("[::1]:70") == ("::1", 70)
    for text in ("7070", "host:70", "127.0.0.1:x"):
        with pytest.raises(ConfigError, match="HOST:PORT"):
            parse_listen(text)


def test_command_errors_are_one_sentence(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvstore", "serve", "--data", str(tmp_path), "--listen", "8.8.8.8:1"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert ended.returncode == 2
    assert ended.stderr.startswith("kvstore: The node does not listen on 8.8.8.8")
    assert "Traceback" not in ended.stderr


def test_every_error_in_the_tree_is_a_kverror() -> None:
    for error in errors.__all__:
        assert issubclass(getattr(errors, error), KvError)


@pytest.mark.parametrize(
    "call",
    [
        lambda client: client.put_inline(KEY, b"x", expires_unix_ms=-1),
        lambda client: client.put_many_inline([(KEY, b"x")], expires_unix_ms=1 << 64),
        lambda client: client.put([Block(KEY, client.register(bytearray(16)), 0, 16)], expires_unix_ms=-1),
        lambda client: client.get_inline(KEY, -1),
        lambda client: list(client.get_many_inline([(KEY, -1)])),
        lambda client: client.exists([KEY], lengths=[-1]),
        lambda client: client.pin([KEY], time_to_live_ms=1 << 40),
        lambda client: client.looked_up(last=-1),
        lambda client: client.session("ada", "chat").append([KEY], tokens=-1),
        lambda client: client.session("ada", "chat").append([KEY], tokens=1, time_to_live_ms=-1),
        lambda client: client.session("ada", "chat").limit(-1),
        lambda client: client.session("ada", "chat").truncate(-1),
        lambda client: client.session("ada", "chat").fork("other", blocks=-1),
        lambda client: client.session("ada", "chat").protect(-1),
        lambda _: Block(KEY, cast("Any", bytearray(16)), 0, 16),
    ],
)
def test_a_value_that_fits_no_message_raises_a_typed_error(
    node: NodeProcess, call: Callable[[Client], object]
) -> None:
    with small_client(node.target) as client, pytest.raises(UsageError) as raised:
        call(client)
    assert is_one_sentence(raised.value)
