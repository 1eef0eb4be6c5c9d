"""Recent events of sessions: a bounded ring for each, of the node's own events and those reported by callers.

What always holds: there are at most `TRACES_MAX` sessions of `TRACE_STEPS_MAX` steps; the tenant with the most
sessions makes room. A batch is one event, whatever its number of blocks, and a call without a session costs only the
look-up of its header. A tenant finds only its own traces. What it doesn't do: influence anything, or outlive the
process. A trace is for people, and may be lost.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import islice
from operator import attrgetter
from typing import TYPE_CHECKING, Protocol

from google.protobuf.message import DecodeError

from kvstore.errors import ProtocolError
from kvstore.limits import (
    PUTS_TOGETHER_MS,
    RPC_TIMEOUT_MS,
    STEP_DETAIL_BYTES_MAX,
    STEPS_REPORTED_MAX,
    TRACE_FLAGS_MAX,
    TRACE_LOOKED_BACK,
    TRACE_STEPS_MAX,
    TRACES_MAX,
)
from kvstore.node.session_names import name_of
from kvstore.steps import Seen, Step
from kvstore.wire import steps_pb2 as pb
from kvstore.wire.step_messages import STEPS_HEADER, machine_clock, seen_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from kvstore.clock import Clock
    from kvstore.node.calls import HasMetadata
    from kvstore.node.landing import Tracked
    from kvstore.storage.manifests import SessionName

__all__ = ["SeenGet", "SessionTrace", "TakesFlags", "Traces"]

_NS_PER_MS = 1_000_000
_TOGETHER_NS = PUTS_TOGETHER_MS * _NS_PER_MS


class TakesFlags(Protocol):
    """A row of puts that receives the flags that fired it."""

    def take_flag(self, at_ns: int, blocks: int) -> bool:
        """Process a client's report of a flag that fired `blocks` blocks; returns whether they belong to this row."""
        ...


class SessionTrace:
    """The trace of a session. It is trimmed, so flags are passed to the rows of puts as they are reported."""

    __slots__ = ("_clock", "_flags", "_rows", "_seen", "name")

    def __init__(self, clock: Clock, name: SessionName) -> None:
        self._clock = clock
        self.name = name
        self._seen: deque[Seen] = deque(maxlen=TRACE_STEPS_MAX)
        self._flags: deque[Seen] = deque(maxlen=TRACE_FLAGS_MAX)  # not matched with a row yet
        self._rows: deque[TakesFlags] = deque(maxlen=TRACE_FLAGS_MAX)

    def saw(
        self,
        step: Step,
        blocks: int = 0,
        size_bytes: int = 0,
        *,
        tokens: int = 0,
        detail: str = "",
        at_ns: int | None = None,
    ) -> None:
        """Record an event of the node, at `at_ns`, by default now."""
        at_ns = self._clock.monotonic_ns() if at_ns is None else at_ns
        self._seen.append(Seen(step, at_ns, blocks, size_bytes, tokens, detail, by_node=True))

    def saw_put(
        self, step: Step, blocks: int, size_bytes: int, detail: str = "", at_ns: int | None = None
    ) -> None:
        """Record an event of the node for blocks that arrive one by one; those of a moment are one row."""
        now_ns = self._clock.monotonic_ns() if at_ns is None else at_ns
        for at, seen in enumerate(islice(reversed(self._seen), TRACE_LOOKED_BACK), 1):
            is_like = seen.by_node and (seen.step, seen.detail) == (step, detail)
            if is_like and now_ns - seen.at_ns < _TOGETHER_NS:
                blocks, size_bytes = blocks + seen.blocks, size_bytes + seen.size_bytes
                first, last = sorted((seen.at_ns, now_ns))
                at_ns = first if step is Step.LEASED else last  # the first slot, and the last block
                self._seen[-at] = Seen(step, at_ns, blocks, size_bytes, 0, detail, by_node=True)
                return
        self.saw(step, blocks, size_bytes, detail=detail, at_ns=now_ns)

    def reported(self, seen: Seen) -> None:
        """Record an event of a client; its time is already on the node's clock."""
        self._seen.append(seen)
        if seen.step is Step.FIRED and not any(row.take_flag(seen.at_ns, seen.blocks) for row in self._rows):
            self._flags.append(seen)

    def follow(self, row: TakesFlags) -> None:
        """Offer this row the flags that are reported from now on."""
        self._rows.append(row)

    def offer(self, row: TakesFlags) -> None:
        """Offer this row the unmatched flags so far."""
        for seen in tuple(self._flags):
            if row.take_flag(seen.at_ns, seen.blocks):
                self._flags.remove(seen)

    def in_order(self) -> list[Seen]:
        """All events, the earliest first."""
        return sorted(self._seen, key=attrgetter("at_ns"))


