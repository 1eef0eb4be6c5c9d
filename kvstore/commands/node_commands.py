"""The commands that call a running node: their flags, and how they reach it.

Each command imports what it needs when it is run, so that `--help` needs nothing.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from kvstore.errors import ConfigError
from kvstore.limits import REACH_TIMEOUT_MS_MAX, TOP_INTERVAL_S_MAX, TOP_INTERVAL_S_MIN

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable

    from kvstore.client import Client
    from kvstore.commands.sessions_command import Asked
    from kvstore.reach import Reach

__all__ = ["add_node_commands", "reach", "reach_node"]

_TIMEOUTS = {"connect": "a connection to the node", "call": "a call", "get": "a get of blocks"}
DEFAULT_NODE = "127.0.0.1:7070"  # where `kvstore serve` listens by default


def reach_node(parser: argparse.ArgumentParser, *, whose_user: bool = False) -> None:
    """The options of every command that calls a node; `kvstore.reach` supplies those not given."""
    parser.add_argument(
        "--node",
        metavar="HOST:PORT",
        help=f"the node, or several with commas (TRIGGERKV_NODE, the client's settings, or {DEFAULT_NODE})",
    )
    if whose_user:
        parser.add_argument(
            "--user",
            required=True,
            help="the user whose sessions these are; a node stores users as digests only",
        )
    else:
        parser.set_defaults(user="")
    parser.add_argument("--tenant", help="the tenant, on a node without tokens")
    parser.add_argument("--token-file", type=Path, help="a file with the tenant's token")
    parser.add_argument(
        "--tls", action="store_true", default=None, help="use TLS, with the system's trusted CAs"
    )
    parser.add_argument("--ca", type=Path, help="trusted CA for the node's certificate, PEM; turns TLS on")
    parser.add_argument("--certificate", type=Path, help="the client's certificate, PEM")
    parser.add_argument("--key", type=Path, help="its key, PEM")
    for name, what in _TIMEOUTS.items():
        parser.add_argument(f"--{name}-timeout-ms", type=int, metavar="MS", help=f"timeout for {what}")
    parser.add_argument("--json", action="store_true", help="print JSON, for programs")


def reach(arguments: argparse.Namespace) -> Reach:
    """How a command reaches its node, from its arguments."""
    from kvstore.reach import Reach, reach_settings

    for name in _TIMEOUTS:
        value = getattr(arguments, f"{name}_timeout_ms")
        if value is not None and not 1 <= value <= REACH_TIMEOUT_MS_MAX:
            raise ConfigError(f"--{name}-timeout-ms takes 1 to {REACH_TIMEOUT_MS_MAX}, not {value}.")
    names = reach_settings() & vars(arguments).keys() - {"node", "user"}
    given = {"nodes": arguments.node, **{name: getattr(arguments, name) for name in names}}
    given["user"] = getattr(
        arguments, "owner", None
    )  # other commands' `--user` names the user whose sessions they show
    return Reach.of(given, where="the command", default_node=DEFAULT_NODE)


def _asked(arguments: argparse.Namespace) -> Asked:
    """The node to ask: the only one, or the user's home."""
    from kvstore.commands.sessions_command import Asked

    reached = reach(arguments)
    if arguments.user and len(reached.nodes) > 1:
        from kvstore.client import Nodes

        with Nodes(reached) as nodes:
            reached = reached.at(nodes.home(arguments.user))
    return Asked(reached, arguments.user)


def _of_each(arguments: argparse.Namespace, show: Callable[[Client], int]) -> int:
    """Ask each of the nodes in turn; the worst of their exit statuses."""
    from kvstore.client import Client

    reached = reach(arguments)
    if arguments.json and len(reached.nodes) > 1:
        raise ConfigError("--json shows one node at a time.")
    worst = 0
    for node in reached.nodes:
        if len(reached.nodes) > 1:
            print(f"{node}:")  # noqa: T201 - a command prints
        with Client(reached.at(node)) as client:
            worst = max(worst, show(client))
    return worst


