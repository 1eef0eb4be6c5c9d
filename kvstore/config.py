"""The node's settings: one frozen, typed record, and one parser for what people write.

Nothing else in the store reads an environment variable or a configuration file.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kvstore.cluster.etcd_options import EtcdReach
from kvstore.config_files import read_file
from kvstore.endpoints import is_wildcard
from kvstore.errors import ConfigError
from kvstore.limits import (
    DRIVE_CAPACITY_BYTES_DEFAULT,
    DRIVE_CAPACITY_BYTES_MAX,
    DRIVE_CAPACITY_BYTES_MIN,
    HOT_BYTES_DEFAULT,
    HOT_BYTES_MIN,
    PORT_MAX,
    REPLICAS_MAX,
    SIZE_BYTES_MAX,
    UPKEEP_SECRET_BYTES_MIN,
    ZONE_CHARACTERS_MAX,
)
from kvstore.reach import split_target
from kvstore.storage.eviction.policies import POLICY_DEFAULT, check_policy_name
from nic_offload.errors import shown

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvstore.endpoints import Ports
    from kvstore.node.fabric_address import Network

__all__ = [
    "ClusterConfig",
    "DriveSpec",
    "EventsConfig",
    "NodeConfig",
    "UpkeepConfig",
    "counted",
    "environment",
    "parse_drive",
    "parse_listen",
    "parse_size",
    "printable",
    "show_size",
    "show_time",
    "shown_apart",
    "silence_grpc",
    "variables",
]

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGTP]?)(i?)B?", re.IGNORECASE)
_OTHERS = 0o007  # permissions of users other than the owner and the group
_OF_ETCD = {"_cert": "certificate"}
_COLLECTOR = re.compile(r"https?://([\w.-]+|\[[0-9a-fA-F:.]+\]):\d{1,5}/?", re.ASCII)


class DriveSpec(NamedTuple):
    """A drive as an operator names it: a file or a block device. The capacity is for a file that must be created."""

    path: Path
    capacity_bytes: int | None = None


class EventsConfig(NamedTuple):
    """Where KV events are published over ZeroMQ, where they can be requested again, and in which format."""

    endpoint: str
    replay: str | None = None
    as_arrays: bool = False


class UpkeepConfig(NamedTuple):
    """How a node maintains replicas: how many, and its credentials for the other nodes."""

    replicas: int  # for tenants whose section sets none
    secret_path: Path | None = None
    nodes_ca: Path | None = None  # the CA of the nodes' certificates

    @property
    def is_secret_open(self) -> bool:
        """Whether users other than its owner and group can read or write the file with the secret."""
        return self.secret_path is not None and bool(self.secret_path.stat().st_mode & _OTHERS)

    @property
    def secret(self) -> str | None:
        """The secret shared by the nodes of the cluster."""
        if self.secret_path is None:
            return None
        secret = read_file(self.secret_path).decode("ascii", "replace").strip()
        if len(secret) < UPKEEP_SECRET_BYTES_MIN or not secret.isascii() or not secret.isprintable():
            raise ConfigError(
                f"{self.secret_path} has no secret: it must be at least {UPKEEP_SECRET_BYTES_MIN} ASCII characters."
            )
        return secret

    @property
    def ca(self) -> bytes | None:
        """The CA's certificates, PEM."""
        return None if self.nodes_ca is None else read_file(self.nodes_ca)


