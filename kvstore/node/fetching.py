"""Fetches: from the drive or the hot memory into a client's region, followed by the acknowledgement.

A fetch is queued (bounded; tenants and connections take turns), then found in the hot memory or waits for its tenant's
turn at the drive (`kvstore.storage.sends`), is sent, and ends; the piece stays in the hot memory until something
else needs the room. The C core does the sending: it reads blocks that are not in memory and checks the header
(`kvstore.node.readers`), checks the payload's CRC and, only if it matches, writes the bytes followed by the
acknowledgement word. Python decides beforehand, for many at a time (index entries, turns, memory), and is notified
afterwards.

If a reader could not read a record, or found another one there, the store reads it again, because it can handle that.
The store also handles blocks that are not in the index, and drives without a reader: simulated ones, which have no
descriptor, and those for which no ring could be had.

What always holds: no byte of a record that failed a check is sent. Each fetch has one word, written once: after its
last byte, or to report a miss or a cancellation. Memory is not reused while the drive or
the fabric uses it. A hot piece is sent only for the record that the index has at that moment. A client that doesn't
receive holds only its share of the memory, and the reads queued before a newcomer's are bounded.
"""

from __future__ import annotations

import asyncio
import errno
import logging
from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from kvstore.errors import FabricError, Overloaded
from kvstore.limits import (
    FETCHES_A_ROUND,
    FETCHES_QUEUED_MAX,
    HEADER_BYTES,
    READ_AHEAD_BYTES,
)
from kvstore.lookups import Outcome
from kvstore.miss import MissReason
from kvstore.node.cancelling import Noted
from kvstore.node.fair_queue import FairQueue, Places
from kvstore.node.fetch import Fetch
from kvstore.node.readers import Readers
from kvstore.node.time_slices import Again
from kvstore.storage.block_reads import mismatch
from kvstore.storage.items import GetItem
from kvstore.wire.ack import AckCode, ack_word, code_of_miss
from nic_offload.fabric import EventKind
from nic_offload.trigger import TriggeredPut, arm, put_words

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from kvstore.clock import Clock
    from kvstore.node.connection import Connection
    from kvstore.node.fetch import FetchRequest
    from kvstore.node.granted_puts import Granted
    from kvstore.node.hot import HotMemory
    from kvstore.node.lookup_progress import Looking
    from kvstore.node.statistics import Counters
    from kvstore.node.time_slices import Turns
    from kvstore.node.timings import Timings
    from kvstore.storage.drive import Drive
    from kvstore.storage.index import Entry
    from kvstore.storage.items import GetDone
    from kvstore.storage.store import Store
    from nic_offload.fabric import Event, Fabric

__all__ = ["Fetches"]

