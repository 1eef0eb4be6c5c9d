"""How a node is reached: an immutable record, and the only code that reads it from arguments, environment and file.

Each setting is taken from the first of these four places that has it:

1. arguments: of `Client(...)`, of a command, or an engine's own configuration;
2. environment variables, `TRIGGERKV_NODE`, `TRIGGERKV_TOKEN_FILE` and so on;
3. the file named by `TRIGGERKV_CONFIG`, or else `~/.config/triggerkv/client.toml`;
4. the defaults.

What always holds: an unknown setting, or an invalid value, is a ConfigError of one sentence that names its place;
unknown variables are ignored, and logged once. Settings that express one thing in two ways (`node` and `nodes`,
`token` and `token_file`, `user` and `shared`) are taken from the same place, so a token from the environment is never
combined with a token file from an argument. A token is in no `repr`, and is sent only over TLS or within this machine.

What it doesn't do: make calls. Tokens and certificates are read when a client is opened.
"""

from __future__ import annotations

import ipaddress
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from kvstore.config_files import read_file, read_pem, read_toml
from kvstore.errors import ConfigError
from kvstore.limits import (
    CONNECT_TIMEOUT_MS,
    DIGITS_MAX,
    FETCH_TIMEOUT_MS,
    HOST_LABEL_CHARACTERS_MAX,
    NODES_MAX,
    PORT_MAX,
    REACH_TIMEOUT_MS_MAX,
    RPC_TIMEOUT_MS,
    TOKEN_CHARACTERS_MAX,
    ZONE_CHARACTERS_MAX,
)
from kvstore.names import SHARED, TENANTS_NAME, UNSAID, domain_of, is_tenant
from nic_offload.errors import shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import grpc

__all__ = [
    "AUTO",
    "FABRIC",
    "GRPC",
    "Reach",
    "credentials_of",
    "reach_of_arguments",
    "reach_settings",
    "settings_in_effect",
    "split_reach",
    "split_target",
    "token_of",
]

AUTO: Final = "auto"
FABRIC: Final = "fabric"
GRPC: Final = "grpc"
_TRANSPORTS: Final = (AUTO, FABRIC, GRPC, "memory")

_FILE: Final = Path("~/.config/triggerkv/client.toml")
_VARIABLE: Final = "TRIGGERKV_"
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_.-]{0,252})", re.ASCII)
_PORT = re.compile(r"[0-9]{1,5}")
_Level: TypeAlias = "tuple[str, dict[str, Any]]"  # a place, and its settings
# Settings that express the same thing in two ways: a place that has one of them counts for both.
_TOGETHER: Final = (("node", "nodes"), ("token", "token_file"), ("user", "shared"))


