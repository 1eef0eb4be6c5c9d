"""What a node publishes is read by vLLM's own decoder of KV events."""

from __future__ import annotations

import pytest

events_of_vllm = pytest.importorskip(
    "vllm.distributed.kv_events", reason="vLLM is in .venv-engines only: make test-engines"
)

import msgspec  # noqa: E402
import zmq  # noqa: E402

from kvstore.clock import SystemClock  # noqa: E402
from kvstore.config import EventsConfig  # noqa: E402
from kvstore.node.kv_events import KvEvents  # noqa: E402
from kvstore.storage.eviction.types import Reason  # noqa: E402
from tests.storage.index_rows import rows  # noqa: E402

TENANT = b"t" * 16


@pytest.mark.timeout(60)
def test_vllm_reads_a_nodes_events() -> None:
    events = KvEvents(EventsConfig("tcp://127.0.0.1:*", "tcp://127.0.0.1:*"), SystemClock())
    events.blocks(rows([(TENANT, b"a" * 32), (TENANT, b"b" * 32)]), None)
    events.blocks(rows([(TENANT, b"a" * 32)]), Reason.SPACE)
    with zmq.Context() as context, context.socket(zmq.DEALER) as replay:
        replay.linger = 0
        replay.connect(events.endpoints[1])
        replay.send_multipart([b"", (0).to_bytes(8)])
        payloads = []
        while True:
            assert replay.poll(20_000)
            _, sequence, payload = replay.recv_multipart()
            if int.from_bytes(sequence, signed=True) == -1:
                break
            payloads.append(payload)
    events.close()
    decode = msgspec.msgpack.Decoder(events_of_vllm.KVEventBatch).decode
    (stored,), (removed,) = (decode(payload).events for payload in payloads)
    assert isinstance(stored, events_of_vllm.BlockStored)
    assert stored.block_hashes == [b"a" * 32, b"b" * 32]
    assert (stored.medium, stored.token_ids) == (events_of_vllm.MEDIUM_STORAGE, [])
    assert isinstance(removed, events_of_vllm.BlockRemoved)
    assert removed.block_hashes == [b"a" * 32]
