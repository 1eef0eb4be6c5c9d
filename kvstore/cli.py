"""The `kvstore` command. Each subcommand imports what it needs when it is run, so `--help` needs nothing.

`kvcli.running` handles every way it can end; docs/commands.md lists commands and exit statuses.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from kvcli.completion import add_completion, script
from kvcli.running import CommandParser, Status, add_commands, ended_by, run_command
from kvcli.version import add_version
from kvstore.commands.block_commands import add_block_commands
from kvstore.commands.node_commands import DEFAULT_NODE, add_node_commands, reach, reach_node
from kvstore.config import silence_grpc
from kvstore.errors import ConfigError, KvError, NoKeyring, NoProvider, NoSession, RuleError, UsageError
from kvstore.limits import CERTIFICATE_DAYS_MAX
from kvstore.serve_options import add_options

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

__all__ = ["main"]


def _serve(arguments: argparse.Namespace) -> int:
    try:
        from kvstore.node.server import serve
        from kvstore.serve_options import check_machine, settings

        chosen = settings(arguments)
        check_machine(chosen.node())
        return serve(chosen, lambda: settings(arguments))
    except KeyboardInterrupt:  # before the node handles signals itself
        return Status.DONE


def _config(arguments: argparse.Namespace) -> int:
    from kvstore.serve_options import check_file, check_machine, defaults_shown

    if arguments.print_defaults:
        print(defaults_shown(), end="")
    elif arguments.client:
        from kvstore.commands.show_commands import table
        from kvstore.reach import settings_in_effect

        print("\n".join(table(settings_in_effect(DEFAULT_NODE))))
    else:
        config = check_file(arguments.check)
        print(f"{arguments.check}: valid")
        try:
            check_machine(config)
        except KvError as error:
            print(f"On this machine a node would not start with it: {error}")
            return Status.NO
    return Status.DONE


def _completion(arguments: argparse.Namespace) -> int:
    print(script(_parser(), arguments.shell), end="")
    return 0


def _token(arguments: argparse.Namespace) -> int:
    from kvstore.commands.token_command import make
    from kvstore.node.tenants import token_digest

    return make(arguments.out, token_digest)


def _certificates(arguments: argparse.Namespace) -> int:
    from kvstore.commands.certificates_command import make

    if not 1 <= arguments.days <= CERTIFICATE_DAYS_MAX:
        raise ConfigError(f"--days takes 1 to {CERTIFICATE_DAYS_MAX}, not {arguments.days}.")
    return make(arguments.folder, arguments.node, arguments.client, arguments.days)


def _demo(arguments: argparse.Namespace) -> int:
    from kvstore.demo.demo import run

    return run(arguments.data)


def _chat(arguments: argparse.Namespace) -> int:
    from kvstore.demo.chat_demo import run

    return run(arguments.turns, arguments.tokens, as_json=arguments.json)


def _doctor(arguments: argparse.Namespace) -> int:
    from kvstore.commands.doctor import run, show

    if arguments.node is None:
        if not arguments.data.is_dir():
            raise ConfigError(f"{arguments.data} is not a folder; name one on the drive to check.")
        return run(arguments.data, as_json=arguments.json)
    from kvstore.commands.doctor_node import check_node

    reached = reach(arguments)
    return max(show(list(check_node(reached.at(node))), as_json=arguments.json) for node in reached.nodes)


def _bench(arguments: argparse.Namespace) -> int:
    from kvstore.bench.command import run

    return run(arguments.parts, arguments.data, as_json=arguments.json)


def _fsck(arguments: argparse.Namespace) -> int:
    from kvstore.sealing.store_keys import keys_opener
    from kvstore.storage.fsck import run

    open_keys = keys_opener(arguments.data, arguments.master_key)
    return run(arguments.data, repair=arguments.repair, payloads=arguments.payloads, open_keys=open_keys)


def _keys(arguments: argparse.Namespace) -> int:
    from kvstore.commands.keys_command import run

    return run(arguments)


def _match(arguments: argparse.Namespace) -> int:
    from kvstore.commands.match_command import run

    return run(arguments.rules, arguments.request, as_json=arguments.json)


def _add_trials(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """The commands that try things out on this machine."""
    demo = commands.add_parser(
        "demo",
        help="show the whole path at work on this machine",
        description="Put blocks by stores to a flag, kill the node with SIGKILL, restart it, get the blocks, and"
        " compare every byte. Exit status 1 if one differs.",
    )
    demo.add_argument(
        "--data", type=Path, help="where to keep the demo's data; by default a folder that is removed"
    )
    demo.set_defaults(run=_demo)

    chat = commands.add_parser(
        "chat",
        help="show a chat that continues in another process",
        description="Chat with a small model of random weights, kill the node, and continue in another process."
        " Needs torch and transformers.",
    )
    chat.add_argument("--turns", type=int, default=3, help="turns before the node is killed (%(default)s)")
    chat.add_argument("--tokens", type=int, default=800, help="tokens of each prompt (%(default)s)")
    chat.add_argument("--json", action="store_true", help="print JSON, for programs")
    chat.set_defaults(run=_chat)

    doctor = commands.add_parser(
        "doctor",
        help="check this machine, or why a node can't be reached",
        description="Check what this machine offers a node, and say what to do about the rest. With --node, check each"
        " step towards a node: name, connection, TLS, tenant, fabric.",
    )
    doctor.add_argument(
        "--data", type=Path, default=Path(), help="a folder on the drive to check (%(default)s)"
    )
    reach_node(doctor)
    doctor.set_defaults(run=_doctor)

    bench = commands.add_parser(
        "bench",
        help="measure this machine, part by part and as a whole",
        description="Measure this machine: its memory, link and drive alone, the node's software, and the whole"
        " path; about two minutes for all of them. `kvsim calibrate` uses it.",
    )
    bench.add_argument(
        "parts", nargs="*", metavar="PART", help="memory, link, drive, node, path (by default all of them)"
    )
    bench.add_argument(
        "--data", type=Path, default=Path(), help="a folder on the drive to measure (%(default)s)"
    )
    bench.add_argument("--json", action="store_true", help="print JSON, for programs")
    bench.set_defaults(run=_bench)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="kvstore",
        description="A storage node for the KV caches of large language models.",
        epilog="Exit status: 0 success, 1 failure, 2 usage error, 3 the answer is no, for example a miss.",
    )
    add_version(parser)
    commands = add_commands(parser)

    serve = commands.add_parser("serve", help="run a storage node", description="Run a storage node.")
    add_options(serve)
    serve.set_defaults(run=_serve)

    config = commands.add_parser(
        "config",
        help="check a file of a node's settings, print one, or show a client's",
        description="Check a file of settings for `kvstore serve --config`, or print one with the defaults. Or"
        " show how commands reach their node, and where each setting comes from.",
    )
    action = config.add_mutually_exclusive_group(required=True)
    action.add_argument("--check", type=Path, metavar="FILE", help="check a file")
    action.add_argument("--print-defaults", action="store_true", help="print a file with the defaults")
    action.add_argument("--client", action="store_true", help="show how commands reach their node")
    config.set_defaults(run=_config)

    token = commands.add_parser(
        "token",
        help="make a token for a tenant",
        description="Make a token, and its digest for the node's tenants file.",
    )
    token.add_argument(
        "--out",
        type=Path,
        metavar="FILE",
        help="write the token to this new file, which only its owner can read",
    )
    token.set_defaults(run=_token)

    certificates = commands.add_parser(
        "certificates",
        help="make a CA, and certificates for nodes and clients",
        description="Make a CA unless the folder has one, and certificates that it signs: of nodes, by the"
        " names and addresses that clients reach them at, and of clients, by the names in a node's file of tenants.",
    )
    certificates.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the folder for certificates and keys"
    )
    certificates.add_argument(
        "--node",
        action="append",
        default=[],
        metavar="HOST[,HOST...]",
        help="names and addresses of one node; repeat for more nodes",
    )
    certificates.add_argument(
        "--client",
        action="append",
        default=[],
        metavar="NAME",
        help="name of one client; repeat for more clients",
    )
    certificates.add_argument("--days", type=int, default=365, help="validity in days (%(default)s)")
    certificates.set_defaults(run=_certificates)

    _add_trials(commands)

    fsck = commands.add_parser(
        "fsck",
        help="check the data folder of a stopped node",
        description="Check the drive's superblock and headers, and the index against them. Exit status 0 if nothing"
        " is wrong, 3 if something is.",
    )
    fsck.add_argument("data", type=Path, metavar="DATA", help="the node's folder")
    fsck.add_argument("--repair", action="store_true", help="rebuild a wrong index from the drive")
    fsck.add_argument("--payloads", action="store_true", help="read every block and check its CRC as well")
    fsck.add_argument("--master-key", metavar="KIND:WHERE", help="needed if the node's records are encrypted")
    fsck.set_defaults(run=_fsck)

    _add_keys(commands)
    add_block_commands(commands)
    add_node_commands(commands)
    _add_match(commands)
    add_completion(commands).set_defaults(run=_completion)
    return parser


def _add_keys(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    keys = commands.add_parser(
        "keys",
        help="make a master key; show and rotate a node's keys; replace a lost keyring",
        description="Make a master key; show a keyring; seal it with another master key; rotate tenants' keys; or"
        " continue with a new keyring, or an older copy, when the right one is lost.",
    )
    actions = ("new-master", "status", "rotate-master", "rotate-tenant", "new-keyring", "accept-keyring")
    keys.add_argument("action", choices=actions)
    keys.add_argument("file", nargs="?", type=Path, metavar="FILE", help="the file that new-master makes")
    keys.add_argument("--data", type=Path, help="the node's folder")
    keys.add_argument(
        "--master-key",
        metavar="KIND:WHERE",
        help="file:PATH, credential:NAME, command:COMMAND, or vault:URL?token=FILE",
    )
    keys.add_argument("--new-master-key", metavar="KIND:WHERE", help="the one to seal the keyring with")
    keys.add_argument(
        "--tenant", metavar="ID", help="a tenant as `status` shows it; by default each of them is rotated"
    )
    keys.add_argument("--yes", action="store_true", help="give up what can't be read without the lost keys")
    keys.add_argument("--json", action="store_true", help="print JSON, for programs")
    keys.set_defaults(run=_keys)


def _add_match(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    match = commands.add_parser(
        "match",
        help="check a file of match-action rules, and say which one a request hits",
        description="Check a file of match-action rules, show them in order of precedence, and say which one a"
        " request hits. It reads only the file and contacts no node.",
    )
    match.add_argument("rules", type=Path, metavar="RULES.toml", help="the file of rules")
    match.add_argument("--request", metavar="FIELD=VALUE,...", help="all nine fields of one request")
    match.add_argument("--json", action="store_true", help="print JSON, for programs")
    match.set_defaults(run=_match)


def _status_of(error: Exception) -> Status | None:
    if isinstance(error, NoSession):
        return Status.NO
    if isinstance(error, (NoKeyring, NoProvider, RuleError, UsageError)):
        return Status.USAGE
    return Status.FAILED if isinstance(error, KvError) else None


def _check_text(arguments: argparse.Namespace) -> None:
    """Raise UnicodeEncodeError for an argument that is not UTF-8; the name of a file, a `Path`, may be."""
    for value in vars(arguments).values():
        for one in value if isinstance(value, list) else [value]:
            if isinstance(one, str):
                one.encode()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; errors of ours are one sentence, and the exit status says which kind."""

    def work() -> int:
        silence_grpc()  # commands report failures in their own words
        arguments = _parser().parse_args(argv)
        try:
            _check_text(arguments)
            status: int = arguments.run(arguments)
        except (KvError, OSError, UnicodeEncodeError) as error:
            ended = ended_by(error, _status_of(error))
            is_told = getattr(arguments, "json", False) and not isinstance(error, BrokenPipeError)
            if ended is not None and is_told:
                ours = UsageError if ended[0] is Status.USAGE else KvError
                kind = type(error) if isinstance(error, KvError) else ours
                print(json.dumps({"error": kind.__name__, "message": ended[1]}))
            raise
        return status

    return run_command("kvstore", work, _status_of, ends_process=argv is None)
