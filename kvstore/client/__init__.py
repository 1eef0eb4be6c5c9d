"""What a serving engine imports."""

from kvstore.client.blocks import Block, Hit, PutResult
from kvstore.client.channel import Tls
from kvstore.client.client import Client
from kvstore.client.nodes import Everywhere, Nodes
from kvstore.client.puts import ArmedPuts, Reservation
from kvstore.client.shards import ShardReader, Wanted

__all__ = [
    "ArmedPuts",
    "Block",
    "Client",
    "Everywhere",
    "Hit",
    "Nodes",
    "PutResult",
    "Reservation",
    "ShardReader",
    "Tls",
    "Wanted",
]
