"""The `kvstore` command. Each subcommand imports what it needs when it is run, so `--help` needs nothing."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import KvError
from kvstore.limits import FABRIC_PORT_FIRST, FABRIC_PORT_LAST
from kvstore.node_commands import add_node_commands

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["main"]


def _serve(arguments: argparse.Namespace) -> int:
    from kvstore.config import EventsConfig, NodeConfig, parse_drive, parse_listen, parse_size
    from kvstore.endpoints import Ports
    from kvstore.node.fabric_address import parse_networks
    from kvstore.node.server import serve

    host, port = parse_listen(arguments.listen)
    return serve(
        NodeConfig(
            data=arguments.data,
            drives=tuple(map(parse_drive, arguments.drive)),
            without=tuple(arguments.without_drive),
            host=host,
            port=port,
            fabric_address=arguments.fabric_address,
            fabric_ports=None if arguments.fabric_ports is None else Ports.of(arguments.fabric_ports),
            fabric_clients=()
            if arguments.fabric_clients is None
            else parse_networks(arguments.fabric_clients),
            capacity_bytes=parse_size(arguments.capacity),
            hot_bytes=parse_size(arguments.hot),
            eviction=arguments.eviction,
            provider=arguments.provider,
            tied=arguments.tied,
            tenants=arguments.tenants,
            tls_certificate=arguments.tls_cert,
            tls_key=arguments.tls_key,
            tls_clients=arguments.tls_clients,
            audit=arguments.audit,
            events=None
            if arguments.events is None
            else EventsConfig(arguments.events, arguments.events_replay, arguments.events_as == "arrays"),
            http=None if arguments.http is None else parse_listen(arguments.http),
            ui=arguments.ui,
            otel=arguments.otel,
        )
    )


def _token(_: argparse.Namespace) -> int:
    import secrets

    from kvstore.node.tenants import token_digest

    token = secrets.token_urlsafe(32)
    print(f"token   {token}\nsha256  {token_digest(token)}")
    return 0


def _demo(arguments: argparse.Namespace) -> int:
    from kvstore.demo.demo import run

    return run(arguments.data)


def _chat(arguments: argparse.Namespace) -> int:
    from kvstore.demo.chat import run

    return run(arguments.turns, arguments.tokens, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from kvstore.doctor import run

    return run(arguments.data, as_json=arguments.json)


def _bench(arguments: argparse.Namespace) -> int:
    from kvstore.bench.command import run

    return run(arguments.parts, arguments.data, as_json=arguments.json)


def _fsck(arguments: argparse.Namespace) -> int:
    from kvstore.storage.fsck import run

    return run(arguments.data, repair=arguments.repair, payloads=arguments.payloads)


def _match(arguments: argparse.Namespace) -> int:
    from kvstore.match_command import run

    return run(arguments.rules, arguments.request, as_json=arguments.json)


def _add_trials(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands that try things out on this machine."""
    demo = commands.add_parser("demo", help="see the whole path work on this machine")
    demo.add_argument(
        "--data", type=Path, help="where to keep the demo's data; by default a folder that is removed"
    )
    demo.set_defaults(run=_demo)

    chat = commands.add_parser(
        "chat",
        help="see a chat go on in another process",
        description="Chat with a small model of random weights, kill the node, and go on in another process. Needs"
        " torch and transformers.",
    )
    chat.add_argument("--turns", type=int, default=3, help="before the node is killed (%(default)s)")
    chat.add_argument("--tokens", type=int, default=800, help="of each prompt (%(default)s)")
    chat.add_argument("--json", action="store_true", help="for programs")
    chat.set_defaults(run=_chat)

    doctor = commands.add_parser("doctor", help="say what this machine can do, and what to do about the rest")
    doctor.add_argument(
        "--data", type=Path, default=Path(), help="the folder whose drive is looked at (%(default)s)"
    )
    doctor.add_argument("--json", action="store_true", help="for programs")
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench",
        help="measure what this machine gives, part by part and as a whole",
        description="Measure this machine: its memory, link and drive alone, the node's software, and the whole"
        " path; about two minutes for all of them. `kvsim calibrate` uses it.",
    )
    bench.add_argument(
        "parts", nargs="*", metavar="PART", help="memory, link, drive, node, path (by default all of them)"
    )
    bench.add_argument(
        "--data", type=Path, default=Path(), help="a folder on the drive to measure (%(default)s)"
    )
    bench.add_argument("--json", action="store_true", help="for programs")
    bench.set_defaults(run=_bench)


