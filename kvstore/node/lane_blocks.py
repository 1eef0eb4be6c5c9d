"""Blocks that lanes have written before anything in Python knew them: thousands a second, as columns of an array.

A lane reports a block together with the end of its record. If the block was not requested before, and nothing about
it is unusual, it goes into the index, the hot memory and the counts with all others of its batch; no object is made of
it. `take` refuses a batch in which any block needs more than that; `granted_puts` processes it block by block.

Always holds: blocks that `take` has accepted are in the index, or their drive has failed; their memory is the hot copy,
in the step in which they are in the index.

It doesn't handle sessions' traces, spans or failed writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from kvstore.storage.index_layout import BLOCK_ROW, names_in, record_pages
from nic_offload.shelf import RENAMED_USED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from kvstore.errors import StorageError
    from kvstore.node.lane_quotas import LaneQuotas
    from kvstore.node.node import Node
    from kvstore.node.put_area import PutArea
    from kvstore.storage.drive import Drive

    Parts = Sequence[tuple[PutArea, NDArray[np.intp] | slice]]
    """The rows of each connection, where they are in a batch."""

__all__ = ["WRITTEN", "LaneBlocks", "are_plain", "count_uses"]

_CAME: Final = np.dtype(
    [
        *(
            (name, "<u8")
            for name in ("id", "address", "ack_generation", "expires_ms", "landed_ns", "fired_ns")
        ),
        *((name, "<u4") for name in ("ack_word", "room", "length", "crc32c", "metadata_bytes")),
        *((name, "u1") for name in ("durability", "listed", "is_stored", "under_way")),
        ("key", "V32"),
        ("fingerprint", "V16"),
        ("domain", "V16"),
    ]
)
WRITTEN: Final = np.dtype(  # a `nic_offload.lane.Written`
    [
        ("came", _CAME),
        *((name, "<u8") for name in ("tag", "generation", "offset", "ended_ns", "key_id")),
        ("result", "<i4"),
        *((name, "<u4") for name in ("is_answered", "key_number", "was_reported")),
    ]
)


def are_plain(rows: NDArray[Any]) -> bool:
    """Return whether all these blocks are unknown so far, written, and acknowledged, and none has metadata."""
    came = rows["came"]
    return not (
        rows["was_reported"].any()
        or rows["result"].any()
        or came["metadata_bytes"].any()
        or not rows["is_answered"].all()
    )


class LaneBlocks:
    """Processes plain batches of a node's lanes."""

    def __init__(self, node: Node, areas: Mapping[int, PutArea], lent: LaneQuotas) -> None:
        """`areas` has the areas of all connections, by number."""
        self._node = node
        self._areas = areas
        self._lent = lent

    def take(self, drive: Drive, rows: NDArray[Any]) -> tuple[NDArray[Any], StorageError | None]:
        """Publish a plain batch of one drive, in the order of generations.

        Return the blocks that have not ended, and why: nothing was published, or the C core no longer lists them.
        """
        tags = rows["tag"]
        parts: Parts = [(self._areas[int(tags[0])], slice(None))]
        if (tags != tags[0]).any():
            numbers = np.unique(tags).tolist()
            parts = [(self._areas[number], np.flatnonzero(tags == number)) for number in numbers]
        named = _named(rows, parts)
        error = drive.puts.publish_lane(named)
        left = np.ones(len(rows), np.bool_)
        for area, at in parts:
            self._count(area, rows[at])
            if error is None:
                left[at] = ~self._keep(area, rows[at], names_in(named[at]))
        return rows[left], error

    def _count(self, area: PutArea, rows: NDArray[Any]) -> None:
        node = self._node
        area.idle_ticks = 0
        node.turns.note_call(area.connection.tenant)
        node.counters.leased += len(rows)
        node.counters.landed += len(rows)
        if area.lent_pages:
            self._lent.charge(area, int(record_pages(rows["came"]["length"]).sum()))

    def _keep(self, area: PutArea, rows: NDArray[Any], names: NDArray[np.uint8]) -> NDArray[np.bool_]:
        """Keep the memory of these blocks as their hot copies; return of which, because the C core lists them."""
        memory = self._node.hot
        renamed = memory.shelf.rename(rows["came"]["id"].tobytes(), rows["generation"].tobytes())
        listed = np.frombuffer(renamed, np.bool_)
        if not listed.all():
            names, rows = names[listed], rows[listed]
        pieces = rows["came"]["room"]
        area.rooms.difference_update(pieces.tolist())
        size_bytes = memory.pages.size(pieces)
        memory.pages.keep_all(pieces, rows["generation"], names.tobytes(), area.connection.tenant)
        memory.pages.release_all(pieces)
        memory.shares.release(area.holder, size_bytes)
        self._note_kept(area, rows)
        count_uses(self._node, rows["generation"], np.frombuffer(renamed, np.uint8)[listed])
        return listed

    def _note_kept(self, area: PutArea, rows: NDArray[Any]) -> None:
        node, came = self._node, rows["came"]
        if not len(rows):
            return
        size_bytes = int(came["length"].sum(dtype=np.uint64))
        node.counters.puts += len(rows)
        node.counters.put_bytes += size_bytes
        fired_ns = came["fired_ns"]
        has_flag = (fired_ns > 0) & (fired_ns < came["landed_ns"]) & area.has_our_clock
        node.traces.fired_blocks += int(np.count_nonzero(has_flag))
        node.timings.written_together(
            area.connection.tenant,
            came["landed_ns"].astype(np.int64),
            rows["ended_ns"].astype(np.int64),
            np.where(has_flag, fired_ns, 0).astype(np.int64),
            size_bytes,
        )


def count_uses(node: Node, generations: NDArray[np.uint64], renamed: NDArray[np.uint8]) -> None:
    """Count uses of blocks that calls were answered with before the index had them. `renamed` is the shelf's answer."""
    used = generations[renamed == RENAMED_USED].tolist()
    if used:
        node.hot.pages.touch(used)
        node.store.used(used)


def _named(rows: NDArray[Any], parts: Parts) -> NDArray[Any]:
    """Return what the index will have of the blocks."""
    came, named = rows["came"], np.zeros(len(rows), BLOCK_ROW)
    for area, at in parts:
        named["tenant"][at] = np.frombuffer(area.connection.tenant, named["tenant"].dtype)
    for field in ("key", "length", "crc32c", "fingerprint"):
        named[field] = came[field]
    named["offset"], named["generation"], named["domain"] = (
        rows["offset"],
        rows["generation"],
        rows["key_number"],
    )
    return named
