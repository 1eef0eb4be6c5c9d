"""A node's counters and gauges: one collector, for the call `Statistics`, the metrics and the page.

Counters only rise, and are updated once a batch, not once a block. Gauges are read from their owners on request.
Names end in their unit; names without one are counts.

What always holds: the size of an answer is bounded, since the number of reasons is; reading it costs no drive access
and changes nothing.
What it doesn't do: persist anything, or count by tenant, except for the caller's quota.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvstore.errors import KeyTaken, LeaseExpired
from kvstore.miss import MissReason
from kvstore.wire import observing_pb2 as pb

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from kvstore.errors import KvError
    from kvstore.node.node import Node
    from kvstore.node.tenants import Tenant
    from kvstore.storage.eviction.types import Reason

__all__ = ["Counters", "collected"]


@dataclass(slots=True)
class Counters:
    """A node's counters."""

    puts: int = 0
    put_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # puts that failed, by the error's type
    landed_taken: int = 0
    landed_failed: int = 0
    hits_memory: int = 0
    hits_drive: int = 0
    got_bytes: int = 0
    refused: int = 0
    leased: int = 0
    landed: int = 0
    misses: Counter[MissReason] = field(default_factory=Counter)

    @property
    def puts_failed(self) -> int:
        """Puts that failed for any reason: the failed blocks of all rows of `Timings.puts`, which counts them."""
        return self.failed.total()

    @property
    def puts_key_taken(self) -> int:
        """Of these, blocks whose key had another block."""
        return self.failed[KeyTaken.__name__]

    @property
    def leases_expired(self) -> int:
        """Of these, blocks that did not land before their lease ended."""
        return self.failed[LeaseExpired.__name__]

    def kept(self, lengths: Iterable[int]) -> None:
        """Count stored blocks."""
        lengths = list(lengths)
        self.puts += len(lengths)
        self.put_bytes += sum(lengths)

    def lost(self, error: KvError) -> None:
        """Count a block that was acknowledged as landed but not stored, by its error."""
        if isinstance(error, KeyTaken):
            self.landed_taken += 1
        else:
            self.landed_failed += 1

    def found(self, lengths: Iterable[int], *, in_memory: bool) -> None:
        """Count blocks that are sent."""
        lengths = list(lengths)
        if in_memory:
            self.hits_memory += len(lengths)
        else:
            self.hits_drive += len(lengths)
        self.got_bytes += sum(lengths)

    def served(self, blocks: int, size_bytes: int, corrupt: int) -> None:
        """Count the blocks of a call that was answered from the shelf."""
        self.hits_memory += blocks - corrupt
        self.got_bytes += size_bytes
        if corrupt:
            self.misses[MissReason.CORRUPT] += corrupt

    def missed(self, reasons: Iterable[MissReason]) -> None:
        """Count misses."""
        self.misses.update(reasons)


def collected(node: Node, tenant: Tenant) -> pb.StatisticsResponse:
    """Return all counters, for one tenant."""
    counters, store, memory = node.counters, node.store.statistics(), node.hot.pages.statistics()
    quota = node.store.quota(tenant.id)
    return pb.StatisticsResponse(
        puts=counters.puts,
        put_bytes=counters.put_bytes,
        puts_failed=counters.puts_failed,
        puts_key_taken=counters.puts_key_taken,
        hits_memory=counters.hits_memory,
        hits_drive=counters.hits_drive,
        got_bytes=counters.got_bytes,
        misses=_counts(counters.misses),
        evictions=_counts({reason: tally.blocks for reason, tally in store.eviction.gone.items()}),
        refused=counters.refused,
        leased=counters.leased,
        landed=counters.landed,
        leases_expired=counters.leases_expired,
        syncs=store.syncs,
        quarantined=store.quarantined,
        blocks_doubted=store.doubted,
        uptime_ms=(node.clock.monotonic_ns() - node.began_ns) // 1_000_000,
        blocks=store.blocks,
        capacity_bytes=store.capacity_bytes,
        free_bytes=store.free_bytes,
        connections=len(node),
        leases=node.leases,
        pins=node.pins.count,
        watchers=len(node.watchers),
        fetches_waiting=node.fetches.waiting,
        puts_waiting=store.puts_pending,
        puts_waiting_for_room=store.waiting_for_room,
        puts_waiting_for_quota=store.waiting_for_quota,
        gets_waiting=store.gets_pending,
        deletes_waiting=store.deletes_pending,
        session_steps_waiting=store.sessions_pending,
        wipes_waiting=store.wipes_pending,
        memory_bytes=memory.capacity_bytes,
        memory_kept_bytes=memory.kept_bytes,
        sessions_protected=store.eviction.protected_sessions,
        takes_puts=store.takes_puts,
        quota_bytes=quota.bytes_max,
        quota_used_bytes=quota.used_bytes,
    )


def _counts(blocks: Mapping[MissReason, int] | Mapping[Reason, int]) -> list[pb.ReasonCount]:
    return [
        pb.ReasonCount(reason=int(reason), blocks=count) for reason, count in sorted(blocks.items()) if count
    ]