class SeenGet:
    """A traced get: its blocks are counted as they arrive, and recorded when the last has ended."""

    __slots__ = ("_clock", "_hot", "_left", "_read_bytes", "_read_first_ns", "_read_ns", "_reads", "_trace")

    def __init__(self, trace: SessionTrace, blocks: int, size_bytes: int, clock: Clock) -> None:
        self._trace = trace
        self._clock = clock
        self._left = blocks
        self._hot = self._reads = self._read_bytes = self._read_ns = self._read_first_ns = 0
        trace.saw(Step.FETCHING, blocks, size_bytes)

    def found(self) -> None:
        """Count a block that was in the hot memory."""
        self._hot += 1

    def read(self, size_bytes: int) -> None:
        """Count a block that was read from the drive."""
        self._read_ns = self._clock.monotonic_ns()
        self._read_first_ns = self._read_first_ns or self._read_ns
        self._reads += 1
        self._read_bytes += size_bytes

    def again(self) -> None:
        """Note that a block that was being sent must be fetched again."""
        self._hot -= 1
        self._left += 1

    def over(self) -> None:
        """Count one block as ended, sent or missed."""
        self._left -= 1
        if self._left:
            return
        if self._reads:
            lasted_ms = (self._read_ns - self._read_first_ns) / _NS_PER_MS
            detail = f"the first {lasted_ms:.2f} ms earlier" if self._reads > 1 else ""
            self._trace.saw(Step.READ, self._reads, self._read_bytes, detail=detail, at_ns=self._read_ns)
        self._trace.saw(Step.SENT, self._hot + self._reads, detail=f"{self._hot} from memory")


class Traces:
    """The traces of all sessions of a node."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._of: dict[bytes, OrderedDict[SessionName, SessionTrace]] = {}  # by tenant, unused longest first
        self._count = 0
        self._machine = machine_clock()
        self.fired_blocks = 0  # with known flags, with or without a session

    def __len__(self) -> int:
        return self._count

    def of(self, name: SessionName) -> SessionTrace:
        """The trace of a session; created if there is none."""
        trace = self.find(name)
        if trace is None:
            if self._count >= TRACES_MAX:
                self._make_room()
            trace = SessionTrace(self._clock, name)
            self._of.setdefault(name.tenant, OrderedDict())[name] = trace
            self._count += 1
        self._of[name.tenant].move_to_end(name)
        return trace

    def find(self, name: SessionName) -> SessionTrace | None:
        """The trace of a session, if there is one."""
        mine = self._of.get(name.tenant)
        return None if mine is None else mine.get(name)

    def forget(self, name: SessionName) -> None:
        """Remove the trace of a session."""
        mine = self._of.get(name.tenant, OrderedDict())
        if mine.pop(name, None) is not None:
            self._count -= 1
        if not mine:
            self._of.pop(name.tenant, None)

    def _make_room(self) -> None:
        tenant = max(self._of, key=lambda one: len(self._of[one]))
        self.forget(next(iter(self._of[tenant])))

    # --- reported by callers

    def of_call(self, headers: HasMetadata, tenant: bytes) -> SessionTrace | None:
        """The trace of a call's session, with the caller's reported steps added; None if the call names none."""
        for key, value in headers.invocation_metadata() or ():
            if key == STEPS_HEADER and isinstance(value, bytes):
                try:
                    return self.add_reported(tenant, pb.SeenByCaller.FromString(value))
                except DecodeError:
                    raise ProtocolError(f"The header {STEPS_HEADER} is not a SeenByCaller.") from None
        return None

    def add_reported(self, tenant: bytes, message: pb.SeenByCaller) -> SessionTrace:
        """Record the steps that a caller reports."""
        if len(message.seen) > STEPS_REPORTED_MAX:
            raise ProtocolError(f"A call reports at most {STEPS_REPORTED_MAX} steps.")
        if any(len(seen.detail.encode()) > STEP_DETAIL_BYTES_MAX for seen in message.seen):
            raise ProtocolError(f"A step's detail has at most {STEP_DETAIL_BYTES_MAX} bytes.")
        trace = self.of(name_of(tenant, message.user, message.session))
        now_ns = self._clock.monotonic_ns()
        since_ns = now_ns - message.sent_ns
        one_clock = message.clock == self._machine and 0 <= since_ns <= RPC_TIMEOUT_MS * _NS_PER_MS
        offset_ns = 0 if one_clock and self._machine else since_ns
        for seen in seen_of(message.seen):
            at_ns = min(max(0, seen.at_ns + offset_ns), now_ns)
            if seen.step is Step.FIRED:
                self.fired_blocks += seen.blocks
            trace.reported(
                Seen(seen.step, at_ns, seen.blocks, seen.size_bytes, seen.tokens, seen.detail, by_node=False)
            )
        return trace

    # --- puts, as the node sees them

    def leased(self, trace: SessionTrace | None, leases: Iterable[Tracked | None]) -> None:
        """Record leases for a session's blocks; None stands for a block that was stored already."""
        if trace is None:
            return
        given = [lease for lease in leases if lease is not None]
        for lease in given:
            lease.trace = trace
        if given:
            trace.saw_put(Step.LEASED, len(given), sum(lease.length for lease in given))

    def saw(self, step: Step, leases: Iterable[Tracked], detail: str = "", at_ns: int | None = None) -> None:
        """Record an event of a batch of leased blocks of any sessions, at `at_ns`, by default now."""
        if not self._count:
            return
        counts: dict[SessionTrace, list[int]] = {}
        for lease in leases:
            if lease.trace is not None:
                count = counts.setdefault(lease.trace, [0, 0])
                count[0] += 1
                count[1] += lease.length
        for trace, (blocks, size_bytes) in counts.items():
            trace.saw_put(step, blocks, size_bytes, detail, at_ns)
