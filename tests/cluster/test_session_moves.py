"""Sessions follow their users on a real cluster: when a node joins, is drained, is lost and comes back."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING

import pytest

from kvstore.client import Client
from kvstore.client.block_calls import Stored
from kvstore.errors import KvError, NoSession
from kvstore.names import block_key
from kvstore.node.upkeep_service import Waited
from tests.cluster.ahead import made_ahead
from tests.cluster.test_sessions import keys as keys_of
from tests.cluster.test_upkeep import RealCluster, command, data, one_key
from tests.nic_offload.rig import wait_until
from tests.stopping import stop
from tests.storage.fakes import FakeClock

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from kvstore.client import Nodes
    from kvstore.demo.node_process import NodeProcess
    from tests.cluster.ahead import Ahead

WAIT_S = 60.0
USERS = [f"user {number}" for number in range(36)]  # some have their home at each of three nodes


class Conversations:
    """Users of a cluster, each with a session of two turns."""

    def __init__(self, world: RealCluster) -> None:
        self.world = world
        self.keys = {
            user: [block_key(b"moves", user.encode(), bytes([n])) for n in range(4)] for user in USERS
        }

    @property
    def nodes(self) -> Nodes:
        return self.world.client.nodes

    def begin(self) -> None:
        for user, keys in self.keys.items():
            self.put(user, keys)
            wait_until(lambda user=user: self.append(user, 0), "its home orders its sessions", WAIT_S)  # type: ignore[misc]
            self.nodes.session(user, "chat").append(self.keys[user][2:], tokens=16)

    def put(self, user: str, keys: list[bytes]) -> None:
        for key in keys:
            self.nodes.of(user).put_inline(key, data(key))

    def append(self, user: str, at: int) -> bool:
        try:
            return self.nodes.session(user, "chat").append(self.keys[user][at : at + 2], tokens=32) > 0
        except KvError:
            return False

    def homes(self) -> dict[str, str]:
        return {user: self.nodes.home(user) for user in USERS}

    def is_whole(self, user: str) -> bool:
        """Whether the user's home has the session and all of its blocks."""
        keys = self.keys[user]
        if keys_of(self.nodes, user) != keys:
            return False
        got = self.nodes.of(user).get_many_inline([(key, len(data(key))) for key in keys])
        return list(got) == [data(key) for key in keys]

    def turns(self, user: str) -> list[tuple[int, int]]:
        turns = self.nodes.session(user, "chat").info().turns
        return [(one.blocks.start, len(one.tokens)) for one in turns]


def begun(nodes: int, folder: Path, stack: ExitStack) -> Conversations:
    chats = Conversations(RealCluster(folder, stack, nodes))
    chats.begin()
    return chats


pairs = made_ahead("chats", partial(begun, 2))


@pytest.fixture
def chats(pairs: Ahead[Conversations]) -> Iterator[Conversations]:
    """Conversations on two nodes."""
    with pairs.one() as chats:
        yield chats


triples = made_ahead("chats_on_three", partial(begun, 3))


@pytest.fixture
def chats_on_three(triples: Ahead[Conversations]) -> Iterator[Conversations]:
    with triples.one() as chats:
        yield chats


def sessions_at(node: NodeProcess, user: str) -> list[bytes] | None:
    with Client(node.target) as client:
        try:
            return client.session(user, "chat").keys()
        except NoSession:
            return None


def test_a_node_that_joins_gets_its_users_sessions_without_a_command(chats: Conversations) -> None:
    before = chats.homes()
    joined = chats.world.add(chats.world.folder / "node2")
    chats.world.settled()
    moved = [user for user, home in chats.homes().items() if home != before[user]]
    assert moved
    for user in moved:
        assert chats.homes()[user] == joined.target
        wait_until(lambda user=user: sessions_at(joined, user) == chats.keys[user], "it has them", WAIT_S)  # type: ignore[misc]
    for user in USERS:
        wait_until(lambda user=user: chats.is_whole(user), "with their blocks", WAIT_S)  # type: ignore[misc]
        assert chats.turns(user) == [(0, 32), (2, 16)]


def test_a_drained_node_may_be_stopped_and_its_users_sessions_go_on(chats_on_three: Conversations) -> None:
    chats = chats_on_three
    world, before = chats.world, chats.homes()
    drained = world.nodes[0]
    moved = [user for user, home in before.items() if home == drained.target]
    assert moved
    shown = command("drain", drained.target)
    assert shown.stdout == f"The other nodes have all blocks of {drained.target}: it may be stopped.\n"
    drained.stop()
    world.nodes.remove(drained)
    world.settled()
    for user in USERS:
        assert chats.is_whole(user), user
        assert chats.turns(user) == [(0, 32), (2, 16)]
    later = one_key()
    chats.put(moved[0], [later])
    assert chats.nodes.session(moved[0], "chat").append([later], tokens=16) == 5


