"""Erasing a user or a tenant: the calls, and a node's answer.

What always holds: when a call returns, the erased data is gone from that node's memory and drives, durably. A call ends
within its timeout, with an error if the erasure has not ended. Then the node stops where it is: keys that it has
destroyed stay destroyed, and a repeated call completes the erasure.
What it doesn't do: erase on other nodes of a cluster; `ClusterClient` does.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from kvstore.client.checks import check_name
from kvstore.errors import DeadlineExceeded
from kvstore.wire import erasing_pb2 as pb
from kvstore.wire import erasing_pb2_grpc

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    import grpc

    from kvstore.reach import Reach

__all__ = ["Erased", "ErasingCalls", "Erasure"]


@dataclass(frozen=True, slots=True)
class Erasure:
    """The result of an erasure on one node."""

    at_unix_ms: int
    blocks: int
    size_bytes: int  # of their records on the drives
    sessions: int
    keys: int  # destroyed; what was in the clear, or had another key, was overwritten: `how` in the receipt
    receipt: str  # one line of JSON, as it stands in the node's audit log
    node: str = ""  # its address


class Erased(NamedTuple):
    """Like the above; also returns what the node reports about itself."""

    erasure: Erasure
    digests: set[int]  # of its map; 0: it is in no cluster
    nodes: set[str]  # its name


class ErasingCalls:
    """The calls of one client. Any thread."""

    def __init__(
        self,
        channel: grpc.Channel,
        calling: Callable[[str], AbstractContextManager[None]],
        reach: Reach,
    ) -> None:
        self._stub = erasing_pb2_grpc.ErasingStub(channel)  # type: ignore[no-untyped-call]
        self._calling = calling
        self._tenant, self._node = reach.tenant, reach.node

    def user(self, user: str, timeout_s: float) -> Erased:
        """As `Client.erase_user`."""
        check_name("A user", user)
        request = pb.EraseUserRequest(tenant=self._tenant, user=user)
        with self._until_its_end("Erasing a user"):
            return _erased(self._node, self._stub.EraseUser(request, timeout=timeout_s).erased)

    def tenant(self, timeout_s: float) -> Erased:
        """As `Client.erase_tenant`."""
        request = pb.EraseTenantRequest(tenant=self._tenant)
        with self._until_its_end("Erasing a tenant"):
            return _erased(self._node, self._stub.EraseTenant(request, timeout=timeout_s).erased)

    @contextmanager
    def _until_its_end(self, doing: str) -> Iterator[None]:
        try:
            with self._calling(doing):
                yield
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"{error} It is not complete, though keys may be destroyed by now; repeat the call with a longer"
                " timeout, and it does the rest."
            ) from error


def _erased(node: str, answer: pb.Erased) -> Erased:
    erasure = Erasure(
        answer.at_unix_ms, answer.blocks, answer.bytes, answer.sessions, answer.keys, answer.receipt, node
    )
    return Erased(erasure, {answer.members_digest}, {answer.node})
