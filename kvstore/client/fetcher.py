"""The requester's fetcher over our clients: into registered memory if there is a place, else into the node's memory.

What always holds: each ticket is reported once, in `reports`, whatever happens to its node; a get into memory ends by
its deadline, and afterwards nothing writes to that memory; `issue` and `cancel` wait for no node.
What it doesn't do: call the requester. Its owner processes the reports.
"""

from __future__ import annotations

import itertools
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.transfer_watch import watched_by, within
from kvstore.errors import KvError
from kvstore.limits import GET_THREADS, PREFETCH_THREADS, RESUME_BATCH_BLOCKS
from kvstore.miss import Miss, MissReason
from nic_offload.handle import Handle

if TYPE_CHECKING:
    from collections.abc import Collection, Hashable, Mapping, Sequence
    from concurrent.futures import Future

    from kvstore.client.blocks import Block, Hit
    from kvstore.client.one_node import Homes
    from kvstore.client.spans import ResumeSpan
    from kvstore.client.step_calls import ReadAhead
    from kvstore.client.trace import Notes
    from kvstore.clock import Clock
    from nic_offload.requester_catalogue import Extent, User

__all__ = ["GONE", "Fetcher", "Placing", "Report"]

GONE = {
    MissReason.UNKNOWN,
    MissReason.CORRUPT,
    MissReason.EXPIRED,
    MissReason.EVICTED,
    MissReason.QUOTA,
    MissReason.LENGTH,
    MissReason.ERASED,
}


@dataclass(slots=True)
class Placing:
    """Where a user's blocks go while their request is being served; other blocks are prefetched."""

    blocks: Mapping[bytes, Sequence[Block]]  # by key; a session may contain a block more than once
    notes: Notes
    until_ns: int
    outcomes: dict[bytes, Hit | Miss] = field(default_factory=dict)
    span: ResumeSpan | None = None  # the part requested by gets
    left: int = field(init=False)  # blocks without an outcome yet
    under_way: int = field(init=False, default=0)  # gets that may still write to the memory

    def __post_init__(self) -> None:
        """Count the requested extents."""
        self.left = sum(map(len, self.blocks.values()))


class Report(NamedTuple):
    """A ticket ended: the node no longer has `missing`; `failed` merely did not arrive."""

    ticket: Hashable
    missing: Collection[bytes]
    failed: Collection[bytes]


@dataclass(slots=True)
class _Open:
    """A pending ticket, in parts."""

    parts: int
    missing: set[bytes] = field(default_factory=set)
    failed: set[bytes] = field(default_factory=set)
    ahead: Future[None] | None = None


class Fetcher(Handle):
    """The one seam of the requester, over all nodes."""

    def __init__(self, nodes: Homes, clock: Clock) -> None:
        self.reports: deque[Report] = deque()  # as many as there are tickets, at most
        self.placings: dict[User, Placing] = {}
        self.notes: dict[User, Notes] = {}  # of the session whose request is the reason
        self._nodes = nodes
        self._clock = clock
        self._threads = ThreadPoolExecutor(PREFETCH_THREADS, "kvstore-prefetch")
        self._getters = ThreadPoolExecutor(GET_THREADS, "kvstore-get")
        self._numbers = itertools.count(1)
        self._changed = Condition()
        self._changes = 0
        self._open: dict[Hashable, _Open] = {}

    def issue(self, user: User, extents: Sequence[Extent]) -> Hashable:
        """Begin to get these, all on one node."""
        placing = self.placings.get(user)
        wanted = {} if placing is None else placing.blocks
        into = [block for extent in extents for block in wanted.get(extent.key, ())]
        ahead = [extent.key for extent in extents if extent.key not in wanted]
        batches = [into[at : at + RESUME_BATCH_BLOCKS] for at in range(0, len(into), RESUME_BATCH_BLOCKS)]
        ticket = next(self._numbers)
        node = extents[0].node
        # Attach while the user is still typing, too: it can take longer than fetching their KV.
        attaches = not into and not self._is_attached(node)
        opened = self._open[ticket] = _Open(len(batches) + bool(ahead) + attaches)
        if ahead:
            opened.ahead = self._threads.submit(self._read_ahead, ticket, node, ahead, self.notes.get(user))
            opened.ahead.add_done_callback(
                lambda future: self._over(ticket, (), ahead) if future.cancelled() else None
            )
        if attaches:
            self._threads.submit(self._attach, ticket, node)
        for batch in batches:
            assert placing is not None
            with self._changed:
                placing.under_way += 1
            self._getters.submit(self._bring, ticket, node, batch, placing)
        return ticket

    def cancel(self, ticket: Hashable) -> None:
        """Nothing waits for this ticket any more; a prefetch that has not started never will."""
        opened = self._open.get(ticket)
        if opened is not None and opened.ahead is not None:
            opened.ahead.cancel()

    def _bring(self, ticket: Hashable, node: str, blocks: Sequence[Block], placing: Placing) -> None:
        def ended(outcomes: list[Hit | Miss]) -> None:
            missing: set[bytes] = set()
            failed: set[bytes] = set()
            for block, outcome in zip(blocks, outcomes, strict=True):
                if isinstance(outcome, Miss):
                    (missing if outcome.reason in GONE else failed).add(block.key)
                if isinstance(outcome, Miss) or block.key not in placing.outcomes:
                    placing.outcomes[block.key] = outcome
            with self._changed:
                placing.left -= len(blocks)
                placing.under_way -= 1
            self._over(ticket, missing, failed)

        left_s = max(0.0, (placing.until_ns - self._clock.monotonic_ns()) / 1e9)
        try:
            with within(placing.span), watched_by(placing.notes):
                self._nodes.at(node).getting(blocks, timeout_s=left_s, ended=ended)
        except (
            KvError
        ) as error:  # the client is closed, or the memory has just been taken back: nothing was begun
            ended([Miss(MissReason.NODE_AWAY, str(error))] * len(blocks))

    def _is_attached(self, node: str) -> bool:
        with suppress(KvError):
            return self._nodes.at(node).is_attached
        return True  # the nodes are closed: there is nothing to attach to

    def _attach(self, ticket: Hashable, node: str) -> None:
        with suppress(KvError):
            self._nodes.at(node).attach()
        self._over(ticket, (), ())

    def _read_ahead(self, ticket: Hashable, node: str, keys: Sequence[bytes], notes: Notes | None) -> None:
        try:
            with watched_by(notes):
                read: ReadAhead = self._nodes.at(node).prefetch(keys)
        except KvError:
            self._over(ticket, (), keys)
        else:
            self._over(ticket, read.missing.keys(), read.unread)

    def _over(self, ticket: Hashable, missing: Collection[bytes], failed: Collection[bytes]) -> None:
        """One part of a ticket has ended."""
        with self._changed:
            opened = self._open[ticket]
            opened.missing.update(missing)
            opened.failed.update(failed)
            opened.parts -= 1
            if not opened.parts:
                del self._open[ticket]
                self.reports.append(Report(ticket, opened.missing, opened.failed))
            self._changes += 1
            self._changed.notify_all()

    def changes(self) -> int:
        """A number that changes whenever something arrives."""
        with self._changed:
            return self._changes

    def wait(self, changes: int, timeout_s: float) -> None:
        """Wait until something has arrived since `changes` was read, or until the timeout."""
        with self._changed:
            self._changed.wait_for(lambda: self._changes != changes, timeout_s)

    def close(self) -> None:
        """Start nothing more, and wait, with a deadline, for what is pending."""
        self._threads.shutdown(cancel_futures=True)
        self._getters.shutdown()
