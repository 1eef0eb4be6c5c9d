"""The gRPC transport: puts and gets of registered memory where there is no fabric.

Memory, flags and counters are those of the C core's provider `memory`, which needs no libfabric. The CPU copies the
bytes: in the caller's thread for `get`, in one of a few threads for everything else.

What always holds: the guarantees of `kvstore.client.transport`; a batch that the fabric would refuse is refused here.
If the node has no memory for a block, the put or get is retried until its deadline.
What it doesn't do: attach. Each put or get finds out by itself that a node is away.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import TYPE_CHECKING

from kvstore.client.blocks import hold_regions, put_into
from kvstore.client.checks import (
    are_pieces,
    check_armed,
    check_gets,
    check_lease,
    check_number,
    checked_timeout,
)
from kvstore.client.grpc_gets import GrpcGet, get_inside
from kvstore.client.grpc_puts import GrpcPuts
from kvstore.client.link import ARMED_BLOCKS_MAX
from kvstore.clock import SystemClock
from kvstore.errors import Closed, InvalidArgument
from kvstore.limits import BATCH_BLOCKS_MAX, GET_BLOCKS_MAX, GRPC_TRANSFERS_AT_ONCE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kvstore.client.blocks import Block, Hit
    from kvstore.client.core import Core
    from kvstore.client.gets import Ended
    from kvstore.client.grpc_blocks import InlineCalls
    from kvstore.client.puts import ArmedPuts
    from kvstore.client.transfer_watch import Watch
    from kvstore.durability import Durability
    from kvstore.layout import Layout
    from kvstore.miss import Miss
    from nic_offload.counter import Counter
    from nic_offload.flags import FlagWord

__all__ = ["GrpcTransport"]

_CLOCK = SystemClock()
_EXPIRES = "The time at which a block expires"


class GrpcTransport:
    """The gRPC transport of a client. Safe to use from any thread."""

    def __init__(self, core: Core, inline: InlineCalls) -> None:
        self._core, self._inline = core, inline
        self._here = threading.local()
        self._threads = ThreadPoolExecutor(
            GRPC_TRANSFERS_AT_ONCE, "kvstore-grpc", initializer=lambda: setattr(self._here, "is_ours", True)
        )

    def arm(
        self,
        blocks: Sequence[Block],
        flag: FlagWord | Counter | None,
        durability: Durability,
        lease_ms: int,
        expires_unix_ms: int,
        watch: Watch | None,
        attach_s: float | None,  # noqa: ARG002 - nothing is attached
    ) -> ArmedPuts:
        """As `Client.arm`."""
        core = self._core
        blocks = put_into(blocks, core.reach.domain)
        check_armed(core.open_fabric, blocks, ARMED_BLOCKS_MAX, core.block_bytes_max)
        check_lease(lease_ms, "A put waits for its flag")
        check_number(_EXPIRES, expires_unix_ms, 64)
        deadline_ns = _CLOCK.monotonic_ns() + lease_ms * 1_000_000
        return GrpcPuts(
            core, self._inline, blocks, durability, flag, deadline_ns, expires_unix_ms, self._submit, watch
        )

    def get(
        self, blocks: Sequence[Block], *, layout: Layout | None, timeout_s: float | None
    ) -> list[Hit | Miss]:
        """As `Client.get`."""
        check_gets(self._core.open_fabric, blocks, GET_BLOCKS_MAX)
        until_ns = self._until_ns(timeout_s)
        with hold_regions(blocks):
            return list(get_inside(self._inline, blocks, self._fingerprint(layout), until_ns))

    def getting(
        self,
        blocks: Sequence[Block],
        *,
        layout: Layout | None,
        timeout_s: float | None,
        watch: Watch | None,  # noqa: ARG002 - a stream of gets carries no session's name
        ended: Ended | None,
    ) -> GrpcGet:
        """As `Client.getting`."""
        if are_pieces(blocks):
            raise InvalidArgument("A block of pieces can't be fetched in the background: use `get`.")
        check_gets(self._core.open_fabric, blocks, BATCH_BLOCKS_MAX)
        return GrpcGet(
            self._inline,
            blocks,
            self._fingerprint(layout),
            self._until_ns(timeout_s),
            self._submit,
            ended,
        )

    def close(self) -> None:
        """Wait for the threads, whose calls have ended with the channel."""
        self._threads.shutdown(wait=not hasattr(self._here, "is_ours"))  # a callback may close the client

    def _submit(self, work: Callable[[], None]) -> None:
        try:
            self._threads.submit(copy_context().run, work)
        except RuntimeError:
            raise Closed("The client is closed.") from None

    def _fingerprint(self, layout: Layout | None) -> bytes:
        return self._core.fingerprint if layout is None else layout.fingerprint

    def _until_ns(self, timeout_s: float | None) -> int:
        timeout_s = self._core.reach.get_timeout_s if timeout_s is None else timeout_s
        return _CLOCK.monotonic_ns() + int(checked_timeout(timeout_s) * 1e9)
