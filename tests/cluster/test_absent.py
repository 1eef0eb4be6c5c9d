"""Nodes that are absent from the map of their cluster: deletions ask them, until they are back or forgotten."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.cluster.map import Map, Member
from kvstore.errors import NodeUnavailable
from tests.cluster.test_upkeep import WAIT_S, World, command, one_key, told
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path


def test_a_deletion_waits_for_a_node_that_is_absent_until_it_is_back_or_forgotten(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = World(tmp_path, stack, 3, call_timeout_ms=1_000)
        keys = world.put()
        absent = world.nodes.pop(1)
        theirs = [key for key, has in zip(keys, world.there(absent, keys), strict=True) if has]
        absent.stop()
        world.settled()
        with pytest.raises(NodeUnavailable, match="is absent from the cluster"):
            world.client.delete(theirs[:5])
        absent.start()
        world.nodes.append(absent)
        world.settled()
        wait_until(lambda: world.is_reached(absent), "the client reaches it again", WAIT_S)
        assert any(world.there(absent, theirs[:5])), "as was said"
        assert world.client.delete(theirs[:5]) == [True] * 5
        assert not any(has for node in world.nodes for has in world.there(node, theirs[:5]))
        absent.kill()
        world.nodes.remove(absent)
        world.settled()
        node = world.nodes[0]
        assert [one.node for one in told(node).absent] == [absent.target]
        assert f"absent: {absent.target}" in command("--node", node.target).stdout
        assert command("forget", node.target, "--node", node.target).returncode == 3, "it is a member"
        forgotten = command("forget", absent.target, "--node", node.target)
        assert forgotten.stdout.startswith(f"{absent.target} is forgotten.")
        for one in world.nodes:
            wait_until(lambda one=one: not told(one).absent, "it is forgotten", WAIT_S)  # type: ignore[misc]
        wait_until(lambda: not world.client.nodes.map.absent, "the client knows", WAIT_S)
        assert world.client.delete(theirs[5:10]) == [True] * 5
        absent.start()
        wait_until(
            lambda: "drained or forgotten" in command("--node", absent.target).stdout, "it is told so", WAIT_S
        )
        assert command("--node", absent.target).returncode == 3
        assert absent.target not in {one.node for one in told(node).members}


def test_a_process_in_the_place_of_an_absent_node_answers_for_itself_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        pair = World(tmp_path, stack, 1)
        now = pair.client.nodes.map
        stranger = Member("of another folder", now.members[0].node)
        with_absent = Map.of(now.revision, now.members, now.digest, now.placed_as, [stranger])
        monkeypatch.setattr(type(pair.client.nodes), "map", with_absent)
        with pytest.raises(NodeUnavailable, match="forget of another folder"):
            pair.client.delete([one_key()])