@dataclass(frozen=True, slots=True)
class Reach:
    """Which nodes, as which tenant, and how. All files are PEM, except the token's.

    >>> from kvstore.client import Reach
    >>> reach = Reach(("10.0.0.5:7070", "10.0.0.6:7070"), tenant="acme")
    >>> reach.call_timeout_s
    10.0
    """

    nodes: tuple[str, ...]  # HOST:PORT each, brackets around IPv6
    tenant: str = ""  # for a node that requires no token
    token: str | None = field(default=None, repr=False)
    token_file: Path | None = None
    tls: bool = False  # implied by any of the following
    ca: Path | None = None  # the CA of the node's certificate; None: the system's CAs
    certificate: Path | None = None  # the client's own, for a node that requires one
    key: Path | None = None
    fabric_address: str = ""  # this machine's own, for the fabric; "": that of the route to the node
    fabric_ports: str = ""  # FIRST-LAST, on which this machine listens for the fabric; "": any free port
    transport: str = AUTO  # how blocks are carried: see `kvstore.client.transport`
    provider: str | None = None  # of libfabric; None: the best available
    connect_timeout_ms: int = CONNECT_TIMEOUT_MS  # for each connection to the node, of gRPC and of the fabric
    call_timeout_ms: int = RPC_TIMEOUT_MS  # for each call, attaching included
    get_timeout_ms: int = FETCH_TIMEOUT_MS  # for gets, resumes and streams without a timeout of their own
    user: str = ""  # the owner of blocks that are put without a domain; "": none
    shared: bool = (
        False  # or: all users of the tenant share these blocks, and erasing a user doesn't erase them
    )
    zone: str = ""  # this client's: of a block's two copies in a cluster, one in this zone is read first

    def __post_init__(self) -> None:
        """Refuse invalid values."""
        self._check_types()
        if not 1 <= len(self.nodes) <= NODES_MAX:
            raise ConfigError(f"There are 1 to {NODES_MAX} nodes, not {len(self.nodes)}.")
        if len(set(self.nodes)) < len(self.nodes):
            raise ConfigError(f"A node is listed twice in {', '.join(self.nodes)}.")
        hosts = [split_target(node)[0] for node in self.nodes]
        if self.token is not None and self.token_file is not None:
            raise ConfigError("Give a token or a token file, not both.")
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("A client's certificate needs its key, and the key its certificate.")
        self._check_choices()
        for name in ("connect_timeout_ms", "call_timeout_ms", "get_timeout_ms"):
            if not 1 <= (value := getattr(self, name)) <= REACH_TIMEOUT_MS_MAX:
                raise ConfigError(f"{name} is 1 to {REACH_TIMEOUT_MS_MAX} milliseconds, not {shown(value)}.")
        if not self.uses_tls and (self.token is not None or self.token_file is not None):
            for host in hosts:
                if not _is_this_machine(host):
                    raise ConfigError(
                        f"A token is not sent to {host} in the clear: set ca to the CA of the node's"
                        f" certificate, or tls = true if the system trusts it."
                    )

    def _check_types(self) -> None:
        for one in fields(self):
            value: Any = getattr(self, one.name)
            kind = _KINDS[one.name]
            if value is None and one.default is None:
                continue
            if not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
                raise ConfigError(f"{one.name} is {kind.word}, not {_said(one.name, value)}.")
            if kind is _FILE_KIND:
                object.__setattr__(self, one.name, Path(str(value)))
        object.__setattr__(self, "nodes", _several(self.nodes, Path()))

    def _check_choices(self) -> None:
        if self.transport not in _TRANSPORTS:
            *others, last = _TRANSPORTS
            raise ConfigError(f"transport is {', '.join(others)} or {last}, not {self.transport!r}.")
        if self.tenant and not is_tenant(self.tenant):
            raise ConfigError(f"{TENANTS_NAME[:-1]}, not {self.tenant!r}.")
        if len(self.zone) > ZONE_CHARACTERS_MAX or not self.zone.isprintable():
            raise ConfigError(f"zone has at most {ZONE_CHARACTERS_MAX} printable characters.")
        if self.user and self.shared:
            raise ConfigError("Blocks are those of a user or shared, not both: set user or shared.")
        if self.user:
            domain_of(self.user)

    @classmethod
    def of(
        cls,
        given: Mapping[str, Any] | None = None,
        *,
        where: str = "the call",
        default_node: str | None = None,
    ) -> Reach:
        """Read it from `given`, the environment, the file and the defaults. Errors call `given` by the name `where`.

        `node` is `nodes` with one address. Values that are None count as not given. If no node is set anywhere,
        `default_node` is used: commands have one, libraries don't.

        >>> Reach.of({"node": "10.0.0.5:7070", "tenant": "acme"}).node
        '10.0.0.5:7070'
        """
        if not isinstance(given, Mapping | None):
            raise ConfigError(f"Settings are given by name, not as {type(given).__name__}.")
        stated = {name: value for name, value in (given or {}).items() if value is not None}
        merged = _merged((where, _read(stated, where, Path())), _of_environment(), _of_file())
        settings = {name: value for name, (value, _) in merged.items()}
        if "node" in settings:
            settings["nodes"] = settings.pop("node")
        if "nodes" not in settings and default_node is not None:
            settings["nodes"] = (default_node,)
        if "nodes" not in settings:
            raise ConfigError(f"No node is set: set node, HOST:PORT, in {where}, {_VARIABLE}NODE or {_FILE}.")
        return cls(**settings)

    @property
    def node(self) -> str:
        """The only node. ConfigError if there are several."""
        if len(self.nodes) > 1:
            raise ConfigError(
                f"One node is needed here, not {', '.join(self.nodes)}; `ClusterClient` talks to those of a cluster."
            )
        return self.nodes[0]

    @property
    def domain(self) -> bytes:
        """The erase domain of blocks that are put without one."""
        return SHARED if self.shared else domain_of(self.user) if self.user else UNSAID

    @property
    def uses_tls(self) -> bool:
        """Whether calls go over TLS."""
        return self.tls or self.ca is not None or self.certificate is not None

    @property
    def connect_timeout_s(self) -> float:
        """For a connection to the node."""
        return self.connect_timeout_ms / 1000

    @property
    def call_timeout_s(self) -> float:
        """For a call."""
        return self.call_timeout_ms / 1000

    @property
    def get_timeout_s(self) -> float:
        """For a get without a timeout of its own."""
        return self.get_timeout_ms / 1000

    def at(self, node: str) -> Reach:
        """The same settings for a single one of the nodes.

        >>> reach.at("10.0.0.6:7070").node
        '10.0.0.6:7070'
        """
        return replace(self, nodes=(node,))


