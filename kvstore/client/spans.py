"""A client's part of a trace: OpenTelemetry spans of its puts, gets and resumes. Imported only with a provider.

A batch is one span. It begins where the application calls, so it is a child of the span that is current there; its
outcome is added afterwards, from times that are recorded anyway.

What always holds: a call made within a span carries it as `traceparent`, sampled or not, so that the node makes the
same choice; an unsampled span costs nothing more. Spans are finished by a thread of their own, because an application's
span processor may be slow or wait for a collector that is away: no transfer waits for it. At most `SPANS_WAITING_MAX`
batches wait for that thread; beyond that the oldest are dropped. A span contains no tenant, user, session or key; it
contains the request's id, as the application gave it.
What it doesn't do: trace a reservation that is neither armed nor given back.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from typing import TYPE_CHECKING, Final

from opentelemetry import trace
from opentelemetry.trace import SpanKind, StatusCode

from kvcli.version import VERSION
from kvstore.client.firings import firings
from kvstore.clock import SystemClock, unix_offset_ns
from kvstore.limits import SPANS_CLOSE_MS, SPANS_WAITING_MAX
from kvstore.miss import Miss
from kvstore.wire.traceparent import TRACEPARENT_HEADER, TraceParent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    from opentelemetry.util.types import AttributeValue

    from kvstore.client.blocks import Block, Hit, PutResult
    from kvstore.client.gets import Ended
    from kvstore.client.resuming import Resumed
    from kvstore.durability import Durability
    from kvstore.miss import MissReason

__all__ = ["ClientSpans", "GetSpan", "InlineSpan", "PutSpan", "ResumeSpan"]

log = logging.getLogger(__name__)

_CLOCK: Final = SystemClock()


class ClientSpans:
    """A client's spans. Safe to use from any thread."""

    def __init__(self, provider: trace.TracerProvider, target: str) -> None:
        self.tracer = provider.get_tracer("kvstore", VERSION)
        self.finisher = _Finisher()
        self._target = target

    @staticmethod
    def header() -> tuple[str, str] | None:
        """The trace context that a call of this thread carries now."""
        context = trace.get_current_span().get_span_context()
        if not context.is_valid:
            return None
        parent = TraceParent(context.trace_id, context.span_id, context.trace_flags.sampled)
        return TRACEPARENT_HEADER, str(parent)

    def put(self, blocks: Sequence[Block], durability: Durability) -> PutSpan:
        """A batch is about to be reserved."""
        asked: dict[str, AttributeValue] = {**self._of(blocks), "kvstore.durability": durability.name.lower()}
        return PutSpan(self, "kvstore.put", SpanKind.CLIENT, asked)

    def get(self, blocks: Sequence[Block], request_id: str) -> GetSpan:
        """A batch is about to be asked for."""
        asked: dict[str, AttributeValue] = {**self._of(blocks), "kvstore.request": request_id}
        return GetSpan(self, "kvstore.get", SpanKind.CLIENT, asked)

    def resume(self) -> ResumeSpan:
        """A session is about to be resumed."""
        return ResumeSpan(self, "kvstore.resume", SpanKind.INTERNAL, {"kvstore.node": self._target})

    def inline(self, name: str) -> InlineSpan:
        """Blocks are about to be put or got over gRPC; `name` says which."""
        asked: dict[str, AttributeValue] = {"kvstore.node": self._target, "kvstore.inline": True}
        return InlineSpan(self, name, SpanKind.CLIENT, asked)

    def _of(self, blocks: Sequence[Block]) -> dict[str, AttributeValue]:
        return {
            "kvstore.node": self._target,
            "kvstore.blocks": len(blocks),
            "kvstore.bytes": sum(block.length for block in blocks),
        }

    def close(self) -> None:
        """Finish ended spans, with a deadline."""
        self.finisher.close()


