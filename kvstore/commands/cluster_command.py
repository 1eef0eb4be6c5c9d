"""`kvstore cluster`: the members as a node sees them; planning a change, draining and forgetting a node.

What always holds: a count that a node doesn't know is shown as unknown, never as 0. A member that doesn't answer is
named, and the others are shown.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING

import grpc

from kvcli.running import Status
from kvstore.client.channel import open_channel
from kvstore.client.contact import explained
from kvstore.client.map_follower import map_of
from kvstore.cluster.map import Map
from kvstore.cluster.planning import Plan, with_change
from kvstore.config import counted
from kvstore.errors import ConfigError
from kvstore.limits import CLUSTER_CALLS_AT_ONCE, DRAIN_LOOK_S, UPKEEP_BYTES_PER_S
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc, kvstore_pb2, kvstore_pb2_grpc, upkeep_pb2, upkeep_pb2_grpc
from kvstore.wire.status import error_from_rpc

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from kvstore.errors import KvError
    from kvstore.reach import Reach

_OF_SCANS = ("one_copy", "unsure", "full", "age_ms")

__all__ = ["drain", "forget", "plan", "show", "zones"]


def show(reach: Reach, *, as_json: bool) -> int:
    """Print the map of the first node that answers; `NO` if it is in no cluster, or not a member of its own.

    If nodes keep up copies, each is asked for its progress.
    """
    reported = _ask_any(reach)
    now = map_of(reported)
    each = _upkeep(reach, now) if reported.HasField("upkeep") else {}
    if as_json:
        members = [
            {
                "name": one.name,
                "node": one.node,
                "weight": one.weight,
                "version": one.version,
                "state": one.state,
                "zone": one.zone,
                "share": share,
                "upkeep": _as_numbers(each.get(one.node)),
            }
            for one, share in zip(now.members, now.shares(), strict=True)
        ]
        said = {
            "in_cluster": reported.clustered,
            "revision": now.revision,
            "lots": now.lots,
            "members": members,
            "absent": [{"name": one.name, "node": one.node, "version": one.version} for one in now.absent],
            "read_first": {"zone": reach.zone, "nodes": _read_first(reach, now)},
            "etcd_unreachable_ms": reported.etcd_away_ms,
            "not_a_member_because": reported.outside,
        }
        print(json.dumps(said, indent=2))  # noqa: T201 - a command prints
    elif not reported.clustered:
        print("The node is in no cluster.")  # noqa: T201
    else:
        print(_text(reach, now, reported, each))  # noqa: T201
    return Status.NO if not reported.clustered or reported.outside else Status.DONE


def zones(reach: Reach) -> dict[str, str]:
    """The zone of each member of the cluster of the first node that answers; if it is in none, of the named nodes."""
    reported = _ask_any(reach)
    if reported.clustered and reported.members:
        return {one.node: one.zone for one in reported.members}
    return dict.fromkeys(reach.nodes, "")


def _ask_any(reach: Reach) -> pb.MapResponse:
    failure: grpc.RpcError | None = None
    for node in reach.nodes:
        try:
            return _ask(reach, node)
        except grpc.RpcError as error:
            failure = error
    assert failure is not None
    raise _explained("Reading the cluster's map", reach.at(reach.nodes[-1]), failure)


def _explained(doing: str, reach: Reach, failure: grpc.RpcError) -> KvError:
    return explained(doing, reach, error_from_rpc(doing, failure))


def _ask(reach: Reach, node: str) -> pb.MapResponse:
    with open_channel(reach.at(node)) as channel:
        stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
        call = stub.Map(pb.MapRequest(tenant=reach.tenant, places_by_lots=True), timeout=reach.call_timeout_s)
        reported: pb.MapResponse = next(call)
        call.cancel()
        return reported


def _upkeep(reach: Reach, now: Map) -> dict[str, pb.UpkeepState | None]:
    """Each member's progress; None for one that doesn't answer, or doesn't keep up copies."""

    def ask(node: str) -> pb.UpkeepState | None:
        try:
            reported = _ask(reach, node)
        except grpc.RpcError:
            return None
        return reported.upkeep if reported.HasField("upkeep") else None

    nodes = [one.node for one in now.members]
    with ThreadPoolExecutor(CLUSTER_CALLS_AT_ONCE) as threads:
        return dict(zip(nodes, threads.map(ask, nodes), strict=True))


def _as_numbers(state: pb.UpkeepState | None) -> dict[str, int | bool | None] | None:
    if state is None:
        return None
    numbers = {field.name: getattr(state, field.name) for field in pb.UpkeepState.DESCRIPTOR.fields}
    del numbers["unknown"]
    return numbers | (dict.fromkeys(_OF_SCANS) if state.unknown else {})


def _read_first(reach: Reach, now: Map) -> list[str]:
    """The members whose copies a client with these settings reads first; none if it has stated no zone."""
    places = now.in_zone.get(reach.zone, frozenset()) if reach.zone else ()
    return [now.members[at].node for at in sorted(places) if at not in now.draining]


