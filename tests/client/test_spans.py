"""One put, get or resume is one trace over client, NIC, node and drive, with a real client and node."""

from __future__ import annotations

import subprocess
import sys
import threading
from typing import TYPE_CHECKING, Any

import pytest
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF
from opentelemetry.trace import NoOpTracerProvider, StatusCode

from kvstore.client import Arrivals, Block, Client, Hit, Nodes
from kvstore.demo.node_process import NodeProcess
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, KeyTaken, NodeUnavailable, Overloaded
from kvstore.limits import (
    RESUME_AHEAD_BATCHES,
    RESUME_BATCH_BLOCKS,
    SPAN_GROUPS_MAX,
    SPANS_CLOSE_MS,
    STEP_FIRINGS_MAX,
)
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from nic_offload.flags import FlagWords
from nic_offload.match_action import Request, Table
from nic_offload.match_file import parse_rules
from tests.node.in_process import NodeInProcess
from tests.tracing import Kept, attributes_of, children_of, named, one_trace

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from opentelemetry.sdk.trace import ReadableSpan

WAIT_S = 20.0
SIZE = 50_000
SLACK_NS = (
    10_000_000_000  # a node hears that its last block has been sent when the client has had it for a moment
)
KEYS = [block_key(b"spans", number.to_bytes(4)) for number in range(64)]


class Both:
    """A client and a node, each with a provider of its own, as two processes would have."""

    def __init__(self, data: Path, client: Kept | None = None) -> None:
        self.of_client, self.of_node = client or Kept(), Kept(of_node=True)
        self.node = NodeInProcess(data, tracer_provider=self.of_node.provider)
        self.client = Client(
            self.node.target, tenant="acme", slots=64, tracer_provider=self.of_client.provider
        )
        self._closed = False
        self.memory = bytearray(len(KEYS) * SIZE)
        self.region = self.client.register(self.memory)

    def block(self, number: int) -> Block:
        return Block(KEYS[number], self.region, number * SIZE, SIZE, threshold=number + 1)

    def put(self, blocks: list[Block], durability: Durability = Durability.WRITTEN, steps: int = 1) -> None:
        """Put blocks, with one store to the flag word for every `steps` of them."""
        with FlagWords.create(1) as flags:
            puts = self.client.reserve(blocks, durability=durability).arm(flags[0])
            for at in range(0, len(blocks), steps):
                flags[0].store(blocks[min(at + steps, len(blocks)) - 1].threshold)
            assert all(one.error is None for one in puts.wait(WAIT_S))

    def clear(self, of_client: str, of_node: str) -> None:
        """Discard the spans so far, once these have ended."""
        self.of_client.wait_for(of_client)
        self.of_node.wait_for(of_node)
        self.of_client.clear()
        self.of_node.clear()

    def close(self) -> tuple[ReadableSpan, ...]:
        """Close both; returns all spans."""
        self.client.close()
        if not self._closed:
            self._closed = True
            self.node.close()
        return (*self.of_client.spans, *self.of_node.spans)


@pytest.fixture
def both(tmp_path: Path) -> Iterator[Both]:
    both = Both(tmp_path / "node")
    yield both
    both.close()


def end_of(span: ReadableSpan) -> int:
    assert span.end_time is not None
    return span.end_time


