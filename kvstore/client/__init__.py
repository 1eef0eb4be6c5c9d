"""What a serving engine imports."""

from kvstore.client.block_calls import Explained, Pin, Prefix, Stored
from kvstore.client.blocks import Block, Hit, PutResult
from kvstore.client.channel import Tls
from kvstore.client.client import Client
from kvstore.client.nodes import Everywhere, Nodes
from kvstore.client.observing import Happened
from kvstore.client.puts import ArmedPuts, Reservation
from kvstore.client.sessions import ListedSession, Resumed, Session, SessionInfo, TurnInfo
from kvstore.client.shards import ShardReader, Wanted

__all__ = [
    "ArmedPuts",
    "Block",
    "Client",
    "Everywhere",
    "Explained",
    "Happened",
    "Hit",
    "ListedSession",
    "Nodes",
    "Pin",
    "Prefix",
    "PutResult",
    "Reservation",
    "Resumed",
    "Session",
    "SessionInfo",
    "ShardReader",
    "Stored",
    "Tls",
    "TurnInfo",
    "Wanted",
]
