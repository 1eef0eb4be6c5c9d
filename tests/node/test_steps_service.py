"""The calls of the service Steps: answered in time, refused at a bound, and the report of a prefetch."""

from __future__ import annotations

import os
import signal
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from kvstore.errors import DeadlineExceeded, NodeUnavailable, Overloaded
from kvstore.limits import BATCH_BLOCKS_MAX, PREFETCHES_MAX, RPC_TIMEOUT_MS, SHARES
from kvstore.miss import MissReason
from kvstore.names import block_key
from kvstore.node import steps_service
from kvstore.steps import Step
from kvstore.storage.items import GetDone
from kvstore.wire import sessions_pb2, steps_pb2_grpc
from kvstore.wire import steps_pb2 as pb
from tests.conftest import small_client
from tests.nic_offload.rig import wait_until
from tests.node.in_process import HOT_BYTES, NodeInProcess
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterator
    from pathlib import Path

    from kvstore.client import Client
    from kvstore.demo.node_process import NodeProcess
    from kvstore.node.node import Node
    from kvstore.node.prefetch import Asked, Prefetched

SIZE = 20_000


def key(number: int) -> bytes:
    return block_key(b"ahead", number.to_bytes(4))


@pytest.fixture
def here(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "data") as node:
        yield node


@pytest.fixture
def client(here: NodeInProcess) -> Iterator[Client]:
    with small_client(here.target, tenant="acme") as client:
        for number in range(20):
            client.put_inline(key(number), bytes([number]) * SIZE)
        yield client


def busy(node: Node, *, is_busy: bool) -> None:
    """Pretend that other work waits for the drive, or not."""
    node.prefetches._is_wanted_elsewhere = lambda: is_busy
    node.prefetches.pump()


def test_a_prefetch_reports_blocks_in_memory_pending_and_missing(here: NodeInProcess, client: Client) -> None:
    client.delete([key(3)])
    read = client.prefetch([key(number) for number in range(30)])
    assert read.unread == []
    assert sorted(read.missing) == sorted(key(number) for number in (3, *range(20, 30)))
    assert {miss.reason for miss in read.missing.values()} == {MissReason.UNKNOWN}
    assert here.call(lambda node: node.hot.pages.statistics().kept) == 19
    assert client.prefetch([key(5)]).unread == [], "what lies there already counts"


def test_a_prefetch_beyond_the_share_reports_the_rest(client: Client) -> None:
    size = 1 << 20
    count = HOT_BYTES // SHARES // size + 2
    keys = [block_key(b"large", bytes([number])) for number in range(count)]
    for name in keys:
        client.put_inline(name, bytes(size))
    read = client.prefetch(keys)
    assert read.unread == keys[-3:], "a header page each: so one fewer than would just fit"
    assert not read.missing


def test_a_prefetch_that_gets_no_turn_is_answered_by_its_deadline(
    here: NodeInProcess, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps_service, "RPC_TIMEOUT_MS", 50)
    here.call(lambda node: busy(node, is_busy=True))
    begun_s = time.monotonic()
    read = client.prefetch([key(0), key(1)])
    assert read.unread == [key(0), key(1)]
    assert time.monotonic() - begun_s < 5.0
    here.call(lambda node: busy(node, is_busy=False))
    wait_until(
        lambda: here.call(lambda node: node.hot.pages.statistics().kept) == 2, "it is read all the same"
    )


def tenant_of(node: Node) -> bytes:
    """The only tenant that has a trace."""
    (tenant,) = node.traces._of
    return tenant


def queued(
    node: Node, flow: Hashable, keys: list[bytes], ended: Callable[[Prefetched], object] | None = None
) -> Asked:
    wish = node.prefetches.wish(tenant_of(node), flow, ended)
    wish.add(keys)
    return node.prefetches.queue(wish)


