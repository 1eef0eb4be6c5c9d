"""A client waits as long as it was configured to: for a connection, a call, a get."""

from __future__ import annotations

import mmap
import os
import signal
import socket
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client
from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable
from kvstore.limits import CONNECT_TIMEOUT_MS, PAGE_BYTES
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from tests.conftest import small_client
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.demo.node_process import NodeProcess

TIMEOUT_MS = 300
SOON_S = CONNECT_TIMEOUT_MS / 1000 - 1  # and so not by what holds when nothing is said


def took_s(call: Callable[[], object]) -> float:
    began_s = time.monotonic()
    call()
    return time.monotonic() - began_s


@contextmanager
def stopped(node: NodeProcess) -> Iterator[None]:
    stop(node.pid)
    try:
        yield
    finally:
        os.kill(node.pid, signal.SIGCONT)


def test_an_unanswered_connection_attempt_times_out() -> None:
    """The listener accepts it and never sends a byte."""
    with (
        socket.create_server(("127.0.0.1", 0)) as silent,
        Client(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout_ms=TIMEOUT_MS) as client,
    ):

        def call() -> None:
            with pytest.raises(NodeUnavailable):
                client.statistics()

        assert TIMEOUT_MS / 1000 * 0.9 < took_s(call) < SOON_S


CALLS: dict[str, Callable[[Client], object]] = {
    "statistics": lambda client: client.statistics(),
    "status": lambda client: client.status(),
    "looked up": lambda client: client.looked_up(last=1),
    "exists": lambda client: client.exists([bytes(32)]),
    "prefix": lambda client: client.prefix([bytes(32)]),
    "explain": lambda client: client.explain([bytes(32)]),
    "delete": lambda client: client.delete([bytes(32)]),
    "pin": lambda client: client.pin([bytes(32)]),
    "prefetch": lambda client: client.prefetch([bytes(32)]),
    "put": lambda client: client.put_inline(bytes(32), b"x"),
    "sessions": lambda client: list(client.sessions("ada")),
    "session": lambda client: client.session("ada", "chat").keys(),
    "append": lambda client: client.session("ada", "chat").append([bytes(32)], 1),
    "attach": lambda client: client.attach(),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_call_ends_at_its_timeout(shared_node: NodeProcess, call: Callable[[Client], object]) -> None:
    with Client(shared_node.target, call_timeout_ms=TIMEOUT_MS) as client:
        client.status()

        def refused() -> None:
            with pytest.raises(KvError) as refusal:
                call(client)
            assert isinstance(refusal.value, DeadlineExceeded)

        with stopped(shared_node):
            assert TIMEOUT_MS / 1000 * 0.9 < took_s(refused) < SOON_S


def test_a_reserve_over_the_fabric_ends_at_its_timeout(shared_node: NodeProcess) -> None:
    with (
        mmap.mmap(-1, PAGE_BYTES) as memory,
        small_client(shared_node.target, call_timeout_ms=5 * TIMEOUT_MS) as client,
        client.register(memory) as region,
    ):
        client.attach()

        def reserve() -> None:
            with pytest.raises(DeadlineExceeded):
                client.reserve([Block(block_key(b"timed"), region, 0, PAGE_BYTES)])

        with stopped(shared_node):
            assert 5 * TIMEOUT_MS / 1000 * 0.9 < took_s(reserve) < SOON_S


def test_a_puts_timeout_includes_attaching(shared_node: NodeProcess) -> None:
    with (
        mmap.mmap(-1, PAGE_BYTES) as memory,
        small_client(shared_node.target) as client,
        client.register(memory) as region,
    ):

        def put() -> None:
            with pytest.raises(DeadlineExceeded):
                client.put([Block(block_key(b"timed"), region, 0, PAGE_BYTES)], timeout_s=TIMEOUT_MS / 1000)

        with stopped(shared_node):
            assert TIMEOUT_MS / 1000 * 0.9 < took_s(put) < SOON_S


GETS: dict[str, Callable[[Client, Block], object]] = {
    "get": lambda client, block: client.get([block])[0],
    "inline": lambda client, block: next(iter(client.get_many_inline([(block.key, block.length)]))),
    "resume": lambda client, block: client.session("ada", "chat").resume(lambda *_: block).miss,
}


@pytest.mark.parametrize("get", GETS.values(), ids=GETS)
def test_a_get_without_a_timeout_uses_the_configured_one(
    shared_node: NodeProcess, get: Callable[[Client, Block], object]
) -> None:
    with (
        mmap.mmap(-1, PAGE_BYTES) as memory,
        small_client(shared_node.target, get_timeout_ms=TIMEOUT_MS) as client,
        client.register(memory) as region,
    ):
        client.attach()
        block = Block(block_key(b"timed"), region, 0, PAGE_BYTES)
        missed: list[object] = []
        with stopped(shared_node):
            assert TIMEOUT_MS / 1000 * 0.9 < took_s(lambda: missed.append(get(client, block))) < SOON_S
        (miss,) = missed
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.NODE_AWAY
