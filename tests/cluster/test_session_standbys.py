"""A user's sessions survive the loss of their home, on a real cluster that keeps two copies."""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

import pytest

from kvstore.client.block_calls import Stored
from kvstore.client.user_owners import UserOwners
from kvstore.errors import NoSession
from tests.cluster.ahead import made_ahead
from tests.cluster.test_session_moves import USERS, Conversations
from tests.cluster.test_sessions import keys as keys_of
from tests.cluster.test_upkeep import RealCluster, command, told
from tests.nic_offload.rig import wait_until
from tests.node.test_http import http_url, values
from tests.stopping import stop

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

    from kvstore.demo.node_process import NodeProcess
    from tests.cluster.ahead import Ahead

WAIT_S = 60.0


def begun(folder: Path, stack: ExitStack) -> Conversations:
    chats = Conversations(RealCluster(folder, stack, 3, ("--http", "127.0.0.1:0", "--ui")))
    chats.begin()
    return chats


triples = made_ahead("chats", begun)


def standbys_have_all(home: NodeProcess) -> bool:
    """Whether each of a home's lots has a standby, with all blocks of its sessions."""
    now = told(home).upkeep
    return now.lots_alone == now.session_blocks_left == 0


@pytest.fixture
def chats(triples: Ahead[Conversations]) -> Iterator[Conversations]:
    """Conversations on three nodes."""
    with triples.one() as chats:
        yield chats


def test_a_conversation_goes_on_with_hits_after_its_home_is_killed(chats: Conversations) -> None:
    world, home = chats.world, chats.homes()
    lost = next(node for node in world.nodes if node.target == home[USERS[0]])
    theirs = [user for user in USERS if home[user] == lost.target]
    chats.nodes.session(theirs[0], "gone").append(chats.keys[theirs[0]][:1], tokens=16)
    chats.nodes.session(theirs[0], "gone").remove()
    chats.nodes.session(theirs[0], "chat").fork("fork")
    chats.nodes.session(theirs[0], "chat").protect(2)
    deleted = chats.keys[theirs[-1]].pop()
    chats.nodes.session(theirs[-1], "chat").truncate(3)
    chats.nodes.session(theirs[-1], "other").append([deleted], tokens=16)
    wait_until(lambda: standbys_have_all(lost), "their blocks are at standbys", WAIT_S)
    assert chats.nodes.of(theirs[-1]).delete([deleted]) == [True]
    lost.kill()
    world.nodes.remove(lost)
    for user in theirs:
        wait_until(lambda user=user: keys_of(chats.nodes, user) is not None, "another home", WAIT_S)  # type: ignore[misc]
        assert keys_of(chats.nodes, user) == chats.keys[user]
        assert chats.is_whole(user)
        assert chats.turns(user) == [(0, 32), (2, 16 if user != theirs[-1] else 8)]
    assert chats.nodes.session(theirs[0], "fork").keys() == chats.keys[theirs[0]]
    with pytest.raises(NoSession):
        chats.nodes.session(theirs[0], "gone").keys()
    assert chats.nodes.session(theirs[0], "chat").unprotect(), "protection went with it"
    assert chats.nodes.session(theirs[-1], "other").keys() == [deleted]
    (found,) = chats.nodes.of(theirs[-1]).exists([deleted])
    assert not isinstance(found, Stored), "a deleted block is deleted at the standby"


def followed(world: RealCluster, home: NodeProcess) -> float:
    """How often a home has begun to send a lot's sessions to a standby."""
    of_nodes = [values(http_url(node)) for node in world.nodes if node is not home]
    return sum(one.get(("kvstore_call_seconds_count", "FollowSessions"), 0) for one in of_nodes)


@pytest.mark.parametrize("how", ["drained", "lost"])
def test_a_restarted_home_finds_another_standby_for_users_who_have_used_nothing_since(
    chats: Conversations, how: str
) -> None:
    world, homes = chats.world, chats.homes()
    home = next(node for node in world.nodes if node.target == homes[USERS[0]])
    theirs = [user for user in USERS if homes[user] == home.target]
    wait_until(lambda: standbys_have_all(home), "their blocks are at standbys", WAIT_S)
    before = followed(world, home)
    home.kill()
    home.start()
    standby = next(node for node in world.nodes if node is not home)
    if how == "drained":
        shown = command("drain", standby.target)
        assert shown.returncode == 0, shown.stderr
        standby.stop()
    else:
        wait_until(lambda: followed(world, home) >= before + len(theirs), "it knows its users", WAIT_S)
        standby.kill()
    world.nodes.remove(standby)
    world.settled()
    wait_until(lambda: told(home).upkeep.lots_alone == 0, "the other node is the standby", WAIT_S)
    home.kill()
    world.nodes.remove(home)
    for user in theirs:
        wait_until(lambda user=user: keys_of(chats.nodes, user) is not None, "another home", WAIT_S)  # type: ignore[misc]
        assert keys_of(chats.nodes, user) == chats.keys[user]


def test_a_home_keeps_a_standby_that_answers_it_whatever_a_client_says(chats: Conversations) -> None:
    user, world = USERS[0], chats.world
    owners = UserOwners(chats.nodes, chats.nodes._puts()._calls, user)
    wait_until(lambda: all(map(standbys_have_all, world.nodes)), "each lot has a standby", WAIT_S)
    both = owners.ask(WAIT_S)
    assert both is not None
    home, standby = both
    assert owners.ask(WAIT_S, standby) == both
    assert [told(node).upkeep.lots_alone for node in world.nodes] == [0, 0, 0]
    hung = next(node for node in world.nodes if node.target == standby)
    stop(hung.pid)
    try:
        now = owners.ask(WAIT_S, standby)
        assert now is not None
        assert home in now
        assert standby not in now
    finally:
        os.kill(hung.pid, signal.SIGCONT)