def test_prefetches_are_bounded(here: NodeInProcess, client: Client) -> None:
    def fill(node: Node) -> None:
        busy(node, is_busy=True)
        for number in range(PREFETCHES_MAX // SHARES):
            assert queued(node, ("other", number), [key(number)]).blocks == 1

    client.session("user", "chat").append([key(0)], 16)
    here.call(fill)
    begun_s = time.monotonic()
    with pytest.raises(Overloaded):
        client.prefetch([key(19)])
    assert time.monotonic() - begun_s < RPC_TIMEOUT_MS / 2000
    here.call(lambda node: busy(node, is_busy=False))
    assert client.prefetch([key(19)]).unread == []


def test_a_prefetch_of_a_session_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one call would make everybody wait until tens of thousands of blocks are queued."""
    monkeypatch.setattr("kvstore.node.prefetch.PREFETCH_BLOCKS_MAX", 3)
    client.session("user", "chat").append([key(number) for number in range(5)], 16)
    assert client.session("user", "chat").prefetch() == 3


def test_a_prefetch_requested_again_before_it_is_done_ends_the_first_request(
    here: NodeInProcess, client: Client
) -> None:
    first: list[Prefetched] = []
    second: list[Prefetched] = []

    def ask(node: Node) -> None:
        busy(node, is_busy=True)
        keys = [key(number) for number in range(5)]
        queued(node, "flow", keys, first.append)
        assert first == []
        queued(node, "flow", keys, second.append)
        assert [done.came for done in first] == [()], "nothing of it had been read"
        queued(node, "nothing", [], first.append)
        busy(node, is_busy=False)

    client.session("user", "chat").append([key(0)], 16)
    here.call(ask)
    wait_until(lambda: len(second) == 1, "the second asking has ended")
    assert sorted(second[0].came) == sorted(key(number) for number in range(5))
    assert second[0].size_bytes == 5 * SIZE
    assert len(first) == 2, "each is told once"


def test_what_is_still_read_when_the_node_ends_is_not_kept(here: NodeInProcess, client: Client) -> None:
    """Its memory may be closed by then."""

    def end(node: Node) -> None:
        prefetches, reads = node.prefetches, list[tuple[Any, Any]]()
        store, memory = prefetches._store, prefetches._memory
        prefetches._store = SimpleNamespace(lookup=store.lookup, get=lambda *read: reads.append(read))  # type: ignore[assignment]
        queued(node, "flow", [key(0)], lambda _: None)
        prefetches.close()
        [(items, arrived)] = reads
        prefetches._memory = None  # type: ignore[assignment]
        arrived([GetDone(items[0].tag, None, SIZE, 0, 1)])
        prefetches._store, prefetches._memory = store, memory

    client.session("user", "chat").append([key(0)], 16)
    here.call(end)


def test_calls_that_name_too_much_or_nothing_are_refused(here: NodeInProcess) -> None:
    name = sessions_pb2.SessionName(user="u" * 129, session="s")
    bad: dict[str, list[Any]] = {
        "PrefetchBlocks": [
            pb.PrefetchBlocksRequest(),
            pb.PrefetchBlocksRequest(keys=[b"short"]),
            pb.PrefetchBlocksRequest(keys=[key(0)] * (BATCH_BLOCKS_MAX + 1)),
        ],
        "ReportSteps": [pb.ReportStepsRequest(), pb.ReportStepsRequest(seen=pb.SeenByCaller(user="ada"))],
        "GetTrace": [pb.GetTraceRequest(), pb.GetTraceRequest(name=name)],
    }
    with grpc.insecure_channel(here.target) as channel:
        stub: Any = steps_pb2_grpc.StepsStub(channel)  # type: ignore[no-untyped-call]
        for call, requests in bad.items():
            for request in requests:
                with pytest.raises(grpc.RpcError) as caught:
                    getattr(stub, call)(request, timeout=20)
                assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_an_unresponsive_node_costs_each_call_its_deadline_and_a_report_nothing(
    node: NodeProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small_client(node.target) as client:
        monkeypatch.setattr(client._steps, "_timeout_s", 0.2)
        chat = client.session("ada", "chat")
        client.put_inline(key(0), b"x")
        chat.append([key(0)], 16)
        stop(node.pid)
        for call in (chat.trace, lambda: client.prefetch([key(0)])):
            begun_s = time.monotonic()
            with pytest.raises((DeadlineExceeded, NodeUnavailable)):
                call()
            assert time.monotonic() - begun_s < 5.0
        chat.mark(Step.ANSWERED)
        chat.report()
        assert time.monotonic() - begun_s < 10.0
        os.kill(node.pid, signal.SIGCONT)
        client.status(wait_s=20.0)
        assert [one.step for one in chat.trace().seen if one.step is not Step.ANSWERED] == [Step.APPENDED]


def test_concurrent_traces_stay_separate(here: NodeInProcess, client: Client) -> None:
    def tell(number: int) -> None:
        chat = client.session("ada", f"chat {number}")
        chat.append([key(number)], number + 1)
        for _ in range(20):
            chat.mark(Step.COMPUTED, tokens=number)
            chat.report()

    threads = [threading.Thread(target=tell, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(8):
        seen = client.session("ada", f"chat {number}").trace().seen
        assert [one.tokens for one in seen] == [number + 1, *[number] * 20]
    assert here.call(lambda node: len(node.traces)) == 8
