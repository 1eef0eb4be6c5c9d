"""Gets inside gRPC: a stream of blocks, each copied to its place by the thread that reads the stream.

What always holds: what `Get` promises. Blocks arrive in their order; a hit is copied whole, and a miss leaves its place
as it was. Once a get has ended, nothing writes to its regions, and until then they can't be closed.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack, closing
from ctypes import memmove
from typing import TYPE_CHECKING

from kvstore.client.blocks import Hit, regions_of
from kvstore.clock import SystemClock
from kvstore.errors import KvError
from kvstore.miss import Miss, MissReason
from nic_offload.memory import address_of
from nic_offload.pieces import scatter

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from kvstore.client.blocks import Block
    from kvstore.client.core import Core
    from kvstore.client.gets import Ended
    from kvstore.client.inline import InlineCalls

__all__ = ["GrpcGet", "get_inside"]

_CLOCK = SystemClock()


def get_inside(
    inline: InlineCalls, blocks: Sequence[Block], fingerprint: bytes, until_ns: int
) -> Iterator[Hit | Miss]:
    """Get blocks into their places, one after the other."""
    left_s = (until_ns - _CLOCK.monotonic_ns()) / 1e9
    if left_s <= 0:
        miss = Miss(MissReason.NODE_AWAY, "its deadline passed before the node was called")
        yield from [miss] * len(blocks)
        return
    wanted = [(one.key, one.stored_bytes) for one in blocks]
    with closing(inline.get_many(wanted, timeout_s=left_s, fingerprint=fingerprint)) as outcomes:
        for block, outcome in zip(blocks, outcomes, strict=True):
            if isinstance(outcome, Miss):
                yield outcome
                continue
            data = memoryview(outcome)[block.skip : block.skip + block.length]
            if block.pieces is None:
                memmove(block.region.address + block.offset, address_of(data), block.length)
            else:
                scatter([(block.pieces, address_of(data))])
            yield Hit(block.key)


class GrpcGet:
    """One batch of blocks being fetched by another thread.

    `ended` is called once, with the client's lock held and all outcomes, when the last is known.
    """

    def __init__(
        self,
        core: Core,
        inline: InlineCalls,
        blocks: Sequence[Block],
        fingerprint: bytes,
        until_ns: int,
        submit: Callable[[Callable[[], None]], None],
        ended: Ended | None,
    ) -> None:
        """`submit` has a thread call something."""
        self._core, self._ended = core, ended
        self._outcomes: list[Hit | Miss] = []
        self._blocks = len(blocks)
        self._is_over = False
        self._came = threading.Condition()
        self._held = ExitStack()
        try:
            for region in regions_of(blocks):
                region.hold()
                self._held.callback(region.let_go)
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
            if not isinstance(error, KvError):  # such as gRPC's own, of a channel that was closed
                raise
        else:
            self._end(None)

    def _end(self, miss: Miss | None) -> None:
        """Nothing comes any more; whatever has not come is this miss."""
        with self._came:
            if miss is not None:
                self._outcomes += [miss] * (self._blocks - len(self._outcomes))
        self._held.close()
        with self._core.lock:
            if self._ended is not None:
                self._ended(self._outcomes)
        with self._came:
            self._is_over = True
            self._came.notify_all()

    def wait(self, first: int | None = None) -> list[Hit | Miss]:
        """Wait for the first `count` blocks, or for all."""
        wanted = self._blocks if first is None else min(first, self._blocks)
        with self._came:
            self._came.wait_for(
                lambda: self._is_over if wanted == self._blocks else len(self._outcomes) >= wanted
            )
            return self._outcomes[:wanted]