def _sessions(arguments: argparse.Namespace) -> int:
    from kvstore.commands.sessions_command import Asked, copy_all, export_one, import_one, list_all

    if arguments.action == "copy":
        return copy_all(Asked(reach(arguments), arguments.user), arguments.session, as_json=arguments.json)
    if arguments.action == "list":
        return list_all(_asked(arguments), as_json=arguments.json)
    if arguments.session is None or arguments.file is None:
        raise ConfigError(f"To {arguments.action} a session, give --session and --file.")
    act = export_one if arguments.action == "export" else import_one
    return act(_asked(arguments), arguments.session, arguments.file, as_json=arguments.json)


def _trace(arguments: argparse.Namespace) -> int:
    from kvstore.commands.trace_command import run

    return run(_asked(arguments), arguments.session, as_json=arguments.json)


def _explain(arguments: argparse.Namespace) -> int:
    from kvstore.commands.explain_command import explain

    user, _, name = (arguments.session or "").partition("/")
    if bool(user) != bool(name):
        raise ConfigError(f"--session takes USER/NAME, and {arguments.session!r} is not of that form.")
    if not arguments.request and not user and not arguments.last:
        raise ConfigError("Give a request, --session USER/NAME, or --last N.")
    if arguments.last < 0:
        raise ConfigError(f"--last must be a number of look-ups, not {arguments.last}.")
    return explain(reach(arguments), arguments.request, (user, name), arguments.last, as_json=arguments.json)


def _stats(arguments: argparse.Namespace) -> int:
    from kvstore.commands.show_commands import stats

    return _of_each(arguments, lambda client: stats(client, as_json=arguments.json))


def _drives(arguments: argparse.Namespace) -> int:
    from kvstore.commands.show_commands import drives

    return _of_each(arguments, lambda client: drives(client, as_json=arguments.json))


def _cluster(arguments: argparse.Namespace) -> int:
    from kvstore.commands.cluster_command import drain, forget, plan, show

    if arguments.planned_zone is not None and arguments.action != "plan":
        raise ConfigError(
            f"kvstore cluster {arguments.action} takes no --zone: it is that of a node to plan for."
        )
    if arguments.action == "status":
        if arguments.member is not None:
            raise ConfigError("kvstore cluster status takes no HOST:PORT: name the node to ask with --node.")
        return show(reach(arguments), as_json=arguments.json)
    if arguments.member is None:
        raise ConfigError(f"Give a node: kvstore cluster {arguments.action} HOST:PORT.")
    if arguments.action == "forget":
        return forget(reach(arguments), arguments.member, as_json=arguments.json)
    if arguments.action == "plan":
        return plan(reach(arguments), arguments.member, arguments.planned_zone or "", as_json=arguments.json)
    undo = arguments.action == "join"
    return drain(reach(arguments), arguments.member, undo=undo, as_json=arguments.json)


def _top(arguments: argparse.Namespace) -> int:
    import sys
    from threading import Event

    from kvstore.clock import SystemClock
    from kvstore.commands.top_command import Top

    if not TOP_INTERVAL_S_MIN <= arguments.interval <= TOP_INTERVAL_S_MAX:
        raise ConfigError(
            f"--interval takes {TOP_INTERVAL_S_MIN:g} to {TOP_INTERVAL_S_MAX:g} seconds, not {arguments.interval:g}."
        )
    with _asked(arguments).client() as client:
        top = Top(client, client.target, SystemClock(), Event().wait, sys.stdout)
        return top.run(arguments.interval, once=arguments.once, as_json=arguments.json)


