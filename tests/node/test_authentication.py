"""Authentication: the node waits for nothing, and keeps nothing, for an unauthenticated caller."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.clock import SystemClock
from kvstore.errors import Overloaded
from kvstore.limits import (
    GUARD_FIRST_MESSAGE_MS,
    MESSAGE_SMALL_BYTES_MAX,
    METADATA_MAX,
    WATCHERS_MAX,
    WATCHERS_OF_TENANT_MAX,
)
from kvstore.node import authentication
from kvstore.node.audit import Audit
from kvstore.node.authentication import Authenticator
from kvstore.node.authorization import Gate
from kvstore.node.calls import refusals
from kvstore.node.statistics import Counters
from kvstore.node.tenants import Tenants, token_digest
from kvstore.node.timings import Timings
from kvstore.node.watching import Watchers
from kvstore.wire import blocks_pb2
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.blocks_pb2_grpc import BlocksStub
from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
from tests.conftest import small_node
from tests.hostile import h2
from tests.storage.fakes import FakeClock

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.calls import Context

WAIT_S = 20.0
CALLS_BEHIND = 20
PATHS = ("KvStore/Attach", "KvStore/Status", "Batches/PutBatch", "Observing/Watch", "Blocks/Exists")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeProcess]:
    folder = tmp_path_factory.mktemp("door")
    (folder / "tenants.toml").write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\n')
    with small_node(folder / "node", arguments=("--tenants", str(folder / "tenants.toml"))) as node:
        yield node


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(100):
        if condition():
            return
        await asyncio.sleep(0.05)
    raise AssertionError("not within 5 s")


def answered(link: socket.socket, within_s: float) -> bytes:
    """Read until the headers that end a refused call."""
    link.settimeout(within_s)
    said = b""
    while b"grpc-status" not in said:
        said += link.recv(1 << 16)
    return said


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("token", [(), (("authorization", "Bearer nobody's"),)], ids=["none", "nobody's"])
def test_a_caller_without_credentials_is_refused_before_its_message_is_awaited(
    guarded: NodeProcess, path: str, token: Any
) -> None:
    with h2.connected("127.0.0.1", int(guarded.target.rpartition(":")[2])) as link:
        link.sendall(h2.headers(1, f"/kvstore.v1.{path}", *token))
        assert b"16" in answered(link, GUARD_FIRST_MESSAGE_MS / 2000)


def test_a_call_with_too_much_metadata_is_refused_and_its_source_must_send_less(
    guarded: NodeProcess,
) -> None:
    """One byte can refer to an entry of kilobytes: gRPC's own limit holds only for peers that respect its settings."""
    with h2.connected("127.0.0.1", int(guarded.target.rpartition(":")[2]), "127.0.0.7") as link:
        more = [("x", str(number)) for number in range(METADATA_MAX)]
        link.sendall(h2.headers(1, "/kvstore.v1.KvStore/Status", ("authorization", "Bearer acme"), *more))
        assert b"grpc-status\x013" in answered(link, WAIT_S).replace(b"\x00\x0b", b"")
        assert h2.goes_away(link, 5.0)


def test_calls_after_one_with_too_much_metadata_are_dropped(tmp_path: Path) -> None:
    """Each of them may be as costly, and gRPC has accepted hundreds before the connection is closed."""
    log = tmp_path / "audit.jsonl"
    arguments = ("--tenants", str(tmp_path / "tenants.toml"), "--audit", str(log))
    (tmp_path / "tenants.toml").write_text(f'[acme]\ntokens_sha256 = ["{token_digest("acme")}"]\n')

    def refused(host: str, *metadata: tuple[str, str]) -> int:
        """The number of refused calls in the audit log that follow one with this metadata."""
        first = h2.headers(1, "/kvstore.v1.KvStore/Status", *metadata)
        calls = [h2.headers(3 + 2 * n, "/kvstore.v1.KvStore/Status") for n in range(CALLS_BEHIND)]
        with h2.connected("127.0.0.1", port, host) as link:
            link.sendall(b"".join((first, *calls)))
            while not metadata and log.read_text().count(host) < CALLS_BEHIND:
                time.sleep(0.05)
            assert not metadata or h2.goes_away(link, WAIT_S)
        return log.read_text().count(f"{host}:")

    with small_node(tmp_path / "node", arguments=arguments) as node:
        port = int(node.target.rpartition(":")[2])
        assert refused("127.0.0.8") >= CALLS_BEHIND
        assert (
            refused("127.0.0.9", *(("x", str(number)) for number in range(METADATA_MAX + 1)))
            < CALLS_BEHIND / 2
        )


