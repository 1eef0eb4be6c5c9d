"""Support for tests of spans: providers that keep them, and checks of which spans belong together."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON, ParentBased, Sampler

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from opentelemetry.sdk.trace import ReadableSpan

__all__ = ["Kept", "attributes_of", "children_of", "named", "one_trace"]


WAIT_S = 20.0


class _Exporter(InMemorySpanExporter):
    """An exporter that can be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.came = threading.Condition()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with self.came:
            self.came.notify_all()
            return super().export(spans)


class Kept:
    """A provider, and the spans that have ended. A node's makes none without a sampled parent, as in `otel`."""

    def __init__(self, *, of_node: bool = False, sampler: Sampler = ALWAYS_ON) -> None:
        self._spans = _Exporter()
        root = ParentBased(root=ALWAYS_OFF) if of_node else ParentBased(root=sampler)
        self.provider = TracerProvider(sampler=root, shutdown_on_exit=False)
        self.provider.add_span_processor(SimpleSpanProcessor(self._spans))

    @property
    def spans(self) -> tuple[ReadableSpan, ...]:
        return self._spans.get_finished_spans()

    def wait_for(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """Wait for this many spans of a name; returns them."""
        with self._spans.came:
            assert self._spans.came.wait_for(lambda: len(named(self.spans, name)) >= count, WAIT_S), name
        return named(self.spans, name)

    def clear(self) -> None:
        self._spans.clear()


def attributes_of(span: ReadableSpan) -> dict[str, object]:
    return dict(span.attributes or {})


def named(spans: Iterable[ReadableSpan], name: str) -> list[ReadableSpan]:
    return [span for span in spans if span.name == name]


def children_of(span: ReadableSpan, spans: Iterable[ReadableSpan]) -> list[ReadableSpan]:
    assert span.context is not None
    return [one for one in spans if one.parent is not None and one.parent.span_id == span.context.span_id]


def one_trace(spans: Iterable[ReadableSpan]) -> ReadableSpan:
    """Assert that all of them form one tree, in which each begins within its parent's time; returns the root."""
    spans = list(spans)
    by_id = {span.context.span_id: span for span in spans if span.context is not None}
    assert len({span.context.trace_id for span in spans if span.context is not None}) == 1
    (root,) = [span for span in spans if span.parent is None]
    for span in spans:
        assert span.start_time is not None
        assert span.end_time is not None
        assert span.start_time <= span.end_time, span.name
        if span.parent is not None:
            parent = by_id[span.parent.span_id]
            assert parent.start_time is not None
            assert parent.end_time is not None
            assert parent.start_time <= span.start_time <= parent.end_time, (span.name, parent.name)
    return root
