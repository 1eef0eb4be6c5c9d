"""Notes of sampled work, kept until its spans are made; without OpenTelemetry.

What always holds: one put has at most `SPAN_GROUPS_MAX` groups, whatever its number of blocks. A note lives as long
as a lease refers to it.
"""

from __future__ import annotations

import enum
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from kvstore.limits import SPAN_GROUPS_MAX

if TYPE_CHECKING:
    from kvstore.durability import Durability
    from kvstore.wire.traceparent import TraceParent

__all__ = ["End", "Group", "LookupTimes", "PutTrace"]


class End(enum.Enum):
    """How a lease ended."""

    KEPT = "kept"
    FAILED = "failed"
    EXPIRED = "expired"
    GIVEN_BACK = "given_back"


class LookupTimes(NamedTuple):
    """When the phases of a look-up happened, on CLOCK_MONOTONIC; 0: one did not happen."""

    began_ns: int
    turn_ns: int  # when its last block was looked up and begun
    drive_first_ns: int
    drive_last_ns: int
    sending_ns: int
    over_ns: int


@dataclass(slots=True)
class Group:
    """Blocks of a put that landed together."""

    flag_ns: int  # when the first flag was seen
    heard_ns: int
    blocks: int = 0
    size_bytes: int = 0
    kept_ns: int = 0  # when the last was stored; 0: none was


@dataclass(slots=True)
class PutTrace:
    """The outcomes of the leases of one reservation, as they end."""

    parent: TraceParent
    began_ns: int
    leased_ns: int
    durability: Durability
    stored_before: int
    blocks: int
    size_bytes: int
    left: int = field(init=False)
    ends: Counter[End] = field(default_factory=Counter)
    groups: list[Group] = field(default_factory=list)
    _of: dict[int, Group] = field(default_factory=dict)  # by the time at which the node noticed them

    def __post_init__(self) -> None:
        """Count all leases as pending."""
        self.left = self.blocks

    def landed(self, flag_ns: int, heard_ns: int, size_bytes: int) -> None:
        """Note a landed block; beyond the maximum, groups are merged into the last."""
        group = self._of.get(heard_ns)
        if group is None:
            if len(self.groups) < SPAN_GROUPS_MAX:
                self.groups.append(Group(flag_ns, heard_ns))
            group = self._of[heard_ns] = self.groups[-1]
        group.flag_ns = min(group.flag_ns, flag_ns)
        group.blocks += 1
        group.size_bytes += size_bytes

    def ended(self, landed_ns: int, how: End, now_ns: int) -> None:
        """Note that a lease has ended; `landed_ns` identifies its group, if it had landed."""
        self.left -= 1
        self.ends[how] += 1
        group = self._of.get(landed_ns)
        if group is not None:
            group.kept_ns = max(group.kept_ns, now_ns)