@pytest.mark.parametrize("durability", [Durability.WRITTEN, Durability.SYNCED])
def test_a_put_is_one_trace_from_the_reservation_to_the_drive(both: Both, durability: Durability) -> None:
    both.put([both.block(number) for number in range(6)], durability, steps=2)
    spans = both.close()
    root = one_trace(spans)
    assert root.name == "kvstore.put"
    assert attributes_of(root) == {
        "kvstore.node": both.node.target,
        "kvstore.blocks": 6,
        "kvstore.bytes": 6 * SIZE,
        "kvstore.durability": durability.name.lower(),
        "kvstore.blocks.stored_before": 0,
        "kvstore.blocks.failed": 0,
    }
    events = [event.name for event in root.events]
    assert events[:2] == ["reserved", "armed"]
    assert sorted(events[2:]) == sorted(["flag seen"] * 6 + ["landed", durability.name.lower()])
    sent = named(spans, "kvstore.nic.send")
    assert [attributes_of(one)["kvstore.threshold.first"] for one in sent] == [1, 2, 3, 4, 5, 6]

    (put,) = named(spans, "kvstore.node.put")
    assert put in children_of(root, spans)
    assert end_of(put) <= end_of(root)  # it ends before the client is told
    said = attributes_of(put)
    assert (said["kvstore.blocks"], said["kvstore.blocks.kept"], said["kvstore.bytes"]) == (6, 6, 6 * SIZE)
    assert len(named(children_of(put, spans), "kvstore.node.lease")) == 1
    crcs, writes = named(spans, "kvstore.node.crc"), named(spans, "kvstore.node.drive.write")
    assert set(map(id, crcs + writes)) <= set(map(id, children_of(put, spans)))
    assert sum(int(str(attributes_of(one)["kvstore.blocks"])) for one in writes) == 6
    for crc, write in zip(crcs, writes, strict=True):
        assert end_of(crc) == write.start_time  # one begins where the other ends
        assert end_of(write) <= end_of(put)


def test_a_put_of_many_thresholds_has_a_bounded_number_of_spans(both: Both) -> None:
    both.put([both.block(number) for number in range(40)])
    spans = both.close()
    one_trace(spans)
    sent = named(spans, "kvstore.nic.send")
    assert len(sent) == STEP_FIRINGS_MAX
    assert sum(int(str(attributes_of(one)["kvstore.blocks"])) for one in sent) == 40
    writes = named(spans, "kvstore.node.drive.write")
    assert len(writes) <= SPAN_GROUPS_MAX
    assert sum(int(str(attributes_of(one)["kvstore.blocks"])) for one in writes) == 40


def test_a_stored_block_is_counted_and_nothing_is_sent(both: Both) -> None:
    both.put([both.block(0)])
    both.clear("kvstore.put", "kvstore.node.put")
    both.put([both.block(0)])
    spans = both.close()
    root = one_trace(spans)
    assert attributes_of(root)["kvstore.blocks.stored_before"] == 1
    assert [span.name for span in spans if span is not root] == ["kvstore.node.lease", "kvstore.node.put"]


def test_a_returned_reservation_ends_its_trace(both: Both) -> None:
    both.client.reserve([both.block(0), both.block(1)]).give_back()
    spans = both.close()
    assert attributes_of(one_trace(spans))["kvstore.given_back"] is True
    (put,) = named(spans, "kvstore.node.put")
    assert attributes_of(put)["kvstore.blocks.given_back"] == 2


def test_a_missing_flag_is_an_error_on_both_sides(both: Both) -> None:
    with FlagWords.create(1) as flags:
        puts = both.client.reserve([both.block(0), both.block(1)], lease_ms=2500).arm(flags[0])
        flags[0].store(1)
        assert [type(one.error) for one in puts.wait(WAIT_S)] == [type(None), DeadlineExceeded]
    both.of_node.wait_for("kvstore.node.put")
    spans = both.close()
    root = one_trace(spans)
    assert (root.status.status_code, attributes_of(root)["error.type"]) == (
        StatusCode.ERROR,
        "DeadlineExceeded",
    )
    assert attributes_of(root)["kvstore.blocks.failed"] == 1
    (put,) = named(spans, "kvstore.node.put")
    said = attributes_of(put)
    assert said["kvstore.blocks.kept"] == 1
    assert said.get("kvstore.blocks.given_back", 0) == 1  # the client was first, as it should be


def test_a_refused_reserve_is_an_error(both: Both) -> None:
    both.client.attach()
    held = both.client.reserve([both.block(number) for number in range(64)])
    with pytest.raises(Overloaded):
        both.client.reserve([both.block(0)])
    (refused,) = both.of_client.wait_for("kvstore.put")
    assert (refused.status.status_code, attributes_of(refused)["error.type"]) == (
        StatusCode.ERROR,
        "Overloaded",
    )
    held.give_back()


