"""Attacks through memory that a client may write, beside a neighbour that puts and gets over the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Stored
from kvstore.client import link as links
from tests.conftest import small_client
from tests.hostile.beside import PAGE, Beside, check_speed

if TYPE_CHECKING:
    from kvstore.wire import kvstore_pb2 as pb

pytestmark = pytest.mark.slow


def all_is_well(putting: Beside) -> bool:
    """The neighbour's last puts are stored, and another client of its tenant can attach."""
    with small_client(putting.node.target, token="good") as late:
        late.put_inline(b"l" * 32, b"late" * 1024)
        return all(isinstance(one, Stored) for one in late.exists([*putting.put, b"l" * 32]))


def test_payloads_overwritten_after_their_flag_affect_only_their_tenant(putting: Beside) -> None:
    """Corrupt blocks are its own, and count in its share: the neighbour's blocks stay, and find room."""
    alone, under, did = putting.endure("rewrite", token="evil")
    assert did["over"] > 0
    assert did["hit"] + did["miss"] > 0
    with small_client(putting.node.target, token="evil") as client:
        assert client.statistics().quarantined <= did["miss"]
        client.put_inline(b"e" * 32, b"mine" * 1024)
    assert putting.client.statistics().quota_used_bytes > len(putting.put) * PAGE
    assert all_is_well(putting)
    check_speed(alone, under)


@pytest.mark.parametrize("blocks", [1, 1024])
def test_endless_calls_over_the_fabric(putting: Beside, blocks: int) -> None:
    """One of 1,024 blocks takes milliseconds; then its tenant pauses."""
    alone, under, did = putting.endure("fetches", token="evil", connections=16, blocks=blocks)
    assert did["calls"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["scribble", "ring"])
def test_a_client_that_damages_mapped_memory(putting: Beside, name: str) -> None:
    alone, under, did = putting.endure(name, token="evil")
    assert did["rung"] > 0
    assert all_is_well(putting)
    check_speed(alone, under)


def test_callers_for_descriptors_without_a_pass(putting: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[pb.SharedMemory] = []
    of_link = vars(links)["map_shared"]

    def hear(shared: pb.SharedMemory, *more: Any) -> Any:
        told.append(shared)
        return of_link(shared, *more)

    monkeypatch.setitem(vars(links), "map_shared", hear)
    with small_client(putting.node.target, token="good") as late:
        late.attach()  # the neighbour itself is attached already
    alone, under, did = putting.endure("passes", socket=told[0].socket)
    assert did["given"] > 0
    assert all_is_well(putting)
    check_speed(alone, under)
