"""The asyncio client of a cluster: a hung node leaves the loop free, a cancelled call leaves nothing in flight."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import threading
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import AsyncClusterClient, ClusterBlock, Hit, Stored, as_request
from kvstore.client.async_calls import CallThreads
from kvstore.client.link import Link
from kvstore.errors import Closed, InvalidArgument, NodeUnavailable
from kvstore.miss import Miss
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from tests.conftest import small_node
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterator
    from pathlib import Path

    from kvstore.client import RegisteredMemory
    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES, WAIT_S = 24, 4096, 10.0


@pytest.fixture(scope="module")
def nodes(module_folder: Path) -> Iterator[list[NodeProcess]]:
    with ExitStack() as stack:
        yield [stack.enter_context(small_node(module_folder / f"node{number}")) for number in range(2)]


def client_of(nodes: list[NodeProcess], replicas: int = 2) -> AsyncClusterClient:
    targets = [node.target for node in nodes]
    return AsyncClusterClient(targets, replicas=replicas, slots=16, block_bytes_max=1 << 20)


def new_keys() -> list[bytes]:
    name = secrets.token_bytes(8)
    return [block_key(name, bytes([number])) for number in range(COUNT)]


def blocks_in(memory: RegisteredMemory, keys: list[bytes], threshold: int = 1) -> list[ClusterBlock]:
    return [ClusterBlock(key, memory, at * BYTES, BYTES, threshold) for at, key in enumerate(keys)]


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def longest_pause_s(work: Coroutine[Any, Any, Any]) -> tuple[Any, float, float]:
    """The result of some work, and how long the loop was not free meanwhile, at most.

    The last is the same of a thread that does nothing: so long this machine was busy with other things.
    """
    doing, longest_of_thread_s = asyncio.ensure_future(work), 0.0

    def idle() -> None:
        nonlocal longest_of_thread_s
        while not doing.done():
            began = time.monotonic()
            time.sleep(0.01)
            longest_of_thread_s = max(longest_of_thread_s, time.monotonic() - began)

    thread = threading.Thread(target=idle)
    thread.start()
    longest_s = 0.0
    while not doing.done():
        began = time.monotonic()
        await asyncio.sleep(0.01)
        longest_s = max(longest_s, time.monotonic() - began)
    thread.join()
    return doing.result(), longest_s, longest_of_thread_s


def test_blocks_are_put_to_two_nodes_fetched_pinned_and_deleted(nodes: list[NodeProcess]) -> None:
    keys, source = new_keys(), bytearray(secrets.token_bytes(COUNT * BYTES))

    async def work() -> None:
        async with client_of(nodes) as client:
            kv = await client.register(source)
            with FlagWords.create(1) as flags:
                puts = await client.arm(blocks_in(kv, keys), flags[0])
                assert not puts.has_ended
                flags[0].store(1)
                assert {one.error for one in await puts.wait(WAIT_S)} == {None}
                assert await puts.wait_landed(WAIT_S)
                assert await puts.cancel() == 0
                await puts.abandon()
            assert {one.error for one in await client.put(blocks_in(kv, keys))} == {None}
            for node in nodes:
                assert client.sync.nodes.at(node.target).prefix(keys).blocks == COUNT
            target = bytearray(len(source))
            assert {
                type(one) for one in await client.get(blocks_in(await client.register(target), keys))
            } == {Hit}
            assert target == source
            assert sorted(await client.owners(keys[0])) == sorted(node.target for node in nodes)
            pages = [(block_key(key, b"page"), key) for key in keys]
            assert {one.error for one in await client.put_many_inline(pages)} == {None}
            assert await client.get_many_inline([(key, 32) for key, _ in pages]) == keys
            assert await client.get_inline(pages[0][0], 32) == keys[0]
            with as_request("asyncio cluster"):
                assert {type(one) for one in await client.exists(keys)} == {Stored}
            there = client.sync.nodes.at((await client.owners(keys[0]))[0])
            assert (await client.call(there.looked_up, "asyncio cluster")).lookups
            assert (await client.prefix([*keys, block_key(b"none")])).blocks == COUNT
            pin = await client.pin(keys)
            assert pin.pinned == [True] * COUNT
            await client.call(pin.close)
            assert await client.delete(keys) == [True] * COUNT
            assert {type(one) for one in await client.exists(keys)} == {Miss}
            with pytest.raises(InvalidArgument):
                await client.exists([b"no key"])

    run(work())


def test_a_hanging_node_leaves_the_event_loop_free(nodes: list[NodeProcess]) -> None:
    keys = new_keys()

    async def work() -> None:
        async with client_of(nodes) as client:
            await client.put_many_inline([(key, key) for key in keys])
            stop(nodes[0].pid)
            try:
                wanted = [(key, 32) for key in keys]
                getting = client.get_many_inline(wanted, timeout_s=WAIT_S)
                got, longest_s, longest_of_thread_s = await longest_pause_s(getting)
            finally:
                os.kill(nodes[0].pid, signal.SIGCONT)
            assert got == keys
            assert longest_s < 0.5 + longest_of_thread_s, "a busy machine lets both wait"

    run(work())


def has_gets(client: AsyncClusterClient, node: NodeProcess) -> bool:
    """Whether the client waits for a get from this node."""
    link = client.sync.nodes.at(node.target)._core.link
    assert link is not None
    return bool(link.operations)


def test_memory_of_a_cancelled_get_is_free_when_the_await_ends(
    nodes: list[NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that of blocks on a node that hangs, and continues afterwards."""
    keys, source = new_keys(), bytearray(secrets.token_bytes(COUNT * BYTES))
    monkeypatch.setattr(
        Link, "_open_direct", lambda *_: None
    )  # which reads the memory of a node that hangs, too

    async def work() -> None:
        async with client_of(nodes, replicas=1) as client:
            kv = await client.register(source)
            assert {one.error for one in await client.put(blocks_in(kv, keys))} == {None}
            target = bytearray(len(source))
            there = await client.register(target)
            stop(nodes[0].pid)
            try:
                getting = asyncio.ensure_future(client.get(blocks_in(there, keys), timeout_s=2))
                await asyncio.to_thread(wait_until, lambda: has_gets(client, nodes[0]), "it asks")
                began = time.monotonic()
                getting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await getting
                assert time.monotonic() - began < 5
                target[:] = bytes(len(target))
            finally:
                os.kill(nodes[0].pid, signal.SIGCONT)
            await asyncio.sleep(0.5)
            assert target == bytes(len(target))

    run(work())


