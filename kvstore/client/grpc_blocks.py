"""Blocks over gRPC, single or many in one stream, copied by the CPU: for clients without a fabric.

What always holds: a get returns exact bytes or a Miss, and never raises because a node is away. A stream ends within
its time, and each of its blocks has an outcome, if only that the stream broke. The bytes in flight are bounded by
gRPC's window; blocks are taken from the caller, and given to it, one at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING, Any

from kvstore.client.block_calls import durability_message
from kvstore.client.blocks import PutResult
from kvstore.client.checks import (
    check_domain,
    check_key,
    check_length,
    check_number,
    check_wanted,
    checked_puts,
    checked_timeout,
    view_of,
)
from kvstore.client.transfer_watch import within
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable, Overloaded, ProtocolError, UsageError
from kvstore.limits import BATCH_BLOCKS_MAX, INLINE_CHUNK_BYTES
from kvstore.lookups import Kind
from kvstore.miss import Miss, MissReason
from kvstore.names import UNSAID, check_domain_name
from kvstore.wire import batches_pb2, kvstore_pb2_grpc
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.parts import encoded_put, got_parts
from kvstore.wire.status import error_named

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator
    from contextlib import AbstractContextManager

    import grpc
    from typing_extensions import Buffer

    from kvstore.client.request_ids import ClientLookups, Metadata
    from kvstore.client.spans import ClientSpans, InlineSpan
    from kvstore.reach import Reach

    Data = Buffer | list[Buffer] | tuple[Buffer, ...]  # of one block; pieces in order

__all__ = ["InlineCalls"]

_CLOCK = SystemClock()
_EXPIRES = "The time at which a block expires"


class InlineCalls:
    """The calls of one client. Any thread."""

    def __init__(
        self,
        channel: grpc.Channel,
        calling: Callable[[str], AbstractContextManager[None]],
        reach: Reach,
        fingerprint: bytes,
        lookups: ClientLookups,
        spans: ClientSpans | None,
    ) -> None:
        self._spans = spans
        self._lookups = lookups
        self._stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        batches = batches_pb2.DESCRIPTOR.services_by_name["Batches"].full_name
        self._put_batch: Any = channel.stream_stream(
            f"/{batches}/PutBatch", response_deserializer=batches_pb2.PutBatchResponse.FromString
        )
        self._get_batch: Any = channel.stream_stream(
            f"/{batches}/GetBatch", request_serializer=batches_pb2.GetBatchRequest.SerializeToString
        )
        self._calling = calling
        self._tenant, self._reach = reach.tenant, reach
        self._fingerprint = fingerprint

    def _within(self, timeout_s: float | None, *, many: bool = False) -> float:
        if timeout_s is not None:
            return checked_timeout(timeout_s)
        return self._reach.get_timeout_s if many else self._reach.call_timeout_s

    def put(
        self,
        key: bytes,
        data: Data,
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
        read_ns: int | None = None,
    ) -> Durability:
        """As `Client.put_inline`; `read_ns` says, for a copy, when its bytes were requested."""
        view, domain = view_of(data), domain or self._reach.domain
        name, wanted = self._name(key, len(view), domain), durability_message(durability)
        check_number(_EXPIRES, expires_unix_ms, 64)
        check_domain(key, domain)

        def parts() -> Iterator[pb.PutRequest]:
            yield pb.PutRequest(
                start=pb.PutStart(
                    tenant=self._tenant,
                    name=name,
                    durability=wanted,
                    expires_unix_ms=expires_unix_ms,
                    is_copy=read_ns is not None,
                    read_ms_ago=0 if read_ns is None else (_CLOCK.monotonic_ns() - read_ns) // 1_000_000 + 1,
                )
            )
            for start in range(0, len(view), INLINE_CHUNK_BYTES):
                yield pb.PutRequest(chunk=bytes(view[start : start + INLINE_CHUNK_BYTES]))

        span = None if self._spans is None else self._spans.inline("kvstore.put")
        try:
            with within(span), self._calling("Putting a block"):
                reached = Durability(self._stub.Put(parts(), timeout=self._within(timeout_s)).durability)
        except KvError as error:
            if span is not None:
                span.failed(error)
            raise
        if span is not None:
            span.size_bytes = len(view)
            span.put(1, [])
        return reached

    def get(self, key: bytes, length: int, *, timeout_s: float | None = None) -> bytes | Miss:
        """As `Client.get_inline`."""
        span = None if self._spans is None else self._spans.inline("kvstore.get")
        outcome = self._get(key, length, self._within(timeout_s), span)
        if span is not None:
            missed = Counter([outcome.reason] if isinstance(outcome, Miss) else [])
            span.size_bytes = length
            span.got(1, 1 - missed.total(), missed)
        return outcome

    def _get(self, key: bytes, length: int, timeout_s: float, span: InlineSpan | None) -> bytes | Miss:
        request = pb.GetRequest(tenant=self._tenant, name=self._name(key, length))
        chunks = []
        try:
            with (
                self._lookups.looking(Kind.GET, 1) as metadata,
                within(span),
                self._calling("Getting a block"),
            ):
                for part in self._stub.Get(request, timeout=timeout_s, metadata=metadata):
                    if part.HasField("miss"):
                        return Miss(MissReason(part.miss.reason), part.miss.detail)
                    chunks.append(part.chunk)
        except Overloaded as error:
            return Miss(MissReason.BUSY, str(error))
        except (NodeUnavailable, DeadlineExceeded) as error:
            return Miss(MissReason.NODE_AWAY, str(error))
        return b"".join(chunks)

    def put_many(
        self,
        blocks: Iterable[tuple[bytes, Data]],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        domain: bytes = UNSAID,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """As `Client.put_many_inline`."""
        domain = domain or self._reach.domain
        check_number(_EXPIRES, expires_unix_ms, 64)
        keys: list[bytes] = []
        ended: dict[int, batches_pb2.BlockEnd] = {}
        broken: KvError | None = None
        mistakes: list[Exception] = []
        span = None if self._spans is None else self._spans.inline("kvstore.put")
        views = checked_puts(blocks)
        if span is not None:
            views = span.sized(views)
        head = batches_pb2.PutBatchRequest(
            tenant=self._tenant, durability=durability_message(durability), expires_unix_ms=expires_unix_ms
        )
        try:
            parts = _noting(self._parts(head, views, keys, domain), mistakes)
            with within(span), self._calling("Putting blocks"):
                for answer in self._put_batch(parts, timeout=self._within(timeout_s, many=True)):
                    ended.update((end.number, end) for end in answer.ends)
        except UsageError:
            raise
        except KvError as error:
            if mistakes:
                raise mistakes[0] from None
            broken = error
            if isinstance(blocks, Sequence):
                keys += [key for key, _ in blocks[len(keys) :]]  # they were not sent
        results = [_result(key, ended.get(number), broken) for number, key in enumerate(keys)]
        if span is not None:
            span.put(len(keys), [one.error for one in results if one.error is not None])
        return results

    def _parts(
        self,
        head: batches_pb2.PutBatchRequest,
        blocks: Iterable[tuple[bytes, memoryview]],
        keys: list[bytes],
        domain: bytes,
    ) -> Iterator[bytes]:
        """Yield messages of about a chunk each; small blocks share one."""
        parts: list[tuple[pb.BlockName | None, memoryview]] = []
        left = INLINE_CHUNK_BYTES
        for key, view in blocks:
            check_domain(key, domain)
            keys.append(key)
            name: pb.BlockName | None = self._name(key, len(view), domain)
            at = 0
            while at < len(view) or name is not None:
                chunk = view[at : at + left]
                parts.append((name, chunk))
                name, at, left = None, at + len(chunk), left - len(chunk)
                if not left or len(parts) == BATCH_BLOCKS_MAX:
                    yield encoded_put(head, parts)
                    head, parts, left = batches_pb2.PutBatchRequest(), [], INLINE_CHUNK_BYTES
        if parts:
            yield encoded_put(head, parts)

    def get_many(
        self,
        wanted: Sequence[tuple[bytes, int]],
        *,
        timeout_s: float | None = None,
        fingerprint: bytes | None = None,
    ) -> Generator[bytes | Miss, None, None]:
        """As `Client.get_many_inline`; of blocks with this layout, if it is not the client's own."""
        check_wanted(wanted)
        timeout_s = self._within(timeout_s, many=True)
        names = [self._name(*one, fingerprint=fingerprint) for one in wanted]
        if self._spans is None:
            return self._get_many(names, timeout_s, None)
        return self._get_many_traced(names, timeout_s, self._spans)

    def _get_many_traced(
        self, names: Sequence[pb.BlockName], timeout_s: float, spans: ClientSpans
    ) -> Generator[bytes | Miss, None, None]:
        span = spans.inline("kvstore.get")
        span.size_bytes = sum(name.length for name in names)
        hits = 0
        missed: Counter[MissReason] = Counter()
        try:
            with closing(self._get_many(names, timeout_s, span)) as outcomes:
                for outcome in outcomes:
                    if isinstance(outcome, Miss):
                        missed[outcome.reason] += 1
                    else:
                        hits += 1
                    yield outcome
        finally:
            span.got(len(names), hits, missed)

    def _get_many(
        self, names: Sequence[pb.BlockName], timeout_s: float, span: InlineSpan | None
    ) -> Generator[bytes | Miss, None, None]:
        given = 0
        try:
            with (
                self._lookups.looking(Kind.GET, len(names)) as metadata,
                self._calling("Getting blocks"),
            ):
                for outcome in self._outcomes(names, timeout_s, metadata, span):
                    given += 1
                    yield outcome
        except Overloaded as error:
            miss = Miss(MissReason.BUSY, str(error))
        except (NodeUnavailable, DeadlineExceeded) as error:
            miss = Miss(MissReason.NODE_AWAY, str(error))
        else:
            return
        for _ in names[given:]:
            yield miss

    def _outcomes(
        self,
        names: Sequence[pb.BlockName],
        timeout_s: float,
        metadata: Metadata,
        span: InlineSpan | None,
    ) -> Iterator[bytes | Miss]:
        requests = (
            batches_pb2.GetBatchRequest(tenant=self._tenant, blocks=names[first : first + BATCH_BLOCKS_MAX])
            for first in range(0, len(names), BATCH_BLOCKS_MAX)
        )
        if not names:
            return
        chunks: list[memoryview] = []
        had, given = 0, 0
        with within(span):  # not longer: the time between two blocks is the caller's
            call = self._get_batch(requests, timeout=timeout_s, metadata=metadata)
        try:
            for answer in call:
                for part in got_parts(answer):
                    if part.number != given:
                        raise ProtocolError("The node sent blocks in another order than requested.")
                    outcome: bytes | Miss | None = None
                    if part.miss is not None:
                        outcome = Miss(MissReason(part.miss.reason), part.miss.detail)
                    else:
                        chunks.append(part.chunk)
                        had += len(part.chunk)
                        if had == names[given].length:
                            outcome = b"".join(chunks)
                    if outcome is not None:
                        chunks, had, given = [], 0, given + 1
                        yield outcome
        finally:
            call.cancel()  # if the caller wants no more
        if given < len(names):
            raise ProtocolError(f"The node sent {given} of the {len(names)} requested blocks.")

    def _name(
        self, key: bytes, length: int, domain: bytes = UNSAID, *, fingerprint: bytes | None = None
    ) -> pb.BlockName:
        check_key(key)
        check_domain_name(domain)
        check_length(length)
        fingerprint = self._fingerprint if fingerprint is None else fingerprint
        return pb.BlockName(key=key, fingerprint=fingerprint, length=length, domain=domain)


def _noting(parts: Iterator[bytes], mistakes: list[Exception]) -> Iterator[bytes]:
    """Yield the same requests and record an exception: gRPC iterates in its own thread, and would only log it."""
    try:
        yield from parts
    except Exception as error:
        mistakes.append(error)
        raise


def _result(key: bytes, end: batches_pb2.BlockEnd | None, broken: KvError | None) -> PutResult:
    if end is None:
        return PutResult(
            key, None, broken or ProtocolError("The node did not report the result of the block.")
        )
    if end.HasField("error"):
        return PutResult(key, None, error_named(end.error.name, end.error.sentence, end.error.retry_after_ms))
    return PutResult(key, Durability(end.durability), None)
