"""The eight steps of a session's turn, and the events of each.

The values are those of the proto's `Step`. What always holds: no value changes its meaning, since processes of other
versions use them.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["Seen", "Step"]


class Step(enum.IntEnum):
    """An event of a session."""

    REGISTERED = 1
    LEASED = 2
    ARMED = 3
    FIRED = 4
    LANDED = 5
    KEPT = 6
    APPENDED = 7
    ANSWERED = 8
    SLOT_GIVEN = 9
    ARRIVED = 10
    PREFETCHING = 11
    PREFETCHED = 12
    RESUMING = 13
    FETCHING = 14
    READ = 15
    SENT = 16
    FIRST_USABLE = 17
    WHOLE = 18
    MISSED = 19
    COMPUTED = 20

    @property
    def number(self) -> int:
        """Which of the eight steps it belongs to."""
        return _STEPS[self][0]

    @property
    def sentence(self) -> str:
        """Its name for people."""
        return _STEPS[self][1]


_STEPS = {
    Step.REGISTERED: (1, "buffer registered"),
    Step.LEASED: (2, "slots leased"),
    Step.ARMED: (2, "puts armed"),
    Step.FIRED: (3, "flag reached a threshold"),
    Step.LANDED: (4, "landed in the node's memory"),
    Step.KEPT: (4, "on the drive"),
    Step.APPENDED: (4, "named as a turn"),
    Step.ANSWERED: (5, "response returned"),
    Step.SLOT_GIVEN: (6, "memory given to another user"),
    Step.ARRIVED: (7, "request arrived and matched"),
    Step.PREFETCHING: (7, "prefetch began"),
    Step.PREFETCHED: (7, "prefetch ended"),
    Step.RESUMING: (8, "resume asked for"),
    Step.FETCHING: (8, "get taken by the node"),
    Step.READ: (8, "read from the drive"),
    Step.SENT: (8, "written into the caller's memory"),
    Step.FIRST_USABLE: (8, "first part usable"),
    Step.WHOLE: (8, "whole"),
    Step.MISSED: (8, "MISS"),
    Step.COMPUTED: (8, "new prompt computed"),
}

assert set(_STEPS) == set(Step)


@dataclass(frozen=True, slots=True)
class Seen:
    """A recorded event, of the node or of a process on the compute side."""

    step: Step
    at_ns: int
    blocks: int = 0
    size_bytes: int = 0
    tokens: int = 0
    detail: str = ""
    by_node: bool = False