log = logging.getLogger(__name__)


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
        tenants: Callable[[], int],
        turns: Turns,
        *,
        traced: bool,
    ) -> None:
        self._timings = timings
        self._traced = traced  # record when sending starts
        # Lengths by source and time of request, not counted yet.
        self._sent: defaultdict[tuple[bool, int], list[int]] = defaultdict(list)
        self._counters = counters
        self._fabric = fabric
        self._store = store
        self._memory = memory
        self._granted = granted
        self._tags = tags
        self._clock = clock
        self._queued: FairQueue[Fetch] = FairQueue(Places(FETCHES_QUEUED_MAX, tenants))
        self._goes_on = False  # `pump` runs again in the loop's next round
        self._turns = turns
        self._rested = Again(self.pump)
        self._under_way: dict[int, Fetch] = {}
        self._lookings: dict[Looking, Connection] = {}  # with a block that is waiting or in progress
        self._reading_bytes = 0
        self._arrived: list[Fetch] = []  # read by a reader, checked and sent
        self._unread: list[Fetch] = []  # by a reader: the store reads these
        self.readers = Readers(
            fabric,
            store.drives,
            memory,
            tags,
            dropped=self._dropped,
            unread=self._not_taken,
            was_read=self._was_read,
            was_sent=self._was_sent,
        )

    def refuse_more(self, connection: Connection, count: int) -> None:
        """Overloaded, if the connection's tenant may not have this many more queued."""
        if count > self._queued.left(connection.tenant):
            raise Overloaded("The tenant's share of the node's queued fetches is used up; try again later.")

    def enqueue(
        self,
        connection: Connection,
        requests: Sequence[FetchRequest],
        looking: Looking,
        first: int,
        *,
        called: bool,
    ) -> None:
        """Queue fetches of a look-up, its blocks from `first` on, and start those that can start.

        `called`: they arrived over gRPC.
        """
        self._lookings[looking] = connection
        now_ns = self._clock.monotonic_ns()
        wanted: list[Fetch] = []
        untold: list[FetchRequest] = []
        for at, request in enumerate(requests, first):
            noted = connection.cancelled.take(request.ack_generation, called=called)
            if noted is Noted.NOT:
                wanted.append(Fetch(connection, request, looking, at, next(self._tags), now_ns))
                continue
            if noted is Noted.UNTOLD:
                untold.append(request)
            self._looked(request, looking)
        self._queued.add(wanted)
        self._say_cancelled(connection, untold)
        self.pump()

    def give_up(self, looking: Looking, blocks: int) -> None:
        """Give up a look-up's last blocks: its call has ended before they were queued."""
        looking.left -= blocks
        if not looking.left:
            self._lookings.pop(looking, None)
            looking.over()

    def cancel(self, connection: Connection, words: Mapping[int, int], *, called: bool) -> None:
        """Cancel fetches, given by generation and word. Each word confirms it, or follows bytes already on the wire.

        `called`: they were requested over gRPC, so an unknown one is not in progress anywhere.
        """
        gone = self._queued.withdraw(
            connection.tenant, connection.number, lambda fetch: fetch.request.ack_generation in words
        )
        cancelled = [fetch.request for fetch in gone]
        for fetch in gone:
            self._looked(fetch.request, fetch.looking)
        known = {request.ack_generation for request in cancelled}
        sending: list[int] = []
        for fetch in self._under_way.values():
            if fetch.connection is not connection or fetch.request.ack_generation not in words:
                continue
            known.add(fetch.request.ack_generation)
            if not fetch.cancelled:
                fetch.cancelled = True
                if fetch.sending:
                    sending.append(fetch.tag)
                else:  # the drive still uses its memory
                    fetch.is_reported = True
                    cancelled.append(fetch.request)
                    self._looked(fetch.request, fetch.looking)
        unknown = words.keys() - known
        self._say_cancelled(connection, cancelled)
        if called:
            self._say(connection, [(words[one], one) for one in connection.cancelled.by_rpc(unknown)])
        else:
            connection.cancelled.over_fabric(unknown)
        if sending:
            self._fabric.cancel(sending)  # exact: puts that it withdraws end as cancelled, others were sent
        self.pump()

    def _say_cancelled(self, connection: Connection, requests: Iterable[FetchRequest]) -> None:
        self._say(connection, [(request.ack_word, request.ack_generation) for request in requests])

    def _say(self, connection: Connection, words: Iterable[tuple[int, int]]) -> None:
        puts = [connection.word_put(word, generation, AckCode.CANCELLED) for word, generation in words]
        if puts:
            put_words(self._fabric, puts)

    @property
    def waiting(self) -> int:
        """How many fetches are queued."""
        return len(self._queued)

    @property
    def are_waiting(self) -> bool:
        """Whether any fetch is queued or waits for the drive."""
        return len(self._queued) > 0 or self._reading_bytes > 0

    def pump(self) -> None:
        """Send hot blocks, and start reads as far as memory allows; the rest continues in the next round."""
        self.settle()
        rested_s = self._turns.rests_s()
        left = 0 if self._goes_on else FETCHES_A_ROUND
        while left and not self._memory.pages.refused and (batch := self._next(left)):
            self._begin_in_turn(batch)
            left -= len(batch)
        if not left and self._queued and not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)
        elif self._queued and (
            rests_s := self._turns.rests_s() or rested_s
        ):  # a pause may have ended meanwhile
            self._rested.within(rests_s)

    def _go_on(self) -> None:
        self._goes_on = False
        self.pump()

    def _begin_in_turn(self, batch: Sequence[Fetch]) -> None:
        """Begin fetches in turn, charging each tenant for the time taken."""
        began_ns = self._clock.monotonic_ns()
        self._begin_all(batch)
        each_ns = (self._clock.monotonic_ns() - began_ns) // len(batch)
        for tenant, count in Counter(fetch.tenant for fetch in batch).items():
            self._turns.worked(tenant, count * each_ns)

    def settle(self) -> None:
        """Process completed fetches."""
        if self._arrived:
            self._keep_arrived()
        if self._sent:
            self._note_sent()
        if self._unread:
            unread, self._unread = self._unread, []
            self._store.get([self._reading(fetch) for fetch in unread], self._read)

    def _begin_all(self, batch: Sequence[Fetch]) -> None:
        puts: list[TriggeredPut] = []
        reads: list[GetItem] = []
        cold: list[tuple[Fetch, Entry, Drive]] = []
        others: list[tuple[Fetch, MissReason]] = []
        begun = 0
        entries, now_ms = self._store.lookup([each.name for each in batch]), self._clock.wall_ms()
        for fetch, entry in zip(batch, entries, strict=True):
            if not self._begin(fetch, entry, now_ms, puts, reads, cold, others):
                break
            begun += 1
        for fetch in reversed(batch[begun:]):
            self._memory.shares.release(fetch.holder, fetch.size_bytes)
            self._queued.put_back(fetch)
        now_ns = self._clock.monotonic_ns()
        for fetch, entry in zip(batch[:begun], entries, strict=False):
            fetch.looking.turn_ns = now_ns
            if entry is not None and not fetch.hot:
                fetch.looking.drive_first_ns = fetch.looking.drive_first_ns or now_ns
        if puts:
            # The drive doesn't see these uses, and must not evict recently used blocks.
            self._store.used([self._under_way[put.tag].generation for put in puts])
            self._send(puts, now_ns)
            self._memory.shelve(
                (*fetch.name, entry)
                for fetch, entry in zip(batch[:begun], entries, strict=False)
                if fetch.hot
            )
        self._answer_misses(others)
        for fetch, _ in others:
            self._memory.shares.release(fetch.holder, fetch.size_bytes)
            self._looked(fetch.request, fetch.looking)
        if cold:
            self.readers.hand_over(cold)
        if reads:
            self._store.get(reads, self._read)

    def _answer_misses(self, misses: Sequence[tuple[Fetch, MissReason]]) -> None:
        """Report and count blocks that are not served; the caller ends their fetches."""
        if not misses:
            return
        words = [
            fetch.connection.word_put(
                fetch.request.ack_word, fetch.request.ack_generation, code_of_miss(reason)
            )
            for fetch, reason in misses
        ]
        put_words(self._fabric, words)
        self._counters.missed(reason for _, reason in misses)
        for fetch, reason in misses:
            fetch.looking.missed(fetch.at, fetch.request.key, reason)

    def _next(self, most: int) -> list[Fetch]:
        """Take the next fetches in turn, as many as the drive should have queued."""
        batch: list[Fetch] = []
        ahead_bytes = self._reading_bytes
        while ahead_bytes < READ_AHEAD_BYTES and len(batch) < most:
            fetch = self._queued.take(self._may)
            if fetch is None:
                break
            self._memory.shares.hold(fetch.holder, fetch.size_bytes)
            ahead_bytes += fetch.size_bytes
            batch.append(fetch)
        return batch

    def _may(self, fetch: Fetch) -> bool:
        return not self._turns.rests(fetch.tenant) and self._memory.shares.may_hold(
            fetch.holder, fetch.size_bytes
        )

    def _begin(
        self,
        fetch: Fetch,
        entry: Entry | None,
        now_ms: int,
        puts: list[TriggeredPut],
        reads: list[GetItem],
        cold: list[tuple[Fetch, Entry, Drive]],
        others: list[tuple[Fetch, MissReason]],
    ) -> bool:
        """Begin a fetch; False if there is no memory for it."""
        put = None
        drive = None
        if entry is None:
            landed = self._granted.just_landed.find(fetch.name)
            if landed is not None:
                came = landed.came
                why = self._mismatch(fetch, came.fingerprint, came.length, came.expires_unix_ms, now_ms)
                if why is not None:
                    others.append((fetch, why))
                    return True
                fetch.piece = landed.piece
                self._memory.pages.use(fetch.piece)
                put = self._put(fetch, came.length, came.crc32c, came.id)
        elif not self._mismatch(fetch, entry.fingerprint, entry.length, entry.expires_ms, now_ms):
            drive = self._store.drive_of(entry.generation)
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
            if entry is not None and drive is not None and drive in self.readers:
                cold.append((fetch, entry, drive))
            else:
                reads.append(self._reading(fetch))
        self._under_way[fetch.tag] = fetch
        return True

    def _mismatch(
        self, fetch: Fetch, fingerprint: bytes, length: int, expires_ms: int, now_ms: int
    ) -> MissReason | None:
        request = fetch.request
        if not expires_ms and length == request.length and fingerprint == request.fingerprint:
            return None  # the usual case
        why = mismatch(self._item(fetch), fingerprint, length, expires_ms, now_ms)
        return why[0] if why else None

    def _item(self, fetch: Fetch) -> GetItem:
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

    def _reading(self, fetch: Fetch) -> GetItem:
        assert fetch.piece is not None
        return self._item(fetch)._replace(slot_address=self._memory.address(fetch.piece))

    # --- what readers read

    def _dropped(self, fetch: Fetch) -> None:
        self._reading_bytes -= fetch.size_bytes
        self._end(fetch)

    def _not_taken(self, fetch: Fetch) -> None:
        self._unread.append(fetch)

    def _was_read(self, group: Sequence[Fetch], late: Sequence[Fetch]) -> None:
        self._reading_bytes -= sum(fetch.size_bytes for fetch in group)
        for fetch in late:
            self._end(fetch)

    def _was_sent(self, group: Sequence[Fetch], posted_ns: int) -> None:
        lengths: defaultdict[int, list[int]] = defaultdict(list)
        for fetch in group:
            if fetch.tag in self._under_way:
                self._served(fetch, posted_ns)
                lengths[fetch.queued_ns].append(fetch.request.sent_bytes)
        for queued_ns, sent in lengths.items():
            self._sent[False, queued_ns] += sent

    def _keep_arrived(self) -> None:
        """Keep blocks that readers have read in the hot memory, if the index still names them."""
        arrived, self._arrived = self._arrived, []
        self._memory.came((fetch.piece, fetch.name, fetch.entry) for fetch in arrived)
        if self._store.has_doubts:
            self._store.believe([fetch.generation for fetch in arrived])
        for fetch in arrived:
            self._end(fetch)

    # --- what the store reads

    def _read(self, batch: Sequence[GetDone]) -> None:
        puts: list[TriggeredPut] = []
        misses: list[tuple[Fetch, MissReason]] = []
        now_ns = self._clock.monotonic_ns()
        for done in batch:
            fetch = self._under_way[done.tag]
            fetch.looking.drive_last_ns = now_ns if done.was_read else fetch.looking.drive_last_ns
            self._reading_bytes -= fetch.size_bytes
            if fetch.connection.closed or fetch.cancelled:
                self._end(fetch)
            elif done.miss is not None:
                misses.append((fetch, done.miss.reason))
            else:
                fetch.looking.outcomes[fetch.at] = Outcome.DRIVE
                if fetch.request.seen is not None:
                    fetch.request.seen.read(done.length)
                puts.append(self._put(fetch, done.length, done.crc32c, done.generation))
        self._answer_misses(misses)
        for fetch, _ in misses:
            self._end(fetch)
        if puts:
            self._send(puts, now_ns)
            sent = [self._under_way[put.tag] for put in puts]
            entries = self._store.lookup([fetch.name for fetch in sent])  # one may have been removed by now
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

    def _put(self, fetch: Fetch, length: int, crc32c: int, generation: int) -> TriggeredPut:
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
            part=(request.skip, request.part),  # all of the block's bytes were checked
            sent=True,  # the caller knows whether it arrived
            shared=request.shares,
        )

    def _end(self, fetch: Fetch) -> None:
        del self._under_way[fetch.tag]
        assert fetch.piece is not None
        self._memory.shares.release(fetch.holder, fetch.size_bytes)
        self._memory.pages.release(fetch.piece)
        if fetch.entry is not None:
            self._memory.expect_no_more(fetch.name)
        if not fetch.is_reported:
            self._looked(fetch.request, fetch.looking)

    def _looked(self, request: FetchRequest, looking: Looking) -> None:
        """Count one more completed block of a look-up."""
        if request.seen is not None:
            request.seen.over()
        self.give_up(looking, 1)

    def sent(self, event: Event) -> None:
        """Handle the completion of one of our puts, or of a reader's group."""
        if self.readers.sent(event):
            return
        fetch = self._under_way.get(event.tag)
        if fetch is None or fetch.late or event.kind not in (EventKind.SENT, EventKind.FAILED):
            return
        if event.kind == EventKind.SENT:
            self._sent[fetch.hot, fetch.queued_ns].append(fetch.request.sent_bytes)
            if not fetch.hot and self._store.has_doubts:
                self._store.believe([fetch.generation])
        elif fetch.group is not None and event.status == -errno.ENODATA and not fetch.cancelled:
            self._unread_one(fetch)
            return
        else:
            self._failed(fetch, event.status)
        self._end_later(fetch)

    def _served(self, fetch: Fetch, posted_ns: int) -> None:
        """Handle a block that a reader has read and sent."""
        looking = fetch.looking
        looking.outcomes[fetch.at] = Outcome.DRIVE
        looking.drive_last_ns = posted_ns
        if self._traced:
            looking.sending_ns = looking.sending_ns or posted_ns
        if fetch.request.seen is not None:
            fetch.request.seen.read(fetch.request.length)
        self._arrived.append(fetch)

    def _unread_one(self, fetch: Fetch) -> None:
        """Handle a block that a reader could not read, or found changed: nothing was sent, and we own its memory."""
        fetch.sending, fetch.group = False, None
        self._reading_bytes += fetch.size_bytes  # in addition to its group's count
        fetch.looking.size_bytes -= fetch.request.sent_bytes
        self._unread.append(fetch)

    def _end_later(self, fetch: Fetch) -> None:
        """End a fetch, but keep its memory while the drive may still write to it."""
        if fetch.group is None or fetch.group.late is None:
            self._end(fetch)
            return
        fetch.late = True
        fetch.group.late.append(fetch)
        if not fetch.is_reported:
            fetch.is_reported = True
            self._looked(fetch.request, fetch.looking)

    def _note_sent(self) -> None:
        """Count the blocks sent so far and their durations, once for each batch requested together."""
        now_ns = self._clock.monotonic_ns()
        for (hot, queued_ns), lengths in self._sent.items():
            self._counters.found(lengths, in_memory=hot)
            where = self._timings.got_from_memory if hot else self._timings.got_from_drive
            where.note(now_ns - queued_ns, len(lengths))
        self._sent.clear()

    def _failed(self, fetch: Fetch, status: int) -> None:
        if status == -errno.ECANCELED or (fetch.cancelled and status in (-errno.EBADMSG, -errno.ENODATA)):
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
            log.error("a block in the hot memory failed its CRC: this machine's memory may be faulty")
            if fetch.request.seen is not None:
                fetch.request.seen.again()
            fetch.looking.left += 1
            tag = next(self._tags)
            again = Fetch(fetch.connection, fetch.request, fetch.looking, fetch.at, tag, fetch.queued_ns)
            self._queued.put_back(again)
        else:
            self._store.quarantine(*fetch.name, fetch.generation)
            self._answer_misses([(fetch, MissReason.CORRUPT)])

    def forget(self, connection: Connection) -> None:
        """End all fetches of a connection whose endpoint is closed."""
        self._queued.drop(connection.tenant, connection.number)
        if self._arrived:
            self._keep_arrived()
        for fetch in list(self._under_way.values()):
            if fetch.connection is connection and fetch.sending and not fetch.late:
                if not fetch.looking.is_over:  # it is unknown whether it arrived
                    fetch.looking.outcomes[fetch.at] = Outcome.GIVEN_UP
                self._end_later(fetch)
        for looking in [one for one, whose in self._lookings.items() if whose is connection]:
            del self._lookings[looking]
            looking.over()
        self.pump()
