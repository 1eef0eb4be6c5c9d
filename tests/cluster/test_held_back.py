"""A list of members that is held back is listed again when its time is over, not when the whole list is due."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstore.limits import CLUSTER_LEASE_S
from tests.cluster.simulated import FakeEtcd, run
from tests.cluster.test_membership import Process

LATE_S = 0.5


@pytest.mark.parametrize("lost_count", [2, 3])
def test_of_members_lost_together_all_but_one_leave_the_map_a_leases_time_later(lost_count: int) -> None:
    async def history() -> None:
        etcd = FakeEtcd()
        leases = asyncio.create_task(etcd.run())
        some = [Process(etcd, random.Random(port), name, port) for port, name in enumerate("abcde", 1)]
        await asyncio.sleep(2)
        stay, lost = some[lost_count:], some[:lost_count]
        for one in stay:
            one.way.looks_again_s = 3600
        await asyncio.sleep(10)
        for one in lost:
            await one.end(kindly=False)
        keys = [
            key
            for key in etcd.values
            if key.endswith(tuple(b"members/%s" % one.member.name.encode() for one in lost))
        ]
        await etcd.drop([etcd.values[key][1] for key in keys])
        await asyncio.sleep(CLUSTER_LEASE_S - LATE_S)
        assert {one.told.names for one in stay} == {frozenset("bcde")}, "one leaves at once"
        await asyncio.sleep(2 * LATE_S)
        assert {one.told.names for one in stay} == {frozenset("abcde"[lost_count:])}
        leases.cancel()

    run(history())
