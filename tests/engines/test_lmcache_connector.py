"""`TriggerKvConnector` created by LMCache, over LMCache's own memory, with a real node: exact chunks or none."""

from __future__ import annotations

import asyncio
import inspect
import threading
import time
from typing import TYPE_CHECKING, Any, Self

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from tests.engines import lmcache_interface  # noqa: E402

lmcache_interface.load()

from lmcache.utils import CacheEngineKey  # noqa: E402
from lmcache.v1.config import LMCacheEngineConfig  # noqa: E402
from lmcache.v1.memory_management import MemoryFormat  # noqa: E402
from lmcache.v1.metadata import LMCacheMetadata  # noqa: E402
from lmcache.v1.storage_backend.connector import CreateConnector  # noqa: E402
from lmcache.v1.storage_backend.connector.base_connector import RemoteConnector  # noqa: E402
from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend  # noqa: E402

from kvstore.engines.carrier import Carrier  # noqa: E402
from kvstore.engines.lmcache.connector import TriggerKvConnector  # noqa: E402
from tests.engines.node import GuardedNode, Node  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.engines.carrier import Place

pytestmark = [pytest.mark.timeout(60), pytest.mark.filterwarnings("ignore::DeprecationWarning")]

CHUNK = 16
CALLS = [
    name
    for name, one in vars(RemoteConnector).items()
    if inspect.isfunction(one) and name in vars(TriggerKvConnector) and name != "__init__"
]


