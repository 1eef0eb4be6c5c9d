"""Arms puts of blocks at all of their owners, behind one flag.

`ClusterClient` finds the owners of a block by its key, `Nodes` those of a user's blocks (`user_owners`).

What always holds: one store to the flag fires all puts. While they wait for it they follow their owners
(`cluster_ahead`). A put's result is that of all owners together (`cluster_puts`).
What it doesn't do: decide which nodes own a block.
"""

from __future__ import annotations

from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.blocks import put_into
from kvstore.client.cluster_ahead import Ahead, ArmedAhead, PutPlaces
from kvstore.client.cluster_blocks import blocks_of
from kvstore.client.cluster_puts import ClusterPuts
from kvstore.client.transfer_watch import current_watch, watched_by
from kvstore.clock import SystemClock
from kvstore.limits import CLUSTER_FIRST_TRY_MS
from kvstore.names import UNSAID
from nic_offload.flags import FlagWord

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from kvstore.client.client import Client
    from kvstore.client.cluster_ahead import Roles
    from kvstore.client.cluster_blocks import ClusterBlock
    from kvstore.client.owner_calls import Owned, OwnerCalls
    from kvstore.client.puts import ArmedPuts
    from kvstore.cluster.map import Map
    from kvstore.durability import Durability
    from kvstore.errors import KvError
    from nic_offload.counter import Counter

__all__ = ["Arming", "Owners", "PutTerms"]

_CLOCK = SystemClock()


class Owners(NamedTuple):
    """The nodes that own blocks."""

    by_map: Callable[[Map, int], Sequence[str]]  # of the block at a place
    owned: Owned
    copies: int  # that are wanted of each block
    roles: Roles | None = None  # of a user's blocks: all are on the same nodes, which their home names
    domain: bytes = UNSAID  # of blocks without one whose keys are made for one
    home: Callable[[], str] | None = None  # of a user's blocks: their session watches the puts there only


class PutTerms(NamedTuple):
    """What a put asks for."""

    durability: Durability
    lease_ms: int
    expires_unix_ms: int
    call_s: float  # for a call to a node


class Arming:
    """The armed puts of one client. Safe to use from any thread."""

    def __init__(self, calls: OwnerCalls, current: Callable[[], Map]) -> None:
        """`current` gives the newest map."""
        self._calls, self._current = calls, current
        self._ahead = ArmedAhead(current)

    def arm(
        self,
        given: Sequence[ClusterBlock],
        keys: Sequence[bytes],
        flag: FlagWord | Counter | None,
        owners: Owners,
        terms: PutTerms,
    ) -> ClusterPuts:
        """As `ClusterClient.arm`."""
        context = copy_context()
        attach_s = min(terms.call_s, CLUSTER_FIRST_TRY_MS / 1000)
        deadline_ns = _CLOCK.monotonic_ns() + terms.lease_ms * 1_000_000

        def arm(
            client: Client,
            some: list[int],
            flag: FlagWord | Counter | None = flag,
            lease_ms: int = terms.lease_ms,
        ) -> ArmedPuts:
            is_watched = owners.home is not None and owners.home() == client.target
            with watched_by(current_watch() if is_watched else None):
                return client.arm(
                    put_into(blocks_of(client, [given[at] for at in some]), owners.domain, of_domains=True),
                    flag,
                    durability=terms.durability,
                    lease_ms=lease_ms,
                    expires_unix_ms=terms.expires_unix_ms,
                    timeout_s=attach_s,
                )

        def again(parts: Mapping[str, list[int]], at_once: bool) -> dict[str, ArmedPuts | KvError]:  # noqa: FBT001
            left_ms = max(1, (deadline_ns - _CLOCK.monotonic_ns()) // 1_000_000)
            late = partial(arm, flag=None if at_once else flag, lease_ms=left_ms)
            return context.run(self._calls.each, parts, late, lambda puts: puts.abandon())

        def threshold(at: int) -> int:
            return given[at].threshold

        ahead: Ahead | None = None
        armed = self._calls.of_owners(len(keys), owners.owned, arm, lambda puts: puts.abandon())
        word = flag if isinstance(flag, FlagWord) else None
        if (word is not None or owners.roles is not None) and self._current().revision:
            ahead = Ahead(
                word, deadline_ns, threshold, owners.by_map, again, self._calls.silent.suspect, owners.roles
            )
        places = PutPlaces(keys, armed, owners.copies, ahead)
        if ahead is not None:
            self._ahead.add(places)
        return ClusterPuts(keys, places, self._calls.silent, self._ahead.again)

    def close(self) -> None:
        """Stop following the map."""
        self._ahead.close()
