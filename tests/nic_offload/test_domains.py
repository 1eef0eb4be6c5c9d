"""What a valid memory key permits without a seal, by provider, as `docs/security.md` describes it.

It is valid for any peer at an endpoint of the memory's domain, whether its own or another one, and for no peer at an
endpoint of another domain, of the same fabric or not.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from nic_offload.errors import FabricError
from nic_offload.memory import allocate
from tests.nic_offload.rig import PROVIDERS, Side, Way, quieten, wait_until

AT, MARK = 4096, b"E" * 64
FDS = Path("/proc/self/fd")


@pytest.fixture(params=PROVIDERS)
def provider(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def lands(where: Side, whose: Side) -> bool:
    """Whether a stranger can write through this endpoint with the other side's key."""
    whose.fill(AT, bytes(len(MARK)))
    with Side(where.fabric.provider) as stranger:
        stranger.fill(0, MARK)
        way = Way(stranger, where.endpoint.address(), whose.region.base, whose.region.key, whose.length)
        way.arm(way.put(7, len(MARK), target=AT))
        stranger.final(7)
        with suppress(AssertionError):
            wait_until(lambda: whose.bytes_at(AT, len(MARK)) == MARK, "it landed", 0.3)
        with suppress(FabricError):
            quieten(stranger.fabric, where.fabric)
    return whose.bytes_at(AT, len(MARK)) == MARK


def test_a_key_gives_strangers_access_at_its_own_endpoint(provider: str) -> None:
    with Side(provider) as whose:
        assert lands(whose, whose)


def test_a_key_gives_strangers_access_at_another_endpoint_of_its_domain(provider: str) -> None:
    with Side(provider) as whose:
        assert lands(Side.more(whose), whose)


def test_a_key_gives_no_access_at_an_endpoint_of_another_domain(provider: str) -> None:
    with Side(provider) as whose, Side(provider) as other:
        assert not lands(other, whose)
        with suppress(FabricError):
            quieten(whose.fabric, other.fabric)


def test_a_key_gives_no_access_at_an_endpoint_of_another_domain_of_its_fabric(provider: str) -> None:
    with Side(provider) as whose:
        if whose.fabric.domains_max == 1:
            assert provider in {"cxi", "sockets"}
            with pytest.raises(FabricError):
                whose.fabric.open_endpoint(domain=1)
            return
        other = Side.more(whose, domain=whose.fabric.domains_max - 1)
        assert not lands(other, whose)
        with suppress(FabricError):
            quieten(whose.fabric)
        assert lands(whose, whose)
        again = Side.more(whose, domain=other.endpoint.domain, registers=True)
        assert lands(again, again), "with its own key it does"
        with pytest.raises(FabricError):
            whose.fabric.open_endpoint(domain=whose.fabric.domains_max)


def test_a_domain_is_closed_with_its_last_user(provider: str) -> None:
    """Its descriptors are freed, whatever was the last, and it can be opened again."""
    with Side(provider) as side:
        if side.fabric.domains_max == 1:
            return
        peer = side.endpoint.address()
        domain = side.fabric.domains_max - 1

        def come_and_go(order: str) -> None:
            endpoint = side.fabric.open_endpoint(domain=domain)
            region = side.fabric.register(allocate(4096), endpoint=endpoint)
            number = side.fabric.add_peer(peer, domain)
            for what in order:
                if what == "e":
                    endpoint.close()
                elif what == "r":
                    region.close()
                else:
                    side.fabric.remove_peer(number, domain)

        descriptors = len(list(FDS.iterdir()))
        for order in ("erp", "epr", "pre"):
            come_and_go(order)
            # The thread opens one now and then, when it looks for sockets.
            wait_until(lambda: len(list(FDS.iterdir())) <= descriptors, "its descriptors are back")
        assert lands(side, side)
