"""The blocks of moved sessions reach the new home although the former one crashes before it has sent them."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

from kvstore.client import ClusterBlock
from kvstore.errors import KvError
from kvstore.names import block_key
from tests.cluster.test_upkeep import RealCluster, told
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.client import RegisteredMemory

COUNT, BYTES, WAIT_S = 32, 32 << 10, 60.0
# A fourth node becomes the home of none of them once in a million times.
USERS = [f"user {number}" for number in range(48)]


def keys_of(user: str) -> list[bytes]:
    return [block_key(b"moved", user.encode(), bytes([number])) for number in range(COUNT)]


def has_chat(world: RealCluster, memory: RegisteredMemory, user: str) -> bool:
    nodes, keys = world.client.nodes, keys_of(user)
    blocks = [ClusterBlock(key, memory, at * BYTES, BYTES) for at, key in enumerate(keys)]
    try:
        if any(one.error for one in nodes.put(user, blocks, timeout_s=10)):
            return False
        nodes.session(user, "chat").append(keys, tokens=16)
    except KvError:
        return False
    return True


def is_there(world: RealCluster, user: str) -> bool:
    try:
        return len(world.client.nodes.session(user, "chat").keys()) == COUNT
    except KvError:
        return False


def test_blocks_follow_a_session_although_its_former_home_crashed(tmp_path: Path) -> None:
    """Both it and the former standby have them, and only it was to send them."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        nodes = world.client.nodes
        memory = stack.enter_context(nodes.register(bytearray(COUNT * BYTES)))
        for user in USERS:
            wait_until(lambda user=user: has_chat(world, memory, user), "it is stored", WAIT_S)  # type: ignore[misc]
        wait_until(lambda: not any(told(one).upkeep.session_blocks_left for one in world.nodes), "", WAIT_S)
        former = {user: nodes.home(user) for user in USERS}
        new = world.add(tmp_path / "new")
        world.settled()
        moved = [user for user in USERS if nodes.home(user) == new.target]
        wait_until(lambda: is_there(world, moved[0]), "the new home has a session", WAIT_S)
        crashed = next(node for node in world.nodes if node.target == former[moved[0]])
        crashed.kill()
        crashed.start()
        for user in moved:
            wait_until(lambda user=user: all(world.there(new, keys_of(user))), "its blocks follow", WAIT_S)  # type: ignore[misc]
