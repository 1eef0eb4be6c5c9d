"""A session of a million tokens: 65,536 blocks of 16 tokens are put, appended, resumed and forked like any other."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from kvstore.client import Block, Client, Hit
from kvstore.client.link import ARMED_BLOCKS_MAX
from kvstore.durability import Durability
from kvstore.names import block_key
from nic_offload.memory import allocate
from tests.conftest import small_node

if TYPE_CHECKING:
    from pathlib import Path

    from nic_offload.fabric import Region

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BLOCKS = 1_048_576 // 16
LENGTH = 64
WAIT_S = 200.0


def blocks_in(region: Region, keys: list[bytes]) -> list[Block]:
    return [Block(key, region, number * LENGTH, LENGTH) for number, key in enumerate(keys)]


def test_a_session_may_have_a_million_tokens(tmp_path: Path) -> None:
    keys = [block_key(b"of a long session", number.to_bytes(4)) for number in range(BLOCKS)]
    with (
        small_node(tmp_path / "node", capacity="2GiB") as node,
        Client(node.target, slots=16, block_bytes_max=4096) as client,
    ):
        source, target = allocate(BLOCKS * LENGTH), allocate(BLOCKS * LENGTH)
        source[:] = b"".join(key + key for key in keys)
        blocks = blocks_in(client.register(source), keys)
        for first in range(0, BLOCKS, ARMED_BLOCKS_MAX):
            puts = client.put(blocks[first : first + ARMED_BLOCKS_MAX], timeout_s=WAIT_S)
            assert {(one.error, one.durability) for one in puts} == {(None, Durability.WRITTEN)}

        chat = client.session("ada", "long")
        assert chat.append(keys, 16 * BLOCKS) == BLOCKS
        assert chat.keys() == keys

        into = client.register(target)
        wanted = blocks_in(into, keys)
        assert client.get(wanted, timeout_s=WAIT_S) == [Hit(key) for key in keys]
        assert target[:] == source[:]

        target[:] = bytes(len(target))
        resumed = chat.resume(lambda number, _: wanted[number], timeout_s=WAIT_S)
        assert resumed.miss is None
        assert target[:] == source[:]

        fork = chat.fork("another way", blocks=BLOCKS - 1)
        assert fork.append([keys[-1]], 16) == BLOCKS
        assert fork.keys() == keys
