"""Blocks put to a running node and got back, timed from the store to the flag word.

What always holds: every put has fresh names, so nothing is answered with "already have it"; a get asks for blocks
that were put and never read, so the drive answers and not the hot memory; what does not come back is an error.
"""

from __future__ import annotations

import itertools
import secrets
import time
from typing import TYPE_CHECKING, NamedTuple, Self

from kvstore.client import Block, Hit
from kvstore.errors import KvError
from kvstore.names import block_key
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from kvstore.client import Client
    from nic_offload.flags import FlagWords

__all__ = ["PathBlocks", "PutTimes"]

_WAIT_S = 60.0


class PutTimes(NamedTuple):
    """From the flag's store to the last acknowledgement of each kind."""

    landed_ns: int
    written_ns: int


class PathBlocks:
    """A client of a node with registered memory for `count` blocks."""

    def __init__(self, client: Client, flags: FlagWords, block_bytes: int, count: int) -> None:
        self.block_bytes, self.count = block_bytes, count
        self._client, self._flag = client, flags[0]
        self._name, self._runs = secrets.token_bytes(8), itertools.count()
        self._source = client.register(allocate(count * block_bytes))
        self._target = client.register(allocate(count * block_bytes))
        self._last: list[Block] = []

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
        results = puts.wait(_WAIT_S)
        for result in results:
            if result.error is not None:
                raise result.error
        self._last = blocks
        return PutTimes(
            max(result.landed_ns for result in results) - start_ns,
            max(result.durable_ns for result in results) - start_ns,
        )

    def get_ns(self) -> int:
        """Get the blocks that were put last; nanoseconds until all are there."""
        wanted = [Block(block.key, self._target, block.offset, block.length) for block in self._last]
        start_ns = time.monotonic_ns()
        outcomes = self._client.get(wanted, timeout_s=_WAIT_S)
        took_ns = time.monotonic_ns() - start_ns
        for outcome in outcomes:
            if not isinstance(outcome, Hit):
                raise KvError(f"A block that was just put could not be fetched: {outcome}.")
        return took_ns

    def inline_ns(self, count: int) -> int:
        """Put so many blocks by the CPU: copied to host memory, then inside gRPC, one after the other."""
        data = bytes(self.block_bytes)
        blocks = self._fresh(count)
        start_ns = time.monotonic_ns()
        for block in blocks:
            self._client.put_inline(block.key, bytearray(data), timeout_s=_WAIT_S)
        return time.monotonic_ns() - start_ns

    def close(self) -> None:
        """Let the memory go."""
        self._source.close()
        self._target.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
