"""The simulator's placement against the store's own, key by key; and what follows from it for a cluster."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from kvstore.cluster.owners import Owners
from kvstore.limits import CLUSTER_LOTS, OWNERS_MAX
from kvstore.placement import Placement
from sim.replay import kv_homes as sim_placement
from sim.replay.events import LOTS, scatter
from sim.replay.kv_homes import cluster_orders, drive_homes, home_of_user, homes, lot_of, node_homes
from sim.replay.run import Terms
from sim.replay.simulate import Result, simulate
from sim.replay.workload import Request
from tests.sim.replay_rig import ONE, TINY

BLOCK = 512


@pytest.mark.parametrize("weights", [[1], [1, 1], [1, 2, 5], [3 << 40, 4 << 40, 1 << 40], [1] * 12])
def test_every_key_is_placed_as_the_store_would_place_it(weights: list[int]) -> None:
    rng = random.Random(len(weights))
    places = [(rng.randbytes(16), weight) for weight in weights]
    theirs, ours = Placement(places), homes(places)
    for _ in range(5000):
        tenant, key = rng.randbytes(16), rng.randbytes(32)
        assert theirs.order(tenant, key)[0] == ours[lot_of(tenant, key)]


def test_all_lots_have_the_stores_homes() -> None:
    places = [(b"node-%d:7070" % number, 1) for number in range(7)]
    assert [order[0] for order in Placement(places).orders] == node_homes(7).tolist()


@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_the_first_of_each_lot_of_a_cluster_are_the_stores(nodes: int) -> None:
    names = [b"node-%d" % number for number in range(nodes)]
    theirs = Owners([(name, 1) for name in names], (), CLUSTER_LOTS).orders()
    assert (cluster_orders(names, OWNERS_MAX) == theirs).all()
    assert sim_placement.CLUSTER_LOTS == CLUSTER_LOTS


def test_a_users_home_is_the_one_that_a_client_of_several_nodes_finds() -> None:
    places = [(b"node-%d:7070" % number, 1) for number in range(5)]
    theirs = Placement(places)
    for user in range(2000):
        assert home_of_user(user, 5) == theirs.order(b"", b"user %d" % user)[0]


def test_pages_are_spread_over_the_drives_like_their_lots() -> None:
    drives = 6
    counts = scatter(range(400), 16, 2, 4, drive_homes(drives), drives).reshape(2, 4, drives)
    assert counts.sum() == 400 * 16 * 4
    assert (counts.sum(axis=2) == 400 * 8).all(), "each GPU has a page of each block and layer"
    lots = Counter(drive_homes(drives).tolist())
    shares = counts.sum(axis=(0, 1)) / counts.sum()
    for drive in range(drives):
        assert shares[drive] == pytest.approx(lots[drive] / LOTS, abs=0.012)
    again = scatter([7], 16, 1, 4, drive_homes(drives), drives)
    assert (again == scatter([7], 16, 1, 4, drive_homes(drives), drives)).all()
    assert (again != scatter([8], 16, 1, 4, drive_homes(drives), drives)).any()


def _fetches(drives: int, users: int = 40, blocks: int = 64) -> Result:
    """Returning users with long prompts, one per second, at one node whose drives are the bottleneck."""
    slow = replace(ONE, drives_per_node=drives, drive_read_bytes_per_s=1e6, gpu_flops_per_s=4e18)
    stored = [(user, tuple(range(user * blocks, (user + 1) * blocks))) for user in range(users)]
    requests = [
        Request(float(user), blocks * BLOCK + 1, 0, (*held, 10**6 + user), user) for user, held in stored
    ]
    return simulate(requests, TINY, slow, "triggered", Terms(always_get=True), stored=stored)


def test_capacity_grows_with_drives_beyond_the_models_layers() -> None:
    """A request's pages are spread over all drives of its node, not over one for each of the four layers."""
    four, eight, sixteen = (_fetches(drives) for drives in (4, 8, 16))
    for few, many in ((four, eight), (eight, sixteen)):
        assert many.ttft_quantile_s(0.5) < 0.65 * few.ttft_quantile_s(0.5)
    busy = [one.busy_s for one in sixteen.usage["drives"]]
    assert min(busy) > 0.5 * max(busy)


def test_reads_and_writes_of_a_record_have_one_place() -> None:
    cluster = replace(ONE, nodes=3, drives_per_node=8)
    blocks = (1, 2, 3)
    put = simulate([Request(0.0, 3 * BLOCK, 0, blocks, 5)], TINY, cluster, "triggered")
    both = simulate(
        [Request(0.0, 3 * BLOCK, 0, blocks, 5), Request(60.0, 3 * BLOCK + 1, 0, (*blocks, 4), 5)],
        TINY,
        cluster,
        "triggered",
    )
    alone = simulate([Request(0.0, 1, 0, (4,), 5)], TINY, cluster, "triggered")
    written, after, last = (
        np.array([one.units for one in result.usage["drives"]]) for result in (put, both, alone)
    )
    read = after - written - last
    assert read == pytest.approx(written, rel=1e-6), "drive by drive"
    home = home_of_user(5, 3)
    assert written[::1].sum() == written[home * 8 : home * 8 + 8].sum(), "on one node"


def test_a_hot_prefix_loads_its_own_drive() -> None:
    """A prefix of one small page: all requests that begin with it read the one drive that has it."""
    cluster = replace(ONE, drives_per_node=8)
    one_layer = replace(TINY, layers=1)
    requests = [Request(i / 10, BLOCK + 1, 0, (77, 1000 + i), 3) for i in range(50)]
    result = simulate(requests, one_layer, cluster, "triggered", Terms(always_get=True), stored=[(3, (77,))])
    busy = sorted((one.units for one in result.usage["drives"]), reverse=True)
    assert result.block_hits == 50
    assert busy[0] > 0.95 * sum(busy)


def test_users_of_one_prompt_each_have_it_on_their_own_node() -> None:
    cluster = replace(ONE, nodes=4)
    users = range(40)
    requests = [Request(10.0 * user, 2 * BLOCK, 0, (1, 2), user) for user in users]
    result = simulate(requests, TINY, cluster, "triggered")
    nodes = len({home_of_user(user, 4) for user in users})
    assert result.block_hits == 2 * (len(users) - nodes), "it is computed once for each node"