def reach_of_arguments(node: str | Reach | None, more: Mapping[str, Any]) -> Reach:
    """Make it from a client's arguments: either a complete `Reach`, or a node and other settings."""
    if not isinstance(node, Reach):
        return Reach.of({"node": node, **more})
    if twice := [name for name, value in more.items() if value is not None]:
        raise ConfigError(f"A Reach has all settings; {', '.join(twice)} can't be given beside it.")
    return node


def reach_settings() -> frozenset[str]:
    """The names of all settings."""
    return frozenset(_KINDS)


def split_reach(given: Mapping[str, Any], *, where: str) -> tuple[Reach, dict[str, Any]]:
    """Take these settings out of an engine's configuration; also returns the rest."""
    ours = {name: value for name, value in given.items() if name in _KINDS}
    others = {name: value for name, value in given.items() if name not in _KINDS}
    return Reach.of(ours, where=where), others


def settings_in_effect(default_node: str) -> list[tuple[str, str, str]]:
    """The settings of a command without options: name, value, and where it is set.

    A token's value is not shown.
    """
    reach = Reach.of(default_node=default_node)
    merged = _merged(_of_environment(), _of_file())
    where = {"nodes" if name == "node" else name: place for name, (_, place) in merged.items()}
    rows = []
    for name in (one.name for one in fields(Reach)):
        value = getattr(reach, name)
        text = ",".join(value) if name == "nodes" else "" if value is None else str(value)
        by_default = "default of commands; a Client has none" if name == "nodes" else "default"
        shown_text = "(not shown)" if name == "token" and text else text
        rows.append((name, shown_text, where.get(name, by_default)))
    return rows


def token_of(reach: Reach) -> str | None:
    """The token, read from its file if it is in one."""
    if reach.token_file is None:
        if reach.token is not None and not _is_token(reach.token):
            raise ConfigError("The token has invalid characters, or is too long.")
        return reach.token
    text = read_file(reach.token_file).decode("ascii", "replace").strip()
    if not _is_token(text):
        raise ConfigError(f"{reach.token_file} does not contain a valid token.")
    return text


def credentials_of(reach: Reach) -> grpc.ChannelCredentials | None:
    """The channel's credentials, read from their files; None without TLS."""
    if not reach.uses_tls:
        return None
    ca, key, certificate = (
        None if path is None else read_pem(path) for path in (reach.ca, reach.key, reach.certificate)
    )
    import grpc  # noqa: PLC0415 - commands that reach no node start without it

    return grpc.ssl_channel_credentials(ca, key, certificate)


def _is_token(text: str) -> bool:
    return text.isascii() and text.isprintable() and 0 < len(text) <= TOKEN_CHARACTERS_MAX


def split_target(target: str) -> tuple[str, int]:
    """Host and port of `HOST:PORT`, the host without the brackets that IPv6 needs."""
    host, colon, port = target.rpartition(":")
    if colon and _PORT.fullmatch(port) and 1 <= int(port) <= PORT_MAX:
        if host.startswith("[") and host.endswith("]"):
            try:
                return str(ipaddress.IPv6Address(host[1:-1])), int(port)
            except ValueError:
                host = ""
        if _HOST.fullmatch(host) and all(
            0 < len(label) <= HOST_LABEL_CHARACTERS_MAX for label in host.split(".")
        ):
            return host, int(port)
    raise ConfigError(f"{target!r} is not an address of a node; write HOST:PORT, with brackets around IPv6.")


