"""Fetches: from the drive, or from the hot memory, into a client's region, with the acknowledgement behind.

A fetch's life: queued (bounded; tenants and connections in turn) -> found in the hot memory, or reading (the drive
fills a piece of it) -> sending (the C core checks the payload's CRC and, only if it holds, puts the bytes and chains
the acknowledgement word to them) -> over; the piece stays in the hot memory until something else needs the room.

What always holds: no byte leaves whose record failed a check, wherever it was; each fetch has one word, put once:
behind its last byte, or to say that none will come, because it is missed or was cancelled; memory is not used again
while the drive or the fabric has it; a hot piece is only sent for the record that the index names at that moment; a
client that takes nothing in holds no more of the memory than it leaves to all others, and what is asked of the drive
ahead of a newcomer is bounded.
"""

from __future__ import annotations

import errno
import logging
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import FabricError, Overloaded
from kvstore.limits import (
    BATCH_BLOCKS_MAX,
    FETCHES_QUEUED_MAX,
    HEADER_BYTES,
    PAGE_BYTES,
    READ_AHEAD_BYTES,
)
from kvstore.lookups import Outcome
from kvstore.miss import MissReason
from kvstore.node.cancelling import Noted
from kvstore.node.fair import FairQueue
from kvstore.node.landing import pages_of
from kvstore.storage.gets import mismatch
from kvstore.storage.items import GetItem
from kvstore.wire.ack import AckCode, ack_word, code_of_miss
from nic_offload.fabric import EventKind
from nic_offload.trigger import TriggeredPut, arm, put_words

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.node.connection import Connection
    from kvstore.node.fair import Holder
    from kvstore.node.granted import Granted
    from kvstore.node.hot import HotMemory, Piece
    from kvstore.node.looking import Looking
    from kvstore.node.statistics import Counters
    from kvstore.node.timings import Timings
    from kvstore.node.traces import SeenGet
    from kvstore.storage.index import Entry
    from kvstore.storage.items import GetDone
    from kvstore.storage.store import Store
    from nic_offload.fabric import Event, Fabric
    from nic_offload.trigger import WordPut

