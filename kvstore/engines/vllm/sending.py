"""Sends copied objects to the node: puts from registered memory, each fired by a flag or at once.

What always holds: when `send` returns or raises, nothing reads the objects any more; it ends by its deadline. It is
called by a thread of our own, never in a step of the engine's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from kvstore.clock import SystemClock
from kvstore.engines.stores import block_at, is_about_domains
from kvstore.errors import KvError, Overloaded
from kvstore.limits import VLLM_ACK_MS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client import ArmedPuts, Block, ClusterBlock, ClusterPuts, PutResult, RegisteredMemory
    from kvstore.engines.stores import Store
    from kvstore.engines.vllm.saving import Copied
    from nic_offload.fabric import Region
    from nic_offload.flags import FlagWord

__all__ = ["PutSender"]

log = logging.getLogger(f"vllm.{__name__}")  # whose handlers and level are the engine's

_ACK_TIMEOUT_S = VLLM_ACK_MS / 1000


def _stored(result: PutResult) -> bool | None:
    """Whether this put stored the object; None if the key already had a block."""
    if not result.has_block:
        is_about_domains(result.error, log)
        return False
    return None if result.already_stored or result.error is not None else True


class _Armed:
    """Objects that have landed or failed: whether they are stored is known when all puts have ended."""

    def __init__(self, parts: list[tuple[ArmedPuts | ClusterPuts | None, int]]) -> None:
        self._parts = parts
        self._clock = SystemClock()
        self._until_ns = self._clock.monotonic_ns() + int(_ACK_TIMEOUT_S * 1e9)

    def outcome(self, wait_s: float) -> list[bool | None] | None:
        """Wait a moment for the puts to end; an outcome that is unknown for too long is a failure."""
        results: list[bool | None] = []
        for armed, objects in self._parts:
            if armed is None:
                results += [False] * objects
                continue
            if not armed.has_ended:
                armed.wait(wait_s)
            if not armed.has_ended and self._clock.monotonic_ns() < self._until_ns:
                return None
            # Asked for only now: a put may have ended after the wait above.
            results += [_stored(result) for result in armed.wait(0)]
        return results


class PutSender:
    """Puts from registered memory, over the client's transport."""

    def __init__(
        self,
        client: Store,
        region: Region | RegisteredMemory,
        slots: int,
        timeout_s: float,
        flag: FlagWord | None = None,
    ) -> None:
        """With a `flag` objects are sent when it reaches their thresholds, and otherwise at once."""
        self._client, self._region = client, region
        self._flag = () if flag is None else (flag,)
        self._slots, self._part = slots, max(1, slots // 2)
        self._timeout_s = timeout_s
        self._last: list[
            tuple[ArmedPuts | ClusterPuts, int]
        ] = []  # batches that may still have slots, and how many
        self._clock = SystemClock()

    def send(self, objects: Sequence[Copied], copying_s: float = 0.0) -> _Armed:
        """Put objects, and wait until they have landed on the node; abandon late ones."""
        until_ns = self._clock.monotonic_ns() + int((copying_s + self._timeout_s) * 1e9)

        def left_s() -> float:
            return max(0.0, (until_ns - self._clock.monotonic_ns()) / 1e9)

        parts: list[tuple[ArmedPuts | ClusterPuts | None, int]] = []
        try:
            for first in range(0, len(objects), self._part):
                some = objects[first : first + self._part]
                blocks = [self._block(one) for one in some]
                parts.append((self._arm(blocks, left_s), len(some)))
            for armed, _ in parts:
                if armed is not None:
                    armed.wait_landed(left_s())
        finally:
            for armed, _ in parts:
                if armed is not None:
                    armed.abandon()  # landed puts don't need their memory
        return _Armed(parts)

    def _block(self, one: Copied) -> Block | ClusterBlock:
        return block_at(one.key, self._region, one.offset, one.length, one.domain, one.threshold)

    def _arm(
        self, blocks: Sequence[Block | ClusterBlock], left_s: Callable[[], float]
    ) -> ArmedPuts | ClusterPuts | None:
        while True:
            self._last = [(armed, slots) for armed, slots in self._last if not armed.has_ended]
            # One of several nodes may have no slots left, and its blocks would need another copy.
            if not self._last or sum(slots for _, slots in self._last) + len(blocks) <= self._slots:
                try:
                    armed = self._client.arm(blocks, *self._flag, timeout_s=left_s())
                except Overloaded:
                    if not self._last:
                        return None
                except KvError as error:
                    if not is_about_domains(error, log):
                        log.debug("No room for %d objects: %s", len(blocks), error)
                    return None
                else:
                    self._last.append((armed, len(blocks)))
                    return armed
            # Each put that ends frees its slot.
            if not left_s():
                return None
            self._last[0][0].wait(left_s())
