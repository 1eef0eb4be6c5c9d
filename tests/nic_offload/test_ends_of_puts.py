"""How the end of a batch of puts is reported: by one event, a little later, if no caller has seen it by then."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import pytest

from nic_offload.fabric import EventKind
from tests.nic_offload.rig import happens_more_often, wait_until
from tests.nic_offload.test_granted import LANDED, open_rig

if TYPE_CHECKING:
    from collections.abc import Iterator

    from nic_offload.group import Group
    from tests.nic_offload.test_granted import GrantRig

ROOMS = 60


@pytest.fixture
def rig() -> Iterator[GrantRig]:
    for rig in open_rig("net"):
        rig.feed(ROOMS, pages=3)
        yield rig


def ends(rig: GrantRig) -> list[int]:
    """The tags of the batches whose ends were reported."""
    rig.pair.near.reap()
    return [event.tag for event in rig.pair.near.events if event.kind == EventKind.OVER]


def _has_ended(group: Group) -> bool:
    return not group.open_rows


def test_ends_that_no_caller_sees_are_reported_once_and_in_order(rig: GrantRig) -> None:
    tags = [rig.put([3 * n, 3 * n + 1, 3 * n + 2])[0] for n in range(4)]
    wait_until(lambda: len(ends(rig)) == len(tags), "each end is reported")
    assert ends(rig) == tags
    tag, group = rig.put([13])
    wait_until(lambda: tag in ends(rig), "the last end is reported")
    assert ends(rig) == [*tags, tag], "and the earlier ones not again"
    assert group.wait(1, 0)


def test_an_end_that_a_caller_has_seen_is_not_reported(rig: GrantRig) -> None:
    numbers = itertools.count()

    def is_quiet() -> bool:
        """A slow machine may report it before this thread has looked."""
        seen, group = rig.put([next(numbers)])
        wait_until(partial(_has_ended, group), "the put has ended")
        assert rig.codes(group, 1) == [LANDED]
        unseen, _ = rig.put([next(numbers)])
        wait_until(lambda: unseen in ends(rig), "the next end is reported")
        return seen not in ends(rig)

    assert happens_more_often(is_quiet, 1 / 5)


def test_a_fabric_is_closed_while_ends_are_to_be_reported() -> None:
    for rig in open_rig("net"):
        rig.feed(8, pages=3)
        has_ended = partial(_has_ended, rig.put(list(range(8)))[1])
        wait_until(has_ended, "the puts have ended")
