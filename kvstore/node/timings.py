"""Latencies in histograms, and the latest puts with their times, including failed ones.

What always holds: everything is recorded on the node's own thread, once for blocks that began and ended together, so no
lock is needed. The size is bounded: `PUTS_SEEN_MAX` puts, and a histogram for each kind of call.
What it doesn't do: keep anything across a restart, or know a block's key.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from kvstore.durability import Durability
from kvstore.limits import PUTS_ROW_MS, PUTS_SEEN_MAX, PUTS_TOGETHER_MS, RPC_TIMEOUT_MS
from kvstore.node.statistics import Counters

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import NDArray

    from kvstore.clock import Clock
    from kvstore.errors import KvError
    from kvstore.node.landing import Tracked
    from kvstore.node.session_traces import SessionTrace

__all__ = ["BUCKETS_S", "Histogram", "PutSeen", "Timings"]

_TOGETHER_NS: Final = PUTS_TOGETHER_MS * 1_000_000
_ROW_NS: Final = PUTS_ROW_MS * 1_000_000
_FLIGHT_NS: Final = RPC_TIMEOUT_MS * 1_000_000  # an earlier flag belongs to another put

# From ten microseconds, which a block from memory takes, to ten seconds, after which calls end.
_BUCKETS_NS: Final[tuple[int, ...]] = (
    *(step * 10**power for power in range(3, 9) for step in (10, 25, 50)),
    10_000_000_000,
)
_BUCKETS: Final = np.array(_BUCKETS_NS)
BUCKETS_S: Final[tuple[float, ...]] = tuple(bound / 1_000_000_000 for bound in _BUCKETS_NS)


class Histogram:
    """Durations in buckets; `counts` has one more entry than there are bounds, for longer durations."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(_BUCKETS_NS) + 1)
        self.sum_ns = 0

    def note(self, lasted_ns: int, times: int = 1) -> None:
        """Note a duration, `times` times."""
        self.counts[bisect_left(_BUCKETS_NS, lasted_ns)] += times
        self.sum_ns += lasted_ns * times

    def note_all(self, lasted_ns: NDArray[np.int64]) -> None:
        """Note many durations."""
        buckets = np.bincount(np.searchsorted(_BUCKETS, lasted_ns), minlength=len(self.counts))
        self.counts = [before + more for before, more in zip(self.counts, buckets.tolist(), strict=True)]
        self.sum_ns += int(lasted_ns.sum())

    @property
    def count(self) -> int:
        """How many durations were noted."""
        return sum(self.counts)

    def quantile_s(self, share: float) -> float | None:
        """The upper bound of the bucket with this quantile; None without durations, or beyond all bounds."""
        seen, wanted = 0, share * self.count
        for bound_s, count in zip(BUCKETS_S, self.counts, strict=False):
            seen += count
            if seen and seen >= wanted:
                return bound_s
        return None


@dataclass(slots=True)
class PutSeen:
    """Blocks that were put together: leased by one call, or sent inside one."""

    tenant: bytes
    began_ns: int
    trace: SessionTrace | None
    inline: bool
    durability: Durability
    blocks: int = 0
    size_bytes: int = 0
    landed_first_ns: int = 0
    landed_ns: int = 0  # when the last landed
    kept_ns: int = 0  # when the last was stored or failed
    flag_ns: int = 0  # the first flag that the client reported; 0: none yet
    flagged: int = 0  # blocks whose flags were reported
    failed: int = 0
    failure: str = ""  # the error type of the last failed block
    fired: Histogram | None = None  # for the times from flag to landed

    def add(self, blocks: int, size_bytes: int, landed_ns: int, kept_ns: int) -> None:
        """Note that some of the blocks were stored."""
        self.blocks += blocks
        self.size_bytes += size_bytes
        self.landed_first_ns = min(self.landed_first_ns or landed_ns, landed_ns)
        self.landed_ns = max(self.landed_ns, landed_ns)
        self.kept_ns = max(self.kept_ns, kept_ns)
        if self.trace is not None:
            self.trace.offer(self)

    def fail(self, blocks: int, size_bytes: int, why: str, at_ns: int) -> None:
        """Note that some of the blocks failed."""
        self.failed += blocks
        self.failure = why
        self.size_bytes += size_bytes
        self.kept_ns = max(self.kept_ns, at_ns)

    def take_flags(self, times_ns: Iterable[int]) -> None:
        """Match flags of one block each; one store may have fired many."""
        for at_ns, blocks in Counter(times_ns).items():
            self.take_flag(at_ns, blocks)

    def take_flag(self, at_ns: int, blocks: int) -> bool:
        """Match a flag that fired `blocks` blocks, if ours landed soon after it and have no flag yet."""
        if self.flagged >= self.blocks or not 0 <= self.landed_ns - at_ns < _FLIGHT_NS:
            return False
        self.flagged += blocks
        self.flag_ns = min(self.flag_ns or at_ns, at_ns)
        if self.fired is not None:
            self.fired.note(self.landed_ns - at_ns, blocks)
        return True