def _zone_line(reach: Reach, now: Map) -> str:
    """What this client's `zone` does."""
    if nodes := _read_first(reach, now):
        return f"zone {reach.zone}, set for this client: copies on {', '.join(nodes)} are read first"
    return f"zone {reach.zone}, set for this client, has no node to read from: reads use the first owners"


def _text(reach: Reach, now: Map, reported: pb.MapResponse, each: Mapping[str, pb.UpkeepState | None]) -> str:
    rows = [("node", "name", "weight", "users", "version", "zone")]
    rows += [
        (one.node, one.name, str(one.weight), one.state or f"{share:.1%}", one.version, one.zone)
        for one, share in zip(now.members, now.shares(), strict=True)
    ]
    lines = [_table(rows if any(one.zone for one in now.members) else [row[:-1] for row in rows])]
    lines += [
        f"absent: {one.node} ({one.name}); no deletion is acknowledged without it" for one in now.absent
    ]
    lines += _upkeep_lines(each)
    if reach.zone:
        lines.append(_zone_line(reach, now))
    if reported.outside:
        lines.append(f"The contacted node is not a member: {reported.outside}.")
    if reported.etcd_away_ms:
        lines.append(
            f"etcd has not answered it for {reported.etcd_away_ms / 1000:.1f} s; the map is as it was."
        )
    return "\n".join(lines)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _upkeep_lines(each: Mapping[str, pb.UpkeepState | None]) -> list[str]:
    if not each:
        return []
    states = [state for state in each.values() if state is not None]
    one_copy, unsure, full, _ = (sum(getattr(one, name) for one in states) for name in _OF_SCANS)
    age_s = max((one.age_ms for one in states), default=0) // 1000
    looking, unknown = (sum(getattr(one, name) for one in states) for name in ("looking", "unknown"))
    silent = [node for node, state in each.items() if state is None]
    why = [f"{unsure} may have been deleted while their node was away: put them again"] if unsure else []
    why += [f"for {full} another node has no room"] if full else []
    why += [f"{looking} {'node is' if looking == 1 else 'nodes are'} scanning"] if looking else []
    count = f"{one_copy} or more" if unknown or silent else f"{one_copy}"
    if age_s:
        why += [f"as of {age_s} s ago"]
    if unknown:
        why += [f"{unknown} of {len(each)} nodes have not scanned their blocks by this map"]
        count = count if one_copy else "unknown"
    line = f"blocks with one copy: {count}"
    lines = [f"{line} ({'; '.join(why)})" if why else line]
    if alone := sum(one.lots_alone for one in states):
        lines.append(f"groups of users whose sessions have one copy: {alone}")
    if left := sum(one.session_blocks_left for one in states):
        lines.append(f"blocks of sessions still to be copied: {left}")
    if len({one.replicas for one in states}) > 1:
        lines.append("The nodes differ in --cluster-replicas: make it the same on all.")
    return [*lines, f"Not reporting the state of its copies: {', '.join(silent)}."] if silent else lines


def drain(reach: Reach, node: str, *, undo: bool, as_json: bool) -> int:
    """Drain a node: it copies its blocks to the others; wait until it may be stopped.

    Or undo that. `NO` if blocks would be lost with it: the others have no room for them, or they may have been deleted
    while the node was away, so that they are not copied.
    """
    with open_channel(reach.at(node)) as channel:
        stub = upkeep_pb2_grpc.UpkeepStub(channel)  # type: ignore[no-untyped-call]
        request = upkeep_pb2.DrainRequest(undo=undo)
        while True:
            try:
                reported: upkeep_pb2.DrainResponse = stub.Drain(request, timeout=reach.call_timeout_s)
            except grpc.RpcError as error:
                raise _explained("Draining the node", reach.at(node), error) from error
            if undo:
                print(json.dumps({"node": node}) if as_json else f"{node} is an ordinary member again.")  # noqa: T201
                return Status.DONE
            if (
                reported.looked
                and reported.left <= reported.unsure + reported.full
                and not reported.users_left
            ):
                break  # what is left can't be copied
            request.has_begun = True  # else it would begin anew what `join` has cancelled
            threading.Event().wait(DRAIN_LOOK_S)
    if as_json:
        said = {"node": node, "left": reported.left, "unsure": reported.unsure, "full": reported.full}
        said["unnamed_sessions"] = reported.unnamed_sessions
        print(json.dumps(said))  # noqa: T201
    elif reported.left > reported.unsure:
        left = reported.left - reported.unsure
        print(f"{node} has {counted(left, 'block')} for which the others have no room: add a node.")  # noqa: T201
    elif reported.unsure:
        print(  # noqa: T201
            f"The other nodes have all blocks of {node} except {reported.unsure} that may have been deleted while it"
            " was away. If it is stopped, these are lost unless they are put again."
        )
    else:
        print(f"The other nodes have all blocks of {node}: it may be stopped.")  # noqa: T201
    if reported.unnamed_sessions and not as_json:
        print(  # noqa: T201
            f"{counted(reported.unnamed_sessions, 'session')} of users who used none since {node} started"
            f" {'was' if reported.unnamed_sessions == 1 else 'were'} not moved: `kvstore sessions copy --node {node}"
            " --user USER` moves those of a user."
        )
    return Status.NO if reported.left else Status.DONE


