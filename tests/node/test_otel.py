"""`kvstore serve --otel`: spans reach a real OTLP receiver, and one that is dead or stopped has no effect."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from concurrent import futures
from typing import TYPE_CHECKING, Any

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from kvcli.version import VERSION
from kvstore.client import Block, Client, Hit
from kvstore.config import NodeConfig
from kvstore.demo.node_process import NodeProcess
from kvstore.errors import ConfigError
from kvstore.limits import SPANS_STOP_MS
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from tests.nic_offload.rig import wait_until
from tests.ports import next_port
from tests.tracing import Kept

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

WAIT_S = 20.0
SIZE = 20_000
STOP_S = 4.0  # what a node on a busy machine takes to stop, without a collector
TRACEPARENT = ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01")


class Receiver(trace_service_pb2_grpc.TraceServiceServicer):
    """A collector: keeps what it receives, or hangs until `let_go` is set."""

    def __init__(self, *, hangs: bool = False, port: int = 0) -> None:
        self.spans: list[tuple[dict[str, str], Any]] = []  # with the resource's attributes
        self.came = threading.Condition()
        self.let_go = threading.Event()
        if not hangs:
            self.let_go.set()
        self._server = grpc.server(futures.ThreadPoolExecutor(4))
        trace_service_pb2_grpc.add_TraceServiceServicer_to_server(self, self._server)  # type: ignore[no-untyped-call]
        self.endpoint = f"http://127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{port}')}"
        self._server.start()

    def Export(self, request: Any, context: object) -> Any:  # noqa: N802, ARG002 - the proto's
        self.let_go.wait(10 * WAIT_S)
        with self.came:
            for of_resource in request.resource_spans:
                whose = {one.key: one.value.string_value for one in of_resource.resource.attributes}
                for of_scope in of_resource.scope_spans:
                    self.spans += [(whose, span) for span in of_scope.spans]
            self.came.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(self, name: str) -> tuple[dict[str, str], Any]:
        def found() -> list[tuple[dict[str, str], Any]]:
            return [one for one in self.spans if one[1].name == name]

        with self.came:
            assert self.came.wait_for(lambda: bool(found()), WAIT_S), [one.name for _, one in self.spans]
            return found()[0]

    def close(self) -> None:
        self.let_go.set()
        self._server.stop(0).wait(WAIT_S)


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    receiver = Receiver()
    yield receiver
    receiver.close()


def start(tmp_path: Path, endpoint: str) -> NodeProcess:
    return NodeProcess(tmp_path / "node", capacity="64MiB", arguments=("--otel", endpoint))


def put_and_get(client: Client, number: int = 0) -> None:
    region = client.register(bytearray(SIZE))
    block = Block(block_key(b"otel", number.to_bytes(4)), region, 0, SIZE)
    with FlagWords.create(1) as flags:
        puts = client.arm([block], flags[0])
        flags[0].store(1)
        assert puts.wait(WAIT_S)[0].error is None
    assert client.get([block], timeout_s=WAIT_S) == [Hit(block.key)]
    region.close()


def test_spans_reach_a_collector_and_are_the_client_s_children(tmp_path: Path, receiver: Receiver) -> None:
    kept = Kept()
    with start(tmp_path, receiver.endpoint) as node:
        with Client(node.target, tracer_provider=kept.provider) as client:
            put_and_get(client)
            name = client.status().node
        assert f"spans to {receiver.endpoint}" in node.log()
        whose, put = receiver.wait_for("kvstore.node.put")
        assert whose["service.name"] == "kvstore"
        assert whose["service.instance.id"] == name
        assert whose["service.version"] == VERSION
        _, write = receiver.wait_for("kvstore.node.drive.write")
        _, fetch = receiver.wait_for("kvstore.node.fetch")
    of_client = {span.name: span for span in kept.spans}
    for theirs, ours in ((put, of_client["kvstore.put"]), (fetch, of_client["kvstore.get"])):
        assert ours.context is not None
        assert theirs.trace_id == ours.context.trace_id.to_bytes(16)
        assert theirs.parent_span_id == ours.context.span_id.to_bytes(8)
    assert write.parent_span_id == put.span_id
    put_of_client = of_client["kvstore.put"]
    assert put_of_client.start_time is not None
    assert put_of_client.start_time <= put.start_time_unix_nano <= write.end_time_unix_nano


def test_waiting_spans_are_sent_when_the_node_stops(tmp_path: Path, receiver: Receiver) -> None:
    with start(tmp_path, receiver.endpoint) as node:
        with Client(node.target, tracer_provider=Kept().provider) as client:
            put_and_get(client)
        assert node.stop() == 0
    receiver.wait_for("kvstore.node.put")


def test_calls_without_a_parent_or_with_a_bad_one_make_no_spans(tmp_path: Path, receiver: Receiver) -> None:
    with start(tmp_path, receiver.endpoint) as node:
        with Client(node.target) as client:
            put_and_get(client)
            good = TRACEPARENT[1]
            for bad in (good[:-2] + "00", good.upper(), good + "-x", "x" * 1000):
                exists(node.target, bad)
            exists(node.target, good)
        receiver.wait_for("kvstore.node.exists")
        log = node.log()
    assert [span.name for _, span in receiver.spans] == ["kvstore.node.exists"]
    assert "xxxx" not in log


def exists(target: str, traceparent: str) -> None:
    """Make a call as any client may."""
    from kvstore.wire import blocks_pb2, blocks_pb2_grpc, kvstore_pb2  # noqa: PLC0415 - only here

    with grpc.insecure_channel(target) as channel:
        stub = blocks_pb2_grpc.BlocksStub(channel)  # type: ignore[no-untyped-call]
        name = kvstore_pb2.BlockName(key=block_key(b"x"), fingerprint=bytes(16))
        request = blocks_pb2.ExistsRequest(tenant="acme", blocks=[name])
        stub.Exists(request, timeout=WAIT_S, metadata=[("traceparent", traceparent)])


@pytest.mark.parametrize("how", ["refuses", "hangs in its call", "takes connections and says nothing"])
def test_an_absent_collector_loses_spans_and_nothing_else(tmp_path: Path, how: str) -> None:
    hanging = Receiver(hangs=True)
    silent = socket.create_server(("127.0.0.1", 0))
    endpoint = {
        "refuses": f"http://127.0.0.1:{next_port()}",
        "hangs in its call": hanging.endpoint,
        "takes connections and says nothing": f"http://127.0.0.1:{silent.getsockname()[1]}",
    }[how]
    with start(tmp_path, endpoint) as node:
        with Client(node.target, tracer_provider=Kept().provider) as client:
            began_s = time.monotonic()
            for number in range(100):
                put_and_get(client, number)
            assert time.monotonic() - began_s < WAIT_S
        began_s = time.monotonic()
        assert node.stop() == 0
        assert time.monotonic() - began_s < STOP_S + SPANS_STOP_MS / 1000
        assert node.log().count("accepts no spans") <= 1
        assert "Traceback" not in node.log()
    hanging.close()
    silent.close()


def test_a_collector_that_returns_gets_spans_again(tmp_path: Path) -> None:
    port = next_port()
    with start(tmp_path, f"http://127.0.0.1:{port}") as node:
        exists(node.target, TRACEPARENT[1])
        wait_until(lambda: "accepts no spans; the node continues" in node.log(), "the log line")
        receiver = Receiver(port=port)
        exists(node.target, TRACEPARENT[1])
        receiver.wait_for("kvstore.node.exists")
        wait_until(lambda: "is back; 1 spans were lost" in node.log(), "the log line")
    receiver.close()


def test_an_invalid_endpoint_is_refused(tmp_path: Path) -> None:
    for bad in (
        "localhost:4317",
        "ftp://localhost:4317",
        "http://localhost",
        "http://a b:4317",
        "http://:4317",
        "",
    ):
        with pytest.raises(ConfigError, match=r"write http://HOST:PORT or https://HOST:PORT"):
            NodeConfig(tmp_path, otel=bad)
    for good in ("http://localhost:4317", "https://otel.example.org:4317/", "http://[::1]:4317"):
        assert NodeConfig(tmp_path, otel=good).otel == good


def test_without_the_package_the_node_says_what_to_install(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "sys.modules['opentelemetry'] = None\n"
        "from kvstore.cli import main\n"
        "sys.exit(main(sys.argv[1:]))\n"
    )
    arguments = ("serve", "--data", str(tmp_path / "node"), "--capacity", "64MiB", "--listen", "127.0.0.1:0")
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--otel", "http://127.0.0.1:4317"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "with the extra otel" in done.stderr
    assert "Traceback" not in done.stderr
