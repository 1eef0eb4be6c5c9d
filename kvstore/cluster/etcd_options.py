"""How etcd is reached and with which credentials, from the node's settings; no etcd is needed to read them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvstore.config_files import read_file
from kvstore.errors import ConfigError
from kvstore.limits import CLUSTER_NAME_CHARACTERS_MAX, ETCD_ENDPOINTS_MAX
from kvstore.reach import split_target

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["EtcdReach"]


@dataclass(frozen=True, slots=True)
class EtcdReach:
    """The addresses of etcd, the credentials for it, and the cluster's name there."""

    endpoints: tuple[str, ...]
    cluster: str
    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None
    user: str | None = None
    password: Path | None = None  # a file

    def __post_init__(self) -> None:
        """Raise for invalid settings."""
        if not 1 <= len(self.endpoints) <= ETCD_ENDPOINTS_MAX:
            raise ConfigError(f"etcd has 1 to {ETCD_ENDPOINTS_MAX} endpoints, not {len(self.endpoints)}.")
        for endpoint in self.endpoints:
            split_target(endpoint)
        is_word = self.cluster.replace("-", "").replace("_", "").isalnum() and self.cluster.isascii()
        if not is_word or len(self.cluster) > CLUSTER_NAME_CHARACTERS_MAX:
            raise ConfigError(
                f"A cluster's name has letters, digits, - and _, {CLUSTER_NAME_CHARACTERS_MAX} at most."
            )
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("A certificate for etcd needs its key, and the key its certificate.")
        if self.certificate is not None and self.ca is None:
            raise ConfigError("A certificate for etcd is shown over TLS: give --cluster-ca as well.")
        if (self.user is None) != (self.password is None):
            raise ConfigError("A user of etcd needs the file with its password, and the file needs the user.")

    @classmethod
    def of(cls, text: str, **more: Any) -> EtcdReach:
        """`HOST:PORT[,HOST:PORT]/NAME`."""
        endpoints, slash, name = text.removeprefix("etcd://").partition("/")
        if not slash or not name:
            raise ConfigError(
                f"{text!r} names no cluster; write HOST:PORT[,HOST:PORT]/NAME, etcd's endpoints and the cluster's name."
            )
        return cls(tuple(one.strip() for one in endpoints.split(",")), name, **more)

    @property
    def folder(self) -> bytes:
        """The prefix of all of the cluster's records."""
        return b"/triggerkv/%s/" % self.cluster.encode()

    @property
    def history(self) -> bytes:
        """The prefix of the records of etcd's histories."""
        return self.folder + b"history/"

    @property
    def lots(self) -> bytes:
        """The prefix of the sessions' primacy records; not below `folder`, which every node follows."""
        return b"/triggerkv/%s.sessions/" % self.cluster.encode()

    @property
    def gone(self) -> bytes:
        """The prefix of nodes that have left for good, by their folders' names; not below `folder` either."""
        return b"/triggerkv/%s.gone/" % self.cluster.encode()

    def pem(self) -> tuple[bytes | None, bytes | None, bytes | None] | None:
        """Return the CA of etcd's certificate, our key and our certificate; None without TLS."""
        if self.ca is None:
            return None
        key = None if self.key is None else read_file(self.key)
        return read_file(self.ca), key, None if self.certificate is None else read_file(self.certificate)

    def secret(self) -> str:
        """The password."""
        return "" if self.password is None else read_file(self.password).decode(errors="replace").strip()
