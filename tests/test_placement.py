"""Placement: shares by weight, with the fewest moves."""

from __future__ import annotations

import itertools
import random
from collections import Counter

import pytest

from kvstore.placement import Placement, lots_of
from tests.storage.rig import TENANT, key

GIB = 1 << 30
NAMES = [(TENANT, key(number)) for number in range(20_000)]


def uuid(number: int) -> bytes:
    return random.Random(number).randbytes(16)


def homes(drives: list[tuple[bytes, int]]) -> list[bytes]:
    placement = Placement(drives)
    return [drives[placement.order(*name)[0]][0] for name in NAMES]


@pytest.mark.parametrize("weights", [[1, 1], [1, 2], [1, 1, 1, 1], [1, 2, 3, 10], [1] * 32])
def test_shares_are_in_proportion_to_weights(weights: list[int]) -> None:
    total = sum(weights)
    lots = 1 << 13
    for salt in range(3):
        drives = [(uuid(100 * salt + number), weight * GIB) for number, weight in enumerate(weights)]
        counts = Counter(homes(drives))
        for one, weight in drives:
            share = weight / GIB / total
            deviation = (share * (1 - share) * (1 / lots + 1 / len(NAMES))) ** 0.5
            assert abs(counts[one] / len(NAMES) - share) < 5 * deviation


@pytest.mark.parametrize("weight", [1, 5])
def test_an_added_drive_takes_its_share_and_moves_nothing_else(weight: int) -> None:
    before = [(uuid(number), (number + 1) * GIB) for number in range(4)]
    added = (uuid(9), weight * GIB)
    moved = 0
    for old, new in zip(homes(before), homes([*before, added]), strict=True):
        assert new in {old, added[0]}
        moved += new == added[0]
    assert abs(moved / len(NAMES) - weight / (10 + weight)) < 0.02


def test_the_order_of_two_drives_depends_only_on_those_two() -> None:
    drives = [(uuid(number), GIB) for number in range(5)]
    whole = Placement(drives)
    for left_out in range(5):
        rest = [drive for drive in drives if drive != drives[left_out]]
        part = Placement(rest)
        for name in NAMES[:2000]:
            order = [drives[at] for at in whole.order(*name) if at != left_out]
            assert [rest[at] for at in part.order(*name)] == order


def test_the_order_in_which_drives_are_given_does_not_matter() -> None:
    drives = [(uuid(number), (1 + number) * GIB) for number in range(3)]
    expected = homes(drives)
    for other in itertools.permutations(drives):
        assert homes(list(other)) == expected


def test_every_order_has_every_drive_once() -> None:
    placement = Placement([(uuid(number), GIB) for number in range(7)])
    assert all(sorted(placement.order(*name)) == list(range(7)) for name in NAMES[:500])
    assert Placement([(uuid(1), GIB)]).order(*NAMES[0]) == (0,)


def test_tenants_with_the_same_keys_are_spread_separately() -> None:
    placement = Placement([(uuid(number), GIB) for number in range(2)])
    ours = [placement.order(TENANT, name)[0] for _, name in NAMES[:1000]]
    theirs = [placement.order(b"somebody--else!!", name)[0] for _, name in NAMES[:1000]]
    assert 400 < sum(mine == other for mine, other in zip(ours, theirs, strict=True)) < 600


def test_a_lot_is_drawn_only_from_the_uuid_and_scaled_by_the_weight() -> None:
    one, twice = lots_of(uuid(1), 1), lots_of(uuid(1), 2)
    assert all(abs(first - 2 * second) < 1e-9 for first, second in zip(one, twice, strict=True))
    assert 0.97 < sum(one) / len(one) < 1.03
