"""Calls from one node of a cluster to another, which it authenticates by the cluster's secret.

What always holds: one channel for each node, closed when the node has left and calls to it have ended: gRPC cancels
calls of a channel that is closed, and with them their callers.
What it doesn't do: try a call again, or limit its time; its caller does.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvstore.limits import UPKEEP_CALL_MS
from kvstore.wire import upkeep_pb2_grpc
from kvstore.wire.keepalive import keepalive_options

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["Peers"]


class Peers:
    """Channels to other nodes."""

    def __init__(self, secret: str | None, credentials: grpc.ChannelCredentials | None) -> None:
        """`credentials`: for TLS."""
        self._credentials = credentials
        self.metadata = () if secret is None else (("authorization", f"Bearer {secret}"),)
        self._channels: dict[str, tuple[grpc.aio.Channel, Any]] = {}
        self._closing: set[asyncio.Future[None]] = set()

    def stub(self, node: str) -> Any:
        """The stub for the node at this address."""
        if node not in self._channels:
            options = (
                *keepalive_options(),
                ("grpc.enable_http_proxy", 0),
                ("grpc.max_reconnect_backoff_ms", 1000),
            )
            if self._credentials is None:
                channel = grpc.aio.insecure_channel(node, options=options)
            else:
                channel = grpc.aio.secure_channel(node, self._credentials, options=options)
            stub = upkeep_pb2_grpc.UpkeepStub(channel)  # type: ignore[no-untyped-call]
            self._channels[node] = channel, stub
        return self._channels[node][1]

    def keep(self, nodes: Iterable[str]) -> None:
        """Close channels to nodes that have left."""
        for node in self._channels.keys() - set(nodes):
            channel, _ = self._channels.pop(node)
            closing = asyncio.ensure_future(channel.close(UPKEEP_CALL_MS / 1000))  # no call takes longer
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Close all channels, those to nodes that are members too."""
        for channel, _ in self._channels.values():
            await channel.close()
        self._channels.clear()
