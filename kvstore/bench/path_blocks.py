"""Blocks put to a running node and got back, timed as the caller sees it: from the store to the flag word until told.

What always holds: every put has new names, so no block is already stored. A put leaves its blocks in the node's hot
memory: `cold_ns` gets blocks that were never read, after more has been put than that memory holds, so they come from
the drive. A block that is not returned is an error.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Self

from kvstore.client import Block, Hit
from kvstore.errors import KvError
from kvstore.limits import HOT_BYTES_DEFAULT
from kvstore.names import block_key
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client import Client
    from nic_offload.flags import FlagWords

__all__ = ["PathBlocks", "PutTimes"]

_WAIT_S = 60.0
_PUSHED_OUT = 1.25  # times the hot memory's size were put since
_KEPT = 4  # times its size were put since, and the drive still has the block


class PutTimes(NamedTuple):
    """From the flag's store until the caller has been told that all blocks have landed, and that all are written."""

    landed_ns: int
    written_ns: int


class PathBlocks:
    """A client of a node with registered memory for `count` blocks."""

    def __init__(
        self,
        client: Client,
        flags: FlagWords,
        block_bytes: int,
        count: int,
        *,
        hot_bytes: int = HOT_BYTES_DEFAULT,
    ) -> None:
        """`hot_bytes`: the size of the node's hot memory; its drive is at least eight times as large."""
        self.block_bytes, self.count = block_bytes, count
        self._client, self._flag = client, flags[0]
        self._name, self._runs = secrets.token_bytes(8), itertools.count()
        self._source = client.register(allocate(count * block_bytes))
        self._target = client.register(allocate(count * block_bytes))
        self._hot_bytes = hot_bytes
        self._last: list[Block] = []
        self._put_bytes = 0
        self._unread: dict[
            int, deque[tuple[int, list[Block]]]
        ] = {}  # by their count, and how much had been put by then

    def _fresh(self, count: int) -> list[Block]:
        run = next(self._runs).to_bytes(4)
        return [
            Block(
                block_key(self._name, run, i.to_bytes(4)),
                self._source,
                i * self.block_bytes,
                self.block_bytes,
            )
            for i in range(count)
        ]

    def put(self, count: int) -> PutTimes:
        """Put `count` blocks by one flag store."""
        self._flag.store(0)
        blocks = self._fresh(count)
        puts = self._client.arm(blocks, self._flag)
        start_ns = time.monotonic_ns()
        self._flag.store(1)
        puts.wait_landed(_WAIT_S)
        landed_ns = time.monotonic_ns() - start_ns
        results = puts.wait(_WAIT_S)
        written_ns = time.monotonic_ns() - start_ns
        for result in results:
            if result.error is not None:
                raise result.error
        self._last = blocks
        self._put_bytes += count * self.block_bytes
        self._unread.setdefault(count, deque()).append((self._put_bytes, blocks))
        return PutTimes(landed_ns, written_ns)

    def hot_ns(self) -> int:
        """Get the blocks that were put last; returns the nanoseconds.

        The second time they come from the node's memory, if they fit.
        """
        unread = self._unread[len(self._last)]
        if unread and unread[-1][1] is self._last:
            unread.pop()
        return self._get_ns(self._last)

    def cold_ns(self, count: int) -> int:
        """Get `count` blocks from the node's drive; returns the nanoseconds."""
        unread = self._unread.setdefault(count, deque())
        while unread and self._put_bytes - unread[0][0] > _KEPT * self._hot_bytes:
            unread.popleft()  # it may have been evicted
        if not unread:
            self.put(count)
        put_bytes, blocks = unread.popleft()
        while self._put_bytes - put_bytes < _PUSHED_OUT * self._hot_bytes:
            self.put(self.count)
        return self._get_ns(blocks)

    def _get_ns(self, blocks: Sequence[Block]) -> int:
        wanted = [Block(block.key, self._target, block.offset, block.length) for block in blocks]
        start_ns = time.monotonic_ns()
        outcomes = self._client.get(wanted, timeout_s=_WAIT_S)
        took_ns = time.monotonic_ns() - start_ns
        for outcome in outcomes:
            if not isinstance(outcome, Hit):
                raise KvError(f"A block that was just put could not be fetched: {outcome}.")
        return took_ns

    def inline_ns(self, count: int) -> int:
        """Put `count` blocks by the CPU: copied to host memory, then sent over gRPC, one after the other."""
        data = bytes(self.block_bytes)
        blocks = self._fresh(count)
        start_ns = time.monotonic_ns()
        for block in blocks:
            self._client.put_inline(block.key, bytearray(data), timeout_s=_WAIT_S)
        return time.monotonic_ns() - start_ns

    def close(self) -> None:
        """Release the memory."""
        self._source.close()
        self._target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
