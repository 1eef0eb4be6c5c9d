"""A link: one attachment to one node, from attach to loss.

What always holds: a link is lost once, for good; when `lose` returns, the node writes no byte into our memory any more
and none of our puts is pending, so callers may use their buffers. Everything that was pending is notified, with the
reason.
"""

from __future__ import annotations

import contextlib
import mmap
import queue
import secrets
import threading
from typing import TYPE_CHECKING, NamedTuple, Protocol

import grpc

from kvstore.client.fabric_caller import MEMORY_BYTES, FabricCalls
from kvstore.client.failures import Failures
from kvstore.client.shared import MappedMemory, map_shared
from kvstore.durability import Durability
from kvstore.errors import DeadlineExceeded, FabricError, KvError, NodeUnavailable, NoMemory, Overloaded
from kvstore.limits import ACK_GRACE_MS, ACK_WORDS, GRANTED_PUTS, GRANTED_SLOTS
from kvstore.miss import MissReason
from kvstore.wire import kvstore_pb2 as pb
from kvstore.wire.ack import AckCode, code_of_miss
from kvstore.wire.seal import Seal
from kvstore.wire.status import error_from_rpc, words_of
from nic_offload.direct import DirectReads
from nic_offload.memory import address_of, set_aside
from nic_offload.sender import HEAD_PAGE_BYTES, Area, Sender, SharedArea

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Sequence

    from kvstore.client.own_address import OwnSide
    from kvstore.client.slabs import Slabs
    from kvstore.reach import Reach
    from kvstore.wire.fabric_call import Leased
    from kvstore.wire.kvstore_pb2_grpc import KvStoreStub
    from nic_offload.caller import Caller
    from nic_offload.fabric import Event, Fabric, Region

__all__ = ["ARMED_BLOCKS_MAX", "TAGS_OF_ONE", "Callbacks", "Host", "Link", "Operation"]

TAGS_OF_ONE = 1 << 16  # an operation's tags; the first is its name
ARMED_BLOCKS_MAX = TAGS_OF_ONE // 2  # in one batch of puts
_WORD_BYTES = 8
_WORDS_BYTES = (ACK_WORDS + GRANTED_PUTS) * _WORD_BYTES  # those of puts by grants come last
_HEADS_BYTES = GRANTED_SLOTS * HEAD_PAGE_BYTES
_MEMORY_BYTES = _WORDS_BYTES + _HEADS_BYTES + MEMORY_BYTES


class _Responses(Protocol):
    """The node's side of the stream."""

    def __iter__(self) -> Iterator[pb.AttachResponse]: ...

    def __next__(self) -> pb.AttachResponse: ...

    def cancel(self) -> bool: ...


class Operation(Protocol):
    """A pending operation of a link. It is notified of its events, or of the link's loss.

    It has `TAGS_OF_ONE` tags, and is registered with the link under the first.
    """

    def event(self, event: Event) -> None:
        """Handle an event of one of its tags."""
        ...

    def lost(self, error: KvError) -> None:
        """Handle the loss of the link: no more events will come."""
        ...


class Callbacks(NamedTuple):
    """Adapts an object of the application's to `Operation`, so that its own class shows no plumbing."""

    event: Callable[[Event], None]
    lost: Callable[[KvError], None]


class Host(Protocol):
    """What operations need of their client."""

    def attaching(self, cancel: Callable[[], object]) -> None:
        """Note how the attach that has begun is ended if the client is closed."""
        ...

    @property
    def fabric(self) -> Fabric:
        """The fabric of all its links."""
        ...

    @property
    def reach(self) -> Reach:
        """How its node is reached, and for how long."""
        ...

    @property
    def lock(self) -> threading.RLock:
        """Guards links and operations; held while they are notified of events."""
        ...

    @property
    def slabs(self) -> Slabs:
        """Registered memory for transfers of blocks in pieces."""
        ...

    def next_tags(self) -> int:
        """The first of `TAGS_OF_ONE` fresh tags."""
        ...

    def abort(
        self, link: Link, leases: Sequence[Leased], answered: Callable[[Collection[int]], None]
    ) -> threading.Event:
        """Return leases; the event is set once the node has them, or the link has ended.

        `answered` is called, with the lock held, with the generations of expired leases: their words have been put.
        """
        ...

    def settle(self, decide: Callable[[], None]) -> None:
        """Call this, with the lock held, once all events that the fabric has reported by now were handled."""
        ...

    def cancel_fetch(
        self, link: Link, blocks: Sequence[tuple[int, int]], failed: Callable[[], None], *, called: bool
    ) -> None:
        """Ask the node to cancel blocks of a fetch, by word and generation; `failed` is called, locked, if that fails.

        `called`: the fetch was requested over gRPC, not over the fabric.
        """
        ...

    def lose(self, link: Link, error: KvError) -> None:
        """End a link: when this returns, nothing arrives through it any more."""
        ...