__all__ = ["FetchRequest", "Fetches"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FetchRequest:
    """A block that a client wants, and where it wants it."""

    key: bytes
    fingerprint: bytes
    length: int
    target: int
    target_key: int
    ack_word: int
    ack_generation: int
    skip: int = 0
    part: int = 0  # so many bytes are sent, behind the first `skip`; 0: all
    seen: SeenGet | None = None  # who traces the get that it is of

    @property
    def sent_bytes(self) -> int:
        """How many are sent."""
        return self.part or self.length


@dataclass(slots=True)
class _Fetch:
    connection: Connection
    request: FetchRequest
    looking: Looking
    at: int  # among the blocks of that look-up
    tag: int
    queued_ns: int
    size_bytes: int = field(init=False)  # of memory that it takes
    piece: Piece | None = None
    hot: bool = False  # the piece was there before
    generation: int = 0  # of the record in it
    sending: bool = False
    cancelled: bool = False
    told: bool = False  # that it was cancelled: its look-up waits for it no more

    @property
    def name(self) -> tuple[bytes, bytes]:
        return self.connection.tenant, self.request.key

    @property
    def tenant(self) -> bytes:
        return self.connection.tenant

    @property
    def flow(self) -> int:
        return self.connection.number

    @property
    def holder(self) -> Holder:
        return self.tenant, self.flow

    def __post_init__(self) -> None:
        self.size_bytes = pages_of(self.request.length) * PAGE_BYTES


class Fetches:
    """All fetches of a node."""

    def __init__(
        self,
        fabric: Fabric,
        store: Store,
        memory: HotMemory,
        granted: Granted,
        tags: Iterator[int],
        clock: Clock,
        counters: Counters,
        timings: Timings,
        *,
        traced: bool,
    ) -> None:
        self._timings = timings
        self._traced = traced  # somebody wants to know when sending began
        # Lengths, by where from and when asked for; not noted yet.
        self._sent: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)
        self._counters = counters
        self._fabric = fabric
        self._store = store
        self._memory = memory
        self._granted = granted
        self._tags = tags
        self._clock = clock
        self._queued: FairQueue[_Fetch] = FairQueue()
        self._under_way: dict[int, _Fetch] = {}
        self._lookings: dict[Looking, Connection] = {}  # of which a block is waiting or under way
        self._reading_bytes = 0

    def enqueue(
        self, connection: Connection, requests: Sequence[FetchRequest], looking: Looking, *, called: bool
    ) -> None:
        """Queue the fetches, all or none, and start what can be started. `called`: they have come by gRPC."""
        if len(self._queued) + len(requests) > FETCHES_QUEUED_MAX:
            raise Overloaded(f"The node has {len(self._queued)} fetches waiting; try again in a moment.")
        looking.expect()
        self._lookings[looking] = connection
        now_ns = self._clock.monotonic_ns()
        wanted: list[_Fetch] = []
        untold: list[FetchRequest] = []
        for at, request in enumerate(requests):
            noted = connection.cancelled.take(request.ack_generation, called=called)
            if noted is Noted.NOT:
                wanted.append(_Fetch(connection, request, looking, at, next(self._tags), now_ns))
                continue
            if noted is Noted.UNTOLD:
                untold.append(request)
            self._looked(request, looking)
        self._queued.add(wanted)
        self._say_cancelled(connection, untold)
        self.pump()

    def cancel(self, connection: Connection, words: Mapping[int, int], *, called: bool) -> None:
        """End fetches, given as generation and word of each. Their words say so, or stand behind bytes on their way.

        `called`: they were asked for by gRPC, so of those that are not known here nothing is under way anywhere.
        """
        gone = self._queued.withdraw(
            connection.tenant, connection.number, lambda fetch: fetch.request.ack_generation in words
        )
        told = [fetch.request for fetch in gone]
        for fetch in gone:
            self._looked(fetch.request, fetch.looking)
        known = {request.ack_generation for request in told}
        sending: list[int] = []
        for fetch in self._under_way.values():
            if fetch.connection is not connection or fetch.request.ack_generation not in words:
                continue
            known.add(fetch.request.ack_generation)
            if not fetch.cancelled:
                fetch.cancelled = True
                if fetch.sending:
                    sending.append(fetch.tag)
                else:  # the drive has its memory still
                    fetch.told = True
                    told.append(fetch.request)
                    self._looked(fetch.request, fetch.looking)
        unknown = words.keys() - known
        self._say_cancelled(connection, told)
        if called:
            self._say(connection, [(words[one], one) for one in connection.cancelled.by_rpc(unknown)])
        else:
            connection.cancelled.over_fabric(unknown)
        if sending:
            self._fabric.cancel(
                sending
            )  # exact: what it takes back ends as cancelled, and the rest has gone out
        self.pump()

    def _say_cancelled(self, connection: Connection, requests: Iterable[FetchRequest]) -> None:
        self._say(connection, [(request.ack_word, request.ack_generation) for request in requests])

    def _say(self, connection: Connection, words: Iterable[tuple[int, int]]) -> None:
        puts = [connection.word_put(word, generation, AckCode.CANCELLED) for word, generation in words]
        if puts:
            put_words(self._fabric, puts)

    @property
    def waiting(self) -> int:
        """How many wait for their turn."""
        return len(self._queued)

    @property
    def are_waiting(self) -> bool:
        """Whether any waits for its turn, or for the drive."""
        return len(self._queued) > 0 or self._reading_bytes > 0

    def pump(self) -> None:
        """Send what is hot, and read ahead as far as the memory goes."""
        if self._sent:
            self._note_sent()
        while not self._memory.pages.refused and (batch := self._next()):
            puts: list[TriggeredPut] = []
            reads: list[GetItem] = []
            begun = 0
            entries = self._store.lookup([each.name for each in batch])
            for fetch, entry in zip(batch, entries, strict=True):
                if not self._begin(fetch, entry, puts, reads):
                    break
                begun += 1
            for fetch in reversed(batch[begun:]):
                self._memory.shares.release(fetch.holder, fetch.size_bytes)
                self._queued.put_back(fetch)
            now_ns = self._clock.monotonic_ns()
            for looking in {fetch.looking for fetch in batch[:begun]}:
                looking.turn_ns = now_ns
            for looking in {self._under_way[item.tag].looking for item in reads}:
                looking.drive_first_ns = looking.drive_first_ns or now_ns
            if puts:
                # The drive does not hear of these, and is to keep what is wanted.
                self._store.used([self._under_way[put.tag].generation for put in puts])
                self._send(puts, now_ns)
                self._memory.shelve(
                    (*fetch.name, entry)
                    for fetch, entry in zip(batch[:begun], entries, strict=False)
                    if fetch.hot
                )
            if reads:
                self._store.get(reads, self._read)

    def _next(self) -> list[_Fetch]:
        """Take those whose turn it is, as far as the drive is to be asked ahead."""
        batch: list[_Fetch] = []
        ahead_bytes = self._reading_bytes
        while ahead_bytes < READ_AHEAD_BYTES and len(batch) < BATCH_BLOCKS_MAX:
            fetch = self._queued.take(self._may)
            if fetch is None:
                break
            self._memory.shares.hold(fetch.holder, fetch.size_bytes)
            ahead_bytes += fetch.size_bytes
            batch.append(fetch)
        return batch

    def _may(self, fetch: _Fetch) -> bool:
        return self._memory.shares.may_hold(fetch.holder, fetch.size_bytes)

    def _begin(
        self, fetch: _Fetch, entry: Entry | None, puts: list[TriggeredPut], reads: list[GetItem]
    ) -> bool:
        """Take a fetch on; False if there is no room for it."""
        item, now_ms = self._item(fetch), self._clock.wall_ms()
        put = None
        if entry is None:
            landed = self._granted.find(item, now_ms)
            if landed is not None:
                fetch.piece, came = landed.piece, landed.came
                fetch.piece.users += 1
                put = self._put(fetch, came.length, came.crc32c, came.id)
        elif mismatch(item, entry, now_ms) is None:
            fetch.piece = self._memory.pages.find(entry.generation)
            if fetch.piece is not None:
                put = self._put(fetch, entry.length, entry.crc32c, entry.generation)
        if put is not None:
            fetch.hot = True
            puts.append(put)
            fetch.looking.outcomes[fetch.at] = Outcome.MEMORY
            if fetch.request.seen is not None:
                fetch.request.seen.found()
        else:
            fetch.piece = self._memory.take(fetch.request.length, fetch.tenant)
            if fetch.piece is None:
                return False
            self._reading_bytes += fetch.size_bytes
            reads.append(item._replace(slot_address=self._memory.address(fetch.piece)))
        self._under_way[fetch.tag] = fetch
        return True

    def _item(self, fetch: _Fetch) -> GetItem:
        request = fetch.request
        return GetItem(
            tenant=fetch.connection.tenant,
            key=request.key,
            fingerprint=request.fingerprint,
            length=request.length,
            slot_address=0,
            slot_bytes=fetch.size_bytes,
            tag=fetch.tag,
        )

    def _read(self, batch: Sequence[GetDone]) -> None:
        puts, misses = [], []
        now_ns = self._clock.monotonic_ns()
        for done in batch:
            fetch = self._under_way[done.tag]
            fetch.looking.drive_last_ns = now_ns
            self._reading_bytes -= fetch.size_bytes
            if fetch.connection.closed or fetch.cancelled:
                self._end(fetch)
            elif done.miss is not None:
                fetch.looking.missed(fetch.at, fetch.request.key, done.miss.reason)
                misses.append(self._miss(fetch, done.miss.reason))
                self._end(fetch)
            else:
                fetch.looking.outcomes[fetch.at] = Outcome.DRIVE
                if fetch.request.seen is not None:
                    fetch.request.seen.read(done.length)
                puts.append(self._put(fetch, done.length, done.crc32c, done.generation))
        self._counters.missed(done.miss.reason for done in batch if done.miss is not None)
        if misses:
            put_words(self._fabric, misses)
        if puts:
            self._send(puts, now_ns)
            sent = [self._under_way[put.tag] for put in puts]
            entries = self._store.lookup([fetch.name for fetch in sent])  # it may have gone while it was read
            self._memory.keep(
                (fetch.piece, fetch.generation, fetch.name, entry)
                for fetch, entry in zip(sent, entries, strict=True)
                if fetch.piece is not None
            )
        self.pump()

    def _send(self, puts: Sequence[TriggeredPut], now_ns: int) -> None:
        if self._traced:
            for looking in {self._under_way[put.tag].looking for put in puts}:
                looking.sending_ns = looking.sending_ns or now_ns
        arm(self._fabric, puts)

    def _put(self, fetch: _Fetch, length: int, crc32c: int, generation: int) -> TriggeredPut:
        connection, request = fetch.connection, fetch.request
        assert fetch.piece is not None
        fetch.generation, fetch.sending = generation, True
        fetch.looking.size_bytes += request.sent_bytes
        return TriggeredPut(
            tag=fetch.tag,
            endpoint=connection.endpoint,
            peer=connection.peer,
            region=self._memory.region,
            source=self._memory.address(fetch.piece) + HEADER_BYTES,
            length=length,
            target=request.target,
            target_key=request.target_key,
            flag_target=connection.acks.target(request.ack_word),
            flag_key=connection.acks.key,
            flag_value=ack_word(request.ack_generation, AckCode.SERVED),
            crc32c=crc32c,
            part=(request.skip, request.part),  # of bytes that were checked, all of them
            sent=True,  # whoever asked knows whether it came
        )

    def _miss(self, fetch: _Fetch, reason: MissReason) -> WordPut:
        request = fetch.request
        return fetch.connection.word_put(request.ack_word, request.ack_generation, code_of_miss(reason))

    def _end(self, fetch: _Fetch) -> None:
        del self._under_way[fetch.tag]
        assert fetch.piece is not None
        self._memory.shares.release(fetch.holder, fetch.size_bytes)
        self._memory.pages.release(fetch.piece)
        if not fetch.told:
            self._looked(fetch.request, fetch.looking)

    def _looked(self, request: FetchRequest, looking: Looking) -> None:
        """One block more of a look-up is over."""
        if request.seen is not None:
            request.seen.over()
        looking.left -= 1
        if not looking.left:
            self._lookings.pop(looking, None)
            looking.over()

    def sent(self, event: Event) -> None:
        """The fabric is done with a put of ours."""
        fetch = self._under_way.get(event.tag)
        if fetch is None or event.kind not in (EventKind.SENT, EventKind.FAILED):
            return
        if event.kind == EventKind.FAILED:
            self._failed(fetch, event.status)
        else:
            self._sent[fetch.hot, fetch.queued_ns].append(fetch.request.sent_bytes)
            if not fetch.hot and self._store.has_doubts:
                self._store.believe([fetch.generation])
        self._end(fetch)

    def _note_sent(self) -> None:
        """Count what was sent by now, and how long it took: once for blocks that were asked for together."""
        now_ns = self._clock.monotonic_ns()
        for (hot, queued_ns), lengths in self._sent.items():
            self._counters.found(lengths, in_memory=hot)
            where = self._timings.got_from_memory if hot else self._timings.got_from_drive
            where.note(now_ns - queued_ns, len(lengths))
        self._sent.clear()

    def _failed(self, fetch: _Fetch, status: int) -> None:
        if status == -errno.ECANCELED or (fetch.cancelled and status == -errno.EBADMSG):
            fetch.looking.outcomes[fetch.at] = Outcome.GIVEN_UP
            self._say_cancelled(fetch.connection, [fetch.request])
            return
        if status != -errno.EBADMSG:
            failure = FabricError.from_code("Sending a block", status)
            log.warning("%s", failure, extra=fetch.connection.about())
            fetch.looking.outcomes[fetch.at] = Outcome.GIVEN_UP
            return
        assert fetch.piece is not None
        self._memory.pages.forget(fetch.piece)
        self._granted.forget([fetch.name])
        if fetch.hot:  # its bytes changed in our memory; the drive's may be right
            log.error("a block in the hot memory failed its CRC: this machine's memory is not to be trusted")
            if fetch.request.seen is not None:
                fetch.request.seen.again()
            fetch.looking.left += 1
            tag = next(self._tags)
            again = _Fetch(fetch.connection, fetch.request, fetch.looking, fetch.at, tag, fetch.queued_ns)
            self._queued.put_back(again)
        else:
            fetch.looking.missed(fetch.at, fetch.request.key, MissReason.CORRUPT)
            self._counters.missed([MissReason.CORRUPT])
            self._store.quarantine(*fetch.name, fetch.generation)
            put_words(self._fabric, [self._miss(fetch, MissReason.CORRUPT)])

    def forget(self, connection: Connection) -> None:
        """The connection's endpoint is closed: what it waited for, and what was being sent over it, is over."""
        self._queued.drop(connection.tenant, connection.number)
        for fetch in list(self._under_way.values()):
            if fetch.connection is connection and fetch.sending:
                if not fetch.looking.is_over:  # nobody knows whether it came
                    fetch.looking.outcomes[fetch.at] = Outcome.GIVEN_UP
                self._end(fetch)
        for looking in [one for one, whose in self._lookings.items() if whose is connection]:
            del self._lookings[looking]
            looking.over()
        self.pump()
