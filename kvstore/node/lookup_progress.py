"""A look-up in progress: the outcome of each block, one byte each, and the times of its phases.

What always holds: it is recorded once, whichever way it ends; blocks without an outcome then were given up by their
caller. The reason is found only for the first `LOOKUP_MISSES_EXPLAINED_MAX` misses, so that a look-up of a thousand
unknown blocks costs the node no more than that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import LOOKUP_MISSES_EXPLAINED_MAX
from kvstore.lookups import Lookup, Outcome, outcome_of_miss, runs_of
from kvstore.miss import MissReason
from kvstore.node.span_notes import LookupTimes
from kvstore.storage.eviction.types import Reason

if TYPE_CHECKING:
    from kvstore.lookups import Kind
    from kvstore.node.inline import InlineRead
    from kvstore.node.lookup_history import Lookups
    from kvstore.wire.traceparent import TraceParent

__all__ = ["Looking"]

_OF_GONE = {
    Reason.SPACE: Outcome.EVICTED,
    Reason.STRANDED: Outcome.STRANDED,
    Reason.CLEARED: Outcome.CLEARED,
    Reason.QUOTA: Outcome.QUOTA,
    Reason.EXPIRED: Outcome.EXPIRED,
    Reason.DELETED: Outcome.DELETED,
    Reason.QUARANTINED: Outcome.CORRUPT,
    Reason.ERASED: Outcome.ERASED,
    Reason.SUPERSEDED: Outcome.NEVER,  # its successor was removed too long ago to be remembered
}
_MAY_HAVE_GONE = {
    MissReason.UNKNOWN,
    MissReason.EVICTED,
    MissReason.QUOTA,
    MissReason.EXPIRED,
    MissReason.ERASED,
    MissReason.CORRUPT,
}

assert set(_OF_GONE) == set(Reason)


class Looking:
    """One look-up."""

    __slots__ = (
        "_at_ms",
        "_began_ns",
        "_gone",
        "_kind",
        "_lookups",
        "_parent",
        "_request_id",
        "_session",
        "_tenant",
        "blocks",
        "drive_first_ns",
        "drive_last_ns",
        "is_over",
        "left",
        "outcomes",
        "sending_ns",
        "size_bytes",
        "turn_ns",
    )

    def __init__(
        self,
        lookups: Lookups,
        tenant: bytes,
        session: bytes,
        request_id: str,
        kind: Kind,
        blocks: int,
        parent: TraceParent | None,
    ) -> None:
        self._lookups = lookups
        self._parent = parent  # of its spans; None: there are none
        self._tenant, self._session = tenant, session
        self._request_id, self._kind = request_id, kind
        self._at_ms, self._began_ns = lookups.clock.wall_ms(), lookups.clock.monotonic_ns()
        self._gone: dict[
            int, tuple[int, int]
        ] = {}  # when blocks were removed, and how long they had been unused
        self.is_over = False
        self.blocks = self.left = blocks
        self.outcomes = bytearray()
        self.size_bytes = 0
        self.turn_ns = self.drive_first_ns = self.drive_last_ns = self.sending_ns = 0

    def expect(self) -> None:
        """Outcomes arrive in any order; blocks without one at the end were given up."""
        self.outcomes = bytearray((Outcome.GIVEN_UP,)) * self.blocks

    def all_are(self, outcome: Outcome, blocks: int | None = None) -> None:
        """Set the outcome of the first `blocks` blocks, or of all."""
        self.outcomes = bytearray((outcome,)) * (self.blocks if blocks is None else blocks)

    def add(self, outcome: Outcome) -> None:
        """Set the outcome of the next block."""
        self.outcomes.append(outcome)

    def read(self, read: InlineRead) -> None:
        """Note that a block for a get over gRPC was looked up, and is about to be sent if found."""
        now_ns = self._lookups.clock.monotonic_ns()
        if read.done.miss is None:
            self.size_bytes += read.done.length
        if read.done.was_read:
            self.drive_first_ns = self.drive_first_ns or self._began_ns
            self.drive_last_ns = now_ns

    def missed(self, at: int, key: bytes, reason: MissReason) -> None:
        """Note that a block is not served; find out how it was removed, if it may have been."""
        outcome = outcome_of_miss(reason)
        if reason in _MAY_HAVE_GONE and len(self._gone) < LOOKUP_MISSES_EXPLAINED_MAX:
            explanation = self._lookups.store.explain(self._tenant, key)
            gone = explanation.gone
            lease_over_ms = self._lookups.lease_over_ms(self._tenant, key)
            if lease_over_ms > explanation.gone_ms:
                outcome, self._gone[at] = Outcome.LEASE_EXPIRED, (lease_over_ms, 0)
            elif gone is not None:
                outcome, self._gone[at] = _OF_GONE[gone.reason], (gone.at_ms, gone.idle_ms)
            else:
                self._gone[at] = (explanation.gone_ms, 0)
        if at == len(self.outcomes):
            self.outcomes.append(outcome)
        else:
            self.outcomes[at] = outcome

    def since(self, began_ns: int) -> None:
        """Set when the look-up began."""
        self._at_ms -= (self._began_ns - began_ns) // 1_000_000
        self._began_ns = began_ns

    def was(self, began_ns: int, ended_ns: int) -> None:
        """Record the look-up with these times."""
        self.since(began_ns)
        self.over(ended_ns)

    def over(self, now_ns: int | None = None) -> None:
        """Record the look-up."""
        if self.is_over:
            return
        self.is_over = True
        now_ns = self._lookups.clock.monotonic_ns() if now_ns is None else now_ns
        runs, at = [], 0
        for run in runs_of(self.outcomes):
            gone_ms, idle_ms = self._gone.get(at, (0, 0))
            runs.append(run._replace(gone_unix_ms=gone_ms, idle_ms=idle_ms))
            at += run.blocks
        lookup = Lookup(
            self._request_id,
            self._kind,
            self._at_ms,
            max(0, now_ns - self._began_ns) // 1000,
            self.blocks,
            runs,
            queued_us=max(0, self.turn_ns - self._began_ns) // 1000 if self.turn_ns else 0,
            drive_us=(self.drive_last_ns - self.drive_first_ns) // 1000 if self.drive_last_ns else 0,
            size_bytes=self.size_bytes,
        )
        self._lookups.record(self._tenant, self._session, lookup)
        if self._parent is not None and self._lookups.spans is not None:
            times = LookupTimes(
                self._began_ns,
                self.turn_ns,
                self.drive_first_ns,
                self.drive_last_ns,
                self.sending_ns,
                now_ns,
            )
            self._lookups.spans.looked_up(self._parent, lookup, times)