class Held:
    """Wraps a call of the synchronous client: it does its work, and returns only when allowed to."""

    def __init__(self, client: AsyncClusterClient, name: str) -> None:
        self.does = getattr(client.sync, name)
        self.made: list[Any] = []
        self.has_made, self.goes_on = threading.Event(), threading.Event()
        setattr(client.sync, name, self)

    def __call__(self, *given: Any, **more: Any) -> Any:
        self.made.append(self.does(*given, **more))
        self.has_made.set()
        self.goes_on.wait(WAIT_S)
        return self.made[-1]

    async def cancelled(self, calling: Coroutine[Any, Any, Any]) -> Any:
        """Cancel an awaited call once it has had its effect; returns the effect."""
        task = asyncio.ensure_future(calling)
        assert await asyncio.to_thread(self.has_made.wait, WAIT_S), "the call failed, or takes too long"
        task.cancel()
        await asyncio.sleep(0.05)
        assert not task.done()
        self.goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return self.made[-1]


def test_puts_whose_arming_was_cancelled_are_never_sent(nodes: list[NodeProcess]) -> None:
    keys, source = new_keys(), bytearray(secrets.token_bytes(COUNT * BYTES))

    async def work() -> None:
        async with client_of(nodes) as client:
            kv = await client.register(source)
            with FlagWords.create(1) as flags:
                arm = Held(client, "arm").cancelled
                puts = await arm(client.arm(blocks_in(kv, keys), flags[0]))
                assert puts.has_ended
                flags[0].store(1)
                await asyncio.sleep(0.3)
            for node in nodes:
                there = client.sync.nodes.at(node.target)
                assert {type(one) for one in there.exists(keys)} == {Miss}

    run(work())


