"""The options of `kvstore serve`: one table for the flags, the settings file and the environment variables.

An option of the table is `--some-option` on the command line, `TRIGGERKV_SERVE_SOME_OPTION` in the environment and
`some_option` in the file of `--config`. The first of these that is set applies, then the default.

What always holds: a value is parsed in the same way, wherever it is written. An unknown setting, or an invalid value,
is a ConfigError of one sentence that names its place. Paths in the file are relative to the file's folder.

What it doesn't do: look for a file that nobody named, or open anything that a setting names.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvcli.completion import offer_values
from kvstore.config import (
    ClusterConfig,
    EventsConfig,
    NodeConfig,
    environment,
    parse_drive,
    parse_listen,
    parse_size,
    shown_apart,
    variables,
)
from kvstore.config_files import read_toml
from kvstore.endpoints import Ports
from kvstore.errors import ConfigError, KvError, NoSpace
from kvstore.limits import DIGITS_MAX, FABRIC_PORT_FIRST, FABRIC_PORT_LAST
from kvstore.node.fabric_address import parse_networks
from kvstore.storage.eviction.policies import POLICY_DEFAULT, POLICY_NAMES

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping

__all__ = [
    "OPTIONS",
    "Option",
    "Settings",
    "add_options",
    "check_file",
    "check_machine",
    "check_room",
    "defaults_shown",
    "read_file",
    "settings",
]

_VARIABLE: Final = "TRIGGERKV_SERVE_"
_FILE_VARIABLE: Final = f"{_VARIABLE}CONFIG"


def _choice(choices: tuple[str, ...]) -> Callable[[str], str]:
    def read(text: str) -> str:
        if text not in choices:
            raise ConfigError(f"it is {' or '.join(choices)}, not {text!r}.")
        return text

    return read


def _number(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= DIGITS_MAX):
        raise ConfigError(f"it is a whole number of at most {DIGITS_MAX} digits, not {text!r}.")
    return int(text)


class Option(NamedTuple):
    """A setting of the node. `read` converts its text."""

    name: str
    help: str
    read: Callable[[str], Any] = str
    default: str | None = None
    metavar: str | None = None
    is_switch: bool = False
    is_many: bool = False
    is_path: bool = False
    reloads: bool = False  # whether SIGHUP applies a new value
    values: tuple[str, ...] = ()  # if there are only these

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment; several values are separated by commas."""
        return _VARIABLE + self.name.upper()


def _path(name: str, help_: str, **more: Any) -> Option:
    return Option(name, help_, _given_path, metavar="PATH", is_path=True, **more)


def _given_path(text: str) -> Path:
    """Raise for an empty text, which Python takes for the current folder, and a shell for an unset variable."""
    if not text:
        raise ConfigError("A path is empty.")
    return Path(text)


def _one_of(
    name: str, help_: str, values: tuple[str, ...], default: str, metavar: str, **more: Any
) -> Option:
    return Option(name, help_, _choice(values), default, metavar, values=values, **more)