class _Finisher:
    """Finishes spans, one after the other, on a thread that is started when needed."""

    def __init__(self) -> None:
        self._waiting: deque[Callable[[], None]] = deque(maxlen=SPANS_WAITING_MAX)
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._closed = False

    def submit(self, finish: Callable[[], None]) -> None:
        """Queue a span. It may be called with any lock held."""
        with self._changed:
            if self._closed:
                return
            self._waiting.append(finish)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvstore-spans", daemon=True)
                self._thread.start()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                finish = self._waiting.popleft()
            try:
                finish()
            except Exception:  # the application's processor: an error in it does not affect the next span
                log.exception("a span could not be finished")

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(SPANS_CLOSE_MS / 1000)


class _Open:
    """A span that has begun."""

    def __init__(
        self, spans: ClientSpans, name: str, kind: SpanKind, attributes: Mapping[str, AttributeValue]
    ) -> None:
        self._spans = spans
        self._began_ns = _CLOCK.monotonic_ns()
        self._offset_ns = unix_offset_ns()
        self._over = False
        self.span = spans.tracer.start_span(
            name, kind=kind, attributes=attributes, start_time=self._began_ns + self._offset_ns
        )

    def current(self) -> AbstractContextManager[object]:
        """Within it calls carry this span, and spans that begin are its children."""
        return trace.use_span(self.span, record_exception=False, set_status_on_exception=False)

    def header(self) -> tuple[str, str] | None:
        """The trace context for a call over the fabric."""
        with self.current():
            return self._spans.header()

    def failed(self, error: Exception) -> None:
        """It was abandoned."""
        self._end(lambda: self._say_failed(error))

    def _end(self, describe: Callable[[], None]) -> None:
        """Note its end; its attributes are added later. Only the first call counts."""
        if self._over or not self.span.is_recording():
            return
        self._over = True
        ended_ns = _CLOCK.monotonic_ns()

        def finish() -> None:
            describe()
            self.span.end(self._unix_ns(ended_ns))

        self._spans.finisher.submit(finish)

    def _unix_ns(self, at_ns: int) -> int:
        return at_ns + self._offset_ns

    def _say_failed(self, error: Exception) -> None:
        name = type(error).__name__
        self.span.set_attribute("error.type", name)
        self.span.set_status(StatusCode.ERROR, name)

    def _say_found(self, hits: int, missed: Counter[MissReason]) -> None:
        self.span.set_attribute("kvstore.hits", hits)
        self.span.set_attribute("kvstore.misses", missed.total())
        for reason, count in missed.items():
            self.span.set_attribute(f"kvstore.misses.{reason.name.lower()}", count)

    def _event(self, name: str, at_ns: int) -> None:
        if at_ns:
            self.span.add_event(name, timestamp=self._unix_ns(at_ns))


class PutSpan(_Open):
    """A batch of puts, from asking for slots to the last acknowledgement."""

    _reserved_ns = _armed_ns = 0

    def reserved(self) -> None:
        """The node has answered."""
        self._reserved_ns = _CLOCK.monotonic_ns()

    def armed(self) -> None:
        """From here on the application does nothing."""
        self._armed_ns = _CLOCK.monotonic_ns()

    def given_back(self) -> None:
        """Nothing was put."""
        self._end(lambda: self.span.set_attribute("kvstore.given_back", value=True))

    def ended(self, blocks: Sequence[Block], results: Sequence[PutResult]) -> None:
        """The last put has ended."""
        self._end(lambda: self._describe(blocks, results))

    def _describe(self, blocks: Sequence[Block], results: Sequence[PutResult]) -> None:
        errors = [result.error for result in results if result.error is not None]
        self.span.set_attribute("kvstore.blocks.stored_before", sum(one.already_stored for one in results))
        self.span.set_attribute("kvstore.blocks.failed", len(errors))
        self._event("reserved", self._reserved_ns)
        self._event("armed", self._armed_ns)
        for one in firings(blocks, results):
            self._event("flag seen", one.fired_ns)
            if one.landed_ns:
                self._sent(one.fired_ns, one.landed_ns, one.low, one.high, one.blocks, one.size_bytes)
        self._event("landed", max(one.landed_ns for one in results))
        kept = [one for one in results if one.durable_ns and one.durability is not None]
        if kept:
            last = max(kept, key=lambda one: one.durable_ns)
            assert last.durability is not None
            if last.durability.name != "LANDED":
                self._event(last.durability.name.lower(), last.durable_ns)
        if errors:
            self._say_failed(errors[0])

    def _sent(self, fired_ns: int, landed_ns: int, low: int, high: int, blocks: int, size_bytes: int) -> None:
        """Add the events of the NIC, or of the agent in its place."""
        span = self._spans.tracer.start_span(
            "kvstore.nic.send",
            context=trace.set_span_in_context(self.span),
            start_time=self._unix_ns(fired_ns),
            attributes={
                "kvstore.threshold.first": low,
                "kvstore.threshold.last": high,
                "kvstore.blocks": blocks,
                "kvstore.bytes": size_bytes,
            },
        )
        span.end(self._unix_ns(landed_ns))


