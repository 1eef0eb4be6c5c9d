"""Calls with many blocks yield the node's thread between steps, and wait for their tenant's turn."""

from __future__ import annotations

import asyncio
import operator
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from kvstore.client import Block
from kvstore.limits import BATCH_READS_AHEAD, PAGE_BYTES, SLOTS_A_STEP, TURN_STEP_BLOCKS
from kvstore.names import block_key
from kvstore.node import connection_calls
from kvstore.node.audit import Audit
from kvstore.node.authorization import Gate
from kvstore.node.http import Question
from kvstore.node.pages import http_server
from kvstore.node.prefetch import Wish
from kvstore.node.tenants import Tenants
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from nic_offload.sockaddr import SocketAddress, ip_of
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence

    from kvstore.client import Client
    from kvstore.node.node import Node
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

KEYS = [block_key(b"steps", bytes([number])) for number in range(200)]
WAIT_S = 20.0
RESTS_S = 0.2


@pytest.fixture
def client(node: NodeInProcess) -> Iterator[Client]:
    with small_client(node.target, slots=len(KEYS), block_bytes_max=PAGE_BYTES) as client:
        client.put_many_inline((key, key) for key in KEYS)
        yield client


def others(client: Client) -> list[Block]:
    """The same number of blocks, none of them stored."""
    region = client.register(bytearray(PAGE_BYTES))
    return [Block(bytes(reversed(key)), region, 0, 64) for key in KEYS]


@pytest.mark.parametrize(
    "call",
    [
        lambda one: one.pin(KEYS).close(),
        lambda one: one.delete(KEYS),
        lambda one: one.prefetch(KEYS),
        lambda one: one.put_many_inline((bytes(reversed(key)), key) for key in KEYS),
        lambda one: list(one.get_many_inline([(key, len(key)) for key in KEYS])),
        lambda one: one.erase_user("nobody"),
        lambda one: one.erase_tenant(),
    ],
)
def test_a_call_of_many_blocks_waits_for_its_tenants_turn(
    node: NodeInProcess, client: Client, call: Callable[[Client], Any]
) -> None:
    node.call(lambda one: one.turns._begin())
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(call, client)
        try:
            with pytest.raises(TimeoutError):
                done.result(0.3)
        finally:
            node.call(lambda one: one.turns._give())
        done.result(WAIT_S)


@pytest.mark.parametrize(
    ("part", "call"),
    [
        ("store.hold", lambda one: one.pin(KEYS).close()),
        ("store.delete", lambda one: one.delete(KEYS)),
        ("store.put", lambda one: one.put_many_inline((bytes(reversed(key)), key) for key in KEYS)),
        ("store.put", lambda one: one.reserve(others(one)).arm(None).wait(WAIT_S)),
        ("store.delete", lambda one: one.erase_tenant()),
        ("reserve", lambda one: one.reserve(others(one)).give_back()),
        ("fetches.enqueue", lambda one: one.get(others(one))),
    ],
)
def test_a_call_of_many_blocks_lets_others_run_between_steps(
    node: NodeInProcess, client: Client, part: str, call: Callable[[Client], Any]
) -> None:
    at: list[int] = []
    turned = 0

    def count(inside: Node) -> asyncio.Task[None]:
        do, (*rooms, name) = operator.attrgetter(part)(inside), part.split(".")

        def noted(*told: Any, **named: Any) -> Any:
            things = next(one for one in told if isinstance(one, list | tuple))
            at.extend([turned] * len(things))
            return do(*told, **named)

        vars(operator.attrgetter(rooms[0])(inside) if rooms else inside)[name] = noted

        async def turn() -> None:
            nonlocal turned
            while True:
                turned += 1
                await asyncio.sleep(0)

        return asyncio.create_task(turn())

    counting = node.call(count)
    try:
        call(client)
    finally:
        node.call(lambda _: counting.cancel())
    assert len(at) == len(KEYS)
    step = SLOTS_A_STEP if part in ("reserve", "fetches.enqueue") else TURN_STEP_BLOCKS
    assert max(map(at.count, set(at))) <= 2 * step  # the first of a stream wait for no turn


