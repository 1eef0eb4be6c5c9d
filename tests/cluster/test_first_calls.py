"""A client's first calls wait for the cluster's map: for as long as each has time, and a call's timeout at most."""

from __future__ import annotations

import socket
import time
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterBlock, ClusterClient, Nodes
from kvstore.errors import NodeUnavailable
from kvstore.miss import Miss, MissReason
from kvstore.names import block_key
from nic_offload.memory import allocate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

KEY, SIZE = block_key(b"a block"), 4096
OWN_S, CALL_S = 0.2, 3.0  # of one call, and of any


@pytest.fixture
def hung() -> Iterator[str]:
    """The address of a node that accepts connections, and no more, as one that is stopped."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"127.0.0.1:{listening.getsockname()[1]}"


@pytest.fixture
def cluster(hung: str) -> Iterator[ClusterClient]:
    with ClusterClient([hung], call_timeout_ms=int(CALL_S * 1000), replicas=1) as client:
        yield client


def put(cluster: ClusterClient) -> object:
    with cluster.nodes.register(allocate(SIZE)) as memory:
        (result,) = cluster.put([ClusterBlock(KEY, memory, 0, SIZE)], timeout_s=OWN_S)
    return result.error


def put_of_a_user(cluster: ClusterClient) -> object:
    with cluster.nodes.register(allocate(SIZE)) as memory:
        (result,) = cluster.nodes.put("ada", [ClusterBlock(KEY, memory, 0, SIZE)], timeout_s=OWN_S)
    return result.error


def put_inline(cluster: ClusterClient) -> object:
    (result,) = cluster.put_many_inline([(KEY, b"text")], timeout_s=OWN_S)
    return result.error


def in_time(call: Callable[[ClusterClient], object], cluster: ClusterClient) -> object:
    """Make a call, which ends by its own deadline, long before that of any."""
    began_s = time.monotonic()
    result = call(cluster)
    assert time.monotonic() - began_s < CALL_S / 2
    return result


def arm(cluster: ClusterClient) -> object:
    with (
        cluster.nodes.register(allocate(SIZE)) as memory,
        pytest.raises(NodeUnavailable) as raised,
    ):
        cluster.arm([ClusterBlock(KEY, memory, 0, SIZE)], timeout_s=OWN_S)
    return raised.value


def arm_of_a_user(cluster: ClusterClient) -> object:
    with (
        cluster.nodes.register(allocate(SIZE)) as memory,
        pytest.raises(NodeUnavailable) as raised,
    ):
        cluster.nodes.arm("ada", [ClusterBlock(KEY, memory, 0, SIZE)], timeout_s=OWN_S)
    return raised.value


@pytest.mark.parametrize("put", [put, put_of_a_user, put_inline, arm, arm_of_a_user])
def test_a_put_ends_by_its_own_deadline_while_no_node_answers(
    cluster: ClusterClient, put: Callable[[ClusterClient], object]
) -> None:
    error = in_time(put, cluster)
    assert isinstance(error, NodeUnavailable)
    assert "has sent the map within 0.2 s" in str(error)


@pytest.mark.parametrize(
    "look",
    [
        lambda cluster: cluster.get_inline(KEY, SIZE, timeout_s=OWN_S),
        lambda cluster: cluster.exists([KEY], timeout_s=OWN_S)[0],
        lambda cluster: cluster.prefix([KEY], timeout_s=OWN_S).miss,
    ],
)
def test_a_read_ends_by_its_own_deadline_while_no_node_answers(
    cluster: ClusterClient, look: Callable[[ClusterClient], object]
) -> None:
    found = in_time(look, cluster)
    assert isinstance(found, Miss)
    assert found.reason is MissReason.NODE_AWAY


def test_a_call_with_time_waits_for_the_map_after_one_without(hung: str) -> None:
    """It must not take the nodes that were given for all there are: a block would have one copy."""
    with Nodes([hung], call_timeout_ms=int(CALL_S * 1000)) as nodes:
        for _ in range(2):
            with pytest.raises(NodeUnavailable):
                nodes._await_map(OWN_S)
        began_s = time.monotonic()
        assert nodes.map.revision == 0
        assert CALL_S / 2 < time.monotonic() - began_s + 2 * OWN_S < CALL_S + 1
        assert nodes._await_map(OWN_S) > OWN_S / 2, "after a call's timeout nobody waits"
