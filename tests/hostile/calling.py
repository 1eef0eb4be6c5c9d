"""How attacks call a node: at its port, and with the given token."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

__all__ = ["Told", "all_at_once", "bearer", "call_all", "channel"]

Told = dict[str, Any]


def bearer(told: Told) -> tuple[tuple[str, str], ...]:
    """The metadata with the tenant's token."""
    token = told.get("token")
    return () if token is None else (("authorization", f"Bearer {token}"),)


def channel(told: Told, number: int = 0) -> grpc.Channel:
    """A connection of its own for each number."""
    return grpc.insecure_channel(f"127.0.0.1:{told['port']}", options=(("of_its_own", number),))


def call_all(calls: Iterable[tuple[Any, Any]], told: Told, done: dict[str, int]) -> None:
    """Make these calls one after the other, and count their statuses."""
    for call, request in calls:
        try:
            call(request, metadata=bearer(told), timeout=20)
            ended = "OK"
        except grpc.RpcError as error:
            ended = error.code().name
        done[ended] = done.get(ended, 0) + 1


def all_at_once(work: Callable[[str], None], names: list[str]) -> None:
    """Run the work once for each name, in parallel, and wait for all."""
    working = [threading.Thread(target=work, args=(name,)) for name in names]
    for one in working:
        one.start()
    for one in working:
        one.join()