def add_node_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add them to the others."""
    sessions = commands.add_parser(
        "sessions",
        help="list a user's sessions on a node, export one, import one, or copy them to the user's home",
        description="List a user's sessions on a node, the one with the latest turn last; export one with its"
        " blocks into a file; import one from a file under a free name; or copy those of a node that is no longer the"
        " user's home to the home, unless it has them.",
    )
    sessions.add_argument("action", nargs="?", choices=("list", "export", "import", "copy"), default="list")
    sessions.add_argument(
        "--session", help="the session to export or copy (all), or the name for the imported one"
    )
    sessions.add_argument("--file", type=Path, help="the file to write or read")
    reach_node(sessions, whose_user=True)
    sessions.set_defaults(run=_sessions)

    trace = commands.add_parser(
        "trace",
        help="show the eight steps of a session's last turns, with times",
        description="Show the events of a session's last turns, from the node and its clients: the eight steps"
        " from registering memory to resuming the session. It says when each step happened; why blocks hit or missed,"
        " `kvstore explain --session` says. Exit status 3 if the node has no events, or no such session.",
    )
    trace.add_argument("session", metavar="SESSION", help="the session's name")
    reach_node(trace, whose_user=True)
    trace.set_defaults(run=_trace)

    explain = commands.add_parser(
        "explain",
        help="say why a request's blocks hit or missed, how long it took, and what to do about it",
        description="Show for each look-up of a request which blocks hit or missed, why, where the time went,"
        " and what to do about it. In a cluster, all nodes are asked. It lists look-ups; when a session's puts and the"
        " client's own steps happened, `kvstore trace` says. Exit status 3 if there is no such look-up.",
    )
    explain.add_argument(
        "request", nargs="?", default="", metavar="REQUEST", help="the engine's id of the request"
    )
    explain.add_argument("--session", metavar="USER/NAME", help="look-ups of this session only")
    explain.add_argument("--last", type=int, default=0, metavar="N", help="the last N look-ups only")
    reach_node(explain)
    explain.set_defaults(run=_explain)

    stats = commands.add_parser(
        "stats",
        help="show a node's counters and gauges",
        description="Show a node's counters since its start, its current gauges, and the tenant's own quota.",
    )
    reach_node(stats)
    stats.set_defaults(run=_stats)

    drives = commands.add_parser(
        "drives",
        help="show a node's drives: their use and failures",
        description="Show a node's drives: their use, whether they accept puts, and why not.",
    )
    reach_node(drives)
    drives.set_defaults(run=_drives)

    cluster = commands.add_parser(
        "cluster",
        help="show the nodes of a cluster and their shares of the users, plan a change, drain or forget a node",
        description="Show the map of a node's cluster: its nodes, their weights and shares; or plan or make a change."
        " Any node may be asked. Exit status 3 of `status` and `plan`: the node is in no cluster, or not on its map.",
    )
    cluster.add_argument(
        "action",
        choices=("status", "plan", "drain", "join", "forget"),
        help="show the nodes; print what draining this member would move, or a new node at this address; copy a"
        " node's blocks to the others so that it may be stopped; make it a member again; or forget an absent"
        " node that will not come back. Where there are tenants, the token of drain, join and forget is the"
        " cluster's secret, and that of status and plan is a tenant's",
    )
    cluster.add_argument("member", nargs="?", metavar="HOST:PORT", help="the node; for forget, also its name")
    # Not `zone`: that is the client's own.
    cluster.add_argument(
        "--zone",
        dest="planned_zone",
        metavar="ZONE",
        help="plan: the zone of a node that would join (--cluster-zone)",
    )
    reach_node(cluster)
    cluster.set_defaults(run=_cluster)

    top = commands.add_parser(
        "top",
        help="show a node's activity, live",
        description="Show a node's activity per interval: throughput, hits and why blocks missed, triggers,"
        " queues and tiers. With --json one line an interval.",
    )
    top.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds (%(default)s)")
    top.add_argument("--once", action="store_true", help="show one interval and exit")
    reach_node(top)
    top.set_defaults(run=_top)
