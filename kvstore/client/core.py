"""The core of a client: its channel, its fabric, its link to the node, and the thread that receives events.

What always holds: it attaches at the first call that needs the link, and again after a loss; once a link is lost
nothing comes in through it; a node that was away costs one call its deadline, and those after it nothing
(`kvstore.client.breaker`). While something is awaited, a link whose connection broke is lost within two checks
(`STALLED_LOOK_MS`), and one over which nothing can be sent after `STALLED_MS`.
What it doesn't do: put or get. `kvstore.client.transport` says which modules do, and `Client` offers them.
"""

from __future__ import annotations

import atexit
import itertools
import logging
import os
import select
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

import grpc

from kvstore.client.breaker import Breaker
from kvstore.client.call_routes import Asking
from kvstore.client.channel import close_channel, open_channel
from kvstore.client.contact import explained
from kvstore.client.link import TAGS_OF_ONE, Link, Operation
from kvstore.client.own_address import OwnSide, say_first_word
from kvstore.client.request_ids import ClientLookups
from kvstore.client.slabs import Slabs
from kvstore.clock import SystemClock
from kvstore.errors import (
    AddressRefused,
    Closed,
    DeadlineExceeded,
    FabricError,
    FabricUnavailable,
    KvError,
    NodeUnavailable,
)
from kvstore.limits import (
    FETCH_CANCEL_MS,
    STALLED_LOOK_MS,
    STALLED_MS,
    STATUS_AGAIN_MS,
)
from kvstore.reach import AUTO, FABRIC, GRPC
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire import kvstore_pb2_grpc
from kvstore.wire.status import error_from_rpc
from nic_offload.fabric import MEMORY, Fabric
from nic_offload.handle import Handle
from nic_offload.trigger import arm

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from opentelemetry.trace import TracerProvider

    from kvstore.client.spans import ClientSpans
    from kvstore.reach import Reach
    from kvstore.wire.fabric_call import Leased

__all__ = ["Core", "Unlinked"]

log = logging.getLogger(__name__)

_STATUS: Final = "Reading the node's status"


def _spans(provider: TracerProvider, target: str) -> ClientSpans:
    from kvstore.client.spans import ClientSpans  # noqa: PLC0415 - its package is an extra

    return ClientSpans(provider, target)


class Unlinked:
    """Operations that need no link, for as long as the client is open."""

    def __init__(self) -> None:
        self.error: KvError | None = None
        self.operations: dict[int, Operation] = {}

    def lose(self, error: KvError) -> None:
        """End them all, and every later one."""
        self.error = error
        lost, self.operations = list(self.operations.values()), {}
        for operation in lost:
            operation.lost(error)