class Worker:
    """LMCache's parts in one worker of an engine: a loop, its memory, and the connector that it makes."""

    def __init__(self, node: str, *, url: str = "plugin://triggerkv", **settings: Any) -> None:
        extra = {
            "remote_storage_plugin.triggerkv.module_path": "kvstore.engines.lmcache.connector",
            "remote_storage_plugin.triggerkv.class_name": "TriggerKvConnectorAdapter",
            "triggerkv": {"node": node} | settings,
        }
        config = LMCacheEngineConfig.from_defaults(
            chunk_size=CHUNK,
            max_local_cpu_size=0.05,
            remote_storage_plugins=["triggerkv"],
            extra_config=extra,
        )
        metadata = LMCacheMetadata(
            "llama", 1, 1, 0, 0, torch.bfloat16, (3, 2, CHUNK, 2, 32), chunk_size=CHUNK
        )
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever)
        self._thread.start()
        self.memory = LocalCPUBackend(config, metadata, dst_device="cpu")
        self.connector = CreateConnector(url, self.loop, self.memory, config, metadata, "triggerkv")
        self.ours = self.connector.getWrappedConnector()
        assert isinstance(self.ours, TriggerKvConnector)

    def run(self, call: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(call, self.loop).result(30)

    def chunk(self, seed: int, tokens: int = CHUNK) -> Any:
        shape = torch.Size([2, 3, tokens, 64])
        one = self.memory.allocate(shape, torch.bfloat16, MemoryFormat.KV_2LTD)
        raw = one.raw_tensor.view(torch.uint8)[: one.get_size()]
        raw.copy_(
            torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
        )
        return one

    def close(self) -> None:
        self.run(self.connector.close())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(10)
        self.loop.close()
        self.memory.memory_allocator.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def key(
    number: int, *, model: str = "llama", worker: int = 0, dtype: Any = torch.bfloat16, tag: str = ""
) -> Any:
    return CacheEngineKey(model, 1, worker, number, dtype, {"lmcache.tag.user": tag} if tag else {})


def same(one: Any, two: Any) -> bool:
    return bytes(one.byte_array) == bytes(two.byte_array)


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_the_interface_has_the_same_parameters(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (TriggerKvConnector, RemoteConnector))
    assert [(one.name, one.default) for one in ours.parameters.values()] == [
        (one.name, one.default) for one in theirs.parameters.values()
    ]
    assert not TriggerKvConnector.__abstractmethods__


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.parametrize("form", ["plugin://triggerkv", "triggerkv://"])
def test_chunks_are_loaded_exactly_in_another_worker(node: Node, form: str, transport: str) -> None:
    url = form if form.startswith("plugin") else form + node.target
    base = 100 * (2 * (transport == "auto") + form.startswith("plugin"))
    keys = [key(base + number) for number in range(4)]
    with Worker(node.target, url=url, transport=transport) as one:
        assert one.ours._carrier.transport == {"auto": "fabric"}.get(transport, transport)
        chunks = [one.chunk(base + number) for number in range(3)]
        assert one.connector.batched_contains(keys) == 0
        for chunk in chunks:
            chunk.ref_count_up()  # LMCache's own wrapper lets go of one
        one.run(one.connector.batched_put(keys[:3], chunks))
        with Worker(node.target, url=url, transport=transport) as two:
            assert two.connector.batched_contains(keys) == 3
            assert two.run(two.connector.batched_async_contains("a", keys)) == 3
            assert two.run(two.connector.exists(keys[1]))
            assert not two.connector.exists_sync(keys[3])
            got = two.run(two.connector.batched_get([keys[0], keys[3], keys[2]]))
            assert got[1] is None
            assert same(got[0], chunks[0])
            assert same(got[2], chunks[2])
            prefix = two.run(two.ours.batched_get_non_blocking("a", [*keys[:2], keys[3], keys[2]]))
            assert [same(*pair) for pair in zip(prefix, chunks, strict=False)] == [True, True]
            assert two.connector.remove_sync(keys[0])
            assert two.run(two.connector.get(keys[0])) is None


@pytest.mark.parametrize("transport", ["auto", "grpc"])
@pytest.mark.parametrize("form", ["plugin://triggerkv", "triggerkv://"])
def test_a_chunk_is_loaded_over_tls_with_a_token_file(
    guarded: GuardedNode, form: str, transport: str
) -> None:
    url = form if form.startswith("plugin") else form + guarded.target
    name = key(100 + 2 * (transport == "auto") + form.startswith("plugin"))
    with (
        Worker(guarded.target, url=url, transport=transport, **guarded.trust) as one,
        Worker(guarded.target, url=url, transport=transport, **guarded.trust) as two,
    ):
        assert two.ours._carrier.transport == {"auto": "fabric"}.get(transport, transport)
        chunk = one.chunk(7)
        one.run(one.ours.put(name, chunk))
        assert same(two.run(two.ours.get(name)), chunk)


def test_other_chunks_are_not_found(node: Node) -> None:
    with Worker(node.target) as one, Worker(node.target, weights="other") as other:
        one.run(one.ours.put(key(900), one.chunk(1)))
        assert one.ours.exists_sync(key(900))
        for different in (
            key(900, model="other"),
            key(900, worker=1),
            key(900, dtype=torch.float16),
            key(900, tag="ada"),
            key(901),
        ):
            assert not one.ours.exists_sync(different)
            assert one.run(one.ours.get(different)) is None
        assert not other.ours.exists_sync(key(900))
        assert other.run(other.ours.get(key(900))) is None


def test_a_partial_chunk_is_not_stored(node: Node) -> None:
    with Worker(node.target) as one:
        one.run(one.ours.batched_put([key(1000), key(1001)], [one.chunk(1, CHUNK // 2), one.chunk(2)]))
        assert not one.ours.exists_sync(key(1000))
        assert one.ours.exists_sync(key(1001))
        assert one.run(one.ours.list()) == []


def test_a_killed_node_causes_misses_and_leaks_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: dict[str, Any] = {"lookup_timeout_ms": 300, "load_timeout_ms": 400, "save_timeout_ms": 400}
    with Node(tmp_path / "node") as node, Worker(node.target, **times) as one:
        chunk = one.chunk(1)
        one.run(one.ours.put(key(1), chunk))
        node.kill()
        begun_s = time.monotonic()
        given: list[Any] = []
        allocate = one.memory.allocate

        def recorded(*shape: Any, **how: Any) -> Any:
            given.append(allocate(*shape, **how))
            return given[-1]

        monkeypatch.setattr(one.memory, "allocate", recorded)
        assert one.ours.batched_contains([key(1)]) == 0
        assert one.run(one.ours.batched_get([key(1)] * 4)) == [None] * 4
        one.run(one.ours.put(key(2), chunk))
        assert not one.ours.remove_sync(key(1))
        assert time.monotonic() - begun_s < 15
        assert [chunk.get_ref_count() for chunk in given] == [0] * 4
        node.start()
        begun_s = time.monotonic()
        while (got := one.run(one.ours.get(key(1)))) is None:  # the breaker lets a call through soon
            assert time.monotonic() - begun_s < 30
        assert same(got, chunk)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """Transfers of chunks that begin, set the first event, and end once the second is set."""
    began, goes_on = threading.Event(), threading.Event()

    def moved(_: Carrier, places: list[Place]) -> list[bool]:
        began.set()
        assert goes_on.wait(30)
        return [True] * len(places)

    monkeypatch.setattr(Carrier, "get", moved)
    monkeypatch.setattr(Carrier, "put", moved)
    return began, goes_on


def cancelled(one: Worker, call: Any, held: tuple[threading.Event, threading.Event]) -> bool:
    """Cancel a call while it moves a chunk; whether it ended only after that."""
    began, goes_on = held

    async def cancel() -> bool:
        task = asyncio.create_task(call)
        await asyncio.to_thread(began.wait, 30)
        task.cancel()
        for _ in range(10):
            await asyncio.sleep(0)
        has_waited = not task.done()
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return has_waited

    return bool(one.run(cancel()))


def test_a_cancelled_get_gives_back_the_memory_of_its_chunks(
    node: Node, held: tuple[threading.Event, threading.Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """LMCache cancels a get after `blocking_timeout_secs`."""
    with Worker(node.target) as one:
        given: list[Any] = []
        allocate = one.memory.allocate

        def recorded(*shape: Any, **how: Any) -> Any:
            given.append(allocate(*shape, **how))
            return given[-1]

        monkeypatch.setattr(one.memory, "allocate", recorded)
        assert cancelled(one, one.ours.batched_get([key(1), key(2)]), held), (
            "it waits for the bytes under way"
        )
        assert [chunk.get_ref_count() for chunk in given] == [0, 0]


def test_a_cancelled_put_ends_once_its_memory_is_not_read_any_more(
    node: Node, held: tuple[threading.Event, threading.Event]
) -> None:
    with Worker(node.target) as one:
        assert cancelled(one, one.ours.put(key(1), one.chunk(1)), held)


def test_an_invalid_configuration_is_refused_at_the_start(node: Node) -> None:
    from kvstore.engines.common_settings import EngineSettings
    from kvstore.errors import ConfigError

    with pytest.raises(ConfigError, match="has no nod"):
        EngineSettings.of({"node": node.target, "nod": 1}, where="extra_config.triggerkv")
