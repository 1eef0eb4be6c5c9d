"""The inputs and outputs of the requester: its seam, bounds, answers and counters.

What always holds: bounds that would keep some extent from ever being fetched are refused. Nothing here has behaviour.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from nic_offload.errors import KvError

if TYPE_CHECKING:
    from collections.abc import Hashable, Sequence

    from nic_offload.requester_catalogue import Extent, User

__all__ = [
    "Answer",
    "Ended",
    "Ending",
    "Fetcher",
    "Finished",
    "Limits",
    "Outcome",
    "Placement",
    "Statistics",
]


class Fetcher(Protocol):
    """Issues gets: the one seam."""

    def issue(self, user: User, extents: Sequence[Extent]) -> Hashable:
        """Begin to get these, all from one node; returns a ticket. A KvError means that none was begun.

        Every ticket is reported to `KvRequester.finished` once, later, whatever becomes of it.
        """
        ...

    def cancel(self, ticket: Hashable) -> None:
        """Cancel a ticket whose result is no longer needed. It may still arrive, and is reported as finished anyway."""
        ...


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound."""

    users_max: int = 100_000
    extents_max: int = 1_000_000
    extents_per_user_max: int = 65_536
    extent_bytes_max: int = 16 << 20  # also the quantum of a turn
    requests_max: int = 10_000
    bytes_in_flight_max: int = 1 << 30
    user_bytes_in_flight_max: int = 256 << 20
    gets_in_flight_max: int = 8192
    gets_per_ticket_max: int = 256

    def __post_init__(self) -> None:
        """Refuse bounds that would keep something from ever being fetched."""
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise KvError(f"{name} must be at least 1, not {getattr(self, name)}.")
        if not self.extent_bytes_max <= self.user_bytes_in_flight_max <= self.bytes_in_flight_max:
            raise KvError(
                "extent_bytes_max must not exceed user_bytes_in_flight_max, nor that bytes_in_flight_max:"
                f" {self.extent_bytes_max}, {self.user_bytes_in_flight_max}, {self.bytes_in_flight_max}."
            )


class Outcome(enum.Enum):
    """The outcome of a request call."""

    QUEUED = "queued"
    MERGED = "merged with the user's earlier request"
    MISS = "this user is unknown"
    FULL = "too many requests"
    LATE = "its deadline had passed"


class Answer(NamedTuple):
    """The request's number if it was accepted, or why not."""

    outcome: Outcome
    number: int | None = None


class Ending(enum.Enum):
    """How a request ended."""

    COMPLETE = "everything known has arrived"
    PARTIAL = "something was missing or failed"
    CANCELLED = "cancelled"
    EXPIRED = "its deadline passed"


class Ended(NamedTuple):
    """The end of a request."""

    number: int
    user: User
    ending: Ending


class Finished(NamedTuple):
    """The result of a ticket: the user, and how many bytes (for `Table.add_bytes`)."""

    user: User
    moved_bytes: int


class Placement(NamedTuple):
    """The rules' placement of KV that the user's requests will make."""

    keep: bool = False
    node: str = ""  # "": any


@dataclass(slots=True)
class Statistics:
    """Counts since the start, and the current state."""

    users: int = 0
    extents: int = 0
    requests: int = 0
    bytes_in_flight: int = 0
    gets_in_flight: int = 0
    tickets: int = 0
    queued: int = 0
    merged: int = 0
    missed: int = 0
    refused_full: int = 0
    refused_late: int = 0
    refused_foreign: int = 0
    completed: int = 0
    partial: int = 0
    cancelled: int = 0
    expired: int = 0
    gets: int = 0
    gets_missing: int = 0
    gets_failed: int = 0
    fetched_bytes: int = 0
    reports_stale: int = 0
    reports_without_room: int = 0
    placements_without_room: int = 0
