"""`TriggerKvStorage` behind SGLang's real interface and factory, with a real node: exact pages or none."""

from __future__ import annotations

import inspect
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from tests.engines import sglang_interface  # noqa: E402

sglang_interface.load()

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage, HiCacheStorageConfig  # noqa: E402
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory  # noqa: E402

from kvstore.client.link import Link  # noqa: E402
from kvstore.engines.sglang.storage import TriggerKvStorage  # noqa: E402
from kvstore.errors import ConfigError  # noqa: E402
from tests.engines.hostpool import MHAHostPool, MLAHostPool  # noqa: E402
from tests.engines.node import GuardedNode, Node  # noqa: E402

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.timeout(60)

LAYOUTS = ["page_first", "layer_first"]
TRANSPORTS = ["auto", "grpc"]


def config(node: str, *, v1: int = 1, transport: str = "auto", extra: Any = None, **other: Any) -> Any:
    given: dict[str, Any] = {
        "tp_rank": 0,
        "tp_size": 1,
        "pp_rank": 0,
        "pp_size": 1,
        "attn_cp_rank": 0,
        "attn_cp_size": 1,
        "is_mla_model": False,
        "enable_storage_metrics": False,
        "is_page_first_layout": True,
        "model_name": "llama",
    } | other
    recipe = {
        "backend_name": "triggerkv",
        "module_path": "kvstore.engines.sglang.storage",
        "class_name": "TriggerKvStorage",
        "interface_v1": v1,
        "node": node,
        "transport": transport,
    }
    return HiCacheStorageConfig(**given, extra_config=recipe | (extra or {}))


def attached(node: str, pool: Any, **settings: Any) -> TriggerKvStorage:
    """The storage as SGLang's cache controller attaches it."""
    storage = StorageBackendFactory.create_backend("dynamic", config(node, **settings), pool)
    storage.register_mem_pool_host(pool)
    storage.on_host_pools_registered()
    assert isinstance(storage, TriggerKvStorage)
    return storage


CALLS = [name for name, one in vars(HiCacheStorage).items() if inspect.isfunction(one)]


@pytest.mark.parametrize("name", CALLS)
def test_every_call_of_the_interface_has_the_same_parameters(name: str) -> None:
    ours, theirs = (inspect.signature(getattr(kind, name)) for kind in (TriggerKvStorage, HiCacheStorage))
    assert [(one.name, one.default, one.kind) for one in ours.parameters.values()] == [
        (one.name, one.default, one.kind) for one in theirs.parameters.values()
    ]
    assert not TriggerKvStorage.__abstractmethods__


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_are_loaded_exactly_in_another_processs_pool(node: Node, layout: str, transport: str) -> None:
    first, second = MHAHostPool(layout), MHAHostPool(layout)
    first.fill(1)
    second.fill(2)
    keys = [f"{layout} {transport} {number}" for number in range(4)]
    one = attached(node.target, first, transport=transport)
    assert one._carrier is not None
    assert one._carrier.transport == {"auto": "fabric"}.get(transport, transport)
    assert one.batch_exists(keys) == 0
    assert one.batch_set_v1(keys, first.indices(3, 1, 7, 2)) == [True] * 4
    one.close()
    other = attached(node.target, second, transport=transport)
    untouched = second.page(9)
    assert other.batch_exists([*keys, "none"]) == 4
    assert other.exists(keys[2])
    assert other.batch_get_v1([*keys, "none"], second.indices(0, 4, 5, 11, 6)) == [True] * 4 + [False]
    for there, here in zip((3, 1, 7, 2), (0, 4, 5, 11), strict=True):
        assert torch.equal(first.page(there), second.page(here))
    assert torch.equal(second.page(9), untouched)
    other.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_page_is_loaded_over_tls_with_a_token_file(guarded: GuardedNode, transport: str) -> None:
    first, second = MHAHostPool(), MHAHostPool()
    first.fill(1)
    one, other = (
        attached(guarded.target, pool, transport=transport, extra=guarded.trust) for pool in (first, second)
    )
    assert other._carrier is not None
    assert other._carrier.transport == {"auto": "fabric"}.get(transport, transport)
    assert one.batch_set_v1([transport], first.indices(3)) == [True]
    assert other.batch_get_v1([transport], second.indices(5)) == [True]
    assert torch.equal(first.page(3), second.page(5))
    for storage in (one, other):
        storage.close()


