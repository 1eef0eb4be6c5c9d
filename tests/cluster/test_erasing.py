"""Erasing in a cluster: every node is called, copies keep their erase domains, and none restores a block."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from kvstore.client import ClusterClient, Stored
from kvstore.client.cluster_removals import Removals
from kvstore.client.erasing import Erased, ErasingCalls
from kvstore.clock import SystemClock
from kvstore.cluster.map import Map, Member
from kvstore.errors import DeadlineExceeded, NodeUnavailable
from kvstore.limits import ERASED_COPIES_REFUSED_MS
from kvstore.names import SHARED, domain_of, in_domain
from kvstore.node.deletions import Erasures
from kvstore.sealing.masters import new_master_file
from tests.cluster.test_upkeep import COUNT, WAIT_S, RealCluster, data, has_looked, one_key, told
from tests.nic_offload.rig import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

IN_VAIN = (NodeUnavailable, DeadlineExceeded)  # by which call it ended
ADA, GRACE = domain_of("ada"), domain_of("grace")


@pytest.fixture(scope="module")
def world(module_folder: Path) -> Iterator[RealCluster]:
    master = module_folder / "master.key"
    new_master_file(master)
    with ExitStack() as stack:
        yield RealCluster(module_folder, stack, 3, ("--master-key", f"file:{master}"))


def put(world: RealCluster, domain: bytes, count: int = COUNT, *, node: str = "") -> list[bytes]:
    """Put blocks on their owners, or on one node."""
    client = world.client.nodes.at(node) if node else world.client
    keys = [in_domain(one_key(), domain) for _ in range(count)]
    results = client.put_many_inline([(key, data(key)) for key in keys], domain=domain)
    assert {one.error for one in results} == {None}
    return keys


def anywhere(world: RealCluster, keys: Sequence[bytes]) -> int:
    """The number of copies of these blocks on all nodes."""
    return sum(sum(world.there(node, list(keys))) for node in world.nodes)


def test_copies_are_in_the_erase_domain_of_their_block(tmp_path: Path) -> None:
    master = tmp_path / "master.key"
    new_master_file(master)
    with ExitStack() as stack:
        world = RealCluster(tmp_path, stack, 1, ("--master-key", f"file:{master}"))
        adas, plain = (put(world, domain, 4, node=world.nodes[0].target) for domain in (ADA, SHARED))
        second = world.add(tmp_path / "second")
        world.settled()
        wait_until(lambda: world.on_two([*adas, *plain]), "each is on both", WAIT_S)
        assert world.client.nodes.at(second.target).erase_user("ada").blocks == 4
        assert world.there(second, adas) == [False] * 4
        assert world.there(second, plain) == [True] * 4


def test_an_erased_user_is_removed_from_all_nodes_and_no_copy_restores_them(world: RealCluster) -> None:
    adas, graces = put(world, ADA), put(world, GRACE)
    home = world.client.nodes.of("ada")
    (mine, *_) = [
        key for key, found in zip(adas, home.exists(adas), strict=True) if isinstance(found, Stored)
    ]

    def is_ordered() -> bool:
        try:
            home.session("ada", "another").append([mine], tokens=1)
        except NodeUnavailable:  # and not done
            return False
        return True

    wait_until(is_ordered, "a new cluster's node orders sessions after five seconds", WAIT_S)
    (named,) = put(world, SHARED, 1, node=home.target)
    home.session("ada", "chat").append([named], tokens=1)
    wait_until(
        lambda: not any(told(node).upkeep.session_blocks_left for node in world.nodes),
        "the standby has the block of no domain",
        WAIT_S,
    )
    stored = anywhere(world, [*adas, named])
    assert stored - 2 * COUNT in {2, 3}, "the standby may be a third node for the other"
    done = world.client.erase_user("ada")
    assert len(done) == len(world.nodes)
    assert sum(one.blocks for one in done) == stored
    assert sum(one.sessions for one in done) == 4, "with their copies"
    said = [json.loads(one.receipt) for one in done]
    assert sum(one["overwritten"] for one in said) == 2, "the one of no domain"
    assert {one["how"] for one in said} == {"keys destroyed", "keys destroyed, the rest overwritten"}
    assert anywhere(world, [*adas, named]) == 0
    assert anywhere(world, graces) == 2 * COUNT
    for node in world.nodes:
        wait_until(lambda node=node: has_looked(node, 0), "it has looked at all", WAIT_S)  # type: ignore[misc]
    assert anywhere(world, [*adas, named]) == 0
    assert world.client.erase_user("ada")[0].blocks == 0
    again = put(world, ADA, 4)
    assert anywhere(world, again) == 8


def test_a_copy_that_arrives_after_an_erasure_is_refused(world: RealCluster) -> None:
    sender, receiver = world.nodes[:2]
    other = world.stranger(receiver, sender)
    plain = [one_key() for _ in range(2)]
    keys = [in_domain(plain[0], ADA), in_domain(plain[1], GRACE), one_key()]
    answer = other.offer(keys)
    world.client.nodes.at(receiver.target).erase_user("ada")
    taken = [
        other.copy(key, answer.ticket, domain=domain)
        for key, domain in zip(keys, (ADA, GRACE, SHARED), strict=True)
    ]
    assert taken == [False, True, True]


def test_copies_into_erased_domains_are_refused_for_a_while() -> None:
    clock = Clock()
    erasures = Erasures(clock)
    erasures.note(b"acme", ADA)
    erasures.note(b"umbrella", None)
    for domain in (ADA, GRACE):
        assert erasures.refuse_copies(b"acme", domain) is (domain == ADA)
        assert erasures.refuse_copies(b"umbrella", domain)
        assert not erasures.refuse_copies(b"globex", domain)
    clock.now_ms += ERASED_COPIES_REFUSED_MS - 1
    assert erasures.refuse_copies(b"acme", ADA)
    clock.now_ms += 1
    assert not erasures.refuse_copies(b"acme", ADA)
    assert not erasures.refuse_copies(b"umbrella", ADA)


class Clock(SystemClock):
    now_ms = 1_000_000

    def monotonic_ns(self) -> int:
        return self.now_ms * 1_000_000


def test_an_erasure_is_not_acknowledged_while_a_node_is_absent_or_has_another_map(
    world: RealCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = world.client.nodes.map
    gone = Member("of another folder", "127.0.0.1:1")
    with monkeypatch.context() as patch:
        with_absent = Map.of(now.revision, now.members, now.digest, now.placed_as, [gone])
        patch.setattr(type(world.client.nodes), "map", with_absent)
        with pytest.raises(NodeUnavailable, match="forget of another folder"):
            world.client.erase_user("nobody")
    with monkeypatch.context() as patch:
        patch.setattr(type(world.client.nodes), "map", Map.of(now.revision, now.members, now.digest ^ 1))
        with pytest.raises(IN_VAIN):
            world.client.erase_user("nobody", timeout_s=1)
    rounds: list[int] = []
    asked = Removals._asked
    monkeypatch.setattr("kvstore.client.cluster_removals.ERASE_ROUND_MS", -1)
    monkeypatch.setattr(Removals, "_asked", lambda *given: rounds.append(1) or asked(*given))  # type: ignore[func-returns-value]
    with pytest.raises(IN_VAIN):
        world.client.erase_user("nobody", timeout_s=0.5)
    assert len(rounds) > 1, "whoever was asked first may have taken copies again"


def test_an_erasure_of_which_a_node_of_an_earlier_version_can_not_say_enough_is_an_error_at_once(
    world: RealCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    user, old = ErasingCalls.user, world.nodes[0].target

    def erased(self: ErasingCalls, name: str, timeout_s: float) -> Erased:
        done = user(self, name, timeout_s)
        return done._replace(digests={0}) if self._node == old else done

    monkeypatch.setattr(ErasingCalls, "user", erased)
    began_s = time.monotonic()
    with pytest.raises(NodeUnavailable, match=f"{old} can't say by which map.* earlier version"):
        world.client.erase_user("nobody", timeout_s=10)
    assert time.monotonic() - began_s < 8


def test_the_command_erases_on_every_node_and_prints_each_receipt(world: RealCluster) -> None:
    keys = put(world, ADA, 4)
    asked = [
        sys.executable,
        "-m",
        "kvstore",
        "erase",
        "--user",
        "ada",
        "--json",
        "--node",
        world.nodes[0].target,
    ]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    receipts = [json.loads(line) for line in done.stdout.splitlines()]
    assert len({one["node"] for one in receipts}) == len(receipts) == len(world.nodes)
    asked.remove("--json")
    again = subprocess.run(asked, capture_output=True, text=True, timeout=60, check=True)
    said = {line.partition(": erased ")[0] for line in again.stdout.splitlines()}
    assert said == {node.target for node in world.nodes}
    assert anywhere(world, keys) == 0


def test_a_tenant_is_erased_on_every_node(world: RealCluster) -> None:
    keys = [*put(world, ADA, 8), *put(world, SHARED, 8)]
    with ClusterClient([world.nodes[0].target]) as client:
        assert sum(one.blocks for one in client.erase_tenant()) >= 2 * len(keys)
    assert anywhere(world, keys) == 0