def _is_this_machine(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class _Kind(NamedTuple):
    """How a setting is read."""

    types: tuple[type, ...]  # its types in TOML, JSON and Python
    read: Callable[[Any, Path], Any]  # from a value, and the folder of relative paths
    word: str  # what to call it in messages


def _said(name: str, value: Any) -> str:
    """A value of a wrong type; a token is never shown."""
    kind = type(value).__name__
    return kind if name == "token" else f"{shown(value)}, which is of type {kind}"


def _path(value: Any, folder: Path) -> Path:
    return folder / Path(value).expanduser()


def _several(value: Any, _: Path) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if others := [part for part in parts if not isinstance(part, str)]:
        raise ConfigError(f"A node is HOST:PORT, not {type(others[0]).__name__}.")
    nodes = tuple(part.strip() for part in parts)
    if "" in nodes:
        raise ConfigError("A node's address is empty; write HOST:PORT, or several with commas between them.")
    return nodes


_TEXT = _Kind((str,), lambda value, _: value, "a text")
_MS = _Kind((int,), lambda value, _: value, "a whole number of milliseconds")
_FLAG = _Kind((bool,), lambda value, _: value, "true or false")
_FILE_KIND = _Kind((str, Path), _path, "a path")
_KINDS: Final = {
    "node": _Kind((str,), _several, 'text such as "10.0.0.5:7070", HOST:PORT'),
    "nodes": _Kind((list, tuple, str), _several, "a list of HOST:PORT"),
    "tenant": _TEXT,
    "token": _TEXT,
    "token_file": _FILE_KIND,
    "tls": _FLAG,
    "ca": _FILE_KIND,
    "certificate": _FILE_KIND,
    "key": _FILE_KIND,
    "fabric_address": _TEXT,
    "fabric_ports": _TEXT,
    "transport": _TEXT,
    "provider": _TEXT,
    "connect_timeout_ms": _MS,
    "call_timeout_ms": _MS,
    "get_timeout_ms": _MS,
    "user": _TEXT,
    "shared": _FLAG,
    "zone": _TEXT,
}
assert set(_KINDS) == {one.name for one in fields(Reach)} | {"node"}


def _read(given: Mapping[str, Any], where: str, folder: Path) -> dict[str, Any]:
    """The settings of one place, parsed."""
    if unknown := sorted(set(given) - set(_KINDS)):
        raise ConfigError(f"{where} has no {', '.join(unknown)}; it has {', '.join(_KINDS)}.")
    if "node" in given and "nodes" in given:
        raise ConfigError(f"{where} may set node or nodes, not both.")
    settings: dict[str, Any] = {}
    for name, value in given.items():
        kind = _KINDS[name]
        if not isinstance(value, kind.types) or (isinstance(value, bool) and bool not in kind.types):
            raise ConfigError(f"{name} in {where} is {kind.word}, not {_said(name, value)}.")
        if "\0" in str(value if isinstance(value, (str, Path)) else ""):
            raise ConfigError(f"{name} in {where} contains a NUL character.")
        try:
            settings[name] = kind.read(value, folder)
        except RuntimeError:  # raised by `expanduser`
            raise ConfigError(f"{name} in {where} begins with the home of an unknown user.") from None
    return settings


def _merged(*levels: _Level) -> dict[str, tuple[Any, str]]:
    """Each setting from the first place that has it, with that place."""
    settings: dict[str, tuple[Any, str]] = {}
    for where, level in levels:
        said = {name for group in _TOGETHER if settings.keys() & set(group) for name in group}
        settings |= {
            name: (value, where) for name, value in level.items() if name not in settings and name not in said
        }
    return settings


def _of_environment() -> _Level:
    given: dict[str, Any] = {}
    for name, kind in _KINDS.items():
        text = os.environ.get(variable := _VARIABLE + name.upper(), "")
        if not text:
            continue
        if kind.types == (bool,):
            if text.lower() not in {"true", "false", "1", "0"}:
                raise ConfigError(f"{variable} is true or false, not {text!r}.")
            given[name] = text.lower() in {"true", "1"}
        elif kind.types == (int,):
            if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
                raise ConfigError(f"{variable} is {kind.word}, not {text!r}.")
            given[name] = int(text)
        else:
            given[name] = text
    if "node" in given and "nodes" in given:
        raise ConfigError(f"{_VARIABLE}NODE or {_VARIABLE}NODES is set, not both.")
    return "the environment", _read(given, "the environment", Path())


def _of_file() -> _Level:
    named = os.environ.get(f"{_VARIABLE}CONFIG", "")
    try:
        path = (Path(named) if named else _FILE).expanduser()
    except RuntimeError:  # the user doesn't exist on this machine, or has no home folder
        if named:
            raise ConfigError(
                f"{named}, which {_VARIABLE}CONFIG names, is in the home of an unknown user."
            ) from None
        return "", {}
    try:
        given = read_toml(path)
    except ConfigError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        if named:
            raise ConfigError(f"{path}, which {_VARIABLE}CONFIG names, does not exist.") from None
        return "", {}
    return str(path), _read(given, str(path), path.parent)
