"""Puts and gets of registered memory over gRPC: what the contract (`tests/testing/test_contract.py`) doesn't show.

Sources are copied when they are sent and not read afterwards, regions are held for as long as they are needed, and a
client without libfabric says once that it uses gRPC.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any, cast

import pytest

from kvstore import Block, Client, FlagWords, Hit, Miss, MissReason, block_key
from kvstore.client import ClusterBlock, ClusterClient, PutResult
from kvstore.client.own_address import OwnSide
from kvstore.errors import (
    Closed,
    ConfigError,
    DeadlineExceeded,
    FabricUnavailable,
    KvError,
    NodeUnavailable,
    NotAuthenticated,
    NotRegistered,
    Overloaded,
    RegionBusy,
    UsageError,
)
from kvstore.testing import LocalNode
from nic_offload.pieces import Pieces
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.demo.node_process import NodeProcess
    from tests.conftest import HasTarget

pytestmark = pytest.mark.node("shared")

SIZE = 4096
WAIT_S = 20.0


class GrpcClient:
    """A client without a fabric, and memory."""

    def __init__(self, node: HasTarget, **more: Any) -> None:
        self.client = Client(node.target, **{"transport": "grpc", "tenant": f"{time.monotonic_ns()}", **more})
        self.memory = bytearray(16 * SIZE)
        self.kv = self.client.register(self.memory)

    def block(self, number: int, **more: Any) -> Block:
        key = block_key(b"grpc", bytes([number]))
        return Block(key, self.kv, offset=number * SIZE, length=SIZE, **more)

    def fill(self, number: int) -> None:
        self.memory[:] = bytes([number]) * len(self.memory)


@pytest.fixture
def rig(node: NodeProcess) -> Iterator[GrpcClient]:
    rig = GrpcClient(node)
    with rig.client:
        yield rig


class Held:
    """Streams of puts that wait before each block."""

    def __init__(self, rig: GrpcClient, monkeypatch: pytest.MonkeyPatch) -> None:
        self.came, self.goes_on = threading.Semaphore(0), threading.Semaphore(0)
        inline = rig.client._inline
        put_many = inline.put_many

        def held(blocks: Any, **more: Any) -> Any:
            return put_many(self._waiting(blocks), **more)

        monkeypatch.setattr(inline, "put_many", held)

    def _waiting(self, blocks: Any) -> Any:
        while True:
            self.came.release()
            assert self.goes_on.acquire(timeout=WAIT_S)
            try:
                one = next(blocks)
            except StopIteration:
                return
            yield one


def test_a_region_is_busy_until_its_puts_have_ended(rig: GrpcClient) -> None:
    with FlagWords.create(1) as flags:
        puts = rig.client.arm([rig.block(0)], flags[0])
        with pytest.raises(RegionBusy):
            rig.kv.close()
        flags[0].store(1)
        (result,) = puts.wait(WAIT_S)
    assert result.error is None
    assert 0 < result.fired_ns <= result.landed_ns == result.durable_ns
    rig.kv.close()
    with pytest.raises(NotRegistered):
        rig.client.put([Block(block_key(b"closed"), rig.kv, 0, SIZE)])


def test_memory_of_an_abandoned_put_is_no_longer_read(
    rig: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    held = Held(rig, monkeypatch)
    rig.fill(1)
    puts = rig.client.arm([rig.block(0), rig.block(1)])
    assert held.came.acquire(timeout=WAIT_S)
    held.goes_on.release()
    assert held.came.acquire(timeout=WAIT_S)  # the first one was copied, the second was not
    puts.abandon()
    assert puts.has_ended
    rig.fill(2)
    rig.kv.close()
    held.goes_on.release()
    assert [type(one.error) for one in puts.wait(WAIT_S)] == [DeadlineExceeded] * 2
    wait_until(
        lambda: isinstance(rig.client.get_inline(rig.block(0).key, SIZE), bytes), "the first is stored"
    )
    assert rig.client.get_inline(rig.block(0).key, SIZE) == b"\1" * SIZE
    assert isinstance(rig.client.get_inline(rig.block(1).key, SIZE), Miss)


def test_a_closed_client_reads_no_more_memory(rig: GrpcClient, monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(rig, monkeypatch)
    with FlagWords.create(1) as flags:
        waiting = rig.client.arm([rig.block(2)], flags[0])
        sending = rig.client.arm([rig.block(0), rig.block(1)])
        assert held.came.acquire(timeout=WAIT_S)
        for _ in range(3):
            held.goes_on.release()
        rig.client.close()
    for puts in (waiting, sending):
        assert {type(one.error) for one in puts.wait(0)} <= {NodeUnavailable, type(None)}
        assert puts.has_ended
    assert waiting.progress()[0] == 0


def test_blocks_that_fire_together_are_sent_in_one_stream(
    rig: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    streams = []
    inline = rig.client._inline
    put_many = inline.put_many

    def counted(*given: Any, **more: Any) -> Any:
        streams.append(more)
        return put_many(*given, **more)

    monkeypatch.setattr(inline, "put_many", counted)
    with FlagWords.create(1) as flags:
        puts = rig.client.arm([rig.block(number) for number in range(16)], flags[0])
        with rig.client._core.lock:  # the pump waits meanwhile
            flags[0].store(1)
            wait_until(lambda: puts.progress()[0] == 16, "all have fired")
        assert [one.error for one in puts.wait(WAIT_S)] == [None] * 16
    assert len(streams) <= 2, "one for what came first, and one for what came while its thread began"


def test_a_block_is_named_before_it_fires_or_not_sent(rig: GrpcClient) -> None:
    rig.fill(7)
    with FlagWords.create(1) as flags:
        puts = rig.client.arm([Block(b"", rig.kv, 0, SIZE), Block(b"", rig.kv, 0, SIZE)], flags[0])
        puts.name(0, block_key(b"named"))
        flags[0].store(1)
        named, unnamed = puts.wait(WAIT_S)
    assert (named.key, named.error) == (block_key(b"named"), None)
    assert isinstance(unnamed.error, UsageError)
    assert rig.client.get_inline(block_key(b"named"), SIZE) == b"\7" * SIZE


def test_pieces_and_parts_are_returned_to_their_places(rig: GrpcClient) -> None:
    rig.fill(0)
    rig.memory[:200], rig.memory[SIZE : SIZE + 100] = b"a" * 200, b"b" * 100
    key = block_key(b"pieces")
    block = Block.of_pieces(key, Pieces.of(rig.kv, [(SIZE, 100), (0, 200)]))
    assert [one.error for one in rig.client.put([block])] == [None]
    assert rig.client.get_inline(key, 300) == b"b" * 100 + b"a" * 200
    rig.fill(0)
    part = Block.of_pieces(key, Pieces.of(rig.kv, [(0, 50), (8000, 100)]), whole=300, skip=50)
    assert rig.client.get([part, block]) == [Hit(key)] * 2
    assert rig.memory[8000:8100] == b"a" * 100
    assert rig.memory[:200] == b"a" * 200
    assert rig.memory[SIZE : SIZE + 100] == b"b" * 100
    assert rig.memory.count(0) == len(rig.memory) - 400


def test_blocks_arrive_in_order_and_a_waiter_gets_the_first(
    rig: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.fill(3)
    blocks = [rig.block(number) for number in range(4)]
    rig.client.put(blocks)
    goes_on = threading.Event()
    inline = rig.client._inline
    get_many = inline.get_many

    def slow(*given: Any, **more: Any) -> Any:
        for number, outcome in enumerate(get_many(*given, **more)):
            if number == 2:
                assert goes_on.wait(WAIT_S)
            yield outcome

    monkeypatch.setattr(inline, "get_many", slow)
    rig.fill(0)
    told: list[Any] = []
    get = rig.client.getting([*blocks[:3], rig.block(9)], ended=told.append)
    assert [type(one) for one in get.wait(2)] == [Hit, Hit]
    assert rig.memory[: 2 * SIZE] == b"\3" * (2 * SIZE)
    assert not told
    with pytest.raises(RegionBusy):
        rig.kv.close()
    goes_on.set()
    outcomes = get.wait()
    assert [type(one) for one in outcomes] == [Hit, Hit, Hit, Miss]
    assert told == [outcomes]
    rig.kv.close()


def busy_at_first(rig: GrpcClient, monkeypatch: pytest.MonkeyPatch, keys: set[bytes]) -> list[int]:
    """Refuse these blocks once as overloaded; returns the number of blocks requested in each stream."""
    inline, asked = rig.client._inline, list[int]()
    get_many = inline.get_many

    def busy(wanted: Any, **more: Any) -> Any:
        asked.append(len(wanted))
        for (key, _), outcome in zip(wanted, get_many(wanted, **more), strict=True):
            yield Miss(MissReason.BUSY) if key in keys and len(asked) == 1 else outcome

    monkeypatch.setattr(inline, "get_many", busy)
    return asked


def test_a_block_is_requested_again_when_the_node_is_busy(
    rig: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.fill(6)
    blocks = [rig.block(number) for number in range(6)]
    rig.client.put(blocks)
    rig.fill(0)
    asked = busy_at_first(rig, monkeypatch, {blocks[0].key, blocks[3].key})
    assert rig.client.get(blocks) == [Hit(one.key) for one in blocks]
    assert rig.memory[: 6 * SIZE] == b"\6" * (6 * SIZE)
    assert asked == [6, 2]
    asked = busy_at_first(rig, monkeypatch, {one.key for one in blocks})
    assert rig.client.get(blocks, timeout_s=0.001) == [Miss(MissReason.BUSY)] * 6, "there was no time for it"


def test_many_threads_get_stored_blocks_without_a_miss(node: NodeProcess) -> None:
    rig = GrpcClient(node, block_bytes_max=1 << 20)
    with rig.client as client:
        memory = bytearray(32 << 20)
        kv = client.register(memory)
        blocks = [Block(block_key(b"many", bytes([n])), kv, n << 19, 1 << 19) for n in range(64)]
        memory[:] = b"".join(bytes([n]) * (1 << 19) for n in range(64))
        assert [one.error for one in client.put(blocks[:32]) + client.put(blocks[32:])] == [None] * 64
        memory[:] = bytes(len(memory))
        outcomes: list[Any] = []
        threads = [
            threading.Thread(target=lambda n=n: outcomes.extend(client.get(blocks[n * 8 : n * 8 + 8])))
            for n in range(8)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(60)
        assert {str(one) for one in outcomes if isinstance(one, Miss)} == set()
        assert len(outcomes) == 64
        assert all(memory[n << 19 : (n + 1) << 19] == bytes([n]) * (1 << 19) for n in range(64))


def test_puts_for_which_the_node_has_no_memory_are_retried(
    rig: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    inline, sent = rig.client._inline, list[int]()
    put_many = inline.put_many

    def full(blocks: Any, **more: Any) -> list[PutResult]:
        results = put_many(blocks, **more)
        sent.append(len(results))
        if len(sent) == 1:
            results[1] = PutResult(results[1].key, None, Overloaded("There is no memory left."))
        return results

    monkeypatch.setattr(inline, "put_many", full)
    results = rig.client.put([rig.block(number) for number in range(3)])
    assert [one.error for one in results] == [None] * 3
    assert sum(sent) == 4


def test_blocks_not_accepted_by_a_broken_stream_have_its_error(
    rig: GrpcClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = NotAuthenticated("The token is not valid.")
    monkeypatch.setattr(
        rig.client._inline, "put_many", lambda blocks, **_: [PutResult(next(blocks)[0], None, broken)]
    )
    results = rig.client.put([rig.block(number) for number in range(3)])
    assert [one.error for one in results] == [broken] * 3


def test_a_region_is_busy_during_a_get_into_it(rig: GrpcClient, monkeypatch: pytest.MonkeyPatch) -> None:
    rig.client.put([rig.block(0)])
    came, goes_on = threading.Event(), threading.Event()
    inline = rig.client._inline
    get_many = inline.get_many

    def slow(*given: Any, **more: Any) -> Any:
        came.set()
        assert goes_on.wait(WAIT_S)
        yield from get_many(*given, **more)

    monkeypatch.setattr(inline, "get_many", slow)
    outcomes: list[Any] = []
    getting = threading.Thread(target=lambda: outcomes.extend(rig.client.get([rig.block(0)])))
    getting.start()
    assert came.wait(WAIT_S)
    with pytest.raises(RegionBusy, match="wait for its puts and gets"):
        rig.kv.close()
    goes_on.set()
    getting.join(WAIT_S)
    assert outcomes == [Hit(rig.block(0).key)]
    rig.kv.close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_callback_may_raise_or_close_the_client(rig: GrpcClient) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("the caller's own")

    assert [type(one) for one in rig.client.getting([rig.block(9)], ended=fail).wait()] == [Miss]
    closed = rig.client.getting([rig.block(9)], ended=lambda _: rig.client.close())
    assert [type(one) for one in closed.wait()] == [Miss]
    with pytest.raises(Closed):
        rig.client.get([rig.block(9)])


def test_a_callback_holds_up_no_put_of_the_client(rig: GrpcClient) -> None:
    """A client that is closed by it waits for the thread that fires them."""
    errors: list[KvError | None] = []
    with FlagWords.create(1) as flags:
        puts = rig.client.arm([rig.block(1)], flags[0])

        def fire(_: object) -> None:
            flags[0].store(1)
            errors.extend(one.error for one in puts.wait(20))

        rig.client.getting([rig.block(9)], ended=fire).wait()
    assert errors == [None]


@pytest.mark.parametrize("transport", ["fabric", "grpc"])
def test_mistakes_are_usage_errors_with_every_transport(node: NodeProcess, transport: str) -> None:
    rig = GrpcClient(node, transport=transport)
    block, wrong = rig.block(0), cast("Any", 7)
    with rig.client as client:
        for call in (
            lambda: client.get([block], timeout_s=float("nan")),
            lambda: client.get([block], timeout_s=cast("Any", "soon")),
            lambda: client.put([block], timeout_s=cast("Any", b"")),
            lambda: client.arm([block], wrong),
            lambda: client.arm([block], durability=wrong),
            lambda: client.arm([rig.block(1, threshold=-1)]),
            lambda: client.arm([rig.block(1, threshold=1 << 64)]),
            lambda: client.register(bytearray()),
        ):
            with pytest.raises(UsageError):
                call()
        assert client.put([block], timeout_s=1e300)[0].error is None
        assert client.get([block], timeout_s=float("inf")) == [Hit(block.key)]
        assert client.getting([block]).wait(0) == []


def test_an_absent_node_is_a_miss_and_an_error_within_the_deadline() -> None:
    with LocalNode() as node:
        rig = GrpcClient(node, get_timeout_ms=2_000)
        with rig.client as client:
            client.attach()
            assert not client.is_attached
            node.kill()
            began_s = time.monotonic()
            for (miss,) in (client.get([rig.block(0)]), client.getting([rig.block(0)]).wait()):
                assert isinstance(miss, Miss)
                assert miss.reason is MissReason.NODE_AWAY
            (result,) = client.put([rig.block(0)], timeout_s=5)
            assert isinstance(result.error, NodeUnavailable)
            with pytest.raises(NodeUnavailable):
                client.attach()
            assert time.monotonic() - began_s < 15


def test_without_libfabric_blocks_are_sent_over_grpc_and_that_is_logged_once(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def missing(_: OwnSide, **_how: bool) -> None:
        raise FabricUnavailable("libfabric could not be loaded; install libfabric1.")

    monkeypatch.setattr(OwnSide, "open_fabric", missing)
    with caplog.at_level(logging.WARNING):
        rig = GrpcClient(node, transport="auto")
        with rig.client as client:
            assert client.transport == "grpc"
            rig.fill(5)
            assert client.put([rig.block(0)])[0].error is None
            assert client.get([rig.block(0)]) == [Hit(rig.block(0).key)]
            with pytest.raises(FabricUnavailable, match="use `arm`"):
                client.reserve([rig.block(1)])
    (line,) = [one for one in caplog.records if "gRPC" in one.getMessage()]
    assert "install libfabric1" in line.getMessage()
    for transport, provider in (("fabric", None), ("auto", "net")):
        other = Client(node.target, transport=transport, provider=provider)
        with other, pytest.raises(FabricUnavailable):
            other.register(bytearray(SIZE))
    with pytest.raises(ConfigError, match="transport is auto, fabric, grpc or memory, not 'pigeon'"):
        Client(node.target, transport="pigeon")


def test_a_cluster_without_a_fabric_stores_and_finds_replicas() -> None:
    with (
        LocalNode() as one,
        LocalNode() as two,
        FlagWords.create(1) as flags,
        ClusterClient([one.target, two.target], replicas=2, acks="all", transport="grpc") as client,
    ):
        memory = bytearray(b"KV! " * SIZE)
        kv = client.register(memory)
        blocks = [
            ClusterBlock(block_key(b"c", bytes([n])), kv, n * 1024, 1024, threshold=2) for n in range(16)
        ]
        puts = client.arm(blocks, flags[0])
        flags[0].store(2)
        assert [one.error for one in puts.wait(WAIT_S)] == [None] * 16
        memory[:] = bytes(len(memory))
        one.kill()
        assert [type(one) for one in client.get(blocks, timeout_s=WAIT_S)] == [Hit] * 16
        assert memory == b"KV! " * SIZE
        assert client.transport == "grpc"