def test_an_erasure_that_finds_nothing_lets_others_run_between_its_searches(
    node: NodeInProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user without data is searched for among all blocks of the tenant."""
    monkeypatch.setattr("kvstore.storage.drive.ERASE_LOOK_BLOCKS", 20)
    begun: list[int] = []

    def count(inside: Node) -> None:
        of = inside.turns.of

        def noted(*asked: Any) -> Any:
            begun.append(1)
            return of(*asked)

        vars(inside.turns)["of"] = noted

    node.call(count)
    client.erase_user("nobody")
    assert len(begun) >= len(KEYS) // 20


def test_a_prefetch_of_many_blocks_examines_few_in_a_turn(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked: list[int] = []
    add = Wish.add

    def noted(wish: Wish, keys: Sequence[bytes]) -> bool:
        looked.append(len(keys))
        return add(wish, keys)

    monkeypatch.setattr(Wish, "add", noted)
    client.prefetch(KEYS)
    assert sum(looked) == len(KEYS)
    assert max(looked) == TURN_STEP_BLOCKS


def test_a_prefetch_of_blocks_in_memory_lets_others_run_between_its_rounds(
    node: NodeInProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not client.prefetch(KEYS).unread
    monkeypatch.setattr("kvstore.node.prefetch.FETCHES_A_ROUND", 10)
    rounds: list[int] = []

    def count(inside: Node) -> None:
        pump, has = inside.prefetches.pump, inside.hot.pages.has

        def pumped() -> None:
            rounds.append(0)
            pump()

        def found(generation: int) -> bool:
            rounds[-1] += 1
            return has(generation)

        vars(inside.prefetches)["pump"], vars(inside.hot.pages)["has"] = pumped, found

    node.call(count)
    assert not client.prefetch(KEYS).unread
    assert max(rounds) == 10
    assert sum(rounds) == len(KEYS)


def test_reflection_requests_wait_for_their_tenants_turn(node: NodeInProcess) -> None:
    """One stream may send any number of requests, so each one waits."""
    question = reflection_pb2.ServerReflectionRequest(list_services="")
    asked: queue.SimpleQueue[Any] = queue.SimpleQueue()
    with grpc.insecure_channel(node.target) as channel, ThreadPoolExecutor(1) as pool:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answers = stub.ServerReflectionInfo(iter(asked.get, None), timeout=WAIT_S)
        asked.put(question)
        next(answers)
        node.call(lambda one: one.turns._begin())
        asked.put(question)
        told = pool.submit(next, answers)
        try:
            with pytest.raises(TimeoutError):
                told.result(0.3)
        finally:
            node.call(lambda one: one.turns._give())
        told.result(WAIT_S)
        asked.put(None)


def test_a_tenants_pages_are_rendered_one_at_a_time(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another thread renders them, which takes as much from the node's thread as a call."""
    at_once, most = 0, 0

    def rendered(_: object) -> bytes:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        time.sleep(0.05)
        at_once -= 1
        return b"text"

    async def ask(inside: Node) -> list[bytes]:
        gate = Gate(Tenants(inside.store.salt, inside.clock), Audit(inside.clock, None))
        server = http_server(inside, gate, None, ui=False)
        question = Question(gate.tenants.named("default"), {})
        answers = await asyncio.gather(*(server._pages["/metrics"](question) for _ in range(6)))
        return [one.body for one in answers]

    monkeypatch.setattr("kvstore.node.pages.rendered", rendered)
    told = asyncio.run_coroutine_threadsafe(ask(node.node), node._loop).result(WAIT_S)
    assert told == [b"text"] * 6
    assert most == 1


def test_a_stream_of_gets_from_memory_lets_others_run_between_steps(
    node: NodeInProcess, client: Client
) -> None:
    assert len(list(client.get_many_inline([(key, len(key)) for key in KEYS]))) == len(KEYS)
    at: list[int] = []
    turned = 0

    def count(inside: Node) -> asyncio.Task[None]:
        begin = inside.inline.begin_get

        def begin_get(*asked: Any) -> Any:
            at.append(turned)
            return begin(*asked)

        vars(inside.inline)["begin_get"] = begin_get

        async def turn() -> None:
            nonlocal turned
            while True:
                turned += 1
                await asyncio.sleep(0)

        return asyncio.create_task(turn())

    counting = node.call(count)
    try:
        list(client.get_many_inline([(key, len(key)) for key in KEYS]))
    finally:
        node.call(lambda _: counting.cancel())
    assert len(at) == len(KEYS)
    assert max(map(at.count, set(at))) <= TURN_STEP_BLOCKS + BATCH_READS_AHEAD


def test_a_call_without_steps_waits_until_its_tenant_has_paused(node: NodeInProcess) -> None:
    def requests() -> Iterator[pb.AttachRequest]:
        yield pb.AttachRequest(
            block_bytes_max=4096,
            slots=1,
            provider=node.call(lambda one: one.fabric.provider),
            fabric_address=SocketAddress(ip_of("127.0.0.1"), 9).encoded,
            ack_words=8,
        )
        over.wait(WAIT_S)

    def rest(inside: Node) -> None:
        inside.turns._rests[inside.connection(number, None).tenant] = time.monotonic_ns() + int(RESTS_S * 1e9)

    over = threading.Event()
    name = pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=4096)
    cancelled = pb.CancelledBlock(ack_word=0, ack_generation=1)
    with grpc.insecure_channel(node.target) as channel:
        stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
        attached = stub.Attach(requests())
        number = next(attached).connection
        for call, request in (
            (stub.Reserve, pb.ReserveRequest(connection=number, blocks=[pb.ReserveBlock(name=name)])),
            (stub.Abort, pb.AbortRequest(connection=number)),
            (stub.CancelFetch, pb.CancelFetchRequest(connection=number, blocks=[cancelled])),
            (stub.WhyFailed, pb.WhyFailedRequest(connection=number, generations=[1])),
        ):
            began = time.monotonic()
            node.call(rest)
            call(request, timeout=WAIT_S)
            assert time.monotonic() - began >= RESTS_S
        over.set()
        attached.cancel()