@pytest.mark.parametrize("where", ["drive", "memory"])
def test_a_cold_and_a_hot_resume_are_one_trace_each(both: Both, where: str) -> None:
    blocks = [both.block(number) for number in range(5)]
    both.put(blocks)
    chat = both.client.session("ada", "chat 7")
    chat.append([block.key for block in blocks], 80)
    if where == "memory":
        assert all(isinstance(one, Hit) for one in both.client.get(blocks, timeout_s=WAIT_S))
        both.of_client.wait_for("kvstore.get")
        both.of_node.wait_for("kvstore.node.fetch")
    both.clear("kvstore.put", "kvstore.node.put")
    assert chat.resume(lambda number, _: both.block(number), timeout_s=WAIT_S).is_whole
    both.of_node.wait_for("kvstore.node.fetch")
    spans = both.close()
    root = one_trace(spans)
    assert root.name == "kvstore.resume"
    said = attributes_of(root)
    assert (said["kvstore.whole"], said["kvstore.blocks.usable"], said["kvstore.tokens.usable"]) == (
        True,
        5,
        80,
    )
    assert len(named(children_of(root, spans), "kvstore.node.session")) == 1
    (get,) = named(children_of(root, spans), "kvstore.get")
    assert attributes_of(get)["kvstore.hits"] == 5
    (fetch,) = named(children_of(get, spans), "kvstore.node.fetch")
    assert attributes_of(fetch)[f"kvstore.hits.{where}"] == 5
    assert attributes_of(fetch)["kvstore.request"] == attributes_of(get)["kvstore.request"]
    assert end_of(fetch) <= end_of(get) + SLACK_NS
    parts = {span.name.removeprefix("kvstore.node.") for span in children_of(fetch, spans)}
    assert parts == {"queue", "send"} | ({"drive.read"} if where == "drive" else set())


def test_all_batches_of_a_long_resume_are_in_its_trace(both: Both) -> None:
    both.put([both.block(0), both.block(1)])
    chat = both.client.session("ada", "chat 7")
    blocks = (RESUME_AHEAD_BATCHES + 2) * RESUME_BATCH_BLOCKS
    chat.append([KEYS[number % 2] for number in range(blocks)], blocks)
    both.clear("kvstore.put", "kvstore.node.put")
    assert chat.resume(lambda number, _: both.block(number % 2), timeout_s=WAIT_S).is_whole
    both.of_node.wait_for("kvstore.node.fetch", RESUME_AHEAD_BATCHES + 2)
    spans = both.close()
    root = one_trace(spans)
    assert len(named(children_of(root, spans), "kvstore.get")) == RESUME_AHEAD_BATCHES + 2


def test_a_miss_has_its_reason(both: Both) -> None:
    blocks = [both.block(number) for number in range(4)]
    both.put(blocks)
    chat = both.client.session("ada", "chat 7")
    chat.append([block.key for block in blocks], 64)
    both.client.delete([blocks[2].key])
    both.clear("kvstore.put", "kvstore.node.put")
    assert not chat.resume(lambda number, _: both.block(number), timeout_s=WAIT_S).is_whole
    both.of_node.wait_for("kvstore.node.fetch")
    spans = both.close()
    said = attributes_of(one_trace(spans))
    assert (said["kvstore.whole"], said["kvstore.miss.reason"], said["kvstore.blocks.usable"]) == (
        False,
        "unknown",
        2,
    )
    (get,) = named(spans, "kvstore.get")
    assert (attributes_of(get)["kvstore.hits"], attributes_of(get)["kvstore.misses.unknown"]) == (3, 1)
    (fetch,) = named(spans, "kvstore.node.fetch")
    assert attributes_of(fetch)["kvstore.misses.deleted"] == 1  # the node knows better


