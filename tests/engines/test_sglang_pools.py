"""Pools beside the KV (`batch_*_v2`): the usable length of a prefix, and that no page is taken for another pool's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch", reason="torch is in .venv-engines only: make test-engines")

from tests.engines import sglang_interface  # noqa: E402

sglang_interface.load()

from sglang.srt.mem_cache.hicache_storage import PoolHitPolicy, PoolName, PoolTransfer  # noqa: E402

from kvstore.engines.sglang.hits import Found, usable  # noqa: E402
from tests.engines.hostpool import MHAHostPool, MLAHostPool  # noqa: E402
from tests.engines.test_sglang import attached  # noqa: E402

if TYPE_CHECKING:
    from tests.engines.node import Node

pytestmark = pytest.mark.timeout(60)

ALL, TRAILING, GROUPS = PoolHitPolicy.ALL_PAGES, PoolHitPolicy.TRAILING_PAGES, PoolHitPolicy.BLOCK_GROUPS


def found(here: str, policy: Any, window: int = 1, block: int = 2) -> Found:
    transfer = PoolTransfer(
        PoolName.SWA, keys=["x"] * window, hit_policy=policy, block_pages=block, group_pages=1
    )
    return Found.of(transfer, [one == "1" for one in here])


@pytest.mark.parametrize(
    ("here", "policy", "window", "reach", "lengths"),
    [
        ("1111", ALL, 1, 4, [1, 2, 3, 4]),
        ("1101", ALL, 1, 2, [1, 2]),
        ("0111", ALL, 1, 0, []),
        ("0101", TRAILING, 1, 4, [2, 4]),
        ("0110", TRAILING, 2, 3, [3]),
        ("1011", TRAILING, 2, 4, [1, 4]),
        ("0000", TRAILING, 1, 0, []),
        ("1110", GROUPS, 1, 2, [1, 2, 3, 4]),
        ("0111", GROUPS, 1, 0, [1, 2, 3, 4]),
    ],
)
def test_each_policy_allows_its_lengths(
    here: str, policy: Any, window: int, reach: int, lengths: list[int]
) -> None:
    one = found(here, policy, window)
    assert (one.reach, usable(4, [one])) == (reach, lengths)


def test_a_length_must_suit_every_pool() -> None:
    assert usable(4, [found("0101", TRAILING), found("1110", ALL)]) == [2]
    assert usable(4, [found("0101", TRAILING), found("1000", ALL)]) == []
    assert usable(3, []) == [1, 2, 3]
    assert usable(0, [found("", ALL)]) == []


def test_pages_of_several_pools_are_loaded_each_into_its_own(node: Node) -> None:
    kv, swa, mamba = MHAHostPool(), MHAHostPool(), MLAHostPool(layers=5)
    pools = {PoolName.KV: kv, PoolName.SWA: swa, PoolName.MAMBA: mamba}
    for seed, pool in enumerate(pools.values()):
        pool.fill(seed)
    storage = attached(node.target, kv)
    for name, pool in pools.items():
        storage.register_mem_host_pool_v2(pool, name)
    storage.on_host_pools_registered()
    keys = [f"several {number}" for number in range(3)]
    assert storage.batch_set_v1(keys, kv.indices(0, 1, 2)) == [True] * 3
    wanted = [
        PoolTransfer(PoolName.SWA, swa.indices(0, 1), keys=keys[:2]),
        PoolTransfer(PoolName.MAMBA, mamba.indices(4), keys=keys[1:2], hit_policy=TRAILING),
    ]
    assert storage.batch_exists_v2(keys, wanted).kv_hit_pages == 0
    assert storage.batch_set_v2(wanted) == {PoolName.SWA: [True, True], PoolName.MAMBA: [True]}
    hits = storage.batch_exists_v2(keys, wanted)
    assert (hits.kv_hit_pages, hits.restorable_prefix_pages) == (2, [2])
    assert hits.extra_pool_hit_pages == {PoolName.KV: 3, PoolName.SWA: 2, PoolName.MAMBA: 2}
    assert storage.batch_exists_v2(keys).restorable_prefix_pages == [1, 2, 3]
    back = [
        PoolTransfer(PoolName.SWA, swa.indices(8, 9), keys=keys[:2]),
        PoolTransfer(PoolName.MAMBA, mamba.indices(8, 9), keys=keys[1:3]),
        PoolTransfer(PoolName.KV, kv.indices(8), keys=keys[2:]),
    ]
    assert storage.batch_get_v2(back) == {
        PoolName.SWA: [True, True],
        PoolName.MAMBA: [True, False],
        PoolName.KV: [True],
    }
    for pool, there, here in ((swa, 0, 8), (swa, 1, 9), (mamba, 4, 8), (kv, 2, 8)):
        assert torch.equal(pool.page(there), pool.page(here))
    storage.close()


def test_an_unregistered_pool_or_one_with_other_indices_is_a_miss(node: Node) -> None:
    kv = MHAHostPool()
    storage = attached(node.target, kv)
    storage.batch_set_v1(["alone"], kv.indices(0))
    strange = [
        PoolTransfer(PoolName.INDEXER, kv.indices(0), keys=["alone"]),
        PoolTransfer(PoolName.KV, keys=["alone"]),
    ]
    assert storage.batch_exists_v2(["alone"], strange[:1]).kv_hit_pages == 0
    assert storage.batch_get_v2(strange) == {PoolName.INDEXER: [False], PoolName.KV: [False]}
    assert storage.batch_set_v2(strange) == {PoolName.INDEXER: [False], PoolName.KV: [False]}
    storage.close()


def test_a_sharded_pool_with_a_latent_has_one_name_per_rank(node: Node) -> None:
    ranks = []
    for rank in range(2):
        latent, state, draft = MLAHostPool(), MLAHostPool(), MHAHostPool()
        for seed, pool in enumerate((latent, state, draft)):
            pool.fill(10 * rank + seed)
        storage = attached(node.target, latent, is_mla_model=True, tp_rank=rank, tp_size=2)
        storage.register_mem_host_pool_v2(state, PoolName.MAMBA)
        storage.register_mem_host_pool_v2(draft, PoolName.DRAFT)
        ranks.append((storage, state, draft))
    storage, state, draft = ranks[0]
    done = storage.batch_set_v2(
        [
            PoolTransfer(PoolName.MAMBA, state.indices(0), keys=["state"]),
            PoolTransfer(PoolName.DRAFT, draft.indices(0), keys=["state"]),
        ]
    )
    assert done == {PoolName.MAMBA: [True], PoolName.DRAFT: [True]}
    storage, state, draft = ranks[1]
    back = [
        PoolTransfer(PoolName.MAMBA, state.indices(1), keys=["state"]),
        PoolTransfer(PoolName.DRAFT, draft.indices(1), keys=["state"]),
    ]
    assert storage.batch_get_v2(back) == {PoolName.MAMBA: [False], PoolName.DRAFT: [False]}
    for storage, _, _ in ranks:
        storage.close()


def test_transfers_are_reported_once_as_sglangs_metrics(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class StorageMetrics:  # SGLang's own; its module needs the whole run time
        prefetch_pgs: list[int] = field(default_factory=list)
        backup_pgs: list[int] = field(default_factory=list)
        prefetch_bandwidth: list[float] = field(default_factory=list)
        backup_bandwidth: list[float] = field(default_factory=list)

    module = ModuleType("sglang.srt.observability.metrics_collector")
    module.__dict__["StorageMetrics"] = StorageMetrics
    for name in ("sglang.srt.observability", module.__name__):
        monkeypatch.setitem(sys.modules, name, module)
    kv = MHAHostPool()
    storage = attached(node.target, kv, enable_storage_metrics=True)
    storage.batch_set_v1(["told 0", "told 1"], kv.indices(0, 1))
    storage.batch_get_v1(["told 0", "untold"], kv.indices(2, 3))
    told = storage.get_stats()
    assert (told.backup_pgs, told.prefetch_pgs) == ([2], [1])
    assert told.backup_bandwidth[0] > 0
    assert told.prefetch_bandwidth[0] > 0
    assert storage.get_stats() == StorageMetrics()
    storage.close()
