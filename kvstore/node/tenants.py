"""Tenants: how callers authenticate, for which tenant they act, and its limits.

A node without a tenants file is *open*: it listens on loopback only and believes a caller's claim. With one, every call
is authenticated, by a token (`authorization: Bearer ...`) or by a client certificate that the TLS handshake has
checked, and acts for that tenant and no other. The file (TOML):

    [acme]
    tokens_sha256 = ["9f86d0..."]        # `kvstore token` makes one; several while one replaces the other
    certificates = ["engine-1.acme"]     # names of hosts in client certificates (SAN dNSName; without any SAN, the CN)
    requests_per_s = 100_000             # blocks named, and at least one a call; 0 (the default) is no limit
    bytes = 500_000_000_000              # its blocks' maximum on the drives; 0 (the default) is no limit
    observer = true                      # at --http it sees all tenants' figures and sessions, and not only its own
    replicas = 2                         # on how many nodes of a cluster its blocks are kept (docs/cluster.md)

A node of the same cluster authenticates with the cluster's secret as its token. It is not a tenant and acts for none:
it may copy blocks, and make no other call.

What always holds: a tenant's name on the drive depends on the store's own secret, so two tenants share nothing, not
even the timing of look-ups; only digests of tokens are kept; an invalid file changes nothing.
What it doesn't do: count bytes (`kvstore.storage.quotas` does), or keep anything on the drive.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kvstore.config_files import read_toml
from kvstore.errors import ConfigError, NotAuthenticated, TenantDenied
from kvstore.limits import REPLICAS_MAX, TENANTS_MAX
from kvstore.names import TENANTS_NAME, is_tenant, tenant_name
from kvstore.node.rates import Rate

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from pathlib import Path

    from kvstore.clock import Clock

__all__ = ["Caller", "Credentials", "Tenant", "Tenants", "credentials_of", "token_digest"]

_DEFAULT: Final = "default"  # on an open node, for a caller that names no tenant
_NODE: Final = "(node)"  # no tenant's name
_BEARER: Final = "bearer "
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_HOSTS: Final = "peer_dns"  # gRPC's property for the host names among the alternative names
_ALTERNATIVE: Final = "x509_subject_alternative_name"  # alternative names of all types
_COMMON: Final = "x509_common_name"


def token_digest(token: str) -> str:
    """A token's digest, as in the tenants file."""
    return hashlib.sha256(token.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant of the node."""

    name: str
    id: bytes  # its name on the drive
    rate: Rate


@dataclass(frozen=True, slots=True)
class Credentials:
    """A caller's credentials; kept while its call stays open."""

    token_sha256: str | None
    names: tuple[str, ...]  # from the certificate that the handshake has checked


@dataclass(frozen=True, slots=True)
class _Entry:
    """A section of the file."""

    tokens_sha256: frozenset[str] = frozenset()
    certificates: frozenset[str] = frozenset()
    requests_per_s: int = 0
    bytes: int = 0
    observer: bool = False
    replicas: int = 0


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller: an authenticated tenant, a node of the cluster or, on an open node, any caller."""

    tenants: Tenants
    proved: str | None

    def check_node(self) -> None:
        """TenantDenied unless it is a node of the cluster."""
        if self.proved not in (None, _NODE):
            raise TenantDenied(
                "This needs the secret of the cluster's nodes (--cluster-secret) as the token, not a tenant's token."
            )

    def tenant(self, claimed: str) -> Tenant:
        """The caller's own tenant, TenantDenied if it claims another; on an open node, the claimed one."""
        if self.proved is None:
            return self.tenants.named(claimed or _DEFAULT)
        if self.proved == _NODE:
            raise TenantDenied(
                "The token is the secret of the cluster's nodes, which is for draining and forgetting nodes: give a"
                " tenant's token."
            )
        if claimed not in ("", self.proved):
            raise TenantDenied(f"The caller is {self.proved} and may not act for {claimed[:64]!r}.")
        return self.tenants.named(self.proved)


@dataclass(slots=True)
class Tenants:
    """All tenants of a node."""

    salt: bytes
    clock: Clock
    node_sha256: str | None = None  # of the cluster's secret
    _entries: Mapping[str, _Entry] | None = None  # None: the node is open
    _of_token: Mapping[str, str] = field(default_factory=dict)  # by digest
    _of_certificate: Mapping[str, str] = field(default_factory=dict)
    _known: dict[str, Tenant] = field(default_factory=dict)

    def load(self, path: Path) -> int:
        """Load the file, replacing the previous tenants; returns how many it has."""
        entries = _read(path)
        self._of_token = {one: name for name, entry in entries.items() for one in entry.tokens_sha256}
        self._of_certificate = {one: name for name, entry in entries.items() for one in entry.certificates}
        self._known = {name: tenant for name, tenant in self._known.items() if name in entries}
        for name, tenant in self._known.items():
            tenant.rate.limit(entries[name].requests_per_s)
        self._entries = entries
        return len(entries)

    def known(self) -> int:
        """How many tenants share the node. On an open node names are only claims, so all callers count as one."""
        return 1 if self._entries is None else len(self._entries)

    @property
    def is_open(self) -> bool:
        """Whether the node doesn't authenticate callers."""
        return self._entries is None

    def admits(self, credentials: Credentials, name: str) -> bool:
        """Whether these credentials still belong to this tenant, as the file may have been read again."""
        try:
            return self.of(credentials).proved in (None, name)
        except NotAuthenticated:
            return False

    def caller(
        self, metadata: Iterable[tuple[str, str | bytes]], certificate: Mapping[str, Iterable[bytes]]
    ) -> Caller:
        """Authenticate a caller by its call's metadata and its TLS certificate."""
        if self._entries is None:
            return Caller(self, None)
        return self.of(credentials_of(metadata, certificate))

    def of(self, credentials: Credentials) -> Caller:
        """The caller whose credentials these are."""
        if self._entries is None:
            return Caller(self, None)
        if credentials.token_sha256 is not None and credentials.token_sha256 == self.node_sha256:
            return Caller(self, _NODE)
        if credentials.token_sha256 is not None:
            name = self._of_token.get(credentials.token_sha256)
            if name is None:
                raise NotAuthenticated("The token does not belong to any tenant of this node.")
            return Caller(self, name)
        for one in credentials.names:
            if one in self._of_certificate:
                return Caller(self, self._of_certificate[one])
        if credentials.names:
            raise NotAuthenticated("The certificate does not belong to any tenant of this node.")
        raise NotAuthenticated("The call has no token; give the client one, as `token`.")

    def observes(self, name: str) -> bool:
        """Whether a tenant may see the figures of others. On an open node every tenant may."""
        return self._entries is None or (name in self._entries and self._entries[name].observer)

    def limited(self) -> list[str]:
        """The names of the tenants with a quota, sorted."""
        return sorted(name for name, entry in (self._entries or {}).items() if entry.bytes)

    def quotas(self) -> dict[bytes, int]:
        """The quotas in bytes, by the tenants' names on the drive."""
        entries = (self._entries or {}).items()
        return {tenant_name(name, self.salt): entry.bytes for name, entry in entries if entry.bytes}

    def placed_as(self, name: str) -> str:
        """The tenant's name as placement uses it: empty where the caller's credentials name the tenant."""
        return "" if self._entries is not None or name == _DEFAULT else name

    def names(self) -> dict[bytes, tuple[str, int]]:
        """By name on the drive: each known tenant's name, and its number of replicas."""
        if self._entries is None:
            return {tenant_name(name, self.salt): (name, 0) for name in (_DEFAULT, *self._known)}
        return {tenant_name(name, self.salt): (name, entry.replicas) for name, entry in self._entries.items()}

    def replicas(self, name: str) -> int:
        """A tenant's own number of replicas; 0 if it has none."""
        return ((self._entries or {}).get(name) or _Entry()).replicas

    def copied(self, name: str) -> Tenant:
        """The tenant whose blocks another node copies here; TenantDenied if the name is unknown."""
        if self._entries is not None and name not in self._entries:
            raise TenantDenied(f"There is no tenant {name[:64]!r}.")
        return self.named(name)

    def named(self, name: str) -> Tenant:
        """The tenant of this name. Its caller is authenticated, or the node is open."""
        tenant = self._known.get(name)
        if tenant is None:
            if not is_tenant(name):
                raise TenantDenied(TENANTS_NAME)
            if len(self._known) >= TENANTS_MAX:
                self._known.pop(next(iter(self._known)))  # on an open node callers can invent names
            entry = _Entry() if self._entries is None else self._entries[name]
            tenant = Tenant(name, tenant_name(name, self.salt), Rate(self.clock, entry.requests_per_s))
            self._known[name] = tenant
        return tenant


def credentials_of(
    metadata: Iterable[tuple[str, str | bytes]], certificate: Mapping[str, Iterable[bytes]]
) -> Credentials:
    """The credentials in a call's metadata and its TLS certificate."""
    token = _token(metadata)
    # The common name counts only without alternative names of any type: with one, it need not be a host's.
    kind = _HOSTS if any(certificate.get(_ALTERNATIVE) or ()) else _COMMON
    names = (one.decode("utf-8", "replace") for one in certificate.get(kind) or ())
    return Credentials(None if token is None else token_digest(token), tuple(names))


def _token(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    for key, value in metadata:
        if key == "authorization" and isinstance(value, str) and value.lower().startswith(_BEARER):
            return value[len(_BEARER) :].strip()
    return None


def _read(path: Path) -> dict[str, _Entry]:
    sections = read_toml(path)
    if not 1 <= len(sections) <= TENANTS_MAX:
        raise ConfigError(f"{path} has {len(sections)} tenants; a node has 1 to {TENANTS_MAX}.")
    entries = {name: _entry(path, name, section) for name, section in sections.items()}
    for kind in ("tokens_sha256", "certificates"):
        seen: set[str] = set()
        for name, entry in entries.items():
            if seen & getattr(entry, kind):
                raise ConfigError(f"{path}: one of the {kind} of {name} also belongs to another tenant.")
            seen |= getattr(entry, kind)
    return entries


def _entry(path: Path, name: str, section: Any) -> _Entry:
    where = f"{path}, [{name}]"
    if not is_tenant(name):
        raise ConfigError(f"{where}: {TENANTS_NAME}")
    if not isinstance(section, dict):
        raise ConfigError(f"{where} is not a table.")
    unknown = set(section) - set(_Entry.__slots__)
    if unknown:
        raise ConfigError(
            f"{where}: there is no setting {min(unknown)!r}; there are {', '.join(_Entry.__slots__)}."
        )
    tokens = _texts(where, section, "tokens_sha256")
    if any(_DIGEST.fullmatch(one) is None for one in tokens):
        raise ConfigError(
            f"{where}: tokens_sha256 are 64 hexadecimal digits each; `kvstore token` prints one."
        )
    certificates = _texts(where, section, "certificates")
    if not tokens | certificates:
        raise ConfigError(f"{where}: a tenant needs tokens_sha256 or certificates.")
    requests_per_s, bytes_max = (_limit(where, section, key) for key in ("requests_per_s", "bytes"))
    observer = section.get("observer", False)
    if not isinstance(observer, bool):
        raise ConfigError(f"{where}: observer is true or false; not {observer!r}.")
    replicas = section.get("replicas", 0)
    if type(replicas) is not int or not 0 <= replicas <= REPLICAS_MAX:
        raise ConfigError(f"{where}: replicas is 1 or {REPLICAS_MAX}; not {replicas!r}.")
    return _Entry(tokens, certificates, requests_per_s, bytes_max, observer, replicas)


def _limit(where: str, section: Mapping[str, Any], key: str) -> int:
    limit = section.get(key, 0)
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 0:
        raise ConfigError(f"{where}: {key} is a whole number, 0 for no limit; not {limit!r}.")
    return limit


def _texts(where: str, section: Mapping[str, Any], key: str) -> frozenset[str]:
    values = section.get(key, [])
    if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
        raise ConfigError(f"{where}: {key} is a list of texts.")
    return frozenset(values)
