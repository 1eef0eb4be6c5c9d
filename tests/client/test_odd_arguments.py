"""Each argument of each public method and constructor gets odd values: only documented errors come out.

The methods are found, not listed, so a new one is tested too; what it takes has to be in `GOOD`.
"""

from __future__ import annotations

import asyncio
import inspect
import io
import struct
import threading
from contextlib import ExitStack, aclosing, suppress
from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import (
    Arrivals,
    AsyncClient,
    AsyncClusterClient,
    Block,
    Client,
    ClusterBlock,
    ClusterClient,
    Hit,
    Nodes,
    Reach,
    ShardReader,
)
from kvstore.client.arguments import CHECKED, UNCHECKED
from kvstore.durability import Durability
from kvstore.errors import (
    KvError,
    ProtocolError,
    StorageError,
    UsageError,
)
from kvstore.layout import Layer, Layout
from kvstore.names import block_key
from kvstore.steps import Step
from kvstore.testing import MemoryNode
from nic_offload.flags import FlagWords
from nic_offload.match_action import Request, Table
from nic_offload.pieces import Pieces
from tools.generate_api import public_classes, public_methods

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from kvstore.client import RegisteredMemory
    from nic_offload.fabric import Region

PAGE = 4096
KEY = block_key(b"a page")
REQUEST = Request("", "ada", "chat", "", 0, 0, 0, 0, 0)
WAIT_S = 60.0
ODD: list[Any] = [
    *(None, True, -1, 0, 1 << 40, 10**400, 1.5, float("nan"), float("inf")),
    *("x", "", "ada\udcff", "a\0b", b"", b"x", bytearray(32), memoryview(bytearray(64))[::2]),
    *([], [None], [b"x"], {}, (1, 2), object(), lambda: 5),
]