@pytest.mark.parametrize(
    "difference",
    [
        {"model_name": "other"},
        {"tp_rank": 1, "tp_size": 2},
        {"tp_rank": 0, "tp_size": 2},
        {"pp_rank": 1, "pp_size": 2},
        {"attn_cp_rank": 1, "attn_cp_size": 2},
        {"extra": {"weights": "other"}},
        {"pool": {"dtype": torch.float16}},
        {"pool": {"layout": "page_first_direct"}},
        {"pool": {"heads": 1, "dim": 32}},
    ],
    ids=str,
)
def test_other_pages_are_not_found(node: Node, difference: dict[str, Any]) -> None:
    ours = MHAHostPool()
    ours.fill(1)
    storage = attached(node.target, ours)
    assert storage.batch_set_v1(["shared"], ours.indices(0)) == [True]
    how = {name: value for name, value in difference.items() if name != "pool"}
    theirs = MHAHostPool(**difference.get("pool", {}))
    other = attached(node.target, theirs, **how)
    before = theirs.page(0)
    assert other.batch_exists(["shared"]) == 0
    assert other.batch_get_v1(["shared"], theirs.indices(0)) == [False]
    assert torch.equal(theirs.page(0), before)
    storage.close()
    other.close()


def test_of_a_latent_one_rank_writes_and_all_read(node: Node) -> None:
    ranks = [MLAHostPool() for _ in range(2)]
    ranks[0].fill(1)
    ranks[1].fill(2)
    storages = [
        attached(node.target, pool, is_mla_model=True, tp_rank=rank, tp_size=2)
        for rank, pool in enumerate(ranks)
    ]
    assert storages[1].batch_set_v1(["latent"], ranks[1].indices(0)) == [True]
    assert storages[0].batch_exists(["latent"]) == 0
    assert storages[0].batch_set_v1(["latent"], ranks[0].indices(5)) == [True]
    assert storages[1].batch_get_v1(["latent"], ranks[1].indices(6)) == [True]
    assert torch.equal(ranks[1].page(6), ranks[0].page(5))
    for storage in storages:
        storage.close()


def test_flat_pages_work_through_the_generic_calls(node: Node) -> None:
    pool = MHAHostPool()
    storage = attached(node.target, pool, v1=0)
    values = [torch.randint(0, 256, (4096,), dtype=torch.uint8) for _ in range(3)]
    keys = [f"flat {number}" for number in range(3)]
    assert storage.batch_set(keys, values)
    assert storage.batch_exists([*keys, "none"]) == 3
    targets = [torch.zeros(4096, dtype=torch.uint8) for _ in range(4)]
    got = storage.batch_get([*keys, "none"], targets)
    assert [one is target for one, target in zip(got, targets, strict=True)] == [True] * 3 + [False]
    assert all(torch.equal(one, value) for one, value in zip(targets, values, strict=False))
    assert storage.set("one", torch.ones(3, 5))
    assert torch.equal(storage.get("one", torch.zeros(3, 5)), torch.ones(3, 5))
    assert storage.get("one", torch.zeros(3, 6)) is None  # another size
    assert storage.get("one") is None  # nothing to be filled
    assert not storage.batch_set(["a", "b"], [torch.ones(3)])
    storage.close()


def test_a_page_larger_than_a_block_is_stored_in_parts(node: Node) -> None:
    pool = MHAHostPool("page_first", pages=3, layers=80, heads=16, dim=1024)  # 10 MB a piece, three parts
    pool.fill(3)
    storage = attached(node.target, pool)
    expected = pool.page(0)
    assert storage.batch_set_v1(["large"], pool.indices(0)) == [True]
    assert storage.batch_get_v1(["large"], pool.indices(2)) == [True]
    assert torch.equal(pool.page(2), expected)
    assert storage.batch_exists(["large", "small"]) == 1
    storage.clear()
    assert storage.batch_exists(["large"]) == 0
    storage.close()


def test_blocks_stored_from_here_are_cleared(node: Node) -> None:
    pools = [MHAHostPool(), MHAHostPool(heads=4)]
    storages = [attached(node.target, pool) for pool in pools]
    for storage, pool in zip(storages, pools, strict=True):
        assert storage.batch_set_v1(["a", "b"], pool.indices(0, 1)) == [True, True]
    storages[0].clear()
    assert [storage.batch_exists(["a", "b"]) for storage in storages] == [0, 2]
    assert storages[0].batch_get_v1(["a"], pools[0].indices(3)) == [False]
    for storage in storages:
        storage.close()


