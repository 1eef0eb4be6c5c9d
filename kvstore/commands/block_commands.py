"""`kvstore put`, `get`, `delete`, `pin`, `erase` and `watch`: single blocks by hand, and a tenant's events.

A key is written as 64 hexadecimal digits, or as `name:TEXT`, which stands for `block_key(TEXT)`. What always holds:
of a cluster, the block's owners are asked, and a deletion asks all nodes; a file that `get` writes appears only when
it is complete; a missing block is reported on standard error, with exit status 3.

Each command imports what it needs when it is run, so that `--help` needs nothing.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Final

from kvcli.running import Status, check_reader
from kvstore.commands.node_commands import reach, reach_node
from kvstore.commands.whole_file import whole_file
from kvstore.config import counted, printable, show_size
from kvstore.errors import ConfigError, KvError
from kvstore.limits import BLOCK_BYTES_MAX, KEY_BYTES, PIN_TIMEOUT_MS_MAX, REPLICAS_MAX, WATCH_S_MAX
from kvstore.names import block_key, in_domain, is_in_domain

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from kvstore.client import Client, ClusterClient, Happened
    from kvstore.client.blocks import HasFingerprint

__all__ = ["add_block_commands", "parse_key"]

_NAME: Final = "name:"
_PIN_S_MAX: Final = PIN_TIMEOUT_MS_MAX // 1000
_KEY: Final = "64 hexadecimal digits, or name:TEXT"


def parse_key(text: str) -> bytes:
    """Parse a key from the command line."""
    if text == _NAME:
        raise ConfigError(f"A key is {_KEY}, and {text} is followed by no text.")
    if text.startswith(_NAME):
        return block_key(text.removeprefix(_NAME).encode())
    with suppress(ValueError):
        key = bytes.fromhex(text)
        if len(key) == KEY_BYTES and len(text) == 2 * KEY_BYTES:
            return key
    raise ConfigError(f"A key is {_KEY}, not {text!r}.")


def _cluster(arguments: argparse.Namespace, layout: bytes = b"") -> ClusterClient:
    """A client of the whole cluster; of one node, if it is in none."""
    from kvstore.client import ClusterClient

    return ClusterClient(reach(arguments), layout=layout)


def _client(arguments: argparse.Namespace, node: str, layout: HasFingerprint | bytes = b"") -> Client:
    from kvstore.client import Client

    return Client(reach(arguments).at(node), layout=layout)


def _owners(arguments: argparse.Namespace, key: bytes) -> list[str]:
    """The nodes that may have a block."""
    from kvstore.client import ClusterClient

    with ClusterClient(reach(arguments), replicas=REPLICAS_MAX) as cluster:
        return cluster.owners(key)


def _keys(texts: Sequence[str], arguments: argparse.Namespace) -> list[bytes]:
    """The keys of blocks, of the user that the command or a setting names."""
    if arguments.owner == "":  # a variable that is not set: nobody could erase the block as this user's
        raise ConfigError("A user's name is not empty.")
    keys, domain = [parse_key(text) for text in texts], reach(arguments).domain
    return [key if is_in_domain(key) else in_domain(key, domain) for key in keys]


def _put(arguments: argparse.Namespace) -> int:
    (key,) = _keys([arguments.block], arguments)
    data = _read(arguments.file)
    with _cluster(arguments, arguments.layout.encode()) as cluster:
        reached = cluster.put_inline(key, data)
    document = {"key": key.hex(), "bytes": len(data), "durability": reached.name.lower()}
    _say(f"{key.hex()} {document['durability']}, {show_size(len(data))}", document, arguments)
    return Status.DONE


def _read(path: Path) -> bytes:
    """Read a whole file, unless it is larger than a block may be."""
    try:
        with sys.stdin.buffer if str(path) == "-" else path.open("rb") as file:
            data: bytes = file.read(BLOCK_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path} could not be read: {error.strerror}.") from error
    if not 1 <= len(data) <= BLOCK_BYTES_MAX:
        has = "more" if data else "none"
        raise ConfigError(f"A block has 1 byte to {show_size(BLOCK_BYTES_MAX)}, and {path} has {has}.")
    return data


def _get(arguments: argparse.Namespace) -> int:
    from kvstore.client.blocks import KnownLayout
    from kvstore.miss import Miss

    (key,) = _keys([arguments.block], arguments)
    for node in (owners := _owners(arguments, key)):
        with _client(arguments, node) as client, suppress(*(() if node == owners[-1] else (KvError,))):
            (found,) = client.exists([key], any_layout=True)
            if not isinstance(found, Miss):
                break
    # The get is sent for a miss, too, so that the node counts it.
    fingerprint, length = (b"", 1) if isinstance(found, Miss) else (found.fingerprint, found.length)
    with _client(arguments, node, KnownLayout(fingerprint) if fingerprint else b"") as client:
        outcome = client.get_inline(key, length)
        if isinstance(outcome, Miss):
            why = found if isinstance(found, Miss) else outcome
            if not why.detail:
                why = Miss(why.reason, str(client.explain([key])[0]))
            print(f"kvstore: {arguments.block}: {why}", file=sys.stderr)
            if arguments.json:
                reason = {"reason": why.reason.name.lower(), "detail": why.detail}
                print(json.dumps({"key": key.hex(), "found": False, **reason}))
            return Status.NO
    if str(arguments.file) == "-":
        sys.stdout.buffer.write(outcome)
        return Status.DONE
    with whole_file(arguments.file) as file:
        file.write(outcome)
    if arguments.json:
        print(json.dumps({"key": key.hex(), "found": True, "bytes": len(outcome)}))
    return Status.DONE


def _delete(arguments: argparse.Namespace) -> int:
    keys = _keys(arguments.keys, arguments)
    with _cluster(arguments) as cluster:
        found = cluster.delete(keys)
    return _each(keys, found, ("deleted", "not stored"), arguments)


def _pin(arguments: argparse.Namespace) -> int:
    if not 1 <= arguments.seconds <= _PIN_S_MAX:
        raise ConfigError(f"--seconds takes 1 to {_PIN_S_MAX}, not {arguments.seconds}.")
    keys = _keys(arguments.keys, arguments)
    with _cluster(arguments) as cluster:
        # Not closed: the pin outlives the command until it expires.
        pinned = cluster.pin(keys, time_to_live_ms=1000 * arguments.seconds).pinned
    return _each(keys, pinned, ("pinned", "not stored"), arguments)


def _erase(arguments: argparse.Namespace) -> int:
    if (arguments.user is None) == (not arguments.whole_tenant):
        raise ConfigError("Say what to erase: --user NAME, or --whole-tenant.")
    if arguments.whole_tenant and not arguments.yes:
        print("kvstore: Nothing was erased: --yes erases all that the tenant stored.", file=sys.stderr)
        if arguments.json:
            print(json.dumps({"erased": False}))
        return Status.NO
    with _cluster(arguments) as client:
        done = client.erase_tenant() if arguments.user is None else client.erase_user(arguments.user)
    for one in done:
        how = json.loads(one.receipt)["how"]  # which begins with "keys" if any were destroyed
        how = f"{one.keys} {how}" if one.keys else how
        print(
            one.receipt
            if arguments.json
            else f"{one.node}: erased {counted(one.sessions, 'session')} and {counted(one.blocks, 'block')}"
            f" of {show_size(one.size_bytes)}: {how}"
        )
    return Status.DONE


def _each(
    keys: list[bytes], outcomes: list[bool], words: tuple[str, str], arguments: argparse.Namespace
) -> int:
    """Print the result for each; returns the exit status."""
    for key, done in zip(keys, outcomes, strict=True):
        word = words[0] if done else words[1]
        _say(f"{key.hex()} {word}", {"key": key.hex(), words[0]: done}, arguments)
    return Status.DONE if all(outcomes) else Status.NO


def _watch(arguments: argparse.Namespace) -> int:
    if not 0 < arguments.seconds <= WATCH_S_MAX:
        raise ConfigError(
            f"--seconds must be more than 0 and at most {WATCH_S_MAX:.0f}, not {arguments.seconds:g}."
        )
    with _client(arguments, reach(arguments).nodes[0]) as client:
        for event in client.watch(timeout_s=arguments.seconds):
            if event is None:
                check_reader()  # or `| head -1` would take one of the tenant's few watchers until the next event
            else:
                _say(_line(event), _document(event), arguments)
                sys.stdout.flush()
    return Status.DONE


def _line(event: Happened) -> str:
    whose = f"session {printable(event.user)}/{printable(event.session)}, {counted(event.blocks, 'block')}"
    lost = f" ({event.dropped} events before it were not sent)" if event.dropped else ""
    at = f"{datetime.fromtimestamp(event.at_unix_ms / 1000, UTC):%Y-%m-%d %H:%M:%S.%f}"[:-3]
    return f"{at} UTC  {event.what} {event.key.hex() or whose}{lost}"


def _document(event: Happened) -> dict[str, object]:
    about: dict[str, object] = (
        {"key": event.key.hex()}
        if event.key
        else {"user": event.user, "session": event.session, "blocks": event.blocks}
    )
    return {"unix_ms": event.at_unix_ms, "what": event.what, **about, "dropped": event.dropped}


def _say(line: str, document: dict[str, object], arguments: argparse.Namespace) -> None:
    print(json.dumps(document) if arguments.json else line)


def _reach_blocks(parser: argparse.ArgumentParser) -> None:
    """The options that say whose block it is, and where."""
    parser.add_argument(
        "--user", dest="owner", metavar="NAME", help="the block's owner: it is erased with this user"
    )
    parser.add_argument(
        "--shared",
        action="store_true",
        default=None,
        help="the block is shared by all users, and erased with the tenant",
    )
    reach_node(parser)


def add_block_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the others."""
    put = commands.add_parser(
        "put",
        help="store a file as one block",
        description="Store a file as one block, copied over gRPC, and wait until it is written to the node's drive."
        f" A key is {_KEY}. A node that encrypts needs --user or --shared; a block of a user has another key, which is"
        " printed.",
    )
    put.add_argument("block", metavar="KEY", help=_KEY)
    put.add_argument("file", type=Path, metavar="FILE", help="the file to store; - is standard input")
    put.add_argument("--layout", default="", help="the layout of the bytes, as in `Client(layout=)`")
    _reach_blocks(put)
    put.set_defaults(run=_put)

    get = commands.add_parser(
        "get",
        help="write a block to standard output or into a file",
        description="Write a block of any layout to standard output or into a file. Exit status 3"
        " if it is a miss, with its reason. With --json, an object follows a block that goes into a file, or stands for"
        " a miss.",
    )
    get.add_argument("block", metavar="KEY", help=_KEY)
    get.add_argument(
        "file", nargs="?", type=Path, default=Path("-"), metavar="FILE", help="by default standard output"
    )
    _reach_blocks(get)
    get.set_defaults(run=_get)

    erase = commands.add_parser(
        "erase",
        help="erase a user, or all that a tenant stored",
        description="Erase a user's sessions and blocks, or all that the tenant stored, on the node and on all others"
        " of its cluster. The keys of encrypted data are destroyed; data in the clear is overwritten. Prints a line for"
        " each node; with --json, its receipt.",
    )
    erase.add_argument("--user", metavar="NAME", help="the user whose sessions and blocks are erased")
    erase.add_argument(
        "--whole-tenant", action="store_true", help="everything of the caller's tenant; with --yes"
    )
    erase.add_argument(
        "--yes", action="store_true", help="erase a whole tenant: nothing of it can be restored"
    )
    reach_node(erase)
    erase.set_defaults(run=_erase, user=None)

    delete = commands.add_parser(
        "delete",
        help="delete blocks permanently",
        description="Delete blocks permanently. Exit status 3 if one of them was not stored.",
    )
    delete.add_argument("keys", nargs="+", metavar="KEY", help=_KEY)
    _reach_blocks(delete)
    delete.set_defaults(run=_delete)

    pin = commands.add_parser(
        "pin",
        help="protect blocks from eviction for a while",
        description="Protect blocks from eviction for a while. A pin outlives the command until it expires. Exit"
        " status 3 if one of them is not stored.",
    )
    pin.add_argument("keys", nargs="+", metavar="KEY", help=_KEY)
    pin.add_argument(
        "--seconds",
        type=int,
        default=60,
        metavar="S",
        help=f"how long to pin, in seconds, {_PIN_S_MAX} at most (%(default)s)",
    )
    _reach_blocks(pin)
    pin.set_defaults(run=_pin)

    watch = commands.add_parser(
        "watch",
        help="show events of the tenant's blocks and sessions as they happen",
        description="Show an event per line: blocks of the tenant that are stored or removed, and sessions that change."
        " With --json, an object per line.",
    )
    watch.add_argument(
        "--seconds",
        type=float,
        default=WATCH_S_MAX,
        metavar="S",
        help="how long to watch, in seconds (%(default).0f)",
    )
    reach_node(watch)
    watch.set_defaults(run=_watch)
