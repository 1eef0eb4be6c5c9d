"""The client: what a serving engine imports.

    with Client("127.0.0.1:7070") as client, FlagWords.create(1) as flags:
        kv = client.register(buffer)
        blocks = [Block(key, kv, offset, length, threshold=n), ...]
        puts = client.reserve(blocks).arm(flags[0])
        ...                                   # any process or GPU thread stores n to the flag word
        results = puts.wait(timeout_s=10)
        outcomes = client.get(blocks, timeout_s=10)

Calls may come from any thread. A client attaches to its node at the first call that needs it, and again
after a loss. What always holds: every call ends within its deadline; a get returns exact bytes, or a Miss
with its reason, and never raises because a node is away; a reserve that can't be had raises one typed
error; once a call has ended nothing of it writes to the caller's memory. A node that was away costs one call its
deadline, and those after it nothing (`kvstore.client.breaker`).

It talks to one node. Sessions and what is asked about blocks have modules of their own.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import grpc

from kvstore.client.asking import Asking, Reserving
from kvstore.client.block_calls import BlockCalls
from kvstore.client.blocks import fingerprint_of
from kvstore.client.breaker import Breaker
from kvstore.client.channel import open_channel
from kvstore.client.checks import check_armed, check_gets, check_memory, check_reserved
from kvstore.client.contact import broken_step
from kvstore.client.gets import Get, NoGet
from kvstore.client.inline import InlineCalls
from kvstore.client.link import ARMED_BLOCKS_MAX, TAGS_OF_ONE, Link
from kvstore.client.lookups import ClientLookups, current_request
from kvstore.client.observing import ObservingCalls
from kvstore.client.own_side import OwnSide, say_first_word
from kvstore.client.puts import ArmedPuts
from kvstore.client.reserved import Reservation, lease_deadline_ns
from kvstore.client.sessions import SessionCalls
from kvstore.client.slabs import Slabs
from kvstore.client.step_calls import StepCalls
from kvstore.client.windows import get_in_windows, needs_windows
from kvstore.clock import SystemClock
from kvstore.durability import Durability
from kvstore.errors import (
    AddressRefused,
    DeadlineExceeded,
    KvError,
    NodeUnavailable,
    Overloaded,
    ProtocolError,
)
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    FETCH_CANCEL_MS,
    GET_BLOCKS_MAX,
    LEASE_TIMEOUT_MS,
    LEASE_TIMEOUT_MS_MAX,
)
from kvstore.lookups import Kind
from kvstore.miss import Miss, MissReason
from kvstore.reach import Reach
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from kvstore.wire.status import error_from_rpc
from nic_offload.handle import Handle
from nic_offload.sender import Heads

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence
    from pathlib import Path

    from opentelemetry.trace import TracerProvider
    from typing_extensions import Buffer

    from kvstore.client.blocks import Block, HasFingerprint, Hit, PutResult
    from kvstore.client.gets import Ended
    from kvstore.client.spans import ClientSpans, PutSpan
    from kvstore.client.watch import Watch
    from kvstore.layout import Layout
    from kvstore.wire.fabric_call import Leased
    from nic_offload.counter import Counter
    from nic_offload.fabric import Fabric, Region
    from nic_offload.flags import FlagWord

__all__ = ["Client"]


def _spans(provider: TracerProvider, target: str) -> ClientSpans:
    from kvstore.client.spans import ClientSpans  # noqa: PLC0415 - its package is an extra

    return ClientSpans(provider, target)


class Client(Handle):
    """A client of one node."""

    def __init__(
        self,
        node: str | Reach | None = None,
        *,
        tenant: str | None = None,
        token: str | None = None,
        token_file: Path | str | None = None,
        tls: bool | None = None,
        ca: Path | str | None = None,
        certificate: Path | str | None = None,
        key: Path | str | None = None,
        fabric_address: str | None = None,
        fabric_ports: str | None = None,
        provider: str | None = None,
        connect_timeout_ms: int | None = None,
        call_timeout_ms: int | None = None,
        get_timeout_ms: int | None = None,
        layout: HasFingerprint | bytes = b"",
        slots: int = 64,
        block_bytes_max: int = 4 << 20,
        tracer_provider: TracerProvider | None = None,
    ) -> None:
        """Open the channel; the node is not called yet, and the fabric is opened by what first needs it.

        How the node is reached stands in `kvstore.reach`: what is not given here is taken from the environment or the
        file of the client's settings. Or a `Reach` says all of it.
        `layout` is whatever determines how a block's bytes are laid out, at best a `Layout`; a get under another layout
        is a miss.
        `slots` times `block_bytes_max` is the node's memory that this client's puts may take at a time.
        With a `tracer_provider`, of OpenTelemetry, its puts, gets and resumes are spans, and its calls carry them.
        """
        given = {
            "tenant": tenant,
            "token": token,
            "token_file": token_file,
            "tls": tls,
            "ca": ca,
            "certificate": certificate,
            "key": key,
            "fabric_address": fabric_address,
            "fabric_ports": fabric_ports,
            "provider": provider,
            "connect_timeout_ms": connect_timeout_ms,
            "call_timeout_ms": call_timeout_ms,
            "get_timeout_ms": get_timeout_ms,
        }
        self.reach = Reach.given(node, given)
        self.target, self.tenant = self.reach.node, self.reach.tenant
        self.spans = None if tracer_provider is None else _spans(tracer_provider, self.target)
        self._channel = open_channel(self.reach, None if self.spans is None else self.spans.header)
        self.lock = threading.RLock()
        self._fabric: Fabric | None = None  # who only asks, or sends blocks inside gRPC, needs none
        self._own_side = OwnSide(self.reach)
        self._closed = False
        self.calls = 0  # made to the node; a test counts that armed puts need none
        self.fingerprint = fingerprint_of(layout)
        self._slots = slots
        self._block_bytes_max = block_bytes_max
        self._tags = itertools.count(TAGS_OF_ONE, TAGS_OF_ONE)
        self._link: Link | None = None
        self._attaching = threading.Lock()
        self._stub = kvstore_pb2_grpc.KvStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._breaker = Breaker(SystemClock())
        # The node may be there, and its fabric not be reached; to connect takes its time.
        self._fabric_breaker = Breaker(SystemClock(), self.reach.connect_timeout_ms)
        # What is asked and told without moving a block stands in modules of its own.
        self.lookups = ClientLookups(SystemClock())
        self._asking = Asking(self, self._stub, self._calling, self.lookups)
        calls = BlockCalls(self._channel, self._calling, self.reach, self.fingerprint, self.lookups)
        self.exists, self.prefix, self.explain = calls.exists, calls.prefix, calls.explain
        self.delete, self.pin, self.fingerprint_of = calls.delete, calls.pin, calls.fingerprint_of
        inline = InlineCalls(
            self._channel, self._calling, self.reach, self.fingerprint, self.lookups, self.spans
        )
        self.put_inline, self.get_inline = inline.put, inline.get
        self.put_many_inline, self.get_many_inline = inline.put_many, inline.get_many
        observing = ObservingCalls(self._channel, self._calling, self.reach)
        self.statistics, self.watch = observing.statistics, observing.watch
        self.looked_up = observing.looked_up
        self.slabs = Slabs(self)
        self.steps = StepCalls(self._channel, self._calling, self.reach)
        sessions = SessionCalls(self, self._channel, self._calling)
        self.session, self.sessions = sessions.one, sessions.of_user
        self.import_session = sessions.import_one
        self._settling: list[Callable[[], None]] = []
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pump: threading.Thread | None = None

    # --- memory

    @property
    def fabric(self) -> Fabric:
        """The fabric of all its links; FabricError where there is none."""
        with self.lock:
            if self._fabric is None:
                if self._closed:
                    raise ProtocolError("The client is closed.")
                self._fabric = self._own_side.open_fabric()
                self._pump = threading.Thread(
                    target=self._run_pump, args=(self._fabric,), name="kvstore-pump", daemon=True
                )
                self._pump.start()
            return self._fabric

    def register(self, memory: Buffer) -> Region:
        """Register memory that blocks are put from and got into. Close it when the memory goes."""
        return self.fabric.register(memory)

    # --- puts over the fabric

    def reserve(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
        watch: Watch | None = None,
    ) -> Reservation:
        """Lease a slot on the node for each block, all or none. The only call that a triggered put makes.

        `watch` is told what becomes of them; a session's `reserve` gives one.
        """
        check_reserved(self.fabric, blocks)
        if not 1 <= lease_ms <= LEASE_TIMEOUT_MS_MAX:
            raise ProtocolError(f"A lease lasts 1 to {LEASE_TIMEOUT_MS_MAX} ms, not {lease_ms}.")
        span = None if self.spans is None else self.spans.put(blocks, durability)
        try:
            return self._reserve(blocks, durability, lease_ms, expires_unix_ms, watch, span)
        except KvError as error:
            if span is not None:
                span.failed(error)
            raise

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None = None,
        *,
        durability: Durability = Durability.WRITTEN,
        lease_ms: int = LEASE_TIMEOUT_MS,
        expires_unix_ms: int = 0,
        watch: Watch | None = None,
    ) -> ArmedPuts:
        """Queue a put for each block: it goes out when `flag` reaches the block's threshold, without one at once.

        Nothing is asked of the node, and any number may be armed. What `reserve` would have said beforehand the results
        say: a block that is stored already is put all the same, and costs the drive nothing. A put that has not gone
        out within `lease_ms` never does. A block that has no key yet is named later, by `ArmedPuts.name`.
        """
        check_armed(self.fabric, blocks, ARMED_BLOCKS_MAX, self._block_bytes_max)
        if not 1 <= lease_ms <= LEASE_TIMEOUT_MS_MAX:
            raise ProtocolError(
                f"A put may wait 1 to {LEASE_TIMEOUT_MS_MAX} ms for its flag, not {lease_ms}."
            )
        link = self._attached(self.reach.call_timeout_s)
        # It has to know the slot beforehand, and to find the bytes in one piece.
        by_nic = flag is not None and self.fabric.deferred_work and not any(one.pieces for one in blocks)
        if link.sender is None or by_nic:
            return self.reserve(
                blocks, durability=durability, lease_ms=lease_ms, expires_unix_ms=expires_unix_ms, watch=watch
            ).arm(flag)
        span = None if self.spans is None else self.spans.put(blocks, durability)
        said = self._asking.said_of_puts(watch, span)
        deadline_ns = time.monotonic_ns() + lease_ms * 1_000_000
        try:
            heads = Heads([one.key for one in blocks], self.fingerprint, durability, expires_unix_ms, said)
            return ArmedPuts(self, link, blocks, durability, flag, deadline_ns, watch, span, heads)
        except KvError as error:
            if span is not None:
                span.failed(error)
            raise

    def put(
        self,
        blocks: Sequence[Block],
        *,
        durability: Durability = Durability.WRITTEN,
        expires_unix_ms: int = 0,
        timeout_s: float | None = None,
    ) -> list[PutResult]:
        """Put blocks now, and wait until they are as durable as asked; what became of each, in order."""
        timeout_s = self.reach.get_timeout_s if timeout_s is None else timeout_s
        lease_ms = min(LEASE_TIMEOUT_MS_MAX, max(1, int(timeout_s * 1000)))
        puts = self.arm(blocks, durability=durability, lease_ms=lease_ms, expires_unix_ms=expires_unix_ms)
        return puts.wait(timeout_s)

    def _reserve(
        self,
        blocks: Sequence[Block],
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        watch: Watch | None,
        span: PutSpan | None,
    ) -> Reservation:
        link = self._attached(self.reach.call_timeout_s)
        with self.lock:
            words = link.take_words(len(blocks))
        asked_ns = time.monotonic_ns()
        try:
            wanted = Reserving(blocks, words, self.fingerprint, durability, lease_ms, expires_unix_ms, watch)
            leases = self._asking.reserve(link, wanted, span)
        except KvError:
            with self.lock:
                link.give_back_words(words)
            raise
        if span is not None:
            span.reserved()
        deadline_ns = lease_deadline_ns(asked_ns, lease_ms)
        return Reservation(self, link, blocks, leases, words, durability, deadline_ns, watch, span)

    def abort(
        self, link: Link, leases: Sequence[Leased], told: Callable[[Collection[int]], None]
    ) -> threading.Event:
        """Give leases back; the event is set once the node has them, or the link has ended for want of an answer.

        `told`, with the lock held, hears the generations of those that were over: their words have been put.
        """
        over = threading.Event()
        if link.error is not None or not leases:
            over.set()
            return over
        request = pb.AbortRequest(
            connection=link.number,
            leases=[pb.AbortLease(slot=lease.slot, generation=lease.generation) for lease in leases],
        )
        self.calls += 1
        call = self._stub.Abort.future(request, timeout=self.reach.call_timeout_s)

        def check(answered: grpc.Future[pb.AbortResponse]) -> None:
            if answered.exception() is not None:
                self.lose(link, NodeUnavailable("The node did not take leases back."))
            else:
                with self.lock:
                    told(answered.result().expired)
            over.set()

        call.add_done_callback(check)
        return over

    # --- gets over the fabric

    def cancel_fetch(
        self, link: Link, blocks: Sequence[tuple[int, int]], failed: Callable[[], None], *, called: bool
    ) -> None:
        """Ask the node to end blocks of a fetch, by word and generation; `failed`, with the lock held, if not."""
        request = pb.CancelFetchRequest(
            connection=link.number,
            blocks=[pb.CancelledBlock(ack_word=word, ack_generation=one) for word, one in blocks],
            called=called,
        )
        self.calls += 1
        call = self._stub.CancelFetch.future(request, timeout=FETCH_CANCEL_MS / 1000)

        def check(answered: grpc.Future[pb.CancelFetchResponse]) -> None:
            if answered.exception() is not None:
                with self.lock:
                    failed()

        call.add_done_callback(check)

    def get(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None = None,
        timeout_s: float | None = None,
    ) -> list[Hit | Miss]:
        """Have blocks written into their regions; a Hit or a Miss for each, in order.

        They are of the client's own layout unless another one is given. Any number may be asked for, blocks of pieces
        among them, and parts of blocks.
        """
        if needs_windows(blocks):
            check_gets(self.fabric, blocks, GET_BLOCKS_MAX)
            timeout_s = self.reach.get_timeout_s if timeout_s is None else timeout_s
            return get_in_windows(
                self.slabs,
                blocks,
                lambda some, left_s: self._getting(some, layout, left_s, None, None, is_awaited=True),
                timeout_s,
            )
        get = self._getting(blocks, layout, timeout_s, None, None, is_awaited=True)
        try:
            return get.wait()
        except BaseException:  # such as a signal's: the get still has to be waited for, to be ended
            threading.Thread(target=get.wait, name="kvstore-get", daemon=True).start()
            raise

    def getting(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None = None,
        timeout_s: float | None = None,
        watch: Watch | None = None,
        ended: Ended | None = None,
    ) -> Get | NoGet:
        """Begin the same, and don't wait: `wait(n)` of what is returned waits for the first `n` blocks.

        The node begins with the first. `ended` is called with all outcomes when they are known, and must not wait.
        There is nobody here to scatter pieces: they are `get`'s.
        """
        if any(block.pieces is not None for block in blocks):
            raise ProtocolError("A block that belongs in pieces is waited for: use `get`.")
        return self._getting(blocks, layout, timeout_s, watch, ended, is_awaited=False)

    def _getting(
        self,
        blocks: Sequence[Block],
        layout: Layout | None,
        timeout_s: float | None,
        watch: Watch | None,
        ended: Ended | None,
        *,
        is_awaited: bool,
    ) -> Get | NoGet:
        check_gets(self.fabric, blocks, BATCH_BLOCKS_MAX)
        fingerprint = self.fingerprint if layout is None else layout.fingerprint
        began_ns, request_id = time.monotonic_ns(), current_request()
        span = None if self.spans is None else self.spans.get(blocks, request_id)
        if span is not None:
            ended = span.before(ended)
        if timeout_s is None:
            timeout_s = self.reach.get_timeout_s
        deadline_ns = began_ns + int(timeout_s * 1e9)
        try:
            with self.lookups.noting(Kind.FETCH, len(blocks), request_id):
                link = self._attached(timeout_s)
                with self.lock:
                    if link.error is not None:
                        raise link.error
                    get = Get(self, link, blocks, ended, is_awaited=is_awaited)
        except Overloaded as error:
            return NoGet(len(blocks), Miss(MissReason.BUSY, str(error)), ended)
        except KvError as error:
            return NoGet(len(blocks), Miss(MissReason.NODE_AWAY, str(error)), ended)
        self._asking.fetch(link, get, fingerprint, request_id, deadline_ns, watch, span)
        return get

    def status(self, *, wait_s: float = 0.0) -> pb.StatusResponse:
        """How the node is doing; `wait_s` waits that long for a node that is not there yet."""
        timeout_s = wait_s or self.reach.call_timeout_s
        try:
            answer: pb.StatusResponse = self._stub.Status(
                pb.StatusRequest(), timeout=timeout_s, wait_for_ready=wait_s > 0
            )
        except grpc.RpcError as failure:
            raise error_from_rpc("Asking for the node's status", failure) from failure
        self._breaker.succeeded()
        return answer

    @contextmanager
    def _calling(self, doing: str) -> Iterator[None]:
        """Make a call unless the node was away a moment ago; its error is one of ours."""
        with self._breaker.call():
            self.calls += 1
            try:
                yield
            except (grpc.RpcError, NodeUnavailable) as failure:
                error = error_from_rpc(doing, failure) if isinstance(failure, grpc.RpcError) else failure
                # gRPC does not say which step towards the node failed. This is asked once for each failure that
                # the breaker lets through, and a node that can be reached answers at once.
                if isinstance(error, NodeUnavailable) and (step := broken_step(self.reach)) is not None:
                    error = NodeUnavailable(f"{doing} found no node at {self.target}: {step}")
                raise error from failure

    # --- the link

    def next_tags(self) -> int:
        """The first of `TAGS_OF_ONE` fresh tags."""
        return next(self._tags)

    def settle(self, decide: Callable[[], None]) -> None:
        """Call this, with the lock held, once all events have been told that the fabric has reported by now."""
        self._settling.append(decide)
        os.eventfd_write(self._wake_fd, 1)

    def lose(self, link: Link, error: KvError) -> None:
        """End a link: when this returns, nothing comes in through it any more."""
        if isinstance(error, DeadlineExceeded):
            self._breaker.failed(error)
        with self.lock:
            link.lose(error)
            if self._link is link:
                self._link = None

    @property
    def is_attached(self) -> bool:
        """Whether there is a link to the node now."""
        return self._link is not None

    def attach(self) -> None:
        """Attach now, so that the next put or get need not. It takes as long as the node's memory does."""
        self._attached(self.reach.call_timeout_s)

    def _attached(self, timeout_s: float) -> Link:
        """The link there is, or a new one, within this time."""
        until_s = time.monotonic() + timeout_s
        if not self._attaching.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineExceeded("Another call was still attaching to the node.")
        try:
            with self.lock:
                if self._closed:
                    raise ProtocolError("The client is closed.")
                if self._link is not None:
                    return self._link
            left_s = max(0.0, until_s - time.monotonic())
            return self._attach(left_s)
        finally:
            self._attaching.release()

    def _attach(self, timeout_s: float) -> Link:
        until_s = time.monotonic() + timeout_s
        self._fabric_breaker.check()
        with self._calling("Attaching"):
            try:
                link = self._new_link(timeout_s)
            except AddressRefused as refused:
                if not self._own_side.is_at(refused.caller):
                    raise
                link = self._new_link(max(0.0, until_s - time.monotonic()))
        with self.lock:
            self._link = link
        link.watch_for_loss(lambda lost, why: self.lose(lost, NodeUnavailable(f"The node went away: {why}.")))
        with self._fabric_breaker.call():
            say_first_word(self, link, max(0.0, until_s - time.monotonic()))
        return link

    def _new_link(self, timeout_s: float) -> Link:
        return Link(
            self,
            self._stub,
            self.fabric,
            self._own_side,
            self.tenant,
            self._slots,
            self._block_bytes_max,
            timeout_s,
        )

    def check_memory(self, blocks: Sequence[Block]) -> None:
        """Refuse blocks in memory that is not registered here, or no longer."""
        check_memory(self.fabric, blocks)

    # --- events

    def _run_pump(self, fabric: Fabric) -> None:
        poll = select.poll()
        poll.register(fabric.fileno(), select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        while True:
            poll.poll()
            if self._stopping:
                return
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            with self.lock:
                settling, self._settling = self._settling, []
            while events := fabric.reap():
                with self.lock:
                    for event in events:
                        link = self._link
                        operation = link.operation(event.tag) if link is not None else None
                        if operation is not None:
                            operation.event(event)
            with self.lock:
                for decide in settling:
                    decide()

    def close(self) -> None:
        """End everything; puts that had not been acknowledged fail."""
        with self._attaching, self.lock:
            if self._closed:
                return
            self._closed = True
            if self._link is not None:
                self.lose(self._link, NodeUnavailable("The client was closed."))
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._pump is not None:
            self._pump.join()
        if self._fabric is not None:
            self._fabric.close()
        self._channel.close()
        os.close(self._wake_fd)
        if self.spans is not None:
            self.spans.close()