def _add_fabric(serve: argparse.ArgumentParser) -> None:
    """Where the node's endpoints are, and who may have one."""
    serve.add_argument("--provider", help="libfabric provider; by default the best there is")
    serve.add_argument(
        "--fabric-address",
        metavar="HOST",
        help="where clients reach the fabric; by default where the node listens, or its address on the way to them",
    )
    serve.add_argument(
        "--fabric-ports",
        metavar="FIRST-LAST",
        help="ports of the fabric, one for each client; by default any on loopback, else"
        f" {FABRIC_PORT_FIRST}-{FABRIC_PORT_LAST}",
    )
    serve.add_argument(
        "--fabric-clients",
        metavar="CIDR[,CIDR]",
        help="clients' fabric addresses that need not be where their calls come from: of hosts with several",
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kvstore", description="A storage node for the KV caches of large language models."
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    serve = commands.add_parser("serve", help="run a storage node", description="Run a storage node.")
    serve.add_argument("--data", type=Path, required=True, help="the node's folder")
    serve.add_argument(
        "--drive",
        action="append",
        default=[],
        metavar="PATH[:SIZE]",
        help="a file, made with this size if it is not there, or a raw block device; again for each further one",
    )
    serve.add_argument(
        "--without-drive",
        action="append",
        default=[],
        type=int,
        metavar="NUMBER",
        help="go on without this drive of the folder; what is on it is forgotten when it comes back",
    )
    serve.add_argument("--listen", default="127.0.0.1:7070", help="HOST:PORT; port 0 takes any (%(default)s)")
    _add_fabric(serve)
    serve.add_argument(
        "--capacity", default="1GiB", help="size of a new folder's only drive, a file (%(default)s)"
    )
    serve.add_argument(
        "--hot", default="256MiB", help="memory in which blocks that are read stay (%(default)s)"
    )
    serve.add_argument(
        "--eviction",
        metavar="POLICY",
        default="lru",
        help="which blocks go when room is needed: lru or s3fifo (%(default)s)",
    )
    serve.add_argument(
        "--tied", action="store_true", help="stop when standard input ends, as it does when the starter dies"
    )
    serve.add_argument(
        "--tenants", type=Path, help="a file of tenants and their tokens; SIGHUP reads it again"
    )
    serve.add_argument("--tls-cert", type=Path, help="the node's certificate and its chain, PEM")
    serve.add_argument("--tls-key", type=Path, help="its key, PEM")
    serve.add_argument(
        "--tls-clients", type=Path, help="authorities, PEM; clients need a certificate of theirs"
    )
    serve.add_argument("--audit", type=Path, help="a file for who came and who was turned away")
    serve.add_argument(
        "--events",
        metavar="ENDPOINT",
        help="publish KV events over ZeroMQ on tcp://127.0.0.1:PORT or ipc://PATH",
    )
    serve.add_argument("--events-replay", metavar="ENDPOINT", help="where events can be asked for again")
    serve.add_argument(
        "--events-as",
        choices=("maps", "arrays"),
        default="maps",
        help="how an event is written (%(default)s)",
    )
    serve.add_argument(
        "--http", metavar="HOST:PORT", help="serve /metrics, for Prometheus, /healthz and /readyz there"
    )
    serve.add_argument("--ui", action="store_true", help="and a web page of the node")
    serve.add_argument(
        "--otel",
        metavar="ENDPOINT",
        help="send OpenTelemetry spans over OTLP/gRPC to http://HOST:PORT or https://HOST:PORT",
    )
    serve.set_defaults(run=_serve)

    token = commands.add_parser(
        "token",
        help="make a token for a tenant",
        description="Make a token, and the digest of it that stands in the node's file of tenants.",
    )
    token.set_defaults(run=_token)

    _add_trials(commands)

    fsck = commands.add_parser(
        "fsck",
        help="check a node's data folder while no node has it open",
        description="Check the drive's superblock and headers, and the index against them. Exit status 0 if nothing"
        " is wrong, 2 if something is, 1 if the folder could not be checked.",
    )
    fsck.add_argument("data", type=Path, metavar="DATA", help="the node's folder")
    fsck.add_argument(
        "--repair", action="store_true", help="make an index that is wrong anew from what is on the drive"
    )
    fsck.add_argument("--payloads", action="store_true", help="read every block and check its CRC as well")
    fsck.set_defaults(run=_fsck)

    add_node_commands(commands)
    _add_match(commands)
    return parser


def _add_match(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    match = commands.add_parser(
        "match",
        help="check a file of match-action rules, and say which one a request hits",
        description="Check a file of match-action rules, show them in the order in which they win, and say"
        " which one a request hits. It reads the file only; no node is asked.",
    )
    match.add_argument(
        "rules", type=Path, metavar="RULES.toml", help="the rules, as docs/match-action.md says"
    )
    match.add_argument("--request", metavar="FIELD=VALUE,...", help="all nine fields of one request")
    match.add_argument("--json", action="store_true", help="for programs")
    match.set_defaults(run=_match)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors of ours are one sentence and exit status 1."""
    arguments = _parser().parse_args(argv)
    try:
        status: int = arguments.run(arguments)
    except KvError as error:
        print(f"kvstore: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return status
