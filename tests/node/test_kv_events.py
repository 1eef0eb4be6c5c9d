"""KV events over ZeroMQ: the format of vLLM's consumers, visible gaps, and replay of missed events."""

from __future__ import annotations

import asyncio
import socket
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
import zmq

from kvstore.config import EventsConfig, NodeConfig
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import CannotListen, ConfigError, NodeUnavailable
from kvstore.limits import EVENTS_QUEUED_MAX, HOT_BYTES_MIN
from kvstore.names import block_key
from kvstore.node import server
from kvstore.node.kv_events import KvEvents
from kvstore.node.node import Node
from kvstore.serve_options import Settings
from kvstore.storage.eviction.types import Reason
from tests.conftest import small_client, small_node
from tests.storage.fakes import FakeClock
from tests.storage.index_rows import padded, rows

if TYPE_CHECKING:
    from collections.abc import Iterator


_WAIT_MS = 20_000
TENANT, OTHER = b"t" * 16, b"o" * 16


class _Subscriber:
    """A subscriber; it waits for an event of a block of its own, because a new one may miss the first events."""

    def __init__(self, endpoint: str, topic: bytes = b"") -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.SUBSCRIBE, topic)
        self._socket.connect(endpoint)

    def next(self) -> tuple[bytes, int, list[Any]]:
        assert self._socket.poll(_WAIT_MS), "no event came"
        topic, sequence, payload = self._socket.recv_multipart()
        return topic, int.from_bytes(sequence), msgspec.msgpack.decode(payload)

    def hears(self, events: KvEvents) -> None:
        until_s = time.monotonic() + _WAIT_MS / 1000
        while not self._socket.poll(10):
            assert time.monotonic() < until_s
            events.blocks(rows([(TENANT, b"hello")]), None)
        while self._socket.poll(100):
            self._socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


def _dealt_again(endpoint: str, first: int) -> list[int]:
    """Request a replay with a DEALER, as vLLM's example does: one request may have many answers."""
    context = zmq.Context()
    try:
        request = context.socket(zmq.DEALER)
        request.connect(endpoint)
        request.send_multipart([b"", first.to_bytes(8)])
        came: list[int] = []
        while True:
            assert request.poll(_WAIT_MS), "no answer came"
            _, sequence, _ = request.recv_multipart()
            number = int.from_bytes(sequence, signed=True)
            if number == -1:
                return came
            came.append(number)
    finally:
        context.destroy(linger=0)


@pytest.fixture
def events() -> Iterator[KvEvents]:
    config = EventsConfig("tcp://127.0.0.1:*", "tcp://127.0.0.1:*")
    publisher = KvEvents(config, FakeClock())
    yield publisher
    publisher.close()


