"""The cost of a change of a cluster's members: how much each node sends and receives, and how long it takes.

Pure. It is an estimate: it assumes that the nodes' current blocks are spread evenly over the lots. The owners are those
of the placement itself.

What it doesn't do: ask the nodes, which `kvstore cluster plan` does; count blocks that clients put meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from kvstore.cluster.map import DRAINING, Map, Member
from kvstore.limits import UPKEEP_BYTES_PER_S

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Plan", "with_change"]


@dataclass(frozen=True, slots=True)
class Plan:
    """The bytes that each node sends and receives."""

    sends: Mapping[str, int]
    receives: Mapping[str, int]

    @property
    def seconds(self) -> int:
        """The minimum time, at the rate of the sending nodes."""
        return -(-max(self.sends.values(), default=0) // UPKEEP_BYTES_PER_S)

    @classmethod
    def of(cls, before: Map, after: Map, stored: Mapping[str, int], replicas: int) -> Plan:
        """The plan from one map to another, given the bytes on each node now.

        What a draining node has is on the others too, or will be; so is what a node has that is not in `stored`.
        """
        draining = {before.members[at].node for at in before.draining}
        known = [some for node, some in stored.items() if node not in draining]
        staying = len(before.members) - len(draining)
        copies = before.lots * min(replicas, staying)
        each = sum(known) * staying / len(known) / copies if copies and known else 0.0
        sends = dict.fromkeys((one.node for one in after.members), 0.0)
        receives = dict(sends)
        had_at, new_at = ([one.node for one in some.members] for some in (before, after))
        leaving = {one.node for one in after.members if one.state == DRAINING}
        for owners, later in zip(before.orders(), after.orders(), strict=True):
            had = [had_at[at] for at in owners[:replicas]]
            for node in (new_at[at] for at in later[:replicas]):
                if node not in had:
                    sends[next((one for one in had if one in leaving), had[0])] += each
                    receives[node] += each
        return cls(*({node: round(some) for node, some in rows.items()} for rows in (sends, receives)))


def with_change(now: Map, node: str, zone: str = "") -> Map:
    """The map with a member drained or, if none has this address, with one more, of typical weight, in this zone."""
    if any(one.node == node for one in now.members):
        changed = [replace(one, state=DRAINING) if one.node == node else one for one in now.members]
    else:
        weights = sorted(one.weight for one in now.members) or [1]
        changed = [*now.members, Member(f"planned {node}", node, weights[len(weights) // 2], zone=zone)]
    return Map.of(now.revision, changed, lots=now.lots)
