"""Nodes that are absent from the map of their cluster: deletions ask them, until they are back or forgotten."""

from __future__ import annotations

import signal
import subprocess
import sys
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterClient
from kvstore.cluster.map import Map, Member
from kvstore.errors import DeadlineExceeded, NodeUnavailable
from tests.cluster.test_upkeep import WAIT_S, RealCluster, command, data, one_key, told
from tests.commands.here import run_here
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess


def test_a_deletion_waits_for_an_absent_node_until_it_is_back_or_forgotten(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3, call_timeout_ms=1_000)
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
        wait_until(
            lambda: absent.target not in world.client._calls.silent._silent, "it has answered a probe", WAIT_S
        )
        assert any(world.there(absent, theirs[:5])), "as was said"
        assert world.client.delete(theirs[:5]) == [True] * 5
        assert not any(has for node in world.nodes for has in world.there(node, theirs[:5]))
        absent.kill()
        world.nodes.remove(absent)
        world.settled()
        node = world.nodes[0]
        assert [one.node for one in told(node).absent] == [absent.target]
        assert f"absent: {absent.target}" in command("status", "--node", node.target).stdout
        assert command("forget", node.target, "--node", node.target).returncode == 3, "it is a member"
        forgotten = command("forget", absent.target, "--node", node.target)
        assert forgotten.stdout.startswith(f"{absent.target} is forgotten.")
        for one in world.nodes:
            wait_until(lambda one=one: not told(one).absent, "it is forgotten", WAIT_S)  # type: ignore[misc]
        wait_until(lambda: not world.client.nodes.map.absent, "the client knows", WAIT_S)
        assert world.client.delete(theirs[5:10]) == [True] * 5
        absent.start()
        wait_until(
            lambda: "drained or forgotten" in command("status", "--node", absent.target).stdout,
            "it is told so",
            WAIT_S,
        )
        assert command("status", "--node", absent.target).returncode == 3
        assert absent.target not in {one.node for one in told(node).members}


def test_a_removal_is_not_complete_if_the_only_node_called_has_no_map_yet(tmp_path: Path) -> None:
    """A node that starts while etcd is away knows no other; the blocks to remove are on the others."""
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 2)
        keys, (first, other) = world.put(), world.nodes
        world.etcd.members[0].signal(signal.SIGSTOP)
        first.kill()
        first.start()
        with ClusterClient([first.target], replicas=2, call_timeout_ms=2_000) as alone:
            with pytest.raises(NodeUnavailable):
                alone.delete(keys)
            with pytest.raises((NodeUnavailable, DeadlineExceeded)):
                alone.erase_user("ada", timeout_s=2.0)
        assert any(world.there(other, keys))
        world.etcd.members[0].signal(signal.SIGCONT)
        world.settled()
        assert any(world.client.delete(keys))
        assert not any(has for node in world.nodes for has in world.there(node, keys))


def test_a_command_that_names_one_node_deletes_on_all_and_finds_blocks_of_others(tmp_path: Path) -> None:
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 3)
        keys = world.put(6)
        for key in keys:
            elsewhere = next(node for node in world.nodes if node.target not in world.client.owners(key))
            assert got_by_command(key, elsewhere) == data(key)
            assert run_here("pin", key.hex(), "--node", elsewhere.target).returncode == 0
            assert run_here("delete", key.hex(), "--node", elsewhere.target).returncode == 0
        assert not any(has for node in world.nodes for has in world.there(node, keys))
        (folder := tmp_path / "file").write_bytes(b"put by hand")
        key, any_node = one_key(), world.nodes[0]
        assert run_here("put", key.hex(), str(folder), "--node", any_node.target).returncode == 0
        assert world.client.get_inline(key, len(b"put by hand")) == b"put by hand"


def got_by_command(key: bytes, node: NodeProcess) -> bytes:
    asked = [sys.executable, "-m", "kvstore", "get", key.hex(), "-", "--node", node.target]
    return subprocess.run(asked, check=True, capture_output=True, timeout=60).stdout


def test_a_process_in_the_place_of_an_absent_node_answers_only_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ExitStack() as stack:
        pair = RealCluster(tmp_path, stack, 1)
        now = pair.client.nodes.map
        stranger = Member("of another folder", now.members[0].node)
        with_absent = Map.of(now.revision, now.members, now.digest, now.placed_as, [stranger])
        monkeypatch.setattr(type(pair.client.nodes), "map", with_absent)
        with pytest.raises(NodeUnavailable, match="forget of another folder"):
            pair.client.delete([one_key()])


def test_a_process_in_the_place_of_a_member_does_not_answer_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member was killed and is still on the map, and its address has a node with another folder by now."""
    with ExitStack() as stack:
        client = RealCluster(tmp_path, stack, 1, call_timeout_ms=1_000).client
        now = client.nodes.map
        killed = Member("of another folder", now.members[0].node)
        with_killed = Map.of(now.revision, [killed], now.digest, now.placed_as)
        monkeypatch.setattr(type(client.nodes), "map", with_killed)
        for removed in (lambda: client.delete([one_key()]), lambda: client.erase_user("ada", timeout_s=1)):
            with pytest.raises(NodeUnavailable, match="no longer the cluster's member of another folder"):
                removed()