def test_a_node_publishes_stored_evicted_and_deleted_blocks(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/events"
    arguments = ["--events", endpoint]
    with (
        NodeProcess(tmp_path / "node", capacity="16MiB", arguments=arguments) as node,
        small_client(node.target) as client,
    ):
        subscriber = _Subscriber(endpoint)
        keys = [block_key(bytes([number])) for number in range(40)]
        until_s = time.monotonic() + 20
        while not subscriber._socket.poll(20):  # a subscription takes a moment to arrive
            assert time.monotonic() < until_s
            client.put_inline(keys[0], b"x")
            client.delete([keys[0]])
        for key in keys:
            client.put_inline(key, bytes(1 << 20))
        client.delete([keys[-1]])
        stored: list[bytes] = []
        gone: list[bytes] = []
        while keys[-1] not in gone:
            _, _, (at_s, (event,), rank) = subscriber.next()
            assert rank is None
            assert abs(at_s - time.time()) < 60
            assert event["medium"] == "STORAGE"
            (stored if event["type"] == "BlockStored" else gone).extend(event["block_hashes"])
        assert stored[-40:] == keys
        assert keys[1] in gone, "the drive has room for fewer than were put"
        subscriber.close()


def test_maps_and_arrays_encode_the_same_events() -> None:
    said = []
    for as_arrays in (False, True):
        publisher = KvEvents(EventsConfig("tcp://127.0.0.1:*", as_arrays=as_arrays), FakeClock())
        subscriber = _Subscriber(publisher.endpoints[0])
        subscriber.hears(publisher)
        publisher.blocks(rows([(TENANT, b"a"), (TENANT, b"b")]), None)
        publisher.blocks(rows([(TENANT, b"a")]), Reason.SPACE)
        said.append([subscriber.next()[2][1][0] for _ in range(2)])
        subscriber.close()
        publisher.close()
    maps, arrays = said
    assert [list(one.values()) for one in maps] == arrays
    assert arrays == [
        ["BlockStored", [padded(b"a"), padded(b"b")], None, [], 0, None, "STORAGE", None],
        ["BlockRemoved", [padded(b"a")], "STORAGE"],
    ]


def test_each_tenant_has_a_topic_and_there_is_one_sequence(events: KvEvents) -> None:
    subscriber = _Subscriber(events.endpoints[0])
    subscriber.hears(events)
    events.blocks(rows([(TENANT, b"a"), (OTHER, b"b"), (TENANT, b"c")]), None)
    first, second = subscriber.next(), subscriber.next()
    assert (first[0], first[2][1][0]["block_hashes"]) == (
        b"kv@" + TENANT.hex().encode(),
        [padded(b"a"), padded(b"c")],
    )
    assert (second[0], second[2][1][0]["block_hashes"]) == (b"kv@" + OTHER.hex().encode(), [padded(b"b")])
    assert second[1] == first[1] + 1
    subscriber.close()


def test_missed_events_can_be_replayed(events: KvEvents) -> None:
    for number in range(5):
        events.blocks(rows([(TENANT, bytes([number]))]), None)
    assert _dealt_again(events.endpoints[1], 0) == [0, 1, 2, 3, 4]
    assert _dealt_again(events.endpoints[1], 3) == [3, 4]
    assert _dealt_again(events.endpoints[1], 99) == []


def test_a_block_whose_record_is_replaced_is_not_reported_as_removed(events: KvEvents) -> None:
    events.blocks(rows([(TENANT, b"a")]), Reason.SUPERSEDED)
    events.blocks(rows([(TENANT, b"a")]), None)
    assert _dealt_again(events.endpoints[1], 0) == [0]


def test_events_beyond_the_queue_are_counted_and_leave_a_gap(events: KvEvents) -> None:
    subscriber = _Subscriber(events.endpoints[0])
    subscriber.hears(events)
    events.blocks(rows([(TENANT, b"before")]), None)
    _, before, _ = subscriber.next()
    events.blocks(rows([(TENANT, b"x")] * (EVENTS_QUEUED_MAX + 1)), None)
    assert events.dropped == EVENTS_QUEUED_MAX + 1
    events.blocks(rows([(TENANT, b"after")]), None)
    _, after, batch = subscriber.next()
    assert batch[1][0]["block_hashes"] == [padded(b"after")]
    assert after == before + 2
    subscriber.close()


@pytest.mark.parametrize(
    "endpoint", ["tcp://*:5557", "tcp://10.0.0.1:5557", "tcp://[::]:1", "udp://127.0.0.1:1"]
)
def test_events_stay_on_this_machine(tmp_path: Path, endpoint: str) -> None:
    with pytest.raises(ConfigError, match="ZeroMQ does not authenticate"):
        NodeConfig(data=tmp_path, events=EventsConfig(endpoint))


def test_a_taken_endpoint_ends_the_node_with_one_sentence(tmp_path: Path) -> None:
    with zmq.Context() as context, context.socket(zmq.PUB) as taken:
        port = taken.bind_to_random_port("tcp://127.0.0.1")
        arguments = ["--events", f"tcp://127.0.0.1:{port}"]
        with pytest.raises(NodeUnavailable, match="can't be published"):
            small_node(tmp_path / "node", arguments=arguments)


def test_a_node_that_ends_before_it_serves_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise its timer would use a closed drive while the process ends: a segmentation fault."""
    made: list[Node] = []

    class Seen(Node):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    monkeypatch.setattr(server, "Node", Seen)
    monkeypatch.setattr(server, "check_port", lambda _host, _port: None)  # it is taken a moment later
    with socket.create_server(("127.0.0.1", 0)) as taken:
        told = Settings.of(
            {
                "data": tmp_path / "node",
                "capacity": 16 << 20,
                "listen": taken.getsockname(),
                "hot": HOT_BYTES_MIN,
            }
        )
        with pytest.raises(CannotListen, match="is in use by another process"):
            asyncio.run(server._serve(told, lambda: told))
    assert made[0].ticks._timer.cancelled()


def test_a_node_with_tenants_publishes_no_events() -> None:
    """Any subscriber receives all tenants' blocks: ZeroMQ does not authenticate."""
    with pytest.raises(ConfigError, match="a node with --tenants refuses it"):
        NodeConfig(Path(), tenants=Path("tenants.toml"), events=EventsConfig("ipc:///events"))
