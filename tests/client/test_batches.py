"""Blocks in streams: each with its own answer, in order, exact; of any size, and with memory that is bounded."""

from __future__ import annotations

import asyncio
import random
import threading
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.errors import KeyTaken, NodeUnavailable, ProtocolError
from kvstore.limits import BATCH_BLOCKS_MAX, BATCH_ENDS_TOGETHER, HOT_BYTES_MIN
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key, layout_fingerprint, tenant_name
from kvstore.node import batches_service, inline
from kvstore.node.fair_queue import Shares
from kvstore.node.node import Node
from kvstore.storage.store import Store
from kvstore.wire import batches_pb2 as pb
from kvstore.wire import batches_pb2_grpc, kvstore_pb2
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from kvstore.client import Client
    from kvstore.storage.items import PutItem

pytestmark = pytest.mark.node("in process", capacity_bytes=256 << 20, hot_bytes=HOT_BYTES_MIN)

MIB = 1 << 20
WAIT_S = 20.0


@pytest.fixture
def client(node: NodeInProcess) -> Iterator[Client]:
    with small_client(node.target) as client:
        yield client


def key(number: int) -> bytes:
    return block_key(number.to_bytes(4, "little"))


def payload(number: int, size: int) -> bytes:
    return random.Random(number).randbytes(size)


def held_bytes(node: NodeInProcess) -> int:
    return node.call(lambda one: one.inline._shares.total_bytes)  # type: ignore[no-any-return]


def stub(channel: grpc.Channel) -> Any:
    return batches_pb2_grpc.BatchesStub(channel)  # type: ignore[no-untyped-call]


def name(number: int, length: int) -> kvstore_pb2.BlockName:
    return kvstore_pb2.BlockName(key=key(number), fingerprint=layout_fingerprint(b""), length=length)


def test_blocks_of_all_sizes_are_put_and_fetched_in_one_stream(node: NodeInProcess, client: Client) -> None:
    sizes = [1, 4096, 100_000, MIB - 1, MIB, MIB + 1, 5 * MIB, 3] * 3
    blocks = [(key(number), payload(number, size)) for number, size in enumerate(sizes)]
    results = client.put_many_inline(blocks)
    assert [(one.key, one.durability, one.error) for one in results] == [
        (one, Durability.WRITTEN, None) for one, _ in blocks
    ]
    got = list(client.get_many_inline([(one, len(data)) for one, data in blocks]))
    assert got == [data for _, data in blocks]
    assert client.get_inline(*[(one, len(data)) for one, data in blocks][5]) == blocks[5][1]
    wait_until(lambda: held_bytes(node) == 0, "all memory comes back")


def test_more_blocks_than_fit_in_one_message(client: Client) -> None:
    blocks = [(key(number), b"%d" % number) for number in range(BATCH_BLOCKS_MAX * 2 + 7)]
    assert {one.error for one in client.put_many_inline(iter(blocks))} == {None}
    assert list(client.get_many_inline([(one, len(data)) for one, data in blocks])) == [
        data for _, data in blocks
    ]


def held_back(node: NodeInProcess) -> Callable[[], None]:
    """Have the node's store accept its next put only when the returned function is called."""
    held: list[Callable[[], None]] = []

    def hold(inside: Node) -> None:
        put = inside.store.put

        def later(items: Sequence[PutItem], done: Any) -> None:
            if held:
                put(items, done)
            else:
                held.append(lambda: put(items, done))

        vars(inside.store)["put"] = later

    node.call(hold)
    return lambda: node.call(lambda _: held[0]())


def puts_of(count: int) -> Iterator[pb.PutBatchRequest]:
    for number in range(count):
        yield pb.PutBatchRequest(parts=[pb.PutPart(name=name(number, 1), chunk=b"a")])


def test_a_block_is_answered_while_another_one_is_still_being_written(node: NodeInProcess) -> None:
    release = held_back(node)
    with grpc.insecure_channel(node.target) as channel:
        answers = stub(channel).PutBatch(puts_of(4), timeout=WAIT_S)
        early: list[int] = []
        while len(early) < 3:
            early += [end.number for end in next(answers).ends]
        assert sorted(early) == [1, 2, 3]
        release()
        assert [end.number for answer in answers for end in answer.ends] == [0]


