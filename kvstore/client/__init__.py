"""The client: put and get blocks, keep sessions, and find out why something was slow or missed.

Three blocks are put by one store to a flag word, named as a turn of a session, and resumed:

>>> from kvstore import Block, Client, FlagWords, block_key
>>> memory = bytearray(b"KV of three blocks..." * 1000)
>>> with Client("127.0.0.1:7070") as client, FlagWords.create(1) as flags:
...     region = client.register(memory)
...     keys = [block_key(b"chat 8", bytes([number])) for number in range(3)]
...     blocks = [Block(key, region, n * 7000, 7000, threshold=n + 1) for n, key in enumerate(keys)]
...     chat = client.session("grace", "chat 8")
...     puts = chat.arm(blocks, flags[0])  # the node is not called for each block
...     flags[0].store(3)  # any process can do this
...     all(put.error is None for put in puts.wait(timeout_s=10))
...     chat.append(keys, tokens=48)
...     chat.resume(lambda number, key: blocks[number]).is_whole
True
3
True

`Client` has all calls of one node, `Session` those of one session, `ClusterClient` spreads blocks over a cluster,
`AsyncClient` and `AsyncClusterClient` are for asyncio. A get returns for each block a `Hit`, or a `Miss` with its
reason; `Client.explain` and `Client.looked_up` say more about a miss. `kvstore.errors` has the errors,
`kvstore.testing` nodes for tests. Each method has an example in its `help`; it continues the example of its class,
which continues that of `Client` or of the class that makes its objects.
"""

from kvstore.client.arrivals import Arrival, Arrivals
from kvstore.client.async_client import AsyncClient
from kvstore.client.async_cluster import AsyncClusterClient, AsyncClusterPuts
from kvstore.client.async_session import AsyncPuts, AsyncSession
from kvstore.client.block_calls import Explained, Pin, Prefix, Stored
from kvstore.client.blocks import Block, Hit, PutResult
from kvstore.client.client import Client
from kvstore.client.cluster_blocks import ClusterBlock
from kvstore.client.cluster_client import ClusterClient
from kvstore.client.cluster_puts import ClusterPin, ClusterPuts
from kvstore.client.erasing import Erasure
from kvstore.client.matched import Matched
from kvstore.client.nodes import Nodes, RegisteredMemory
from kvstore.client.observing import Happened, LookedUp
from kvstore.client.puts import ArmedPuts
from kvstore.client.request_ids import as_request
from kvstore.client.reserved import Reservation
from kvstore.client.resuming import Resumed, Resuming
from kvstore.client.session_info import ListedSession, SessionInfo, TurnInfo
from kvstore.client.sessions import Session
from kvstore.client.shards import ShardReader, Wanted
from kvstore.client.step_calls import ReadAhead
from kvstore.client.trace import Trace
from kvstore.reach import Reach

__all__ = [
    "ArmedPuts",
    "Arrival",
    "Arrivals",
    "AsyncClient",
    "AsyncClusterClient",
    "AsyncClusterPuts",
    "AsyncPuts",
    "AsyncSession",
    "Block",
    "Client",
    "ClusterBlock",
    "ClusterClient",
    "ClusterPin",
    "ClusterPuts",
    "Erasure",
    "Explained",
    "Happened",
    "Hit",
    "ListedSession",
    "LookedUp",
    "Matched",
    "Nodes",
    "Pin",
    "Prefix",
    "PutResult",
    "Reach",
    "ReadAhead",
    "RegisteredMemory",
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
