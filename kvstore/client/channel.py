"""The gRPC channel to a node: plain on loopback, or over TLS, with the tenant's token on every call, and its trace."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc

from kvstore.limits import CHANNEL_CLOSE_MS
from kvstore.reach import credentials_of, token_of
from kvstore.wire.keepalive import keepalive_options

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvstore.reach import Reach

__all__ = ["close_channel", "open_channel"]

_CONNECT_TIMEOUT = "grpc.min_reconnect_backoff_ms"  # in spite of its name; 20 s by default
_OPTIONS = (
    *keepalive_options(),
    (
        "grpc.enable_http_proxy",
        0,
    ),  # neither the fabric nor `contact` can use a proxy
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 250),
    ("grpc.dns_min_time_between_resolutions_ms", 1_000),  # a node that moved is found again; 30 s by default
)


def open_channel(reach: Reach, header: Callable[[], tuple[str, str] | None] | None = None) -> grpc.Channel:
    """Open a channel; no call is made yet. `header` returns an additional header for each call, if any."""
    credentials = credentials_of(reach)
    options = (*_OPTIONS, (_CONNECT_TIMEOUT, reach.connect_timeout_ms))
    if credentials is None:
        channel = grpc.insecure_channel(reach.node, options=options)
    else:
        channel = grpc.secure_channel(reach.node, credentials, options=options)
    said: list[Callable[[], tuple[str, str] | None]] = []
    if (token := token_of(reach)) is not None:
        bearer = ("authorization", f"Bearer {token}")
        said.append(lambda: bearer)
    if header is not None:
        said.append(header)
    return grpc.intercept_channel(channel, *map(_Saying, said)) if said else channel


def close_channel(channel: grpc.Channel) -> None:
    """End a channel and its calls, within `CHANNEL_CLOSE_MS`.

    gRPC waits without a deadline for each call to end, and a call that an exception (such as a signal handler's)
    interrupted while it was being made never does.
    """
    closing = threading.Thread(target=channel.close, name="kvstore-close", daemon=True)
    closing.start()
    closing.join(CHANNEL_CLOSE_MS / 1000)


class _Details(
    grpc.ClientCallDetails,
):
    """A call's details, with one more header."""

    def __init__(self, asked: Any, header: tuple[str, str]) -> None:
        self.method = asked.method
        self.timeout = asked.timeout
        self.metadata = (*(asked.metadata or ()), header)
        self.credentials = asked.credentials
        self.wait_for_ready = getattr(asked, "wait_for_ready", None)
        self.compression = getattr(asked, "compression", None)


class _Saying(
    grpc.UnaryUnaryClientInterceptor,
    grpc.UnaryStreamClientInterceptor,
    grpc.StreamUnaryClientInterceptor,
    grpc.StreamStreamClientInterceptor,
):
    """Adds a header to every call of any kind, if there is one at that moment."""

    def __init__(self, header: Callable[[], tuple[str, str] | None]) -> None:
        self._header = header

    def _with_header(self, go_on: Callable[[Any, Any], Any], details: Any, request: Any) -> Any:
        header = self._header()
        return go_on(details if header is None else _Details(details, header), request)

    intercept_unary_unary: Any = _with_header
    intercept_unary_stream: Any = _with_header
    intercept_stream_unary: Any = _with_header
    intercept_stream_stream: Any = _with_header
