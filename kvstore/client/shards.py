"""Gets a shard's KV that was stored by another number of shards.

    with ShardReader(client, layout, stored_shards=2) as reader:
        outcomes = reader.get([Wanted(chained_hash, kv, offset), ...], timeout_s=10)

The stored shards' blocks arrive in scratch memory of the reader and are checked there like all blocks; then this
shard's part of them is copied to its destination.

What always holds: the memory of a block that missed is not touched; a block is a hit only if all of its sources were.
What it doesn't do: find out how many shards stored the blocks; the session's owner knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.arguments import checked, checks_arguments
from kvstore.client.blocks import Block, Hit
from kvstore.clock import SystemClock
from kvstore.errors import InvalidArgument, LayoutError
from kvstore.limits import BATCH_BLOCKS_MAX, RESHARD_SCRATCH_BYTES
from nic_offload.handle import Handle
from nic_offload.memory import Runs, allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.client import Client
    from kvstore.layout import Layout
    from kvstore.miss import Miss
    from nic_offload.fabric import Region

__all__ = ["ShardReader", "Wanted"]


class Wanted(NamedTuple):
    """A block by the chained hash of its tokens, and its destination in registered memory."""

    chained_hash: bytes
    region: Region
    offset: int


@checks_arguments
class ShardReader(Handle):
    """Reads blocks of one layout that `stored_shards` shards put.

    >>> from kvstore.client import ShardReader, Wanted
    >>> from kvstore.layout import Layer, Layout
    >>> whole = Layout("my model", "v1", "bfloat16", 16, (Layer(heads=2, k_numbers=64, v_numbers=64),))
    >>> for half in (whole.of_shard(0, 2), whole.of_shard(1, 2)):
    ...     with Client(client.target, layout=half) as shard:
    ...         _ = shard.put_inline(half.key(b"hash of the tokens"), bytes(half.block_bytes))
    >>> target = client.register(bytearray(whole.block_bytes))
    >>> reader = ShardReader(client, whole, stored_shards=2)
    >>> [type(outcome).__name__ for outcome in reader.get([Wanted(b"hash of the tokens", target, offset=0)])]
    ['Hit']
    """

    @checked
    def __init__(self, client: Client, layout: Layout, stored_shards: int) -> None:
        self._client = client
        self._clock = SystemClock()
        self._layout = layout
        shards = layout.sources(stored_shards)
        self._stored = [layout.of_shard(shard, stored_shards) for shard in shards]
        places = {shard: place for place, shard in enumerate(shards)}
        self._runs = Runs([run._replace(shard=places[run.shard]) for run in layout.reshard(stored_shards)])
        self._one = sum(stored.block_bytes for stored in self._stored)
        self._at_once = min(max(1, RESHARD_SCRATCH_BYTES // self._one), BATCH_BLOCKS_MAX)
        self._scratch = allocate(self._one * self._at_once)
        self._region = client.register(self._scratch)

    def get(self, wanted: Sequence[Wanted], *, timeout_s: float | None = None) -> list[Hit | Miss]:
        """Get blocks into their destinations. Returns a Hit or a Miss for each, in order.

        >>> [str(outcome) for outcome in reader.get([Wanted(b"hash of other tokens", target, offset=0)])]
        ['MISS(not stored)']
        """
        if timeout_s is None:
            timeout_s = self._client.reach.get_timeout_s
        for one in wanted:
            if not isinstance(one, Wanted):
                raise InvalidArgument(f"Each block is a Wanted, not {type(one).__name__}.")
            if not 0 <= one.offset <= one.region.length - self._layout.block_bytes:
                raise LayoutError(
                    f"A block of {self._layout.block_bytes} bytes is not in the region at {one.offset}."
                )
        until_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        outcomes: list[Hit | Miss] = []
        for start in range(0, len(wanted), self._at_once):
            left_s = max(0, until_ns - self._clock.monotonic_ns()) / 1e9
            outcomes += self._get_some(wanted[start : start + self._at_once], left_s)
        return outcomes

    def _get_some(self, wanted: Sequence[Wanted], timeout_s: float) -> list[Hit | Miss]:
        found: list[list[Hit | Miss]] = []
        places: list[list[int]] = []
        until_ns = self._clock.monotonic_ns() + int(timeout_s * 1e9)
        begin = 0
        for stored in self._stored:
            size = stored.block_bytes
            blocks = [
                Block(stored.key(one.chained_hash), self._region, begin + at * size, size)
                for at, one in enumerate(wanted)
            ]
            begin += size * len(wanted)
            left_s = max(0, until_ns - self._clock.monotonic_ns()) / 1e9
            found.append(self._client.get(blocks, layout=stored, timeout_s=left_s))
            places.append([self._region.address + block.offset for block in blocks])
        outcomes: list[Hit | Miss] = []
        for one, parts, sources in zip(
            wanted, zip(*found, strict=True), zip(*places, strict=True), strict=True
        ):
            miss = next((part for part in parts if not isinstance(part, Hit)), None)
            if miss is not None:
                outcomes.append(miss)
                continue
            self._runs.copy(sources, one.region.address + one.offset)
            outcomes.append(Hit(self._layout.key(one.chained_hash)))
        return outcomes

    def close(self) -> None:
        """Free the scratch memory.

        >>> ShardReader(client, whole, stored_shards=2).close()
        """
        self._region.close()
        self._scratch.close()
