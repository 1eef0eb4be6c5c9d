"""What `ClusterClient.arm` and `ClusterClient.pin` return: the puts to all owners of blocks, and their pins.

What always holds: a block's result is that of all its owners: a put succeeds once as many have the block as copies are
wanted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvstore.client.arguments import checks_arguments
from kvstore.client.blocks import PutResult
from kvstore.clock import SystemClock
from kvstore.errors import KvError, NodeUnavailable
from kvstore.limits import CLUSTER_LAST_COPY_MS, CLUSTER_PUTS_SLICE_MS
from nic_offload.handle import Handle
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.block_calls import Pin
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.silent_nodes import SilentNodes

__all__ = ["ClusterPin", "ClusterPuts", "merged", "now_s", "seconds_until"]

_CLOCK = SystemClock()
_LOOK_S = CLUSTER_PUTS_SLICE_MS / 1000


@made_by("`ClusterClient.arm`")
@checks_arguments
class ClusterPuts:
    """Puts to several nodes fired by one flag, as `ArmedPuts` is for one node.

    >>> puts = cluster.arm([block])
    >>> [result.durability.name for result in puts.wait(timeout_s=10)]
    ['WRITTEN']
    """

    def __init__(
        self,
        keys: Sequence[bytes],
        parts: Sequence[tuple[str, list[int], ArmedPuts | KvError]],
        copies: int,
        silent: SilentNodes,
    ) -> None:
        """Each part is a node, the places of its keys, and what arming their puts returned."""
        self._keys, self._parts, self._copies, self._silent = keys, parts, copies, silent
        self._armed = [puts for _, _, puts in parts if not isinstance(puts, KvError)]

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return all(puts.has_ended for puts in self._armed)

    def wait(self, timeout_s: float) -> list[PutResult]:
        """As `ArmedPuts.wait`: one result for each block, for all its owners.

        Once each block has enough copies, it waits a moment longer for the other puts, which then continue.

        >>> [result.error for result in puts.wait(timeout_s=10)]
        [None]
        """
        until_s = now_s() + timeout_s
        is_enough = False
        pending = [
            node for node, _, puts in self._parts if not isinstance(puts, KvError) and not puts.has_ended
        ]
        with self._silent.waiting(pending):
            while not self.has_ended and seconds_until(until_s):
                for puts in self._armed:
                    puts.wait(min(seconds_until(until_s), _LOOK_S))
                if not is_enough and all(one.error is None for one in self._told()):
                    is_enough = True
                    until_s = min(until_s, now_s() + CLUSTER_LAST_COPY_MS / 1000)
        return self._told()

    def _told(self) -> list[PutResult]:
        told: list[list[PutResult]] = [[] for _ in self._keys]
        for _, some, puts in self._parts:
            if isinstance(puts, KvError):
                results = [PutResult(self._keys[at], None, puts) for at in some]
            else:
                results = puts.wait(0)
            for at, result in zip(some, results, strict=True):
                told[at].append(result)
        return [merged(key, each, self._copies) for key, each in zip(self._keys, told, strict=True)]

    def wait_landed(self, timeout_s: float) -> bool:
        """As `ArmedPuts.wait_landed`.

        >>> puts.wait_landed(timeout_s=10)
        True
        """
        until_s = now_s() + timeout_s
        return all(puts.wait_landed(seconds_until(until_s)) for puts in self._armed)

    def cancel(self) -> int:
        """Withdraw the puts that have not been sent, to all owners; returns how many.

        >>> puts.cancel()  # nothing is left to withdraw
        0
        """
        return sum(puts.cancel() for puts in self._armed)

    def abandon(self) -> None:
        """As `ArmedPuts.abandon`: when this returns, nothing reads the sources any more.

        >>> puts.abandon()
        """
        for puts in self._armed:
            puts.abandon()


@made_by("`ClusterClient.pin`")
class ClusterPin(Handle):
    """Blocks protected from eviction on all owners until this is closed or expires.

    >>> pin = cluster.pin([key])
    >>> pin.pinned
    [True]
    """

    def __init__(self, pins: Sequence[Pin], pinned: Sequence[bool]) -> None:
        self._pins = pins
        self.pinned = list(pinned)  # one per key: whether any owner has it

    def close(self) -> None:
        """Release the blocks.

        >>> pin.close()
        """
        for pin in self._pins:
            pin.close()


def now_s() -> float:
    """The time of the monotonic clock."""
    return _CLOCK.monotonic_ns() / 1e9


def seconds_until(until_s: float) -> float:
    """How long it is until then; 0 if it is over."""
    return max(0.0, until_s - now_s())


def merged(key: bytes, each: Sequence[PutResult], copies: int) -> PutResult:
    """The result for a block with this many wanted copies, from the results of its puts."""
    good = [one for one in each if one.error is None]
    if len(good) < copies:
        taken = [one for one in each if one.has_block and one.error is not None]
        if taken and len(good) + len(taken) >= copies:
            return taken[0]
        for one in each:
            if one.error is not None:
                return one
        there = len(each)
        return PutResult(
            key, None, NodeUnavailable(f"{copies} copies are wanted, and {there} nodes are there.")
        )
    reached = [one.durability for one in good if one.durability is not None]
    return PutResult(
        key,
        min(reached, default=None),
        None,
        already_stored=all(one.already_stored for one in good),
        fired_ns=max(one.fired_ns for one in good),
        landed_ns=max(one.landed_ns for one in good),
        durable_ns=max(one.durable_ns for one in good),
    )
