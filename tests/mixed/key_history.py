"""The history of a few keys of one node that many clients use in different ways, and whether it is consistent.

Each call is an event of each of its keys: when it began, when it ended, and how. A history is judged as a whole, when
all calls have ended, key by key:

- **bytes**: a get returns only bytes of a put of that key that had begun, and no bytes of a put that ended with
  KeyTaken. Bytes of a put that the drive refused (Expired, NoSpace, QuotaExceeded) may be read until it ended;
- **loss**: a block whose put was acknowledged is not missed by a later get, unless it may have been removed;
- **deletion**: a block that was deleted, or erased, is not found later, unless it was put again;
- **expiry**: a block is not found after its time to live;
- **one block**: of two blocks of a key, each stored or found, one was removed before the other one was there;
- **taken**: KeyTaken is the result only if the key had, or was getting, another block;
- **reason**: a miss names a reason that can apply: nothing is evicted from a drive that is large enough, for example.

What always holds: a put or a removal whose result is unknown may take effect at any time after it began, or never, but
not once the node has been started again after the call had failed. A block may be removed by a deletion, by an erasure,
with its session, by the end of its time to live, and, where the history says so, by an eviction or by damage: then
losses and second blocks are no faults. Of several puts of the same bytes the longest time to live applies, and a put
with `already_stored` has sent nothing, so its bytes need not be those that are stored.

An acknowledgement as `landed` is less than one as `written` (docs/client.md): the block may be lost when the node is
killed.

What it doesn't do: judge the order of a session's calls (`tests/cluster/history.py` does), or ask that gets are
linearizable while a removal is under way.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from kvstore.durability import Durability
from kvstore.miss import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

__all__ = ["End", "Event", "Fault", "History", "Kind", "Outage", "Way", "report"]

CLOCK_MARGIN_S = 0.03  # a time to live is in milliseconds of another clock
NEIGHBOURS = 12  # pieces of evidence that follow one and are compared with it
SHOWN_BEFORE_S, SHOWN_AFTER_S = 0.3, 0.05
OTHER_BYTES = -1  # the value of a get that returned bytes of no put


class Kind(Enum):
    PUT = "put"
    HIT = "hit"
    MISS = "miss"
    FOUND = "found"  # by a look-up, which returns no bytes
    REMOVAL = "removal"


class End(Enum):
    DONE = "done"
    ALREADY = "already stored"
    TAKEN = "key taken"
    REFUSED = "refused"  # by the drive, or because its time to live had ended
    NEVER = "never sent"
    UNKNOWN = "unknown"  # it may have taken effect, or may do so later


class Way(Enum):
    """How a block was put."""

    PUT = "put"
    ARM = "arm"
    RESERVE = "reserve"
    INLINE = "put_inline"
    STREAM = "put_many_inline"
    KILLED = "a client that was killed"


@dataclass(eq=False)
class Event:
    """A call, of one of its keys. It is changed when the call ends."""

    kind: Kind
    key: int
    value: int | None  # the number of the bytes that were put or got
    began_s: float
    ended_s: float = math.inf
    end: End = End.UNKNOWN
    way: Way | None = None  # of a put
    durability: Durability = Durability.WRITTEN  # of a put
    expires_s: float = math.inf  # of a put
    is_sure: bool = False  # of a removal: it removes the key's block if there is one
    reason: MissReason | None = None
    call: str = ""  # which call it was, for people

    @property
    def is_acknowledged(self) -> bool:
        """Whether it is a put of a block that stays."""
        return self.kind is Kind.PUT and self.end is End.DONE and math.isinf(self.expires_s)

    def __str__(self) -> str:
        words = [self.kind.value, "" if self.value is None else str(self.value), self.call, self.end.value]
        if self.kind is Kind.PUT and self.way is not None:
            words += [self.way.value, self.durability.name]
            words += [] if math.isinf(self.expires_s) else [f"expires at {self.expires_s:.3f}"]
        if self.reason is not None:
            words.append(self.reason.name)
        return " ".join(filter(None, words))


class Outage(NamedTuple):
    """A time without a node."""

    began_s: float
    ended_s: float
    is_clean: bool  # it was stopped, and not killed


class Fault(NamedTuple):
    """A contradiction: a sentence, the event that shows it, and events that it contradicts."""

    words: str
    event: Event
    others: tuple[Event, ...] = ()


@dataclass
class History:
    """All events, and what may happen to a block without a call."""

    evicts: bool = False  # blocks may be removed for room
    has_quota: bool = False  # or for their tenant's quota
    is_damaged: bool = False  # or because bytes on the drive were changed
    events: list[Event] = field(default_factory=list)
    outages: list[Outage] = field(default_factory=list)

    def add(self, event: Event) -> Event:
        """Note a call; may be called from any thread."""
        self.events.append(event)
        return event

    def faults(self) -> list[Fault]:
        """All contradictions, in the order of keys."""
        of_key: dict[int, list[Event]] = defaultdict(list)
        for event in list(self.events):
            of_key[event.key].append(event)
        return [fault for key in sorted(of_key) for fault in _KeyHistory(self, of_key[key]).faults()]


def report(history: History, fault: Fault) -> str:
    """The fault, and the events of its key around it, with times in milliseconds from its event on."""
    event, puts = fault.event, [one for one in fault.others if one.kind is Kind.PUT]
    named = {id(one) for one in (event, *fault.others)}
    begin_s = max(min([one.began_s for one in puts] + [event.began_s]), event.began_s - 2) - SHOWN_BEFORE_S
    end_s = event.ended_s + SHOWN_AFTER_S
    lines = [f"key {event.key}: {fault.words}", f"{'began':>10} {'ended':>10}  ms"]
    for one in sorted((one for one in history.events if one.key == event.key), key=lambda one: one.began_s):
        is_near = one.began_s <= end_s and min(one.ended_s, one.began_s + 2) >= begin_s
        if id(one) in named or is_near:
            began, ended = ((at_s - event.began_s) * 1000 for at_s in (one.began_s, one.ended_s))
            lines.append(f"{began:10.1f} {ended:10.1f}  {one}{'  <--' if id(one) in named else ''}")
    lines += [
        f"{'stopped' if one.is_clean else 'killed'} from {(one.began_s - event.began_s) * 1000:.1f}"
        f" to {(one.ended_s - event.began_s) * 1000:.1f} ms"
        for one in history.outages
    ]
    return "\n".join(lines)


class _KeyHistory:
    """The events of one key."""

    def __init__(self, history: History, events: Iterable[Event]) -> None:
        self._history = history
        self._events = sorted(events, key=lambda one: one.began_s)
        self._tried = self._of(Kind.PUT)
        self._puts = [one for one in self._tried if one.end not in {End.NEVER, End.ALREADY, End.TAKEN}]
        self._by_value: dict[int | None, list[Event]] = defaultdict(list)
        for put in self._puts:
            self._by_value[put.value].append(put)
        self._removals = self._of(Kind.REMOVAL)
        self._sure = [one for one in self._removals if one.is_sure and one.end is End.DONE]
        self._vanishes = history.evicts or history.has_quota or history.is_damaged

    def _of(self, *kinds: Kind) -> list[Event]:
        return [one for one in self._events if one.kind in kinds]

    def _until_s(self, event: Event) -> float:
        """The latest time at which a call can have taken effect."""
        if event.end is not End.UNKNOWN:
            return event.ended_s
        restarts = (one.ended_s for one in self._history.outages if one.ended_s >= event.ended_s)
        return min(restarts, default=math.inf)

    def faults(self) -> Iterator[Fault]:
        """All contradictions of this key."""
        impossible: set[Event] = set()
        for event in self._events:
            if event.kind is Kind.HIT:
                same = self._by_value.get(event.value, [])
                for fault in self._found(event, [one for one in same if _may_be_read(one, event)]):
                    impossible.add(event)
                    yield fault
            elif event.kind is Kind.FOUND or event.end is End.ALREADY:
                yield from self._found(event, [one for one in self._puts if _may_be_read(one, event)])
            elif event.kind is Kind.MISS:
                yield from self._missed(event)
            elif event.end is End.TAKEN:
                yield from self._taken(event)
        if not self._vanishes:
            yield from self._two_blocks(impossible)

    def _found(self, event: Event, puts: list[Event]) -> Iterator[Fault]:
        """Judge an event that found a block, which can only be one of these puts."""
        if not puts:
            tried = (one for one in self._tried if one.value == event.value)
            refused = tuple(one for one in tried if one.began_s <= event.ended_s)
            words = "bytes of a put that had been refused" if refused else "bytes that nobody put"
            yield Fault(words, event, refused)
            return
        if deletion := self._removed_for_good(puts, event):
            yield Fault("a deletion was undone", event, (deletion, *puts))
        elif max(map(self._until_s, puts)) < event.began_s:
            expires_s = max(one.expires_s for one in puts)
            if expires_s + CLOCK_MARGIN_S < event.began_s:
                yield Fault("a block was found after its time to live", event, tuple(puts))

    def _removed_for_good(self, puts: list[Event], event: Event) -> Event | None:
        """A deletion that began after all these puts, and ended before the event began."""
        last_s = max(map(self._until_s, puts))
        return next((one for one in self._sure if one.began_s > last_s and one.ended_s < event.began_s), None)

    def _missed(self, event: Event) -> Iterator[Fault]:
        assert event.reason is not None
        if event.reason in {MissReason.BUSY, MissReason.NODE_AWAY}:
            return
        if not self._can_be(event.reason, event):
            yield Fault(f"a miss that can't be {event.reason.name}", event)
        for put in () if self._vanishes else self._puts:
            if (
                put.is_acknowledged
                and put.ended_s < event.began_s
                and not self._may_be_removed(put.value, put.began_s, event.ended_s)
            ):
                yield Fault("an acknowledged block was lost", event, (put,))
                return

    def _can_be(self, reason: MissReason, event: Event) -> bool:
        history = self._history
        if reason is MissReason.EXPIRED:
            return any(one.expires_s <= event.ended_s + CLOCK_MARGIN_S for one in self._tried)
        if reason is MissReason.ERASED:
            return any(one.began_s <= event.ended_s for one in self._removals if one.call == "erase_user")
        return {
            MissReason.UNKNOWN: True,
            MissReason.CORRUPT: history.is_damaged,
            MissReason.UNREADABLE: history.is_damaged,
            MissReason.EVICTED: history.evicts,
            MissReason.QUOTA: history.has_quota,
        }.get(reason, False)

    def _taken(self, event: Event) -> Iterator[Fault]:
        others = [one for one in self._puts if one.value != event.value and _may_be_read(one, event)]
        if not others:
            yield Fault("KeyTaken, and there was no other block", event)
        elif deletion := self._removed_for_good(others, event):
            yield Fault("KeyTaken by a block that had been deleted", event, (deletion, *others))

    def _two_blocks(self, impossible: set[Event]) -> Iterator[Fault]:
        stored = [
            one
            for one in self._events
            if (one.kind is Kind.HIT and one not in impossible) or (one.is_acknowledged)
        ]
        for at, one in enumerate(stored):
            for other in stored[at + 1 : at + 1 + NEIGHBOURS]:
                if one.value != other.value and not self._may_follow(one, other):
                    yield Fault("two blocks under one key", other, (one,))
                    break

    def _may_follow(self, one: Event, other: Event) -> bool:
        """Whether the block of one event may have been removed before the other's was there, or the reverse."""
        until_s = max(one.ended_s, other.ended_s)
        either = [one] if one.ended_s < other.began_s else [one, other]
        return any(self._may_be_removed(event.value, one.began_s, until_s) for event in either)

    def _may_be_removed(self, value: int | None, since_s: float, until_s: float) -> bool:
        """Whether a block that was put or read from `since_s` on may be gone at `until_s`, or earlier."""
        if any(one.began_s <= until_s and self._until_s(one) >= since_s for one in self._removals):
            return True
        puts = self._by_value.get(value, [])
        for put in puts:
            if put.expires_s - CLOCK_MARGIN_S <= until_s and not any(
                one.is_acknowledged and since_s <= one.began_s and one.ended_s < put.expires_s for one in puts
            ):
                return True
        return any(
            outage.began_s <= until_s
            and outage.ended_s >= since_s
            and not any(
                one.is_acknowledged
                and since_s <= one.began_s
                and one.ended_s < outage.began_s
                and (outage.is_clean or one.durability >= Durability.WRITTEN)
                for one in puts
            )
            for outage in self._history.outages
        )


def _may_be_read(put: Event, event: Event) -> bool:
    """Whether the event may have found the put's bytes, if nothing removed them."""
    return put.began_s <= event.ended_s and not (put.end is End.REFUSED and put.ended_s < event.began_s)
