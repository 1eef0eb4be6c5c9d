"""Acknowledgement words: one that its client may use for something else is not put to any more."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from kvstore.durability import Durability
from kvstore.errors import StorageError
from kvstore.storage.items import PutDone
from kvstore.wire.ack import AckCode
from nic_offload.flags import FlagWord
from tests.nic_offload.rig import wait_until
from tests.node.in_process import NodeInProcess

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from kvstore.client.link import Link
    from kvstore.node.node import Node
    from tests.conftest import Rig

WAIT_S = 20.0


@pytest.fixture
def node(tmp_path: Path) -> Iterator[NodeInProcess]:
    with NodeInProcess(tmp_path / "node") as process:
        yield process


def link_of(rig: Rig) -> Link:
    rig.client.attach()
    assert rig.client._link is not None
    return rig.client._link


def test_a_client_that_gives_a_lease_back_hears_that_it_was_over(node: NodeInProcess, rig: Rig) -> None:
    """Its word has been put then, and is waited for."""
    link = link_of(rig)
    free = len(link._free_words)
    ended = rig.client.reserve([rig.block(0)], lease_ms=10)
    wait_until(lambda: node.call(lambda inside: inside.counters.leases_over) == 1, "the lease is over")
    standing = rig.client.reserve([rig.block(1)])
    assert len(link._free_words) == free - 2
    leases = [(lease.slot, lease.generation) for one in (ended, standing) for lease in [one._puts[0].lease]]

    def abort(inside: Node) -> tuple[int, list[int]]:
        (connection,) = inside._connections.values()
        return inside.abort(connection, leases)

    assert node.call(abort) == (2, [leases[0][1]])
    ended.give_back()
    standing.give_back()
    wait_until(lambda: len(link._free_words) == free, "both words can be used again")
    assert len(set(link._free_words)) == free


def test_a_block_that_landed_and_was_not_kept_puts_no_second_word(node: NodeInProcess, rig: Rig) -> None:
    """`landed` was the last word that its client waited for."""
    link = link_of(rig)

    def fail_puts(inside: Node) -> None:
        def put(items: Any, done: Any) -> None:
            done([PutDone(item.tag, StorageError("The drive burns."), item.durability) for item in items])

        vars(inside.store)["put"] = put

    node.call(fail_puts)
    block = rig.block(0, 1000)
    for durability in (Durability.LANDED, Durability.WRITTEN):
        word = link._free_words[-1]
        puts = rig.client.reserve([block], durability=durability).arm(rig.flags[0])
        rig.flags[0].store(1)
        (result,) = puts.wait(WAIT_S)
        wait_until(lambda: node.call(lambda inside: inside.leases) == 0, "the node is done with it")
        with rig.client.lock:
            assert link.take_words(1) == [word]
        rig.client.get([rig.wanted(block)], timeout_s=WAIT_S)  # its answer comes behind whatever was put
        said = FlagWord(link.word_address(word)).load() & 0xFF
        if durability is Durability.LANDED:
            assert result.error is None
            assert said == AckCode.LANDED
        else:
            assert isinstance(result.error, StorageError)
            assert said == AckCode.STORAGE_FAILED