def test_an_absent_node_is_a_miss_in_the_span(tmp_path: Path) -> None:
    kept = Kept()
    with (
        NodeProcess(tmp_path / "node", capacity="64MiB") as node,
        Client(node.target, tracer_provider=kept.provider) as client,
    ):
        region = client.register(bytearray(SIZE))
        node.kill()
        (miss,) = client.get([Block(KEYS[0], region, 0, SIZE)], timeout_s=2.0)
        assert isinstance(miss, Miss)
        assert miss.reason is MissReason.NODE_AWAY
        (get,) = kept.wait_for("kvstore.get")
        with pytest.raises(NodeUnavailable):
            client.reserve([Block(KEYS[0], region, 0, SIZE)])
        (put,) = kept.wait_for("kvstore.put")
    assert attributes_of(put)["error.type"] == "NodeUnavailable"
    assert attributes_of(get)["kvstore.misses.node_away"] == 1


def test_an_arriving_request_is_one_trace(both: Both) -> None:
    table = Table()
    table.replace(
        parse_rules(
            """
[[rule]]
tenant = "acme"
user = "ada"
bind = [{ source = "10.1.0.0/16" }]
actions = ["fetch"]
"""
        )
    )
    request = Request.parse({
        "tenant": "acme", "user": "ada", "context": "chat 7", "model": "m",
        "source": "10.1.2.3", "source_port": 40000,
        "destination": "10.9.9.9", "destination_port": 443, "protocol": "tcp",
    })  # fmt: skip
    blocks = [both.block(number) for number in range(3)]
    both.put(blocks)
    both.client.session("ada", "chat 7").append([block.key for block in blocks], 48)
    both.clear("kvstore.put", "kvstore.node.put")
    provider = both.of_client.provider
    with (
        Nodes([both.node.target], tenant="acme", tracer_provider=provider) as nodes,
        Arrivals(nodes, table, tenant="acme") as arrivals,
    ):
        memory = bytearray(3 * SIZE)
        region = nodes.of("ada").register(memory)
        back = arrivals.arrived(request, lambda number, key: Block(key, region, number * SIZE, SIZE)).whole()
        assert back.is_whole
    both.of_node.wait_for("kvstore.node.fetch")
    spans = both.close()
    root = one_trace(spans)
    assert (root.name, attributes_of(root)["kvstore.whole"]) == ("kvstore.resume", True)
    assert {span.name for span in children_of(root, spans)} >= {"kvstore.get", "kvstore.node.session"}
    assert named(children_of(named(spans, "kvstore.get")[0], spans), "kvstore.node.fetch")


def test_grpc_blocks_are_traced_within_the_applications_own_span(both: Both) -> None:
    tracer = both.of_client.provider.get_tracer("an engine")
    with tracer.start_as_current_span("engine step"):
        both.client.put_inline(KEYS[0], bytes(SIZE))
        both.client.put_many_inline([(KEYS[1], bytes(SIZE)), (KEYS[2], bytes(100))])
        assert isinstance(both.client.get_inline(KEYS[0], SIZE), bytes)
        got = both.client.get_many_inline([(KEYS[1], SIZE), (KEYS[9], SIZE), (KEYS[2], 100)])
        assert isinstance(next(iter(got)), bytes)
        with tracer.start_as_current_span("in between"):  # is no part of the get
            assert [type(one) for one in got] == [Miss, bytes]
        assert both.client.prefix(KEYS[:4]).blocks == 3
    both.of_node.wait_for("kvstore.node.get", 2)
    spans = both.close()
    root = one_trace(spans)
    assert root.name == "engine step"
    names = sorted(span.name for span in children_of(root, spans))
    assert names == [
        "in between",
        "kvstore.get",
        "kvstore.get",
        "kvstore.node.prefix",
        "kvstore.put",
        "kvstore.put",
    ]
    for side in ("kvstore.put", "kvstore.node.put"):
        sizes = [
            (said["kvstore.inline"], said["kvstore.blocks"], said["kvstore.bytes"])
            for said in map(attributes_of, named(spans, side))
        ]
        assert sizes == [(True, 1, SIZE), (True, 2, SIZE + 100)]
    one, three = named(spans, "kvstore.get")
    assert (attributes_of(one)["kvstore.hits"], attributes_of(one)["kvstore.bytes"]) == (1, SIZE)
    assert (attributes_of(three)["kvstore.hits"], attributes_of(three)["kvstore.misses.unknown"]) == (2, 1)
    for get in (one, three):
        assert named(children_of(get, spans), "kvstore.node.get")


