"""`kvstore cluster`: which nodes there are, as one of them has it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import grpc

from kvcli.running import Status
from kvstore.client.channel import open_channel
from kvstore.client.following import map_of
from kvstore.wire import cluster_pb2 as pb
from kvstore.wire import cluster_pb2_grpc
from kvstore.wire.status import error_from_rpc

if TYPE_CHECKING:
    from kvstore.cluster.map import Map
    from kvstore.reach import Reach

__all__ = ["show"]


def show(reach: Reach, *, as_json: bool) -> int:
    """Print the map of the first node that answers; 1 if it is in no cluster, or not a member of its own."""
    told = _ask(reach)
    now = map_of(told)
    if as_json:
        members = [
            {"name": one.name, "node": one.node, "weight": one.weight, "version": one.version, "share": share}
            for one, share in zip(now.members, now.shares(), strict=True)
        ]
        said = {
            "clustered": told.clustered,
            "revision": now.revision,
            "members": members,
            "etcd_away_ms": told.etcd_away_ms,
            "outside": told.outside,
        }
        print(json.dumps(said, indent=2))  # noqa: T201 - a command prints
    elif not told.clustered:
        print("The node is in no cluster.")  # noqa: T201
    else:
        print(_text(now, told))  # noqa: T201
    return Status.NO if not told.clustered or told.outside else Status.DONE


def _ask(reach: Reach) -> pb.MapResponse:
    failure: grpc.RpcError | None = None
    for node in reach.nodes:
        with open_channel(reach.at(node)) as channel:
            stub = cluster_pb2_grpc.ClusterStub(channel)  # type: ignore[no-untyped-call]
            try:
                call = stub.Map(pb.MapRequest(tenant=reach.tenant), timeout=reach.call_timeout_s)
                told: pb.MapResponse = next(call)
                call.cancel()
            except grpc.RpcError as error:
                failure = error
            else:
                return told
    assert failure is not None
    raise error_from_rpc("To ask for the map", failure)


def _text(now: Map, told: pb.MapResponse) -> str:
    rows = [("node", "name", "weight", "users", "version")]
    rows += [
        (one.node, one.name, str(one.weight), f"{share:.1%}", one.version)
        for one, share in zip(now.members, now.shares(), strict=True)
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    if told.outside:
        lines.append(f"The node that was asked is no member: {told.outside}.")
    if told.etcd_away_ms:
        lines.append(f"etcd has not answered it for {told.etcd_away_ms / 1000:.1f} s; the map is as it was.")
    return "\n".join(lines)
