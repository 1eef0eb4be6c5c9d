"""Fabric connections that break: libfabric doesn't report it, and every put still ends.

If the client's end alone broke, the node's provider refuses every new connection of the same endpoint.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client import core
from kvstore.client import link as links
from kvstore.client.own_address import OwnSide
from kvstore.client.shared import MappedMemory
from kvstore.durability import Durability
from kvstore.errors import NodeUnavailable
from kvstore.limits import GRANTED_SLOTS
from nic_offload.fabric import Endpoint
from nic_offload.library import load
from tests.client.half_open import Relay
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kvstore.client.puts import ArmedPuts
    from nic_offload.fabric import Fabric
    from tests.conftest import ClientWithBuffers

pytestmark = [
    pytest.mark.skipif(load().best_provider() != "net", reason="only libfabric's net refuses"),
    pytest.mark.node("shared"),
]

WAIT_S = 10.0
LENGTH = 16 << 10


@pytest.fixture
def relays(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Relay]]:
    """A relay for each endpoint of the node that the client learns of; all blocks go over the fabric."""
    made: list[Relay] = []
    add_peer = OwnSide.add_peer

    def through_a_relay(fabric: Fabric, told: bytes) -> int:
        made.append(Relay(told))
        return add_peer(fabric, made[-1].told)

    monkeypatch.setattr(OwnSide, "add_peer", staticmethod(through_a_relay))
    monkeypatch.setattr(links, "map_shared", lambda *_: MappedMemory())
    monkeypatch.setattr(core, "STALLED_LOOK_MS", 200)
    yield made
    for relay in made:
        relay.close()


def armed(rig: ClientWithBuffers, *numbers: int) -> ArmedPuts:
    """Puts without a deadline, which have fired."""
    puts = rig.client.arm([rig.block(number, LENGTH) for number in numbers], rig.flags[0])
    rig.flags[0].store(max(numbers) + 1)
    return puts


def ends_for_a_broken_connection(puts: ArmedPuts) -> None:
    for result in puts.wait(WAIT_S):
        assert isinstance(result.error, NodeUnavailable), result
        assert "connection to the node broke, and what was sent may be lost" in str(result.error)


def test_a_put_ends_when_the_node_refuses_new_connections_and_the_next_one_is_stored(
    rig: ClientWithBuffers, relays: list[Relay]
) -> None:
    assert armed(rig, 0).wait(WAIT_S)[0].durability == Durability.WRITTEN
    relays[0].cut(both=False)
    ends_for_a_broken_connection(armed(rig, 1))
    assert armed(rig, 2).wait(WAIT_S)[0].durability == Durability.WRITTEN
    assert len(relays) == 2, "it is another endpoint, which the node's provider doesn't know"


def test_a_link_over_which_nothing_is_sent_is_ended_even_where_no_break_is_visible(
    rig: ClientWithBuffers, relays: list[Relay], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with tcp;ofi_rxm, which accepts nothing without credits either."""
    monkeypatch.setattr(Endpoint, "has_broken", False)
    monkeypatch.setattr(core, "STALLED_MS", 1000)
    assert armed(rig, 0).wait(WAIT_S)[0].durability == Durability.WRITTEN
    relays[0].cut(both=False)
    error = armed(rig, 1).wait(WAIT_S)[0].error
    assert isinstance(error, NodeUnavailable)
    assert "Nothing could be sent to the node over the fabric for 1 s" in str(error)
    assert armed(rig, 2).wait(WAIT_S)[0].durability == Durability.WRITTEN


@pytest.mark.parametrize("both", [False, True], ids=["the client's end", "both ends"])
def test_puts_lost_with_their_connection_end_and_block_no_other(
    rig: ClientWithBuffers, relays: list[Relay], *, both: bool
) -> None:
    """Libfabric considers them done. They have all slots, so that nothing else can be sent."""
    assert armed(rig, 0).wait(WAIT_S)[0].durability == Durability.WRITTEN
    done = rig.client.fabric.statistics().done
    relays[0].lose()
    lost = armed(rig, *range(1, GRANTED_SLOTS + 1))
    wait_until(lambda: rig.client.fabric.statistics().done >= done + GRANTED_SLOTS, "all of it is out")
    relays[0].cut(both=both)
    ends_for_a_broken_connection(lost)
    assert armed(rig, 9).wait(WAIT_S)[0].durability == Durability.WRITTEN