class Bench:
    """One object of each public class on a node in memory, and a good value for each argument."""

    def __init__(self, undo: ExitStack) -> None:
        node = undo.enter_context(MemoryNode())
        self.target = node.target
        self.client = undo.enter_context(node.client(layout=b"odd"))
        few: dict[str, Any] = {
            "transport": "memory",
            "slots": 4,
            "block_bytes_max": 1 << 16,
            "layout": b"odd",
        }
        self.cluster = undo.enter_context(ClusterClient([node.target], **few))
        self.nodes = undo.enter_context(Nodes([node.target], **few))
        self.arrivals = undo.enter_context(Arrivals(self.nodes, Table(), tenant=""))
        self.asynchronous = AsyncClient(node.target, **few)
        undo.callback(lambda: asyncio.run(self.asynchronous.close()))
        self.async_cluster = AsyncClusterClient([node.target], **few)
        undo.callback(lambda: asyncio.run(self.async_cluster.close()))
        self.flags = undo.enter_context(FlagWords.create(2))
        self.region = self.client.register(bytearray(16 * PAGE))
        self.async_region = self.asynchronous.sync.register(bytearray(PAGE))
        self.everywhere = self.cluster.register(bytearray(16 * PAGE))
        self.async_everywhere = self.async_cluster.sync.register(bytearray(PAGE))
        self.client.put_inline(KEY, b"KV" * (PAGE // 2))
        self.chat = self.client.session("ada", "chat")
        self.chat.append([KEY], 1)
        exported = io.BytesIO()
        self.chat.export(exported)
        self.layout = Layout("m", "w", "int8", 1, (Layer(1, 8, 8),))
        self.names = iter(range(1 << 30))
        self.good: dict[str, Callable[[], Any]] = {
            "acks": lambda: "all",
            "any_layout": lambda: False,
            "arrival": lambda: self.arrivals.arrived(REQUEST),
            "block_bytes_max": lambda: PAGE,
            "blocks": lambda: [self.block()],
            "chained_hash": lambda: KEY,
            "chained_hashes": lambda: [KEY],
            "client": lambda: self.client,
            "context": lambda: "chat",
            "count": lambda: 1,
            "data": lambda: b"KV" * (PAGE // 2),
            "delete_blocks": lambda: False,
            "detail": lambda: "",
            "domain": lambda: b"",
            "drive": lambda: "16MiB",
            "durability": lambda: Durability.WRITTEN,
            "ended": lambda: None,
            "expires_unix_ms": lambda: 0,
            "file": lambda: io.BytesIO(exported.getvalue()),
            "flag": lambda: self.flags[0],
            "key": lambda: KEY,
            "keys": lambda: [KEY],
            "last": lambda: 0,
            "layer": lambda: 0,
            "layer_of": lambda: lambda _: 0,
            "layout": lambda: None,
            "lease_ms": lambda: 1000,
            "length": lambda: PAGE,
            "lengths": lambda: [PAGE],
            "matched": lambda: self.arrivals.match(REQUEST),
            "memories": lambda: [self.everywhere],
            "memory": lambda: bytearray(PAGE),
            "name": lambda: f"chat {next(self.names)}",
            "node": lambda: self.target,
            "nodes": lambda: [self.target],
            "number": lambda: 0,
            "offset": lambda: 0,
            "path": lambda: self.flags.path,
            "default_node": lambda: self.target,
            "given": dict,
            "pieces": lambda: Pieces.of(self.region, [(0, PAGE), (2 * PAGE, PAGE)]),
            "place": lambda: lambda _, __: self.block(),
            "progress": lambda: None,
            "regions": lambda: [self.region],
            "region": lambda: self.region,
            "replicas": lambda: 1,
            "request": lambda: REQUEST,
            "request_id": lambda: "",
            "rows": lambda: struct.pack("=IIQ", 0, PAGE, 0),
            "session": lambda: "",
            "shard": lambda: 0,
            "shards": lambda: 1,
            "skip": lambda: 0,
            "slots": lambda: 4,
            "step": lambda: Step.ANSWERED,
            "stored_shards": lambda: 1,
            "tables": lambda: [struct.pack("=IIQ", 0, PAGE, 0)],
            "target": lambda: self.target,
            "threshold": lambda: 1,
            "time_to_live_ms": lambda: 1000,
            "timeout_s": lambda: 1.0,
            "tokens": lambda: 1,
            "user": lambda: "ada",
            "value": lambda: 0,
            "wait_s": lambda: 0.1,
            "wanted": lambda: [(KEY, PAGE)],
            "weights": lambda: {self.target: 1},
            "where": lambda: "the call",
            "whole": lambda: 0,
        }
        self.good_in: dict[str, dict[str, Callable[[], Any]]] = {
            "Block": {"pieces": lambda: None},
            "ClusterBlock": {"memory": lambda: self.everywhere, "pieces": lambda: None},
            "ClusterClient": {"blocks": lambda: [self.cluster_block()]},
            "AsyncClusterClient": {"blocks": lambda: [self.cluster_block(self.async_everywhere)]},
            "Pieces": {"pieces": lambda: [(0, PAGE)]},
            "AsyncClient": {"blocks": lambda: [self.block(self.async_region)]},
            "AsyncSession": {"file": io.BytesIO, "blocks": lambda: 0},
            "Session": {"file": io.BytesIO, "blocks": lambda: 0},
            "ShardReader": {"layout": lambda: self.layout, "wanted": list},
        }
        self.objects: dict[str, Callable[[], Any]] = {
            "ArmedPuts": lambda: self.client.arm([self.block()]),
            "Arrival": lambda: self.arrivals.arrived(REQUEST),
            "Arrivals": lambda: self.arrivals,
            "AsyncClient": lambda: self.asynchronous,
            "AsyncClusterClient": lambda: self.async_cluster,
            "AsyncClusterPuts": lambda: asyncio.run(
                self.async_cluster.arm([self.cluster_block(self.async_everywhere)])
            ),
            "AsyncPuts": lambda: self.asynchronous.arm([self.block(self.async_region)]),
            "AsyncSession": lambda: self.asynchronous.session("ada", "chat"),
            "Block": lambda: Block,
            "Client": lambda: self.client,
            "ClusterBlock": lambda: ClusterBlock,
            "ClusterClient": lambda: self.cluster,
            "ClusterPuts": lambda: self.cluster.arm([self.cluster_block()]),
            "RegisteredMemory": lambda: self.everywhere,
            "FlagWord": lambda: self.flags[1],
            "FlagWords": lambda: FlagWords,
            "Layout": lambda: self.layout,
            "Matched": lambda: self.arrivals.match(REQUEST),
            "MemoryNode": lambda: node,
            "Nodes": lambda: self.nodes,
            "Pieces": lambda: Pieces,
            "Reach": lambda: self.client.reach,
            "Reservation": lambda: self.client.reserve([self.block()]),
            "Resuming": lambda: self.chat.resuming(lambda _, __: self.block()),
            "Session": lambda: self.client.session("ada", "chat"),
            "ShardReader": lambda: ShardReader(self.client, self.layout, 1),
        }

    def block(self, region: Region | None = None) -> Block:
        return Block(KEY, region or self.region, 0, PAGE)

    def cluster_block(self, memory: RegisteredMemory | None = None) -> ClusterBlock:
        return ClusterBlock(KEY, memory or self.everywhere, 0, PAGE)

    def arguments(self, kind: str, method: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
        """A good value for each argument of a method; an unknown argument fails here."""
        good = self.good | self.good_in.get(kind, {})
        parameters = inspect.signature(method).parameters.values()
        return {
            one.name: good[one.name]
            for one in parameters
            if one.name != "self" and one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)
        }


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with ExitStack() as undo:
        yield Bench(undo)


async def awaited(result: Any) -> None:
    """Await a result, or the first item that it yields."""
    if inspect.isasyncgen(result):
        async with aclosing(result):
            await anext(result, None)
    else:
        await result


def call(function: Callable[..., Any], named: dict[str, Any]) -> None:
    """Call a function, and take the first item if it yields some."""
    result = function(**named)
    if inspect.isawaitable(result) or inspect.isasyncgen(result):
        asyncio.run(awaited(result))
    elif inspect.isgenerator(result):
        next(result, None)
        result.close()
    elif hasattr(result, "give_back"):
        result.give_back()


def complaint(function: Callable[..., Any], named: dict[str, Any]) -> str | None:
    """The defect in the outcome of a call; None if there is none."""
    try:
        call(function, named)
    except (ProtocolError, StorageError) as error:
        return f"the node was asked: {error!r}"
    except KvError as error:
        sentence = str(error)
        return None if "\n" not in sentence and len(sentence) < 300 else f"no sentence: {sentence}"
    except Exception as error:  # noqa: BLE001 - none of these is documented
        return repr(error)
    return None


def within_its_time(work: Callable[[], list[str]]) -> list[str]:
    """The result of some work; a call that hangs fails the test."""
    found: list[list[str]] = []
    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    thread.start()
    thread.join(WAIT_S)
    assert found, "a call hangs, or the test itself failed"
    return found[0]


METHODS = [
    (name, method)
    for name, kind in public_classes()
    if name != "LocalNode"
    for method, one in public_methods(name, kind)
    if set(inspect.signature(one).parameters) - {"self"} and method != "call"
]


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_an_odd_argument_of_a_method_is_a_documented_error(bench: Bench, kind: str, method: str) -> None:
    def sweep() -> list[str]:
        complaints = []
        arguments = bench.arguments(kind, getattr(bench.objects[kind](), method))
        for name in arguments:
            for odd in ODD:
                named = {one: odd if one == name else good() for one, good in arguments.items()}
                owner = bench.objects[kind]()
                wrong = complaint(getattr(owner, method), named)
                if wrong is not None:
                    complaints.append(f"{kind}.{method}({name}={odd!r:.40}): {wrong}")
                if kind in ("Reservation", "Resuming", "ShardReader"):
                    with suppress(UsageError):
                        (owner.give_back if kind == "Reservation" else owner.close)()
        return complaints

    assert "\n".join(within_its_time(sweep)) == ""
    bench.client.put_inline(KEY, b"KV" * (PAGE // 2))  # deleted, perhaps
    assert bench.client.get([bench.block()], timeout_s=10) == [Hit(KEY)], "the client goes on"


def made_of(kind: type, bench: Bench) -> dict[str, Any]:
    """Good arguments for a constructor."""
    of_each: dict[str, dict[str, Any]] = {
        "Block": {"key": KEY, "region": bench.region, "offset": 0, "length": PAGE},
        "ClusterBlock": {"key": KEY, "memory": bench.everywhere, "offset": 0, "length": PAGE},
        "ClusterClient": {"nodes": [bench.target]},
        "AsyncClusterClient": {"nodes": [bench.target]},
        "Layout": {name: getattr(bench.layout, name) for name in Layout.__dataclass_fields__},
        "MemoryNode": {},
        "Nodes": {"nodes": [bench.target]},
        "Pieces": {"regions": [bench.region], "rows": struct.pack("=IIQ", 0, PAGE, 0)},
        "Reach": {"nodes": (bench.target,)},
        "ShardReader": {"client": bench.client, "layout": bench.layout, "stored_shards": 1},
    }
    return of_each.get(kind.__name__, {"node": bench.target})


def names_of(kind: type) -> set[str]:
    """The arguments of a constructor, including those passed on to `Client`."""
    parameters = inspect.signature(kind).parameters.values()
    named = {one.name for one in parameters if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL)}
    if len(named) < len(parameters):
        named |= inspect.signature(Client).parameters.keys() - {"node"}
    return named - {"tracer_provider"}


def use(made: Any, bench: Bench) -> None:
    """Use the constructed object, so that a bad argument causes an error, and close it."""
    if isinstance(made, Block):
        bench.client.get([made], timeout_s=1)
        bench.client.arm([made]).abandon()
    elif isinstance(made, ClusterBlock):
        bench.cluster.get([made], timeout_s=1)
        bench.cluster.arm([made]).abandon()
    elif isinstance(made, AsyncClient | AsyncClusterClient):
        asyncio.run(made.close())
    elif hasattr(made, "close"):
        made.close()


@pytest.mark.parametrize(
    "kind",
    [
        *(AsyncClient, AsyncClusterClient, Block, Client, ClusterBlock, ClusterClient, Layout),
        *(MemoryNode, Nodes, Pieces, Reach, ShardReader),
    ],
)
def test_an_odd_argument_of_a_constructor_is_a_documented_error(bench: Bench, kind: type) -> None:
    def sweep() -> list[str]:
        complaints = []
        for name in sorted(names_of(kind)):
            for odd in ODD:
                named = made_of(kind, bench) | {name: odd}
                wrong = complaint(lambda named: use(kind(**named), bench), {"named": named})
                if wrong is not None:
                    complaints.append(f"{kind.__name__}({name}={odd!r:.40}): {wrong}")
        return complaints

    assert "\n".join(within_its_time(sweep)) == ""


def test_each_argument_type_is_checked() -> None:
    """An argument of a new type needs a check, or a place in the list of those that methods check."""
    unknown = {
        (name, method, one.name, one.annotation)
        for name, kind in public_classes()
        for method, function in public_methods(name, kind)
        if hasattr(function, "__wrapped__")
        for one in list(inspect.signature(function).parameters.values())[1:]
        if str(one.annotation).removesuffix(" | None") not in CHECKED | UNCHECKED
    }
    assert unknown == set()
