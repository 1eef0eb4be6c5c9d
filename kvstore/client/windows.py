"""Gets in windows: for more blocks than a call can name, and for blocks whose bytes belong in pieces.

Some blocks are requested at a time, and the next ones before the first have arrived. Blocks of pieces arrive in a slab
of the client, each contiguous, and are scattered from there, because a message per page costs more than copying the
page (docs/performance.md). While one window is scattered, the others arrive. Blocks that the C core reads from the
memory of a node on the same machine are copied into their pieces directly, without a slab.

What always holds: the caller's memory is not written to after the call has returned; a miss may have been written in
part; late bytes land in a slab, which is not reused before that get is over.
"""

from __future__ import annotations

import threading
from collections import deque
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from kvstore.client.blocks import Block, Hit, hold_regions
from kvstore.client.checks import are_pieces
from kvstore.clock import SystemClock
from kvstore.errors import FabricError
from kvstore.limits import BATCH_BLOCKS_MAX, SLAB_BYTES, WINDOWS_AHEAD
from kvstore.miss import Miss, MissReason
from nic_offload.pieces import Pieces, scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client.gets import EndedGet, Get
    from kvstore.client.slabs import Slab, Slabs

__all__ = ["get_in_windows", "needs_windows"]


class _Begins(Protocol):
    """Request contiguous blocks, with a timeout."""

    def __call__(self, blocks: Sequence[Block], timeout_s: float) -> Get | EndedGet: ...


def needs_windows(blocks: Sequence[Block]) -> bool:
    """Whether these need more than one call."""
    return are_pieces(blocks) or len(blocks) > BATCH_BLOCKS_MAX


def _windows(blocks: Sequence[Block]) -> Iterator[Sequence[Block]]:
    """As many at a time as a slab has room for."""
    first = size = 0
    for at, block in enumerate(blocks):
        here = 0 if block.pieces is None else block.length
        if at - first == BATCH_BLOCKS_MAX or (at > first and size + here > SLAB_BYTES):
            yield blocks[first:at]
            first, size = at, 0
        size += here
    yield blocks[first:]


class _Window:
    """Blocks in flight."""

    def __init__(
        self, slabs: Slabs, blocks: Sequence[Block], begin: Callable[[Sequence[Block]], Get | EndedGet]
    ) -> None:
        self._slabs = slabs
        self._blocks = blocks
        self._slab: Slab | None = None
        self._at: list[
            tuple[int, Pieces, int]
        ] = []  # which block the pieces belong to, and where its bytes arrive
        with ExitStack() as undo:
            undo.callback(self._give_back)
            self._get = begin(self._in_runs())
            undo.pop_all()

    def _in_runs(self) -> list[Block]:
        """The same blocks, those of pieces in the slab."""
        size = sum(block.length for block in self._blocks if block.pieces is not None)
        if not size:
            return list(self._blocks)
        self._slab = self._slabs.take(size)
        region, offset, runs = self._slab.region, 0, []
        for number, block in enumerate(self._blocks):
            if block.pieces is None:
                runs.append(block)
                continue
            self._at.append((number, block.pieces, region.address + offset))
            runs.append(replace(block, region=region, offset=offset))
            offset += block.length
        return runs

    def finish(self) -> list[Hit | Miss]:
        """Wait for it, and move the arrived blocks to their places."""
        outcomes = self._get.wait()
        done = self._get.scattered()
        scatter(
            [
                (pieces, at)
                for number, pieces, at in self._at
                if isinstance(outcomes[number], Hit) and not done[number]
            ]
        )
        self._give_back()
        return outcomes

    def abandon(self) -> None:
        """Wait for it, and scatter nothing."""
        self._get.wait()
        self._give_back()

    def _give_back(self) -> None:
        slab, self._slab = self._slab, None
        if slab is not None:
            self._slabs.give_back(slab)


def get_in_windows(
    slabs: Slabs, blocks: Sequence[Block], begin: _Begins, timeout_s: float
) -> list[Hit | Miss]:
    """Get the blocks; a Hit or a Miss for each, in order."""
    clock = SystemClock()
    until_ns = clock.monotonic_ns() + int(timeout_s * 1e9)
    under_way: deque[_Window] = deque()
    outcomes: list[Hit | Miss] = []

    def begin_in_time(some: Sequence[Block]) -> Get | EndedGet:
        return begin(some, max(0.0, (until_ns - clock.monotonic_ns()) / 1e9))

    with hold_regions(blocks):
        try:
            for some in _windows(blocks):
                if len(under_way) == WINDOWS_AHEAD:
                    outcomes += under_way[0].finish()
                    under_way.popleft()
                try:
                    under_way.append(_Window(slabs, some, begin_in_time))
                except FabricError as error:  # there is no memory for a slab
                    while under_way:
                        outcomes += under_way[0].finish()
                        under_way.popleft()
                    outcomes += [Miss(MissReason.BUSY, str(error))] * len(some)
            while under_way:
                outcomes += under_way[0].finish()
                under_way.popleft()
        except BaseException:  # such as a signal's: pending requests still have to be ended
            threading.Thread(
                target=lambda left=list(under_way): [one.abandon() for one in left],
                name="kvstore-get",
                daemon=True,
            ).start()
            raise
    return outcomes