class ClusterConfig(NamedTuple):
    """A node's membership of a cluster: where etcd is, and the address given to clients."""

    etcd: EtcdReach
    address: str | None = None
    upkeep: UpkeepConfig | None = None
    zone: str = ""  # nodes that fail together with this one

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ClusterConfig | None:
        """Made from the options' values, by their names after `cluster`; None if `cluster` itself is not set."""
        given = {name: value for name, value in values.items() if name and value is not None}
        if values[""] is None:
            if given:
                raise ConfigError(f"--cluster{min(given).replace('_', '-')} needs --cluster.")
            return None
        address = given.pop("_address", None)
        if address is not None:
            split_target(address)
        zone = given.pop("_zone", "")
        if len(zone) > ZONE_CHARACTERS_MAX or not zone.isprintable():
            raise ConfigError(f"--cluster-zone has at most {ZONE_CHARACTERS_MAX} printable characters.")
        replicas = given.pop("_replicas", None)
        of_nodes = given.pop("_secret", None), given.pop("_nodes_ca", None)
        if replicas is None and of_nodes != (None, None):
            raise ConfigError("--cluster-secret and --cluster-nodes-ca need --cluster-replicas.")
        if replicas is not None and not 1 <= replicas <= REPLICAS_MAX:
            raise ConfigError(f"A block has 1 to {REPLICAS_MAX} replicas, not {replicas}.")
        upkeep = None if replicas is None else UpkeepConfig(replicas, *of_nodes)
        more = {_OF_ETCD.get(name, name[1:]): value for name, value in given.items()}
        return cls(EtcdReach.of(values[""], **more), address, upkeep, zone)


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """The settings of `kvstore serve`."""

    data: Path  # the folder with the indexes and, unless `drives` are given, the only drive's file
    drives: tuple[DriveSpec, ...] = ()  # in addition to those of the folder
    without: tuple[int, ...] = ()  # drives of the folder to be left out, by number
    host: str = "127.0.0.1"
    port: int = 7070  # 0: any free one
    fabric_address: str | None = None  # given to clients; None: `host`, or our address towards each
    fabric_ports: Ports | None = None  # of endpoints; None: any on loopback, else the usual range
    fabric_clients: tuple[Network, ...] = ()  # whose fabric addresses are accepted from any caller
    capacity_bytes: int = DRIVE_CAPACITY_BYTES_DEFAULT  # of a new drive file; an existing one keeps its own
    hot_bytes: int = HOT_BYTES_DEFAULT  # of memory for recently used blocks
    eviction: str = POLICY_DEFAULT  # which blocks are evicted for room
    master_key: str | None = None  # the source of the master key; None: records are in the clear
    provider: str | None = None  # None: the best that libfabric offers
    cluster: ClusterConfig | None = None
    tied: bool = False  # to standard input: the node stops when it ends
    tenants: Path | None = None  # None: any caller, from this machine only
    tls_certificate: Path | None = None  # the node's own, with its chain, and its key
    tls_key: Path | None = None
    tls_clients: Path | None = None  # CAs, one of which must have signed a client's certificate
    audit: Path | None = None  # a file of accepted and refused callers
    events: EventsConfig | None = None
    http: tuple[str, int] | None = None  # where metrics and health are served
    ui: bool = False  # and the web page
    otel: str | None = None  # the collector of spans
    log_level: str = "info"  # the lowest level that is logged
    log_format: str = "text"  # or "json"

    def __post_init__(self) -> None:
        """Raise for settings that can't be used."""
        check_policy_name(self.eviction)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise ConfigError(
                "A certificate needs its key, and a key its certificate: set --tls-cert and --tls-key."
            )
        if self.tls_clients is not None and self.tls_certificate is None:
            raise ConfigError("Client certificates need TLS: set --tls-cert and --tls-key.")
        if self.ui and self.http is None:
            raise ConfigError("The web page needs a port: set --http HOST:PORT.")
        if self.otel is not None and _COLLECTOR.fullmatch(self.otel) is None:
            raise ConfigError(
                f"{self.otel!r} is not an address of an OTLP collector; write http://HOST:PORT or https://HOST:PORT."
            )
        named = [os.path.realpath(spec.path) for spec in self.drives]
        for path in named:
            if named.count(path) > 1:
                raise ConfigError(f"--drive names {path} twice.")
        self._check_events()
        self._check_where()
        self._check_cluster()
        if self.capacity_bytes < DRIVE_CAPACITY_BYTES_MIN:
            least, actual = shown_apart(DRIVE_CAPACITY_BYTES_MIN, self.capacity_bytes)
            raise ConfigError(f"A drive needs at least {least}; {actual} is too small.")
        if self.capacity_bytes > DRIVE_CAPACITY_BYTES_MAX:
            most, actual = shown_apart(DRIVE_CAPACITY_BYTES_MAX, self.capacity_bytes)
            raise ConfigError(f"A drive has at most {most}, not {actual}.")
        if self.hot_bytes < HOT_BYTES_MIN:
            least, actual = shown_apart(HOT_BYTES_MIN, self.hot_bytes)
            raise ConfigError(
                f"The hot memory must be at least {least}, for the largest blocks; {actual} is too small."
            )

    def _check_events(self) -> None:
        if self.events is None:
            return
        for endpoint in filter(None, (self.events.endpoint, self.events.replay)):
            _check_stays_here(endpoint)
        if self.events.endpoint == self.events.replay:
            raise ConfigError(
                f"Events and their replay need two endpoints, not both on {self.events.replay}."
            )
        if self.tenants is not None:
            raise ConfigError(
                "--events publishes all tenants' blocks to every listener, so a node with --tenants refuses it;"
                " each tenant can use `client.watch` for its own."
            )

    def _check_cluster(self) -> None:
        if self.cluster is not None and self.cluster.address is None and is_wildcard(self.host):
            raise ConfigError(
                f"The node listens on {self.host}, which is no address for clients: set --cluster-address."
            )
        if self.cluster is not None and self.cluster.address is not None:
            host, _ = split_target(self.cluster.address)
            if is_wildcard(host):
                raise ConfigError(
                    f"{self.cluster.address} is no address for clients: --cluster-address is one of this host."
                )
        upkeep = None if self.cluster is None else self.cluster.upkeep
        if upkeep is None:
            return
        if self.tenants is not None and upkeep.secret_path is None:
            raise ConfigError(
                "With tenants, nodes that copy blocks must authenticate to each other: set --cluster-secret."
            )
        if self.tls_certificate is not None and upkeep.nodes_ca is None:
            raise ConfigError("With TLS, nodes verify each other's certificates: set --cluster-nodes-ca.")

    def _check_where(self) -> None:
        self._check_listen("--listen", self.host, self.port)
        if self.http is not None:
            self._check_listen("--http", *self.http)
        if self.http is not None and _are_one(self.http, (self.host, self.port)):
            raise ConfigError(
                f"Calls and HTTP need separate ports: --listen and --http can't both use {self.port} on {self.http[0]}."
            )
        if self.fabric_address is not None:
            self._check_beyond(self.fabric_address)

    def _check_listen(self, option: str, host: str, port: int) -> None:
        self._check_beyond(host)
        if not 0 <= port <= PORT_MAX:
            raise ConfigError(f"{option} takes a port of 0 to {PORT_MAX}, not {port}.")

    def _check_beyond(self, host: str) -> None:
        """Raise unless a node that other machines can reach authenticates its callers."""
        if not _is_loopback(host):
            wanting = [
                flag
                for flag, value in (
                    ("--tls-cert", self.tls_certificate),
                    ("--tls-key", self.tls_key),
                    ("--tenants", self.tenants),
                )
                if value is None
            ]
            if wanting:
                raise ConfigError(
                    f"The node does not listen on {host} without {', '.join(wanting)}: beyond loopback it needs"
                    f" TLS and authenticated tenants."
                )


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_loopback
    return False  # a name may resolve to anything


