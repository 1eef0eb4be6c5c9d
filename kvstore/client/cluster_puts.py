"""What `ClusterClient.arm` and `ClusterClient.pin` return: the puts to all owners of blocks, and their pins.

What always holds: a block's result is that of all its owners: a put succeeds once as many have the block as copies are
wanted, and fails with `KeyTaken` if an owner that answered has another block under the key.
"""

from __future__ import annotations

import threading
from contextlib import ExitStack
from itertools import chain
from typing import TYPE_CHECKING

from kvstore.client.arguments import checks_arguments
from kvstore.client.blocks import PutResult
from kvstore.clock import SystemClock
from kvstore.errors import DeadlineExceeded, FabricError, NodeUnavailable
from kvstore.limits import CLUSTER_LAST_COPY_MS, CLUSTER_PUTS_SLICE_MS, SESSIONS_RETRY_MS
from nic_offload.handle import Handle
from nic_offload.made_by import made_by

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.block_calls import Pin
    from kvstore.client.cluster_ahead import PutPlaces
    from kvstore.client.silent_nodes import SilentNodes

__all__ = ["ClusterPin", "ClusterPuts", "merged", "now_s", "seconds_until", "stream_broke"]

_CLOCK = SystemClock()
_LOOK_S = CLUSTER_PUTS_SLICE_MS / 1000
_LAST_COPY_S = CLUSTER_LAST_COPY_MS / 1000


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
        places: PutPlaces,
        silent: SilentNodes,
        again: Callable[[PutPlaces], None],
    ) -> None:
        """`again` has puts that have ended follow their owners."""
        self._keys, self._places, self._silent, self._again = keys, places, silent, again
        self._confirmed: list[PutResult] | None = None  # of a user's blocks: that all owners have them
        # When a block was first seen to have its result while the put of another copy still read it.
        self._read_since_s: dict[int, float] = {}

    @property
    def has_ended(self) -> bool:
        """Whether every put has ended."""
        return self._places.has_ended

    def wait(self, timeout_s: float) -> list[PutResult]:
        """As `ArmedPuts.wait`: one result for each block, for all its owners.

        Once each block has enough copies, it waits a moment longer for the other puts, and then ends them: after a
        block's result nothing reads its source.

        >>> [result.error for result in puts.wait(timeout_s=10)]
        [None]
        """
        end_s = now_s() + timeout_s
        while self._confirmed is None:
            self._wait(end_s)
            with self._places.lock:
                names, results = self._places.names, self._now()
                for at in self._places.still_read(results):
                    results[at] = _still_read(results[at])
                if self._places.roles is None:
                    self._places.note_results(results)
                    return results
            if (is_over := self._is_confirmed(names, results, end_s)) is None:
                continue
            with self._places.lock:
                if not is_over:
                    results = [_unconfirmed(one) for one in results]
                self._places.note_results(results)
            return results
        return list(self._confirmed)

    def _is_confirmed(self, names: dict[str, str], results: list[PutResult], end_s: float) -> bool | None:
        """Whether these nodes had to have the blocks after they had them; None: others have to, or puts go on."""
        roles = self._places.roles
        assert roles is not None, "the blocks have owners that a home names"
        if all(one.error is not None for one in results):
            return True  # nothing to confirm
        while left_s := seconds_until(end_s):
            if (now := roles.ask(left_s)) is None:
                threading.Event().wait(min(left_s, SESSIONS_RETRY_MS / 1000))
            elif now == names:
                if all(one.error is None for one in results):
                    self._confirmed = results
                return True
            else:
                self._again(self._places)
                return None if self._places.is_following else False
            if self._places.names != names:
                return None
        return False

    def _wait(self, until_s: float) -> None:
        """Wait until the puts have ended, or enough of them."""
        enough_s = until_s  # when those that are not needed are ended
        is_enough = False
        with ExitStack() as watched:
            watches: set[str] = set()
            while True:
                ends_s = min(until_s, enough_s)
                pending = self._places.open_parts()
                if watches != pending.keys():
                    watches = set(pending)
                    watched.close()
                    watched.enter_context(self._silent.waiting(list(pending)))
                for puts in chain.from_iterable(pending.values()):
                    puts.wait(min(seconds_until(ends_s), _LOOK_S))
                if not pending:
                    self._places.wait_for_owners(min(seconds_until(ends_s), _LOOK_S))
                if self._places.has_ended:
                    return
                with self._places.lock:
                    results = self._now()
                if not is_enough and all(one.error is None for one in results):
                    is_enough, enough_s = True, now_s() + _LAST_COPY_S
                has_waited = is_enough and not seconds_until(enough_s)
                self._release(results, at_once=has_waited)
                if has_waited or not seconds_until(until_s):
                    return

    def _release(self, results: Sequence[PutResult], *, at_once: bool) -> None:
        """End the puts that still read blocks which have had their results for a while, or all such puts.

        The caller may overwrite a block after its result, and a slow owner must not get the new bytes under its key.
        """
        now, since_s = now_s(), self._read_since_s
        self._read_since_s = {at: since_s.get(at, now) for at in self._places.still_read(results)}
        over = {at for at, since in self._read_since_s.items() if at_once or now >= since + _LAST_COPY_S}
        if over:
            self._places.release(over)

    def _now(self) -> list[PutResult]:
        each = self._places.each()
        copies = self._places.copies
        return [merged(key, some, copies) for key, some in zip(self._keys, each, strict=True)]

    def wait_landed(self, timeout_s: float) -> bool:
        """As `ArmedPuts.wait_landed`.

        >>> puts.wait_landed(timeout_s=10)
        True
        """
        until_s = now_s() + timeout_s
        while not self._places.have_landed():
            if not seconds_until(until_s):
                return False
            for puts in chain.from_iterable(self._places.open_parts().values()):
                puts.wait_landed(min(seconds_until(until_s), _LOOK_S))
            self._places.wait_for_owners(min(seconds_until(until_s), _LOOK_S))
        return True

    def cancel(self) -> int:
        """Withdraw the puts that have not been sent, to all owners; returns how many. The others stay where they are.

        >>> puts.cancel()  # nothing is left to withdraw
        0
        """
        unarmed = self._places.stop(FabricError("The put was cancelled before it was sent."))
        return unarmed + sum(puts.cancel() for puts in self._places.all_parts())

    def abandon(self) -> None:
        """As `ArmedPuts.abandon`: when this returns, nothing reads the sources any more.

        >>> puts.abandon()
        """
        self._places.stop(FabricError("The put was cancelled before it was sent."))
        for puts in self._places.all_parts():
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
    """Seconds until a time; 0 if it has passed."""
    return max(0.0, until_s - now_s())