def test_slots_are_leased_in_steps_and_all_or_none(node: NodeInProcess) -> None:
    """An invalid block is in the last step: leases of the earlier steps are released."""

    def requests() -> Iterator[pb.AttachRequest]:
        yield pb.AttachRequest(
            block_bytes_max=4096,
            slots=2 * SLOTS_A_STEP,
            provider=node.call(lambda one: one.fabric.provider),
            fabric_address=SocketAddress(ip_of("127.0.0.1"), 9).encoded,
            ack_words=8,
        )
        over.wait(WAIT_S)

    over = threading.Event()
    names = [
        pb.BlockName(key=bytes([number]) * 32, fingerprint=bytes(16), length=4096)
        for number in range(2 * SLOTS_A_STEP)
    ]
    blocks = [pb.ReserveBlock(name=name) for name in names]
    bad = pb.ReserveBlock(name=pb.BlockName(key=bytes(32), fingerprint=bytes(16), length=8192))
    with grpc.insecure_channel(node.target) as channel:
        stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
        attached = stub.Attach(requests())
        number = next(attached).connection
        with pytest.raises(grpc.RpcError, match="attached for blocks of up to 4096 bytes"):
            stub.Reserve(pb.ReserveRequest(connection=number, blocks=[*blocks[:-1], bad]), timeout=WAIT_S)
        assert node.call(lambda one: one.leases) == 0
        leases = stub.Reserve(pb.ReserveRequest(connection=number, blocks=blocks), timeout=WAIT_S).leases
        assert len({lease.slot for lease in leases}) == len(blocks)
        given = [pb.AbortLease(slot=lease.slot, generation=lease.generation) for lease in leases]
        back = stub.Abort(pb.AbortRequest(connection=number, leases=given), timeout=WAIT_S)
        assert (back.released, node.call(lambda one: one.leases)) == (len(blocks), 0)
        over.set()
        attached.cancel()


def test_a_fetch_cancelled_between_steps_has_ended(
    node: NodeInProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client has left after the first step: the look-up waits for nothing that was not queued."""
    begun, over = threading.Event(), threading.Event()
    steps = connection_calls.in_steps

    async def slow(count: int) -> AsyncIterator[slice]:
        async for step in steps(count):
            if step.start and begun.is_set():
                await asyncio.sleep(WAIT_S)
            yield step

    def enqueue(inside: Node) -> None:
        do = inside.fetches.enqueue

        def noted(*told: Any, **named: Any) -> None:
            do(*told, **named)
            begun.set()

        vars(inside.fetches)["enqueue"] = noted

    def requests() -> Iterator[pb.AttachRequest]:
        yield pb.AttachRequest(
            provider=node.call(lambda one: one.fabric.provider),
            block_bytes_max=4096,
            fabric_address=SocketAddress(ip_of("127.0.0.1"), 9).encoded,
            ack_words=256,
        )
        over.wait(WAIT_S)

    node.call(enqueue)
    monkeypatch.setattr(connection_calls, "in_steps", slow)
    blocks = [
        pb.FetchBlock(
            name=pb.BlockName(key=key, fingerprint=bytes(16), length=64), ack_word=at, ack_generation=at + 1
        )
        for at, key in enumerate(KEYS)
    ]
    with grpc.insecure_channel(node.target) as channel:
        stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
        attached = stub.Attach(requests())
        request = pb.FetchRequest(connection=next(attached).connection, blocks=blocks)
        fetching = stub.Fetch.future(request, timeout=WAIT_S)
        assert begun.wait(WAIT_S)
        fetching.cancel()
        wait_until(
            lambda: node.call(lambda one: len(one) == 1 and not one.fetches._lookings),
            "the look-up is over, and the connection is there",
        )
        over.set()
        attached.cancel()
