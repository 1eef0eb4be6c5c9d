"""The client for asyncio: its calls leave the loop free, and leave no memory in use when they end."""

from __future__ import annotations

import asyncio
import threading
from inspect import isfunction, signature
from io import BytesIO
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import (
    AsyncClient,
    AsyncClusterClient,
    AsyncClusterPuts,
    AsyncSession,
    Block,
    Client,
    ClusterClient,
    ClusterPuts,
    Hit,
    Stored,
    as_request,
)
from kvstore.client.sessions import Session
from kvstore.errors import Closed, DeadlineExceeded, NodeUnavailable
from kvstore.miss import Miss
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.memory import allocate
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from kvstore.client.observing import Happened
    from kvstore.demo.node_process import NodeProcess

pytestmark = pytest.mark.node("shared")

BYTES, COUNT, WAIT_S = 8192, 8, 20.0


def client_of(node: NodeProcess) -> AsyncClient:
    return AsyncClient(node.target, slots=16, block_bytes_max=1 << 20)


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


def test_blocks_are_put_fetched_and_deleted(node: NodeProcess) -> None:
    keys = [block_key(b"asyncio", bytes([at])) for at in range(COUNT)]

    async def work() -> None:
        memory = allocate(2 * COUNT * BYTES)
        memory[: COUNT * BYTES] = b"".join(key * (BYTES // len(key)) for key in keys)
        async with client_of(node) as client:
            kv = await client.register(memory)
            put = [Block(key, kv, at * BYTES, BYTES) for at, key in enumerate(keys)]
            wanted = [Block(key, kv, (COUNT + at) * BYTES, BYTES) for at, key in enumerate(keys)]
            first, others = put[:1], put[1:]
            assert [one.error for one in await client.put(first)] == [None]
            with FlagWords.create(1) as flags:
                puts = client.arm(others, flags[0])
                flags[0].store(1)
                assert await puts.wait_landed(WAIT_S)
                assert {one.error for one in await puts.wait(WAIT_S)} == {None}
            assert await client.get(wanted) == [Hit(key) for key in keys]
            assert memory[COUNT * BYTES :] == memory[: COUNT * BYTES]
            assert all(isinstance(one, Stored) for one in await client.exists(keys))
            assert (await client.prefix(keys)).blocks == COUNT
            assert not (await client.status()).read_only
            (await client.pin(keys[:1])).close()
            assert await client.delete(keys) == [True] * COUNT
            assert isinstance((await client.get(wanted[:1]))[0], Miss)
            assert len(await client.explain(keys)) == COUNT

    run(work())


def test_armed_puts_are_named_watched_and_cancelled(node: NodeProcess) -> None:
    key = block_key(b"asyncio", b"named later")

    async def work() -> None:
        async with client_of(node) as client:
            kv = await client.register(allocate(2 * BYTES))
            with FlagWords.create(1) as flags:
                blocks = [
                    Block(b"", kv, 0, BYTES),
                    Block(block_key(b"asyncio", b"never"), kv, BYTES, BYTES, threshold=2),
                ]
                puts = client.arm(blocks, flags[0])
                assert puts.progress() == (0, 0, 0)
                puts.name(0, key)
                flags[0].store(1)
                await asyncio.to_thread(wait_until, lambda: puts.progress()[2] == 1, "the first is over")
                assert [one.error is None for one in await puts.wait(0.1)] == [True, False]
                assert (puts.progress(), puts.has_ended, puts.ended()) == ((1, 1, 1), False, None)
                assert await puts.cancel() == 1
                assert [one.error is None for one in await puts.wait(WAIT_S)] == [True, False]
                assert puts.has_ended
                assert puts.ended() == await puts.wait(0)
                later = client.arm(blocks[1:], flags[0])
                await later.abandon()
                assert [one.error is None for one in await later.wait(WAIT_S)] == [False]
                assert later.has_ended
            assert isinstance((await client.exists([key]))[0], Stored)

    run(work())


def test_a_session_is_appended_to_resumed_and_removed(node: NodeProcess) -> None:
    keys = [block_key(b"asyncio session", bytes([at])) for at in range(COUNT)]

    async def work() -> None:
        memory = allocate(COUNT * BYTES)
        memory[:] = b"".join(key * (BYTES // len(key)) for key in keys)
        async with client_of(node) as client:
            kv = await client.register(memory)
            blocks = [Block(key, kv, at * BYTES, BYTES) for at, key in enumerate(keys)]
            chat = client.session("ada", "asyncio")
            assert {one.error for one in await chat.arm(blocks).wait(WAIT_S)} == {None}
            assert await chat.append(keys, tokens=COUNT) == COUNT
            assert (await chat.info()).tokens == COUNT
            assert await chat.keys() == keys
            memory[:] = bytes(len(memory))
            assert (await chat.resume(lambda number, _: blocks[number])).is_whole
            assert bytes(memory) == b"".join(key * (BYTES // len(key)) for key in keys)
            assert await chat.remove(delete_blocks=True) == COUNT
            assert not (await chat.resume(lambda number, _: blocks[number])).is_whole

    run(work())


def test_a_session_is_forked_truncated_exported_and_imported(node: NodeProcess) -> None:
    keys = [block_key(b"asyncio fork", bytes([at])) for at in range(COUNT)]

    async def work() -> None:
        async with client_of(node) as client:
            await client.put_many_inline((key, key) for key in keys)
            chat = client.session("lin", "asyncio")
            await chat.append(keys, tokens=COUNT)
            fork = await chat.fork("a fork", blocks=COUNT // 2)
            await chat.truncate(1)
            assert [await one.keys() for one in (chat, fork)] == [keys[:1], keys[: COUNT // 2]]
            await fork.protect()
            assert await fork.unprotect()
            assert await fork.prefetch() == COUNT // 2
            assert await fork.limit(60_000) > 0
            file = BytesIO()
            assert await fork.export(file) == COUNT // 2
            file.seek(0)
            copy = await client.import_session(file, "lin", "a copy")
            assert await copy.keys() == keys[: COUNT // 2]
            assert {one.session for one in await client.sessions("lin")} == {"asyncio", "a fork", "a copy"}
            assert (await client.erase_user("lin")).sessions == 3
            assert await client.sessions("lin") == []

    run(work())


def test_the_nodes_statistics_and_events_are_visible(node: NodeProcess) -> None:
    key = block_key(b"asyncio", b"seen")

    async def work() -> None:
        async with client_of(node) as client:
            events = client.watch(timeout_s=WAIT_S)
            assert await anext(events) is None
            await client.put_inline(key, key)
            (stored,) = await client.exists([key], any_layout=True)
            assert isinstance(stored, Stored)
            assert stored.fingerprint == client.sync.fingerprint
            with as_request("asyncio 8"):
                assert (await client.prefetch([key])).missing == {}
                await client.exists([key])
            assert [one.blocks for one in (await client.looked_up("asyncio 8")).lookups][-1:] == [1]
            assert (await client.statistics()).puts > 0
            assert await client.delete([key]) == [True]
            seen = [event.what async for event in aiter_until(events, "DELETED", key)]
            assert seen == ["STORED", "DELETED"]
            await events.aclose()
            assert [event async for event in client.watch(timeout_s=1) if event is not None] == []

    async def aiter_until(
        events: AsyncIterator[Happened | None], what: str, wanted: bytes
    ) -> AsyncIterator[Happened]:
        async for event in events:
            if event is not None and event.key == wanted:
                yield event
                if event.what == what:
                    return

    run(work())


@pytest.mark.parametrize(
    ("ours", "its", "left_out"),
    [
        (AsyncClient, Client, {"reserve", "getting"}),
        (AsyncSession, Session, {"manifest", "reserve", "resuming", "resume_span"}),
        (AsyncClusterClient, ClusterClient, set()),
        (AsyncClusterPuts, ClusterPuts, set()),
    ],
)
def test_it_has_each_method_of_the_client_with_the_same_parameters(
    ours: type, its: type, left_out: set[str]
) -> None:
    methods = {name for name, one in vars(its).items() if isfunction(one) and name[0] != "_"} - left_out
    assert methods <= vars(ours).keys()
    for name in methods:
        both = [list(signature(getattr(one, name)).parameters.values()) for one in (ours, its)]
        if (ours, name) == (
            AsyncSession,
            "arm",
        ):  # it takes no blocks of a cluster, whose client is another one
            both = [[one.replace(annotation=None) for one in some] for some in both]
        assert both[0] == both[1], name


def test_grpc_blocks_and_concurrent_calls(node: NodeProcess) -> None:
    keys = [block_key(b"asyncio inline", bytes([at])) for at in range(3 * COUNT)]

    async def work() -> None:
        async with client_of(node) as client:
            await asyncio.gather(*(client.put_inline(key, key * 8) for key in keys[:COUNT]))
            results = await client.put_many_inline((key, key * 8) for key in keys[COUNT:])
            assert {one.error for one in results} == {None}
            assert await client.get_many_inline([(key, 256) for key in keys]) == [key * 8 for key in keys]
            assert await client.get_inline(keys[0], 256) == keys[0] * 8

    run(work())


def test_calls_carry_the_request_id_of_their_caller(node: NodeProcess) -> None:
    async def work() -> None:
        async with client_of(node) as client:
            with as_request("asyncio 7"):
                await client.exists([block_key(b"nobody's")])
            told = await client.call(client.sync.looked_up, "asyncio 7")
            assert [one.blocks for one in told.lookups] == [1]

    run(work())


def test_a_cancelled_call_has_ended_when_the_await_returns() -> None:
    """Only then may its memory be reused; the call itself can't be withdrawn."""
    begun, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def slow() -> None:
        begun.set()
        goes_on.wait(WAIT_S)
        ended.set()
        raise DeadlineExceeded("It took too long.")

    async def work() -> None:
        client = AsyncClient("127.0.0.1:1")
        calling = asyncio.ensure_future(client.call(slow))
        await asyncio.to_thread(begun.wait, WAIT_S)
        for _ in range(2):
            calling.cancel()
            await asyncio.sleep(0.05)  # the loop is free meanwhile
            assert not calling.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        assert ended.is_set()
        await client.close()

    run(work())


def test_the_region_or_pin_of_a_cancelled_call_is_closed(node: NodeProcess) -> None:
    key = block_key(b"asyncio", b"cancelled")

    async def work() -> None:
        async with client_of(node) as client:
            await client.put_inline(key, key)
            for name, given in (("register", allocate(BYTES)), ("pin", [key])):
                (made,) = await cancelled(client, name, given)
                assert made.handle is None if name == "register" else not made._numbers

    async def cancelled(client: AsyncClient, name: str, given: object) -> list[Any]:
        """The results of a call that was cancelled before it returned."""
        does, made = getattr(client.sync, name), list[Any]()
        has_made, goes_on = threading.Event(), threading.Event()

        def slow(*given: object, **more: object) -> object:
            made.append(does(*given, **more))
            has_made.set()
            goes_on.wait(WAIT_S)
            return made[0]

        setattr(client.sync, name, slow)
        calling = asyncio.ensure_future(getattr(client, name)(given))
        await asyncio.to_thread(has_made.wait, WAIT_S)
        calling.cancel()
        await asyncio.sleep(0.05)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await calling
        return made

    run(work())


def test_errors_are_those_of_the_sync_client() -> None:
    async def work() -> None:
        async with AsyncClient("127.0.0.1:1", connect_timeout_ms=100, call_timeout_ms=200) as client:
            with pytest.raises(NodeUnavailable):
                await client.exists([block_key(b"nobody's")])

    run(work())


def test_calls_on_a_closed_asyncio_client_raise_closed() -> None:
    async def work() -> None:
        client = AsyncClient("127.0.0.1:9")
        await client.close()
        with pytest.raises(Closed):
            await client.status()

    run(work())