class Link:
    """One attachment. All methods are called with the client's lock held."""

    def __init__(
        self,
        client: Host,
        stub: KvStoreStub,
        fabric: Fabric,
        side: OwnSide,
        tenant: str,
        slots: int,
        block_bytes_max: int,
        timeout_s: float,
    ) -> None:
        self.stub = stub
        self.error: KvError | None = None
        self.operations: dict[int, Operation] = {}
        self._generation = secrets.randbits(48) + 1
        self.failures = Failures(client, self, stub)
        self._fabric = fabric
        self._free_words = list(range(ACK_WORDS))
        self._hang_up = threading.Event()
        self._responses: _Responses | None = None
        self.calls: FabricCalls | None = None  # a node of an earlier version takes none
        self._caller: Caller | None = None  # of these; it is closed even if they are no longer made
        self.sender: Sender | None = None  # None: every put has to ask for its slot
        self._gathered: tuple[Region, mmap.mmap] | None = None
        self.mapped = MappedMemory()  # of the node, if it is on this machine
        self._block_bytes_max = block_bytes_max
        self.direct: DirectReads | None = None  # of that memory
        self.is_sure = True  # once lost: that nothing arrives any more
        with contextlib.ExitStack() as undo:
            self._memory = self._allocate()
            undo.callback(self._memory.close)
            self.endpoint, address = side.open_endpoint(fabric, timeout_s)
            undo.callback(self.endpoint.close)
            self._acks = fabric.register(self._memory, endpoint=self.endpoint)
            undo.pop_all()
        try:
            self._attach(client, side, address, tenant, slots, block_bytes_max, timeout_s)
        except BaseException:
            # Otherwise the node would keep an unused connection with its slots.
            self._end_stream()
            self._close_memory()
            raise

    @staticmethod
    def _allocate() -> mmap.mmap:
        try:
            return mmap.mmap(-1, _MEMORY_BYTES)
        except OSError as error:
            raise NoMemory(
                f"This process could not allocate {_MEMORY_BYTES} bytes for a connection: {error.strerror}."
            ) from error

    def _attach(
        self,
        client: Host,
        side: OwnSide,
        address: bytes,
        tenant: str,
        slots: int,
        block_bytes_max: int,
        timeout_s: float,
    ) -> None:
        fabric = self._fabric
        request = pb.AttachRequest(
            tenant=tenant,
            provider=fabric.provider,
            fabric_address=address,
            ack_base=self._acks.base,
            ack_key=self._acks.key,
            ack_words=ACK_WORDS + GRANTED_PUTS,
            block_bytes_max=block_bytes_max,
            slots=slots,
            answers_base=self._acks.base + _WORDS_BYTES + _HEADS_BYTES,
            puts_by_grants=True,
            seals=True,
            shares=True,
            reads_directory=True,
            looks_in_rows=True,
        )
        self._responses = self.stub.Attach(self._requests(request))
        client.attaching(self._responses.cancel)
        answer = self._first_answer(self._responses, timeout_s)
        if answer.seal:  # a node of an earlier version gives none
            Seal(answer.seal).put_on_client(self.endpoint, self._acks)
        self.peer = side.add_peer(fabric, answer.fabric_address)
        self.node_address = answer.fabric_address
        self.number = answer.connection
        self.landing_key = answer.landing_key
        self.slots = answer.slots
        self.sends_parts = answer.parts  # a node of an earlier version does not,
        self.answers_prefixes = answer.prefixes  # nor this
        self.encrypts = answer.encrypts
        if answer.HasField("calls"):
            start = _WORDS_BYTES + _HEADS_BYTES
            self.calls = FabricCalls(client, self, answer.calls, self._acks, self._memory, start)
            self._caller = self.calls.caller
            if answer.HasField("shared"):
                self.mapped = map_shared(answer.shared, answer.puts)
            if self.mapped.hot is not None:
                corrupt, late = code_of_miss(MissReason.CORRUPT), code_of_miss(MissReason.NODE_AWAY)
                mapped = self.mapped.slots
                rows = 0 if mapped is None else address_of(mapped.memory) + mapped.rows_offset
                self.calls.caller.share(
                    self.mapped.hot, AckCode.SERVED, AckCode.SCATTERED, corrupt, late, rows, ACK_WORDS
                )
            self.direct = self._open_direct(answer.shared)
        if answer.HasField("puts") and self.mapped.is_sure:
            self.sender = self._open_sender(answer.puts)

    def _open_direct(self, offered: pb.SharedMemory) -> DirectReads | None:
        hot, directory, slots = self.mapped.hot, self.mapped.directory, self.mapped.slots
        if hot is None or directory is None or slots is None:
            return None
        try:
            return DirectReads(directory, hot, address_of(slots.memory) + offered.log_offset, offered.owner)
        except FabricError:
            return None  # of another version

    def _open_sender(self, puts: pb.PutArea) -> Sender:
        area = Area(
            puts.flags,
            puts.slots,
            puts.slot_bytes,
            puts.key,
            min(puts.count, GRANTED_SLOTS),
            puts.first_generation,
        )
        return Sender(
            self.endpoint,
            self._acks,
            self.peer,
            area,
            self.word_address(ACK_WORDS),
            GRANTED_PUTS,
            ACK_WORDS,
            self._acks.address + _WORDS_BYTES,
            self._generation,
            ACK_GRACE_MS * 1_000_000,
            Durability.SYNCED,
            self._shared_area(puts),
        )

    def _shared_area(self, puts: pb.PutArea) -> SharedArea | None:
        slots = self.mapped.slots
        if slots is None:
            return None
        self._fabric.listen(slots.own_doorbell, is_pipe=True)
        flags = address_of(slots.memory)
        return SharedArea(
            flags, flags + puts.slots - puts.flags, flags + slots.words_offset, slots.node_doorbell
        )

    def gather_region(self) -> Region:
        """Memory in which puts of pieces are gathered, with room for each granted slot."""
        sender = self.sender
        assert sender is not None, "a link without one has its puts reserved"
        if self._gathered is None:
            size = sender.slots_count * self._block_bytes_max
            memory = set_aside(size)
            try:
                region = self._fabric.register(memory, remote_write=False)
            except FabricError:
                memory.close()
                raise
            self._gathered = region, memory
            sender.gather(region, region.address, self._block_bytes_max)
        return self._gathered[0]

    def _requests(self, first: pb.AttachRequest) -> Iterator[pb.AttachRequest]:
        yield first
        self._hang_up.wait()  # the stream is open for as long as this has not ended

    def _end_stream(self) -> None:
        self._hang_up.set()
        if self._responses is not None:
            self._responses.cancel()

    def _first_answer(self, responses: _Responses, timeout_s: float) -> pb.AttachResponse:
        answers: queue.SimpleQueue[pb.AttachResponse | grpc.RpcError | None] = queue.SimpleQueue()

        def read() -> None:
            try:
                answers.put(next(responses, None))
            except grpc.RpcError as failure:
                answers.put(failure)

        threading.Thread(target=read, name="kvstore-attach", daemon=True).start()
        try:
            answer = answers.get(timeout=timeout_s)
        except queue.Empty:
            raise DeadlineExceeded(f"The node did not answer an attach within {timeout_s:.1f} s.") from None
        if isinstance(answer, grpc.RpcError):
            raise error_from_rpc("Attaching", answer)
        if answer is None:
            raise NodeUnavailable("The node ended the attachment before it began.")
        return answer

    def watch_for_loss(self, lost: Callable[[Link, str], None]) -> None:
        """Call `lost`, from a thread of its own, when the node ends the attachment."""

        def read() -> None:
            why = "the node closed the connection"
            try:
                for _ in self._responses or ():
                    pass
            except grpc.RpcError as failure:
                why = words_of(failure) or why
            lost(self, why)

        threading.Thread(target=read, name="kvstore-link", daemon=True).start()

    def operation(self, tag: int) -> Operation | None:
        """The pending operation that owns a tag, if any."""
        return self.operations.get(tag - tag % TAGS_OF_ONE)

    def take_generations(self, count: int) -> int:
        """Reserve `count` new generations for words of our gets; returns the first."""
        first = self._generation
        self._generation += count
        return first

    def take_words(self, count: int) -> list[int]:
        """Reserve acknowledgement words for new operations."""
        if count > len(self._free_words):
            raise Overloaded(
                f"The client has {ACK_WORDS} acknowledgement words and all but a few are in use."
            )
        left = len(self._free_words) - count
        taken = self._free_words[left:]
        del self._free_words[left:]
        return taken

    def give_back_words(self, words: list[int]) -> None:
        """Return the words of completed operations."""
        self._free_words.extend(words)

    def word_address(self, word: int) -> int:
        """The address of a word in our memory."""
        return self._acks.address + word * _WORD_BYTES

    def lose(self, error: KvError) -> None:
        """End the link and notify all pending operations. Safe to call again."""
        if self.error is not None:
            return
        self.error = error
        self._end_stream()
        if self.direct is not None:
            self.direct.close()
        try:
            self._close_memory()
        except FabricError as failure:
            # The provider hangs, and may write at any time: callers get an error, and that memory is never reused.
            self.error = error = failure
            self.is_sure = False
        if self.is_sure:
            # Some providers keep a peer's address until the domain is closed.
            with contextlib.suppress(FabricError):
                self._fabric.remove_peer(self.peer)
        notified = list(self.operations.values())
        self.operations.clear()
        for operation in notified:
            operation.lost(error)

    def _close_memory(self) -> None:
        self.endpoint.close()
        if self._caller is not None:
            self._caller.close()
        if self.sender is not None:
            self.sender.close()
        if self.mapped.hot is not None:
            self.mapped.hot.close()
        if self.mapped.directory is not None:
            self.mapped.directory.close()
        if self.mapped.slots is not None:
            self._fabric.ignore(self.mapped.slots.own_doorbell)
            self.mapped.slots.close()
        if self._gathered is not None:
            region, memory = self._gathered
            region.close()
            memory.close()
        self._acks.close()
        self._memory.close()