@dataclass(slots=True)
class Timings:
    """A node's timings."""

    clock: Clock
    counters: Counters = field(
        default_factory=Counters
    )  # which has the failures of all rows, with the old ones
    kept: dict[Durability, Histogram] = field(default_factory=dict)  # from landed to stored
    fired: Histogram = field(default_factory=Histogram)  # from the flag to landed, if the flag was reported
    got_from_memory: Histogram = field(default_factory=Histogram)  # from request to sent
    got_from_drive: Histogram = field(default_factory=Histogram)
    lookups: Histogram = field(default_factory=Histogram)
    calls: dict[str, Histogram] = field(default_factory=dict)
    calls_failed: Counter[tuple[str, str]] = field(default_factory=Counter)  # by call and status
    puts: OrderedDict[tuple[bytes, int, bool], PutSeen] = field(default_factory=OrderedDict)

    def leases_kept(
        self, tenant: bytes, durability: Durability, leases: Iterable[Tracked], at_ns: int | None = None
    ) -> None:
        """Note that landed blocks of one tenant are on the drive, since `at_ns`, by default now."""
        together: dict[tuple[int, int], list[Tracked]] = {}
        for lease in leases:
            together.setdefault((lease.leased_ns, lease.landed_ns), []).append(lease)
        now_ns = self.clock.monotonic_ns() if at_ns is None else at_ns
        for (leased_ns, landed_ns), some in together.items():
            times_ns, lengths = (leased_ns, landed_ns, now_ns), [lease.length for lease in some]
            put = self.kept_together(tenant, durability, times_ns, lengths, some[0].trace)
            if put.trace is None:  # for a session's blocks, the client reports the flags
                put.take_flags([lease.flag_ns for lease in some if lease.flag_ns])

    def kept_together(
        self,
        tenant: bytes,
        durability: Durability,
        times_ns: tuple[int, int, int],
        lengths: Sequence[int],
        trace: SessionTrace | None = None,
    ) -> PutSeen:
        """Note that blocks of these lengths are on the drive; `times_ns`: leased, landed and kept."""
        leased_ns, landed_ns, kept_ns = times_ns
        self._kept(durability).note(kept_ns - landed_ns, len(lengths))
        put = self._put(tenant, leased_ns, durability, trace, inline=False)
        put.add(len(lengths), sum(lengths), landed_ns, kept_ns)
        return put

    def written_together(
        self,
        tenant: bytes,
        landed_ns: NDArray[np.int64],
        ended_ns: NDArray[np.int64],
        flags_ns: NDArray[np.int64],
        size_bytes: int,
    ) -> None:
        """Note blocks of one tenant that nothing was known of until they were on the drive; a flag of 0 is none."""
        kept_ns = np.maximum(ended_ns, landed_ns)
        self._kept(Durability.WRITTEN).note_all(kept_ns - landed_ns)
        first_ns = int(landed_ns[0])
        put = self._put(tenant, first_ns, Durability.WRITTEN, None, inline=False)
        put.add(len(landed_ns), size_bytes, int(landed_ns[-1]), int(kept_ns.max()))
        put.landed_first_ns = min(put.landed_first_ns, first_ns)
        has_flag = (flags_ns > 0) & (landed_ns - flags_ns < _FLIGHT_NS)
        if has_flag.any():
            flags_ns, landed_ns = flags_ns[has_flag], landed_ns[has_flag]
            self.fired.note_all(landed_ns - flags_ns)
            flag_ns = int(flags_ns.min())
            put.flag_ns = min(put.flag_ns or flag_ns, flag_ns)
            put.flagged = min(put.blocks, put.flagged + len(flags_ns))

    def inline_kept(
        self,
        tenant: bytes,
        durability: Durability,
        began_ns: int,
        landed_ns: int,
        lengths: Iterable[int],
        errors: Iterable[KvError | None] = (),
    ) -> None:
        """Note the ends of blocks sent over gRPC: lengths of those on the drive, and errors of the others."""
        lengths = list(lengths)
        now_ns = self.clock.monotonic_ns()
        for error in errors:
            if error is not None:
                self._fail(self._put(tenant, began_ns, durability, None, inline=True), 0, error)
        if not lengths:
            return
        self._kept(durability).note(now_ns - landed_ns, len(lengths))
        put = self._put(tenant, began_ns, durability, None, inline=True)
        put.add(len(lengths), sum(lengths), landed_ns, now_ns)

    def lease_failed(self, tenant: bytes, lease: Tracked, error: KvError) -> None:
        """Note that a landed block was not stored."""
        put = self._put(tenant, lease.leased_ns, lease.durability, lease.trace, inline=False)
        self._fail(put, lease.length, error)

    def grant_refused(self, tenant: bytes, error: KvError) -> None:
        """Note that the node's C core refused a block, of which it reports nothing else."""
        now_ns = self.clock.monotonic_ns()
        self._fail(self._put(tenant, now_ns, Durability.LANDED, None, inline=False), 0, error)

    def _fail(self, put: PutSeen, size_bytes: int, error: KvError) -> None:
        why = type(error).__name__
        put.fail(1, size_bytes, why, self.clock.monotonic_ns())
        self.counters.failed[why] += 1

    def called(self, call: str, began_ns: int, failure: str | None, ended_ns: int | None = None) -> None:
        """Note the end of a call, at `ended_ns`, by default now."""
        histogram = self.calls.get(call)
        if histogram is None:
            histogram = self.calls.setdefault(call, Histogram())
        histogram.note((self.clock.monotonic_ns() if ended_ns is None else ended_ns) - began_ns)
        if failure is not None:
            self.calls_failed[call, failure] += 1

    def _kept(self, durability: Durability) -> Histogram:
        histogram = self.kept.get(durability)
        return histogram if histogram is not None else self.kept.setdefault(durability, Histogram())

    def _just_before(
        self, tenant: bytes, began_ns: int, durability: Durability, trace: SessionTrace | None
    ) -> PutSeen | None:
        """The last row, if these blocks belong to it: those put by grants arrive one by one."""
        last = next(reversed(self.puts.values()), None)
        if last is None or last.inline or (last.tenant, last.durability) != (tenant, durability):
            return None
        is_near = began_ns - last.began_ns < _ROW_NS and began_ns - last.kept_ns < _TOGETHER_NS
        return last if is_near and last.trace is trace else None

    def _put(
        self,
        tenant: bytes,
        began_ns: int,
        durability: Durability,
        trace: SessionTrace | None,
        *,
        inline: bool,
    ) -> PutSeen:
        put = self.puts.get((tenant, began_ns, inline))
        if put is None and not inline:
            put = self._just_before(tenant, began_ns, durability, trace)
        if put is None:
            if len(self.puts) >= PUTS_SEEN_MAX:
                self.puts.popitem(last=False)
            put = PutSeen(tenant, began_ns, trace, inline, durability, fired=self.fired)
            self.puts[tenant, began_ns, inline] = put
            if trace is not None:
                trace.follow(put)
        return put