OPTIONS: Final = (
    _path("data", "the node's folder"),
    Option(
        "drive",
        "a file, created with this size if missing, or a raw block device; repeat for more drives",
        parse_drive,
        metavar="PATH[:SIZE]",
        is_many=True,
        is_path=True,
    ),
    Option(
        "without_drive",
        "start without this drive of the folder; its contents are discarded if it comes back",
        _number,
        metavar="NUMBER",
        is_many=True,
    ),
    Option(
        "listen", "address for calls; port 0 uses any free port", parse_listen, "127.0.0.1:7070", "HOST:PORT"
    ),
    Option(
        "fabric_address",
        "fabric address for clients; by default the listening address, or the node's address on the route to them",
        metavar="HOST",
    ),
    Option(
        "fabric_ports",
        "ports of the fabric, one for each client; by default any on loopback, else"
        f" {FABRIC_PORT_FIRST}-{FABRIC_PORT_LAST}",
        Ports.of,
        metavar="FIRST-LAST",
    ),
    Option(
        "fabric_clients",
        "networks of clients whose fabric address may differ from the source of their calls",
        parse_networks,
        metavar="CIDR[,CIDR]",
    ),
    Option("capacity", "size of a new folder's only drive, a file", parse_size, "1GiB", "SIZE"),
    Option("hot", "memory for recently used blocks", parse_size, "256MiB", "SIZE"),
    Option("eviction", "eviction policy: lru or s3fifo", str, POLICY_DEFAULT, "POLICY", values=POLICY_NAMES),
    Option(
        "master_key",
        "encrypt stored data, with keys protected by this master key: file:, credential:, command: or vault: and where",
        metavar="KIND:WHERE",
    ),
    Option("provider", "libfabric provider; by default the best available", metavar="NAME"),
    Option(
        "cluster",
        "join a cluster: the address of etcd, and the cluster's name there",
        metavar="HOST:PORT[,HOST:PORT]/NAME",
    ),
    Option(
        "cluster_address",
        "the node's address for clients of the cluster; by default where it listens",
        metavar="HOST:PORT",
    ),
    Option(
        "cluster_zone",
        "the node's failure zone, such as its rack; the two copies of a block are in two zones",
        metavar="NAME",
    ),
    _path("cluster_ca", "CA of etcd's certificate, PEM; turns TLS to etcd on"),
    _path("cluster_cert", "a client certificate for etcd, PEM"),
    _path("cluster_key", "its key, PEM"),
    Option("cluster_user", "the user name for etcd", metavar="NAME"),
    _path("cluster_password", "a file with that user's password"),
    Option(
        "cluster_replicas",
        "number of nodes that keep each block, unless the tenant sets its own: 1 or 2",
        _number,
        metavar="N",
    ),
    _path("cluster_secret", "a file with the shared secret of the cluster's nodes"),
    _path("cluster_nodes_ca", "CA of the nodes' certificates, PEM"),
    Option("tied", "stop when standard input ends, as when the starting process dies", is_switch=True),
    _path("tenants", "a file of tenants and their tokens", reloads=True),
    _path("tls_cert", "the node's certificate and its chain, PEM", reloads=True),
    _path("tls_key", "its key, PEM", reloads=True),
    _path("tls_clients", "CAs, PEM; clients need a certificate signed by one", reloads=True),
    _path("audit", "the audit log, a file: accepted and refused callers"),
    Option(
        "events", "publish KV events over ZeroMQ on tcp://127.0.0.1:PORT or ipc://PATH", metavar="ENDPOINT"
    ),
    Option("events_replay", "endpoint for the replay of events", metavar="ENDPOINT"),
    _one_of("events_as", "format of an event: maps or arrays", ("maps", "arrays"), "maps", "FORM"),
    Option(
        "http",
        "serve /metrics, for Prometheus, /healthz and /readyz there",
        parse_listen,
        metavar="HOST:PORT",
    ),
    Option("ui", "serve a web page of the node there, too", is_switch=True),
    Option(
        "otel",
        "send OpenTelemetry spans over OTLP/gRPC to http://HOST:PORT or https://HOST:PORT",
        metavar="ENDPOINT",
    ),
    _one_of(
        "log_level",
        "minimum level of the log: debug, info, warning or error",
        ("debug", "info", "warning", "error"),
        "info",
        "LEVEL",
        reloads=True,
    ),
    _one_of(
        "log_format",
        "format of the log: text, or json for programs",
        ("text", "json"),
        "text",
        "FORMAT",
    ),
)
_CLUSTER: Final = (
    "",
    "_address",
    "_zone",
    "_ca",
    "_cert",
    "_key",
    "_user",
    "_password",
    "_replicas",
    "_secret",
    "_nodes_ca",
)
_BY_NAME: Final = {option.name: option for option in OPTIONS}


