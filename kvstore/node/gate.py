"""The gate: every call passes it, and comes out with a tenant or not at all.

What always holds: who calls is found out before anything of the request is looked at but the tenant that it names; a
refusal is an error of the tree with its own status, and is in the audit log; requests are counted before they are done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

from kvstore.errors import NotAuthenticated, TenantDenied
from kvstore.node.tenants import credentials_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from grpc.aio import ServicerContext

    from kvstore.node.audit import Audit
    from kvstore.node.tenants import Credentials, Tenant, Tenants

__all__ = ["Gate"]

_Context: TypeAlias = "ServicerContext[Any, Any]"


class Gate:
    """Who may do what."""

    def __init__(self, tenants: Tenants, audit: Audit) -> None:
        self.before: Callable[[], object] = lambda: None  # is done before each call
        self.tenants = tenants
        self.audit = audit

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
        try:
            tenant = self.tenants.caller(metadata, certificate).tenant(claimed)
        except (NotAuthenticated, TenantDenied) as error:
            self.audit.refused(what, tenant=claimed[:64], peer=peer, why=str(error))
            raise
        tenant.rate.take(max(1, requests))
        self.before()
        return tenant

    def credentials(self, context: _Context) -> Credentials:
        """By what a call that stays open was let in."""
        return credentials_of(context.invocation_metadata() or (), context.auth_context())

    def enter_with(self, what: str, context: _Context, requests: int = 1) -> Tenant | None:
        """The tenant whose connections the caller may use; None for any, on an open node."""
        tenant = self.enter(what, context, requests=requests)
        return None if self.tenants.is_open else tenant
