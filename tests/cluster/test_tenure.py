"""A node's tenure: which ends of leases it survives without missing a deletion."""

from __future__ import annotations

import asyncio
import random

import pytest

from kvstore.cluster.map import DRAINING
from tests.cluster.simulated import FakeEtcd, run
from tests.cluster.test_membership import SETTLED_S, Process


@pytest.mark.parametrize(
    ("meanwhile", "is_kept"),
    [("nothing", True), ("removed", False), ("drained", False), ("replaced", False), ("lost", False)],
)
def test_a_tenure_continues_if_every_map_had_the_node(meanwhile: str, *, is_kept: bool) -> None:
    """All leases end at once, as after a pause of etcd; perhaps the node was on no map for a moment."""

    async def history() -> None:
        etcd, rng = FakeEtcd(), random.Random(1)
        leases = asyncio.create_task(etcd.run())
        one, other = (Process(etcd, rng, name, port) for port, name in enumerate("ab", 1))
        await asyncio.sleep(2)
        membership, known = one.membership, b"/triggerkv/test/known/a"
        tenure, lease = membership.tenure, membership.lease
        assert tenure > 0
        one.way.is_away = True  # until all has happened
        if meanwhile == "drained":
            one.way.is_away = False
            await membership.announce(DRAINING)
            await membership.note_drained()
            one.way.is_away = True
        backup = etcd.state()
        await etcd.drop(list(etcd.leases))
        if meanwhile == "removed":
            del etcd.values[known], etcd.written[known]
        if meanwhile in {"replaced", "removed"}:
            await etcd.put(known, one.member.encoded(), 0, only_new=False, lasting=b"")
        if meanwhile == "lost":
            await asyncio.sleep(10)  # the other joins again, which the backup doesn't have
            await etcd.restore(backup)
            await etcd.drop(list(etcd.leases))
            await asyncio.sleep(10)
        one.way.is_away = False
        await asyncio.sleep(SETTLED_S)
        assert other.told.names == {"a", "b"}
        assert membership.lease not in {0, lease}
        assert membership.tenure > 0
        assert (membership.tenure == tenure) == is_kept
        leases.cancel()

    run(history())