class GetSpan(_Open):
    """A batch of gets, from asking to the last outcome."""

    _taken_ns = 0

    def taken(self, at_ns: int) -> None:
        """The node has taken the call."""
        self._taken_ns = at_ns

    def before(self, ended: Ended | None) -> Ended:
        """A callback for the outcomes that ends the span first."""

        def both(outcomes: list[Hit | Miss]) -> None:
            self._end(lambda: self._describe(outcomes))
            if ended is not None:
                ended(outcomes)

        return both

    def _describe(self, outcomes: Sequence[Hit | Miss]) -> None:
        self._event("taken by the node", self._taken_ns)
        missed = Counter(one.reason for one in outcomes if isinstance(one, Miss))
        self._say_found(len(outcomes) - missed.total(), missed)


class InlineSpan(_Open):
    """Blocks that are put or got over gRPC."""

    size_bytes = 0  # of all of them

    def sized(self, blocks: Iterable[tuple[bytes, memoryview]]) -> Iterator[tuple[bytes, memoryview]]:
        """Yield the same blocks, and add up their sizes."""
        for key, data in blocks:
            self.size_bytes += data.nbytes
            yield key, data

    def put(self, blocks: int, failed: Sequence[Exception]) -> None:
        """The put has ended: how many blocks were sent, and which were not stored."""

        def describe() -> None:
            self._say_size(blocks)
            self.span.set_attribute("kvstore.blocks.failed", len(failed))
            if failed:
                self._say_failed(failed[0])

        self._end(describe)

    def got(self, blocks: int, hits: int, missed: Counter[MissReason]) -> None:
        """The get has ended: how many blocks were requested, and their outcomes."""

        def describe() -> None:
            self._say_size(blocks)
            self._say_found(hits, missed)

        self._end(describe)

    def _say_size(self, blocks: int) -> None:
        self.span.set_attribute("kvstore.blocks", blocks)
        self.span.set_attribute("kvstore.bytes", self.size_bytes)


class ResumeSpan(_Open):
    """A resume, from asking for the session to the last of its blocks."""

    def resumed(self, resumed: Resumed) -> None:
        """It has ended."""
        self._end(lambda: self._describe(resumed))

    def closed(self, came: int) -> None:
        """The resume was closed early; this many of the first blocks arrived."""
        self._end(lambda: self.span.set_attribute("kvstore.blocks.usable", came))

    def _describe(self, resumed: Resumed) -> None:
        self.span.set_attribute("kvstore.blocks", resumed.blocks)
        self.span.set_attribute("kvstore.tokens", resumed.tokens)
        self.span.set_attribute("kvstore.blocks.usable", resumed.usable_blocks)
        self.span.set_attribute("kvstore.tokens.usable", resumed.usable_tokens)
        self.span.set_attribute("kvstore.whole", resumed.is_whole)
        if resumed.miss is not None:
            self.span.set_attribute("kvstore.miss.reason", resumed.miss.reason.name.lower())