def test_an_oversized_message_of_a_small_call_is_not_read(guarded: NodeProcess) -> None:
    """Four million empty names fit into one gRPC message."""
    many = blocks_pb2.ExistsRequest(blocks=[pb.BlockName()] * (MESSAGE_SMALL_BYTES_MAX // 2 + 1))
    with grpc.insecure_channel(guarded.target) as channel:
        exists = BlocksStub(channel).Exists  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as refused:
            exists(many, metadata=(("authorization", "Bearer acme"),), timeout=WAIT_S)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"at most {MESSAGE_SMALL_BYTES_MAX} bytes" in str(refused.value.details())


def test_a_silent_stream_ends_at_its_timeout(guarded: NodeProcess) -> None:
    def nothing() -> Iterator[Any]:
        time.sleep(WAIT_S)
        yield from ()

    with grpc.insecure_channel(guarded.target) as channel:
        stub = KvStoreStub(channel)  # type: ignore[no-untyped-call]
        began = time.monotonic()
        call = stub.Attach(nothing(), metadata=(("authorization", "Bearer acme"),), timeout=WAIT_S)
        with pytest.raises(grpc.RpcError, match="first message did not arrive"):
            next(call)
        took = time.monotonic() - began
    assert call.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert GUARD_FIRST_MESSAGE_MS / 1000 <= took < GUARD_FIRST_MESSAGE_MS / 1000 + 5


def test_a_call_whose_first_answer_is_not_read_ends_with_its_status_and_counts_until_then() -> None:
    """Its headers are sent first: gRPC can't send a status after headers whose write was abandoned."""
    clock = SystemClock()
    gate, timings = Gate(Tenants(bytes(16), clock), Audit(clock, None)), Timings(clock)

    async def standing(_: object, context: Context) -> None:
        async with refusals(context):
            try:
                async with asyncio.timeout(0.2):
                    await context.write(bytes(1 << 20))
            except TimeoutError:
                raise Overloaded("Nobody read.") from None

    async def call_it() -> None:
        server = grpc.aio.server(interceptors=(Authenticator(gate, Counters(), timings),))
        handler: Any = grpc.unary_stream_rpc_method_handler(standing)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Stand": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with await asyncio.to_thread(h2.connected, "127.0.0.1", port) as link:
                link.sendall(h2.headers(1, "/test/Stand") + h2.data(1, b"", ends=True))
                await asyncio.sleep(0.5)
                assert gate._open.total == 1
                link.sendall(h2.window(0, 1 << 24) + h2.window(1, 1 << 24))
                assert b"Nobody read" in await asyncio.to_thread(answered, link, 5)
        finally:
            await server.stop(None)

    asyncio.run(call_it())
    assert gate._open.total == 0
    assert timings.calls_failed["Stand", "RESOURCE_EXHAUSTED"] == 1


def test_a_unary_caller_is_admitted_before_its_message_which_must_arrive_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Until then the guard counts what the connection sends as a stranger's."""
    monkeypatch.setattr(authentication, "GUARD_FIRST_MESSAGE_MS", int(WAIT_S * 1000))
    clock = SystemClock()
    gate, timings = Gate(Tenants(bytes(16), clock), Audit(clock, None)), Timings(clock)
    let_in: list[str] = []
    gate.let_in = let_in.append

    async def echo(request: bytes, _: Context) -> bytes:
        return request

    async def call_it() -> None:
        server = grpc.aio.server(interceptors=(Authenticator(gate, Counters(), timings),))
        handler: Any = grpc.unary_unary_rpc_method_handler(echo)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Echo": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with await asyncio.to_thread(h2.connected, "127.0.0.1", port) as link:
                link.sendall(h2.headers(1, "/test/Echo"))
                await until(lambda: len(let_in) == 1)
                link.sendall(h2.data(1, b"spoken", ends=True))
                assert b"spoken" in await asyncio.to_thread(answered, link, 5)
                monkeypatch.setattr(authentication, "GUARD_FIRST_MESSAGE_MS", 100)
                link.sendall(h2.headers(3, "/test/Echo"))
                assert b"did not arrive within" in await asyncio.to_thread(answered, link, 5)
        finally:
            await server.stop(None)

    asyncio.run(call_it())
    assert timings.calls_failed["Echo", "DEADLINE_EXCEEDED"] == 1


def test_a_caller_that_reads_no_answers_is_reported_and_limited_to_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An answer stays in gRPC as long as its caller's connection: hundreds of large ones once exhausted the node."""
    monkeypatch.setattr(authentication, "INLINE_TIMEOUT_MS", 300)
    monkeypatch.setattr(authentication, "GUARD_ANSWERS_BYTES_MAX", 3 << 20)
    clock = SystemClock()
    gate, timings = Gate(Tenants(bytes(16), clock), Audit(clock, None)), Timings(clock)
    still: list[str] = []
    gate.reads_nothing = still.append

    async def large(_: bytes, __: Context) -> bytes:
        return bytes(1 << 20)

    async def call_it() -> None:
        keeps = Authenticator(gate, Counters(), timings)
        server = grpc.aio.server(interceptors=(keeps,))
        handler: Any = grpc.unary_unary_rpc_method_handler(large)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("test", {"Large": handler}),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            with await asyncio.to_thread(h2.connected, "127.0.0.1", port) as link:
                for number in range(1, 9, 2):
                    link.sendall(h2.headers(number, "/test/Large") + h2.data(number, b"", ends=True))
                assert b"unread answers" in await asyncio.to_thread(answered, link, 5)
                assert keeps._answers.total == 3 << 20
                await until(lambda: len(still) == 3)
                assert set(still) == {"ipv4:{}:{}".format(*link.getsockname())}
            await until(lambda: not keeps._answers.total)
        finally:
            await server.stop(None)

    asyncio.run(call_it())
    assert timings.calls_failed["Large", "RESOURCE_EXHAUSTED"] == 1


@pytest.mark.parametrize("path", ["Blocks/Exists", "Batches/GetBatch"])
def test_an_unreadable_message_is_the_callers_error(guarded: NodeProcess, path: str) -> None:
    host, _, port = guarded.target.rpartition(":")
    with h2.connected(host, int(port)) as link:
        token = ("authorization", "Bearer acme")
        link.sendall(h2.headers(1, f"/kvstore.v1.{path}", token) + h2.data(1, b"\xff" * 9, ends=True))
        assert b"be read" in answered(link, WAIT_S)


def test_a_tenant_has_no_more_open_calls_than_its_share(tmp_path: Path) -> None:
    clock = FakeClock()
    tenants = Tenants(bytes(16), clock)
    (tmp_path / "t.toml").write_text(
        "".join(f'[{name}]\ntokens_sha256 = ["{token_digest(name)}"]\n' for name in ("acme", "zeta"))
    )
    tenants.load(tmp_path / "t.toml")
    gate = Gate(tenants, Audit(clock, None))
    gate._open.capacity = 8

    def coming(token: str) -> Any:
        said = [("authorization", f"Bearer {token}")]
        return SimpleNamespace(
            invocation_metadata=lambda: said, auth_context=dict[str, Any], peer=lambda: "ipv4:127.0.0.1:1"
        )

    async def come() -> None:
        with ExitStack() as undo:
            for _ in range(4):
                undo.enter_context(gate.staying("attach", coming("acme")))
            with pytest.raises(Overloaded, match="as many calls open"):
                undo.enter_context(gate.staying("attach", coming("acme")))
            undo.enter_context(gate.staying("attach", coming("zeta")))

    asyncio.run(come())
    assert gate._open.total == 0


def test_each_tenant_keeps_its_share_of_the_watchers() -> None:
    tenants = 64
    watchers = Watchers(FakeClock(), lambda: tenants)
    with ExitStack() as undo:
        for tenant in range(tenants):
            had = 0
            while had < WATCHERS_OF_TENANT_MAX:
                try:
                    undo.enter_context(watchers.watching(bytes([tenant])))
                except Overloaded:
                    break
                had += 1
            assert had >= WATCHERS_MAX // (2 * tenants)
