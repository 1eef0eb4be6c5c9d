"""Exports a node's spans over OTLP to a collector, on threads of OpenTelemetry's SDK, from a bounded queue.

Imported only with `--otel`. What always holds: a span without a sampled parent is never made. A collector that is slow
or down costs only spans: beyond `SPANS_QUEUED_MAX` the oldest are dropped, the beginning and the end of that are
logged, and a stopping node waits for the collector for a limited time.
What it doesn't do: have settings of its own. The SDK reads its usual ones from the environment, such as
`OTEL_EXPORTER_OTLP_HEADERS`, `OTEL_EXPORTER_OTLP_CERTIFICATE` and `OTEL_RESOURCE_ATTRIBUTES`.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING

from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased

from kvcli.version import VERSION
from kvstore.limits import (
    SPANS_QUEUED_MAX,
    SPANS_SEND_MS,
    SPANS_SEND_TIMEOUT_MS,
    SPANS_SENT_MAX,
    SPANS_STOP_MS,
)
from kvstore.node.call_spans import NodeSpans

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import ReadableSpan

    from kvstore.clock import Clock

__all__ = ["Collector"]

log = logging.getLogger(__name__)


class Collector:
    """The connection to one collector."""

    def __init__(self, endpoint: str, node: str, clock: Clock) -> None:
        # These log each attempt, and each dropped span; `_Exporter` logs an outage once.
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)
        logging.getLogger("opentelemetry.sdk").setLevel(logging.ERROR)
        self._exporter = _Exporter(endpoint)
        self._provider = TracerProvider(
            sampler=ParentBased(root=ALWAYS_OFF),
            resource=Resource.create(
                {
                    "service.name": "kvstore",
                    "service.instance.id": node,
                    "service.version": VERSION,
                }
            ),
            shutdown_on_exit=False,
        )
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=SPANS_QUEUED_MAX,
                max_export_batch_size=SPANS_SENT_MAX,
                schedule_delay_millis=SPANS_SEND_MS,
            )
        )

        self.spans = NodeSpans(self._provider, clock)

    def close(self) -> None:
        """Send queued spans, for a limited time."""
        sending = threading.Thread(target=self._provider.shutdown, name="kvstore-otel", daemon=True)
        sending.start()
        sending.join(SPANS_STOP_MS / 1000)
        if sending.is_alive():
            self._exporter.shutdown()  # ends an export in progress


class _Exporter(SpanExporter):
    """The SDK's exporter; logs one line when its collector is down, and one when it is back."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._to = OTLPSpanExporter(endpoint=endpoint, timeout=SPANS_SEND_TIMEOUT_MS / 1000)
        self._lost = 0
        self._is_over = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send spans."""
        try:
            result = self._to.export(spans)
        except ValueError:  # of a channel that `shutdown` has closed under it
            if not self._is_over:
                raise
            return SpanExportResult.FAILURE
        if result is SpanExportResult.SUCCESS:
            if self._lost:
                log.info("the collector at %s is back; %d spans were lost", self._endpoint, self._lost)
            self._lost = 0
        else:
            if not self._lost:
                log.warning("the collector at %s accepts no spans; the node continues", self._endpoint)
            self._lost += len(spans)
        return result

    def shutdown(self) -> None:
        """End an export in progress. Safe to call again."""
        self._is_over = True
        self._to.shutdown()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Return at once: nothing is kept here."""
        return self._to.force_flush(timeout_millis)
