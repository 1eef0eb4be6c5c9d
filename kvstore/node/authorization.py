"""Authorization: the `Gate` finds the tenant of each call, or refuses the call.

What always holds: the caller is authenticated before anything in the request except the tenant's name is read. A
refusal is an error of the tree with its own status, and is written to the audit log. Requests are counted before they
are executed. `recheck` ends an open call whose credentials are no longer valid.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvstore.errors import NotAuthenticated, Overloaded, TenantDenied
from kvstore.limits import OPEN_CALLS_MAX
from kvstore.node.fair_queue import Places
from kvstore.node.tenants import credentials_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from grpc.aio import ServicerContext

    from kvstore.node.audit import Audit
    from kvstore.node.tenants import Caller, Credentials, Tenant, Tenants

__all__ = ["Gate"]

_OF_NODES: Final = {
    "offer",
    "copy",
    "drain",
    "forget",
    "take sessions",
    "send sessions",
    "take session",
    "follow sessions",
    "copy sessions",
    "delete copies",
}  # calls reserved for the cluster's nodes, which may make no others

_Context: TypeAlias = "ServicerContext[Any, Any]"


class Gate:
    """Decides which calls are allowed. Its hooks are called with the peer, except as noted."""

    def __init__(self, tenants: Tenants, audit: Audit) -> None:
        self.before: Callable[[], object] = lambda: None  # called before each call
        self.let_in: Callable[[str], object] = lambda _: None  # a call was allowed
        self.turned_away: Callable[[str], object] = lambda _: None  # a call was refused
        self.reads_nothing: Callable[[str], object] = lambda _: None  # a caller does not read its answer
        self.repeats: Callable[[str], object] = lambda _: None  # a call was not begun: overload, or cancelled
        self.brought: Callable[[str, int], object] = lambda *_: None  # with the size of a message
        self.floods: Callable[[str], object] = lambda _: None  # a call had too much metadata
        # Whether a peer's connection has been closed; with what finds the peer.
        self.has_closed: Callable[[Callable[[], str]], bool] = lambda _: False
        self.on_call: Callable[[bytes], object] = lambda _: None  # with the tenant's id: it made a call
        self.tenants = tenants
        self.audit = audit
        self._open = Places(OPEN_CALLS_MAX, tenants.known)
        self._staying: dict[asyncio.Timeout, tuple[Credentials, str | None]] = {}

    def enter(self, what: str, context: _Context, claimed: str = "", requests: int = 1) -> Tenant:
        """The tenant of a call. Raises NotAuthenticated, TenantDenied or Overloaded."""
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        return self.admit(what, metadata, certificate, context.peer(), claimed, requests)

    def admit(
        self,
        what: str,
        metadata: Iterable[tuple[str, str | bytes]],
        certificate: Mapping[str, Iterable[bytes]],
        peer: str,
        claimed: str = "",
        requests: int = 1,
    ) -> Tenant:
        """Like `enter`, for a call that did not arrive over gRPC."""
        _, tenant = self._let_in(what, metadata, certificate, peer, claimed)
        assert tenant is not None, "a node's call enters by enter_node"
        self.on_call(tenant.id)
        tenant.rate.take(max(1, requests))
        self.before()
        return tenant

    def enter_operator(self, what: str, context: _Context) -> None:
        """Require the cluster's secret, unless the node is open. Raises NotAuthenticated or TenantDenied."""
        assert what in _OF_NODES
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        self._let_in(what, metadata, certificate, context.peer(), "")

    def enter_node(self, what: str, context: _Context, tenant: str) -> Tenant:
        """The tenant whose blocks another node copies here. Raises NotAuthenticated or TenantDenied."""
        assert what in _OF_NODES
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        self._let_in(what, metadata, certificate, context.peer(), "")
        try:
            named = self.tenants.copied(tenant)
        except TenantDenied as error:
            self.audit.refused(what, tenant=tenant[:64], peer=context.peer(), why=str(error))
            raise
        self.before()
        return named

    def _let_in(
        self,
        what: str,
        metadata: Iterable[tuple[str, str | bytes]],
        certificate: Mapping[str, Iterable[bytes]],
        peer: str,
        claimed: str,
    ) -> tuple[Caller, Tenant | None]:
        try:
            caller, tenant = self.tenants.caller(metadata, certificate), None
            if what in _OF_NODES:
                caller.check_node()
            else:
                tenant = caller.tenant(claimed)
        except (NotAuthenticated, TenantDenied) as error:
            self.audit.refused(what, tenant=claimed[:64], peer=peer, why=str(error))
            self.turned_away(peer)
            raise
        self.let_in(peer)
        return caller, tenant

    def begins(self, what: str, context: _Context) -> str | None:
        """Authenticate a caller before its message is read; returns the tenant's name, None on an open node."""
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        caller, _ = self._let_in(what, metadata, certificate, context.peer(), "")
        return caller.proved

    def credentials(self, context: _Context) -> Credentials:
        """The credentials of a call."""
        return credentials_of(context.invocation_metadata() or (), context.auth_context())

    @contextmanager
    def staying(self, what: str, context: _Context) -> Iterator[asyncio.Timeout]:
        """Authenticate the caller of a long call. `recheck` cancels the scope that this yields.

        Raises Overloaded if the tenant has too many calls open.
        """
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        caller, _ = self._let_in(what, metadata, certificate, context.peer(), "")
        if not self._open.left(caller.proved):
            raise Overloaded("The tenant has as many calls open as its share of the node's.")
        self._open.take(caller.proved)
        scope = asyncio.timeout(None)
        self._staying[scope] = (credentials_of(metadata, certificate), caller.proved)
        try:
            yield scope
        finally:
            del self._staying[scope]
            self._open.give_back(caller.proved)

    def recheck(self) -> None:
        """End open calls whose callers would be refused now; called after the tenants file was read again."""
        now_s = asyncio.get_running_loop().time()
        for scope, (credentials, name) in self._staying.items():
            if name is not None and not scope.expired() and not self.tenants.admits(credentials, name):
                scope.reschedule(now_s)

    def refused(self, what: str, context: _Context, why: str) -> None:
        """Record in the audit log that a call of an authorized caller was refused."""
        try:
            tenant = self.tenants.of(self.credentials(context)).proved or ""
        except NotAuthenticated:
            tenant = ""
        self.audit.refused(what, tenant=tenant, peer=context.peer(), why=why, is_proved=tenant != "")

    def enter_with(self, what: str, context: _Context, requests: int = 1) -> Tenant | None:
        """The tenant whose connections the caller may use; None for any, on an open node."""
        tenant = self.enter(what, context, requests=requests)
        return None if self.tenants.is_open else tenant
