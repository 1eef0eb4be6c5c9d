"""Authorization: the `Gate` gives each call its tenant, or refuses it.

What always holds: the caller is authenticated before anything in the request but the tenant's name is looked at. A
refusal is an error of the tree with its own status, and is in the audit log. Requests are counted before they are
executed. An open call is ended by `recheck` once its credentials admit nobody any more.
"""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from kvstore.errors import NotAuthenticated, Overloaded, TenantDenied
from kvstore.limits import OPEN_CALLS_MAX
from kvstore.node.fair import Places
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
}  # calls that nodes of the cluster make, who make no others

_Context: TypeAlias = "ServicerContext[Any, Any]"


class Gate:
    """Who may do what."""

    def __init__(self, tenants: Tenants, audit: Audit) -> None:
        self.before: Callable[[], object] = lambda: None  # is done before each call
        self.let_in: Callable[[str], object] = lambda _: None  # hears the peer of each call that is let in
        self.turned_away: Callable[[str], object] = lambda _: None  # and of each that is not
        self.stands_still: Callable[[str], object] = lambda _: (
            None
        )  # and of each that does not take its answer
        self.presses: Callable[[str], object] = lambda _: (
            None
        )  # and of each whose call could not wait its turn
        self.brought: Callable[[str, int], object] = lambda *_: None  # the peer and the size of each message
        self.floods: Callable[[str], object] = lambda _: None  # and of each whose call has too much metadata
        self.heard: Callable[[bytes], object] = lambda _: None  # and the tenant that it is for
        self.tenants = tenants
        self.audit = audit
        self._open = Places(OPEN_CALLS_MAX, tenants.known)
        self._staying: dict[asyncio.Timeout, tuple[Credentials, str | None]] = {}

    def enter(self, what: str, context: _Context, claimed: str = "", requests: int = 1) -> Tenant:
        """The tenant for whom the call is done; NotAuthenticated, TenantDenied or Overloaded."""
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
        """The same for a caller who doesn't come over gRPC."""
        _, tenant = self._let_in(what, metadata, certificate, peer, claimed)
        assert tenant is not None, "a node's call enters by enter_node"
        self.heard(tenant.id)
        tenant.rate.take(max(1, requests))
        self.before()
        return tenant

    def enter_operator(self, what: str, context: _Context) -> None:
        """Who calls has the cluster's secret, or the node is open; NotAuthenticated or TenantDenied."""
        assert what in _OF_NODES
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        self._let_in(what, metadata, certificate, context.peer(), "")

    def enter_node(self, what: str, context: _Context, tenant: str) -> Tenant:
        """The tenant whose blocks a node of the cluster brings; NotAuthenticated or TenantDenied."""
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
        """Authenticate whose call's message is still to come, from here on its connection may bring it; say whose."""
        metadata, certificate = context.invocation_metadata() or (), context.auth_context()
        caller, _ = self._let_in(what, metadata, certificate, context.peer(), "")
        return caller.proved

    def credentials(self, context: _Context) -> Credentials:
        """By what a call that stays open was let in."""
        return credentials_of(context.invocation_metadata() or (), context.auth_context())

    @contextmanager
    def staying(self, what: str, context: _Context) -> Iterator[asyncio.Timeout]:
        """Authenticate whose call stays open; `recheck` ends what is done under the scope that this gives.

        Overloaded if the tenant has as many open as it may.
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
        """End what stays open though its caller would not be let in now: the file was read again."""
        now_s = asyncio.get_running_loop().time()
        for scope, (credentials, name) in self._staying.items():
            if name is not None and not scope.expired() and not self.tenants.admits(credentials, name):
                scope.reschedule(now_s)

    def refused(self, what: str, context: _Context, why: str) -> None:
        """Write down that a call was refused though its caller may be here."""
        try:
            tenant = self.tenants.of(self.credentials(context)).proved or ""
        except NotAuthenticated:
            tenant = ""
        self.audit.refused(what, tenant=tenant, peer=context.peer(), why=why)

    def enter_with(self, what: str, context: _Context, requests: int = 1) -> Tenant | None:
        """The tenant whose connections the caller may use; None for any, on an open node."""
        tenant = self.enter(what, context, requests=requests)
        return None if self.tenants.is_open else tenant
