"""Records of look-ups: which blocks were requested, and the outcome of each, run by run.

What always holds: numbers are those of `kvstore/v1/lookups.proto` and never change their meaning; a look-up has at
most `LOOKUP_RUNS_MAX` runs, whatever its outcomes. No key is recorded, so nothing remains of deleted names.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.limits import LOOKUP_BLOCKS_MAX, LOOKUP_ID_BYTES_MAX, LOOKUP_RUNS_MAX
from kvstore.miss import MissReason

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

__all__ = ["HITS", "Kind", "Lookup", "Outcome", "Run", "bounded", "clean_id", "outcome_of_miss", "runs_of"]


class Kind(enum.IntEnum):
    """The kind of a look-up."""

    UNSPECIFIED = 0
    EXISTS = 1
    PREFIX = 2
    FETCH = 3
    GET = 4
    SESSION = 5


class Outcome(enum.IntEnum):
    """The outcome of looking up a block; the proto describes each."""

    UNSPECIFIED = 0
    MEMORY = 1
    DRIVE = 2
    STORED = 3
    NAMED = 4
    NEVER = 5
    EVICTED = 6
    STRANDED = 7
    CLEARED = 8
    EXPIRED = 9
    QUOTA = 10
    DELETED = 11
    CORRUPT = 12
    LAYOUT = 13
    LENGTH = 14
    LEASE_EXPIRED = 15
    UNREADABLE = 16
    BUSY = 17
    NODE_AWAY = 18
    GIVEN_UP = 19
    NO_SESSION = 20
    ERASED = 21


HITS = frozenset({Outcome.MEMORY, Outcome.DRIVE, Outcome.STORED, Outcome.NAMED})

_OF_MISS = {
    MissReason.UNKNOWN: Outcome.NEVER,
    MissReason.CORRUPT: Outcome.CORRUPT,
    MissReason.LAYOUT: Outcome.LAYOUT,
    MissReason.EXPIRED: Outcome.EXPIRED,
    MissReason.LENGTH: Outcome.LENGTH,
    MissReason.UNREADABLE: Outcome.UNREADABLE,
    MissReason.NODE_AWAY: Outcome.NODE_AWAY,
    MissReason.BUSY: Outcome.BUSY,
    MissReason.EVICTED: Outcome.EVICTED,
    MissReason.QUOTA: Outcome.QUOTA,
    MissReason.ERASED: Outcome.ERASED,
}

assert set(_OF_MISS) == set(MissReason)


class Run(NamedTuple):
    """Consecutive blocks with the same outcome; for removed blocks, when the first was removed."""

    blocks: int
    outcome: Outcome
    gone_unix_ms: int = 0
    idle_ms: int = 0


@dataclass(frozen=True, slots=True)
class Lookup:
    """One look-up. Blocks in no run were not examined."""

    request_id: str
    kind: Kind
    at_unix_ms: int
    took_us: int
    blocks: int
    runs: Sequence[Run]
    queued_us: int = 0
    drive_us: int = 0
    size_bytes: int = 0
    by_caller: bool = False
    detail: str = ""

    @property
    def examined(self) -> int:
        """How many blocks have an outcome."""
        return sum(run.blocks for run in self.runs)


def outcome_of_miss(reason: MissReason) -> Outcome:
    """The outcome that corresponds to a miss's reason alone."""
    return _OF_MISS[reason]


def runs_of(outcomes: bytes | bytearray) -> list[Run]:
    """The runs of outcomes, one byte per block; runs beyond the bound are merged into one, VARIOUS."""
    runs: list[Run] = []
    rest = bytes(outcomes)
    if rest and rest == rest[:1] * len(rest):  # most look-ups; for 65,536 blocks this takes 5 us, not 80
        return [Run(len(rest), Outcome(rest[0]))]
    while rest and len(runs) < LOOKUP_RUNS_MAX:
        first, length = rest[:1], len(rest)
        rest = rest.lstrip(first)  # a long session has tens of thousands, and other calls would wait
        runs.append(Run(length - len(rest), Outcome(first[0])))
    if rest:
        runs[-1] = Run(runs[-1].blocks + len(rest), Outcome.UNSPECIFIED)
    return runs


def bounded(runs: Iterable[Run]) -> list[Run]:
    """The runs, within the bound, also of their blocks: a caller may have reported any numbers."""
    runs = list(runs)
    if len(runs) > LOOKUP_RUNS_MAX:
        rest = sum(run.blocks for run in runs[LOOKUP_RUNS_MAX - 1 :])
        runs[LOOKUP_RUNS_MAX - 1 :] = [Run(min(rest, LOOKUP_BLOCKS_MAX), Outcome.UNSPECIFIED)]
    return runs


def clean_id(request_id: str) -> str:
    """A request's id as it travels: printable ASCII, and not too long."""
    if request_id.isascii() and request_id.isprintable() and " " not in request_id:  # the usual case
        return request_id[:LOOKUP_ID_BYTES_MAX]
    return "".join(one if "!" <= one <= "~" else "?" for one in request_id[:LOOKUP_ID_BYTES_MAX])
