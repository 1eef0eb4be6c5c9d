"""Blocks and sessions that are larger than a message of most calls reach the other node that should have them."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore.errors import KvError
from kvstore.limits import MESSAGE_SMALL_BYTES_MAX
from kvstore.names import block_key
from kvstore.node.upkeep import _messages
from kvstore.wire.upkeep_pb2 import CopyRequest, CopyStart
from tests.cluster.test_session_standbys import WAIT_S
from tests.cluster.test_upkeep import RealCluster, told
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import Session

COUNT, LENGTH = 6, 10_000
KEYS = [block_key(b"large", bytes([number])) for number in range(COUNT)]
BYTES = 3 * MESSAGE_SMALL_BYTES_MAX - 32
assert 32 * LENGTH > MESSAGE_SMALL_BYTES_MAX


def blocks_of(chat: Session) -> int:
    try:
        return chat.info().blocks
    except KvError:
        return 0


def appended(chat: Session) -> bool:
    try:
        return chat.append(KEYS[:1] * LENGTH, tokens=LENGTH) == LENGTH
    except KvError:
        return False


def test_large_blocks_and_long_sessions_are_copied_to_other_nodes(tmp_path: Path) -> None:
    """To a standby, to a node that replaces a lost owner, and back to a home that was away."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        nodes = world.client.nodes
        page = {key: key * (BYTES // len(key)) for key in KEYS}
        assert {one.error for one in world.client.put_many_inline(page.items())} == {None}
        nodes.of("ada").put_inline(KEYS[0], page[KEYS[0]])
        chat = nodes.session("ada", "chat")
        wait_until(lambda: appended(chat), "the home orders sessions", WAIT_S)
        home = next(node for node in world.nodes if node.target == nodes.home("ada"))
        others = [node for node in world.nodes if node is not home]
        wait_until(lambda: told(home).upkeep.lots_alone == 0, "the standby has the session", WAIT_S)
        home.kill()
        world.nodes = others
        world.settled()
        wait_until(lambda: world.on_two(KEYS), "each block is on both that are left", WAIT_S)
        for node in others:
            assert list(nodes.at(node.target).get_many_inline([(key, BYTES) for key in KEYS])) == list(
                page.values()
            )
        wait_until(lambda: blocks_of(chat) == LENGTH, "the standby orders it", WAIT_S)
        home.start()
        world.nodes = [*others, home]
        world.settled()
        wait_until(lambda: blocks_of(chat) == LENGTH, "the home has taken it", WAIT_S)
        assert nodes.home("ada") == home.target
        assert chat.keys() == KEYS[:1] * LENGTH


def test_a_node_of_an_earlier_version_takes_each_message_of_a_copy() -> None:
    async def sent() -> list[CopyRequest]:
        return [one async for one in _messages(CopyStart(), memoryview(bytes(BYTES)))]

    messages = asyncio.run(sent())
    assert max(one.ByteSize() for one in messages) <= MESSAGE_SMALL_BYTES_MAX
    assert sum(len(one.chunk) for one in messages) == BYTES