class Settings(NamedTuple):
    """A node's settings, and their file, which SIGHUP reads again."""

    values: dict[str, Any]
    file: Path | None

    @classmethod
    def of(cls, values: Mapping[str, Any], file: Path | None = None) -> Settings:
        """These settings, with defaults for the others."""
        return cls({option.name: _default(option) for option in OPTIONS} | dict(values), file)

    def changed(self, later: Settings) -> tuple[list[str], list[str]]:
        """The options that differ in a later reading: those that apply at once, and those that need a restart."""
        names = [name for name, value in self.values.items() if later.values[name] != value]
        return [n for n in names if _BY_NAME[n].reloads], [n for n in names if not _BY_NAME[n].reloads]

    def node(self) -> NodeConfig:
        """These settings as the node's configuration."""
        given = dict(self.values)
        if given["data"] is None:
            raise ConfigError(
                f"Set the node's folder: --data, {_BY_NAME['data'].variable}, or data in a file."
            )
        host, port = given.pop("listen")
        cluster = ClusterConfig.of({name: given.pop(f"cluster{name}") for name in _CLUSTER})
        given["fabric_clients"] = given["fabric_clients"] or ()
        events, replay = given.pop("events"), given.pop("events_replay")
        as_arrays = given.pop("events_as") == "arrays"
        if events is None and replay is not None:
            raise ConfigError("A replay endpoint needs published events: set --events ENDPOINT.")
        for short, name in (
            ("drive", "drives"),
            ("without_drive", "without"),
            ("capacity", "capacity_bytes"),
            ("hot", "hot_bytes"),
            ("tls_cert", "tls_certificate"),
        ):
            given[name] = given.pop(short)
        return NodeConfig(
            host=host,
            port=port,
            cluster=cluster,
            events=None if events is None else EventsConfig(events, replay, as_arrays),
            **given,
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the flags to a command."""
    for option in OPTIONS:
        shown = option.help + (f" ({option.default})" if option.default else "")
        more: dict[str, Any] = {"default": None, "help": shown.replace("%", "%%")}
        if option.is_switch:
            parser.add_argument(option.flag, action="store_true", **more)
        else:
            more |= {"action": "append"} if option.is_many else {}
            action = parser.add_argument(option.flag, metavar=option.metavar, **more)
            if option.values:
                offer_values(action, option.values)
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="a TOML file of these settings, as `kvstore config --print-defaults` shows it; SIGHUP reloads it",
    )


def _read(option: Option, text: str, where: str) -> Any:
    if "\0" in text:
        raise ConfigError(f"{where} contains a NUL character.")
    try:
        return option.read(text)
    except KvError as error:
        raise ConfigError(f"{where}: {error}") from error


def _of_command(arguments: argparse.Namespace) -> dict[str, Any]:
    given: dict[str, Any] = {}
    for option in OPTIONS:
        value = getattr(arguments, option.name)
        if value is None:
            continue
        if option.is_switch:
            given[option.name] = value
        elif option.is_many:
            given[option.name] = tuple(_read(option, text, option.flag) for text in value)
        else:
            given[option.name] = _read(option, value, option.flag)
    return given


def _of_environment() -> dict[str, Any]:
    known = {option.variable for option in OPTIONS} | {_FILE_VARIABLE}
    if unknown := sorted(name for name in variables(_VARIABLE) if name not in known):
        raise ConfigError(f"The environment has an unknown setting: {', '.join(unknown)}.")
    given: dict[str, Any] = {}
    for option in OPTIONS:
        text = environment(option.variable)
        if not text:
            continue
        if option.is_switch:
            if text.lower() not in {"true", "false"}:
                raise ConfigError(f"{option.variable} is true or false, not {text!r}.")
            given[option.name] = text.lower() == "true"
        elif option.is_many:
            given[option.name] = tuple(
                _read(option, part.strip(), option.variable) for part in text.split(",")
            )
        else:
            given[option.name] = _read(option, text, option.variable)
    return given


def read_file(path: Path) -> dict[str, Any]:
    """The settings in a file, parsed, but not checked against other settings."""
    given = read_toml(path)
    if unknown := sorted(set(given) - set(_BY_NAME)):
        raise ConfigError(f"{path} has an unknown setting: {', '.join(unknown)}.")
    return {name: _of_file(_BY_NAME[name], value, path) for name, value in given.items()}


def _of_file(option: Option, value: Any, path: Path) -> Any:
    where = f"{option.name} in {path}"
    if option.is_switch:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is true or false.")
        return value
    if option.is_many:
        if not isinstance(value, list):
            raise ConfigError(f"{where} is a list.")
        return tuple(_one_of_file(option, one, where, path.parent) for one in value)
    return _one_of_file(option, value, where, path.parent)


def _one_of_file(option: Option, value: Any, where: str, folder: Path) -> Any:
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ConfigError(f"{where} is a text or a whole number, not {type(value).__name__}.")
    if isinstance(value, int) and abs(value) >= 10**DIGITS_MAX:
        raise ConfigError(f"{where} has more than {DIGITS_MAX} digits.")
    text = str(value)
    if option.is_path:
        try:
            text = str(folder / Path(text).expanduser())
        except RuntimeError:
            raise ConfigError(f"{where} begins with the home of an unknown user.") from None
    return _read(option, text, where)


def settings(arguments: argparse.Namespace) -> Settings:
    """The values of the command line, the environment and the file, with defaults."""
    named = arguments.config or environment(_FILE_VARIABLE)
    file = Path(named) if named else None
    of_file = {} if file is None else read_file(file)
    return Settings.of(of_file | _of_environment() | _of_command(arguments), file)


def check_file(path: Path) -> NodeConfig:
    """ConfigError for a mistake in the file itself, on any machine; the rest is checked at start."""
    return Settings.of({"data": path.parent} | read_file(path)).node()


def _default(option: Option) -> Any:
    if option.default is not None:
        return option.read(option.default)
    return () if option.is_many else False if option.is_switch else None


def check_machine(config: NodeConfig) -> None:
    """Raise, before a drive is created, for settings that this machine can't satisfy."""
    has_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if config.hot_bytes > has_bytes:
        hot, has = shown_apart(config.hot_bytes, has_bytes)
        raise ConfigError(f"--hot {hot} exceeds this machine's memory, {has}.")
    if not config.drives and config.data is not None:
        check_room(config.data, config.capacity_bytes, "set a smaller --capacity")


def check_room(data: Path, capacity_bytes: int, advice: str) -> None:
    """Raise if this folder has no drive, and its file system no room for one."""
    if list(data.glob("drive-*.kv")):
        return
    folder = data.absolute()
    while not folder.is_dir():
        folder = folder.parent
    room = os.statvfs(folder)
    if room.f_blocks and capacity_bytes > room.f_bfree * room.f_frsize:
        wanted, free = shown_apart(capacity_bytes, room.f_bfree * room.f_frsize)
        raise NoSpace(
            f"A drive of {wanted} has no room on the file system of {data}, which has {free} free: {advice}."
        )


def defaults_shown() -> str:
    """A file with all defaults, and the meaning of each setting."""
    lines = ["# Settings of `kvstore serve --config FILE`. Lines that begin with # show defaults."]
    for option in OPTIONS:
        when = "; reloaded by SIGHUP" if option.reloads else ""
        lines += ["", f"# {option.help}{when}"]
        if option.is_many:
            lines.append(f"#{option.name} = []")
        elif option.is_switch:
            lines.append(f"{option.name} = false")
        elif option.default is not None:
            lines.append(f'{option.name} = "{option.default}"')
        else:
            lines.append(f'#{option.name} = "{option.metavar}"')
    return "\n".join(lines) + "\n"
