"""Puts from arming to their last acknowledgement.

`Client.arm` queues the puts; from then until the acknowledgement no call is made: a store to the flag word suffices.
A put takes its slot at the node when it fires (`nic_offload.sender`), so any number may be armed.

What always holds: each put ends, by its acknowledgement, by its deadline or by the link's loss; the source may be
overwritten once the put has landed or failed.
"""

from __future__ import annotations

import errno
import threading
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.arguments import checks_arguments
from kvstore.client.blocks import PutResult
from kvstore.client.checks import check_domain
from kvstore.client.link import Callbacks
from kvstore.durability import Durability
from kvstore.errors import (
    DeadlineExceeded,
    FabricError,
    InvalidArgument,
    KvError,
    ProtocolError,
    Refused,
    StorageError,
    UsageError,
)
from kvstore.limits import KEY_BYTES
from kvstore.wire.ack import error_of_code
from nic_offload.fabric import EventKind
from nic_offload.flags import FlagWord
from nic_offload.made_by import made_by
from nic_offload.sender import name_put, put, put_row

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.link import Host, Link
    from kvstore.client.spans import PutSpan
    from kvstore.client.transfer_watch import Watch
    from nic_offload.counter import Counter
    from nic_offload.fabric import Event
    from nic_offload.group import Group, Row

    Rows = Iterator[tuple[int, int, int, int, int]]  # as `Group.unnamed_rows` has them

__all__ = ["ArmedPuts", "FailedPut", "Said"]

_CODE_BITS = 8
_CODE_MASK = (1 << _CODE_BITS) - 1
_REACHED = (None, *Durability)  # by code
# Their own constructors take three times as long.
_put_result = partial(tuple.__new__, PutResult)
_callbacks = partial(tuple.__new__, Callbacks)
_key = attrgetter("key")


class FailedPut(NamedTuple):
    """A put that has ended with an error."""

    error: KvError
    has_fired: bool
    was_withdrawn: bool  # it was never sent, and never will be


class Said(NamedTuple):
    """What the node is told with each block of a batch."""

    fingerprint: bytes
    expires_unix_ms: int
    metadata: tuple[bytes, bytes]  # with the first block, and with each of the others