def test_a_drain_says_how_many_sessions_of_unknown_users_stay(chats_on_three: Conversations) -> None:
    chats = chats_on_three
    drained = chats.world.nodes[0]
    left = sum(home == drained.target for home in chats.homes().values())
    drained.kill()
    drained.start()
    chats.world.settled()
    said = command("drain", drained.target).stdout.splitlines()
    count, _, rest = said[1].partition(" ")
    assert rest.startswith(f"sessions of users who used none since {drained.target} started were not moved")
    assert int(count) >= left, "and copies of others' sessions"


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_sessions_of_a_lost_node_go_on_at_its_standby_and_follow_it_when_it_is_back(
    chats: Conversations, how: str
) -> None:
    world, user = chats.world, USERS[0]
    lost = next(node for node in world.nodes if node.target == chats.nodes.home(user))
    if how == "killed":
        lost.kill()
    else:
        stop(lost.pid)
    try:
        wait_until(lambda: keys_of(chats.nodes, user) == chats.keys[user], "its standby has all", WAIT_S)
        assert chats.nodes.home(user) != lost.target
        later = one_key()
        chats.put(user, [later])
        assert chats.nodes.session(user, "chat").append([later], tokens=8) == 5
    finally:
        if how == "killed":
            lost.start()
        else:
            os.kill(lost.pid, signal.SIGCONT)
    chats.keys[user].append(later)
    world.settled()
    wait_until(lambda: chats.nodes.home(user) == lost.target, "it is the home again", WAIT_S)
    wait_until(lambda: keys_of(chats.nodes, user) is not None, "it orders the user's sessions", WAIT_S)
    assert keys_of(chats.nodes, user) == chats.keys[user], "the last state, not its own old one"
    assert chats.turns(user) == [(0, 32), (2, 16), (4, 8)]


def test_a_block_deleted_after_a_move_stays_deleted_when_its_user_moves_back(chats: Conversations) -> None:
    world, before = chats.world, chats.homes()
    joined = world.add(world.folder / "node2")
    world.settled()
    user = next(user for user, home in chats.homes().items() if home != before[user])
    wait_until(lambda: chats.is_whole(user), "the joined node has it", WAIT_S)
    deleted = chats.keys[user][1]
    assert chats.nodes.of(user).delete([deleted]) == [True]
    assert command("drain", joined.target).returncode == 0
    assert chats.nodes.home(user) == before[user]
    wait_until(lambda: keys_of(chats.nodes, user) == chats.keys[user], "its first home has it", WAIT_S)
    found = chats.nodes.of(user).exists(chats.keys[user])
    assert [isinstance(one, Stored) for one in found] == [True, False, True, True]


def test_a_block_that_is_deleted_before_it_has_followed_its_session_is_unwanted() -> None:
    waited, names = Waited(FakeClock()), [(b"tenant", one_key()) for _ in range(3)]
    waited.lack(names)
    waited.add(names[1], waited.ticket(), 4096)
    waited.add(names[2], 7, 4096)
    waited.cancel(names[:2])
    assert list(waited.lacked) == names[2:]
    waited.take(names[2], 7)
    assert not waited.lacked


def test_more_blocks_of_moved_sessions_than_the_limit_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.node.upkeep_service.SESSIONS_MOVED_BLOCKS_MAX", 4)
    waited = Waited(FakeClock())
    assert waited.may_lack_more
    waited.lack((b"tenant", one_key()) for _ in range(9))
    assert len(waited.lacked) == 4
    assert not waited.may_lack_more


def test_a_session_without_blocks_follows_its_user_too(chats_on_three: Conversations) -> None:
    """To another home, and back. If it can't, none of the user's sessions is found."""
    chats, user = chats_on_three, USERS[0]
    home = chats.nodes.home(user)
    chats.nodes.session(user, "chat").fork("empty").truncate(0)
    assert command("drain", home).returncode == 0
    assert command("join", home).returncode == 0
    wait_until(lambda: chats.nodes.home(user) == home, "it is the home again", WAIT_S)
    wait_until(lambda: keys_of(chats.nodes, user) == chats.keys[user], "it has taken the sessions", WAIT_S)
    assert chats.nodes.session(user, "empty").keys() == []
