"""Sessions of a cluster that are removed with their blocks: no node has these afterwards, and none brings them back."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterBlock, Nodes, Stored
from kvstore.client.user_owners import UserOwners
from kvstore.errors import DeadlineExceeded, KvError, NodeUnavailable
from kvstore.names import block_key
from kvstore.wire import sessions_pb2
from tests.cluster.test_upkeep import RealCluster, command, told
from tests.nic_offload.rig import wait_until
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from kvstore.client import Session
    from kvstore.demo.node_process import NodeProcess

COUNT, BYTES, WAIT_S = 8, 6016, 60.0
KEYS = [block_key(b"removed", bytes([number])) for number in range(COUNT)]
REST = [False] * (COUNT - 1)


def appended(chat: Session, keys: Sequence[bytes]) -> bool:
    try:
        chat.append(keys, tokens=16)
    except KvError:
        return False
    return True


def removed(chat: Session, blocks: int = COUNT - 1) -> bool:
    try:
        return chat.remove(delete_blocks=True) == blocks
    except KvError:
        return False


def begun(world: RealCluster) -> tuple[Session, Session]:
    """A session of all blocks, and one of the first."""
    nodes = world.client.nodes
    source = b"".join((key * BYTES)[:BYTES] for key in KEYS)
    with nodes.register(bytearray(source)) as memory:
        blocks = [ClusterBlock(key, memory, at * BYTES, BYTES) for at, key in enumerate(KEYS)]
        wait_until(
            lambda: {one.error for one in nodes.put("ada", blocks)} == {None},
            "the home has a standby",
            WAIT_S,
        )
    chat, other = nodes.session("ada", "chat"), nodes.session("ada", "other")
    wait_until(lambda: appended(chat, KEYS), "the home orders sessions", WAIT_S)
    other.append(KEYS[:1], tokens=16)
    wait_until(lambda: not any(told(node).upkeep.session_blocks_left for node in world.nodes), "sent", WAIT_S)
    return chat, other


def asked(nodes: Nodes, user: str) -> dict[str, str]:
    """The user's home and its standby."""
    return UserOwners(nodes, nodes._puts()._calls, user).ask(WAIT_S) or {}


def roles(world: RealCluster) -> list[NodeProcess]:
    """The user's home, its standby, and the third node."""
    order = list(asked(world.client.nodes, "ada"))
    assert len(order) == 2
    return sorted(world.nodes, key=lambda node: [*order, node.target].index(node.target))


def test_a_session_removed_with_its_blocks_leaves_none_on_any_node(tmp_path: Path) -> None:
    """The standby hangs when it is removed, and a third node has copies from before they were in a session."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        chat, other = begun(world)
        nodes = world.client.nodes
        home, standby, third = roles(world)
        pages = [(key, (key * BYTES)[:BYTES]) for key in KEYS]
        assert {one.error for one in nodes.at(third.target).put_many_inline(pages)} == {None}
        stop(standby.pid)
        try:
            with pytest.raises((NodeUnavailable, DeadlineExceeded)):
                chat.remove(delete_blocks=True)  # the home goes on alone, and the standby has the blocks
        finally:
            os.kill(standby.pid, signal.SIGCONT)
        wait_until(lambda: removed(chat), "all have answered", WAIT_S)
        assert [world.there(node, KEYS)[1:] for node in world.nodes] == [REST] * 3
        assert world.there(home, KEYS)[0], "it is in another session"
        third.kill()
        world.nodes.remove(third)
        wait_until(lambda: bool(nodes.map.absent), "it is absent", WAIT_S)
        with pytest.raises(NodeUnavailable, match="nothing was removed"):
            other.remove(delete_blocks=True)
        assert other.keys() == KEYS[:1]
        other.remove()


def test_a_removal_that_was_not_answered_is_completed_when_repeated(tmp_path: Path) -> None:
    """The session is gone then, and no node names its blocks any more; a third node has copies of them."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        begun(world)
        _, standby, third = roles(world)
        pages = [(key, (key * BYTES)[:BYTES]) for key in KEYS]
        assert {one.error for one in world.client.nodes.at(third.target).put_many_inline(pages)} == {None}
        targets = [node.target for node in world.nodes]
        chat = stack.enter_context(Nodes(targets, call_timeout_ms=700)).session("ada", "chat")
        assert chat.keys() == KEYS
        stop(standby.pid)  # the home waits longer for it than the client for the home
        try:
            with pytest.raises(DeadlineExceeded):
                chat.remove(delete_blocks=True)
        finally:
            os.kill(standby.pid, signal.SIGCONT)
        wait_until(lambda: removed(chat, COUNT), "all have answered", WAIT_S)
        assert [world.there(node, KEYS)[1:] for node in world.nodes] == [REST] * 3


def test_a_block_on_its_way_to_the_standby_is_removed_with_its_session(tmp_path: Path) -> None:
    """A client of an earlier version has the home remove it, and asks no other node."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        chat, _ = begun(world)
        nodes = world.client.nodes
        home, standby, _ = roles(world)
        assert nodes.at(standby.target).delete(KEYS[1:2]) == [True]
        stranger = world.stranger(standby, home)
        answer = stranger.offer(KEYS[1:2])
        request = sessions_pb2.RemoveSessionRequest(name=chat._name, delete_blocks=True)
        assert len(chat._calls.stub.RemoveSession(request, timeout=WAIT_S).deleted) == COUNT - 1
        assert not stranger.copy(KEYS[1], answer.ticket)
        assert [world.there(node, KEYS)[1:] for node in (home, standby)] == [REST] * 2


def test_what_a_former_standby_has_of_a_session_is_removed_with_its_blocks(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        chat, _ = begun(world)
        _, former, _ = roles(world)
        assert command("drain", former.target).returncode == 0
        assert former.target not in asked(world.client.nodes, "ada")
        assert command("join", former.target).returncode == 0
        assert all(world.there(former, KEYS))
        wait_until(lambda: removed(chat), "all have answered", WAIT_S)
        assert [world.there(node, KEYS)[1:] for node in world.nodes] == [REST] * 3


def test_blocks_that_another_users_session_lists_stay_at_its_home(tmp_path: Path) -> None:
    """Two users have the same block, at two homes, and the home of the first knows nothing of the second."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        chat, _ = begun(world)
        nodes = world.client.nodes
        home, key = nodes.home("ada"), KEYS[1]
        wait_until(lambda: bool(asked(nodes, "grace 0")), "all order sessions", WAIT_S)
        grace = next(user for user in (f"grace {n}" for n in range(100)) if home not in asked(nodes, user))
        nodes.of(grace).put_inline(key, (key * BYTES)[:BYTES])
        hers = nodes.session(grace, "chat")
        wait_until(lambda: appended(hers, [key]), "her home orders sessions", WAIT_S)
        wait_until(lambda: removed(chat), "all have answered", WAIT_S)
        assert not isinstance(nodes.at(home).exists([key])[0], Stored)
        assert isinstance(nodes.of(grace).exists([key])[0], Stored)
        assert hers.remove(delete_blocks=True) == 1
        assert not any(world.there(node, [key])[0] for node in world.nodes)
