"""How each end of a gRPC connection detects that the other is gone though its TCP connection is not.

A process that is stopped, or whose host has vanished, closes nothing. Either end pings when it has received nothing for
`KEEPALIVE_MS`, and closes the connection when a ping is not answered within the same time: so a node holds the slots of
a lost client for twice that time. gRPC waits for the answer to any ping, including keepalive pings, for its own
`ping_timeout_ms`, a minute unless it is set: the keepalive's timeout alone ends nothing before that.

By default a server closes the connection (`too_many_pings`) of a client that pings more than twice within five minutes
while it sends nothing: so a node accepts pings at any interval. A flood of them is the connection guard's business.
"""

from __future__ import annotations

from kvstore.limits import KEEPALIVE_MS

__all__ = ["keepalive_options", "server_keepalive_options"]


def keepalive_options(interval_ms: int = KEEPALIVE_MS) -> tuple[tuple[str, int], ...]:
    """The options of a channel."""
    return (
        ("grpc.keepalive_time_ms", interval_ms),
        ("grpc.keepalive_timeout_ms", interval_ms),
        ("grpc.http2.ping_timeout_ms", interval_ms),
    )


def server_keepalive_options(interval_ms: int = KEEPALIVE_MS) -> tuple[tuple[str, int], ...]:
    """A server's options. It refuses no ping; after refusing one, gRPC spends 70 us on each later one, else 1.3."""
    return (*keepalive_options(interval_ms), ("grpc.http2.max_ping_strikes", 0))
