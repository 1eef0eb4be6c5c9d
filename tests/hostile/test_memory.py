"""Attacks through memory that a client may write, beside a neighbour that puts and gets over the fabric."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.client import Stored
from kvstore.client import link as links
from tests.conftest import small_client
from tests.hostile.beside import PAGE, Beside, TooSlow, check_speed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.wire import kvstore_pb2 as pb

pytestmark = [pytest.mark.timed.with_args(TooSlow), pytest.mark.slow]


@pytest.fixture
def beside(tmp_path: Path) -> Iterator[Beside]:
    with Beside(tmp_path) as beside:
        beside.work = beside.put_and_get
        yield beside


def all_is_well(beside: Beside) -> bool:
    """What the neighbour put last is there, and another client of its own may come."""
    with small_client(beside.node.target, token="good") as late:
        late.put_inline(b"l" * 32, b"late" * 1024)
        return all(isinstance(one, Stored) for one in late.exists([*beside.put, b"l" * 32]))


def test_payloads_that_are_written_over_after_their_flag_cost_their_tenant_alone(beside: Beside) -> None:
    """What is found corrupt is its own, and counts as what it has: the neighbour's blocks stay, and find room."""
    alone, under, did = beside.endure("rewrite", token="evil")
    assert did["over"] > 0
    assert did["hit"] + did["miss"] > 0
    with small_client(beside.node.target, token="evil") as client:
        assert client.statistics().quarantined <= did["miss"]
        client.put_inline(b"e" * 32, b"mine" * 1024)
    assert beside.client.statistics().quota_used_bytes > len(beside.put) * PAGE
    assert all_is_well(beside)
    check_speed(alone, under)


@pytest.mark.parametrize("blocks", [1, 1024])
def test_calls_over_the_fabric_without_end(beside: Beside, blocks: int) -> None:
    """One of 1,024 blocks takes milliseconds; then its tenant rests."""
    alone, under, did = beside.endure("fetches", token="evil", connections=16, blocks=blocks)
    assert did["calls"] > 0
    check_speed(alone, under)


@pytest.mark.parametrize("name", ["scribble", "ring"])
def test_whatever_a_client_does_to_memory_that_it_maps(beside: Beside, name: str) -> None:
    alone, under, did = beside.endure(name, token="evil")
    assert did["rung"] > 0
    assert all_is_well(beside)
    check_speed(alone, under)


def test_callers_for_descriptors_that_have_no_pass(beside: Beside, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[pb.SharedMemory] = []
    of_link = vars(links)["map_shared"]

    def hear(shared: pb.SharedMemory, *more: Any) -> Any:
        told.append(shared)
        return of_link(shared, *more)

    monkeypatch.setitem(vars(links), "map_shared", hear)
    beside.client.attach()
    alone, under, did = beside.endure("passes", socket=told[0].socket)
    assert did["given"] > 0
    assert all_is_well(beside)
    check_speed(alone, under)
