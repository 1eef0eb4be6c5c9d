"""The inputs and outputs of the eviction core: plain values, no behaviour.

The core (`kvstore.storage.keep`) takes a `Record` and returns an `Eviction` as their fields in order, 64 bits each, and
knows the numbers of guards, of reasons and, from 1, of refusals.
"""

from __future__ import annotations

import enum
from array import array
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

__all__ = [
    "Eviction",
    "EvictionPlan",
    "Evictions",
    "Guard",
    "Mode",
    "Reason",
    "Record",
    "Refusal",
    "Standing",
    "Statistics",
    "Stuck",
    "Tally",
    "Watermarks",
    "eviction_of",
    "together",
]


class Record(NamedTuple):
    """A stored block."""

    generation: int  # its name here: unique for ever, 64 bits
    pages: int
    name64: int = 0  # 64 bits of a digest of tenant and key, by which a policy recognizes it; 0 if it needn't
    expires_ms: int = 0  # 0 = never
    session: int = 0  # 64 bits; 0 = none
    position: int = 0  # in the session, from 0
    owner: int = 0  # the owner of the quota it counts against; 0: none
    start: int = 0  # its first page on the drive; 0: it is not looked up by that


class Guard(enum.IntEnum):
    """What keeps a block from being evicted, in ascending order of how long it may last."""

    PIN = 0  # it is being read
    WRITE = 1  # it is being written or synced
    LEASE = 2  # it was promised for a time
    PROTECTED = 3  # it must not be lost, nor made lossy


class Reason(enum.IntEnum):
    """Why a block is gone. The numbers never change their meaning: they end up in metrics and logs."""

    SPACE = 1  # room was needed, and this one was the policy's choice
    STRANDED = 2  # room was needed, and the block was after a gap in its only session
    EXPIRED = 3  # its time to live had ended
    SUPERSEDED = 4  # a newer record has its name
    DELETED = 5  # on request
    QUARANTINED = 6  # it failed a check
    CLEARED = 7  # contiguous room was needed, and it was in the way
    QUOTA = 8  # its tenant was at its quota and put more, and it was the tenant's least recently used block
    ERASED = 9  # its erase domain was erased


class Refusal(enum.Enum):
    """Why something was not done. A value, not an error: callers may lose races with evictions."""

    UNKNOWN = "no such block is kept"
    EXISTS = "this generation is kept already"
    NOT_HELD = "the block has no such guard"
    MOVED = "the block stands at another position in another session"
    FULL = "a bound is met"


class Mode(enum.IntEnum):
    """How urgently room is needed."""

    IDLE = 0  # there is enough
    BACKGROUND = 1  # free space fell below the low watermark, and is still below the high one
    URGENT = 2  # a put waits for room


class Stuck(enum.IntEnum):
    """Why nothing more can be evicted though it should be: the guard that ends soonest."""

    EMPTY = 1  # no block is kept
    PINNED = 2  # try again when a read ends
    WRITING = 3  # try again when a write or a sync ends
    LEASED = 4  # try again when a lease ends
    PROTECTED = 5  # waiting won't help


class Watermarks(NamedTuple):
    """Free pages: below `low_pages` eviction begins, at `high_pages` it stops."""

    low_pages: int
    high_pages: int


class Eviction(NamedTuple):
    """A block that is gone."""

    generation: int
    pages: int
    session: int  # of its sessions, the one it joined last; 0 = none
    position: int
    reason: Reason
    at_ms: int
    idle_ms: int  # since its last use, or since the start if that is later


EVICTION_WORDS: Final = len(Eviction._fields)


class Evictions:
    """Blocks that are gone, in order, as numbers; an `Eviction` is made only on request."""

    __slots__ = ("words",)

    def __init__(self, words: array[int] | None = None) -> None:
        self.words = array("Q") if words is None else words  # the fields of each, one after the other

    def __len__(self) -> int:
        return len(self.words) // EVICTION_WORDS

    def __getitem__(self, at: int) -> Eviction:
        first = range(len(self))[at] * EVICTION_WORDS
        return eviction_of(self.words, first)

    def __iter__(self) -> Iterator[Eviction]:
        return (eviction_of(self.words, first) for first in range(0, len(self.words), EVICTION_WORDS))

    @property
    def generations(self) -> array[int]:
        """Return the generation of each."""
        return self.words[::EVICTION_WORDS]

    @property
    def pages(self) -> int:
        """Return the pages of all of them."""
        return sum(self.words[1::EVICTION_WORDS])


def eviction_of(words: array[int], first: int) -> Eviction:
    """Return the eviction whose fields begin at this word."""
    generation, pages, session, position, reason, at_ms, idle_ms = words[first : first + EVICTION_WORDS]
    return Eviction(generation, pages, session, position, Reason(reason), at_ms, idle_ms)


class Standing(NamedTuple):
    """A block in its place."""

    generation: int
    pages: int


class EvictionPlan(NamedTuple):
    """The blocks to evict now; the core has already forgotten them."""

    mode: Mode
    victims: Evictions
    pages: int  # of all victims together
    more: bool  # a bound was reached: plan again soon, at once if a put waits
    stuck: Stuck | None


class Tally(NamedTuple):
    """How much was removed for one reason."""

    blocks: int
    pages: int


class Statistics(NamedTuple):
    """The state of the core."""

    policy: str
    mode: Mode
    blocks: int
    pages: int
    expiring: int  # blocks that have a time to live
    sessions: int
    session_links: int
    protected_sessions: int
    guarded: dict[Guard, int]  # blocks, by the longest-lasting guard they have
    timers_lag: bool  # some expired blocks are not planned yet
    gone: dict[Reason, Tally]
    space_idle_ms: int  # how long the last block evicted for room had not been used


def together(each: Sequence[Statistics]) -> Statistics:
    """Return the combined state of the cores of a store's drives. A session with blocks on several counts once."""
    return Statistics(
        policy=each[0].policy,
        mode=max(one.mode for one in each),
        blocks=sum(one.blocks for one in each),
        pages=sum(one.pages for one in each),
        expiring=sum(one.expiring for one in each),
        sessions=max(one.sessions for one in each),
        session_links=sum(one.session_links for one in each),
        protected_sessions=max(one.protected_sessions for one in each),
        guarded={guard: sum(one.guarded[guard] for one in each) for guard in each[0].guarded},
        timers_lag=any(one.timers_lag for one in each),
        gone={
            reason: Tally(
                sum(one.gone[reason].blocks for one in each), sum(one.gone[reason].pages for one in each)
            )
            for reason in each[0].gone
        },
        space_idle_ms=min((one.space_idle_ms for one in each if one.space_idle_ms), default=0),
    )
