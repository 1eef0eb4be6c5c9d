"""The node's record of traced puts, without a node: bounded, and each lease counted once."""

from __future__ import annotations

from kvstore.durability import Durability
from kvstore.limits import SPAN_GROUPS_MAX
from kvstore.node.call_spans import NodeSpans
from kvstore.node.landing import Lease
from kvstore.node.otel import Collector
from kvstore.node.span_notes import End
from kvstore.wire.traceparent import TraceParent
from tests.storage.fakes import FakeClock
from tests.tracing import Kept, attributes_of, children_of, named

PARENT = TraceParent(1, 2, sampled=True)


def leases_of(count: int) -> list[Lease]:
    return [Lease(n, n, b"k" * 32, b"f" * 16, 100, Durability.WRITTEN, 0, 0) for n in range(count)]


def test_blocks_landing_one_by_one_make_a_bounded_number_of_spans() -> None:
    kept, clock = Kept(of_node=True), FakeClock()
    spans, leases = NodeSpans(kept.provider, clock), leases_of(100)
    spans.leased(PARENT, clock.monotonic_ns(), leases, Durability.WRITTEN)
    for number, lease in enumerate(leases):
        lease.landed_ns = clock.monotonic_ns() + 10 * number
        spans.landed([(lease, lease.landed_ns - 5)], lease.landed_ns)
        assert kept.spans == ()
        spans.ended([(lease, End.KEPT)], lease.landed_ns + 3)
    (put,) = named(kept.spans, "kvstore.node.put")
    assert put.parent is not None
    assert (put.parent.trace_id, put.parent.span_id) == (1, 2)
    writes = named(children_of(put, kept.spans), "kvstore.node.drive.write")
    assert len(writes) == SPAN_GROUPS_MAX
    assert [attributes_of(one)["kvstore.blocks"] for one in writes] == [1] * (SPAN_GROUPS_MAX - 1) + [
        100 - SPAN_GROUPS_MAX + 1
    ]
    assert writes[-1].end_time == put.end_time


def test_a_lease_that_expires_and_is_returned_later_ends_once() -> None:
    kept, clock = Kept(of_node=True), FakeClock()
    spans, leases = NodeSpans(kept.provider, clock), leases_of(2)
    spans.leased(PARENT, clock.monotonic_ns(), [*leases, None], Durability.WRITTEN)
    spans.ended([(leases[0], End.EXPIRED)], clock.monotonic_ns())
    spans.ended([(leases[0], End.GIVEN_BACK)], clock.monotonic_ns())
    assert kept.spans == ()
    spans.ended([(leases[1], End.FAILED)], clock.monotonic_ns())
    (put,) = named(kept.spans, "kvstore.node.put")
    said = attributes_of(put)
    assert (said["kvstore.blocks.expired"], said["kvstore.blocks.failed"]) == (1, 1)
    assert (said["kvstore.blocks.kept"], said["kvstore.blocks.stored_before"]) == (0, 1)
    assert "kvstore.blocks.given_back" not in said


def test_a_node_starts_no_trace_of_its_own() -> None:
    collector = Collector("http://127.0.0.1:9", "a node", FakeClock())
    assert not collector.spans._tracer.start_span("of nobody").is_recording()
    collector.close()
