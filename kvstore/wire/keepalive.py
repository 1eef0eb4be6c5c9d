"""How each end of a gRPC connection detects that the other is gone though its TCP connection is not.

A process that is stopped, or whose host has vanished, closes nothing. Either end pings when it has received nothing for
`KEEPALIVE_MS`, and closes the connection when a ping is not answered within the same time: so a node holds the slots of
a lost client for twice that time. gRPC waits for the answer to any ping, including keepalive pings, for its own
`ping_timeout_ms`, a minute unless it is set: the keepalive's timeout alone ends nothing before that.
"""

from __future__ import annotations

from kvstore.limits import KEEPALIVE_MS

__all__ = ["keepalive_options"]


def keepalive_options(interval_ms: int = KEEPALIVE_MS) -> tuple[tuple[str, int], ...]:
    """The options of a channel or a server."""
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", interval_ms),
        ("grpc.http2.ping_timeout_ms", interval_ms),
    )
