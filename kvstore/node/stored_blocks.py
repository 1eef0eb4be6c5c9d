"""Which blocks a get would find, for look-ups over gRPC and over the fabric. Nothing is read from a drive.

What always holds: an answer reports what a get would have found at that moment, except for a record that fails its
checks; a block that is not stored is reported with the reason, as far as the node remembers it. A look-up is not a use
of a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.limits import BLOCK_BYTES_MAX
from kvstore.miss import Miss
from kvstore.node.calls import miss_message
from kvstore.storage.block_reads import mismatch
from kvstore.storage.items import GetItem
from kvstore.wire import blocks_pb2 as pb
from kvstore.wire import kvstore_pb2
from kvstore.wire.record import record_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.node.node import Node
    from kvstore.storage.eviction_events import Explanation

__all__ = ["StoredBlocks"]


class StoredBlocks:
    """The stored blocks of a node. Its callers divide the blocks of a call into steps."""

    def __init__(self, node: Node) -> None:
        self._node = node

    def prefix(
        self, tenant: bytes, fingerprint: bytes, keys: Sequence[bytes]
    ) -> tuple[int, kvstore_pb2.GetMiss | None]:
        """Count the blocks before the first miss, and return that miss."""
        if self._are_stored(tenant, keys, fingerprint):  # the usual case
            return len(keys), None
        stored = 0
        named = [kvstore_pb2.BlockName(key=key, fingerprint=fingerprint) for key in keys]
        for state in self.states(tenant, named):
            if not state.stored:
                return stored, state.miss
            stored += 1
        return stored, None

    def _are_stored(self, tenant: bytes, keys: Sequence[bytes], fingerprint: bytes) -> bool:
        """Whether a get would find all of these, and none expires: then they need no look-up one by one."""
        began_ns = self._node.clock.monotonic_ns()
        entries = self._node.store.lookup([(tenant, key) for key in keys])
        if not all(one and not one.expires_ms and one.fingerprint == fingerprint for one in entries):
            return False
        self._node.timings.lookups.note(self._node.clock.monotonic_ns() - began_ns)
        return True

    def states(self, tenant: bytes, blocks: Sequence[kvstore_pb2.BlockName]) -> list[pb.BlockState]:
        """Look up blocks one by one."""
        store, now_ms = self._node.store, self._node.clock.wall_ms()
        states = []
        began_ns = self._node.clock.monotonic_ns()
        entries = store.lookup([(tenant, block.key) for block in blocks])
        unknown = [block.key for block, entry in zip(blocks, entries, strict=True) if entry is None]
        explained = dict(zip(unknown, store.explain_all(tenant, unknown), strict=True))
        for block, entry in zip(blocks, entries, strict=True):
            landed = self._node.granted.just_landed.find((tenant, block.key)) if entry is None else None
            if entry is not None:
                fingerprint, length, expires_ms = entry.fingerprint, entry.length, entry.expires_ms
            elif landed is not None:
                came = landed.came
                fingerprint, length, expires_ms = came.fingerprint, came.length, came.expires_unix_ms
            else:
                explanation = explained[block.key]
                never = self.never_landed_ms(tenant, block.key, explanation)
                miss = (
                    Miss(explanation.miss.reason, "its lease ended before it had landed")
                    if never
                    else explanation.miss
                )
                states.append(pb.BlockState(miss=miss_message(miss)))
                continue
            slot_bytes = record_bytes(BLOCK_BYTES_MAX)  # of any block
            item = GetItem(tenant, block.key, block.fingerprint, block.length, 0, slot_bytes, 0)
            differs = mismatch(item, fingerprint, length, expires_ms, now_ms)
            states.append(
                pb.BlockState(
                    stored=differs is None,
                    length=length,
                    expires_unix_ms=expires_ms,
                    miss=None if differs is None else miss_message(Miss(*differs)),
                    fingerprint=fingerprint,
                )
            )
        self._node.timings.lookups.note(self._node.clock.monotonic_ns() - began_ns)
        return states

    def never_landed_ms(self, tenant: bytes, key: bytes, explanation: Explanation) -> int:
        """When the last lease of a block ended without a block, if nothing has happened to the block since; else 0."""
        over_ms = 0 if explanation.stored else self._node.lookups.lease_over_ms(tenant, key)
        return over_ms if over_ms > explanation.gone_ms else 0
