"""Routes a client's reserves and fetches to its node: over the fabric, or by gRPC if that is not possible.

What always holds: a call is made once, and means the same and fails with the same errors on both routes; if the
node's answer is unknown, the link is lost. The exception is a fetch whose deadline passes while it is being sent: it
is cancelled like one that the node has accepted, since others use the link as well.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.block_calls import durability_message
from kvstore.client.transfer_watch import metadata_of, within
from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable, Overloaded
from kvstore.lookups import Kind
from kvstore.miss import Miss, MissReason
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.fabric_call import AnswerCode, CallKind, Leased, ReserveRow, header_bytes, rows_of_reserve
from nic_offload.group import Group
from nic_offload.sender import METADATA_BYTES_MAX

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from kvstore.client.blocks import Block
    from kvstore.client.gets import Get
    from kvstore.client.link import Host, Link
    from kvstore.client.request_ids import ClientLookups
    from kvstore.client.spans import GetSpan, PutSpan
    from kvstore.client.transfer_watch import Watch
    from kvstore.durability import Durability
    from kvstore.wire.fabric_call import Metadata
    from kvstore.wire.kvstore_pb2_grpc import KvStoreStub

__all__ = ["Asking", "Reserving"]


class Reserving(NamedTuple):
    """A request for slots."""

    blocks: Sequence[Block]
    words: Sequence[int]  # of acknowledgement, one for each block
    fingerprint: bytes
    durability: Durability
    lease_ms: int
    expires_unix_ms: int
    watch: Watch | None


class Asking:
    """The routes of a client's calls. Safe to use from any thread."""

    def __init__(
        self,
        client: Host,
        stub: KvStoreStub,
        calling: Callable[[str], AbstractContextManager[None]],
        lookups: ClientLookups,
    ) -> None:
        self._client = client
        self._stub = stub
        self._calling = calling
        self._lookups = lookups
        self._clock = lookups.clock
        self._timeout_ns = client.reach.call_timeout_ms * 1_000_000

    @staticmethod
    def _traced(span: PutSpan | GetSpan | None) -> Metadata:
        """The trace context of a call over the fabric; the channel adds it to gRPC calls."""
        header = None if span is None else span.header()
        return () if header is None else (header,)

    # --- puts

    def said_of_puts(self, watch: Watch | None, span: PutSpan | None) -> tuple[bytes, bytes]:
        """The metadata of the first of some puts, with the recorded steps, and that of each of the others.

        Empty if a block's header has no room for it.
        """

        def said() -> bytes:
            headers = header_bytes((*metadata_of(watch), *self._traced(span)))
            return headers if len(headers) <= METADATA_BYTES_MAX - 8 else b""

        return said(), said()

    def reserve(self, link: Link, wanted: Reserving, span: PutSpan | None) -> Sequence[Leased]:
        """Lease a slot for each block; one typed error if that can't be."""
        failures: list[KvError] = []
        metadata = (*metadata_of(wanted.watch), *self._traced(span))
        rows = [
            ReserveRow(block.key, block.length, word, block.domain)
            for block, word in zip(wanted.blocks, wanted.words, strict=True)
        ]
        in_domains = any(row.domain for row in rows)
        with self._client.lock:
            if link.error is not None:
                raise link.error
            tag = self._client.next_tags()
            group = Group(self._client.fabric, tag, 1, is_awaited=True)
            call = (
                None
                if link.calls is None
                else link.calls.begin(
                    CallKind.RESERVE_IN_DOMAINS if in_domains else CallKind.RESERVE,
                    wanted.fingerprint,
                    metadata,
                    len(rows),
                    rows_of_reserve(rows, in_domains=in_domains),
                    self._clock.monotonic_ns() + self._timeout_ns,
                    tag,
                    group,
                    0,
                    failures.append,
                    good_code=AnswerCode.BYTES,
                    durability=wanted.durability,
                    lease_ms=wanted.lease_ms,
                    expires_unix_ms=wanted.expires_unix_ms,
                )
            )
            if call is not None:
                link.operations[tag] = call
        if call is None:
            with within(span):
                return self._reserve_by_rpc(link, wanted)
        while not group.wait(1, self._timeout_ns / 1e9):
            pass  # the call's own deadline ends it
        with self._client.lock:
            link.operations.pop(tag, None)
            if failures:
                raise failures[0]
            return call.leases()

    def _reserve_by_rpc(self, link: Link, wanted: Reserving) -> list[Leased]:
        request = pb.ReserveRequest(
            connection=link.number,
            blocks=[
                pb.ReserveBlock(
                    name=pb.BlockName(
                        key=block.key,
                        fingerprint=wanted.fingerprint,
                        length=block.length,
                        domain=block.domain,
                    ),
                    ack_word=word,
                )
                for block, word in zip(wanted.blocks, wanted.words, strict=True)
            ],
            durability=durability_message(wanted.durability),
            lease_ms=wanted.lease_ms,
            expires_unix_ms=wanted.expires_unix_ms,
        )
        try:
            with self._calling("Reserving slots"):
                answer = self._stub.Reserve(
                    request, timeout=self._client.reach.call_timeout_s, metadata=metadata_of(wanted.watch)
                )
        except (NodeUnavailable, DeadlineExceeded) as error:
            self._client.lose(link, error)  # the node may have granted leases that we don't know of
            raise
        return [
            Leased(lease.slot, lease.already_stored, lease.generation, lease.payload, lease.flag)
            for lease in answer.leases
        ]

    # --- blocks

    def fetch(
        self,
        link: Link,
        get: Get,
        fingerprint: bytes,
        request_id: str,
        deadline_ns: int,
        watch: Watch | None,
        span: GetSpan | None,
    ) -> None:
        """Have the node send blocks. The get is notified of the call's outcome, now or later."""
        began_ns = self._clock.monotonic_ns()
        asked = self._lookups.begin(Kind.FETCH, get.blocks, request_id)

        def failed(error: KvError) -> None:
            asked.failed(error)
            is_untried = isinstance(error, NodeUnavailable | DeadlineExceeded) and not error.was_tried
            if isinstance(error, Overloaded) or is_untried:  # nothing of it can arrive
                reason = MissReason.BUSY if isinstance(error, Overloaded) else MissReason.NODE_AWAY
                get.refuse(Miss(reason, str(error)))
            else:
                self._client.lose(link, error)

        steps = metadata_of(watch)  # not with the lock held: they may need that of another node's client
        with self._client.lock:
            if not get.ask(deadline_ns):  # and was notified with the reason
                asked.failed(
                    link.error or DeadlineExceeded("The deadline passed before the node was called.")
                )
                return
            metadata = (*asked.metadata, *steps)
            get.on_loss(partial(self._lookups.lost, request_id, Kind.FETCH, began_ns))
            if span is not None:
                get.on_taken(span.taken)
            call = (
                None
                if link.calls is None
                else link.calls.begin(
                    get.kind,
                    fingerprint,
                    (*metadata, *self._traced(span)),
                    get.blocks,
                    get.rows(),
                    began_ns + self._timeout_ns,  # the get's own deadline ends only the get
                    get.tag,
                    get.group,
                    get.blocks,
                    failed,
                    good_code=AnswerCode.DONE,
                    blocks_deadline_ns=deadline_ns,
                    tells=watch is not None,
                    wanted=None if link.mapped.hot is None else get.wanted(),
                )
            )
            if call is not None:
                get.by_fabric(call)
                return
            try:
                get.by_rpc(deadline_ns)
            except KvError as error:
                asked.failed(error)
                get.refuse(Miss(MissReason.NODE_AWAY, str(error)))
                return
            request = get.request(fingerprint)
        try:
            with within(span):
                failure = self._fetch_by_rpc(request, deadline_ns, metadata)
        except BaseException:  # such as a signal's: the node may have been called
            with self._client.lock:
                get.cancel()
                get.rpc_over(was_taken=False)
            # It ends when it is waited for.
            threading.Thread(target=get.wait, name="kvstore-get", daemon=True).start()
            raise
        with self._client.lock:
            if failure is None:
                get.rpc_over(was_taken=True)
            elif isinstance(failure, DeadlineExceeded):
                asked.failed(failure)
                get.cancel()
                get.rpc_over(was_taken=False)
            else:
                failed(failure)

    def _fetch_by_rpc(self, request: pb.FetchRequest, deadline_ns: int, metadata: Metadata) -> KvError | None:
        left_s = max(0.0, (deadline_ns - self._clock.monotonic_ns()) / 1e9)
        try:
            with self._calling("Fetching blocks"):
                self._stub.Fetch(
                    request, timeout=min(left_s, self._client.reach.call_timeout_s), metadata=metadata
                )
        except KvError as error:
            return error
        return None
