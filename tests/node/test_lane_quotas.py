"""Puts of a tenant with a quota use lanes, as far as pages were lent, and never exceed the quota."""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

import pytest

from kvstore.client.block_calls import Stored
from kvstore.limits import PAGE_BYTES, QUOTA_LENT_SHARE
from kvstore.node import granted_puts
from tests.client.test_granted import is_settled, while_python_stands_still
from tests.conftest import ClientWithBuffers
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.node.node import Node
    from tests.node.in_process import NodeInProcess

pytestmark = pytest.mark.node("in process")

LENGTH = 20_000
PAGES = 6  # of such a block
FIT = 2 * QUOTA_LENT_SHARE  # blocks in the quota, of which two are lent
QUOTA = FIT * PAGES * PAGE_BYTES


@pytest.fixture
def rig(node: NodeInProcess) -> Iterator[ClientWithBuffers]:
    with closing(ClientWithBuffers(node)) as rig:
        rig.client.attach()
        set_quota(node, QUOTA)
        yield rig


def set_quota(node: NodeInProcess, quota_bytes: int) -> None:
    def change(inside: Node) -> None:
        (tenant,) = {area.connection.tenant for area in inside.granted._areas.values()}
        inside.store.change_quotas({tenant: quota_bytes} if quota_bytes else {})
        inside.granted.quotas_changed()

    node.call(change)


def lent_pages(node: NodeInProcess) -> int:
    """The pages lent to lanes; the quotas and the clients' receivers agree on them."""

    def lent(inside: Node) -> int:
        of_areas = sum(area.lent_pages for area in inside.granted._areas.values())
        assert of_areas == sum(inside.store.quotas._lent.values())
        return of_areas

    return int(node.call(lent))


def put(rig: ClientWithBuffers, numbers: range) -> None:
    for first in numbers[::4]:
        blocks = [rig.block(number, LENGTH) for number in range(first, min(first + 4, numbers.stop))]
        assert [one.error for one in rig.client.put(blocks)] == [None] * len(blocks)


def stored(rig: ClientWithBuffers, numbers: range) -> list[int]:
    found = rig.client.exists([rig.key(number) for number in numbers])
    return [number for number, one in zip(numbers, found, strict=True) if isinstance(one, Stored)]


def test_blocks_are_written_without_python_with_a_quota_too(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    set_quota(node, 32 << 20)
    while_python_stands_still(node, rig)
    told = rig.client.statistics()
    assert told.quota_used_bytes == 41 * 3 * PAGE_BYTES


def test_blocks_written_by_lanes_stay_within_the_quota(node: NodeInProcess, rig: ClientWithBuffers) -> None:
    """Two clients of the tenant put more than twice of what fits."""
    fit, puts = 4 * FIT, 10 * FIT

    def used_or_lent(inside: Node) -> int:
        quotas = inside.store.quotas
        return max(map(quotas._used_pages, quotas._numbers)) + sum(quotas._lent.values())

    with closing(ClientWithBuffers(node)) as another:
        another.client.attach()
        another.name = rig.name
        set_quota(node, 4 * QUOTA)
        for first in range(0, puts, 8):
            put(another if first % 64 == 0 else rig, range(first, first + 8))
            assert node.call(used_or_lent) <= fit * PAGES
        wait_until(lambda: is_settled(node), "the index has them")
        kept = stored(rig, range(puts))
        assert len(kept) >= fit - fit // QUOTA_LENT_SHARE
        assert min(kept) >= puts - fit - 8, "the oldest went"
        assert rig.client.statistics().quota_used_bytes == len(kept) * PAGES * PAGE_BYTES
        assert node.call(lambda inside: inside.granted._lanes._known) > puts // 4, "many went through lanes"


def test_granted_pages_are_recalled_before_a_put_is_refused(
    node: NodeInProcess, rig: ClientWithBuffers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(granted_puts, "ROOMS_IDLE_TICKS", 1 << 60)  # it doesn't come back by itself
    put(rig, range(FIT - 2))
    wait_until(lambda: is_settled(node), "the index has them")
    assert 0 < lent_pages(node) <= 2 * PAGES, "renewed while the last ones were being noted, or after that"
    pinned = stored(rig, range(FIT))
    rig.client.pin([rig.key(number) for number in pinned])
    for number in range(FIT, FIT + FIT - len(pinned)):
        rig.client.put_inline(rig.key(number), bytes(LENGTH), timeout_s=5.0)
    assert lent_pages(node) == 0
    assert rig.client.statistics().quota_used_bytes == QUOTA


def test_granted_pages_return_from_clients_that_leave_idle_or_lose_their_quota(
    node: NodeInProcess, rig: ClientWithBuffers
) -> None:
    put(rig, range(8))
    assert lent_pages(node)
    wait_until(lambda: lent_pages(node) == 0, "it is idle")
    put(rig, range(8, 16))
    wait_until(lambda: is_settled(node), "the index has them")
    assert lent_pages(node)
    set_quota(node, 0)
    assert lent_pages(node) == 0
    put(rig, range(16, 3 * FIT))
    assert stored(rig, range(3 * FIT)) == list(range(3 * FIT))
    set_quota(node, QUOTA)
    put(rig, range(3 * FIT, 3 * FIT + 8))
    wait_until(lambda: rig.client.statistics().quota_used_bytes <= QUOTA, "what is too much has gone")
    rig.client.close()
    wait_until(lambda: node.call(lambda inside: not inside.store.quotas._lent), "it has left")
