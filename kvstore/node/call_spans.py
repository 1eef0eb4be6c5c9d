"""The node's part of a trace: OpenTelemetry spans of its work for calls that name a sampled parent.

The spans of a look-up are made when it ends. A put continues long after its call was answered: its leases carry a
`PutTrace`, which collects their outcomes, and the spans are made when the last one ends, as children of the
reservation's parent. `otel` makes the provider of a process.

What always holds: without a parent, or with one that is unsampled or malformed, nothing is made and nothing recorded.
Times are those that the node records anyway, and spans are made after acknowledgements have been sent; one put's spans
are bounded, whatever the number of its blocks. Spans contain no tenant, user, session or key.
What it doesn't do: wait; the exporter (`otel`) has a bounded queue.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, TraceFlags

from kvcli.version import VERSION
from kvstore.clock import unix_offset_ns
from kvstore.lookups import HITS, Outcome
from kvstore.node.span_notes import End, PutTrace
from kvstore.wire.traceparent import parent_in

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from opentelemetry.context import Context as TraceContext
    from opentelemetry.util.types import AttributeValue

    from kvstore.clock import Clock
    from kvstore.durability import Durability
    from kvstore.lookups import Lookup
    from kvstore.node.calls import HasMetadata
    from kvstore.node.landing import Tracked
    from kvstore.node.span_notes import LookupTimes
    from kvstore.wire.traceparent import TraceParent

__all__ = ["NodeSpans"]


class NodeSpans:
    """A node's spans. Used in its own thread only."""

    def __init__(self, provider: trace.TracerProvider, clock: Clock) -> None:
        self._tracer = provider.get_tracer("kvstore", VERSION)
        self._clock = clock

    @staticmethod
    def parent_of(caller: HasMetadata) -> TraceParent | None:
        """The sampled parent span that a call names, if any."""
        parent = parent_in(caller.invocation_metadata() or ())
        return parent if parent is not None and parent.sampled else None

    # --- puts

    def leased(
        self,
        parent: TraceParent,
        began_ns: int,
        leases: Sequence[Tracked | None],
        durability: Durability,
    ) -> None:
        """Note a granted reservation; None stands for a block that was stored already."""
        given = [lease for lease in leases if lease is not None]
        now_ns = self._clock.monotonic_ns()
        size_bytes = sum(lease.length for lease in given)
        stored_before = len(leases) - len(given)
        put = PutTrace(parent, began_ns, now_ns, durability, stored_before, len(given), size_bytes)
        for lease in given:
            lease.traced = put
        if not given:
            self._export_put(put, now_ns)

    @staticmethod
    def landed(landed: Iterable[tuple[Tracked, int]], heard_ns: int) -> None:
        """Note landed blocks, with the time at which each flag was seen."""
        for lease, flag_ns in landed:
            if lease.traced is not None:
                lease.traced.landed(flag_ns, heard_ns, lease.length)

    def ended(self, leases: Iterable[tuple[Tracked, End]], now_ns: int) -> None:
        """Note the end of leases, and how each ended."""
        for lease, how in leases:
            put, lease.traced = lease.traced, None
            if put is not None:
                put.ended(lease.landed_ns, how, now_ns)
                if not put.left:
                    self._export_put(put, now_ns)

    def _export_put(self, put: PutTrace, now_ns: int) -> None:
        offset_ns = unix_offset_ns()
        ends = {
            f"kvstore.blocks.{end.value}": put.ends[end] for end in End if end is End.KEPT or put.ends[end]
        }
        root = self._root(put.parent, "kvstore.node.put", put.began_ns + offset_ns, {
            "kvstore.blocks": put.blocks,
            "kvstore.bytes": put.size_bytes,
            "kvstore.blocks.stored_before": put.stored_before,
            "kvstore.durability": put.durability.name.lower(),
            **ends,
        })  # fmt: skip
        under = trace.set_span_in_context(root)
        self._child(under, "kvstore.node.lease", put.began_ns + offset_ns, put.leased_ns + offset_ns)
        for group in put.groups:
            sizes = {"kvstore.blocks": group.blocks, "kvstore.bytes": group.size_bytes}
            heard_ns = group.heard_ns + offset_ns
            self._child(under, "kvstore.node.crc", group.flag_ns + offset_ns, heard_ns, sizes)
            if group.kept_ns:
                self._child(under, "kvstore.node.drive.write", heard_ns, group.kept_ns + offset_ns, sizes)
        root.end(now_ns + offset_ns)

    def inline_put(
        self, parent: TraceParent, began_ns: int, blocks: int, size_bytes: int, durability: Durability
    ) -> None:
        """Make the spans of blocks that were sent over gRPC and are on the drive."""
        offset_ns = unix_offset_ns()
        root = self._root(parent, "kvstore.node.put", began_ns + offset_ns, {
            "kvstore.inline": True,
            "kvstore.blocks": blocks,
            "kvstore.bytes": size_bytes,
            "kvstore.durability": durability.name.lower(),
        })  # fmt: skip
        root.end(self._clock.monotonic_ns() + offset_ns)

    # --- look-ups

    def looked_up(self, parent: TraceParent, lookup: Lookup, times: LookupTimes) -> None:
        """Make the spans of a look-up that has ended."""
        offset_ns = unix_offset_ns()
        counts: Counter[Outcome] = Counter()
        for run in lookup.runs:
            counts[Outcome(run.outcome)] += run.blocks
        said: dict[str, AttributeValue] = {
            "kvstore.request": lookup.request_id,
            "kvstore.blocks": lookup.blocks,
            "kvstore.bytes": lookup.size_bytes,
        }
        for outcome, count in counts.items():
            kind = "hits" if outcome in HITS else "misses"
            said[f"kvstore.{kind}.{outcome.name.lower()}"] = count
        name = f"kvstore.node.{lookup.kind.name.lower()}"
        root = self._root(parent, name, times.began_ns + offset_ns, said)
        under = trace.set_span_in_context(root)
        for child, from_ns, until_ns in (
            ("kvstore.node.queue", times.began_ns, times.turn_ns),
            ("kvstore.node.drive.read", times.drive_first_ns, times.drive_last_ns),
            ("kvstore.node.send", times.sending_ns, times.over_ns),
        ):
            if from_ns and until_ns:
                self._child(under, child, from_ns + offset_ns, until_ns + offset_ns)
        root.end(times.over_ns + offset_ns)

    def _root(
        self, parent: TraceParent, name: str, start_unix_ns: int, said: Mapping[str, AttributeValue]
    ) -> trace.Span:
        context = SpanContext(
            parent.trace_id, parent.span_id, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED)
        )
        under = trace.set_span_in_context(NonRecordingSpan(context))
        return self._tracer.start_span(
            name, context=under, kind=SpanKind.SERVER, start_time=start_unix_ns, attributes=said
        )

    def _child(
        self,
        under: TraceContext,
        name: str,
        start_unix_ns: int,
        end_unix_ns: int,
        said: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        self._tracer.start_span(name, context=under, start_time=start_unix_ns, attributes=said).end(
            end_unix_ns
        )
