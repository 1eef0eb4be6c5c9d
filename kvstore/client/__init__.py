"""What a serving engine imports."""

from kvstore.client.arrivals import Arrival, Arrivals
from kvstore.client.block_calls import Explained, Pin, Prefix, Stored
from kvstore.client.blocks import Block, Hit, PutResult
from kvstore.client.client import Client
from kvstore.client.cluster import ClusterBlock, ClusterClient, ClusterPin, ClusterPuts
from kvstore.client.lookups import as_request
from kvstore.client.nodes import Everywhere, Nodes
from kvstore.client.observing import Happened
from kvstore.client.puts import ArmedPuts
from kvstore.client.reserved import Reservation
from kvstore.client.resuming import Resumed, Resuming
from kvstore.client.sessions import ListedSession, Session, SessionInfo, TurnInfo
from kvstore.client.shards import ShardReader, Wanted
from kvstore.client.trace import Trace
from kvstore.reach import Reach

__all__ = [
    "ArmedPuts",
    "Arrival",
    "Arrivals",
    "Block",
    "Client",
    "ClusterBlock",
    "ClusterClient",
    "ClusterPin",
    "ClusterPuts",
    "Everywhere",
    "Explained",
    "Happened",
    "Hit",
    "ListedSession",
    "Nodes",
    "Pin",
    "Prefix",
    "PutResult",
    "Reach",
    "Reservation",
    "Resumed",
    "Resuming",
    "Session",
    "SessionInfo",
    "ShardReader",
    "Stored",
    "Trace",
    "TurnInfo",
    "Wanted",
    "as_request",
]