def test_an_invalid_configuration_is_refused_at_the_start(node: Node) -> None:
    for extra in ({"nod": 1}, {"transport": "pigeon"}, {"load_timeout_ms": 0}, {"node": ""}):
        with pytest.raises(ConfigError):
            attached(node.target, MHAHostPool(), extra=extra)


def test_wrong_indices_and_pools_are_misses(node: Node) -> None:
    pool = MHAHostPool()
    storage = attached(node.target, pool)
    assert storage.batch_set_v1(["x"], pool.indices(0, 1)) == [False]
    assert storage.batch_get_v1(["x", "y"], pool.indices(0)) == [False, False]
    bare = StorageBackendFactory.create_backend("dynamic", config(node.target), pool)
    assert bare.batch_get_v1(["x"], pool.indices(0)) == [False]
    assert bare.batch_exists(["x"]) == 0
    bare.clear()
    bare.close()
    storage.close()
    assert storage.batch_exists(["x"]) == 0
    assert storage.batch_set_v1(["x"], pool.indices(0)) == [False]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_killed_node_causes_misses_and_is_found_again(tmp_path: Path, transport: str) -> None:
    pool = MHAHostPool()
    pool.fill(1)
    expected = pool.page(0)
    with Node(tmp_path / "node") as node:
        storage = attached(node.target, pool, transport=transport)
        assert storage.batch_set_v1(["kept"], pool.indices(0)) == [True]
        node.kill()
        begun_s = time.monotonic()
        assert storage.batch_exists(["kept"]) == 0
        assert storage.batch_get_v1(["kept"], pool.indices(1)) == [False]
        assert storage.batch_set_v1(["more"], pool.indices(1)) == [False]
        storage.clear()
        assert time.monotonic() - begun_s < 15
        node.start()
        begun_s = time.monotonic()
        while storage.batch_get_v1(["kept"], pool.indices(2)) != [
            True
        ]:  # the breaker lets a call through soon
            assert time.monotonic() - begun_s < 30
        assert torch.equal(pool.page(2), expected)
        storage.close()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_hanging_node_costs_no_more_than_the_deadline(
    tmp_path: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        Link, "_open_direct", lambda *_: None
    )  # which reads the memory of a node that hangs, too
    pool = MHAHostPool()
    times = {"lookup_timeout_ms": 300, "load_timeout_ms": 400, "save_timeout_ms": 400}
    with Node(tmp_path / "node") as node:
        storage = attached(node.target, pool, transport=transport, extra=times)
        assert storage.batch_set_v1(["kept"], pool.indices(0)) == [True]
        with node.paused():
            for call, nothing in (
                (lambda: storage.batch_get_v1(["kept"], pool.indices(1)), [False]),
                (lambda: storage.batch_exists(["kept"]), 0),
                (lambda: storage.batch_set_v1(["new"], pool.indices(1)), [False]),
            ):
                begun_s = time.monotonic()
                assert call() == nothing
                assert time.monotonic() - begun_s < 3
        storage.close()


def test_a_page_damaged_on_the_drive_is_a_miss(tmp_path: Path) -> None:
    pool = MHAHostPool(dim=256)  # pieces of several pages of the drive
    pool.fill(1)
    with Node(tmp_path / "node", capacity="128MiB") as node:
        storage = attached(node.target, pool)
        assert storage.batch_set_v1(["a", "b"], pool.indices(0, 1)) == [True, True]
        node.stop()
        assert node.damage(1.0) == 4
        node.start()
        begun_s = time.monotonic()
        while storage.batch_exists(["a", "b"]) == 0:
            assert time.monotonic() - begun_s < 30
        assert storage.batch_get_v1(["a", "b"], pool.indices(2, 3)) == [False, False]
        storage.close()


def test_many_threads_each_get_their_own_pages(node: Node) -> None:
    pool = MHAHostPool(pages=64)
    pool.fill(9)
    storage = attached(node.target, pool)
    expected = [pool.page(page) for page in range(8)]
    wrong: list[str] = []

    def work(thread: int) -> None:
        for turn in range(6):
            key = f"thread {thread} {turn}"
            if storage.batch_set_v1([key], pool.indices(thread)) != [True]:
                wrong.append(f"{key} was not stored")
            target = 8 + thread * 6 + turn
            if storage.batch_get_v1([key], pool.indices(target)) != [True]:
                wrong.append(f"{key} did not come")
            elif not torch.equal(pool.page(target), expected[thread]):
                wrong.append(f"{key} is not what was stored")

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert storage.get_stats() is None
    storage.close()