def _are_one(one: tuple[str, int], other: tuple[str, int]) -> bool:
    """Whether two addresses conflict: a wildcard covers both families, and the port on every address."""
    hosts = {one[0], other[0]}
    return one[1] == other[1] != 0 and (len(hosts) == 1 or any(map(is_wildcard, hosts)))


def _check_stays_here(endpoint: str) -> None:
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme == "ipc":
        return
    with suppress(ValueError):
        if scheme == "tcp" and ipaddress.ip_address("127.0.0.1" if host == "localhost" else host).is_loopback:
            return
    raise ConfigError(
        f"Events are published on tcp://127.0.0.1:PORT or ipc://PATH, not on {endpoint}: ZeroMQ does not authenticate."
    )


def environment(name: str) -> str:
    """The value of a variable; empty if it is not set."""
    return os.environ.get(name, "")


def variables(prefix: str) -> list[str]:
    """The names of variables with this prefix that are not empty."""
    return [name for name, text in os.environ.items() if name.startswith(prefix) and text]


def silence_grpc() -> None:
    """Keep gRPC's own log lines off standard error unless they were asked for; call it before grpc is imported."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


def parse_size(text: str) -> int:
    """`4GiB`, `512M`, or a plain number of bytes; K, M, G, T, P are powers of 1000, with an `i` of 1024."""
    match = _SIZE.fullmatch(text.strip()) if isinstance(text, str) else None
    if match is None:
        raise ConfigError(f"{shown(text)} is not a size; write a number and a unit, such as 512MiB or 4GB.")
    number, unit, binary = match.groups()
    step = 1024 if binary else 1000
    size = float(number) * step ** " KMGTP".index(unit.upper() or " ")
    if size > SIZE_BYTES_MAX:
        raise ConfigError(f"{text!r} is larger than any drive or memory.")
    return int(size)


def parse_drive(text: str) -> DriveSpec:
    """`PATH`, or `PATH:SIZE` for a file to be created; a path may contain colons."""
    path, _, size = text.rpartition(":")
    if path and _SIZE.fullmatch(size.strip()):
        return DriveSpec(Path(path), parse_size(size))
    return DriveSpec(Path(text))


def show_size(size_bytes: int) -> str:
    """A size for people."""
    amount = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024 or unit == "TiB":  # noqa: PLR2004 - the step between these units
            break
        amount /= 1024
    return f"{amount:.0f} {unit}" if amount == int(amount) else f"{amount:.1f} {unit}"


def shown_apart(one_bytes: int, other_bytes: int) -> tuple[str, str]:
    """Two different sizes for people: in bytes if they would look the same, such as `4 MiB` and `4.0 MiB`."""
    one, other = show_size(one_bytes), show_size(other_bytes)
    if one.replace(".0 ", " ") == other.replace(".0 ", " "):
        return f"{one_bytes} bytes", f"{other_bytes} bytes"
    return one, other


def counted(count: int, what: str) -> str:
    """`1 block`, `2 blocks`."""
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def show_time(time_ms: float) -> str:
    """A time for people, in the largest unit of which there are at least two."""
    for unit, size_ms in (("days", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1000)):
        if time_ms >= 2 * size_ms:
            return f"{time_ms / size_ms:.0f} {unit}"
    return f"{max(0, time_ms):.0f} ms"


def printable(text: str) -> str:
    """A foreign text with control characters replaced, so that it can't control a terminal."""
    return "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in text)


def parse_listen(text: str) -> tuple[str, int]:
    """`HOST:PORT`, with brackets around a host of IPv6; a name stands for its first address."""
    host, _, port = text.rpartition(":")
    try:
        return _address_of(host.strip("[]")), int(port)
    except ValueError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{text!r} is not an address to listen on: {error.strerror}; write HOST:PORT, such as 127.0.0.1:7070."
        ) from None
    raise ConfigError(f"{text!r} is not an address to listen on; write HOST:PORT, such as 127.0.0.1:7070.")


def _address_of(host: str) -> str:
    if not host:
        raise ValueError("no host")
    with suppress(ValueError):
        return str(ipaddress.ip_address("127.0.0.1" if host == "localhost" else host))
    return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