def plan(reach: Reach, node: str, zone: str, *, as_json: bool) -> int:
    """Print what draining a member would move, or a new node at this address; `NO` if there is no cluster.

    A member that is draining already counts as one that is not yet.
    """
    reported = _ask_any(reach)
    now = map_of(reported)
    if not reported.clustered or not now.members:
        print(json.dumps({"in_cluster": False}) if as_json else "The node is in no cluster.")  # noqa: T201
        return Status.NO
    members = [replace(one, state="") if one.node == node else one for one in now.members]
    now = Map.of(now.revision, members, lots=now.lots)
    if zone and any(one.node == node for one in members):
        raise ConfigError(f"{node} is a member, with a zone of its own: leave out --zone.")
    after, replicas = with_change(now, node, zone), max(1, reported.upkeep.replicas)
    with ThreadPoolExecutor(CLUSTER_CALLS_AT_ONCE) as threads:
        nodes = [one.node for one in now.members]
        each = dict(zip(nodes, threads.map(lambda one: _stored_bytes(reach, one), nodes), strict=True))
    stored = {one: some for one, some in each.items() if some is not None}
    planned = Plan.of(now, after, stored, replicas)
    users = {one.node: share for one, share in zip(now.members, now.shares(), strict=True)}
    later = {one.node: share for one, share in zip(after.members, after.shares(), strict=True)}
    if as_json:
        rows = {
            one: {"users": users.get(one, 0.0), "users_after": later[one], "stored_bytes": each.get(one, 0)}
            | {"sends_bytes": planned.sends[one], "receives_bytes": planned.receives[one]}
            for one in planned.sends
        }
        joins = node not in each
        said = {"in_cluster": True, "node": node, "joins": joins, "seconds": planned.seconds, "nodes": rows}
        print(json.dumps(said, indent=2))  # noqa: T201
        return Status.DONE
    table: list[tuple[str, ...]] = [("node", "stored", "sends", "receives", "users", "users after")]
    for one in planned.sends:
        some = (sizes.get(one, 0) for sizes in (each, planned.sends, planned.receives))
        moved = ("unknown" if size is None else f"{size / (1 << 30):.2f} GiB" for size in some)
        table.append((one, *moved, f"{users.get(one, 0.0):.1%}", f"{later[one]:.1%}"))
    change = "is drained" if node in each else "joins with a typical member's weight"
    print(f"If {node} {change}:\n{_table(table)}")  # noqa: T201
    if silent := [one for one, some in each.items() if some is None]:
        print(f"Not answering, and counted as average nodes: {', '.join(silent)}.")  # noqa: T201
    if reported.HasField("upkeep"):
        print(f"The copies take {planned.seconds} s or more, at {UPKEEP_BYTES_PER_S >> 20} MiB/s a node.")  # noqa: T201
    else:
        print("The nodes keep up no copies (--cluster-replicas), so nothing is copied.")  # noqa: T201
    return Status.DONE


def _stored_bytes(reach: Reach, node: str) -> int | None:
    """What a member has stored; None if it doesn't answer."""
    with open_channel(reach.at(node)) as channel:
        stub = kvstore_pb2_grpc.KvStoreStub(channel)  # type: ignore[no-untyped-call]
        try:
            reported = stub.Status(kvstore_pb2.StatusRequest(), timeout=reach.call_timeout_s)
        except grpc.RpcError:
            return None
    return int(reported.capacity_bytes - reported.free_bytes)


def forget(reach: Reach, node: str, *, as_json: bool) -> int:
    """Have the cluster forget an absent node, by its address or name; `NO` if there is no such node."""
    failure: grpc.RpcError | None = None
    for asked in reach.nodes:
        with open_channel(reach.at(asked)) as channel:
            stub = upkeep_pb2_grpc.UpkeepStub(channel)  # type: ignore[no-untyped-call]
            try:
                reported: upkeep_pb2.ForgetResponse = stub.Forget(
                    upkeep_pb2.ForgetRequest(node=node), timeout=reach.call_timeout_s
                )
            except grpc.RpcError as error:
                failure = error
                continue
        said = f"No absent node has the address or name {node}."
        if reported.names:
            said = f"{node} is forgotten. If it returns, start it with an empty data folder."
        print(json.dumps({"node": node, "forgotten": list(reported.names)}) if as_json else said)  # noqa: T201
        return Status.DONE if reported.names else Status.NO
    assert failure is not None
    raise _explained("Forgetting the node", reach.at(reach.nodes[-1]), failure)