def test_a_cancelled_pin_is_released_and_cancelled_memory_deregistered(nodes: list[NodeProcess]) -> None:
    keys = new_keys()

    async def work() -> None:
        async with client_of(nodes) as client:
            await client.put_many_inline([(key, key) for key in keys])
            everywhere = await Held(client, "register").cancelled(client.register(bytearray(BYTES)))
            assert not everywhere._regions
            pin = await Held(client, "pin").cancelled(client.pin(keys))
            assert pin.pinned == [True] * COUNT
            assert [client.sync.nodes.at(node.target).statistics().pins for node in nodes] == [0, 0]

    run(work())


def test_effects_of_a_cancelled_call_are_undone_before_the_cancellation_arrives() -> None:
    """Also if it is cancelled once more meanwhile; a call that failed has had no effect."""
    undone: list[str] = []
    goes_on, undoing, undoes = (threading.Event() for _ in range(3))

    def undo(made: str) -> None:
        undoing.set()
        undoes.wait(WAIT_S)
        undone.append(made)
        raise NodeUnavailable("It can't be undone there.")

    def making() -> str:
        goes_on.wait(WAIT_S)
        return "made"

    def failing() -> str:
        goes_on.wait(WAIT_S)
        raise NodeUnavailable("It is away.")

    async def cancel_twice(calling: asyncio.Future[Any]) -> None:
        for _ in range(2):
            await asyncio.sleep(0.05)
            assert not calling.done()
            calling.cancel()

    async def work() -> None:
        threads = CallThreads()
        for does in (making, failing):
            goes_on.clear()
            calling = asyncio.ensure_future(threads.call(does, undo))
            await cancel_twice(calling)
            goes_on.set()
            if does is making:
                assert await asyncio.to_thread(undoing.wait, WAIT_S)
                await cancel_twice(calling)
                undoes.set()
            with pytest.raises(asyncio.CancelledError):
                await calling
            assert undone == ["made"]
        await threads.close(lambda: None)

    run(work())


def test_puts_can_be_abandoned_after_a_cancelled_wait(nodes: list[NodeProcess]) -> None:
    keys, source = new_keys(), bytearray(COUNT * BYTES)

    async def work() -> None:
        async with client_of(nodes) as client:
            kv = await client.register(source)
            with FlagWords.create(1) as flags:
                puts = await client.arm(blocks_in(kv, keys), flags[0])
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(puts.wait(1.0), 0.2)
                assert not puts.has_ended
                assert await puts.cancel() == 2 * COUNT
                await puts.abandon()
                assert puts.has_ended

    run(work())


def test_a_cancelled_close_has_closed(nodes: list[NodeProcess]) -> None:
    async def work() -> None:
        client = client_of(nodes)
        slow, begun, goes_on, ended = client.sync.close, *(threading.Event() for _ in range(3))

        def close() -> None:
            begun.set()
            goes_on.wait(WAIT_S)
            slow()
            ended.set()

        client.sync.close = close  # type: ignore[method-assign]
        closing = asyncio.ensure_future(client.close())
        assert await asyncio.to_thread(begun.wait, WAIT_S)
        closing.cancel()
        await asyncio.sleep(0.05)
        assert not closing.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert ended.is_set()
        with pytest.raises(Closed):
            await client.exists([block_key(b"none")])

    run(work())


def test_an_absent_cluster_is_the_clients_own_error() -> None:
    async def work() -> None:
        async with AsyncClusterClient(["127.0.0.1:1"], connect_timeout_ms=100, call_timeout_ms=300) as client:
            (missed,) = await client.exists([block_key(b"none")])
            assert isinstance(missed, Miss)
            with pytest.raises(NodeUnavailable):
                await client.delete([block_key(b"none")])

    run(work())