class Core(Handle):
    """The core of a client. Safe to use from any thread."""

    def __init__(
        self,
        reach: Reach,
        fingerprint: bytes,
        slots: int,
        block_bytes_max: int,
        tracer_provider: TracerProvider | None,
        *,
        device_memory: bool,
    ) -> None:
        self.reach, self.fingerprint = reach, fingerprint
        self._device_memory = device_memory
        self.slots, self.block_bytes_max = slots, block_bytes_max
        self.spans = None if tracer_provider is None else _spans(tracer_provider, reach.node)
        self.channel = open_channel(reach, None if self.spans is None else self.spans.header)
        self.lock = threading.RLock()
        self._fabric: Fabric | None = None  # a client that makes only gRPC calls needs none
        self._transport = reach.transport  # until the fabric is opened, if that is "auto"
        self._own_side = OwnSide(reach)
        self._closed = self._closing = False
        self.why_closed = "The client was closed."
        self._cancel_attach: Callable[[], object] | None = None  # of the last one that has begun
        self._pid = os.getpid()
        self.calls = 0  # made to the node; a test counts that armed puts need none
        self._tags = itertools.count(TAGS_OF_ONE, TAGS_OF_ONE)
        self.link: Link | None = None
        self.unlinked = Unlinked()
        self._proved: Link | None = None  # the last link over which a word was sent
        self._attaching = threading.Lock()
        self.stub = kvstore_pb2_grpc.KvStoreStub(self.channel)  # type: ignore[no-untyped-call]
        self.breaker = Breaker(SystemClock())
        # The node may be up and its fabric unreachable; connecting takes time.
        self.fabric_breaker = Breaker(SystemClock(), reach.connect_timeout_ms)
        self.lookups = ClientLookups(SystemClock())
        self.asking = Asking(self, self.stub, self.calling, self.lookups)
        self.slabs = Slabs(self)
        self._settling: list[Callable[[], None]] = []
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._pump: threading.Thread | None = None

    @property
    def fabric(self) -> Fabric:
        """The fabric of all its links; FabricError where there is none."""
        fabric = self._fabric
        if fabric is not None:
            return fabric
        with self.lock:
            if self._fabric is None:
                if self._closed:
                    raise Closed("The client is closed.")
                self._fabric, self._transport = self._open_fabric()
                self._pump = threading.Thread(
                    target=self._run_pump, args=(self._fabric,), name="kvstore-pump", daemon=True
                )
                self._pump.start()
                atexit.register(self._end_at_exit)
            return self._fabric

    def _open_fabric(self) -> tuple[Fabric, str]:
        wanted = self.reach.transport
        if wanted == GRPC:
            return Fabric(MEMORY), wanted
        try:
            return self._open_own(), FABRIC if wanted == AUTO else wanted
        except FabricUnavailable as error:
            if wanted != AUTO or self.reach.provider is not None:
                raise
            log.warning("Blocks are sent over gRPC, which is slower: %s", error)
            return Fabric(MEMORY), GRPC

    def _open_own(self) -> Fabric:
        return self._own_side.open_fabric(device_memory=self._device_memory)

    @property
    def transport(self) -> str:
        """How its blocks go."""
        _ = self.fabric
        return self._transport

    @property
    def open_fabric(self) -> Fabric:
        """The same, for starting something new; raises Closed once the client is closed."""
        self._check_open()
        return self.fabric

    def _check_open(self) -> None:
        if self.is_inherited:
            # gRPC and the fabric would wait for threads of the parent, or break its connection.
            raise Closed("The client was opened before this process was forked. Open one in the child.")
        if self._closed:
            raise Closed("The client is closed.")

    @contextmanager
    def calling(self, doing: str) -> Iterator[None]:
        """Make a call unless the node was away a moment ago; errors are translated to ours."""
        self._check_open()
        with self.breaker.call():
            self.calls += 1
            try:
                yield
            except ValueError:
                self._check_open()  # it is gRPC's own if the channel was closed since
                raise
            except (grpc.RpcError, NodeUnavailable) as failure:
                error = error_from_rpc(doing, failure) if isinstance(failure, grpc.RpcError) else failure
                # Done once for each failure that the breaker lets through; a reachable node answers at once.
                raise explained(doing, self.reach, error) from failure

    def status(self, wait_s: float) -> pb.StatusResponse:
        """As `Client.status`."""
        deadline_s = time.monotonic() + (wait_s or self.reach.call_timeout_s)
        while True:
            self._check_open()
            left_s = max(0.001, deadline_s - time.monotonic())
            try:
                answer: pb.StatusResponse = self.stub.Status(
                    pb.StatusRequest(), timeout=left_s, wait_for_ready=wait_s > 0
                )
            except ValueError:
                self._check_open()  # as above
                raise
            except grpc.RpcError as failure:
                error = error_from_rpc(_STATUS, failure)
                is_away = isinstance(
                    error, NodeUnavailable
                )  # or gRPC has not seen yet that the connection broke
                if not wait_s or not is_away or time.monotonic() + STATUS_AGAIN_MS / 1000 > deadline_s:
                    if wait_s and isinstance(error, DeadlineExceeded):  # gRPC waited for a connection
                        away = NodeUnavailable(str(error))
                        why = explained(_STATUS, self.reach, away)
                        raise (error if why is away else why) from failure
                    raise explained(_STATUS, self.reach, error) from failure
                time.sleep(STATUS_AGAIN_MS / 1000)
            else:
                self.breaker.succeeded()
                return answer

    # --- calls about puts and gets

    def abort(
        self, link: Link, leases: Sequence[Leased], report: Callable[[Collection[int]], None]
    ) -> threading.Event:
        """Return leases; the event is set once the node has them, or the link has ended without an answer.

        `report` is called, with the lock held, with the generations of expired leases: their words have been put.
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
        call = self.stub.Abort.future(request, timeout=self.reach.call_timeout_s)

        def check(answered: grpc.Future[pb.AbortResponse]) -> None:
            if answered.exception() is not None:
                self.lose(link, NodeUnavailable("The node did not accept returned leases."))
            else:
                with self.lock:
                    report(answered.result().expired)
            over.set()

        call.add_done_callback(check)
        return over

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
        call = self.stub.CancelFetch.future(request, timeout=FETCH_CANCEL_MS / 1000)

        def check(answered: grpc.Future[pb.CancelFetchResponse]) -> None:
            if answered.exception() is not None:
                with self.lock:
                    failed()

        call.add_done_callback(check)

    # --- the link

    def next_tags(self) -> int:
        """The first of `TAGS_OF_ONE` fresh tags."""
        return next(self._tags)

    def settle(self, decide: Callable[[], None]) -> None:
        """Call this, with the lock held, once all events that the fabric has reported so far were handled."""
        self._settling.append(decide)
        os.eventfd_write(self._wake_fd, 1)

    def lose(self, link: Link, error: KvError) -> None:
        """End a link: when this returns, nothing arrives through it any more."""
        if isinstance(error, DeadlineExceeded):
            self.breaker.failed(error)
        with self.lock:
            link.lose(error)
            if self.link is link:
                self.link = None

    @property
    def is_attached(self) -> bool:
        """Whether there is a link to the node now."""
        return self.link is not None

    @property
    def proved(self) -> Link | None:
        """The link, if something has been sent over it."""
        link = self.link
        return link if link is self._proved else None

    def attach(self) -> None:
        """As `Client.attach`."""
        if self.transport == GRPC:
            self.status(0)
        else:
            self.attached()

    def attached(self, timeout_s: float | None = None) -> Link:
        """The existing link, or a new one, within this time, or that of a call."""
        link = self.link
        if link is not None and link is self._proved and link.error is None:
            return link
        if timeout_s is None:
            timeout_s = self.reach.call_timeout_s
        until_s = time.monotonic() + timeout_s
        if not self._attaching.acquire(timeout=max(0.0, timeout_s)):
            raise DeadlineExceeded("Another call was still attaching to the node.")
        try:
            with self.lock:
                if self._closed:
                    raise Closed("The client is closed.")
                if self.link is not None:
                    return self.link
            left_s = max(0.0, until_s - time.monotonic())
            return self._attach(left_s)
        except KvError as error:
            if self._closing and not isinstance(error, Closed):
                raise Closed("The client was closed while it attached to the node.") from error
            raise
        finally:
            self._attaching.release()

    def attaching(self, cancel: Callable[[], object]) -> None:
        """Note how the attach that has begun is ended if the client is closed."""
        self._cancel_attach = cancel
        if self._closing:
            cancel()

    def _attach(self, timeout_s: float) -> Link:
        until_s = time.monotonic() + timeout_s
        self.fabric_breaker.check()
        with self.calling("Attaching"):
            try:
                link = self._new_link(timeout_s)
            except AddressRefused as refused:
                if not self._own_side.is_at(refused.caller):
                    raise
                link = self._new_link(max(0.0, until_s - time.monotonic()))
        with self.lock:
            self.link = link
        link.watch_for_loss(lambda lost, why: self.lose(lost, NodeUnavailable(f"The node went away: {why}.")))
        try:
            with self.fabric_breaker.call():
                say_first_word(self, link, max(0.0, until_s - time.monotonic()))
        except BaseException:  # such as a signal's: the pump looks after no link that isn't proved
            self.lose(link, NodeUnavailable("Attaching was interrupted."))
            raise
        self._proved = link
        os.eventfd_write(self._wake_fd, 1)  # from now on the pump looks after it
        return link

    def _look_after(self, link: Link) -> None:
        """End a link whose connection broke.

        While something is awaited, send a word, so that a break shows. libfabric doesn't report it: data in flight is
        lost, and its slots with it. It reconnects, but a node whose own end is still open refuses every new connection
        of the same endpoint. The next attachment uses a new endpoint.
        """
        if link.endpoint.has_broken:
            why = "The fabric's connection to the node broke"
        elif link.endpoint.stalled_ns > STALLED_MS * 1_000_000:
            why = f"Nothing could be sent to the node over the fabric for {STALLED_MS / 1000:.0f} s"
        else:
            if link.calls is not None and self.fabric.statistics().watches:
                until_ns = SystemClock().monotonic_ns() + STALLED_MS * 1_000_000
                with suppress(FabricError):
                    arm(self.fabric, [link.calls.first_word(self.next_tags(), until_ns)])
            return
        self.lose(
            link,
            NodeUnavailable(f"{why}, and what was sent may be lost; the next put or get makes a new one."),
        )

    def _new_link(self, timeout_s: float) -> Link:
        return Link(
            self,
            self.stub,
            self.fabric,
            self._own_side,
            self.reach.tenant,
            self.slots,
            self.block_bytes_max,
            timeout_s,
        )

    # --- events

    def _run_pump(self, fabric: Fabric) -> None:
        poll = select.poll()
        poll.register(fabric.fileno(), select.POLLIN)
        poll.register(self._wake_fd, select.POLLIN)
        look_s = 0.0
        while True:
            poll.poll(None if self.link is None else STALLED_LOOK_MS)
            with suppress(BlockingIOError):
                os.eventfd_read(self._wake_fd)
            if self._stopping:  # after the read, which would take the wakeup that says so
                return
            with self.lock:
                settling, self._settling = self._settling, []
            while events := fabric.reap():
                with self.lock:
                    for event in events:
                        link = self.link
                        operation = link.operation(event.tag) if link is not None else None
                        if operation is None:
                            operation = self.unlinked.operations.get(event.tag - event.tag % TAGS_OF_ONE)
                        if operation is not None:
                            operation.event(event)
            with self.lock:
                for decide in settling:
                    decide()
                link = self.link
                if link is not None and link is self._proved and time.monotonic() >= look_s:
                    self._look_after(link)
                    look_s = time.monotonic() + STALLED_LOOK_MS / 1000

    @property
    def is_inherited(self) -> bool:
        """Whether this process was forked from the client's: connections, threads and held locks are its parent's."""
        return os.getpid() != self._pid

    def _end_at_exit(self) -> None:
        """The interpreter exits, and closes the fabric next: no thread may use it by then."""
        if not self.is_inherited:
            self._end_link()
            self._end_pump()

    def _end_link(self) -> None:
        with self.lock:
            self._closed = True
            closed = NodeUnavailable(self.why_closed)
            if self.link is not None:
                self.lose(self.link, closed)
            self.unlinked.lose(closed)

    def _end_pump(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        assert self._pump is not None
        self._pump.join()

    def close(self) -> None:
        """Close the client. Puts that have not been acknowledged fail, and so does an attach under way."""
        self._closing = True
        if self.link is None and self._cancel_attach is not None:
            self._cancel_attach()
        with self._attaching, self.lock:
            if self._closed:
                return
            self._end_link()
        if self._fabric is not None:
            self._end_pump()
            atexit.unregister(self._end_at_exit)
            with self.lock:
                for decide in self._settling:  # no event will come any more
                    decide()
            self._fabric.close()
        close_channel(self.channel)
        os.close(self._wake_fd)
        if self.spans is not None:
            self.spans.close()
