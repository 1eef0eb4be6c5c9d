"""Transports: how a client's blocks are carried to its node and back, chosen once, when the client first needs one.

| `transport` | Blocks go | It needs |
|---|---|---|
| `auto` | as with `fabric`, or as with `grpc` where there is no libfabric; that is logged once | |
| `fabric` | by RDMA, from and into registered memory, without a thread of the application | libfabric |
| `grpc` | over gRPC; the CPU copies them | |
| `memory` | within this process, to a `kvstore.testing.MemoryNode` | |

What always holds: every transport has the same calls, with the same blocks, flags and outcomes. Over a fabric `put` and
`arm` raise if attaching fails; over gRPC the results of the puts have the error.
What it doesn't do: `reserve` over gRPC, since slots are leased in memory that a fabric writes to. Nor does the choice
change later: a node that the fabric can't reach is an error, not a silent slow-down.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvstore.client.blocks import Block, Hit
    from kvstore.client.gets import Ended, EndedGet, Get
    from kvstore.client.grpc_gets import GrpcGet
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.transfer_watch import Watch
    from kvstore.durability import Durability
    from kvstore.layout import Layout
    from kvstore.miss import Miss
    from nic_offload.counter import Counter
    from nic_offload.flags import FlagWord

__all__ = ["Transport"]


class Transport(Protocol):
    """The calls of a transport. `Client` adds the defaults, and documents them."""

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None,
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        watch: Watch | None,
        attach_s: float | None,
    ) -> ArmedPuts:
        """As `Client.arm`, which calls `attach_s` its `timeout_s`."""
        ...

    def get(
        self, blocks: Sequence[Block], *, layout: Layout | None, timeout_s: float | None
    ) -> list[Hit | Miss]:
        """As `Client.get`."""
        ...

    def getting(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None,
        timeout_s: float | None,
        watch: Watch | None,
        ended: Ended | None,
    ) -> Get | GrpcGet | EndedGet:
        """As `Client.getting`."""
        ...
