"""The twin of a node, against what can be said without one. Against a real node it is held by `make bench-twin`."""

from __future__ import annotations

import pytest

from kvstore.placement import Placement
from sim.replay.twin import KINDS, Load, MachineProfile, Seen, quantile, replay
from sim.units import OutOfRange

KIB = 1024
HOME = ["10.0.0.1:7070"]


def _profile(clients: tuple[int, ...] = (1, 2, 4)) -> MachineProfile:
    """An operation takes 1 ms, 1 ms more for each block, and as long again for each further client."""
    shapes = [(blocks, size) for blocks in (1, 5, 9) for size in (KIB, 4 * KIB)]
    seen = {
        (kind, count): [Seen(blocks, size, 1e-3 * count * (1 + blocks)) for blocks, size in shapes]
        for kind in KINDS
        for count in clients
    }
    return MachineProfile(seen)


def _gets(*blocks: list[int], user: int = 0) -> list[tuple[int, list[int]]]:
    return [(user, one) for one in blocks]


def test_measured_points_are_exact_and_interpolated_linearly() -> None:
    profile = _profile()
    assert profile.median_s("put", 1, 5, KIB) == pytest.approx(6e-3)
    assert profile.median_s("put", 1, 7, 2 * KIB) == pytest.approx(8e-3)
    assert profile.median_s("put", 3, 1, KIB) == pytest.approx(6e-3)


def test_a_single_client_gets_and_puts_repeatedly() -> None:
    load = Load([_gets([1, 2, 3], [1, 2, 3, 4])], KIB, HOME, 100)
    outcome = replay(_profile(), load)
    assert (outcome.blocks, outcome.hits) == (7, 3)
    assert outcome.gets_s == pytest.approx([4e-3, 5e-3])
    # get, own work and put of three; get and own work of four, put of one
    assert outcome.duration_s == pytest.approx(3 * 4e-3 + 2 * 5e-3 + 2e-3)
    assert outcome.gets_per_s == pytest.approx(2 / outcome.duration_s)


def test_several_clients_are_each_slower_and_do_not_wait_for_each_other() -> None:
    stored = _gets([1, 2, 3, 4, 5])
    alone = replay(_profile(), Load([stored], KIB, HOME, 100, stored))
    both = replay(_profile(), Load([stored * 3, stored], KIB, HOME, 100, stored))
    assert alone.gets_s == pytest.approx([6e-3])
    assert both.gets_s == pytest.approx([12e-3] * 4)
    assert both.duration_s == pytest.approx(3 * 24e-3)


def test_a_full_drive_evicts_the_least_recently_used_block() -> None:
    load = Load([_gets([1], [2], [1], [3], [1], [2])], KIB, HOME, 2)
    assert replay(_profile(), load).hits == 2, "both of block 1: block 2 went for block 3"


def test_users_are_placed_as_clients_of_several_nodes_place_them() -> None:
    nodes = [f"10.0.0.{i}:7070" for i in range(3)]
    placement = Placement([(node.encode(), 1) for node in nodes])
    of_node = [user for user in range(60) if placement.order(b"", b"user %d" % user)[0] == 0]
    # Ten blocks of users of one node, in nodes that hold three each: only the last three are there.
    asked = [(user, [user]) for user in of_node[:10]]
    again = [*asked, *reversed(asked)]
    assert replay(_profile(), Load([again], KIB, nodes, 3)).hits == 3


def test_the_same_load_gives_the_same_times_spread_around_their_median_as_measured() -> None:
    seen = [Seen(1, KIB, 1e-3 * (1 + i / 100)) for i in range(101)]
    profile = MachineProfile({(kind, 1): seen for kind in KINDS})
    load = Load([_gets(*[[1]] * 4000)], KIB, HOME, 10)
    outcome = replay(profile, load)
    assert replay(profile, load) == outcome
    assert quantile(outcome.gets_s, 0.5) == pytest.approx(1.5e-3, rel=0.02)
    assert quantile(outcome.gets_s, 0.99) == pytest.approx(1.99e-3, rel=0.02)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (Load([_gets([1])] * 5, KIB, HOME, 10), r"clients is 5; it takes clients that were measured"),
        (Load([_gets([1])], 8 * KIB, HOME, 10), "of 1 block of 8192 B; it takes blocks that were measured"),
        (Load([_gets(list(range(10)))], KIB, HOME, 10), "of 10 blocks of 1024 B; it takes blocks"),
    ],
)
def test_nothing_is_predicted_beyond_the_measurements(load: Load, message: str) -> None:
    with pytest.raises(OutOfRange, match=message):
        replay(_profile(), load)
