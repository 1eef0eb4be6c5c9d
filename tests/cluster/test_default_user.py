"""A client with a default user: after erasing the user, nothing of theirs is on any node, and nothing returns."""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import grpc
import pytest

from kvstore.client import ClusterBlock
from kvstore.errors import DomainRequired
from kvstore.miss import Miss, MissReason
from kvstore.names import SHARED, UNSAID, domain_of, in_domain
from kvstore.node.upkeep import Block, Upkeep
from kvstore.sealing.masters import new_master_file
from kvstore.storage.index import Entry
from kvstore.wire.status import error_from_rpc
from nic_offload.memory import allocate
from tests.cluster.test_upkeep import BYTES, WAIT_S, RealCluster, data, has_looked, one_key
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

ADA = domain_of("ada")
COUNT, DELETED = 24, 6
GONE = [{MissReason.ERASED}, {MissReason.ERASED}]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[RealCluster]:
    master = tmp_path / "master.key"
    new_master_file(master)
    with ExitStack() as stack:
        yield RealCluster(tmp_path, stack, 3, ("--master-key", f"file:{master}"), user="ada")


def put(world: RealCluster) -> list[bytes]:
    """Put blocks over both paths, without naming a domain."""
    keys = [in_domain(one_key(), ADA) for _ in range(COUNT)]
    some, others = keys[: COUNT // 2], keys[COUNT // 2 :]
    assert {one.error for one in world.client.put_many_inline((key, data(key)) for key in some)} == {None}
    size = len(data(keys[0]))
    with allocate(size * len(others)) as memory, world.client.register(memory) as region:
        memory[: size * len(others)] = b"".join(map(data, others))
        blocks = [ClusterBlock(key, region, size * at, size) for at, key in enumerate(others)]
        assert {one.error for one in world.client.put(blocks)} == {None}
    return keys


def answers(world: RealCluster, keys: list[bytes]) -> list[set[MissReason | str]]:
    """The outcomes of gets from every node: of the deleted blocks, and of the others."""
    found: list[set[MissReason | str]] = []
    for some in (keys[:DELETED], keys[DELETED:]):
        wanted = [(key, len(data(key))) for key in some]
        each = [world.client.nodes.at(node.target).get_many_inline(wanted) for node in world.nodes]
        found.append(
            {one.reason if isinstance(one, Miss) else "hit" for outcomes in each for one in outcomes}
        )
    found[0].discard(MissReason.UNKNOWN)  # of what was deleted a node says that, or
    found[0].add(MissReason.ERASED)
    return found


def all_have_looked(world: RealCluster) -> None:
    for node in world.nodes:
        wait_until(lambda node=node: has_looked(node, 0), "it has looked at all", WAIT_S)  # type: ignore[misc]


def test_erased_blocks_are_removed_from_every_node_and_no_returning_drive_restores_them(
    world: RealCluster,
) -> None:
    keys = put(world)
    shared = one_key()
    results = world.client.put_many_inline([(shared, data(shared))], domain=SHARED)
    assert [one.error for one in results] == [None]
    assert world.on_two([*keys, shared])
    before = world.folder / "before"
    away = world.nodes[0]
    away.stop()
    shutil.copytree(world.folder / "node0", before)
    away.start()
    world.settled()
    assert all(world.client.delete(keys[:DELETED])), "as before an erasure"

    done = world.client.erase_user("ada")
    assert len(done) == len(world.nodes)
    assert sum(one.blocks for one in done) >= 2 * (COUNT - DELETED)
    assert answers(world, keys) == GONE
    all_have_looked(world)
    assert answers(world, keys) == GONE

    away.stop()
    for name in ("drive-0.kv", "index-0"):
        there, then = world.folder / "node0" / name, before / name
        if then.is_dir():
            shutil.rmtree(there)
            shutil.copytree(then, there)
        else:
            shutil.copy(then, there)
    away.start()
    world.settled()
    assert answers(world, keys) == GONE, "the drive has them, and their key is gone"
    all_have_looked(world)
    assert answers(world, keys) == GONE
    assert sum(sum(world.there(node, [shared])) for node in world.nodes) >= 2, (
        "what was asked to be shared stays"
    )


def test_a_copy_that_does_not_name_its_owner_is_refused(world: RealCluster) -> None:
    """As from a node that doesn't encrypt: it doesn't know whether `shared` was requested."""
    sender, receiver = world.nodes[:2]
    other = world.stranger(receiver, sender)
    keys = [one_key(), one_key(), in_domain(one_key(), ADA)]
    ticket = other.offer(keys).ticket
    with pytest.raises(grpc.RpcError, match="or ask for SHARED") as refused:
        other.copy(keys[0], ticket, domain=UNSAID)
    assert isinstance(error_from_rpc("A copy", refused.value), DomainRequired)
    assert [other.copy(key, ticket, domain=into) for key, into in zip(keys[1:], (SHARED, ADA), strict=True)]
    assert world.there(receiver, keys) == [False, True, True]
    assert len(data(keys[0])) <= BYTES


def test_a_node_without_encryption_does_not_know_the_owner() -> None:
    block = Block((bytes(16), one_key()), "", Entry(0, 0, 0, 0, 0, b""), (), is_sure=True)
    plain = cast("Any", SimpleNamespace(_node=SimpleNamespace(store=SimpleNamespace(keys=None))))
    keys = cast("Any", SimpleNamespace(_node=SimpleNamespace(store=SimpleNamespace(keys=object()))))
    assert Upkeep._domain_of(plain, block) == UNSAID
    assert Upkeep._domain_of(keys, block) == SHARED, "it has it from before, and keeps it as such"
