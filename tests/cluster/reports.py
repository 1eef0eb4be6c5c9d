"""What nodes report of their map and their copies (`Cluster.Map`), for tests that wait for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvstore.wire.cluster_pb2 import MapResponse

__all__ = ["all_copies_are_made", "have_scanned", "members_are"]


def members_are(reports: Iterable[MapResponse], nodes: Iterable[str]) -> bool:
    """Whether each report lists exactly these nodes."""
    wanted = set(nodes)
    return all({one.node for one in report.members} == wanted for report in reports)


def have_scanned(reports: Iterable[MapResponse]) -> bool:
    """Whether each node has scanned its blocks by its map; before that its counts are 0."""
    states = [report.upkeep for report in reports]
    return not any(state.looking or state.unknown for state in states)


def all_copies_are_made(reports: Sequence[MapResponse]) -> bool:
    """Whether each node has scanned its blocks by its map, and none has only one copy."""
    return have_scanned(reports) and not any(report.upkeep.one_copy for report in reports)
