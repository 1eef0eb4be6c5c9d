"""Gets over gRPC: a stream of blocks, each copied to its destination by the thread that reads the stream.

What always holds: the guarantees of `Get`. Blocks arrive in their order; a hit is copied whole, and a miss leaves its
destination unchanged. Once a get has ended, nothing writes to its regions, and until then they can't be closed.
"""

from __future__ import annotations

import threading
from contextlib import closing
from ctypes import memmove
from typing import TYPE_CHECKING, Final

from kvstore.client.blocks import Hit, hold_regions
from kvstore.clock import SystemClock
from kvstore.errors import KvError, UsageError
from kvstore.limits import GRPC_AGAIN_MS_MAX, GRPC_AGAIN_MS_MIN
from kvstore.miss import Miss, MissReason
from nic_offload.memory import address_of
from nic_offload.pieces import scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.gets import Ended
    from kvstore.client.grpc_blocks import InlineCalls

__all__ = ["Again", "GrpcGet", "get_inside"]

_CLOCK = SystemClock()
_NOT_CALLED: Final = Miss(MissReason.NODE_AWAY, "its deadline passed before the node was called")


def get_inside(
    inline: InlineCalls, blocks: Sequence[Block], fingerprint: bytes, until_ns: int
) -> Iterator[Hit | Miss]:
    """Get blocks into their destinations, and yield each outcome in order.

    A node that has no memory left for a block is asked again, until the deadline.
    """
    outcomes: list[Hit | Miss | None] = [None] * len(blocks)
    refusals: dict[int, Miss] = {}
    left, reported, again = list(range(len(blocks))), 0, Again(until_ns)
    while left and (left_s := again.left_s()) > 0:
        some, left = left, []
        for i, outcome in zip(
            some, _stream(inline, [blocks[i] for i in some], fingerprint, left_s), strict=True
        ):
            if isinstance(outcome, Miss) and outcome.reason is MissReason.BUSY:
                refusals[i] = outcome
                left.append(i)
                continue
            outcomes[i] = outcome
            while reported < len(blocks) and (known := outcomes[reported]) is not None:
                yield known
                reported += 1
        if left:
            again.pause()
    for i in range(reported, len(blocks)):
        yield outcomes[i] or refusals.get(i, _NOT_CALLED)


def _stream(
    inline: InlineCalls, blocks: Sequence[Block], fingerprint: bytes, timeout_s: float
) -> Iterator[Hit | Miss]:
    wanted = [(one.key, one.stored_bytes) for one in blocks]
    had = 0
    try:
        with closing(inline.get_many(wanted, timeout_s=timeout_s, fingerprint=fingerprint)) as outcomes:
            for block, outcome in zip(blocks, outcomes, strict=True):
                had += 1
                yield outcome if isinstance(outcome, Miss) else _placed(block, outcome)
    except UsageError:
        raise
    except KvError as error:  # as over the fabric, where such a client can't attach
        yield from [Miss(MissReason.NODE_AWAY, str(error))] * (len(blocks) - had)


def _placed(block: Block, stored: bytes) -> Hit:
    data = memoryview(stored)[block.skip : block.skip + block.length]
    if block.pieces is None:
        memmove(block.region.address + block.offset, address_of(data), block.length)
    else:
        scatter([(block.pieces, address_of(data))])
    return Hit(block.key)


class Again:
    """The deadline of a transfer, and the pauses before a busy node is asked again."""

    def __init__(self, until_ns: int) -> None:
        self._until_ns = until_ns
        self._pause_ms = GRPC_AGAIN_MS_MIN

    def left_s(self) -> float:
        """The time left; negative if the deadline has passed."""
        return (self._until_ns - _CLOCK.monotonic_ns()) / 1e9

    def pause(self) -> None:
        """Wait, each time twice as long as before, at most until the deadline."""
        threading.Event().wait(max(0.0, min(self._pause_ms / 1000, self.left_s())))
        self._pause_ms = min(2 * self._pause_ms, GRPC_AGAIN_MS_MAX)


class GrpcGet:
    """One batch of blocks being fetched by another thread.

    `ended` is called once, with all outcomes, when the last is known.
    """

    def __init__(
        self,
        inline: InlineCalls,
        blocks: Sequence[Block],
        fingerprint: bytes,
        until_ns: int,
        submit: Callable[[Callable[[], None]], None],
        ended: Ended | None,
    ) -> None:
        """`submit` has a thread call something."""
        self._ended = ended
        self._outcomes: list[Hit | Miss] = []
        self._blocks = len(blocks)
        self._is_over = False
        self._came = threading.Condition()
        self._held = hold_regions(blocks)
        try:
            submit(lambda: self._run(get_inside(inline, blocks, fingerprint, until_ns)))
        except BaseException:
            self._held.close()
            raise

    def _run(self, outcomes: Iterator[Hit | Miss]) -> None:
        try:
            for one in outcomes:
                with self._came:
                    self._outcomes.append(one)
                    self._came.notify_all()
        except BaseException as error:
            self._end(Miss(MissReason.NODE_AWAY, str(error)))
            if not isinstance(error, KvError):  # such as gRPC's own error for a closed channel
                raise
        else:
            self._end(None)

    def _end(self, miss: Miss | None) -> None:
        """Nothing will arrive any more: blocks without an outcome are this miss."""
        with self._came:
            if miss is not None:
                self._outcomes += [miss] * (self._blocks - len(self._outcomes))
        self._held.close()
        try:
            if self._ended is not None:  # without a lock: it may close the client, which waits for its pump
                self._ended(self._outcomes)
        finally:
            with self._came:
                self._is_over = True
                self._came.notify_all()

    def wait(self, first: int | None = None) -> list[Hit | Miss]:
        """Wait for the first `count` blocks, or for all."""
        wanted = self._blocks if first is None else max(0, min(first, self._blocks))
        with self._came:
            self._came.wait_for(
                lambda: self._is_over if wanted == self._blocks else len(self._outcomes) >= wanted
            )
            return self._outcomes[:wanted]