def stream_broke(node: str) -> NodeUnavailable:
    """The error of blocks whose stream ended before them."""
    return NodeUnavailable(f"The stream to {node} broke before this block.")


def _still_read(result: PutResult) -> PutResult:
    """The result of a put for which there is enough, while a put to another owner reads its source."""
    late = DeadlineExceeded("A put to another owner of the block still reads it; it continues.")
    return PutResult(result.key, None, late)


def _unconfirmed(result: PutResult) -> PutResult:
    """The result of a put whose owners the user's home has not confirmed: its source is in use."""
    if result.error is not None:
        return result
    late = DeadlineExceeded(
        "The nodes have the block, and the user's home has not confirmed that they are the right ones."
        " Wait again, or put it again."
    )
    return PutResult(result.key, None, late)


def merged(key: bytes, each: Sequence[PutResult], copies: int) -> PutResult:
    """The result for a block with this many wanted copies, from the results of its puts."""
    good = [one for one in each if one.error is None]
    taken = [one for one in each if one.has_block and one.error is not None]
    # Even if enough owners have this block: a get from the others would return another one.
    if taken and len(good) + len(taken) >= copies:
        return taken[0]
    if len(good) < copies:
        bad = [one for one in each if one.error is not None]
        if bad:
            late = [one for one in bad if isinstance(one.error, DeadlineExceeded)]
            # A put that may still succeed is not reported as failed, nor one that can't as under way.
            final = late if len(good) + len(late) >= copies else [one for one in bad if one not in late]
            one = (final or bad)[0]
            # The source is in use until all of them have landed.
            return one if all(other.landed_ns for other in each) else one._replace(landed_ns=0)
        there = len(each)
        return PutResult(
            key, None, NodeUnavailable(f"{copies} copies are required, and {there} nodes are available.")
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