@made_by("`Client.arm`")
@checks_arguments
class ArmedPuts:
    """A batch of armed puts, as `Client.arm` returns it. Wait for it, check its progress, or ignore it.

    `wait` gives the result of each put, `progress` says how many have fired, landed and ended, `cancel` withdraws those
    that have not been sent. The memory may be overwritten once a put has landed (`wait_landed`).

    >>> from kvstore import FlagWords
    >>> flags = FlagWords.create(1)
    >>> puts = client.arm([block], flags[0])
    >>> flags[0].store(1)
    >>> [result.durability.name for result in puts.wait(timeout_s=10)]
    ['WRITTEN']
    """

    # Each block is a row of a group; the C core writes into it when the block fired and what the node acknowledged.
    # Events report only failures and, once, if nobody waits, the end of the batch. Tag 2i of the batch is the put of
    # block i, tag 2i + 1 its acknowledgement.

    def __init__(
        self,
        client: Host,
        link: Link,
        blocks: Sequence[Block],
        durability: Durability,
        flag: FlagWord | Counter | None,
        deadline_ns: int,
        watch: Watch | None = None,
        span: PutSpan | None = None,
        said: Said | None = None,
    ) -> None:
        """Arm them; without a `flag` they fire at once."""
        self._client = client
        self._observer = watch
        self._span = span
        self._link = link
        self._blocks = blocks
        self._durability = durability
        self._keys: dict[int, bytes] = {}  # of those that are named later
        if not all(map(_key, blocks)):
            self._keys = {i: b"" for i, one in enumerate(blocks) if not one.key}
        self._failures: dict[int, KvError] = {}  # failed by code; they end once the node gave the reason
        self._errors: dict[int, KvError] = {}  # of puts that have ended with one
        self._withdrawn: set[int] = set()  # those of them that were cancelled before they were sent
        self._results: list[PutResult] | None = None
        self._counter: Counter | None = None
        self._group: Group
        with client.lock:
            if link.error is not None:
                raise link.error
            self._tag = client.next_tags()
            self._start(flag, deadline_ns, said)
        if watch is not None:
            watch.armed(blocks, self)

    def _start(self, flag: FlagWord | Counter | None, deadline_ns: int, said: Said | None) -> None:
        """Make the group, and arm the puts."""
        link = self._link
        assert link.sender is not None, "a link without one has its puts reserved"
        assert said is not None
        self._group = put(
            self._client.fabric,
            link.sender,
            self._tag,
            [
                put_row(
                    block.region if block.pieces is None else link.gather_region(),
                    block.region.address + block.offset,
                    block.length,
                    block.threshold,
                    block.key,
                    block.domain,
                    block.pieces,
                )
                for block in self._blocks
            ],
            flag,
            said.fingerprint,
            self._durability,
            expires_unix_ms=said.expires_unix_ms,
            deadline_ns=deadline_ns,
            metadata=said.metadata,
        )
        self._armed()

    def _armed(self) -> None:
        self._link.operations[self._tag] = _callbacks((self._event, self._lost))
        if self._span is not None:
            self._span.armed()

    def _counter_of(self, flag: FlagWord | Counter | None) -> Counter | None:
        if isinstance(flag, FlagWord):
            self._counter = self._client.fabric.open_counter(flag)
            return self._counter
        return flag

    # --- failures, reported by the client's pump with the lock held

    def _event(self, event: Event) -> None:
        """The batch has ended, or one of our puts or acknowledgements has failed."""
        if event.kind == EventKind.OVER:
            self._end_if_over()
            return
        i = (event.tag - self._tag) // 2
        if self._group.row(i).over:
            return
        match event.kind:
            case EventKind.ACKED:
                error = error_of_code(event.value & _CODE_MASK, self._key(i))
                self._refused(i, event, error or ProtocolError("The node sent an invalid result of a put."))
            case EventKind.FAILED:
                self._put_failed(i, event.status)
            case EventKind.LATE:
                self._late(i)
            case EventKind.WATCH_FAILED:
                late = DeadlineExceeded("A block was sent and not acknowledged in time.")
                self._end(i, late)
                self._client.lose(self._link, late)

    def _refused(self, i: int, event: Event, error: KvError) -> None:
        self._failures[i] = error
        # Whatever the node did with the block, the source is free.
        self._group.land(i, event.time_ns)
        self._link.failures.ask(event.value >> _CODE_BITS, lambda found: self._failed(i, found or error))

    def _failed(self, i: int, error: KvError) -> None:
        if not self._group.row(i).over:
            self._end(i, error)

    def _key(self, i: int) -> bytes:
        return self._keys.get(i) or self._blocks[i].key

    def _put_failed(self, i: int, status: int) -> None:
        if status == -errno.EDESTADDRREQ:  # it may have been named meanwhile
            error: KvError = UsageError("The put fired before its block was named, and was not sent.")
            self._end(i, error)
            return
        if status == -errno.ETIMEDOUT:
            error = DeadlineExceeded(
                "The flag did not reach the put's threshold in time, and it was not sent."
            )
        elif status == -errno.ECANCELED:
            error = FabricError("The put was cancelled before it was sent.")
            self._withdrawn.add(i)
        else:
            error = FabricError.from_code("A put", status)
        self._end(i, error)
        if status not in (-errno.ETIMEDOUT, -errno.ECANCELED):  # it may have been sent
            self._client.lose(self._link, error)

    def _late(self, i: int) -> None:
        """The NIC holds it past its deadline. If it was sent, the acknowledgement's deadline decides."""
        if self._client.fabric.cancel([self._tag + 2 * i]):
            self._put_failed(i, -errno.ETIMEDOUT)

    def _lost(self, error: KvError) -> None:
        """The link is lost: puts without an acknowledgement have failed."""
        for i, row in enumerate(self._group.rows()):
            if not row.over:
                self._end(i, self._failures.get(i, error))

    def _end(self, i: int, error: KvError) -> None:
        self._errors[i] = error
        self._group.end(i)
        self._end_if_over()

    def _end_if_over(self, rows: Rows | None = None) -> None:
        """End the batch if every row has ended, as these `rows` have."""
        if self._results is not None or (rows is None and self._group.open_rows):
            return
        self._results = self._now(rows=rows)
        self._link.operations.pop(self._tag, None)
        self._release()
        if self._span is not None:
            self._span.ended(self._blocks, self._results)
        if self._observer is not None:
            for block, result in zip(self._blocks, self._results, strict=True):
                self._observer.put_ended(block, result)

    def _release(self) -> None:
        """All puts have ended."""
        if self._counter is not None:
            self._counter.close()

    _has_stored = False  # whether any is known to be stored already

    def _is_stored(self, i: int) -> bool:  # noqa: ARG002 - of none it is known here
        """Whether the node already has it, so that nothing is sent."""
        return False

    def _now(self, late: KvError | None = None, rows: Rows | None = None) -> list[PutResult]:
        if late is None and not self._errors and not self._keys and not self._has_stored:
            rows = rows or self._group.unnamed_rows()
            return [
                _put_result((block.key, _REACHED[code], None, False, fired_ns, landed_ns, over_ns))
                for block, (fired_ns, landed_ns, over_ns, code, _) in zip(self._blocks, rows, strict=True)
            ]
        return [self._result(i, row, late) for i, row in enumerate(self._group.rows())]

    def _result(self, i: int, row: Row, late: KvError | None) -> PutResult:
        key = self._key(i)
        if self._is_stored(i):
            return PutResult(key, self._durability, None, already_stored=True)
        error = self._errors.get(i) if row.over else late
        return PutResult(
            key=key,
            durability=None
            if isinstance(error, (Refused, StorageError))
            else _REACHED[row.code],  # then nothing is kept
            error=error,
            fired_ns=row.fired_ns,
            landed_ns=row.landed_ns,
            durable_ns=row.over_ns if error is None else 0,
        )

    # --- for the application

    def name(self, number: int, key: bytes) -> None:
        """Set the key of a block that was armed without one. A put that fires before that fails.

        >>> puts = client.arm([Block(b"", kv, offset=0, length=4096, threshold=2)], flags[0])
        >>> puts.name(0, block_key(b"known later"))
        >>> flags[0].store(2)
        """
        if self._keys.get(number) != b"" or len(key) != KEY_BYTES:
            raise InvalidArgument(
                f"Only a put without a key can be named, once, with a key of {KEY_BYTES} bytes."
            )
        check_domain(key, self._blocks[number].domain)
        with self._client.lock:
            self._keys[number] = key
            self._named(number, key)

    def _named(self, number: int, key: bytes) -> None:
        name_put(self._group, number, key, self._durability)

    def progress(self) -> tuple[int, int, int]:
        """How many blocks have fired, have landed, and have ended.

        >>> puts.progress()
        (1, 1, 1)
        """
        rows = list(self._group.rows())
        return (
            sum(row.fired_ns > 0 for row in rows),
            sum(row.landed_ns > 0 for row in rows),
            sum(row.over for row in rows),
        )

    def ended(self) -> list[PutResult] | None:
        """The results in the order of the blocks, or None while one is still under way.

        >>> [result.durability.name for result in puts.ended()]
        ['WRITTEN']
        """
        with self._client.lock:
            self._end_if_over()
            return self._results

    def cancel(self) -> int:
        """Withdraw the puts that have not been sent; returns how many.

        >>> client.arm([Block(key, kv, offset=0, length=4096, threshold=99)], flags[0]).cancel()
        1
        """
        with self._client.lock:
            waiting = [self._tag + 2 * i for i, row in enumerate(self._group.rows()) if not row.over]
            return self._client.fabric.cancel(waiting) if waiting else 0

    def _withdraw(self, numbers: Iterable[int]) -> None:
        """Withdraw these puts unless they have been sent; afterwards `_failed_puts` has those that were withdrawn."""
        settled = threading.Event()
        with self._client.lock:
            rows = list(self._group.rows())
            waiting = [self._tag + 2 * i for i in sorted(numbers) if not rows[i].over]
            if not waiting or not self._client.fabric.cancel(waiting):
                return
            self._client.settle(settled.set)
        settled.wait(self._client.reach.call_timeout_s)

    def _failed_puts(self, known: Collection[int] = ()) -> dict[int, FailedPut]:
        """The puts that have ended with an error, by number, but the known ones. Once `has_ended` is true, it's all."""
        if len(self._errors) <= len(known):
            return {}
        with self._client.lock:
            return {
                i: FailedPut(error, self._group.row(i).fired_ns > 0, i in self._withdrawn)
                for i, error in self._errors.items()
                if i not in known
            }

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return not self._group.open_rows

    def wait_landed(self, timeout_s: float) -> bool:
        """Wait until every put has landed or failed, after which the sources may be overwritten; False on timeout.

        >>> puts.wait_landed(timeout_s=10)
        True
        """
        have_landed = self._group.wait_landed(timeout_s)
        if have_landed:  # if they have ended too, no event follows
            self.ended()
        return have_landed

    def abandon(self) -> None:
        """End all puts that have not landed. When this returns, nothing reads the sources any more.

        Unsent puts are never sent. If one has been sent and the node has not reported it landed, the link is closed.

        >>> unsent = client.arm([Block(key, kv, offset=0, length=4096, threshold=99)], flags[0])
        >>> unsent.abandon()
        >>> [type(result.error).__name__ for result in unsent.wait(timeout_s=10)]
        ['FabricError']
        """
        self._abandon(range(len(self._blocks)))

    def _abandon(self, numbers: Collection[int]) -> None:
        """As `abandon`, of some of the puts."""
        settled = threading.Event()

        def reading() -> list[int]:
            rows = list(self._group.rows())
            return [self._tag + 2 * i for i in numbers if not rows[i].over and not rows[i].landed_ns]

        def lose_unless_landed() -> None:
            if reading():
                self._client.lose(self._link, DeadlineExceeded("A block was sent and did not land in time."))
            self._end_if_over()
            settled.set()

        with self._client.lock:
            if not (unlanded := reading()):
                return
            are_unsent = self._client.fabric.cancel(unlanded) == len(unlanded)
            # Some may have failed or landed without the event having been handled yet: no reason to lose the link.
            self._client.settle(settled.set if are_unsent else lose_unless_landed)
        if not settled.wait(self._client.reach.call_timeout_s) and not are_unsent:
            with self._client.lock:
                lose_unless_landed()

    def wait(self, timeout_s: float) -> list[PutResult]:
        """Wait until every put has ended. Returns the results in the order of the blocks.

        Blocks still pending at the timeout are reported as DeadlineExceeded, and continue.

        >>> [result.durability.name for result in puts.wait(timeout_s=10)]
        ['WRITTEN']
        """
        lock = self._client.lock
        rows = self._group.wait_all(timeout_s)
        with lock:
            self._end_if_over(rows)
            if self._results is not None:
                return list(self._results)
            return self._now(DeadlineExceeded("The put has not ended yet; it continues."))