def test_a_refused_grpc_block_is_an_error(both: Both) -> None:
    both.client.put_inline(KEYS[2], b"x")
    with pytest.raises(KeyTaken):
        both.client.put_inline(KEYS[2], b"y")
    assert isinstance(both.client.put_many_inline([(KEYS[0], b"x"), (KEYS[2], b"y")])[1].error, KeyTaken)
    _, *refused = both.of_client.wait_for("kvstore.put", 3)
    assert [attributes_of(span)["error.type"] for span in refused] == ["KeyTaken", "KeyTaken"]


# --- who is not traced, and what is not told


@pytest.mark.parametrize("provider", [Kept(sampler=ALWAYS_OFF).provider, NoOpTracerProvider()])
def test_unsampled_calls_make_no_spans(tmp_path: Path, provider: Any) -> None:
    of_node = Kept(of_node=True)
    node = NodeInProcess(tmp_path / "node", tracer_provider=of_node.provider)
    with Client(node.target, tracer_provider=provider) as client, FlagWords.create(1) as flags:
        region = client.register(bytearray(SIZE))
        puts = client.reserve([Block(KEYS[0], region, 0, SIZE)]).arm(flags[0])
        flags[0].store(1)
        assert puts.wait(WAIT_S)[0].error is None
        assert client.get([Block(KEYS[0], region, 0, SIZE)], timeout_s=WAIT_S) == [Hit(KEYS[0])]
    node.close()
    assert of_node.spans == ()


def test_spans_do_not_name_the_owner_of_blocks(both: Both) -> None:
    blocks = [both.block(0)]  # and none of the words below could be a part of an id, which is hex
    both.put(blocks)
    chat = both.client.session("grace hopper", "chat number 7")
    chat.append([blocks[0].key], 16)
    assert chat.resume(lambda number, _: both.block(number), timeout_s=WAIT_S).is_whole
    both.of_node.wait_for("kvstore.node.fetch")
    text = "\n".join(span.to_json() for span in both.close())
    assert "kvstore.node.session" in text
    for word in ("grace", "hopper", "chat", "acme", KEYS[0].hex()):
        assert word not in text


def test_a_hanging_span_processor_delays_nothing(tmp_path: Path) -> None:
    let_go = threading.Event()

    class Hangs(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:  # noqa: ARG002 - the interface's
            let_go.wait(10 * WAIT_S)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Hangs())
    node = NodeInProcess(tmp_path / "node")
    client = Client(node.target, tracer_provider=provider)
    region = client.register(bytearray(SIZE))
    done = threading.Event()

    def work() -> None:
        with FlagWords.create(1) as flags:
            for number in range(50):
                puts = client.reserve([Block(KEYS[number], region, 0, SIZE)]).arm(flags[0])
                flags[0].store(1)
                assert puts.wait(WAIT_S)[0].error is None
                flags[0].store(0)
                assert client.get([Block(KEYS[number], region, 0, SIZE)], timeout_s=WAIT_S) == [
                    Hit(KEYS[number])
                ]
        client.close()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    in_time = done.wait(WAIT_S + SPANS_CLOSE_MS / 1000)
    let_go.set()
    node.close()
    assert in_time


def test_without_a_provider_nothing_of_opentelemetry_is_imported(tmp_path: Path) -> None:
    program = """
import sys
from kvstore.client import Arrivals, Block, Client, Hit
from kvstore.names import block_key
from nic_offload.flags import FlagWords
import kvstore.node.server
with Client(sys.argv[1]) as client, FlagWords.create(1) as flags:
    region = client.register(bytearray(4096))
    block = Block(block_key(b"x"), region, 0, 4096)
    puts = client.reserve([block]).arm(flags[0])
    flags[0].store(1)
    assert puts.wait(10)[0].error is None
    assert client.get([block]) == [Hit(block.key)]
print([name for name in sys.modules if name.startswith("opentelemetry")])
"""
    with NodeProcess(tmp_path / "node", capacity="64MiB") as node:
        done = subprocess.run(
            [sys.executable, "-c", program, node.target],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