def test_results_that_others_may_follow_soon_are_sent_together(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_service, "BATCH_ENDS_MS", WAIT_S * 2000)
    release = held_back(node)
    with grpc.insecure_channel(node.target) as channel:
        answers = stub(channel).PutBatch(puts_of(BATCH_ENDS_TOGETHER + 1), timeout=WAIT_S)
        assert {end.number for end in next(answers).ends} == set(range(1, BATCH_ENDS_TOGETHER + 1))
        release()
        assert [end.number for end in next(answers).ends] == [0], "none may follow"
        assert list(answers) == []


def test_the_next_message_is_received_while_one_is_processed(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    awaited: list[int] = []
    at_each: list[int] = []
    receive, take = batches_service._next, batches_service._Puts.take

    async def noted(requests: Any) -> Any:
        awaited.append(1)
        return await receive(requests)

    async def taken(puts: Any, message: Any) -> None:
        at_each.append(len(awaited))
        await take(puts, message)

    monkeypatch.setattr(batches_service, "_next", noted)
    monkeypatch.setattr(batches_service._Puts, "take", taken)
    assert {one.error for one in client.put_many_inline([(key(n), bytes(MIB)) for n in range(3)])} == {None}
    assert at_each == [2, 3, 4]


def test_a_stream_of_more_bytes_than_its_share_waits_for_its_own_earlier_blocks(
    node: NodeInProcess, client: Client
) -> None:
    share_bytes = HOT_BYTES_MIN // 2 // 8
    size = 3 * MIB
    blocks = [(key(number), payload(number, size)) for number in range(3 * share_bytes // size)]
    assert {one.error for one in client.put_many_inline(blocks)} == {None}
    assert list(client.get_many_inline([(one, size) for one, _ in blocks])) == [data for _, data in blocks]
    wait_until(lambda: held_bytes(node) == 0, "all memory comes back")


def test_a_blocks_error_has_its_code_and_its_class(node: NodeInProcess, client: Client) -> None:
    client.put_inline(key(1), b"stored with another length")
    with grpc.insecure_channel(node.target) as channel:
        part = pb.PutPart(name=name(1, 1), chunk=b"b")
        asked = pb.PutBatchRequest(tenant=client.tenant, parts=[part])
        (end,) = (end for answer in stub(channel).PutBatch(iter([asked])) for end in answer.ends)
    assert (end.error.name, end.error.code) == ("KeyTaken", kvstore_pb2.ERROR_CODE_KEY_TAKEN)


def test_each_block_has_its_own_result(client: Client) -> None:
    client.put_inline(key(1), b"stored with another length")
    results = client.put_many_inline([(key(0), b"a"), (key(1), b"b"), (key(2), b"c")])
    assert [type(one.error) for one in results] == [type(None), KeyTaken, type(None)]
    got = list(client.get_many_inline([(key(0), 1), (key(9), 1), (key(1), 1), (key(2), 1)]))
    assert [got[0], got[3]] == [b"a", b"c"]
    assert [one.reason for one in got if isinstance(one, Miss)] == [MissReason.UNKNOWN, MissReason.LENGTH]
    assert client.put_many_inline([]) == []
    assert list(client.get_many_inline([])) == []


def test_blocks_that_are_only_on_the_drive_are_fetched_too(tmp_path: Path) -> None:
    blocks = [(key(number), payload(number, 200_000)) for number in range(40)]
    with NodeInProcess(tmp_path / "again") as node, small_client(node.target) as client:
        client.put_many_inline(blocks)
    with NodeInProcess(tmp_path / "again") as node, small_client(node.target) as client:
        wanted = [(one, len(data)) for one, data in blocks]
        assert list(client.get_many_inline(wanted)) == [data for _, data in blocks]
        some = client.get_many_inline(wanted)
        assert next(some) == blocks[0][1]
        some.close()  # type: ignore[attr-defined]
        wait_until(lambda: held_bytes(node) == 0, "what was read ahead for who wants no more is given back")


@pytest.mark.parametrize(
    "parts",
    [
        [pb.PutPart(chunk=b"of no block")],
        [pb.PutPart(name=name(1, 4), chunk=b"ab"), pb.PutPart(name=name(2, 1), chunk=b"c")],
        [pb.PutPart(name=name(1, 4), chunk=b"abcde")],
        [pb.PutPart(name=name(1, 4), chunk=b"abcd"), pb.PutPart(chunk=b"of no block")],
        [pb.PutPart(name=name(1, 4), chunk=b"abc")],
        [pb.PutPart(name=name(1, 0))],
        [pb.PutPart(name=name(1, 1 << 40))],
        [pb.PutPart(name=kvstore_pb2.BlockName(key=b"short", length=1), chunk=b"a")],
    ],
)
def test_an_inconsistent_stream_is_ended(node: NodeInProcess, parts: list[pb.PutPart]) -> None:
    with grpc.insecure_channel(node.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(stub(channel).PutBatch(iter([pb.PutBatchRequest(parts=parts)]), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: held_bytes(node) == 0, "its memory comes back")


@pytest.mark.parametrize("at_once", [1, 2])
def test_blocks_completed_before_a_break_are_kept(node: NodeInProcess, client: Client, at_once: int) -> None:
    parts = [pb.PutPart(name=name(1, 4), chunk=b"abcd"), pb.PutPart(chunk=b"too much")]
    messages = [pb.PutBatchRequest(parts=parts[at : at + at_once]) for at in range(0, 2, at_once)]
    with grpc.insecure_channel(node.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(stub(channel).PutBatch(iter(messages), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    wait_until(lambda: client.get_inline(key(1), 4) == b"abcd", "it is kept")


def test_a_client_that_reads_no_results_is_ended_while_it_sends_blocks(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, streams = threading.Event(), list[Any]()

    class Unread:
        """A call whose client reads nothing."""

        def peer(self) -> str:
            return "ipv4:127.0.0.1:1"

        async def write(self, _: bytes) -> None:
            begun.set()
            await asyncio.Future()

    made = batches_service._Puts.__init__

    def make(puts: Any, at: Any, _: Any, *more: Any) -> None:
        made(puts, at, Unread(), *more)  # type: ignore[arg-type] # what is used of one
        streams.append(puts)

    monkeypatch.setattr(batches_service._Puts, "__init__", make)
    monkeypatch.setattr(batches_service, "BATCH_ENDS_UNREAD_MAX", 4)
    monkeypatch.setattr(inline, "INLINE_TIMEOUT_MS", 2000)

    def messages() -> Iterator[pb.PutBatchRequest]:
        yield pb.PutBatchRequest(parts=[pb.PutPart(name=name(0, 1), chunk=b"a")])
        assert begun.wait(WAIT_S)
        parts = [pb.PutPart(name=name(number, 1), chunk=b"a") for number in range(1, 5)]
        yield pb.PutBatchRequest(parts=parts)
        wait_until(lambda: len(streams[0]._ends) == len(parts), "as many results are unread as may be")
        yield pb.PutBatchRequest(parts=[pb.PutPart(name=name(5, 1), chunk=b"a")])

    with grpc.insecure_channel(node.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(stub(channel).PutBatch(messages(), timeout=WAIT_S))
    assert caught.value.details() == "A reader made no progress within 2000 ms."


def test_a_break_lets_the_message_being_sent_finish(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise gRPC could not send the status, and the call would end only at its caller's deadline."""
    begun, told = threading.Event(), []

    class Slow:
        """A call whose messages take a while to be sent."""

        def __init__(self, context: Any) -> None:
            self._context = context

        def peer(self) -> str:
            return str(self._context.peer())

        async def write(self, message: bytes) -> None:
            told.append("began")
            begun.set()
            await asyncio.sleep(0.1)
            await self._context.write(message)
            told.append("ended")

    made = batches_service._Puts.__init__
    monkeypatch.setattr(
        batches_service._Puts,
        "__init__",
        lambda puts, at, context, *more: made(puts, at, Slow(context), *more),  # type: ignore[arg-type] # what is used of one
    )

    def messages() -> Iterator[pb.PutBatchRequest]:
        yield pb.PutBatchRequest(parts=[pb.PutPart(name=name(1, 4), chunk=b"abcd")])
        assert begun.wait(WAIT_S)
        yield pb.PutBatchRequest(parts=[pb.PutPart(chunk=b"too much")])

    with grpc.insecure_channel(node.target) as channel, pytest.raises(grpc.RpcError) as caught:
        list(stub(channel).PutBatch(messages(), timeout=WAIT_S))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert told == ["began", "ended"]


def test_a_stalled_stream_is_ended_and_its_memory_freed(
    node: NodeInProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = client.put_many_inline([(key(number), bytes(4 * MIB)) for number in range(8)])
    assert not any(one.error for one in stored)
    held: list[int] = []
    hold = Shares.hold

    def noted(shares: Shares, who: Any, size_bytes: int) -> None:
        held.append(size_bytes)
        hold(shares, who, size_bytes)

    monkeypatch.setattr(Shares, "hold", noted)
    monkeypatch.setattr(inline, "INLINE_TIMEOUT_MS", 300)
    with grpc.insecure_channel(node.target) as channel:

        def puts() -> Iterator[pb.PutBatchRequest]:
            yield pb.PutBatchRequest(parts=[pb.PutPart(name=name(99, MIB), chunk=b"only this")])
            wait_until(lambda: bool(begun) and begun[0].done(), "the node ends it")

        begun: list[Any] = []  # the call asks for its messages before it is given to us
        put = stub(channel).PutBatch(puts(), timeout=WAIT_S)
        begun.append(put)
        with pytest.raises(grpc.RpcError) as caught:
            list(put)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        held.clear()
        get = stub(channel).GetBatch(
            iter([pb.GetBatchRequest(blocks=[name(number, 4 * MIB) for number in range(8)])]), timeout=WAIT_S
        )
        # Whoever looks only now and then may miss the 300 ms for which it holds memory.
        wait_until(lambda: bool(held), "it holds memory")
        wait_until(lambda: held_bytes(node) == 0, "a reader that takes nothing in is ended")
        get.cancel()


def test_a_read_that_is_under_way_when_the_node_ends_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fabric is closed before the drive, whose last reads can't be kept for it."""
    reads: list[inline.PendingRead] = []
    close = Node.close

    async def close_and_read(inside: Node) -> None:
        await close(inside)
        tenant, wanted = tenant_name("default", inside.store.salt), name(1, MIB)
        inside.hot.erased([(tenant, wanted.key)])
        reads.append(inside.inline.begin_get("peer", tenant, wanted.key, wanted.fingerprint, MIB))
        assert not reads[0].has_come

    monkeypatch.setattr(Node, "close", close_and_read)
    with NodeInProcess(tmp_path / "node") as node, small_client(node.target) as client:
        client.put_inline(key(1), payload(1, MIB))
    assert reads[0].has_come
    with Store.open(tmp_path / "node", capacity_bytes=None, clock=SystemClock()) as store:
        assert store.drives[0]._index.was_clean


@pytest.mark.parametrize("comes_first", [False, True])
def test_a_block_read_for_a_call_that_is_cancelled_just_then_is_given_back(*, comes_first: bool) -> None:
    async def read() -> None:
        given_back = list[bool]()
        pending = inline.PendingRead()
        waiting = asyncio.create_task(pending.read())
        await asyncio.sleep(0)
        came: Any = SimpleNamespace(close=lambda: given_back.append(True))
        if comes_first:
            pending.arrived(came)
        waiting.cancel()
        if not comes_first:
            pending.arrived(came)
        await asyncio.wait([waiting])
        assert waiting.cancelled()
        assert given_back == [True]

    asyncio.run(read())


def test_an_absent_node_is_a_result_for_each_block() -> None:
    with small_client("127.0.0.1:1") as client:
        results = client.put_many_inline([(key(0), b"a"), (key(1), b"b")], timeout_s=5)
        assert all(isinstance(one.error, NodeUnavailable) for one in results)
        got = list(client.get_many_inline([(key(0), 1), (key(1), 1)], timeout_s=5))
        assert [one.reason for one in got if isinstance(one, Miss)] == [MissReason.NODE_AWAY] * 2


def test_a_stream_that_breaks_early_has_a_result_for_each_block_of_a_list() -> None:
    blocks = [(key(number), bytes(MIB)) for number in range(20)]
    with small_client("127.0.0.1:1") as client:
        results = client.put_many_inline(blocks, timeout_s=5)
        assert [one.key for one in results] == [one for one, _ in blocks]
        assert all(isinstance(one.error, NodeUnavailable) for one in results)
        assert len(client.put_many_inline(iter(blocks), timeout_s=5)) < len(blocks), (
            "these may cost something to make"
        )


def test_an_empty_request_is_refused(node: NodeInProcess) -> None:
    with grpc.insecure_channel(node.target) as channel:
        for call in (stub(channel).PutBatch, stub(channel).GetBatch):
            with pytest.raises(grpc.RpcError) as caught:
                list(call(iter([]), timeout=WAIT_S))
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ProtocolError.__name__ in str(caught.value.trailing_metadata())
